"""On a real Slurm: a node with a bad history is avoided, then drained, and its reason tells it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from recovery.decision import Cause, Implicated, JobAnswer, NodeAnswer
from recovery.demo.cluster import Cluster
from recovery.journal import Journal
from slurm_hooks.record import utc
from tests import records
from tests.failing_job import ACT, SLURM_CONF, WAIT_SECONDS, actions, decisions, submit

pytestmark = pytest.mark.slurm

DAY = 86400.0

AVOIDED = "\n[offenders]\ndrain_chance = 1e-9\n"
"""What it takes to be drained is out of reach; what it takes to be avoided is not."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3, 8, config=ACT, slurm_conf_extra=SLURM_CONF, health_check_seconds=0) as running:
        yield running


def remember(cluster: Cluster, node: str, days: int) -> None:
    """Let the journal tell that a node's network card has failed once a day, for days."""
    journal = Journal(cluster.folder / "state" / "journal")
    for day in range(days, 0, -1):
        when = utc(time.time() - day * DAY)
        why = "its card has failed"
        made = records.decision(
            f"01KOLD{day}",
            job_id=None,
            time=when,
            cause=Cause("network.fabric", "established", why, (Implicated(node, why, "fabric"),)),
            job=JobAnswer("leave", "no job has failed of it"),
            nodes=(NodeAnswer(node, "watch", why),),
        )
        journal.append({"time": when, "type": "decision", "decision": made.to_dict()})


def test_a_node_that_fails_day_after_day_is_avoided_and_at_last_drained_with_its_history(
    cluster: Cluster,
) -> None:
    remember(cluster, "n2", 4)
    cluster.configure(ACT + AVOIDED)
    with cluster.aggregator():
        job = submit(cluster)
        job.fail("exit 1")
        decision = job.decision()
        cluster.wait(job.finished, WAIT_SECONDS, "it finishes")
    assert decision["cause"]["fault_class"] == "unknown"
    assert decision["job"]["excluded"] == ["n2"]
    assert job.shown()["ExcNodeList"] == "n2"
    assert any("n2 is a repeat offender" in text for text in decision["considered"])
    assert "DRAIN" not in cluster.node("n2")["State"]
    told = json.loads(cluster.run("recovery", "nodes", "n[1-2]", "--json").stdout)["nodes"]
    scores = {one["node"]: one["score"] for one in told}
    assert scores["n2"]["avoided_above"] < scores["n2"]["evidence"] < scores["n2"]["drained_above"]
    assert scores["n2"]["times_chance"] > 2

    cluster.configure(ACT)
    with cluster.aggregator():
        cluster.wait(lambda: "DRAIN" in cluster.node("n2")["State"], WAIT_SECONDS, "n2 is drained")
    (drained,) = [one for one in decisions(cluster) if one["incident"] == "node/n2"]
    assert actions(drained) == {"drain n2": "verified"}
    reason = cluster.node("n2")["Reason"]
    assert reason.startswith(f"recovery: {drained['id']}: a repeat offender: ")
    assert "4 faults of its own since" in reason
    for node in ("n1", "n3"):
        assert "DRAIN" not in cluster.node(node)["State"]


ADDRESS = "0000:3b:00.0"
ILLEGAL = "NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, MMU Fault: ENGINE GRAPHICS"


@pytest.mark.parametrize(("uids", "node", "blamed"), [((1, 2), "n1", True), ((1,), "n3", False)])
def test_the_same_xid_of_three_users_programs_on_one_gpu_blames_the_gpu(
    cluster: Cluster, uids: tuple[int, ...], node: str, blamed: bool
) -> None:
    with cluster.aggregator():
        others = [name for name in cluster.node_names if name != node]
        job = submit(cluster, f"--exclude={','.join(others)}")
        journal = Journal(cluster.folder / "state" / "journal")
        for uid in uids:
            why = "an illegal access"
            item = Implicated(node, why, "kernel_log", "gpu.application_fault", pci=ADDRESS)
            made = records.decision(
                f"01KXID{node}{uid}",
                job_id=9000 + uid,
                uid=uid,
                cause=Cause("program.gpu_fault", "probable", why, (item,)),
                job=JobAnswer("hold", why),
                nodes=(),
            )
            event = {"time": utc(), "type": "decision", "decision": made.to_dict()}
            journal.append(event)
        cluster.log_kernel(node, ILLEGAL)
        job.fail("exit 1")
        decision = job.decision()
    assert decision["cause"]["fault_class"] == ("hardware.gpu" if blamed else "program.gpu_fault")
    assert decision["job"]["verdict"] == ("requeue" if blamed else "hold")
    assert ("DRAIN" in cluster.node(node)["State"]) is blamed
    if blamed:
        assert "as in jobs of 3 users: it is the GPU" in decision["cause"]["summary"]
