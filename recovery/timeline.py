"""What was done about a decision or a subject, step by step and each with its time.

Owns that table of the index. A decision keeps how each of its actions stands now; by which steps
that came, when evidence came late, and who said to look after something, the journal's events tell.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from recovery.index_file import IndexFile

EVENTS = ("decision", "action", "addendum", "ack")
"""The journal's event types that ``put`` takes something of."""

_LIMIT = 2000
"""Most turns that are read at once, the newest: some hundred attempts of a job."""


@dataclass(frozen=True)
class Turn:
    """One thing that happened: ``kind`` is ``action``, ``addendum`` or ``ack``.

    ``subject`` is a decision's id, or for an ``ack`` what somebody looks after (``node n3``).
    ``what`` holds the fields of the event that tell of it.
    """

    subject: str
    time: str
    kind: str
    what: Mapping[str, Any]


def put(file: IndexFile, event: Mapping[str, Any]) -> None:
    """Take in an event of EVENTS.

    Raises:
        KeyError: it lacks a part.
    """
    rows = [
        (turn.subject, event["seq"], place, turn.time, turn.kind, json.dumps(turn.what))
        for place, turn in enumerate(_turns(event))
    ]
    file.change_many("INSERT OR IGNORE INTO timeline VALUES (?, ?, ?, ?, ?, ?)", rows)


def of(file: IndexFile, subjects: Collection[str]) -> list[Turn]:
    """Return what happened to ``subjects``, in order."""
    marks = ",".join("?" * len(subjects))
    rows = file.rows(
        f"SELECT subject, time, kind, what FROM timeline WHERE subject IN ({marks})"
        " ORDER BY seq DESC, place DESC LIMIT ?",
        (*subjects, _LIMIT),
    )
    return [Turn(subject, time, kind, json.loads(what)) for subject, time, kind, what in rows[::-1]]


def _turns(event: Mapping[str, Any]) -> Iterable[Turn]:
    kind, time = event["type"], event["time"]
    if kind == "decision":
        made = event["decision"]
        return [Turn(made["id"], made["time"], "action", _action(one)) for one in made["actions"]]
    if kind == "action":
        return [Turn(event["decision"], time, "action", _action(event["action"]))]
    if kind == "addendum":
        return [Turn(event["decision"], time, "addendum", {"text": str(event["text"])})]
    what = {"who": str(event["who"]), "by": str(event.get("by", ""))}
    return [Turn(str(event["subject"]), time, "ack", what)]


def _action(document: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: str(document.get(key, "")) for key in ("kind", "target", "state", "step", "detail")
    }
