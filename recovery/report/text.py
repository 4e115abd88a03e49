"""Text for a terminal of 80 columns: status, grants, a decision in a line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from recovery import concerns, guard, inventory, pausing
from recovery.controls import Pause
from recovery.decision import Decision
from recovery.grants import scope_text, standings
from recovery.report import under_recovery
from recovery.report.words import WIDTH, age, printable, wrapped
from recovery.slurm.hostlist import compress
from recovery.store import Store
from slurm_hooks.config import Config
from slurm_hooks.record import seconds_of

_SILENT_NAMED = 100

_NEEDED_SHOWN = 12
"""Most things to do that are told one by one: what follows would push the rest off the screen."""

_CLOCKS_AGREE_SECONDS = 5.0

_OPEN_SHOWN = 12

LATE_PASS_SECONDS = 60.0
"""A pass is due every second or less; the nodes stop believing in it after this."""

SILENT_SECONDS = 900.0
"""A node whose last heartbeat is older than this is shown as silent, not as healthy."""


def line(decision: Decision) -> str:
    """Return a decision in a line or two: when, what about, which answers, how it stands."""
    about = f"job {decision.attempt.job_id}" if decision.attempt else decision.incident
    answers: list[str] = [decision.job.verdict] if decision.attempt else []
    if decision.members:
        answers = [f"{len(decision.members)} members, their jobs: {decision.job.verdict}"]
    answers += [f"{answer.verdict} {answer.node}" for answer in decision.nodes]
    told = printable(
        f"{decision.id}  {decision.time[:19]}Z  {about}: {', '.join(answers) or 'leave'}"
        f"  [{decision.cause.fault_class}, {decision.standing}]"
    )
    return "\n".join(textwrap.wrap(told, WIDTH, subsequent_indent="    "))


def status_document(config: Config, store: Store, now: str) -> dict[str, Any]:
    """Return ``status/v1``; a node whose heartbeat is old is silent, whatever it last said."""
    beats, slurm = store.heartbeats(), inventory.known(store)
    silent = [
        node
        for node, beat in beats.items()
        if seconds_of(now) - seconds_of(beat["received"]) > SILENT_SECONDS
    ]
    silent = sorted({*silent, *(slurm.names - beats.keys())})
    opened = store.open_decisions()
    needed = [
        {
            "subject": one.subject,
            "since": one.time,
            "age_seconds": round(seconds_of(now) - seconds_of(one.time)),
            "count": one.count,
            "what": one.what,
            "decision": one.decision,
            "owner": one.owner,
        }
        for one in concerns.unowned(store.file)
    ]
    return {
        "schema": "status/v1",
        "time": now,
        "mode": config.mode,
        "needs_a_person": needed,
        "grants": grants_document(config, standings(config, store))["grants"],
        "breakers": [
            {"kind": one.kind, "since": one.time, "why": one.why}
            for one in store.breakers().values()
            if one.tripped
        ],
        "pauses": [asdict(one) for one in store.pauses()],
        "last_pass": store.meta("last_pass"),
        "last_snapshot": store.meta("last_snapshot"),
        "problems": [text for text in (store.meta("problems") or "").split("\n") if text],
        "jobs": under_recovery.jobs(opened, now),
        "nodes": {
            "heard": len(beats.keys() - set(silent)),
            "silent": silent,
            "out_of_service": dict(slurm.out),
        },
        "open": [
            {"id": d.id, "incident": d.incident, "state": d.standing, "why": d.cause.summary}
            for d in opened
        ],
    }


def status(document: Mapping[str, Any]) -> str:
    """Return the status document in words: what a person must do comes first."""
    lines: list[str] = []
    needed = _needed(document["needs_a_person"])
    for said in needed[:_NEEDED_SHOWN]:
        lines += wrapped("NEEDS YOU   ", said)
    if len(needed) > _NEEDED_SHOWN:
        rest = len(needed) - _NEEDED_SHOWN
        lines.append(f"NEEDS YOU   and {rest} more: recovery status --json")
    for breaker in document["breakers"]:
        lines += wrapped("BREAKER     ", f"{breaker['kind']}: {breaker['why']}")
    for pause in _together(Pause(**one) for one in document["pauses"]):
        lines += wrapped("PAUSED      ", pausing.ordered_by(pause))
    for problem in document["problems"]:
        lines += wrapped("problem     ", problem)
    last = document["last_pass"]
    lines.append(f"mode        {document['mode']}")
    lines += wrapped("last pass   ", _last_pass(last, document["time"]))
    nodes = document["nodes"]
    silent = nodes["silent"]
    said = f"{nodes['heard']} heard of, {len(nodes['out_of_service'])} out of service"
    told = f"; SILENT {len(silent)}: {_some(silent)}" if silent else "; silent: none"
    lines += wrapped("nodes       ", said + told)
    for one in document["grants"]:
        lines += wrapped("grant       ", _grant_line(one))
    lines += under_recovery.text(document["jobs"])
    for one in document["open"][:_OPEN_SHOWN]:
        lines += wrapped("open        ", f"{one['id']} {one['state']}: {one['why']}")
    if len(document["open"]) > _OPEN_SHOWN:
        rest = len(document["open"]) - _OPEN_SHOWN
        lines.append(f"open        and {rest} more: recovery incidents")
    if not document["open"]:
        lines.append("open        nothing")
    return "\n".join(lines)


def _together(pauses: Iterable[Pause]) -> list[Pause]:
    """Pauses of many nodes by one order as one, with the names in a list."""
    alike: dict[tuple[str, str, str], list[Pause]] = {}
    for one in pauses:
        alike.setdefault((one.scope, one.who, one.why), []).append(one)
    return [replace(group[0], name=compress(one.name for one in group)) for group in alike.values()]


def _needed(concerns: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each thing to do; nodes that need the same are told together."""
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in concerns:
        kind, _, name = one["subject"].partition(" ")
        alike.setdefault((one["what"], "" if kind == "node" else name), []).append(one)
    said = []
    for (what, _), group in alike.items():
        first = group[0]
        who = f" of {first['owner']}" if first["owner"] and first["subject"][:3] == "job" else ""
        subject = f"{first['subject']}{who}"
        if len(group) > 1:
            names = [one["subject"].partition(" ")[2] for one in group]
            subject = f"{len(group)} nodes, {compress(names)}"
        longest = max(one["age_seconds"] for one in group)
        said.append(f"{subject}, for {age(longest)}: {what}")
    return said


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SILENT_NAMED} more" if len(names) > _SILENT_NAMED else ""
    return compress(names[:_SILENT_NAMED]) + more


