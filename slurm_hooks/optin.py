"""What a job's owner asks of this toolkit, read from the job's comment.

    >>> parse("recovery=requeue,max_restarts=1,logs='/data/a,b.log'").logs
    ('/data/a,b.log',)
    >>> parse("recovery=requeue,max_restart=1").problems
    ("unknown key 'max_restart'; did you mean 'max_restarts'?",)

Owns the three forms in which a comment may say it: a list of ``key=value``, the same as JSON
``{"recovery": {…}}``, and ``{"APS": {…}}`` as scripts written for NVIDIA's service have it (source:
NVIDIA Mission Control, autonomous job recovery tutorials). Pure, for hooks and controller alike.

A comment is a user's own text: an owner narrows what a grant allows and never widens it. So a
mistake never falls back to a default that does more than its writer meant: the job then counts as
not opted in, and ``problems`` says why, for the owner to read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from slurm_hooks.frozen import frozen

Mode = Literal["requeue", "hold", "off"]

MODES: tuple[Mode, ...] = ("requeue", "hold", "off")

TEXT_LIMIT = 4096
"""A comment of this many characters or more was perhaps cut (``context`` does); it is not read."""

RESTARTS_LIMIT = 1000
"""Largest ``max_restarts`` an owner may write; the site's own limit is far below."""

_PATH_LIMIT = 1024
_LOGS_LIMIT = 16
_PROBLEMS_LIMIT = 8

_KEYS = ("recovery", "max_restarts", "checkpoint", "logs", "progress", "noncritical")
_APS_KEYS = ("auto_resume_mode", "max_requeue_times")

_TYPO_LIKENESS = 0.75
"""How alike a foreign word must be to one of our keys to be its misspelling (difflib's ratio).

Comments are shared with other tools: ``project=`` is theirs (0.53 to ``progress``), ``log=`` ours.
"""

_ITEM = re.compile(
    r"""\s*(?P<key>[^\s=,"']+)\s*=\s*(?:"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<bare>[^,"']*))
        \s*(?:,|$)""",
    re.VERBOSE,
)

_TRUE, _FALSE = ("1", "true", "yes"), ("0", "false", "no")


@frozen
class OptIn:
    """An owner's wishes for one job.

    ``mode``: ``requeue`` may be run again, or held for its owner; ``hold`` may only be held;
    ``off`` leaves the job alone. ``max_restarts`` is the owner's own ceiling, None where only the
    site's counts. ``checkpoint``, ``progress`` and ``logs`` (shell patterns) are paths as written,
    relative to the job's working folder unless absolute; they are read as the job's user only.
    ``noncritical`` permits a drill to interrupt it. ``problems`` are sentences for the owner.
    """

    mode: Mode = "off"
    max_restarts: int | None = None
    checkpoint: str | None = None
    logs: tuple[str, ...] = ()
    progress: str | None = None
    noncritical: bool = False
    problems: tuple[str, ...] = ()

    @property
    def opted_in(self) -> bool:
        """The owner has asked for recovery, in words that leave no doubt."""
        return self.mode != "off" and not self.problems


class _Problem(Exception):
    """One thing in a comment that its owner has to mend."""


def parse(comment: str | None) -> OptIn:
    """Return what ``comment`` asks for; ``OptIn()`` where it does not speak of recovery at all."""
    text = (comment or "").strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1].strip()  # quoted once more than the shell needed
    if not text:
        return OptIn()
    if len(text) >= TEXT_LIMIT:
        if "recovery" not in text and "APS" not in text:
            return OptIn()
        return OptIn(problems=(f"a comment of {TEXT_LIMIT} characters or more is not read",))
    try:
        return _from_json(text) if text.startswith("{") else _from_list(text)
    except _Problem as problem:
        return OptIn(problems=(str(problem),))


def _from_list(text: str) -> OptIn:
    values: dict[str, Any] = {}
    foreign: list[str] = []
    place = 0
    broken = ""
    while place < len(text):
        item = _ITEM.match(text, place)
        if not item:
            end = text.find(",", place)
            end = len(text) if end < 0 else end
            word = text[place:end].strip()
            if _near(word.partition("=")[0], _KEYS) or word == "recovery":
                broken = broken or word
            place = end + 1
            continue
        place = item.end()
        key = item["key"]
        value = next(item[form] for form in ("double", "single", "bare") if item[form] is not None)
        if key not in _KEYS:
            foreign.append(key)
        elif key == "logs":
            values.setdefault("logs", []).append(value.strip())
        elif key in values:
            raise _Problem(f"{key!r} is there twice")
        else:
            values[key] = value.strip()
    if "recovery" not in values:
        meant = [key for key in foreign if _near(key, ("recovery",))]
        if meant:
            raise _Problem(f"unknown key {meant[0]!r}; did you mean 'recovery'?")
        if broken.startswith("recovery"):
            raise _Problem(f"cannot read {broken!r:.80}; write key=value, key=value")
        return OptIn()
    problems = [_unknown(key, _KEYS) for key in foreign if _near(key, _KEYS)]
    if broken:
        problems.append(f"cannot read {broken!r:.80}; write key=value, key=value")
    return _fill(values, problems)


