"""A federation's jobs are left alone: their cluster of origin decides where they run.

There is no federation without slurmdbd and a second cluster; squeue's documents, captured on real
daemons, are given what it adds to them (fed_mgr.c, `man squeue`: REVOKED).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recovery.slurm.documents import read_jobs
from recovery.watch import Watch
from tests.incidents import ENDED, NOW, POLICY, decided, epilog, failed, finding, job

CAPTURED = Path(__file__).parent / "data" / "slurm"


def squeue(release: str, **added: Any) -> str:
    """Return a captured answer whose failed job is another one."""
    document = json.loads((CAPTURED / release / "squeue.json").read_text())
    (one,) = (fields for fields in document["jobs"] if fields["name"] == "failed")
    one.update(added)
    return json.dumps(document)


@pytest.mark.parametrize("release", ["22.05", "24.11", "26.05"])
def test_a_job_that_belongs_to_a_federation_is_known_as_such_in_each_release(release: str) -> None:
    def failed_one(**added: Any) -> bool:
        jobs = read_jobs(squeue(release, **added))
        return next(one.federated for one in jobs.values() if one.name == "failed")

    assert failed_one() is False
    assert failed_one(federation_origin="east", federation_siblings_active="east,west") is True


def test_its_nodes_are_judged_and_it_stays_as_it_ended() -> None:
    decision = decided(failed(job(federated=True), n3=[finding("gpu.lost", gpu=3)]))
    assert (decision.job.verdict, decision.nodes[0].verdict) == ("leave", "drain")
    assert "a job of this cluster alone could have been restarted" in decision.would_change


@pytest.mark.parametrize(
    ("state", "is_decided"),
    [
        (["FAILED"], True),
        (["FAILED", "REVOKED"], False),
        (["CANCELLED", "REVOKED"], False),
        (["REVOKED"], False),
    ],
)
def test_a_sibling_that_was_revoked_is_not_decided_on(state: list[str], is_decided: bool) -> None:
    """Another cluster has started the job: here nothing has failed."""
    jobs = read_jobs(squeue("24.11", job_state=state))
    found = next(one for one in jobs.values() if one.name == "failed")
    one = replace(found, submit_time=0, end_time=int(ENDED), nodes=("n1",))
    watch = Watch(POLICY, 0.0)
    watch.note(epilog("n1", of=one))
    watch.ready({one.id: one}, lambda *_: False, NOW, NOW)
    later = NOW + POLICY.gather_max
    ready = watch.ready({one.id: one}, lambda *_: False, later, later)
    assert [each.job.id for each in ready] == [one.id] * is_decided
