"""A health check that has just passed spares a prolog its probes; a fault or a reboot voids it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.node import Node, job

WARNING = {"code": "site.check", "severity": "warning", "summary": "something"}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    made = Node(tmp_path)
    made.configure("[hooks]\nfreshness = 600\n")
    return made


def looks(node: Node) -> int:
    """Run a prolog and return how often its probe has looked."""
    log = node.root / "looks"
    before = len(log.read_text().splitlines()) if log.exists() else 0
    node.probe("count", f"echo look >> {log}")
    assert node.run("prolog", **job()).status == 0
    return (len(log.read_text().splitlines()) if log.exists() else 0) - before


def test_without_a_health_check_a_prolog_looks(node: Node) -> None:
    assert looks(node) == 1


def test_after_a_health_check_that_passed_it_does_not(node: Node) -> None:
    node.run("health_check")
    assert looks(node) == 0
    assert node.records() == []


def test_by_default_it_always_looks(node: Node) -> None:
    node.run("health_check")
    node.configure()
    assert looks(node) == 1


@pytest.mark.parametrize("fault", ["health_check", "epilog"])
def test_a_finding_voids_it(node: Node, fault: str) -> None:
    node.run("health_check")
    node.finds(WARNING)
    node.run(fault, **job(exit_code="0:0"))
    assert looks(node) == 1


@pytest.mark.parametrize("change", [{"boot_id": "another"}, {"uptime": 1e12}, {"uptime": -1e9}])
def test_a_reboot_or_time_voids_it(node: Node, change: dict[str, object]) -> None:
    node.run("health_check")
    state = node.buffer / "state" / "passed.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), **change}))
    assert looks(node) == 1
