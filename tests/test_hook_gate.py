"""A node drains itself only with leave, only for a fatal finding, and never a whole cluster."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recovery.demo.cluster import Cluster
from slurm_hooks import spool
from slurm_hooks.record import utc
from tests.node import Node, job

FATAL = {"code": "site.gone", "severity": "fatal", "summary": "GPU 3 is gone\n now", "gpu": 3}
FAULT = {"code": "site.bad", "severity": "fault", "summary": "GPU 3 is unwell", "gpu": 3}


def permission(**changes: Any) -> dict[str, Any]:
    """Return a permission to gate, as the controller writes it, with ``changes``."""
    document = {
        "schema": "effective/v1",
        "mode": "act",
        "time": utc(),
        "gate_slots": 2,
        "grants": [{"actions": ["gate", "drain"], "partitions": ["train"]}],
    }
    return {**document, **changes}


def permit(folder: Path, document: object) -> Path:
    """Write a permission into the spool ``folder``."""
    path = folder / "control" / "effective.json"
    path.write_text(json.dumps(document))
    path.chmod(0o644)
    return path


@pytest.fixture
def node(tmp_path: Path) -> Node:
    made = Node(tmp_path)
    trap = tmp_path / "scontrol"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nexit 1\n")
    trap.chmod(0o755)
    made.configure(f'[hooks]\nscontrol = "{trap}"\n')
    return made


def test_a_fatal_finding_with_leave_asks_slurm(node: Node) -> None:
    permit(node.spool, permission())
    node.finds(FATAL)
    run = node.run("prolog", **job())
    assert run.status == 0, "Slurm did not answer, so the job starts"
    assert (node.root / "asked").exists()
    _, failed = node.records()
    assert failed["findings"][0]["code"] == "hook.gate_failed"


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "monitor"},
        {"time": utc(1_000_000_000)},
        {"time": utc(10_000_000_000)},
        {"time": "now"},
        {"schema": "effective/v9"},
        {"grants": []},
        {"grants": [{"actions": ["drain"]}]},
        {"grants": [{"actions": ["gate"], "partitions": ["other"]}]},
        {"grants": [{"actions": ["gate"], "users": ["bob"]}]},
        {"grants": [{"actions": ["gate"], "accounts": ["physics"]}]},
        {"grants": "gate"},
        {"gate_slots": "many"},
    ],
)
@pytest.mark.parametrize("hook", ["prolog", "epilog"])
def test_without_leave_no_slurm_command_is_given(
    node: Node, wrong: dict[str, Any], hook: str
) -> None:
    permit(node.spool, permission(**wrong))
    node.finds(FATAL)
    run = node.run(hook, **job(exit_code="1:0"))
    assert (run.status, run.stderr) == (0, "")
    assert not (node.root / "asked").exists()
    assert len(node.records()) == 1


@pytest.mark.parametrize("wrong", ["absent", "link", "open", "stranger", "garbage", "folder"])
def test_leave_that_others_could_have_written_is_none(node: Node, wrong: str) -> None:
    path = permit(node.spool, permission())
    if wrong == "absent":
        path.unlink()
    elif wrong == "link":
        path.rename(node.root / "elsewhere")
        path.symlink_to(node.root / "elsewhere")
    elif wrong == "open":
        path.chmod(0o666)
    elif wrong == "stranger":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(path, 54321, -1)
    elif wrong == "garbage":
        path.write_bytes(b"\xff\x00{")
    else:
        path.parent.chmod(0o777)
    node.finds(FATAL)
    assert node.run("prolog", **job()).status == 0
    assert not (node.root / "asked").exists()


def test_what_is_not_fatal_never_gates(node: Node) -> None:
    permit(node.spool, permission())
    node.finds(FAULT)
    assert node.run("prolog", **job()).status == 0
    assert not (node.root / "asked").exists()


def test_a_broken_configuration_gates_nothing(node: Node) -> None:
    permit(node.spool, permission())
    node.finds(FATAL)
    node.config.write_text(node.config.read_text() + "[guard]\nmax_drain = 1\n")
    assert node.run("prolog", **job()).status == 0
    assert not (node.root / "asked").exists()


@pytest.mark.parametrize("hook", ["prolog", "epilog", "health_check"])
def test_a_hook_that_finds_nothing_asks_slurm_nothing(node: Node, hook: str) -> None:
    permit(node.spool, permission())
    node.probe("fine", "echo '[]'")
    assert node.run(hook, **job(exit_code="0:0")).status == 0
    assert not (node.root / "asked").exists()


@pytest.mark.parametrize("script", ["sleep 100", "exit 1", "kill -KILL $PPID"])
def test_a_probe_that_does_not_end_well_never_gates(node: Node, script: str) -> None:
    permit(node.spool, permission())
    node.configure(f'[hooks]\nscontrol = "{node.root}/scontrol"\nbudget = {{prolog = 1}}\n')
    node.probe("broken", script)
    assert node.run("prolog", **job()).status == 0
    assert not (node.root / "asked").exists()


@pytest.mark.parametrize("hook", ["prolog", "health_check"])
def test_slurm_that_hangs_delays_a_hook_no_longer_than_its_budget(node: Node, hook: str) -> None:
    trap = node.root / "scontrol"
    trap.write_text("#!/bin/sh\ntrap '' TERM\nsleep 100\n")
    node.configure(f'[hooks]\nscontrol = "{trap}"\nbudget = {{prolog = 2, health_check = 2}}\n')
    permit(node.spool, permission())
    node.finds(FATAL)
    run = node.run(hook, **job())
    assert run.status == 0
    assert run.seconds < 2.2
    assert [r["findings"][0]["code"] for r in node.records()] == ["site.gone", "hook.gate_failed"]


def test_slurm_that_was_away_is_asked_again_and_that_is_said_once(node: Node) -> None:
    permit(node.spool, permission())
    node.finds(FATAL)
    for _ in range(2):
        (node.root / "asked").unlink(missing_ok=True)
        node.run("health_check")
        assert (node.root / "asked").exists()
    codes = [record["findings"][0]["code"] for record in node.records()]
    assert codes == ["site.gone", "hook.gate_failed"]


def test_a_fault_that_was_mended_and_is_back_closes_the_gate_again(node: Node) -> None:
    asked = node.root / "asked"
    answer = "NodeName=n1 State=IDLE Partitions=train Reason="
    (node.root / "scontrol").write_text(f"#!/bin/sh\necho $1 >> {asked}\necho {answer}\n")
    permit(node.spool, permission())
    for _ in range(2):
        node.finds(FATAL)
        node.run("health_check")
        node.run("health_check")
        node.finds()
        node.run("health_check")
    assert asked.read_text().split() == ["show", "update"] * 2
    codes = [finding["code"] for record in node.records() for finding in record["findings"]]
    assert codes.count("hook.gate_closed") == 2


@pytest.mark.parametrize(
    ("held", "slots", "free"),
    [
        (["n7"], 2, True),
        (["n7", "n8"], 2, False),
        (["", "n8", "n9"], 2, False),
        (["", "", "n1"], 1, True),
        ([], 0, False),
    ],
)
def test_nodes_that_hold_slots_count_whichever_they_hold(
    node: Node, held: list[str], slots: int, free: bool
) -> None:
    for number, holder in enumerate(held):
        if holder:
            path = node.spool / "control/gate" / f"slot-{number}"
            path.write_text(json.dumps({"node": holder}))
    answer = "NodeName=n1 State=IDLE Partitions=train Reason="
    (node.root / "scontrol").write_text(f"#!/bin/sh\necho {answer}\n")
    permit(node.spool, permission(gate_slots=slots))
    node.finds(FATAL)
    assert node.run("prolog", **job()).status == int(free)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    probes = tmp_path_factory.mktemp("site") / "probes.d"
    probes.mkdir()
    with Cluster(nodes=4, gpus=0, hooks=True, health_check_seconds=600) as running:
        running.configure(
            f'[hooks]\nslurm_conf = "{running.environment["SLURM_CONF"]}"\n'
            f'[probes.site]\npath = "{probes}"\n'
            "[probes.nvml]\nhooks = []\n[probes.kernel_log]\nhooks = []\n"
        )
        spool.create(running.spool)
        yield running


def site_probe(cluster: Cluster, script: str) -> None:
    """Install the one site probe of the cluster's nodes."""
    text = cluster.config_path.read_text()
    folder = Path(text.partition("[probes.site]")[2].partition('path = "')[2].partition('"')[0])
    hidden = folder.parent / "new"
    hidden.write_text(f"#!/bin/sh\n{script}\n")
    hidden.chmod(0o755)
    hidden.rename(folder / "check")