def _last_pass(last: str | None, now: str) -> str:
    if not last:
        return "none: is `recovery run` running?"
    seconds = seconds_of(now) - seconds_of(last)
    if seconds < -_CLOCKS_AGREE_SECONDS:
        return f"{last}, which is yet to come by this clock: was it set back?"
    late = ": is `recovery run` running?" if seconds > LATE_PASS_SECONDS else ""
    return f"{last}, {age(seconds)} ago{late}"


def grants_document(config: Config, stand: Sequence[guard.Standing]) -> dict[str, Any]:
    """Return ``grants/v1``: every grant of the configuration and how it stands."""
    acting = config.mode == "act"
    return {
        "schema": "grants/v1",
        "mode": config.mode,
        "grants": [
            {
                "actions": list(one.grant.actions),
                "scope": scope_text(one.grant),
                "in_force": one.in_force and acting,
                "state": one.state if acting or not one.in_force else "ready",
                "why": one.why if acting else f"monitor mode; {one.why}",
            }
            for one in stand
        ],
    }


def grants(document: Mapping[str, Any]) -> str:
    """Return the grants document in words."""
    lines = [text for one in document["grants"] for text in wrapped("", _grant_line(one))]
    return "\n".join(lines) or "no grant is configured: everything is only recorded"


def _grant_line(one: Mapping[str, Any]) -> str:
    return f"{', '.join(one['actions'])} ({one['scope']}): {one['state']}, {one['why']}"
