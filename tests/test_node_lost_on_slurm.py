"""A node that Slurm loses: the restart that Slurm makes by itself is adopted, not repeated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from recovery.demo.cluster import Cluster
from tests.failing_job import (
    ACT,
    SLURM_CONF,
    WAIT_SECONDS,
    submit,
    tidy,
    wait_for_a_full_look,
)

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3, 8, config=ACT, slurm_conf_extra=SLURM_CONF, health_check_seconds=0) as running:
        yield running


def test_a_job_whose_node_is_lost_runs_again_without_it_and_without_a_requeue_of_ours(
    cluster: Cluster,
) -> None:
    with cluster.aggregator() as service:
        job = submit(cluster)
        cluster.wait(lambda: job.state == "RUNNING", WAIT_SECONDS, "it runs")
        lost = job.node
        passes = service.said().count("decided")
        # What a full look has seen running is known to have been lost when it runs no longer.
        wait_for_a_full_look(cluster)
        before = cluster.mutations()
        cluster.run("scontrol", "update", f"nodename={lost}", "state=down", "reason=power")
        cluster.wait(job.finished, WAIT_SECONDS, "it finishes elsewhere")
        decision = job.decision()
        changed = cluster.mutations() - before
        assert service.said().count("decided") == passes + 1
    assert job.node != lost
    assert decision["cause"]["fault_class"] == "node.lost"
    assert decision["requeued"]
    assert decision["job"]["excluded"] == [lost]
    assert [(node["node"], node["verdict"]) for node in decision["nodes"]] == [(lost, "watch")]
    assert changed["REQUEST_JOB_REQUEUE"] == 0, "Slurm has requeued it already"
    assert cluster.node(lost)["Reason"].startswith("power"), "the person's reason stands"
    tidy(cluster)


def test_a_job_that_a_person_requeues_is_left_to_them(cluster: Cluster) -> None:
    with cluster.aggregator() as service:
        job = submit(cluster)
        cluster.wait(lambda: job.state == "RUNNING", WAIT_SECONDS, "it runs")
        wait_for_a_full_look(cluster)
        cluster.run("scontrol", "requeue", str(job.id))
        cluster.wait(lambda: job.shown()["Restarts"] == "1", WAIT_SECONDS, "it is requeued")
        before = cluster.mutations()
        wait_for_a_full_look(cluster)
        assert not cluster.mutations() - before
        assert f"job {job.id}" not in service.said()
    cluster.run("scancel", str(job.id))
    tidy(cluster)
