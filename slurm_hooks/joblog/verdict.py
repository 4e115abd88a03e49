"""One file, or several of one job, to the ``log-verdict/v1`` document.

    >>> from pathlib import Path
    >>> classify([Path("/no/such/log")]).document["job_verdict"]
    'requeue'

Owns the order of events over files, and which of them are near enough to the end to count.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_hooks import as_user
from slurm_hooks.joblog import flight_recorder, ras, waiting
from slurm_hooks.joblog.attribute import attribute
from slurm_hooks.joblog.cause import Cause, Surroundings
from slurm_hooks.joblog.layout import Layout
from slurm_hooks.joblog.lines import Line
from slurm_hooks.joblog.places import Places
from slurm_hooks.joblog.read import Excerpt, Limits, NotReadable, Piece, excerpt
from slurm_hooks.joblog.scan import Event, progress_between, scan
from slurm_hooks.joblog.signatures import Catalogue, load

SCHEMA = "log-verdict/v1"

TAIL_GROWTH = 4
"""How much more of the end is read where the first reading is all echo and no progress."""

_GONE_ON_BYTES = 16 << 10
_GONE_ON_MARKS = 30
"""Output with this much progress after a failure means that the failure was survived. Smaller
amounts may be a buffer that a dying process wrote out at its end (8 KiB each for C and Python)."""

_ADDRESS = re.compile(
    rb"([\w.-]+):\d+:\d+ \[\d+\] NCCL INFO (?:Bootstrap|NET/\w+) ?: Using [^\n]*?"
    rb"[\w.-]+:(\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3})<\d+>"
)

_ADDRESS_MARK = b": Using "
_ADDRESS_LINE_BYTES = 400
_ADDRESSES_LIMIT = 20_000

_RAS_FILE = re.compile(r"(?i)(?:^|[._-])(?:nccl)?ras(?:[._-]|$)")
_RAS_BYTES = 4 << 20

_TEXT_LIMIT = 1_000


@dataclass(frozen=True)
class Verdict:
    """The cause, the document that says it, and why a file could not be read, if one could not."""

    cause: Cause
    document: dict[str, Any]
    unreadable: Mapping[str, str] = field(default_factory=dict)


def classify(
    paths: Sequence[Path],
    layout: Layout | None = None,
    addresses: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    max_bytes: int = 256 << 20,
    extra: tuple[Path, ...] = (),
    dumps: Sequence[Path] = (),
) -> Verdict:
    """Read the logs ``paths`` of one job and say what ended it.

    ``addresses`` are hosts by IP address, where the caller knows them. More of a file's end is
    read, up to ``max_bytes``, while what was read holds nothing but the failure's echo. ``dumps``
    are files that its ranks' flight recorders or NCCL's RAS wrote in this attempt.

    Raises:
        SignatureError: the signatures, or a site's in the folders ``extra``, are wrong.
    """
    catalogue, limits = load(*extra), limits or Limits()
    events: list[Event] = []
    repeats: dict[str, int] = {}
    known = dict(addresses or {})
    nan_line: Line | None = None
    excerpts: list[Excerpt] = []
    unreadable: dict[str, str] = {}
    report = _ras(dumps)
    for path in paths:
        try:
            read, found = _file(path, catalogue, limits, max_bytes)
        except NotReadable as problem:
            unreadable[str(path)] = str(problem)
            continue
        excerpts.append(read)
        events += found.events
        nan_line = nan_line or found.nan_line
        known = {**found.addresses, **known}
        report = found.ras or report
        for name, count in found.repeats.items():
            repeats[name] = repeats.get(name, 0) + count
    flight = flight_recorder.read(path for path in dumps if not _RAS_FILE.search(path.name))
    around = Surroundings(layout or Layout(), known, repeats, nan_line, flight, report)
    ordered = _in_order(events)
    cause = attribute(ordered, around, catalogue)
    document = _document(cause, catalogue, excerpts)
    document["first_failure"] = _first_failure(ordered, around)
    document["dumps"] = {"ranks": len(flight.ranks), "unread": len(flight.unreadable)}
    return Verdict(cause, document, unreadable)


def _ras(files: Sequence[Path]) -> ras.RasReport | None:
    """The last of NCCL's own reports among ``files``, by name."""
    report = None
    for path in sorted(file for file in files if _RAS_FILE.search(file.name)):
        with contextlib.suppress(OSError):
            report = ras.find(as_user.read_start(path, _RAS_BYTES)) or report
    return report


