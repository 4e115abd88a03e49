"""What this toolkit drained comes back once it is mended, and nothing else does. Pure.

A node returns when all of this is so, and each is looked at again just before the command:

- the reason that stands is, to the letter, the one with which we drained it, but for what Slurm
  adds at a reboot and our own checks add (``node_reasons``);
- what mends the fault has been seen: another boot, another GPU in that place, or, where a probe
  reads the fault from the hardware itself each time, that it is gone;
- so many clean health checks in a row have followed, within one boot and on the same GPUs.

Where only a person can say that it is mended (a machine check, a cable), only a person returns it.

A node that a person drained with the words ``recovery: check`` is theirs as well; they asked for it
to be checked, and once the deep check has passed it returns, with the verdict in its reason. So is
one that `scontrol reboot nextstate=down` has left down, where nobody has given a reason for it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from recovery import node_reasons
from recovery.decision import Cause, Decision, Implicated, JobAnswer, NodeAnswer
from recovery.guard import ALREADY, GATE_REASON, OUR_REASON
from recovery.slurm.base import Node
from slurm_hooks.record import new_id, utc

RULE = "return: mended, and clean since"

RULE_ASKED = "return: a person asked to check it, and it passed"

_ASKED = re.compile(rf"{OUR_REASON} asked to check\b.*; checked [0-9T:-]{{16}}Z: passed", re.DOTALL)
"""A reason that asked for a check, as ``checking`` leaves it with the verdict in it."""

_BY_BOOT = frozenset(
    ("reset_node", "reboot_node", "reboot", "reset_gpu", "reload_driver", "restart_app", "none")
)
"""Resolutions that a boot contains: every GPU is reset, every driver loaded anew, by it."""

_BY_SIGHT = frozenset(
    ("reset_gpu", "reload_driver", "end_processes", "make_room", "free_space", "mount", "install",
     "restart_fabric_manager", "restart_imex", "mend_configuration")
)  # fmt: skip
"""Resolutions after which the probe itself shows the fault gone. A GPU asks NVML for a reset until
it has had one; a line in the kernel's log is read once and says nothing later."""

_READ_EACH_TIME = frozenset(("nvml", "fabric", "host", "storage", "processes"))
"""Evidence that a probe reads anew at every look, unlike ``kernel_log`` and ``nccl``."""

_WELL = frozenset(("ok", "findings", "skipped"))


def clean(heartbeat: Mapping[str, Any]) -> bool:
    """Whether a health check found nothing at all, and every probe came to its end."""
    probes = heartbeat.get("probes", ())
    return heartbeat["verdict"] == "ok" and all(probe["status"] in _WELL for probe in probes)


def drain_of(node: Node, decisions: Iterable[Decision]) -> Decision | None:
    """Return the decision whose verified drain goes with the reason that ``node`` has now.

    It wrote that reason, or it found it there: the node had closed its own gate before.
    """
    reason = node_reasons.base(node.reason)
    gated = f"{ALREADY}{reason}" if reason.startswith(GATE_REASON) else ""
    for decision in decisions:
        for action in decision.actions:
            if (action.kind, action.target, action.state) != ("drain", node.name, "verified"):
                continue
            if decision.id in reason and node_reasons.base(action.detail) == reason:
                return decision
            if gated and action.detail == gated:
                return decision
    return None


def has_passed(node: Node, heartbeat: Mapping[str, Any] | None) -> bool:
    """Whether a node was drained to be checked, has passed, and is clean and within reach now."""
    if heartbeat is None or not clean(heartbeat) or not _ASKED.fullmatch(node.reason):
        return False
    return node_reasons.is_out(node)


def asked(node: Node, now: float, mode: str) -> Decision:
    """Return the decision that a node returns which passed the check a person had asked for."""
    summary = f"{node.name} was drained to be checked, and has passed"
    return replace(
        _returns(node, node.reason, summary, now, mode),
        rule=RULE_ASKED,
        considered=("to keep it for the person who drained it: they asked for the check alone",),
        would_change=(f"another reason than {node.reason!r} keeps it out",),
    )


