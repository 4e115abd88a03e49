"""A story on a terminal: what a person must do first, then each event under its heading."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from recovery.decision import Decision
from recovery.report.story import COMMAND, Known, of_decisions
from recovery.report.words import WIDTH, age, bounded, printable, wrapped

_INDENT = " " * 12


def story(document: Mapping[str, Any]) -> str:
    """Return a ``story/v1`` document in words, for a reader who was asleep."""
    lines = to_do(document["to_do"], document["settled"])
    lines += ["", *wrapped("", document["title"])]
    for fact in document["facts"]:
        lines += wrapped("  ", fact)
    return "\n".join([*lines, *events(document["events"])])


def decision(made: Decision) -> str:
    """Return what a decision alone tells, for whoever has no index at hand or judges it."""
    about = f"job {made.attempt.job_id}" if made.attempt else made.incident
    whose = f" of {made.owner}, partition {made.partition}" if made.attempt else ""
    title = printable(f"{made.id}  {about}{whose}  ({made.standing})")
    told = [asdict(one) for one in of_decisions([made], Known())]
    return "\n".join([title, *events(told)])


def to_do(needed: Sequence[Mapping[str, Any]], settled: str) -> list[str]:
    """Return the first lines: what a person must do, or that there is nothing, and why."""
    lines: list[str] = []
    for one in needed:
        who = f" of {one['owner']}" if one["owner"] and one["subject"].startswith("job") else ""
        seen_to = f" ({one['who']} looks after it)" if one["who"] else ""
        said = f"{one['subject']}{who}, for {age(one['age_seconds'])}{seen_to}: {one['what']}"
        lines += wrapped("NEEDS YOU   " if not one["who"] else "seen to     ", said)
    if not any(not one["who"] for one in needed):
        lines = [*wrapped("TO DO       ", f"nothing: {settled}"), *lines]
    return lines


def events(told: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return events in lines, a paragraph for each attempt, each decision and what followed it."""
    lines: list[str] = []
    heading, day = "", ""
    for one in told:
        title, date = _heading(one, heading), one["time"][:10]
        if title != heading:
            lines += ["", *wrapped("", f"{title}, {date}")]
        elif date != day:
            lines += [f"  {date}"]
        heading, day = title, date
        lines += _entry(one)
    return lines


def _heading(event: Mapping[str, Any], before: str) -> str:
    if event["kind"] == "decided":
        return f"Decided {event['text']}"
    if event["kind"] == "followed":
        # What is still done about one attempt while the next one runs stays where that is told.
        return before if before.startswith(("Attempt", "History")) else "What followed"
    return f"Attempt {event['attempt']}" if event["attempt"] else "History"


def _entry(event: Mapping[str, Any]) -> list[str]:
    clock = f"  {event['time'][11:19]}Z "
    text = event["text"]
    if event["kind"] == "decided":
        text, *details = event["details"]
    else:
        details = event["details"]
    lines = textwrap.wrap(
        bounded(text), WIDTH, initial_indent=clock, subsequent_indent=_INDENT + "  "
    ) or [clock.rstrip()]
    for detail in details:
        # A command's list of jobs must be one word to the shell, whole and however long.
        is_command = COMMAND in detail
        lines += textwrap.wrap(
            printable(detail) if is_command else bounded(detail),
            WIDTH,
            initial_indent=_INDENT,
            subsequent_indent=_INDENT + "  ",
            break_long_words=not is_command,
            break_on_hyphens=not is_command,
        )
    return lines