def _first_failure(events: Sequence[Event], around: Surroundings) -> dict[str, Any] | None:
    """torchrun's word on the rank that failed first: node, rank, exit code, signal number."""
    told = waiting.first_failure(events)
    if told is None:
        return None
    numbers = {
        name: int(told.captures[key]) if key in told.captures else None
        for name, key in (("rank", "rank"), ("exit_code", "code"), ("signal", "number"))
    }
    node = Places(events, around.layout, around.addresses).node(told.captures.get("host", ""))
    return {"node": node or None, **numbers}


@dataclass(frozen=True)
class _Found:
    events: Sequence[Event]
    repeats: Mapping[str, int]
    nan_line: Line | None
    addresses: Mapping[str, str]
    ras: ras.RasReport | None
    all_echo: bool


def _file(
    path: Path, catalogue: Catalogue, limits: Limits, max_bytes: int
) -> tuple[Excerpt, _Found]:
    while True:
        read = excerpt(path, limits)
        found = _look(read, catalogue)
        tail = limits.tail * TAIL_GROWTH
        if not found.all_echo or not read.unread_bytes or tail + limits.head > max_bytes:
            return read, found
        limits = limits.with_tail(tail)


def _look(read: Excerpt, catalogue: Catalogue) -> _Found:
    events: list[Event] = []
    repeats: dict[str, int] = {}
    nan_line: Line | None = None
    addresses: dict[str, str] = {}
    report = None
    all_echo = False
    for piece in read.pieces:
        scanned = scan(piece, catalogue, read.path)
        current = _near_the_end(scanned.events, piece)
        last = piece is read.pieces[-1]
        # Of the beginning of a long log, only who is who is of use: the end is in the last piece.
        if last:
            events, repeats, nan_line = list(current), dict(scanned.repeats), scanned.nan_line
            report = ras.find(piece.data)
            all_echo = (
                bool(current) and len(read.pieces) > 1 and _no_progress_before(current, piece)
            )
        for host, address in _addresses(piece.data):
            addresses.setdefault(address, host)
    return _Found(events, repeats, nan_line, addresses, report, all_echo)


def _addresses(data: bytes) -> Iterator[tuple[str, str]]:
    """Hosts and IP addresses, as each process of NCCL prints its own when it starts."""
    at = data.find(_ADDRESS_MARK)
    for _ in range(_ADDRESSES_LIMIT):
        if at < 0:
            break
        start = data.rfind(b"\n", max(0, at - _ADDRESS_LINE_BYTES), at) + 1
        found = _ADDRESS.search(data, start, at + _ADDRESS_LINE_BYTES)
        if found:
            yield found[1].decode(), found[2].decode()
        at = data.find(_ADDRESS_MARK, at + 1)


def _near_the_end(events: Sequence[Event], piece: Piece) -> Sequence[Event]:
    """The events after which the program did not go on."""
    data, end = piece.data, len(piece.data)
    for index in range(len(events) - 1, -1, -1):
        start = events[index].line.offset - piece.offset
        if _went_on(data, start, end):
            return events[index + 1 :]
        end = start
    return events


def _went_on(data: bytes, start: int, end: int) -> bool:
    if end - start < _GONE_ON_BYTES:
        return False
    marks, _ = progress_between(data, start, end)
    return marks >= _GONE_ON_MARKS


def _no_progress_before(events: Sequence[Event], piece: Piece) -> bool:
    first = events[0].line.offset - piece.offset
    return progress_between(piece.data, 0, first)[0] == 0


def _in_order(events: Sequence[Event]) -> list[Event]:
    """Events by time where both files tell one, else file by file as given."""
    if len({event.line.source for event in events}) < 2:
        return list(events)
    if any(event.line.seconds is None for event in events):
        return list(events)
    return sorted(events, key=lambda event: event.line.seconds or 0.0)


def _document(cause: Cause, catalogue: Catalogue, excerpts: Sequence[Excerpt]) -> dict[str, Any]:
    line = cause.line
    described = {signature.id: signature for signature in catalogue.signatures}
    return {
        "schema": SCHEMA,
        "class": cause.fault_class,
        "confidence": cause.confidence,
        "job_verdict": cause.job_verdict,
        "cause": {
            "line": line.raw[:_TEXT_LIMIT],
            "number": line.number,
            "text": line.text.strip()[:_TEXT_LIMIT],
            "file": line.source,
            "offset": line.offset,
        }
        if line
        else None,
        "implicated": [
            {"node": one.node, "rank": one.rank, "gpu": one.gpu, "why": one.why}
            for one in cause.implicated
        ],
        "cascade": cause.cascade,
        "signatures": [
            {
                "id": name,
                "role": described[name].role if name in described else "root",
                "count": count,
            }
            for name, count in cause.signatures.items()
        ],
        "read": [
            {"file": read.path, "bytes": read.size, "unread_bytes": read.unread_bytes}
            for read in excerpts
        ],
    }
