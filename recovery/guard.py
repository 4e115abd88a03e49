"""What may be done: mode, grants in force, and the limits at which a circuit breaker opens.

Pure. The order is mode, then a grant in force, then the guard; the first that says no is written
into the decision. A grant is an admin's permission; it is in force once its trial has brought the
evidence it needs, or where the admin has written why it may act without (``accept_untested``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from recovery.decision import Action, Decision
from recovery.slurm.base import Node
from recovery.trial import Share
from slurm_hooks.config import Config, Grant, Guard

OUR_REASON = "recovery:"
"""How every drain reason of this toolkit begins; the decision's id follows."""

GATE_REASON = f"{OUR_REASON} gate "
"""How the drain reason of a node that gated itself begins (``slurm_hooks.gate``)."""

ALREADY = "drained already: "
"""What a drain's detail says before the reason of ours that stood there before."""

TAKEN = "somebody else's already, "
"""What a drain's detail says before whose the node was, where it was given up for that."""


@dataclass(frozen=True)
class Agreement:
    """Evidence in a grant's scope: decisions reviewed, called helpful, or that ended badly."""

    reviewed: int = 0
    helpful: int = 0
    bad: int = 0

    @property
    def lower_bound(self) -> float:
        """Return the lower end of the 95% Wilson interval of agreement, 0 with no evidence."""
        return Share(self.helpful, self.reviewed + self.bad).low


@dataclass(frozen=True)
class Standing:
    """How a grant stands, and the sentence that says why or what it lacks.

    ``suspended``: it was in force, and its evidence has fallen under what it needs.
    """

    grant: Grant
    in_force: bool
    why: str
    suspended: bool = False

    @property
    def state(self) -> str:
        """Return the state in a word: ``in force``, ``waiting`` or ``suspended``."""
        return "in force" if self.in_force else "suspended" if self.suspended else "waiting"


def standing(grant: Grant, agreement: Agreement, was_in_force: bool = False) -> Standing:
    """Return how a grant stands given the evidence of its scope."""
    if grant.accept_untested:
        return Standing(grant, True, f"accepted untested: {grant.accept_untested}")
    needs, bound = grant.needs, agreement.lower_bound
    reviews = f"{agreement.reviewed} of {needs.reviews} reviews"
    agreed = f"agreement ≥ {bound:.2f}, needs {needs.agreement:.2f}"
    bad = f", {agreement.bad} ended badly" if agreement.bad else ""
    enough = agreement.reviewed >= needs.reviews and bound >= needs.agreement
    return Standing(grant, enough, f"{reviews}, {agreed}{bad}", was_in_force and not enough)


def refusal(action: Action, decision: Decision, mode: str, standings: Iterable[Standing]) -> str:
    """Return why ``action`` may not be taken, or an empty text where mode and a grant allow it."""
    if mode != "act":
        return "monitor mode: recorded, nothing is changed"
    # A gate that stops a job from starting includes sending that job elsewhere.
    wanted = "gate" if action.kind == "release" else action.kind
    waiting = ""
    for one in standings:
        if wanted not in one.grant.actions or not _covers(one.grant, decision):
            continue
        if one.in_force:
            return ""
        verb = "is suspended" if one.suspended else "waits"
        waiting = f"the grant for {wanted} {verb}: {one.why}"
    scope = f"partition {decision.partition or 'unknown'}"
    return waiting or f"no grant covers {wanted} in {scope}"


def _covers(grant: Grant, decision: Decision) -> bool:
    scopes = (
        (grant.partitions, decision.partition.split(",")),
        (grant.accounts, [decision.account]),
        (grant.users, [decision.owner]),
        (grant.qos, [decision.qos]),
    )
    return all(not wanted or set(wanted) & set(have) for wanted, have in scopes)


def drained_by_us(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Return the nodes that stand drained with a reason of this toolkit."""
    return tuple(node.name for node in nodes if node.drained and is_ours(node.reason))


def is_ours(reason: str) -> bool:
    """Whether a node's reason was written by this toolkit."""
    return reason.startswith(OUR_REASON)


def drain_refusal(
    node: str,
    nodes: Mapping[str, Node],
    guard: Guard,
    this_hour: int = 0,
    besides: Collection[str] = (),
) -> str:
    """Return why draining ``node`` would go beyond the guard, empty where it would not.

    ``this_hour`` nodes have been drained within an hour; ``besides`` are to be drained by the same
    command and count as drained. The share counts in each of the node's partitions, and never
    means less than one node.
    """
    drained = {*drained_by_us(nodes.values()), *besides}
    if this_hour + len(besides) >= guard.max_drained_per_hour:
        return (
            f"{this_hour + len(besides)} nodes were drained within an hour,"
            " max_drained_per_hour allows no more"
        )
    if len(drained) >= guard.max_drained_nodes:
        return f"{len(drained)} nodes are drained already, max_drained_nodes allows no more"
    for partition in nodes[node].partitions if node in nodes else ():
        members = {one.name for one in nodes.values() if partition in one.partitions}
        allowed = max(1, int(len(members) * guard.max_drained_share))
        count = len(members & drained)
        if count >= allowed:
            return (
                f"{count} of {len(members)} nodes of partition {partition} are drained already,"
                f" max_drained_share allows {allowed}"
            )
    return ""


def requeue_refusal(this_hour: int, guard: Guard) -> str:
    """Return why no further job may be put back to work, empty where one may.

    ``this_hour`` have been within an hour.
    """
    if this_hour < guard.max_requeues_per_hour:
        return ""
    return f"{this_hour} jobs were requeued within an hour, max_requeues_per_hour allows no more"


def gate_slots(limits: Guard, standings: Iterable[Standing], nodes: Iterable[Node]) -> int:
    """Return how many nodes may stand drained by their own gate at once.

    That is what the guard allows, less those that we have drained otherwise; the share is one of
    all nodes that a grant in force with gate covers, and never means less than one node.
    """
    grants = [one.grant for one in standings if one.in_force and "gate" in one.grant.actions]
    everything = tuple(nodes)
    covered = {
        node.name
        for node in everything
        for grant in grants
        if not grant.partitions or set(grant.partitions) & set(node.partitions)
    }
    if not covered:
        return 0
    # A node that gated itself holds a slot already.
    others = {
        node.name
        for node in everything
        if node.drained and is_ours(node.reason) and not node.reason.startswith(GATE_REASON)
    }
    share = max(1, int(len(covered) * limits.max_drained_share))
    return max(0, min(limits.max_drained_nodes - len(others), share - len(others & covered)))


def effective(
    config: Config, standings: Iterable[Standing], slots: int, now: str
) -> dict[str, object]:
    """Return the document ``control/effective.json``: mode and grants in force, for the nodes.

    ``slots`` is the number of gates that may be closed at once (``gate_slots``).
    """
    in_force = [one.grant for one in standings if one.in_force]
    return {
        "schema": "effective/v1",
        "mode": config.mode,
        "time": now,
        "gate_slots": slots,
        "grants": [
            {
                "actions": list(grant.actions),
                "partitions": list(grant.partitions),
                "users": list(grant.users),
                "accounts": list(grant.accounts),
                "qos": list(grant.qos),
            }
            for grant in in_force
        ],
    }
