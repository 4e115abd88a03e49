"""The gate with all its parts: hooks that slurmd runs, an aggregator that acts, a real Slurm.

Nodes break as GPUs break; nothing is told to the hooks but what the (fake) driver says.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recovery.demo.cluster import Cluster
from slurm_hooks import gate, spool
from slurm_hooks.record import seconds_of, utc

pytestmark = pytest.mark.slurm

WAIT_SECONDS = 120.0

SECONDS_TO_START_ELSEWHERE = 60.0
"""Measured 3 s, 12 s at a load of 30 on two cores; Slurm alone leaves such a job held for ever."""

SLOTS = 2

ACT = f"""
mode = "act"
[controller]
snapshot = 1.0
[guard]
max_drained_nodes = {SLOTS}
max_drained_share = 1.0
[[grant]]
partitions = ["train", "alone"]
actions = ["gate", "drain"]
accept_untested = "a cluster for tests"
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    # A health check runs when a slurmd starts, and then not again while the tests run.
    alone = "PartitionName=alone Nodes=n1"
    with Cluster(4, 8, health_check_seconds=3600, slurm_conf_extra=alone) as running:
        for node in running.node_names[1:]:
            running.run("scontrol", "update", f"nodename={node}", "weight=10")
        yield running


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """Four idle, healthy nodes of which Slurm takes n1 first, in monitor mode, without slots."""
    yield shared
    shared.configure("")
    shared.run("scancel", "--user", "root" if os.geteuid() == 0 else str(os.geteuid()))
    for node in shared.node_names:
        shared.mend_gpus(node)
        if "DRAIN" in shared.node(node)["State"]:
            shared.run("scontrol", "update", f"nodename={node}", "state=resume")
    for path in (*slots(shared), shared.spool / "control" / "effective.json"):
        path.unlink(missing_ok=True)
    idle = ["idle"]
    shared.wait(
        lambda: shared.run("sinfo", "--noheader", "--format=%T").stdout.split() == idle,
        WAIT_SECONDS,
        "all nodes are idle again",
    )


@pytest.fixture
def acting(cluster: Cluster) -> Iterator[Cluster]:
    """The same, with an aggregator that has given the nodes leave to gate themselves."""
    cluster.configure(ACT)
    leave = cluster.spool / "control" / "effective.json"
    with cluster.aggregator():
        cluster.wait(leave.exists, WAIT_SECONDS, "the aggregator gives leave")
        yield cluster


def slots(cluster: Cluster) -> list[Path]:
    return sorted((cluster.spool / "control" / "gate").iterdir())


def records(cluster: Cluster) -> list[dict[str, Any]]:
    """Return all records, those that the aggregator has taken in as well."""
    waiting = [path.read_text() for path in (cluster.spool / "incoming").glob("*.json")]
    taken = (cluster.spool / "archive").rglob("*.jsonl")
    lines = [line for path in taken for line in path.read_text().splitlines()]
    documents = [json.loads(line) for line in (*waiting, *lines)]
    return [document.get("record", document) for document in documents]


def gated(cluster: Cluster) -> list[str]:
    """Return the nodes that stand drained by their own gate."""
    ours = f"{gate.OUR_REASON} gate "
    states = {node: cluster.node(node) for node in cluster.node_names}
    return [node for node, shown in states.items() if shown.get("Reason", "").startswith(ours)]


def ended(cluster: Cluster, job: int, state: str = "COMPLETED") -> Callable[[], bool]:
    return lambda: cluster.job(job)["JobState"] == state


@pytest.mark.smoke
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_that_a_gated_node_sends_back_starts_elsewhere_within_seconds(
    acting: Cluster, nodes: int, record_property: Callable[[str, object], None]
) -> None:
    acting.break_gpu("n1", 3, "lost")
    began = acting.work / "began"
    began.unlink(missing_ok=True)
    script = f"date +%s.%N > {began}"
    job = acting.submit(f"--nodes={nodes}", "--gpus-per-node=8", "--wrap", script)
    acting.wait(ended(acting, job), WAIT_SECONDS, "the job has run")
    shown = acting.job(job)
    assert "n1" not in shown["NodeList"] and shown["Restarts"] == "1"
    assert shown["ExcNodeList"] == "n1"
    assert gated(acting) == ["n1"]
    closed = [
        record
        for record in records(acting)
        if record["job"]
        and record["job"]["id"] == job
        and record["findings"]
        and record["findings"][0]["code"] == "hook.gate_closed"
    ]
    seconds = float(began.read_text()) - seconds_of(closed[0]["time"])
    record_property("seconds_from_gate_to_first_line", round(seconds, 2))
    assert 0 < seconds < SECONDS_TO_START_ELSEWHERE
    told = acting.run("recovery", "explain", str(job)).stdout
    assert "release" in told and "verified" in told
    # What the reason says leads to the record that says what was found.
    reason = acting.node("n1")["Reason"]
    (named,) = re.findall(r"gate (\w+):", reason)
    assert [r["verdict"] for r in records(acting) if r["id"] == named] == ["fatal"]
    assert "Prolog error" not in reason