def fatal_on(*nodes: str) -> str:
    """Return a site probe that finds something fatal on ``nodes``."""
    found = json.dumps([FATAL])
    return f"case $SLURMD_NODENAME in {'|'.join(nodes)}) cat <<'END'\n{found}\nEND\n;; esac"


@pytest.mark.slurm
def test_nodes_that_all_fail_at_once_gate_as_far_as_there_are_slots(cluster: Cluster) -> None:
    cluster.run("scontrol", "update", "nodename=n4", "state=drain", "reason=mine, hands off")
    site_probe(cluster, fatal_on("n1", "n2", "n3", "n4"))
    permit(cluster.spool, permission(gate_slots=2))
    jobs = [
        cluster.submit("-w", node, "--requeue", "--wrap", "true") for node in ("n1", "n2", "n3")
    ]

    def settled() -> bool:
        return all(
            cluster.job(number)["JobState"] == "COMPLETED"
            or "held" in cluster.job(number)["Reason"].lower()
            for number in jobs
        )

    cluster.wait(settled, 30, "each job has run or been put back")
    reasons = {name: cluster.node(name).get("Reason", "") for name in cluster.node_names}
    ours = [name for name in ("n1", "n2", "n3") if reasons[name].startswith("recovery: gate ")]
    assert len(ours) == 2
    assert "GPU 3 is gone now" in reasons[ours[0]]
    cluster.run("env", "-i", "SLURMD_NODENAME=n4", cluster.folder / "bin" / "health-check")
    assert cluster.node("n4")["Reason"].startswith("mine, hands off")
    (open_one,) = {"n1", "n2", "n3"} - set(ours)
    assert "DRAIN" not in cluster.node(open_one)["State"]
    states = {
        name: cluster.job(number)["JobState"]
        for name, number in zip(("n1", "n2", "n3"), jobs, strict=True)
    }
    assert states[open_one] == "COMPLETED", "without a slot the job runs"
    assert all(states[name] == "PENDING" for name in ours)
    slots = [json.loads(p.read_text()) for p in (cluster.spool / "control/gate").iterdir()]
    assert sorted(slot["node"] for slot in slots) == sorted(ours)
    records = [json.loads(p.read_bytes()) for p in (cluster.spool / "incoming").glob("*.json")]
    ends = [finding["code"] for record in records for finding in record["findings"]]
    assert ends.count("hook.gate_closed") == 2
    assert "hook.gate_failed" in ends
    # The record that the reason names tells what was found.
    named = reasons[ours[0]].split()[2].rstrip(":")
    assert [r["verdict"] for r in records if r["id"] == named] == ["fatal"]


