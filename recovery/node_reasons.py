"""What stands in a node's reason: whose words, and what Slurm and our checks have added. Pure.

    >>> base("recovery: 01K: GPU 3 is lost : reboot issued; checked 2026-12-02T06:00Z: passed")
    'recovery: 01K: GPU 3 is lost'

`scontrol reboot` keeps the reason that it finds, or writes its own, and adds to it (measured on
22.05): ``reboot requested : reboot issued``, or ``Reboot ASAP : …``, while it is under way, and
`` : reboot complete`` once a node that was to stay down (nextstate=down) is back. Whoever gave a
reason of their own, by ``reason=…`` or by a drain before, still finds it in front.
"""

from __future__ import annotations

import re

from recovery.slurm.base import Node

COMPLETE = "reboot complete"

_VERDICT = r"; checked \d{4}-\d\d-\d\dT\d\d:\d\dZ: "
_CHECKED = re.compile(f"{_VERDICT}.*", re.DOTALL)
_ADDED = re.compile(rf"(?: : reboot (?:issued|complete)|{_VERDICT}.*)+\Z", re.DOTALL)
_NOBODYS = re.compile(rf"(?:reboot requested|Reboot ASAP)(?: : reboot issued)? : {COMPLETE}")
_FAILED = re.compile(f"{_VERDICT}failed")


def base(reason: str) -> str:
    """Return a reason without what Slurm's reboot and our checks have added to it."""
    return _ADDED.sub("", reason)


def unchecked(reason: str) -> str:
    """Return a reason without the verdict of a check."""
    return _CHECKED.sub("", reason)


def is_rebooted_by_nobody(reason: str) -> bool:
    """Whether a node stays out after `scontrol reboot nextstate=down`, and no one has said why."""
    return _NOBODYS.fullmatch(reason) is not None


def has_failed(reason: str) -> bool:
    """Whether the verdict of its last check, in the reason, is that something was found."""
    return _FAILED.search(reason) is not None


def is_in_service(node: Node) -> bool:
    """Whether Slurm places jobs on a node, whatever its reason says."""
    kept_off = node.drained or is_rebooting(node) or "FAIL" in node.flags
    return node.state in ("IDLE", "ALLOCATED", "MIXED") and not kept_off


def is_rebooting(node: Node) -> bool:
    """Whether a reboot has been asked for and has not ended: what it shows now is no news."""
    return any(flag.startswith("REBOOT") for flag in node.flags)


def is_kept_down(node: Node) -> bool:
    """Whether a node is down for no other reason than that it was to stay so after its reboot.

    Slurm writes `reboot complete` when it registers: a later boot was for something else.
    """
    back = node.state == "DOWN" and not is_rebooting(node) and COMPLETE in node.reason
    return back and "NOT_RESPONDING" not in node.flags and 0 < node.boot_time <= node.reason_time


def is_out(node: Node) -> bool:
    """Whether a node is out of service by somebody's wish, and within Slurm's reach."""
    drained = node.drained and node.state not in ("DOWN", "UNKNOWN")
    return (drained and "NOT_RESPONDING" not in node.flags) or is_kept_down(node)