def test_a_job_that_only_the_gated_node_could_run_waits_for_its_return(acting: Cluster) -> None:
    acting.break_gpu("n1", 3, "lost")
    job = acting.submit("--partition=alone", "--gpus-per-node=8", "--wrap", "true")

    def told() -> str:
        return acting.run("recovery", "explain", str(job), check=False).stdout

    acting.wait(
        lambda: "waits for its return" in " ".join(told().split()), WAIT_SECONDS, "its release"
    )
    assert gated(acting) == ["n1"] and acting.job(job)["ExcNodeList"] == "(null)"
    acting.mend_gpus("n1")
    acting.run("scontrol", "update", "nodename=n1", "state=resume")
    acting.wait(ended(acting, job), WAIT_SECONDS, "the job has run on the mended node")


def test_a_driver_that_breaks_everywhere_drains_no_more_nodes_than_there_are_slots(
    acting: Cluster,
) -> None:
    before = acting.mutations()
    for node in acting.node_names:
        acting.break_gpu(node, 3, "lost")
    jobs = [acting.submit("--gpus-per-node=8", "--wrap", "true") for _ in acting.node_names]
    for job in jobs:
        acting.wait(ended(acting, job), WAIT_SECONDS, f"job {job} has run somewhere")
    assert len(gated(acting)) == SLOTS == len(slots(acting))
    changes = acting.mutations() - before
    assert changes["REQUEST_UPDATE_NODE"] == SLOTS, "nobody was drained and brought back"
    codes = [found["code"] for record in records(acting) for found in record["findings"]]
    assert "hook.gate_failed" in codes, "that the others could not is told"


def test_a_slot_is_free_again_once_its_node_is_back_in_service(acting: Cluster) -> None:
    acting.break_gpu("n1", 3, "lost")
    job = acting.submit("--gpus-per-node=8", "--wrap", "true")
    acting.wait(ended(acting, job), WAIT_SECONDS, "the job has run elsewhere")
    (slot,) = slots(acting)
    assert json.loads(slot.read_text())["node"] == "n1"
    os.utime(slot, (1e9, 1e9))
    again = acting.submit("--gpus-per-node=8", "--wrap", "true")
    acting.wait(ended(acting, again), WAIT_SECONDS, "passes go on")
    assert slot.exists(), "its node is drained still"
    acting.mend_gpus("n1")
    acting.run("scontrol", "update", "nodename=n1", "state=resume")
    acting.wait(lambda: not slot.exists(), WAIT_SECONDS, "the slot is free")


@pytest.mark.parametrize(
    ("guard", "drained", "slots"),
    [
        (f"max_drained_nodes = {SLOTS}\nmax_drained_share = 1.0", (), SLOTS),
        (f"max_drained_nodes = {SLOTS}\nmax_drained_share = 1.0", ("n3",), SLOTS - 1),
        ("max_drained_nodes = 8\nmax_drained_share = 0.5", (), 2),
        ("max_drained_nodes = 8", (), 1),
        ("max_drained_nodes = 8", ("n2", "n3"), 0),
    ],
)
def test_gates_get_what_the_guard_leaves_of_the_partitions_nodes(
    cluster: Cluster, guard: str, drained: tuple[str, ...], slots: int
) -> None:
    before, _, after = ACT.partition("[guard]")
    cluster.configure(f"{before}[guard]\n{guard}\n{after[after.index('[[grant]]') :]}")
    for node in drained:
        reason = "reason=recovery: 01K0000000: another fault"
        cluster.run("scontrol", "update", f"nodename={node}", "state=drain", reason)
    leave = cluster.spool / "control" / "effective.json"
    with cluster.aggregator():
        cluster.wait(leave.exists, WAIT_SECONDS, "the aggregator gives leave")
        assert json.loads(leave.read_text())["gate_slots"] == slots
        for node in drained:
            cluster.run("scontrol", "update", f"nodename={node}", "state=resume")
        more = {("n3",): SLOTS, ("n2", "n3"): 1}.get(drained, slots)
        cluster.wait(
            lambda: json.loads(leave.read_text())["gate_slots"] == more,
            5,
            "what changes is told at once",
        )


