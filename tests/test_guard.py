"""What may be done: mode, then a grant in force, then the breaker on drained nodes."""

from __future__ import annotations

from typing import Any

import pytest

from recovery import guard
from recovery.decision import Action, Decision
from recovery.guard import Agreement, standing
from recovery.slurm.base import Node
from slurm_hooks.config import ActionName, Config, Grant, Guard, Needs
from tests.incidents import decided, failed, finding, job, node, sick

NO_REVIEWS = Agreement()
GPU = finding("gpu.lost", gpu=3)
DRAIN = Action("drain", "n3", "planned", "2026-12-02T00:00:00.000000Z")
REQUEUE = Action("requeue", "12", "planned", "2026-12-02T00:00:00.000000Z")


def grant(*actions: ActionName, **scope: Any) -> Grant:
    """A grant in force."""
    return Grant(actions or ("drain",), accept_untested="a test", **scope)


def refused(
    *grants: Grant,
    mode: str = "act",
    action: Action = DRAIN,
    decision: Decision | None = None,
    agreement: Agreement = NO_REVIEWS,
) -> str:
    """Why the action may not be taken."""
    decision = decision or decided(failed(n3=[GPU]))
    return guard.refusal(action, decision, mode, [standing(one, agreement) for one in grants])


# -- mode and grants


def test_monitor_mode_refuses_whatever_is_granted() -> None:
    assert refused(grant(), mode="monitor") == "monitor mode: recorded, nothing is changed"


def test_act_mode_without_a_grant_refuses_and_names_the_scope() -> None:
    assert refused() == "no grant covers drain in partition train"
    assert refused(grant("requeue")) == "no grant covers drain in partition train"
    assert refused(grant("requeue", "drain")) == ""


@pytest.mark.parametrize(
    ("scope", "inside"),
    [
        ({"partitions": ("train",)}, True),
        ({"partitions": ("trial", "train")}, True),
        ({"partitions": ("trial",)}, False),
        ({"accounts": ("physics",)}, True),
        ({"accounts": ("biology",)}, False),
        ({"users": ("ann",)}, True),
        ({"users": ("bob",)}, False),
        ({"qos": ("normal",)}, True),
        ({"qos": ("high",)}, False),
        ({"partitions": ("train",), "users": ("bob",)}, False),
        ({"partitions": ("train",), "users": ("ann",), "qos": ("normal",)}, True),
    ],
)
def test_a_grant_covers_only_what_is_in_all_of_its_scopes(
    scope: dict[str, Any], inside: bool
) -> None:
    assert (refused(grant(**scope)) == "") is inside


def test_a_grant_for_some_users_does_not_cover_a_node_without_a_job() -> None:
    idle = decided(sick("n3", GPU))
    assert refused(grant(partitions=("train",)), decision=idle) == ""
    assert refused(grant(users=("ann",)), decision=idle) != ""
    assert refused(grant(partitions=("trial",)), decision=idle) != ""


def test_a_job_in_several_partitions_is_covered_by_a_grant_for_one() -> None:
    several = decided(failed(job(partition="debug,train"), n3=[GPU]))
    assert refused(grant(partitions=("train",)), decision=several) == ""


def test_one_grant_that_waits_does_not_stop_another_that_is_in_force() -> None:
    waiting = Grant(("drain",))
    assert refused(waiting, grant()) == ""
    assert refused(grant(), waiting) == ""
    assert refused(waiting).startswith("the grant for drain waits: 0 of 20 reviews")


# -- the evidence a grant needs


@pytest.mark.parametrize(
    ("helpful", "reviewed", "bound"),
    [
        # 81/263, 15/148, 0/20 and 1/29 are the examples of Newcombe 1998 (Statistics in Medicine
        # 17, table I, method 3); the others follow from the formula.
        (0, 0, 0.0),
        (0, 20, 0.0),
        (1, 29, 0.0061),
        (10, 10, 0.7225),
        (15, 148, 0.0624),
        (16, 20, 0.5840),
        (20, 20, 0.8389),
        (81, 263, 0.2553),
        (95, 100, 0.8882),
    ],
)
def test_agreement_is_believed_only_down_to_its_lower_bound(
    helpful: int, reviewed: int, bound: float
) -> None:
    assert Agreement(reviewed, helpful).lower_bound == pytest.approx(bound, abs=5e-5)


@pytest.mark.parametrize(
    ("agreement", "in_force"),
    [
        (Agreement(0, 0), False),
        (Agreement(19, 19), False),
        (Agreement(20, 20), True),
        (Agreement(20, 19), False),
        (Agreement(100, 95), True),
        (Agreement(100, 85), False),
    ],
)
def test_a_grant_is_in_force_with_enough_reviews_that_agree_enough(
    agreement: Agreement, in_force: bool
) -> None:
    one = standing(Grant(("drain",), needs=Needs(20, 0.80)), agreement)
    assert one.in_force is in_force
    assert f"{agreement.reviewed} of 20 reviews" in one.why


