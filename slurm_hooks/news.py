"""What of a hook's run is worth a record, and the record of it.

Owns when a prolog, an epilog or a health check has something to say. What it has reported before,
and what repeats, is ``history``'s.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_hooks import history, optin
from slurm_hooks.context import HookContext
from slurm_hooks.delivery import Delivery, heartbeat
from slurm_hooks.looking import QUIET, kept
from slurm_hooks.record import FaultRecord, Finding, ProbeResult, new_id, utc

_MEMORY = "reported"
"""Name of the state that holds what health checks have reported."""

_GATE = "gate"
"""Name of the state that ``gate`` keeps while something fatal stands."""


def record(
    told: HookContext,
    boot_id: str,
    findings: tuple[Finding, ...],
    probes: tuple[ProbeResult, ...] = (),
) -> FaultRecord:
    """Return a record of this moment."""
    return FaultRecord(
        id=new_id(),
        cluster=told.cluster,
        node=told.node,
        boot_id=boot_id,
        time=utc(),
        hook=told.hook,
        job=told.job,
        findings=findings,
        probes=probes,
    )


def worth_reporting(report: FaultRecord) -> bool:
    """Whether a prolog or an epilog has something to say.

    That this node saw nothing is evidence too, where a job failed or its owner asked for recovery.
    """
    if report.findings or any(probe.status not in QUIET for probe in report.probes):
        return True
    job = report.job
    if job is None or report.hook != "epilog":
        return False
    if job.exit != "0:0":
        return True
    wishes = optin.parse(job.comment)
    return wishes.opted_in or bool(wishes.problems)


def what_is_news(
    report: FaultRecord, states: Mapping[str, Any], memory: bytes, repeat_seconds: float
) -> Delivery:
    """Return what a health check delivers: a record where something is due, and its heartbeat.

    ``memory`` is what ``remembered`` answered.
    """
    remembered, gate = json.loads(memory or b"[{}, {}]")
    nvml = states.get("nvml")
    judged = history.review(
        remembered, report.boot_id, report.findings, report.probes, time.time(), repeat_seconds
    )
    if judged.memory != remembered:
        states = {**states, _MEMORY: judged.memory}
    if gate and report.verdict != "fatal":
        states = {**states, _GATE: {}}  # mended: what is fatal next closes the gate anew
    due = judged.due or any(finding.code.startswith("check.") for finding in report.findings)
    news = replace(report, findings=judged.findings) if due else None
    return Delivery(news, heartbeat(report, nvml), states)


def remembered(states: Path) -> bytes:
    """Run in a child: return what health checks have reported, and whether the gate is closed."""
    return json.dumps([kept(states, _MEMORY), kept(states, _GATE)]).encode()
