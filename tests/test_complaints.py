"""What people complain of in node checks, each as a promise that it does not happen here.

Only complaints that no other file answers; those about a driver that hangs or is dead, about Xids
and about clean-up of processes stand with their probes.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_hooks.config import Budget, Hooks
from slurm_hooks.record import utc
from tests.node import Node, job

FATAL = {"code": "site.gone", "severity": "fatal", "summary": "GPU 3 is gone", "gpu": 3}

MESSAGE_TIMEOUT_SECONDS = 10.0
"""After this slurmctld tells users ``Prolog hung on node`` (slurm.conf(5), MessageTimeout)."""

HEALTH_CHECK_TIMEOUT_SECONDS = 60.0
"""After this slurmd kills a HealthCheckProgram (measured on 22.05)."""

HOOKS = ("prolog", "epilog", "health_check")

SWITCHES = (
    "nocheck",
    "recovery=off",
    "recovery=ignore,checks=none",
    "NHC=off SKIP_HEALTH_CHECK=1",
    '{"APS": {"auto_resume_mode": "none"}}',
    '{"recovery": false}',
)
"""What a user might write to be left alone."""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node that may gate itself, where each Slurm command is noted and what it says is ours."""
    made = Node(tmp_path)
    scontrol = tmp_path / "scontrol"
    said = "NodeName=n1 State=IDLE Partitions=train Reason=RMA 4711, do not touch [ann@2026-12-02]"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncat {tmp_path}/said\n')
    scontrol.chmod(0o755)
    (tmp_path / "said").write_text(said)
    made.configure(f'[hooks]\nscontrol = "{scontrol}"\n')
    permit(made)
    return made


def permit(node: Node) -> None:
    """Give the node leave to gate itself, in every partition."""
    grants = [{"actions": ["gate"]}]
    document = {"schema": "effective/v1", "mode": "act", "time": utc(), "gate_slots": 1}
    path = node.spool / "control" / "effective.json"
    path.write_text(json.dumps({**document, "grants": grants}))
    path.chmod(0o644)


def asked(node: Node) -> list[str]:
    """Return the Slurm commands that hooks have given."""
    path = node.root / "asked"
    return path.read_text().splitlines() if path.exists() else []


def codes(node: Node) -> list[str]:
    return [finding["code"] for record in node.records() for finding in record["findings"]]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_reason_that_somebody_wrote_is_not_overwritten(node: Node, hook: str) -> None:
    node.finds(FATAL)
    run = node.run(hook, **job(exit_code="0:0"))
    assert run.status == 0, "the node is not drained, so the job goes on"
    assert asked(node) == ["show node -o n1"], "one look, and no change"
    assert codes(node) == ["site.gone", "hook.gate_failed"]
    assert "RMA 4711, do not touch" in node.records()[-1]["findings"][0]["summary"]
    assert list((node.spool / "control/gate").iterdir()) == [], "no slot is held for nothing"


def test_a_node_that_is_well_again_is_never_resumed_by_a_hook(node: Node) -> None:
    (node.root / "said").write_text("NodeName=n1 State=IDLE Partitions=train Reason=")
    node.finds(FATAL)
    node.run("health_check")
    assert len(asked(node)) == 2 and "state=drain" in asked(node)[1]
    node.finds()
    for hook in ("health_check", "prolog", "epilog"):
        node.run(hook, **job(exit_code="0:0"))
    assert len(asked(node)) == 2, "who drained it, or the aggregator, decides when it returns"


def test_a_stuck_check_keeps_a_prolog_below_what_slurm_calls_hung(node: Node) -> None:
    assert Budget().prolog < MESSAGE_TIMEOUT_SECONDS
    node.config.write_text(
        node.config.read_text().replace("[probes.site]", "[probes.site]\ndeadline = 60")
    )
    node.probe("stuck", "sleep 100")
    run = node.run("prolog", **job())
    assert run.status == 0
    assert run.seconds < Budget().prolog
    assert node.records()[0]["probes"][0]["status"] == "hang"


def test_a_health_check_cannot_be_given_the_time_after_which_slurmd_kills_it(node: Node) -> None:
    longest = HEALTH_CHECK_TIMEOUT_SECONDS - 5
    Hooks(budget=Budget(health_check=longest))
    node.config.write_text(
        node.config.read_text().replace("[hooks]", "[hooks]\nbudget = {health_check = 60}")
    )
    node.run("health_check")
    (found,) = node.records()[0]["findings"]
    assert found["code"] == "hook.config_error"
    assert "health_check must be between 0.5 and 55 seconds" in found["summary"]


def test_a_health_check_that_was_killed_leaves_its_heartbeat_old_and_the_next_one_runs(
    node: Node,
) -> None:
    node.probe("fine", "true")
    node.run("health_check")
    before = node.heartbeat()["time"]
    began = node.root / "began"
    node.probe("slow", f"echo $$ > {began}; sleep 30")
    process = node.start("health_check")
    until = time.monotonic() + 20
    while not (began.exists() and began.read_text()) and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    os.kill(int(began.read_text()), signal.SIGKILL)
    assert node.heartbeat()["time"] == before, "an old heartbeat is how a killed check is noticed"
    node.probe("slow", "true")
    assert node.run("health_check").status == 0
    assert node.heartbeat()["time"] > before


def test_time_outs_that_come_and_go_never_drain_and_never_resume(node: Node) -> None:
    budget = "[hooks]\nbudget = {health_check = 1, prolog = 1}"
    node.config.write_text(node.config.read_text().replace("[hooks]", budget))
    for script in ("sleep 100", "true", "sleep 100"):
        node.probe("flapping", script)
        node.run("health_check")
        node.run("prolog", **job())
    assert asked(node) == []
    ends = {probe["status"] for record in node.records() for probe in record["probes"]}
    assert ends == {"hang"}, "told, as what it is"


def test_a_check_that_finds_something_is_never_without_effect(node: Node) -> None:
    (node.spool / "control" / "effective.json").unlink()
    node.finds(FATAL)
    for hook in HOOKS:
        node.run(hook, **job(exit_code="0:0"))
    assert sorted(record["hook"] for record in node.records()) == sorted(HOOKS)
    assert {record["verdict"] for record in node.records()} == {"fatal"}
    assert node.heartbeat()["verdict"] == "fatal"


def test_a_storm_of_one_xid_is_one_record_that_counts_it(node: Node) -> None:
    log = node.root / "kern.log"
    log.touch(mode=0o600)
    settings = f'[probes.kernel_log]\npath = "{log}"\n'
    node.configure(f'[hooks]\nscontrol = "{node.root}/scontrol"\n{settings}')
    node.run("health_check")
    line = "[  100.5] NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000010, MMU Fault"
    log.write_text(f"{line}\n" * 20_000)
    for _ in range(3):
        node.run("health_check")
    (record,) = node.records()
    (found,) = record["findings"]
    assert (found["code"], found["count"]) == ("gpu.application_fault", 20_000)


@pytest.mark.parametrize("hook", ["prolog", "epilog"])
@pytest.mark.parametrize("comment", SWITCHES)
def test_no_comment_of_a_user_switches_a_check_off(node: Node, hook: str, comment: str) -> None:
    (node.root / "said").write_text("NodeName=n1 State=IDLE Partitions=train Reason=")
    node.finds(FATAL)
    told: dict[str, Any] = {**job(exit_code="0:0", comment=comment), "SPANK_SLURM_HOOKS": "off"}
    run = node.run(hook, **told)
    assert run.status == int(hook == "prolog"), "the gate closes all the same"
    assert "site.gone" in codes(node)
    assert len(asked(node)) == 2
