"""On a real Slurm: automation stops when a person says so, and by itself when it does too much."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator

import pytest

from recovery.decision import Action, JobAnswer, NodeAnswer
from recovery.demo.cluster import Cluster
from recovery.journal import Journal
from recovery.slurm.cli import CliScheduler
from slurm_hooks.record import utc
from tests import records
from tests.failing_job import (
    ACT,
    SLURM_CONF,
    WAIT_SECONDS,
    actions,
    aggregator_here,
    decisions,
    submit,
    tidy,
)

pytestmark = pytest.mark.slurm

REQUEUE = "REQUEST_JOB_REQUEUE"
NODE = "REQUEST_UPDATE_NODE"


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with Cluster(4, 8, config=ACT, slurm_conf_extra=SLURM_CONF, health_check_seconds=0) as running:
        yield running


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    tidy(shared)
    shared.configure(ACT)


def test_a_pause_is_in_force_at_once_and_what_was_decided_meanwhile_stays_recorded(
    cluster: Cluster,
) -> None:
    with cluster.aggregator():
        job = submit(cluster)
        cluster.run("recovery", "pause", "--why", "a power cut is near")
        before = cluster.mutations()
        bad = job.lose_gpu()
        decision = job.decision()
        changed = cluster.mutations() - before
        assert (changed[REQUEUE], changed[NODE]) == (0, 0)
        assert set(actions(decision).values()) == {"recorded"}
        why = f"drain {bad}: paused by root since"
        assert decision["limited_by"][0].startswith(why.replace("root", _me(cluster)))
        assert "a power cut is near" in decision["limited_by"][0]
        cluster.run("recovery", "resume", "--why", "the cut is off")
        second = submit(cluster, wait=True)
        second.lose_gpu()
        cluster.wait(second.finished, WAIT_SECONDS, "the next job is recovered again")
    assert job.state == "FAILED", "nothing comes as a surprise once the pause has ended"


def _me(cluster: Cluster) -> str:
    return cluster.run("id", "--user", "--name").stdout.strip()


def test_a_paused_node_is_left_alone_while_its_job_is_recovered(cluster: Cluster) -> None:
    with cluster.aggregator():
        job = submit(cluster)
        bad = job.node
        cluster.run("recovery", "pause", "--node", bad, "--why", "ann looks at its fans")
        job.lose_gpu(bad)
        cluster.wait(job.finished, WAIT_SECONDS, "it finishes elsewhere")
        decision = job.decision()
        cluster.run("recovery", "resume", "--node", bad, "--why", "done")
    assert actions(decision) == {f"drain {bad}": "recorded", f"requeue {job.id}": "verified"}
    assert "DRAIN" not in cluster.node(bad)["State"]
    assert job.node != bad


class PausedMeanwhile(CliScheduler):
    """Slurm itself; somebody pauses everything just after the first node has been drained."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(environment=cluster.environment)
        self._cluster = cluster

    def drain(self, nodes: Collection[str], reason: str) -> None:
        super().drain(nodes, reason)
        self._cluster.run("recovery", "pause", "--why", "that was the wrong rack")


def test_a_pause_is_in_force_before_the_next_command_also_of_what_was_planned_before_it(
    cluster: Cluster,
) -> None:
    journal = Journal(cluster.folder / "state" / "journal")
    for node in ("n3", "n4"):
        made = records.decision(
            f"01KDRAIN{node}",
            job_id=None,
            job=JobAnswer("leave", "no job"),
            nodes=(NodeAnswer(node, "drain", "its card has failed"),),
            actions=(Action("drain", node, "planned", utc()),),
        )
        journal.append({"time": utc(), "type": "decision", "decision": made.to_dict()})
    with aggregator_here(cluster, PausedMeanwhile(cluster)) as aggregator:
        for _ in range(3):
            aggregator.pass_once()
    cluster.run("recovery", "resume", "--why", "the right one now")
    states = {node: cluster.node(node)["State"] for node in ("n3", "n4")}
    assert ["DRAIN" in state for state in states.values()] == [True, False]
    known = {one["id"]: one["actions"] for one in decisions(cluster)}
    ((first,), (second,)) = (known["01KDRAINn3"], known["01KDRAINn4"])
    assert first["state"] == "verified", "what was sent before the pause is still looked at"
    assert (second["state"], second["step"]) == ("abandoned", "")
    assert second["detail"].startswith(f"paused by {_me(cluster)} since ")
    assert second["detail"].endswith(": that was the wrong rack")


def test_too_many_requeues_in_an_hour_stop_requeues_and_nothing_else(cluster: Cluster) -> None:
    ran = sum(
        action["kind"] == "requeue" and action["state"] == "verified"
        for one in decisions(cluster)
        for action in one["actions"]
    )
    limit = f"max_requeues_per_hour = {ran + 1}"
    cluster.configure(ACT.replace("max_requeues_per_hour = 1000", limit))
    with cluster.aggregator() as service:
        first = submit(cluster)
        first.lose_gpu()
        cluster.wait(first.finished, WAIT_SECONDS, "one requeue is within the limit")
        second = submit(cluster)
        bad = second.lose_gpu()
        decision = second.decision()
        assert actions(decision)[f"requeue {second.id}"] == "abandoned"
        assert actions(decision)[f"drain {bad}"] == "verified", "drains go on"
        why = f"{ran + 1} jobs were requeued within an hour, max_requeues_per_hour allows no more"
        assert why in json.dumps(decision["actions"])
        assert second.state == "FAILED"
        third = submit(cluster)
        third.lose_gpu()
        told = json.dumps(third.decision()["actions"])
        assert "the circuit breaker is open since" in told
        status = cluster.run("recovery", "status").stdout
        assert "BREAKER     requeue: " in status
        assert service.said().count(f"circuit breaker: {why}") == 1
        closed = cluster.run("recovery", "resume", "--why", "a bad container image, withdrawn")
        assert closed.stdout == "requeue: closed\n"


def test_nodes_drained_for_one_reason_are_drained_by_one_command(cluster: Cluster) -> None:
    with cluster.aggregator():
        job = submit(cluster, "--nodes=3")
        bad = sorted(cluster.scheduler().jobs([job.id])[job.id].nodes)
        for node in bad:
            cluster.set_gpus(node, {"count": 0})
        before = cluster.mutations()
        job.fail("exit 1")
        decision = job.decision()
        changed = cluster.mutations() - before
    drains = {f"drain {node}": "verified" for node in bad}
    assert drains.items() <= actions(decision).items()
    assert changed[NODE] == 1, "one command for all three"
    reasons = {cluster.node(node)["Reason"].partition(" [")[0] for node in bad}
    assert len(reasons) == 1
