"""What hooks report, and when they keep quiet."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import fastjsonschema
import pytest

from tests.node import Node, job

WARNING = {"code": "site.check", "severity": "warning", "summary": "something"}
FATAL = {"code": "site.gone", "severity": "fatal", "summary": "GPU 3 is gone", "gpu": 3}

SCHEMA = Path(__file__).parents[1] / "slurm_hooks/schemas/fault-record-v1.json"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture(scope="module")
def validate() -> Callable[[object], object]:
    checked: Callable[[object], object] = fastjsonschema.compile(json.loads(SCHEMA.read_text()))
    return checked


def test_a_prolog_that_finds_nothing_leaves_nothing(node: Node) -> None:
    node.probe("fine", "echo '[]'")
    assert node.run("prolog", **job()).status == 0
    assert node.records() == []


@pytest.mark.parametrize("hook", ["prolog", "epilog", "health_check"])
def test_findings_are_reported_with_their_job(
    node: Node, hook: str, validate: Callable[[object], object]
) -> None:
    node.finds(FATAL)
    told = {} if hook == "health_check" else job(exit_code="9:0" if hook == "epilog" else None)
    assert node.run(hook, **told).status == 0
    (record,) = node.records()
    validate(record)
    assert (record["hook"], record["verdict"], record["node"]) == (hook, "fatal", "n1")
    assert record["findings"][0]["gpu"] == 3
    if hook == "health_check":
        assert record["job"] is None
    else:
        assert record["job"]["id"] == 7
        assert record["job"]["gpus"] == [0, 1, 2, 3]
        assert record["job"]["nodes"] == "n[1-2]"


@pytest.mark.parametrize(
    ("exit_code", "comment", "reported"),
    [
        ("0:0", "", False),
        ("0:0", "all checks off please", False),
        ("1:0", "", True),
        ("0:9", "", True),
        ("0:0", "recovery=requeue", True),
        ("0:0", '{"APS": {"auto_resume_mode": "requeue"}}', True),
    ],
)
def test_an_epilog_reports_on_a_job_that_failed_or_opted_in(
    node: Node, exit_code: str, comment: str, reported: bool
) -> None:
    assert node.run("epilog", **job(exit_code=exit_code, comment=comment)).status == 0
    assert len(node.records()) == (1 if reported else 0)


def test_a_health_check_that_finds_nothing_refreshes_the_heartbeat(node: Node) -> None:
    node.probe("fine", "true")
    node.run("health_check")
    first = node.heartbeat()
    assert first["verdict"] == "ok"
    assert first["probes"][0]["name"] == "site.fine"
    node.run("health_check")
    assert node.heartbeat()["time"] > first["time"]
    assert node.records() == []


def test_a_finding_that_stays_is_not_reported_each_minute(node: Node) -> None:
    node.finds(WARNING)
    for _ in range(3):
        node.run("health_check")
    assert len(node.records()) == 1
    assert node.heartbeat()["verdict"] == "warning"
    node.finds(WARNING, FATAL)
    node.run("health_check")
    _, second = node.records()
    assert second["verdict"] == "fatal"
    assert "seen in 4 health checks" in second["findings"][0]["evidence"][0]["text"]


def test_a_finding_that_comes_and_goes_is_told_with_its_history(node: Node) -> None:
    for _ in range(3):
        node.finds(WARNING)
        node.run("health_check")
        node.finds()
        node.run("health_check")
    assert len(node.records()) == 1
    node.configure("[hooks]\nrepeat = 0\n")
    node.finds(WARNING)
    node.run("health_check")
    text = node.records()[-1]["findings"][0]["evidence"][0]["text"]
    assert "gone and back 3 times" in text


def test_another_observation_of_a_fault_is_another_fact(node: Node) -> None:
    for sequence in (1, 1, 2):
        evidence = [{"source": "kernel_log", "text": "Xid 79", "key": f"boot:{sequence}"}]
        node.finds({**FATAL, "evidence": evidence})
        node.run("health_check")
    assert len(node.records()) == 2


def test_a_probe_that_keeps_hanging_is_reported_and_keeps_being_looked_at(node: Node) -> None:
    node.configure("[hooks]\nbudget = {health_check = 1.0}\n")
    node.probe("stuck", "sleep 100")
    for _ in range(2):
        node.run("health_check")
    assert len(node.records()) == 1
    assert node.heartbeat()["probes"][0]["status"] == "hang"


def test_a_health_check_that_finds_another_running_ends_at_once(node: Node) -> None:
    began = node.root / "began"
    node.probe("slow", f"touch {began}; while [ ! -e {node.root}/go ]; do sleep 0.05; done")
    first = node.start("health_check")
    until = time.monotonic() + 20
    while not began.exists() and time.monotonic() < until:
        time.sleep(0.01)
    second = node.run("health_check")
    assert second.status == 0
    assert not (node.spool / "heartbeat/n1.json").exists()
    (node.root / "go").touch()
    first.communicate(timeout=30)
    assert node.heartbeat()["verdict"] == "ok"


def test_an_epilog_that_slurm_runs_twice_tells_the_same_twice(node: Node) -> None:
    node.finds(FATAL)
    for _ in range(2):
        assert node.run("epilog", **job(exit_code="9:0")).status == 0
    first, second = node.records()
    assert first["job"] == second["job"]
    assert first["findings"] == second["findings"]
