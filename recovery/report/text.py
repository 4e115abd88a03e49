"""Text for a terminal of 80 columns: status, decisions in a line, a decision as a story."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from recovery import concerns, guard, pausing
from recovery.controls import Pause
from recovery.decision import Decision
from recovery.grants import scope_text, standings
from recovery.slurm.hostlist import compress
from recovery.store import Store
from slurm_hooks.config import Config
from slurm_hooks.record import seconds_of

WIDTH = 80
_SILENT_NAMED = 12

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
        f"  [{decision.cause.fault_class}, {standing(decision)}]"
    )
    return "\n".join(textwrap.wrap(told, WIDTH, subsequent_indent="    "))


def story(decision: Decision) -> str:
    """Return the whole decision in the order in which it happened, for a reader who was asleep."""
    about = f"job {decision.attempt.job_id}" if decision.attempt else decision.incident
    lines = [f"{decision.id}  {about}  ({standing(decision)})", ""]
    if decision.attempt:
        who = f"{decision.job_name!r} of {decision.owner}, partition {decision.partition}"
        lines += _paragraph(f"Job {decision.attempt.job_id}, {who}, restart {_restart(decision)}.")
        ended = f"{_clock(decision.ended_time or decision.time)}  ended {decision.ended}"
        lines += _paragraph(f"{ended} on {', '.join(decision.job_nodes)}.")
    steps = []
    if decision.checkpoint_step is not None:
        steps.append(f"newest whole checkpoint at step {decision.checkpoint_step}")
    if decision.progress_step is not None:
        steps.append(f"work had reached step {decision.progress_step}")
    if steps:
        lines += _paragraph(f"{'; '.join(steps).capitalize()}.")
    lines += ["", "What was seen"]
    for excerpt in decision.evidence:
        lines += _bullet(f"{_clock(excerpt.time)}  {excerpt.node}  {excerpt.code}: {excerpt.text}")
    cause = decision.cause
    lines += ["", "Cause"]
    lines += _bullet(f"{cause.fault_class}, {cause.confidence}: {cause.summary}")
    lines += ["", f"Decided {_clock(decision.time)}"]
    if decision.attempt or decision.members:
        lines += _bullet(f"job: {decision.job.verdict}: {decision.job.reason}")
    if decision.fleet:
        lines += _bullet(f"follows {decision.fleet}, on all that one cause has hit")
    for answer in decision.nodes:
        lines += _bullet(f"{answer.node}: {answer.verdict}: {answer.reason}")
    lines += _bullet(f"rule {decision.rule}")
    if decision.revises:
        lines += _bullet(f"in the place of {decision.revises}, for evidence that came late")
    for title, texts in (
        ("limit", decision.limits),
        ("considered", decision.considered),
        ("would have changed it", decision.would_change),
        ("limited by", decision.limited_by),
    ):
        for item in texts:
            lines += _bullet(f"{title}: {item}")
    lines += _members(decision)
    lines += ["", "Actions"]
    for action in decision.actions:
        state = f"{_clock(action.time)}  {action.name}: {action.state}"
        lines += _bullet(f"{state}: {action.detail}" if action.detail else state)
    if not decision.actions:
        lines += _bullet("none")
    if decision.outcomes:
        lines += ["", "Outcome"]
    for outcome in decision.outcomes:
        lines += _bullet(f"{_clock(outcome.time)}  {outcome.state}: {outcome.detail}")
    if decision.rerun:
        lines += _bullet(f"{_clock(decision.rerun)}  somebody else ran the job again")
    for addendum in decision.addenda:
        lines += _bullet(f"later: {addendum}")
    if decision.reviews:
        lines += ["", "Reviews"]
    for review in decision.reviews:
        would = f", would have: {review.would_have}" if review.would_have else ""
        note = f": {review.note}" if review.note else ""
        lines += _bullet(f"{_clock(review.time)}  {review.who}: {review.verdict}{would}{note}")
    return "\n".join(lines)


def status_document(config: Config, store: Store, now: str) -> dict[str, Any]:
    """Return ``status/v1``; a node whose heartbeat is old is silent, whatever it last said."""
    beats = store.heartbeats()
    silent = [
        node
        for node, beat in beats.items()
        if seconds_of(now) - seconds_of(beat["received"]) > SILENT_SECONDS
    ]
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
        "nodes": {"heard": len(beats) - len(silent), "silent": silent},
        "open": [
            {"id": d.id, "incident": d.incident, "state": standing(d), "why": d.cause.summary}
            for d in opened
        ],
    }


def status(document: Mapping[str, Any]) -> str:
    """Return the status document in words: what a person must do comes first."""
    lines: list[str] = []
    for one in document["needs_a_person"]:
        who = f" of {one['owner']}" if one["owner"] and one["subject"].startswith("job") else ""
        said = f"{one['subject']}{who}, for {age(one['age_seconds'])}: {one['what']}"
        lines += wrapped("NEEDS YOU   ", said)
    for breaker in document["breakers"]:
        lines += wrapped("BREAKER     ", f"{breaker['kind']}: {breaker['why']}")
    for pause in document["pauses"]:
        lines += wrapped("PAUSED      ", pausing.ordered_by(Pause(**pause)))
    for problem in document["problems"]:
        lines += wrapped("problem     ", problem)
    last = document["last_pass"]
    lines.append(f"mode        {document['mode']}")
    lines += wrapped("last pass   ", _last_pass(last, document["time"]))
    nodes = document["nodes"]
    silent = nodes["silent"]
    named = ", ".join(silent[:_SILENT_NAMED])
    more = f" and {len(silent) - _SILENT_NAMED} more" if len(silent) > _SILENT_NAMED else ""
    said = f"{nodes['heard']} heard of, silent: {named or 'none'}{more}"
    lines += wrapped("nodes       ", said)
    for one in document["grants"]:
        lines += wrapped("grant       ", _grant_line(one))
    for one in document["open"]:
        lines += wrapped("open        ", f"{one['id']} {one['state']}: {one['why']}")
    if not document["open"]:
        lines.append("open        nothing")
    return "\n".join(lines)


def _last_pass(last: str | None, now: str) -> str:
    if not last:
        return "none: is `recovery run` running?"
    seconds = seconds_of(now) - seconds_of(last)
    late = ": is `recovery run` running?" if seconds > LATE_PASS_SECONDS else ""
    return f"{last}, {age(seconds)} ago{late}"


def age(seconds: float) -> str:
    """Return a duration as people say it: ``40 s``, ``12 min``, ``5 h``, ``3 days``."""
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


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


def standing(decision: Decision) -> str:
    """Return how a decision stands, in a word or two."""
    if decision.outcome:
        return decision.outcome.state
    states: Sequence[str] = [action.state for action in decision.actions]
    for state in ("failed", "planned", "done", "abandoned", "verified", "recorded"):
        if state in states:
            return state
    return "no action"


def _members(decision: Decision) -> list[str]:
    """Who one cause has hit: jobs with what was decided for each, and the nodes in one list."""
    jobs = [one for one in decision.members if one.subject.startswith("job ")]
    nodes = sorted({node for one in decision.members for node in one.nodes})
    lines = ["", f"Members: {len(jobs)} jobs, {len(nodes)} nodes"] if decision.members else []
    for one in jobs:
        told = f": {one.verdict}, {one.decision}" if one.decision else ""
        lines += _bullet(f"{_clock(one.time)}  {one.subject}{told}")
    if nodes:
        lines += _bullet(f"nodes {compress(nodes)}")
    held = [one.subject.partition(" ")[2] for one in jobs if one.verdict == "hold"]
    if held:
        lines += _bullet(f"once it is mended: scontrol release {','.join(held)}")
    return lines


def _restart(decision: Decision) -> int:
    return decision.attempt.restart if decision.attempt else 0


def _clock(time: str) -> str:
    return f"{time[11:19]}Z" if time else "?"


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(printable(text), WIDTH)


def _bullet(text: str) -> list[str]:
    return textwrap.wrap(printable(text), WIDTH, initial_indent="  ", subsequent_indent="      ")


def printable(text: str) -> str:
    """Return ``text`` without control characters.

    A user's log line may hold what would move the cursor or retitle the admin's terminal.
    """
    return "".join(one if one.isprintable() else " " for one in text)


def wrapped(title: str, text: str) -> list[str]:
    """Return ``text`` in lines of 80 columns, with ``title`` before the first."""
    return textwrap.wrap(
        printable(text), WIDTH, initial_indent=title, subsequent_indent=" " * len(title)
    ) or [title.rstrip()]
