"""What is decided and done is about the right attempt, or it is not done: numbers come again.

A real cluster whose slurmctld is made to forget all jobs (its saved state is taken away), which
then gives the same numbers out again; and a second cluster's records in the same spool.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from recovery.demo.cluster import Cluster
from slurm_hooks.record import RecordJob
from tests import failing_job, records
from tests.failing_job import (
    ACT,
    NOBODY,
    SLURM_CONF,
    WAIT_SECONDS,
    FailingJob,
    submit,
    tidy,
    wait_for_a_full_look,
)

pytestmark = pytest.mark.slurm

FIRST_JOB = 41


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    extra = f"{SLURM_CONF}\nFirstJobId={FIRST_JOB}\nMaxJobId={FIRST_JOB + 20}"
    with Cluster(3, 8, config=ACT, slurm_conf_extra=extra, health_check_seconds=0) as running:
        yield running


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    tidy(shared)


def forget_all_jobs(cluster: Cluster) -> None:
    """Let slurmctld lose its jobs, as MinJobAge does to old ones, and count from the start."""
    cluster.stop_node("slurmctld")
    for path in cluster.layout.controller_log.parent.glob("job_state*"):
        path.unlink()
    cluster.restart_controller()
    cluster.wait(
        lambda: not {"*", "u"} & set(cluster.run("sinfo", "--noheader", "--format=%t").stdout),
        WAIT_SECONDS,
        "no node is unknown (unk) or silent (*) any more",
    )


def about(cluster: Cluster, job: FailingJob) -> list[dict[str, Any]]:
    """The decisions on jobs of that number."""
    return [
        one
        for one in failing_job.decisions(cluster)
        if (one["attempt"] or {}).get("job_id") == job.id
    ]


def failed_unseen(cluster: Cluster) -> tuple[FailingJob, str]:
    """A job that loses a GPU while no aggregator runs; its epilog has reported."""
    job = submit(cluster)
    incoming = cluster.spool / "incoming"
    before = len(list(incoming.glob("*.json")))
    bad = job.lose_gpu()
    job.wait_for("FAILED")
    cluster.wait(
        lambda: len(list(incoming.glob("*.json"))) > before, WAIT_SECONDS, "its epilog reports"
    )
    return job, bad


def new_job_of_that_number(cluster: Cluster, number: int, *options: str) -> FailingJob:
    """A job under a number that another one had, once slurmctld has forgotten that one."""
    forget_all_jobs(cluster)
    # Within the second of a job's end slurmd starts no other of its number ("already killed").
    forgotten = int(time.time())
    cluster.wait(lambda: time.time() >= forgotten + 2, WAIT_SECONDS, "a later second")
    while (job := submit(cluster, *options)).id < number:
        cluster.run("scancel", str(job.id))
    assert job.id == number
    return job


def test_a_job_that_slurm_has_forgotten_gets_its_decision_and_its_node_is_drained(
    cluster: Cluster,
) -> None:
    job, bad = failed_unseen(cluster)
    forget_all_jobs(cluster)
    with cluster.aggregator():
        decision = job.decision()
    assert decision["job"]["verdict"] == "leave"
    assert "Slurm has forgotten the job already" in decision["job"]["reason"]
    assert decision["cause"]["fault_class"] == "hardware.gpu"
    assert failing_job.actions(decision) == {f"drain {bad}": "verified"}
    with cluster.aggregator():
        wait_for_a_full_look(cluster)
    assert len(about(cluster, job)) == 1, "it is not decided again"


def test_a_job_that_was_given_the_number_of_a_failed_one_is_left_alone(cluster: Cluster) -> None:
    old, bad = failed_unseen(cluster)
    new = new_job_of_that_number(cluster, old.id, f"--exclude={bad}")
    with cluster.aggregator():
        wait_for_a_full_look(cluster)
        before = cluster.mutations()
        wait_for_a_full_look(cluster)
        assert (new.state, new.shown()["Restarts"], new.attempts()) == ("RUNNING", "0", 1)
        changed = cluster.mutations() - before  # the bad node's drain may come now: it is right
        assert not [request for request in changed if "JOB" in request]
        new.fail("exit 1")
        cluster.wait(new.finished, WAIT_SECONDS, "what then befalls the new one is its own")
        decision = about(cluster, new)[-1]
    assert decision["cause"]["fault_class"] == "unknown"


def test_a_restarted_job_that_slurm_forgets_has_its_outcome_and_a_new_one_of_its_number_none(
    cluster: Cluster,
) -> None:
    def outcomes() -> list[str]:
        return [one["state"] for one in about(cluster, job)[0]["outcomes"]]

    with cluster.aggregator():
        job = submit(cluster)
        (job.folder / "always").touch()
        job.fail("rm fail; exit 1")
        job.decision()
        cluster.wait(lambda: outcomes() == ["restarted"], WAIT_SECONDS, "it runs again")
        new = new_job_of_that_number(cluster, job.id)
        cluster.wait(lambda: len(outcomes()) > 1, WAIT_SECONDS, "its end is told")
        new.fail("exit 93")
        new.wait_for("FAILED")
        wait_for_a_full_look(cluster)
    # Its nodes may have told of its end before the aggregator looked at Slurm again.
    assert outcomes() in (["restarted", "lost"], ["restarted", "failed_again"])
    assert len(about(cluster, job)) == 2, "the new one's decision is its own"


def test_what_another_cluster_reports_into_the_same_spool_is_not_about_our_jobs_and_nodes(
    cluster: Cluster,
) -> None:
    with cluster.aggregator():
        job = submit(cluster)
        node, before = job.node, cluster.mutations()
        told = RecordJob(job.id, 0, "nobody", NOBODY, "train", node, exit="9:0")
        records.drop(cluster.spool, replace(records.record(node, cluster="other"), job=told))
        incoming = cluster.spool / "incoming"
        cluster.wait(lambda: not list(incoming.glob("*.json")), WAIT_SECONDS, "it is taken in")
        wait_for_a_full_look(cluster)
        assert not cluster.mutations() - before
        assert job.state == "RUNNING"
        job.fail("exit 1")
        decision = job.decision()
        cluster.wait(job.finished, WAIT_SECONDS, "it runs again, and finishes")
    assert decision["cause"]["fault_class"] == "unknown", "their evidence is not ours"
    assert "DRAIN" not in cluster.node(node)["State"]