def obstacle(
    node: Node,
    drains: Sequence[Decision],
    heartbeat: Mapping[str, Any] | None,
    checks: int,
) -> str:
    """Return why a drained node may not return yet, or an empty text where it may.

    ``drains`` are all decisions that wanted this node drained and that no return has followed, that
    of the standing reason among them. ``heartbeat`` is the node's last one as ``store`` keeps it;
    ``checks`` clean ones in a row are asked for.
    """
    if not (node.drained or node.state == "DOWN") or not node.reason:
        return "it is not drained"
    if not node_reasons.is_out(node):
        return "Slurm does not reach it"
    if node_reasons.has_failed(node.reason):
        return "its last check has failed"
    if heartbeat is None:
        return "no health check has been heard of"
    for decision in drains:
        for item in _accused(decision, node.name):
            why = _unmended(item, decision, heartbeat)
            if why:
                return why
    passed = int(heartbeat["passed"])
    latest = max(decision.time for decision in drains)
    if passed < checks or heartbeat["passed_since"] <= latest:
        return f"{passed} clean health checks in a row since it was mended, {checks} are needed"
    return ""


def decision(
    node: Node, drain: Decision, heartbeat: Mapping[str, Any], now: float, mode: str
) -> Decision:
    """Return the decision that ``node``, drained by ``drain``, returns; ``now`` in seconds."""
    passed = heartbeat["passed"]
    resolutions = sorted({item.resolution for item in _accused(drain, node.name)} - {""})
    mended = f"{', '.join(resolutions) or 'what it asked for'} has been seen"
    summary = f"{node.name} is mended: {mended}, {passed} clean health checks have followed"
    return replace(
        _returns(node, drain.id, summary, now, mode),
        limits=(f"clean health checks since {heartbeat['passed_since']}: {passed}",),
        considered=(f"{drain.id} had drained it: {drain.cause.summary}",),
        would_change=(
            f"another reason than {node.reason!r}, or a finding at its next check, keeps it out",
        ),
    )


def _accused(decision: Decision, node: str) -> list[Implicated]:
    return [item for item in decision.cause.implicated if item.node == node]


def _unmended(item: Implicated, drain: Decision, heartbeat: Mapping[str, Any]) -> str:
    """Why one fault of a node does not count as mended, empty where it does."""
    booted = bool(item.boot_id) and heartbeat["boot_id"] != item.boot_id
    booted = booted and heartbeat["time"] > drain.time
    if booted and item.resolution in _BY_BOOT:
        return ""
    if item.gpu is not None and item.uuid:
        gpus = heartbeat.get("gpus") or {}
        if str(item.gpu) in gpus and item.uuid not in gpus.values():
            return ""
    by_sight = item.resolution in _BY_SIGHT and item.source in _READ_EACH_TIME
    if by_sight and _looked(item.source, heartbeat):
        return ""
    if item.resolution in _BY_BOOT:
        return f"{item.code} asks for {item.resolution}, and it has not booted since"
    return f"{item.code} asks for {item.resolution or 'a person'}: a person returns it"


def _looked(source: str, heartbeat: Mapping[str, Any]) -> bool:
    """Whether the probe that had seen the fault has looked again, and was not skipped."""
    probes = heartbeat.get("probes", ())
    return any(probe["name"] == source and probe["status"] == "ok" for probe in probes)


def _returns(node: Node, after: str, summary: str, now: float, mode: str) -> Decision:
    """What every decision to return a node says; made again ``after`` the same, it has its id."""
    digest = hashlib.sha256(f"return/{node.name}/{after}".encode()).digest()
    return Decision(
        id=new_id(now, digest[:10]),
        time=utc(now),
        incident=f"node/{node.name}",
        attempt=None,
        cause=Cause("node.mended", "established", summary, fingerprint="node.mended"),
        job=JobAnswer("leave", "no job is concerned"),
        nodes=(NodeAnswer(node.name, "return", summary, stands=node.reason),),
        rule=RULE,
        mode=mode,
        partition=",".join(node.partitions),
    )
