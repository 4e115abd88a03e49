"""A federation's jobs are left alone: their cluster of origin decides where they run.

There is no federation without slurmdbd and a second cluster: `squeue-federation.json` was captured
in one. The other releases' documents are given what it adds (fed_mgr.c, `man squeue`: REVOKED).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recovery.actions import intents
from recovery.fleet import Membership
from recovery.incident import Incident
from recovery.slurm.base import Job
from recovery.slurm.documents import read_jobs
from recovery.stalls import Hang, Stall
from recovery.watch import Watch
from slurm_hooks.record import utc
from tests.incidents import (
    ENDED,
    NOW,
    POLICY,
    decided,
    epilog,
    failed,
    finding,
    job,
    log,
    running,
)

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


@pytest.mark.parametrize("release", ["22.05", "24.11", "26.05"])
@pytest.mark.parametrize(
    ("number", "federated"), [(67_043_328, False), (67_108_863, False), (67_108_865, True)]
)
def test_a_number_with_a_clusters_bits_is_a_federations_whatever_else_is_shown(
    release: str, number: int, federated: bool
) -> None:
    """The upper 6 bits of 32 are the cluster of origin's (slurm.h: MAX_JOB_ID)."""
    jobs = read_jobs(squeue(release, job_id=number))
    assert jobs[number].federated is federated


def test_its_nodes_are_judged_and_it_stays_as_it_ended() -> None:
    decision = decided(failed(job(federated=True), n3=[GPU]))
    assert (decision.job.verdict, decision.nodes[0].verdict) == ("leave", "drain")
    assert "a job of this cluster alone could have been restarted" in decision.would_change


GPU = finding("gpu.lost", gpu=3)
CRASH = log("program.exception", "ValueError: bad batch size")
STALL = Stall(80, NOW - 1000, 1000.0, 900.0, "its own cadence allows 15 min")
MEMBER = Membership("01KEVENT", "9 nodes and 6 jobs", ("n7",))


def gated(of: Job) -> Incident:
    """The incident of a job that n3's prolog has sent back: Slurm requeued it, and holds it."""
    closed = finding("hook.gate_closed")
    record = replace(epilog("n3", [GPU, closed], replace(of, restarts=0)), hook="prolog")
    waits = replace(of, state="PENDING", restarts=1, reason="launch failed requeued held")
    made = failed(replace(of, restarts=0), silent=of.nodes, extra=[record])
    return replace(made, job=waits, requeued=True)


def requeued(of: Job) -> Incident:
    """The incident of a job that Slurm has requeued by itself, for a node that it lost."""
    made = failed(replace(of, restarts=0), lost=["n3"], silent=["n3"])
    return replace(made, job=replace(of, state="PENDING", restarts=1), requeued=True)


def in_a_loop(of: Job) -> Incident:
    return running(replace(of, state="RUNNING", exit_code=0), hang=Hang(STALL, "n3: it waits"))


CASES: list[tuple[str, Callable[[Job], Incident], dict[str, Any], str, str]] = [
    # what happened, what else is known, the answer to a job of this cluster, and what is said
    ("its node broke", lambda of: failed(of, n3=[GPU]), {}, "requeue", "run it again without n3"),
    ("its program is wrong", lambda of: failed(of, n1=[CRASH]), {}, "hold", "would fail again"),
    ("nobody knows", lambda of: failed(of), {}, "requeue", "run it again"),
    ("a node was lost", lambda of: failed(replace(of, state="NODE_FAIL"), lost=["n3"],
     silent=["n3"]), {}, "requeue", "run it again without n3"),
    ("Slurm has requeued it", requeued, {}, "requeue", "run it again without n3"),
    ("our gate has sent it back", gated, {}, "requeue", "release it elsewhere"),
    ("it hangs", in_a_loop, {}, "requeue", "run it again"),
    ("it is one of many", lambda of: failed(of, n3=[finding("storage.error", file="/data")]),
     {"fleet": MEMBER}, "hold", "once it is mended"),
]  # fmt: skip


@pytest.mark.parametrize(("happens", "known", "verdict", "said"), [row[1:] for row in CASES],
                         ids=[row[0] for row in CASES])  # fmt: skip
def test_what_would_be_done_is_said_and_nothing_of_it_is_done(
    happens: Callable[[Job], Incident], known: dict[str, Any], verdict: str, said: str
) -> None:
    assert decided(happens(job()), **known).job.verdict == verdict
    decision = decided(happens(job(federated=True)), **known)
    assert decision.job.verdict == "leave"
    assert said in decision.job.reason
    assert decision.job.reason.endswith("where it runs is its federation's to say")
    kinds = {action.kind for action in intents(decision, utc(NOW))}
    assert kinds <= {"drain"}, "a node of this cluster is this cluster's"


def captured(name: str) -> Job:
    """The one job of an answer that was captured in a federation."""
    (one,) = read_jobs((CAPTURED / "22.05" / name).read_text()).values()
    return one


def test_jobs_of_a_real_federation_are_told_and_left_alone() -> None:
    there = captured("squeue-federation-sibling.json")
    assert (there.federated, there.pending, there.id >> 26) == (True, True, 1)
    here = captured("squeue-federation.json")
    assert (here.federated, here.state, here.id >> 26) == (True, "FAILED", 1)
    one = replace(here, nodes=("n1",), submit_time=0, start_time=0, end_time=int(ENDED))
    decision = decided(failed(one, n1=[GPU]))
    assert (decision.job.verdict, decision.nodes[0].verdict) == ("leave", "drain")
    assert {one.kind for one in intents(decision, utc(NOW))} == {"drain"}


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
    watch.ready({one.id: one}, lambda *_: False, NOW, NOW, NOW)
    later = NOW + POLICY.gather_max
    ready = watch.ready({one.id: one}, lambda *_: False, later, later, later)
    assert [each.job.id for each in ready] == [one.id] * is_decided
