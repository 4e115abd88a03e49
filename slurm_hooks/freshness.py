"""A health check that has just passed spares the next prologs their probes.

Owns the one local file that says so. It is void after a reboot, after ``hooks.freshness``
seconds, and as soon as any hook has something to report.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from slurm_hooks import looking
from slurm_hooks.delivery import Delivery
from slurm_hooks.record import FaultRecord

_PASSED = "passed"


def freshly_passed(states: Path, boot_id: str, freshness_seconds: float) -> bytes:
    """Run in a child: answer ``1`` if a health check of this boot passed recently, else nothing."""
    passed = looking.kept(states, _PASSED)
    uptime = passed.get("uptime")
    if passed.get("boot_id") != boot_id or not isinstance(uptime, int | float):
        return b""
    return b"1" if 0 <= _uptime_seconds() - uptime <= freshness_seconds else b""


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
