"""Which findings are news: a fault that stays, or comes and goes, is not a new one each minute.

Pure: what a health check found, what earlier ones had reported, and the time go in; whether a
record is due comes out. A repeated finding tells its history as evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from slurm_hooks.frozen import frozen
from slurm_hooks.record import SEVERITIES, Evidence, Finding, ProbeResult, utc

ENTRIES_LIMIT = 1000
"""Most things remembered; the longest unseen are forgotten first."""

MEASUREMENTS = ("progress.seen", "hang.evidence")
"""Codes that are news at each look: that a job's step is the same as before is what a hang is seen
by, and an answer is owed to whoever asks. Only jobs that opted in have them."""

_KEYS_LIMIT = 64
"""Most observations remembered of one thing."""


@frozen
class Entry:
    """What is remembered of one finding, or of one probe that does not end well.

    Times are seconds since the epoch. ``returns`` counts how often it was gone and came back;
    ``keys`` are the observations (``Evidence.key``) that have been seen.
    """

    first: float
    last: float
    reported: float
    severity: str
    runs: int = 1
    count: int = 0
    returns: int = 0
    present: bool = True
    keys: tuple[str, ...] = ()


@frozen
class Review:
    """Whether a record is due; the findings, each with its history; and what to remember."""

    due: bool
    findings: tuple[Finding, ...]
    memory: Mapping[str, Any]


def review(
    memory: Mapping[str, Any],
    boot_id: str,
    findings: Sequence[Finding],
    results: Iterable[ProbeResult],
    now: float,
    repeat_seconds: float,
) -> Review:
    """Judge what a health check found against ``memory``, which an earlier review returned.

    A finding is due when it is new, graver than reported, or was last reported ``repeat_seconds``
    ago; a fault or worse also when its evidence names an observation not seen before (another Xid
    is another fact, the same register read again is not). A reboot starts everything anew.
    """
    before = _entries(memory) if memory.get("boot_id") == boot_id else {}
    after = {name: replace(entry, present=False) for name, entry in before.items()}
    due = False
    told: list[Finding] = []
    seen = [
        (_name(finding), finding.severity, _keys(finding), finding.count, finding)
        for finding in findings
    ]
    ended = [
        (f"probe {r.name} {r.status}", "warning", (), 1, None)
        for r in results
        if r.status not in ("ok", "findings", "skipped")
    ]
    for name, severity, keys, count, finding in (*seen, *ended):
        old = before.get(name)
        measured = finding is not None and finding.code in MEASUREMENTS
        is_due = old is None or measured or _is_due(old, severity, keys, now, repeat_seconds)
        due = due or is_due
        entry = (
            _seen_again(old, severity, keys, count, now)
            if old
            else Entry(now, now, now, severity, count=count, keys=keys[-_KEYS_LIMIT:])
        )
        after[name] = entry
        if finding is not None:
            told.append(_with_history(finding, entry) if old else finding)
    if due:  # one record tells all that is there now
        present = {
            name: replace(entry, reported=now) for name, entry in after.items() if entry.present
        }
        after.update(present)
    newest = sorted(after.items(), key=lambda item: item[1].last)[-ENTRIES_LIMIT:]
    remembered = {name: asdict(entry) for name, entry in newest}
    return Review(due, tuple(told), {"boot_id": boot_id, "entries": remembered})


def _is_due(
    old: Entry, severity: str, keys: tuple[str, ...], now: float, repeat_seconds: float
) -> bool:
    # A clock that was set back must not silence a node until it has caught up.
    if not 0 <= now - old.reported < repeat_seconds:
        return True
    if SEVERITIES.index(severity) > SEVERITIES.index(old.severity):
        return True
    return severity in ("fault", "fatal") and bool(set(keys) - set(old.keys))


def _seen_again(old: Entry, severity: str, keys: tuple[str, ...], count: int, now: float) -> Entry:
    fresh = [key for key in keys if key not in old.keys]
    return replace(
        old,
        last=now,
        severity=severity,
        runs=old.runs + 1,
        count=old.count + count,
        returns=old.returns + (0 if old.present else 1),
        present=True,
        keys=(*old.keys, *fresh)[-_KEYS_LIMIT:],
    )


def _with_history(finding: Finding, entry: Entry) -> Finding:
    words = f"seen in {entry.runs} health checks since {utc(entry.first)}"
    if entry.returns:
        words += f", gone and back {entry.returns} times"
    if entry.count > entry.runs:
        words += f", {entry.count} observations in all"
    return replace(finding, evidence=(Evidence("history", words), *finding.evidence))


def _name(finding: Finding) -> str:
    about = (
        finding.gpu,
        finding.uuid,
        finding.pci,
        finding.link,
        finding.port,
        finding.rank,
        finding.step,
        finding.file,
        finding.job_id,
    )
    return " ".join([finding.code, *("-" if part is None else str(part)[:100] for part in about)])


def _keys(finding: Finding) -> tuple[str, ...]:
    return tuple(item.key for item in finding.evidence if item.key)


def _entries(memory: Mapping[str, Any]) -> dict[str, Entry]:
    """The entries of a memory file; one that is not of this form is forgotten."""
    found = {}
    entries = memory.get("entries")
    for name, fields in entries.items() if isinstance(entries, dict) else ():
        try:
            found[name] = Entry(**{**fields, "keys": tuple(fields["keys"])})
            if found[name].severity not in SEVERITIES:
                del found[name]
        except (TypeError, KeyError):
            continue
    return found
