"""`recovery incidents`: what happened to jobs and nodes, each with its decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recovery.decision import Decision
from recovery.report.words import cut


def document(found: Sequence[Decision], limit: int) -> dict[str, Any]:
    """Return ``incidents/v1``: ``found`` (newest first) by job, or by node outside any job."""
    groups: dict[str, list[Decision]] = {}
    for one in found:
        subject = f"job {one.attempt.job_id}" if one.attempt else one.incident.replace("/", " ")
        groups.setdefault(subject, []).append(one)
    items = [
        {
            "subject": subject,
            "since": group[-1].ended_time or group[-1].time,
            "last": group[0].time,
            "open": any(one.open for one in group),
            "decisions": [one.id for one in reversed(group)],
            "class": group[0].cause.fault_class,
            "summary": group[0].cause.summary,
            "state": group[0].standing,
            "owner": group[0].owner,
            "partition": group[0].partition,
        }
        for subject, group in groups.items()
    ]
    return {"schema": "incidents/v1", "incidents": items[:limit]}


def text(document: Mapping[str, Any]) -> str:
    """Return the incidents in two lines each."""
    lines = []
    for one in document["incidents"]:
        times = len(one["decisions"])
        count = f", {times} times" if times > 1 else ""
        whose = f" of {one['owner']}" if one["owner"] else ""
        state = f"{'open, ' if one['open'] else ''}{one['state']}"
        first = f"{one['last'][:16]}Z  {one['subject']}{whose}{count}: {one['class']}, {state}"
        lines += [cut(first), cut(f"    {one['summary']}")]
    return "\n".join(lines) or "no incident"
