"""How anything is said on a terminal of 80 columns, or fewer: durations, wrapped lines."""

from __future__ import annotations

import shutil
import textwrap

WIDTH = max(40, min(80, shutil.get_terminal_size().columns))
"""Longest line: 80 columns, or what the terminal has; never so few that no word fits."""


_LONGEST = 600
"""Most characters of one thing that is told, eight lines; ``--json`` has the whole of it."""


def age(seconds: float) -> str:
    """Return a duration as people say it: ``40 s``, ``12 min``, ``5 h``, ``3 days``.

    Where a clock was set back, what is yet to come has an age of nothing.
    """
    seconds = max(0.0, seconds)
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def printable(text: str) -> str:
    """Return ``text`` without control characters.

    A user's log line may hold what would move the cursor or retitle the admin's terminal.
    """
    return "".join(one if one.isprintable() else " " for one in text)


def bounded(text: str) -> str:
    """Return ``text`` printable and of a length that leaves room for the rest; a cut shows."""
    text = printable(text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def cut(text: str) -> str:
    """Return ``text`` in one line of at most WIDTH, printable; where it is cut, that shows."""
    text = printable(text)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


def wrapped(title: str, text: str) -> list[str]:
    """Return ``text`` in lines of WIDTH columns, with ``title`` before the first."""
    return textwrap.wrap(
        bounded(text), WIDTH, initial_indent=title, subsequent_indent=" " * len(title)
    ) or [title.rstrip()]
