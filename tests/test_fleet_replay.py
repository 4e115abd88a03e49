"""A replay sees the fleet events of a history again, and what other thresholds make of them.

A spool as an aggregator left it in monitor mode: six jobs whose storage went away within seconds,
and five idle nodes whose ports went down together an hour later.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recovery import fleet, policy
from recovery.decision import Decision
from recovery.fleet import Hit, Membership
from slurm_hooks.config import Fleet
from slurm_hooks.record import FaultRecord
from tests.incidents import ENDED, decided, epilog, failed, finding, health_check, job
from tests.test_recovery_commands import Controller

GONE = finding("storage.not_mounted", file="/data")
PORT = finding("fabric.port_down")
LATER = ENDED + 3600
NODES = [f"n{number}" for number in range(1, 7)]
IDLE = [f"m{number}" for number in range(1, 6)]


def event(key: str, hits: list[Hit], time: float) -> Decision:
    limits = Fleet()
    extent = fleet.extent(hits, 11, limits)
    assert extent is not None
    row = policy.rule_for(key, {})
    return fleet.decision(key, hits, extent, row, limits, time, "monitor")


def storage() -> tuple[list[Decision], list[FaultRecord]]:
    """Six jobs, one on each node; all waited for the others, and follow one decision."""
    hits = [Hit(f"job {100 + place}", ENDED + 6, (node,)) for place, node in enumerate(NODES)]
    made = event("storage", hits, ENDED + 6)
    decisions, records = [made], []
    for place, node in enumerate(NODES):
        one = job(id=100 + place, nodes=(node,), batch_host=node)
        seen = replace(epilog(node, [GONE], one), id=f"epilog-{node}")
        assert seen.job is not None
        records.append(replace(seen, job=replace(seen.job, comment=one.comment, nodes=node)))
        membership = Membership(made.id, "6 nodes and 6 jobs", tuple(NODES))
        seen_by: dict[str, Any] = {node: [GONE]}
        case = failed(one, **seen_by)
        decisions.append(decided(case, mode="monitor", fleet=membership))
    return decisions, records


def fabric() -> tuple[list[Decision], list[FaultRecord]]:
    """Five idle nodes whose ports go down: one decision, and none for each."""
    records = [
        replace(health_check(node, [PORT], LATER - ENDED + place), id=f"check-{node}")
        for place, node in enumerate(IDLE)
    ]
    hits = [Hit(f"node {node}", LATER + place, (node,)) for place, node in enumerate(IDLE)]
    return [event("network.fabric", hits, LATER + 5)], records


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    made = Controller(tmp_path)
    (of_jobs, epilogs), (of_nodes, checks) = storage(), fabric()
    decisions, records = of_jobs + of_nodes, epilogs + checks
    lines = [json.dumps(one.to_dict()) for one in decisions]
    (made.spool / "decisions" / "2026-12-02.jsonl").write_text("".join(f"{a}\n" for a in lines))
    day = made.spool / "archive" / "2026-12-02"
    day.mkdir()
    held = [{"received": one.time, "record": one.to_dict()} for one in records]
    (day / "records.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in held))
    return made


def replayed(controller: Controller, text: str) -> dict[str, Any]:
    """What another recovery.toml makes of the history; twice, and each time the same."""
    other = controller.root / "other.toml"
    other.write_text(text)
    command = ("replay", str(controller.spool), "--policy", str(other))
    assert controller.run(*command) == controller.run(*command)
    return controller.json(*command)


def changes(found: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {one["subject"]: (one["before"], one["after"]) for one in found["changes"]}


def test_a_history_with_fleet_events_replays_as_it_was_recorded(controller: Controller) -> None:
    found = replayed(controller, controller.config.read_text())
    assert (found["decisions"], found["not_replayed"]) == (8, 0)
    assert (found["differently"], found["changes"]) == (0, [])


def test_higher_thresholds_take_events_apart_and_say_what_each_would_have_got(
    controller: Controller,
) -> None:
    found = replayed(controller, "[fleet]\nnodes = 7\njobs = 7\n")
    told = changes(found)
    assert told.pop("fleet event of storage") == (
        "one decision for 6 nodes and 6 jobs, each job hold",
        "no event, each is decided on alone",
    )
    assert told.pop("fleet event of network.fabric") == (
        "one decision for 5 nodes, each job hold",
        "no event, each is decided on alone; watch m[1-5]",
    )
    assert set(told) == {f"job {number}, restart 0" for number in range(100, 106)}
    for place, node in enumerate(NODES):
        before, after = told[f"job {100 + place}, restart 0"]
        assert before == f"hold, watch {node}"
        assert after == f"requeue without {node}, watch {node}"
    why = next(one for one in found["changes"] if one["subject"] == "fleet event of storage")
    assert why["why_before"].endswith("5 nodes (0.1% of the fleet), or 5 jobs, make one event")
    assert why["why_after"].endswith("7 nodes (0.1% of the fleet), or 7 jobs, make one event")


def test_an_event_whose_evidence_is_gone_is_left_out_and_counted(controller: Controller) -> None:
    (controller.spool / "archive" / "2026-12-02" / "records.jsonl").unlink()
    found = replayed(controller, "[fleet]\nnodes = 7\njobs = 7\n")
    assert (found["decisions"], found["not_replayed"]) == (8, 8)
    assert (found["differently"], found["changes"]) == (0, [])


def test_another_answer_to_many_is_a_change_of_the_event_and_of_its_members(
    controller: Controller,
) -> None:
    found = replayed(controller, '[policy.classes.storage]\njob = "requeue"\nfleet = "leave"\n')
    told = changes(found)
    assert (
        told["fleet event of storage"][1] == "one decision for 6 nodes and 6 jobs, each job leave"
    )
    assert told["job 100, restart 0"][1] == "leave, watch n1"
    assert "fleet event of network.fabric" not in told


def test_what_only_lower_thresholds_see_as_one_is_told_as_an_event(controller: Controller) -> None:
    controller.configure("[fleet]\nnodes = 7\njobs = 7\n")
    found = replayed(controller, "[fleet]\nnodes = 5\njobs = 5\n")
    assert found["differently"] == 8, "recorded under thresholds of five"
    told = changes(found)
    before, after = told["fleet event of storage"]
    assert before.startswith("no event") and after.startswith("one decision for 6 nodes and 6 jobs")
    assert told["job 103, restart 0"] == ("requeue without n4, watch n4", "hold, watch n4")


def test_a_shorter_window_is_tried_as_well(controller: Controller) -> None:
    """The ports went down a second apart: never five of them within three."""
    found = replayed(controller, "[fleet]\nwindow = 3.5\ngather = 1\n")
    assert "fleet event of network.fabric" in changes(found)
    assert "fleet event of storage" not in changes(found)