def _from_json(text: str) -> OptIn:
    ours = re.search(r"recovery|\bAPS\b", text) is not None
    try:
        document = json.loads(text, object_pairs_hook=_no_key_twice)
    except _Problem:
        if ours:
            raise
        return OptIn()
    except (ValueError, RecursionError) as error:
        if not ours:
            return OptIn()
        raise _Problem(f"not valid JSON: {error}"[:200]) from None
    if "recovery" in document:
        wishes = document["recovery"]
        if isinstance(wishes, str):
            wishes = {"recovery": wishes}
        if not isinstance(wishes, dict):
            raise _Problem('"recovery" must be an object such as {"mode": "requeue"}')
        known = ("mode", *_KEYS)
        problems = [_unknown(key, known) for key in wishes if key not in known]
        if "mode" in wishes:
            if "recovery" in wishes:
                raise _Problem("'mode' and 'recovery' say the same; write one of them")
            wishes = {**wishes, "recovery": wishes["mode"]}
        return _fill({"recovery": "requeue", **wishes}, problems)
    if "APS" in document:
        return _from_aps(document["APS"])
    meant = [key for key in document if _near(key, ("recovery",)) or key.upper() == "APS"]
    if meant:
        raise _Problem(_unknown(meant[0], ("recovery", "APS")))
    return OptIn()


def _from_aps(wishes: object) -> OptIn:
    if not isinstance(wishes, dict):
        raise _Problem('"APS" must be an object such as {"auto_resume_mode": "requeue"}')
    # What else stands there is NVIDIA's to define; only a misspelling of what we read is ours.
    problems = [
        _unknown(key, _APS_KEYS) for key in wishes if key not in _APS_KEYS and _near(key, _APS_KEYS)
    ]
    mode = wishes.get("auto_resume_mode")
    if mode is None and not problems:
        raise _Problem("'auto_resume_mode' is missing")
    if mode == "singleton_dependency":
        raise _Problem("auto_resume_mode 'singleton_dependency' is not supported; use 'requeue'")
    values = {"recovery": "requeue" if mode is None else mode}
    if "max_requeue_times" in wishes:
        values["max_restarts"] = wishes["max_requeue_times"]
    return _fill(values, problems)


def _fill(values: Mapping[str, Any], problems: Iterable[str]) -> OptIn:
    found = OptIn()
    told = list(problems)
    readers: Mapping[str, Callable[[Any], dict[str, Any]]] = {
        "recovery": lambda value: {"mode": _mode(value)},
        "max_restarts": lambda value: {"max_restarts": _restarts(value)},
        "checkpoint": lambda value: {"checkpoint": _path("checkpoint", value)},
        "logs": lambda value: {"logs": _logs(value)},
        "progress": lambda value: {"progress": _path("progress", value)},
        "noncritical": lambda value: {"noncritical": _flag(value)},
    }
    for key, reader in readers.items():
        if key in values:
            try:
                found = replace(found, **reader(values[key]))
            except _Problem as problem:
                told.append(str(problem))
    return replace(found, problems=tuple(told[:_PROBLEMS_LIMIT]))


def _mode(value: object) -> Mode:
    if isinstance(value, str) and value in MODES:
        return value
    near = _closest(str(value), MODES, 0.6)
    advice = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(MODES)}"
    raise _Problem(f"recovery={value!r:.80} is not known; {advice}")


def _restarts(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,6}", value):
        value = int(value)
    if type(value) is not int or not 0 <= value <= RESTARTS_LIMIT:
        raise _Problem(
            f"max_restarts must be a whole number from 0 to {RESTARTS_LIMIT}, not {value!r:.40}"
        )
    return value


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in (*_TRUE, *_FALSE):
        return value.lower() in _TRUE
    raise _Problem(f"noncritical must be true or false, not {value!r:.40}")


def _path(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _Problem(f"{key} must be a path, not {value!r:.40}")
    if len(value) > _PATH_LIMIT:
        raise _Problem(f"{key} is longer than {_PATH_LIMIT} characters")
    if not value.isprintable():
        raise _Problem(f"{key} holds a control character")
    return value


def _logs(value: object) -> tuple[str, ...]:
    listed = value if isinstance(value, list) else [value]
    if len(listed) > _LOGS_LIMIT:
        raise _Problem(f"logs has more than {_LOGS_LIMIT} entries")
    return tuple(_path("logs", entry) for entry in listed)


def _unknown(key: str, known: Iterable[str]) -> str:
    near = _near(key, known) or _closest(key, known, 0.5)
    advice = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"unknown key {key!r:.60}; {advice}"


def _near(key: str, known: Iterable[str]) -> list[str]:
    """The known key that ``key`` misspells, if any."""
    return _closest(key.lower().replace("-", "_"), known, _TYPO_LIKENESS)


def _closest(word: str, known: Iterable[str], likeness: float) -> list[str]:
    import difflib  # only where a word is not known: hooks import this module for every job

    return difflib.get_close_matches(word[:64], list(known), n=1, cutoff=likeness)


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise _Problem("a key is there twice")
    return document