@pytest.mark.slurm
@pytest.mark.parametrize("hook", ["epilog", "health_check"])
def test_epilog_and_health_check_drain_and_let_slurm_go_on(cluster: Cluster, hook: str) -> None:
    site_probe(cluster, "true")
    for path in (cluster.spool / "control/gate").iterdir():
        path.unlink()
    for name in cluster.node_names:
        cluster.run("scontrol", "update", f"nodename={name}", "state=resume", check=False)
    cluster.wait(lambda: cluster.node("n1")["State"] == "IDLE", 20, "n1 is idle")
    permit(cluster.spool, permission())
    if hook == "epilog":
        number = cluster.submit("-w", "n1", "--wrap", "touch began; sleep 2")
        cluster.wait((cluster.work / "began").exists, 20, "its prolog has passed")
        site_probe(cluster, fatal_on("n1"))
        cluster.wait(lambda: cluster.job(number)["JobState"] == "COMPLETED", 20, "it ends")
    else:
        site_probe(cluster, fatal_on("n1"))
        told = {"SLURMD_NODENAME": "n1", "PATH": "/usr/bin:/bin"}
        wrapper = cluster.folder / "bin" / "health-check"
        assert (
            cluster.run("env", "-i", *(f"{k}={v}" for k, v in told.items()), wrapper).stdout == ""
        )
    cluster.wait(lambda: "DRAIN" in cluster.node("n1")["State"], 20, "n1 is drained")
    assert cluster.node("n1")["Reason"].startswith("recovery: gate ")
