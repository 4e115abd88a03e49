"""A node that we drained returns once it is mended, and nothing else ever returns.

The judgement, as a table; ``test_returning_on_slurm`` has the whole way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from recovery import returning
from recovery.checking import Answer, reason_with
from recovery.decision import Action, Decision
from recovery.slurm.base import Node
from slurm_hooks.record import Finding, utc
from tests.incidents import NOW, decided, finding, node, sick

LOST = finding("gpu.lost", gpu=3, uuid="GPU-old")
RESET = finding("gpu.reset_required", gpu=3, uuid="GPU-old")
XID = finding("gpu.ecc_uncontained", "NVRM: Xid 95", gpu=3, uuid="GPU-old")
WORN_OUT = finding("gpu.remap_failed", gpu=3, uuid="GPU-old")
MACHINE_CHECK = finding("host.machine_check", "mce: [Hardware Error]")

OK = [{"name": "nvml", "status": "ok", "seconds": 0.1}]


def drained(*seen: Finding) -> tuple[Node, Decision]:
    """A node as our verified drain has left it, and the decision to drain it."""
    made = decided(sick("n3", *seen))
    assert made.nodes[0].verdict == "drain"
    reason = f"recovery: {made.id}: {made.nodes[0].reason}"
    action = Action("drain", "n3", "verified", made.time, "drain", reason)
    stands = node("n3", flags=frozenset({"DRAIN"}), reason=reason)
    return stands, made.with_action(action)


def beat(**changes: Any) -> dict[str, Any]:
    """The heartbeat of a mended node after a reboot, as the index keeps it."""
    made = {
        "node": "n3",
        "boot_id": "another boot",
        "time": utc(NOW + 600),
        "verdict": "ok",
        "probes": OK,
        "gpus": {"2": "GPU-2", "3": "GPU-old"},
        "passed": 3,
        "passed_since": utc(NOW + 300),
    }
    return {**made, **changes}


def obstacle(seen: Finding = LOST, of: Node | None = None, **changes: Any) -> str:
    stands, made = drained(seen)
    return returning.obstacle(of or stands, [made], beat(**changes), 3)


def test_a_rebooted_node_whose_checks_are_clean_since_returns() -> None:
    assert obstacle() == ""


SAME = "boot"
REPLACED = {"2": "GPU-2", "3": "GPU-new"}
MOVED = {"2": "GPU-old", "3": "GPU-2"}


@pytest.mark.parametrize(
    ("seen", "changes", "why"),
    [
        # the resolution has not been seen
        (LOST, {"boot_id": SAME}, "gpu.lost asks for reset_node, and it has not booted since"),
        (XID, {"boot_id": SAME}, "asks for reset_gpu, and it has not booted since"),
        (WORN_OUT, {}, "gpu.remap_failed asks for contact_support: a person returns it"),
        (MACHINE_CHECK, {}, "host.machine_check asks for contact_support: a person returns it"),
        (WORN_OUT, {"gpus": MOVED}, "a person returns it"),
        (WORN_OUT, {"gpus": {}}, "a person returns it"),
        # it has
        (XID, {}, ""),
        (RESET, {"boot_id": SAME}, ""),
        (WORN_OUT, {"gpus": REPLACED}, ""),
        (LOST, {"boot_id": SAME, "gpus": REPLACED}, ""),
        # but the probe did not look
        (RESET, {"boot_id": SAME, "probes": [{**OK[0], "status": "skipped"}]}, "has not booted"),
        # the checks
        (LOST, {"passed": 2}, "2 clean health checks in a row since it was mended, 3 are needed"),
        (LOST, {"passed": 0, "passed_since": ""}, "0 clean health checks"),
        (LOST, {"passed_since": utc(NOW - 1)}, "3 clean health checks in a row"),
    ],
)
def test_a_node_returns_only_when_what_mends_it_was_seen_and_checks_are_clean_since(
    seen: Finding, changes: dict[str, Any], why: str
) -> None:
    found = obstacle(seen, **changes)
    assert (why in found) if why else not found


def test_every_fault_for_which_it_was_drained_must_be_mended() -> None:
    stands, made = drained(LOST)
    _, other = drained(MACHINE_CHECK)
    assert returning.obstacle(stands, [made], beat(), 3) == ""
    assert "machine_check" in returning.obstacle(stands, [made, other], beat(), 3)


@pytest.mark.parametrize(
    "state", [{"state": "DOWN"}, {"flags": frozenset({"DRAIN", "NOT_RESPONDING"})}]
)
def test_a_node_that_slurm_does_not_reach_stays(state: dict[str, Any]) -> None:
    stands, _ = drained(LOST)
    assert obstacle(of=replace(stands, **state)) == "Slurm does not reach it"


ISSUED = " : reboot issued"
COMPLETE = " : reboot issued : reboot complete"
PASSED = "; checked 2026-12-02T06:00Z: passed"
FAILED = "; checked 2026-12-02T06:00Z: failed, GPU 3 is lost"


@pytest.mark.parametrize("added", ["", ISSUED, COMPLETE, PASSED, f"{ISSUED}{PASSED}", FAILED])
def test_what_a_reboot_and_a_check_add_to_our_reason_leave_it_ours(added: str) -> None:
    stands, made = drained(LOST)
    rebooted = replace(stands, reason=stands.reason + added)
    assert returning.drain_of(rebooted, [made]) == made
    why = returning.obstacle(rebooted, [made], beat(), 3)
    assert why == ("its last check has failed" if added == FAILED else "")


BOOT = {"state": "DOWN", "boot_time": 1000, "reason_time": 1001}
ASKED = "recovery: asked to check"
DOWN = [
    # what stands, what else is so, whether it has passed
    (f"{ASKED} reboot requested{COMPLETE}{PASSED}", BOOT, True),
    (f"{ASKED} Reboot ASAP{COMPLETE}{PASSED}", BOOT, True),
    (f"{ASKED} the riser{COMPLETE}{PASSED}", BOOT, True),
    (f"{ASKED} the riser{COMPLETE}{FAILED}", BOOT, False),
    (f"{ASKED} the riser{COMPLETE}", BOOT, False),
    # down for something else, or again, or on its way
    (f"{ASKED} the riser{PASSED}", BOOT, False),
    (f"{ASKED} the riser{COMPLETE}{PASSED}", {**BOOT, "boot_time": 1002}, False),
    (f"{ASKED} the riser{COMPLETE}{PASSED}", {**BOOT, "flags": {"NOT_RESPONDING"}}, False),
    (f"{ASKED} the riser{COMPLETE}{PASSED}", {**BOOT, "flags": {"REBOOT_ISSUED"}}, False),
    # somebody's own words
    (f"ann: fans{COMPLETE}{PASSED}", BOOT, False),
]


@pytest.mark.parametrize(("reason", "shown", "passed"), DOWN)
def test_a_node_that_a_reboot_left_down_comes_back_by_its_check_alone(
    reason: str, shown: dict[str, Any], passed: bool
) -> None:
    one = node("n3", **{**shown, "flags": frozenset(shown.get("flags", ())), "reason": reason})
    assert returning.has_passed(one, beat()) is passed
    assert not returning.has_passed(one, beat(verdict="fault"))


ANSWER = Answer("n3", "01K", "passed", "", "reboot", utc(NOW), "boot", "record")


@pytest.mark.parametrize(
    ("stands", "becomes"),
    [
        (f"reboot requested{COMPLETE}", f"{ASKED} reboot requested{COMPLETE}; checked "),
        (f"Reboot ASAP{COMPLETE}", f"{ASKED} Reboot ASAP{COMPLETE}; checked "),
        ("Reboot ASAP : reboot complete", f"{ASKED} Reboot ASAP : reboot complete; checked "),
        (f"recovery: check fans{COMPLETE}", f"{ASKED} fans{COMPLETE}; checked "),
        (f"ann: fans{COMPLETE}", None),
        ("Node unexpectedly rebooted", None),
        ("reboot complete", None),
        ("reboot requested : reboot issued", None),
    ],
)
def test_a_verdict_is_written_behind_words_of_slurm_or_ours_and_nobody_elses(
    stands: str, becomes: str | None
) -> None:
    found = reason_with(stands, ANSWER)
    assert found == becomes or (found and becomes and found.startswith(becomes))


def test_a_node_of_which_nothing_has_been_heard_stays() -> None:
    stands, made = drained(LOST)
    assert "no health check" in returning.obstacle(stands, [made], None, 3)


def test_only_the_very_reason_that_we_wrote_is_ours_to_end() -> None:
    stands, made = drained(LOST)
    assert returning.drain_of(stands, [made]) == made
    for reason in ("", "ann: fans", f"{stands.reason} - ann: keep out", made.id):
        assert returning.drain_of(replace(stands, reason=reason), [made]) is None
    for state in ("recorded", "done", "abandoned", "failed"):
        other = made.with_action(replace(made.actions[0], state=state))
        assert returning.drain_of(stands, [other]) is None


def test_a_node_that_gated_itself_returns_by_the_decision_that_found_it_so() -> None:
    stands, made = drained(LOST)
    gate = replace(stands, reason="recovery: gate 01KX: GPU 3 is lost")
    found = replace(made.actions[0], detail=f"drained already: {gate.reason}")
    assert returning.drain_of(gate, [made]) is None
    assert returning.drain_of(gate, [made.with_action(found)]) is not None
    other = replace(gate, reason="ann: gate")
    assert returning.drain_of(other, [made.with_action(found)]) is None


def test_a_return_says_what_was_mended_what_had_drained_it_and_what_would_keep_it_out() -> None:
    stands, made = drained(LOST)
    back = returning.decision(stands, made, beat(), NOW + 700, "act")
    assert [(one.node, one.verdict) for one in back.nodes] == [("n3", "return")]
    assert back.nodes[0].stands == stands.reason
    assert "reset_node has been seen, 3 clean health checks have followed" in back.cause.summary
    assert made.id in back.considered[0]
    assert back.rule == "return: mended, and clean since"
    assert back.partition == "train"
    assert Decision.from_dict(back.to_dict()) == back
