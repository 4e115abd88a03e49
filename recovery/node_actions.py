"""Draining a node and returning it, a step at a time, as ``actions`` says; a person's word stands.

A node that somebody else keeps out of service stays as they left it. Words that stand on a node in
service keep nobody off: 24.11.5 leaves a reason standing when a person resumes the node (22.05.8
and 26.05.5 clear it, measured). Such a node is drained all the same, and its words stay in front of
whoever reads the new reason.
"""

from __future__ import annotations

from dataclasses import replace

from recovery import node_reasons, slurm_texts
from recovery.decision import Action, Decision
from recovery.guard import ALREADY, OUR_REASON, TAKEN, is_ours
from recovery.slurm.base import Scheduler
from recovery.view import View


def drain(
    action: Action, decision: Decision, view: View, scheduler: Scheduler, now: float
) -> Action:
    node = view.nodes.get(action.target)
    if node is None:
        return replace(action, state="abandoned", detail="Slurm knows no such node")
    if node.drained and node.reason.startswith(f"{OUR_REASON} {decision.id}:"):
        return replace(action, state="verified", detail=node.reason)
    if (node.drained or node.state == "DOWN") and is_ours(node.reason):
        return replace(action, state="verified", detail=f"{ALREADY}{node.reason}")
    others = bool(node.reason) and not is_ours(node.reason)
    if node.drained or (others and not node_reasons.is_in_service(node)):
        by = f"by {node.reason!r}" if node.reason else "without a reason"
        return replace(action, state="abandoned", detail=f"{TAKEN}{by}")
    if action.state == "done":
        detail = "undone by somebody: the node is in service again"
        return replace(action, state="abandoned", detail=detail)
    if action.step != "drain":
        return replace(action, step="drain")
    reason = slurm_texts.drain_reason(decision, action.target)
    before = f" (before: {node.reason})" if others else ""
    scheduler.drain([action.target], f"{reason}{before}")
    return replace(action, state="done")


def drains_with_others(action: Action, view: View) -> bool:
    """Whether a node still waits for its planned drain, and bears nobody else's words."""
    node = view.nodes.get(action.target)
    if node is None or node.drained:
        return False
    return not node.reason or (is_ours(node.reason) and node.state != "DOWN")


def put_back(
    action: Action, decision: Decision, view: View, scheduler: Scheduler, now: float
) -> Action:
    """Return a node only while it stands out with the very reason that was decided on."""
    node = view.nodes.get(action.target)
    if node is None:
        return replace(action, state="abandoned", detail="Slurm knows no such node")
    if not (node.drained or node.state == "DOWN"):
        if action.step:
            return replace(action, state="verified", detail=f"in service again: {node.state}")
        return replace(action, state="abandoned", detail="somebody has returned it already")
    wanted = next(answer.stands for answer in decision.nodes if answer.node == action.target)
    if node_reasons.base(node.reason) != node_reasons.base(wanted):
        detail = f"its reason is somebody else's now: {node.reason!r}"
        return replace(action, state="abandoned", detail=detail)
    if node_reasons.has_failed(node.reason):
        return replace(action, state="abandoned", detail=f"checked since: {node.reason!r}")
    if not node_reasons.is_out(node):
        return replace(action, state="abandoned", detail="Slurm does not reach it any more")
    if action.step != "return":
        return replace(action, step="return")
    scheduler.undrain([action.target])
    return replace(action, state="done")
