"""A health check that has just passed spares the next prologs their probes.

Owns the one local file that says so. It is void after a reboot, after ``hooks.freshness``
seconds, and as soon as any hook has something to report.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

from slurm_hooks import looking
from slurm_hooks.delivery import Delivery
from slurm_hooks.record import FaultRecord
from slurm_hooks.spool import SpoolError, read_regular

_PASSED = "passed"


def file(states: Path) -> Path:
    """Return the file, among the probes' states, that says whether a health check has passed."""
    return states / f"{_PASSED}.json"


def content(states: Path) -> bytes:
    """Run in a child: return what the file says, nothing where it cannot be read."""
    try:
        return read_regular(file(states), looking.STATE_LIMIT_BYTES)
    except SpoolError:
        return b""


def spared_until(passed: bytes, boot_id: str, freshness_seconds: float) -> float | None:
    """Return until when the file's content ``passed`` spares prologs, None if it does not now.

    The moment is in seconds since boot.
    """
    try:
        found = json.loads(passed)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("boot_id") != boot_id:
        return None
    at, now = found.get("uptime"), _uptime_seconds()
    if not isinstance(at, int | float) or not at <= now <= at + freshness_seconds:
        return None
    return at + freshness_seconds


def freshly_passed(states: Path, boot_id: str, freshness_seconds: float) -> bytes:
    """Run in a child: answer ``1`` if a health check of this boot passed recently, else nothing."""
    until = spared_until(content(states), boot_id, freshness_seconds)
    return b"" if until is None else b"1"


def with_pass(delivery: Delivery, report: FaultRecord) -> Delivery:
    """Return the delivery with the note that this run passed, or that no run has."""
    well = report.verdict == "ok" and all(
        probe.status in ("ok", "skipped") for probe in report.probes
    )
    if well and report.hook != "health_check":
        return delivery
    note = {"boot_id": report.boot_id, "uptime": _uptime_seconds()} if well else {}
    return replace(delivery, states={**delivery.states, _PASSED: note})


def _uptime_seconds() -> float:
    """Seconds since boot: a clock that nobody sets (clock_gettime(2), CLOCK_BOOTTIME)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