def test_an_admin_may_accept_a_grant_untested_and_the_reason_is_told() -> None:
    one = standing(Grant(("drain",), accept_untested="a rehearsal"), Agreement())
    assert (one.in_force, one.why) == (True, "accepted untested: a rehearsal")


# -- the breaker


OURS, THEIRS = "recovery: 01K: GPU 3 is gone", "NHC: load"


def nodes(count: int = 100, ours: int = 0, theirs: int = 0, **changes: Any) -> dict[str, Node]:
    """A partition in which some nodes stand drained, by us and by others."""
    made = {}
    for number in range(1, count + 1):
        reason = OURS if number <= ours else THEIRS if number <= ours + theirs else ""
        flags = frozenset(("DRAIN",) if reason else ())
        made[f"n{number}"] = node(f"n{number}", flags=flags, reason=reason, **changes)
    return made


@pytest.mark.parametrize(
    ("count", "ours", "share", "refusal"),
    [
        (100, 4, 0.05, ""),
        (100, 5, 0.05, "5 of 100 nodes of partition train are drained already,"),
        (4, 0, 0.05, ""),  # a share is never less than one node
        (4, 1, 0.05, "1 of 4 nodes of partition train are drained already,"),
        (1, 0, 0.0, ""),
        (1000, 7, 0.05, ""),
        (1000, 8, 0.05, "8 nodes are drained already, max_drained_nodes allows no more"),
    ],
)
def test_we_drain_only_so_many_nodes_and_such_a_share(
    count: int, ours: int, share: float, refusal: str
) -> None:
    limits = Guard(max_drained_nodes=8, max_drained_share=share)
    assert guard.drain_refusal(f"n{count}", nodes(count, ours), limits).startswith(refusal)
    assert bool(guard.drain_refusal(f"n{count}", nodes(count, ours), limits)) is bool(refusal)


def test_what_others_have_drained_does_not_count_against_us() -> None:
    assert guard.drain_refusal("n100", nodes(100, ours=4, theirs=50), Guard()) == ""
    assert guard.drained_by_us(nodes(10, ours=2, theirs=3).values()) == ("n1", "n2")


def test_a_node_of_several_partitions_is_bound_by_the_smallest() -> None:
    known = nodes(100, ours=1, partitions=("train", "all"))
    small = {name: known[name] for name in ("n1", "n2", "n3", "n4")}
    others = {
        name: node(name, flags=one.flags, reason=one.reason, partitions=("all",))
        for name, one in known.items()
        if name not in small
    }
    assert "1 of 4 nodes of partition train" in guard.drain_refusal(
        "n4", {**small, **others}, Guard()
    )
    assert guard.drain_refusal("n50", {**small, **others}, Guard()) == ""


def test_an_hour_has_its_budget_of_drains_those_of_the_same_command_among_them() -> None:
    limits = Guard(max_drained_nodes=100, max_drained_share=1.0, max_drained_per_hour=8)
    assert guard.drain_refusal("n9", nodes(), limits, 7) == ""
    assert guard.drain_refusal("n9", nodes(), limits, 5, ["n1", "n2", "n3"]).startswith(
        "8 nodes were drained within an hour, max_drained_per_hour"
    )


def test_the_nodes_of_one_command_count_together() -> None:
    limits = Guard(max_drained_nodes=2, max_drained_share=0.03)
    assert guard.drain_refusal("n9", nodes(), limits, 0, ["n1"]) == ""
    assert "2 nodes are drained already" in guard.drain_refusal(
        "n9", nodes(), limits, 0, ["1", "2"]
    )
    share = Guard(max_drained_share=0.02)
    assert "2 of 100" in guard.drain_refusal("n9", nodes(ours=1), share, 0, ["n5"])


def test_an_hour_has_its_budget_of_requeues() -> None:
    limits = Guard(max_requeues_per_hour=3)
    assert guard.requeue_refusal(2, limits) == ""
    assert "3 jobs were requeued within an hour" in guard.requeue_refusal(3, limits)


@pytest.mark.parametrize("reason", ["", "NHC: recovery: x", "Recovery: x", "not recovery: x"])
def test_a_reason_is_ours_only_if_it_begins_as_ours_do(reason: str) -> None:
    assert not guard.is_ours(reason)


# -- what the nodes are told


def test_nodes_are_told_only_of_grants_in_force_and_get_gate_slots_only_with_gate() -> None:
    config = Config(mode="act", guard=Guard(max_drained_nodes=3))
    waiting, without = standing(Grant(("gate",)), Agreement()), standing(grant(), Agreement())
    told = guard.effective(config, [waiting, without], 0, "2026-12-02T00:00:00.000000Z")
    assert (told["mode"], told["gate_slots"]) == ("act", 0)
    assert told["grants"] == [
        {"actions": ["drain"], "partitions": [], "users": [], "accounts": [], "qos": []}
    ]
    nodes = [node(f"n{number}") for number in range(100)]
    assert guard.gate_slots(config.guard, [waiting, without], nodes) == 0
    gate = standing(grant("gate"), Agreement())
    assert guard.gate_slots(config.guard, [gate], nodes) == 3