def test_a_whole_new_cluster_of_broken_nodes_is_left_alone_by_default(cluster: Cluster) -> None:
    before = cluster.mutations()
    known = [record["id"] for record in records(cluster)]
    for node in cluster.node_names:
        cluster.break_gpu(node, 3, "lost")

    def telling() -> set[str]:
        new = [record for record in records(cluster) if record["id"] not in known]
        return {record["node"] for record in new if record["verdict"] == "fatal"}

    with cluster.aggregator():
        job = cluster.submit("--nodes=4", "--gpus-per-node=8", "--wrap", "srun true")
        cluster.wait(ended(cluster, job), WAIT_SECONDS, "the job runs")
        everywhere = set(cluster.node_names)
        cluster.wait(lambda: telling() == everywhere, WAIT_SECONDS, "every node tells")
        path = cluster.spool / "control" / "effective.json"
        cluster.wait(path.exists, WAIT_SECONDS, "a pass has ended")
        assert json.loads(path.read_text())["mode"] == "monitor"
    changes = cluster.mutations() - before
    assert not {name for name in changes if "NODE" in name or "JOB" in name}, changes


def test_a_check_at_the_start_of_slurmd_waits_for_no_controller_and_is_made_up_for(
    acting: Cluster,
) -> None:
    acting.stop_node("n1")
    acting.break_gpu("n1", 3, "lost")
    (acting.spool / "heartbeat" / "n1.json").unlink(missing_ok=True)
    controller = int((acting.folder / "controller" / "slurmctld.pid").read_text())

    def checked() -> list[str]:
        ours = [r for r in records(acting) if r["node"] == "n1" and r["hook"] == "health_check"]
        return [found["code"] for record in ours for found in record["findings"]]

    os.kill(controller, signal.SIGSTOP)
    try:
        acting.start_node("n1")
        acting.wait(lambda: "hook.gate_failed" in checked(), WAIT_SECONDS, "it ends by itself")
        assert (acting.spool / "heartbeat" / "n1.json").exists()
        assert "gpu.lost" in checked()
    finally:
        os.kill(controller, signal.SIGCONT)
    acting.wait(lambda: gated(acting) or check_again(acting, "n1"), WAIT_SECONDS, "n1 is drained")
    assert gated(acting) == ["n1"]


def test_hooks_ask_slurmctld_nothing_until_there_is_something_fatal(cluster: Cluster) -> None:
    document = {"schema": "effective/v1", "mode": "act", "time": utc(), "gate_slots": SLOTS}
    leave = json.dumps({**document, "grants": [{"actions": ["gate"]}]}).encode()
    spool.write(cluster.spool / "control", "effective.json", leave)

    def asked_since(start: int) -> list[str]:
        return re.findall(
            r"REQUEST_NODE_INFO\w*|REQUEST_UPDATE_NODE", cluster.slurmctld_log[start:]
        )

    start = len(cluster.slurmctld_log)
    for script, state in (("srun true", "COMPLETED"), ("exit 3", "FAILED")):
        job = cluster.submit("--nodes=4", "--gpus-per-node=8", "--wrap", script)
        cluster.wait(ended(cluster, job, state), WAIT_SECONDS, "the job's end")
    for node in cluster.node_names:
        check_again(cluster, node)
    assert asked_since(start) == []
    cluster.break_gpu("n1", 3, "lost")
    check_again(cluster, "n1")
    check_again(cluster, "n1")
    asked = asked_since(start)
    assert len(asked) == 2, "one look, one change, and nothing when it is no news"
    assert asked[1] == "REQUEST_UPDATE_NODE"


def check_again(cluster: Cluster, node: str) -> bool:
    """Run a node's health check as slurmd does; false, so that a wait goes on."""
    program = cluster.folder / "bin" / "health-check"
    cluster.run("env", "-i", f"SLURMD_NODENAME={node}", program)
    return False
