"""Lists for a terminal and as documents: incidents and nodes."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from recovery.decision import Decision
from recovery.report.text import SILENT_SECONDS, age, printable, standing
from recovery.store import Store
from slurm_hooks.record import seconds_of, utc

HISTORY_SECONDS = 30 * 86_400.0
_FINDINGS_LIMIT = 5


def incidents_document(found: Sequence[Decision], limit: int) -> dict[str, Any]:
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
            "state": standing(group[0]),
            "owner": group[0].owner,
            "partition": group[0].partition,
        }
        for subject, group in groups.items()
    ]
    return {"schema": "incidents/v1", "incidents": items[:limit]}


def incidents(document: Mapping[str, Any]) -> str:
    """Return the incidents in two lines each."""
    lines = []
    for one in document["incidents"]:
        times = len(one["decisions"])
        count = f", {times} times" if times > 1 else ""
        whose = f" of {one['owner']}" if one["owner"] else ""
        state = f"{'open, ' if one['open'] else ''}{one['state']}"
        first = f"{one['last'][:16]}Z  {one['subject']}{whose}{count}: {one['class']}, {state}"
        lines += [printable(first)[:80], printable(f"    {one['summary']}")[:80]]
    return "\n".join(lines) or "no incident"


def nodes_document(
    store: Store, names: Collection[str], now: str, silent: bool = False
) -> dict[str, Any]:
    """Return ``nodes/v1``: of ``names``, or of every node that ever reported or was named."""
    since = utc(seconds_of(now) - HISTORY_SECONDS)
    beats = store.heartbeats()
    counted = store.file.rows(
        "SELECT node, count(*), max(time) FROM decision_nodes WHERE time >= ? GROUP BY node",
        (since,),
    )
    history = {node: (count, last) for node, count, last in counted}
    items = []
    for node in sorted(names or beats.keys() | history.keys()):
        beat = beats.get(node)
        if beat is None and node not in history:
            continue
        quiet = seconds_of(now) - seconds_of(beat["received"]) if beat else None
        is_silent = quiet is None or quiet > SILENT_SECONDS
        if silent and not is_silent:
            continue
        count, last = history.get(node, (0, ""))
        item = {
            "node": node,
            "silent": is_silent,
            "heard_seconds_ago": None if quiet is None else round(quiet),
            "verdict": beat["verdict"] if beat else None,
            "decisions": count,
            "last_decision": last,
        }
        items.append({**item, "findings": _findings(store, node)} if names else item)
    return {"schema": "nodes/v1", "nodes": items}


def nodes(document: Mapping[str, Any]) -> str:
    """Return the nodes in a line each, with their findings where they are named."""
    lines = []
    for one in document["nodes"]:
        heard = one["heard_seconds_ago"]
        how = "never heard of" if heard is None else f"heard {age(heard)} ago"
        # An old heartbeat says nothing of how a node is now.
        state = "SILENT" if one["silent"] else one["verdict"]
        named = f", named by {one['decisions']} decisions in 30 days" if one["decisions"] else ""
        lines.append(printable(f"{one['node']:<16} {state:<8} {how}{named}")[:80])
        for seen in one.get("findings", ()):
            lines.append(printable(f"    {seen['time'][:19]}Z  {seen['summary']}")[:80])
    return "\n".join(lines) or "no such node has reported"


def _findings(store: Store, node: str) -> list[dict[str, str]]:
    """The last findings of a node, newest first."""
    rows = store.file.rows(
        "SELECT time, document FROM records WHERE node = ? ORDER BY time DESC LIMIT ?",
        (node, 4 * _FINDINGS_LIMIT),
    )
    found = [
        {"time": time, "code": one["code"], "severity": one["severity"], "summary": one["summary"]}
        for time, document in rows
        for one in json.loads(document)["findings"]
    ]
    return found[:_FINDINGS_LIMIT]
