"""What stops automation: a circuit breaker that opened by itself, a pause that a person ordered.

Both are events of the journal. Owns their rows in the index; what a pause covers is ``pausing``'s,
when a breaker opens ``guard``'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recovery.index_file import IndexFile

EVENTS = ("breaker", "pause")
"""The journal's event types that ``take_in`` understands."""


@dataclass(frozen=True)
class Breaker:
    """The circuit breaker of one kind of action, and why it stands as it does."""

    kind: str
    tripped: bool
    why: str
    time: str


@dataclass(frozen=True)
class Pause:
    """A person's order to send no command for a while.

    ``scope`` is ``all``, ``partition``, ``node`` or ``job``; ``name`` which one, empty for all.
    """

    scope: str
    name: str
    why: str
    who: str
    time: str


def take_in(file: IndexFile, event: Mapping[str, Any]) -> None:
    """Put an event of EVENTS into the index.

    Raises:
        KeyError: it lacks a part.
    """
    if event["type"] == "breaker":
        row = (event["kind"], bool(event["tripped"]), str(event["why"]), event["time"])
        file.change("INSERT OR REPLACE INTO breakers VALUES (?, ?, ?, ?)", row)
    elif event["paused"]:
        order = (event["scope"], event["name"], event["why"], event["who"], event["time"])
        file.change("INSERT OR REPLACE INTO pauses VALUES (?, ?, ?, ?, ?)", order)
    else:
        names = event["scope"], event["name"]
        file.change("DELETE FROM pauses WHERE scope = ? AND name = ?", names)


def breakers(file: IndexFile) -> dict[str, Breaker]:
    """Return the circuit breakers by their kind."""
    rows = file.rows("SELECT kind, tripped, why, time FROM breakers ORDER BY kind")
    return {kind: Breaker(kind, bool(tripped), why, time) for kind, tripped, why, time in rows}


def pauses(file: IndexFile) -> list[Pause]:
    """Return the pauses that hold, oldest first."""
    rows = file.rows("SELECT scope, name, why, who, time FROM pauses ORDER BY time, scope, name")
    return [Pause(*row) for row in rows]
