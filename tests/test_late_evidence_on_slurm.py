"""On a real Slurm: what is learnt after a decision, and about whom."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from recovery.demo.cluster import Cluster
from slurm_hooks.record import FaultRecord
from tests import records
from tests.failing_job import (
    ACT,
    MONITOR,
    OPTED_IN,
    SLURM_CONF,
    WAIT_SECONDS,
    FailingJob,
    actions,
    decisions,
    submit,
    tidy,
    wait_for_a_full_look,
)
from tests.incidents import finding

pytestmark = pytest.mark.slurm

REQUEUE = "REQUEST_JOB_REQUEUE"


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with Cluster(3, 8, config=ACT, slurm_conf_extra=SLURM_CONF, health_check_seconds=0) as running:
        yield running


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    next_second()
    yield shared
    tidy(shared)
    shared.configure(ACT)


def next_second() -> None:
    """Slurm's times are whole seconds: what came before it is told apart from what comes now."""
    time.sleep(1.1)


def failed_for_no_known_cause(
    cluster: Cluster, comment: str = OPTED_IN
) -> tuple[FailingJob, str, dict[str, Any]]:
    """A job that has failed, its node, and the decision on it."""
    job = submit(cluster, comment=comment)
    node = job.node
    job.fail("exit 1")
    decision = job.decision()
    assert decision["cause"]["fault_class"] == "unknown"
    return job, node, decision


def seen_by_a_health_check(cluster: Cluster, node: str) -> FaultRecord:
    """Let the node's health check see that memory of a GPU cannot be trusted any more."""
    seen = finding("gpu.ecc_uncontained", "NVRM: Xid 95", gpu=3)
    record = records.record(
        node, job=None, hook="health_check", findings=(seen,), cluster="private"
    )
    records.drop(cluster.spool, record)
    return record


def in_the_place_of(cluster: Cluster, former: dict[str, Any]) -> list[dict[str, Any]]:
    """The decisions that revise a former one."""
    return [one for one in decisions(cluster) if one["revises"] == former["id"]]


def test_late_evidence_puts_another_decision_in_the_place_of_one_not_acted_on(
    cluster: Cluster,
) -> None:
    cluster.configure(MONITOR)
    with cluster.aggregator():
        job, node, first = failed_for_no_known_cause(cluster)
        seen_by_a_health_check(cluster, node)
        (second,) = cluster.wait(
            lambda: in_the_place_of(cluster, first), WAIT_SECONDS, "a decision revises it"
        )
        assert second["cause"]["fault_class"] == "hardware.gpu"
        told = cluster.run("recovery", "explain", str(job.id)).stdout
    words = " ".join(told.split())
    assert f"in the place of {first['id']}, for what was learnt since" in words
    assert f"revised by {second['id']}: evidence came late" in words


def test_what_was_only_recorded_moves_no_job_once_a_grant_has_come(cluster: Cluster) -> None:
    """Its owner may have taken care of it since; a sick node is drained all the same."""
    cluster.configure(MONITOR)
    with cluster.aggregator():
        job, node, first = failed_for_no_known_cause(cluster)
    before = cluster.mutations()
    cluster.configure(ACT)
    with cluster.aggregator():
        wait_for_a_full_look(cluster)
        seen_by_a_health_check(cluster, node)
        cluster.wait(lambda: "DRAIN" in cluster.node(node)["State"], WAIT_SECONDS, "it is drained")
        (second,) = cluster.wait(
            lambda: in_the_place_of(cluster, first),
            WAIT_SECONDS,
            "a decision revises the former one",
        )
        assert actions(second) == {f"drain {node}": "verified", f"requeue {job.id}": "recorded"}
        assert (cluster.mutations() - before)[REQUEUE] == 0
    (requeue,) = (one for one in second["actions"] if one["kind"] == "requeue")
    assert requeue["detail"].startswith(f"{first['id']} was only recorded")


def test_late_evidence_is_added_to_a_decision_that_was_acted_on(cluster: Cluster) -> None:
    with cluster.aggregator():
        job = submit(cluster, "--nodes=2")
        nodes = sorted(cluster.scheduler().jobs([job.id])[job.id].nodes)
        job.fail("/usr/bin/python3 -c 'raise ValueError(\"no such layer\")'")
        first = job.decision()
        assert actions(first) == {f"hold {job.id}": "verified"}
        seen_by_a_health_check(cluster, nodes[1])

        def added() -> list[str]:
            known = {one["id"]: one for one in decisions(cluster)}
            return list(known[first["id"]]["addenda"])

        (text,) = cluster.wait(added, WAIT_SECONDS, "an addendum is written")
        assert text.startswith("evidence came late and says hardware.gpu, established:")
        assert text.endswith(f"the answer would be requeue, drain {nodes[1]}")
        cluster.wait(
            lambda: "DRAIN" in cluster.node(nodes[1])["State"], WAIT_SECONDS, "it is drained"
        )
        assert "later: evidence came late" in cluster.run("recovery", "explain", first["id"]).stdout
        assert in_the_place_of(cluster, first) == []


def test_what_befalls_a_node_under_its_next_job_is_not_told_of_the_former_one(
    cluster: Cluster,
) -> None:
    with cluster.aggregator():
        _, node, first = failed_for_no_known_cause(cluster, comment="recovery=off")
        following = submit(cluster, f"--nodelist={node}")
        next_second()
        record = seen_by_a_health_check(cluster, node)
        cluster.wait(
            lambda: [one for one in decisions(cluster) if record.id in _records_of(one)],
            WAIT_SECONDS,
            "the node's fault is decided on",
        )
        following.fail("exit 0")
    (of_the_node,) = [one for one in decisions(cluster) if record.id in _records_of(one)]
    assert of_the_node["incident"] == f"node/{node}"
    assert in_the_place_of(cluster, first) == []
    (first,) = [one for one in decisions(cluster) if one["id"] == first["id"]]
    assert first["addenda"] == []


def _records_of(decision: dict[str, Any]) -> set[str]:
    return {one["record"] for one in decision["evidence"]}


def test_a_node_accused_in_monitor_mode_and_mended_since_is_not_drained_for_it_later(
    cluster: Cluster,
) -> None:
    cluster.configure(MONITOR)
    with cluster.aggregator():
        job = submit(cluster, "--nodes=2")
        accused, other = sorted(cluster.scheduler().jobs([job.id])[job.id].nodes)
        job.lose_gpu(accused)
        first = job.decision()
        assert actions(first)[f"drain {accused}"] == "recorded"
        cluster.mend_gpus(accused)
    cluster.configure(ACT)
    with cluster.aggregator():
        wait_for_a_full_look(cluster)
        seen_by_a_health_check(cluster, other)
        cluster.wait(lambda: "DRAIN" in cluster.node(other)["State"], WAIT_SECONDS, "it is drained")
        (second,) = cluster.wait(
            lambda: in_the_place_of(cluster, first), WAIT_SECONDS, "a decision revises it"
        )
    assert actions(second) == {
        f"drain {accused}": "recorded",
        f"drain {other}": "verified",
        f"requeue {job.id}": "recorded",
    }
    assert "DRAIN" not in cluster.node(accused)["State"]
