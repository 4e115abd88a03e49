"""Text for a terminal of 80 columns: status, decisions in a line, a decision as a story."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from recovery import guard, pausing
from recovery.controls import Pause
from recovery.decision import Decision
from recovery.store import Store
from slurm_hooks.config import Config, Grant
from slurm_hooks.record import seconds_of

WIDTH = 80
SILENT_SECONDS = 900.0
"""A node whose last heartbeat is older than this is shown as silent, not as healthy."""


def line(decision: Decision) -> str:
    """Return a decision in one line: when, what about, which answers, how it stands."""
    about = f"job {decision.attempt.job_id}" if decision.attempt else decision.incident
    answers: list[str] = [decision.job.verdict] if decision.attempt else []
    answers += [f"{answer.verdict} {answer.node}" for answer in decision.nodes]
    return _printable(
        f"{decision.id}  {decision.time[:19]}Z  {about}: {', '.join(answers) or 'leave'}"
        f"  [{decision.cause.fault_class}, {_standing(decision)}]"
    )


def story(decision: Decision) -> str:
    """Return the whole decision in the order in which it happened, for a reader who was asleep."""
    about = f"job {decision.attempt.job_id}" if decision.attempt else decision.incident
    lines = [f"{decision.id}  {about}  ({_standing(decision)})", ""]
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
    if decision.attempt:
        lines += _bullet(f"job: {decision.job.verdict}: {decision.job.reason}")
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
    for addendum in decision.addenda:
        lines += _bullet(f"later: {addendum}")
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
    return {
        "schema": "status/v1",
        "time": now,
        "mode": config.mode,
        "grants": grants_document(config)["grants"],
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
            {"id": d.id, "incident": d.incident, "state": _standing(d), "why": d.cause.summary}
            for d in opened
        ],
    }


def status(document: Mapping[str, Any]) -> str:
    """Return the status document in words."""
    lines = [f"mode        {document['mode']}"]
    last = document["last_pass"]
    lines.append(f"last pass   {last or 'none: is `recovery run` running?'}")
    nodes = document["nodes"]
    heard = f"nodes       {nodes['heard']} heard of"
    lines.append(f"{heard}, silent: {', '.join(nodes['silent']) or 'none'}")
    for breaker in document["breakers"]:
        lines += _wrapped("BREAKER     ", f"{breaker['kind']}: {breaker['why']}")
    for pause in document["pauses"]:
        lines += _wrapped("PAUSED      ", pausing.ordered_by(Pause(**pause)))
    for problem in document["problems"]:
        lines += _wrapped("problem     ", problem)
    for one in document["grants"]:
        lines += _wrapped("grant       ", _grant_line(one))
    for one in document["open"]:
        lines += _wrapped("open        ", f"{one['id']} {one['state']}: {one['why']}")
    if not document["open"]:
        lines.append("open        nothing")
    return "\n".join(lines)


def grants_document(config: Config) -> dict[str, Any]:
    """Return ``grants/v1``: every grant of the configuration and how it stands."""
    standings = [guard.standing(grant, guard.Agreement()) for grant in config.grant]
    return {
        "schema": "grants/v1",
        "mode": config.mode,
        "grants": [
            {
                "actions": list(one.grant.actions),
                "scope": _scope(one.grant),
                "in_force": one.in_force and config.mode == "act",
                "why": one.why if config.mode == "act" else f"monitor mode; {one.why}",
            }
            for one in standings
        ],
    }


def grants(document: Mapping[str, Any]) -> str:
    """Return the grants document in words."""
    lines = [text for one in document["grants"] for text in _wrapped("", _grant_line(one))]
    return "\n".join(lines) or "no grant is configured: everything is only recorded"


def _scope(grant: Grant) -> str:
    parts = (
        ("partitions", grant.partitions),
        ("accounts", grant.accounts),
        ("users", grant.users),
        ("qos", grant.qos),
    )
    return "; ".join(f"{name} {', '.join(names)}" for name, names in parts if names) or "everywhere"


def _grant_line(one: Mapping[str, Any]) -> str:
    state = "in force" if one["in_force"] else "waiting"
    return f"{', '.join(one['actions'])} ({one['scope']}): {state}, {one['why']}"


def _standing(decision: Decision) -> str:
    """How a decision stands, in a word or two."""
    if decision.outcome:
        return decision.outcome.state
    states: Sequence[str] = [action.state for action in decision.actions]
    for state in ("failed", "planned", "done", "abandoned", "verified", "recorded"):
        if state in states:
            return state
    return "no action"


def _restart(decision: Decision) -> int:
    return decision.attempt.restart if decision.attempt else 0


def _clock(time: str) -> str:
    return f"{time[11:19]}Z" if time else "?"


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(_printable(text), WIDTH)


def _bullet(text: str) -> list[str]:
    return textwrap.wrap(_printable(text), WIDTH, initial_indent="  ", subsequent_indent="      ")


def _printable(text: str) -> str:
    """A user's log line may hold what would move the cursor or retitle the admin's terminal."""
    return "".join(one if one.isprintable() else " " for one in text)


def _wrapped(title: str, text: str) -> list[str]:
    return textwrap.wrap(
        _printable(text), WIDTH, initial_indent=title, subsequent_indent=" " * len(title)
    ) or [title.rstrip()]
