"""A restart into a full queue, on a real Slurm: what Slurm says late is heard, and owned up to.

A job behind others has a reason of its own kind (Priority), and what its excluded nodes leave of
the cluster shows only when its turn comes, long after the restart has been verified.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from recovery.demo.cluster import Cluster
from tests.failing_job import (
    ACT,
    SLURM_CONF,
    WAIT_SECONDS,
    FailingJob,
    decisions,
    submit,
    tidy,
    wait_for_a_full_look,
)

pytestmark = pytest.mark.slurm

ONLY = "n1"
"""The one node that has what the job asks for."""

EXTRA = f"""{SLURM_CONF}
# With two jobs the queue is longer than the backfill scheduler looks (bf_max_job_test, else 500).
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,bf_max_job_test=1
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with Cluster(3, 8, config=ACT, slurm_conf_extra=EXTRA, health_check_seconds=0) as running:
        running.run("scontrol", "update", f"nodename={ONLY}", "availablefeatures=special")
        running.run("scontrol", "update", f"nodename={ONLY}", "activefeatures=special")
        yield running


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    tidy(shared)


def restarted_behind_others(cluster: Cluster) -> tuple[FailingJob, FailingJob]:
    """A job that waits for its restart behind another one, which is returned as well."""
    job = submit(cluster, "--constraint=special")
    for node in cluster.node_names:
        if node != ONLY:
            submit(cluster, f"--nodelist={node}", comment="")
    rival = submit(cluster, "--nodes=2", f"--exclude={ONLY}", comment="", wait=False)
    cluster.run("scontrol", "update", f"job={rival.id}", "priority=4294950000")
    assert job.lose_gpu() == ONLY
    decision = job.decision()
    assert requeue(decision)["state"] == "verified", "Slurm has taken it, behind the others"
    assert requeue(decision)["detail"] == f"eligible at once, off {ONLY}"
    return job, rival


def requeue(decision: dict[str, Any]) -> dict[str, Any]:
    (action,) = (one for one in decision["actions"] if one["kind"] == "requeue")
    return dict(action)


def test_nodes_that_turn_out_too_few_when_its_turn_comes_are_given_back_and_its_owner_is_told(
    cluster: Cluster,
) -> None:
    with cluster.aggregator():
        job, rival = restarted_behind_others(cluster)
        wait_for_a_full_look(cluster)
        assert (job.state, job.shown()["ExcNodeList"]) == ("PENDING", ONLY)
        assert job.shown()["Reason"] in ("Priority", "Resources"), "nobody has looked at it yet"
        cluster.run("scancel", str(rival.id))

        def given_up() -> bool:
            known = {one["id"]: one for one in decisions(cluster)}
            return bool(requeue(known[job.decision()["id"]])["state"] == "failed")

        cluster.wait(given_up, WAIT_SECONDS, "the exclusion is taken back")
        shown = job.shown()
        status = " ".join(cluster.run("recovery", "status").stdout.split())
    why = f"no node is left for it without {ONLY} (BadConstraints)"
    assert (shown["JobState"], shown["Reason"]) == ("PENDING", "JobHeldUser")
    assert shown["ExcNodeList"] == "(null)", "its own list, which was empty, is back"
    assert why in shown["AdminComment"]
    assert shown["AdminComment"].endswith(f"To run it all the same: scontrol release {job.id}")
    assert f"job {job.id}" in status
    assert f"an action failed: {why}" in status
    cluster.mend_gpus(ONLY)
    cluster.run("scontrol", "update", f"nodename={ONLY}", "state=resume")
    owner = "nobody" if os.geteuid() == 0 else None
    cluster.run("scontrol", "release", str(job.id), user=owner)
    cluster.wait(job.finished, WAIT_SECONDS, "released by its owner, it runs on the mended node")
