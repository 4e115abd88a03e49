"""What people type for a job or a decision, and what of the index it stands for.

    >>> job("6_2"), job("0012"), job("12+1")
    ('6_2', '12', '12+1')
    >>> job("6_[1-5]")
    Traceback (most recent call last):
    recovery.naming.UnknownForm: '6_[1-5]' is no job as squeue names one: 12, task 6_2, part 12+1

Owns the forms of a job's name (``man squeue``, ``%i``: an array task is its array's number and its
own, a part of a heterogeneous job its leader's number and its place), the table of the index that
finds decisions by them, and ids of decisions that were typed in part.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from recovery.decision import Decision
from recovery.index_file import IndexFile

_FORM = re.compile(r"([0-9]{1,18})(?:([_+])([0-9]{1,18}))?")
"""Of at most 18 digits, which SQLite's integers hold; no cluster counts so far."""

_PART_CHARACTERS = 6
"""Shortest beginning of an id that is looked for: ``sinfo -R`` cuts a drain's reason after ten
characters of it, and fewer than these are the same for years."""

_LISTED = 5


class UnknownForm(ValueError):
    """A text that is no name of a job; it says how one is written."""


class Ambiguous(ValueError):
    """A text with which the ids of several decisions begin; it says which."""


def job(text: str) -> str:
    """Return a job's name as it is kept.

    Raises:
        UnknownForm: it is neither a number, nor a task's, nor a part's.
    """
    form = _FORM.fullmatch(text.strip())
    if form is None:
        shown = text if len(text) <= 40 else f"{text[:40]}…"
        raise UnknownForm(f"{shown!r} is no job as squeue names one: 12, task 6_2, part 12+1")
    number, kind, place = form.groups()
    return f"{int(number)}{kind}{int(place)}" if kind else str(int(number))


def whole(name: str) -> str:
    """Return what Slurm's commands call the job of a name: of a part, the number of its leader."""
    return name.partition("+")[0]


def put(file: IndexFile, decision: Decision) -> None:
    """Take in what the job of a decision is called."""
    if decision.attempt is None:
        return
    array, task, _ = decision.job_target.partition("_")
    names = {array, decision.job_target} if task else set[str]()
    for place, part in enumerate(decision.job_parts):
        names |= {str(part), f"{decision.attempt.job_id}+{place}"}
    names.add(str(decision.attempt.job_id))
    file.change_many(
        "INSERT OR IGNORE INTO job_names VALUES (?, ?, ?)",
        [(name, decision.time, decision.id) for name in names],
    )


def decision_id(file: IndexFile, typed: str) -> str | None:
    """Return the id that was typed, in whatever case, or of which it is the beginning.

    Raises:
        Ambiguous: several begin so.
    """
    if file.rows("SELECT 1 FROM decisions WHERE id = ?", (typed,)):
        return typed
    begin = _beginning(typed)
    if not begin:
        return None
    rows = file.rows(
        "SELECT id FROM decisions WHERE id >= ? AND id < ? ORDER BY id DESC LIMIT ?",
        (begin, f"{begin}~", _LISTED + 1),
    )
    return _only(typed, [found for (found,) in rows])


def among(ids: Collection[str], typed: str) -> str | None:
    """Return what ``decision_id`` would, of ``ids``.

    Raises:
        Ambiguous: several begin so.
    """
    begin = _beginning(typed)
    if typed in ids or not begin:
        return typed if typed in ids else None
    return _only(typed, sorted((one for one in ids if one.startswith(begin)), reverse=True))


def _beginning(typed: str) -> str:
    """What the ids that may be meant begin with, empty where that says too little."""
    begin = typed.upper().rstrip("…+:")  # as sinfo and terminals cut a text
    return begin if len(begin) >= _PART_CHARACTERS else ""


def _only(typed: str, ids: Sequence[str]) -> str | None:
    if len(ids) > 1:
        more = " and more" if len(ids) > _LISTED else ""
        some = ", ".join(ids[:_LISTED])
        raise Ambiguous(f"{typed} is the beginning of several decisions: {some}{more}")
    return ids[0] if ids else None
