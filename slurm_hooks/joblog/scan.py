"""Find the lines of a piece of a log that mean something.

A log is ordinary for gigabytes. So the bytes are searched for a few literals at memchr speed, and
only the lines that hold one are taken apart and matched against the signatures. Owns that search;
what the events mean together is ``attribute``'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from slurm_hooks.joblog import candidates, kernel, torchrun, tracebacks
from slurm_hooks.joblog.lines import TEXT_LIMIT, Line, parse
from slurm_hooks.joblog.read import Piece
from slurm_hooks.joblog.signatures import Catalogue, Signature, match

CANDIDATES_LIMIT = 60_000
"""Most lines of one piece that are taken apart; more are counted from both ends only."""

SAME_LINE_LIMIT = 2_048
"""Most lines that differ in digits alone (one from each rank) that are told apart."""

LAST_RESORT = ("python.traceback", "python.between_processes")
"""Signatures that only tracebacks get: the cause where nothing else is told."""

_DIGITS = b"0123456789"

_PROGRESS = re.compile(
    rb"(?i)(?:\b(?:iteration|iters?|global[_ ]?step|steps?|batch|samples)\b"
    rb"[\"']?\s*[:=\[( /#]+\s*\d+"
    rb"|\d+/\d+ ?\[\d+:\d\d|['\"]loss['\"]: |\bepoch\b[^\n]{0,40}\bloss\b)"
)

_NAN_LOSS = re.compile(rb"(?i)\bloss['\"]?\s*[:=]?\s*(?P<value>-?nan\b|[-+]?\d|inf\b)")


@dataclass(frozen=True)
class Event:
    """One line that a signature knows; ``link`` is the traceback that it ends, if any."""

    line: Line
    signature: Signature
    captures: Mapping[str, str] = field(default_factory=dict)
    trace: tracebacks.Traceback | None = None


@dataclass(frozen=True)
class Scanned:
    """What one piece holds: events in order of position, and more that needs the bytes themselves.

    ``repeats`` counts, by signature, the lines that were not told apart. ``nan_line`` is the
    first of the last progress lines that all have a loss which is no number.
    """

    events: tuple[Event, ...]
    repeats: Mapping[str, int]
    nan_line: Line | None = None


def scan(piece: Piece, catalogue: Catalogue, source: str = "") -> Scanned:
    """Return what ``piece`` holds for the signatures of ``catalogue``."""
    data = piece.data
    kernel_log = kernel.is_kernel_log(data)
    if kernel_log and kernel.is_dated(data):
        # Programs date their lines so too: the kernel's are known by what they tell.
        dated = [parse(data[start:end], start) for start, end in _all_lines(data)]
        kernel_log = any(True for _ in kernel.facts(dated, kernel_log))
    counter = _LineCounter(piece)
    found: dict[int, Event] = {}
    headers: list[int] = []
    repeats: dict[str, int] = {}
    shapes: dict[bytes, tuple[int, str | None]] = {}
    kernel_lines: list[Line] = []
    for start, end in _bounded(candidates.find(data, catalogue.anchors)):
        raw = data[start:end]
        if b"Traceback (most recent call last)" in raw and b"C++ Traceback" not in raw:
            headers.append(start)
            continue
        if kernel.is_kernel_line(raw):
            kernel_lines.append(parse(raw, piece.offset + start, counter.at(start), source))
            continue
        if kernel_log:
            continue
        shape = raw.translate(None, _DIGITS)
        seen, last = shapes.get(shape, (0, None))
        if seen >= SAME_LINE_LIMIT or (seen and last is None):
            shapes[shape] = (seen + 1, last)
            if last:
                repeats[last] = repeats.get(last, 0) + 1
            continue
        line = parse(raw, piece.offset + start, counter.at(start), source)
        matched = match(catalogue, line.text)
        shapes[shape] = (seen + 1, matched[0].id if matched else None)
        if matched:
            captures = matched[1]
            if matched[0].id == torchrun.SIGNATURE:
                captures = torchrun.first_failure(data, start, line)
            found[start] = Event(line, matched[0], captures)
    if kernel_log:
        kernel_lines = [
            parse(data[start:end], piece.offset + start, counter.at(start), source)
            for start, end in _all_lines(data)
        ]
    for start, event in _exceptions(piece, headers, found, catalogue, counter, source):
        if event is None:
            found.pop(start, None)
        else:
            found[start] = event
    events = [event for _, event in sorted(found.items()) if event.signature.role != "noise"]
    events += [Event(line, signature) for line, signature in kernel.facts(kernel_lines, kernel_log)]
    events.sort(key=lambda event: event.line.offset)
    return Scanned(tuple(events), repeats, _nan_line(piece, counter, source))


def progress_between(data: bytes, start: int, end: int) -> tuple[int, int]:
    """Return how many progress marks are between two positions, and in how many bytes.

    Long gaps are sampled at both ends.
    """
    if end - start <= 2 * _SAMPLE:
        return len(_PROGRESS.findall(data, start, end)), end - start
    first = len(_PROGRESS.findall(data, start, start + _SAMPLE))
    return first + len(_PROGRESS.findall(data, end - _SAMPLE, end)), end - start


_SAMPLE = 64 << 10


def _bounded(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    if len(spans) <= CANDIDATES_LIMIT:
        yield from spans
    else:
        yield from spans[: CANDIDATES_LIMIT // 2]
        yield from spans[-CANDIDATES_LIMIT // 2 :]


def _all_lines(data: bytes) -> Iterator[tuple[int, int]]:
    start = 0
    for _ in range(CANDIDATES_LIMIT):
        end = data.find(b"\n", start)
        if end < 0:
            break
        yield start, min(end, start + TEXT_LIMIT)
        start = end + 1
    if start < len(data):
        yield start, min(len(data), start + TEXT_LIMIT)


class _LineCounter:
    """Line numbers of ascending positions, each byte counted once."""

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._at = 0
        self._lines = 0

    def at(self, position: int) -> int | None:
        if self._piece.first_number is None:
            return None
        if position < self._at:
            return self._piece.first_number + self._piece.data.count(b"\n", 0, position)
        self._lines += self._piece.data.count(b"\n", self._at, position)
        self._at = position
        return self._piece.first_number + self._lines


def _exceptions(
    piece: Piece,
    headers: list[int],
    found: Mapping[int, Event],
    catalogue: Catalogue,
    counter: _LineCounter,
    source: str,
) -> Iterator[tuple[int, Event | None]]:
    """For each traceback, the event of its last line; None where it is no failure.

    One without a last line, or with one that mostly means nothing, is an event of its own kind.
    """
    generic, bare, pipes = map(catalogue.named, ("python.exception", *LAST_RESORT))
    for trace in tracebacks.walk(piece, headers, source):
        if trace.exception is None:
            if not (trace.teardown or trace.handled or trace.of_launcher):
                yield trace.header.offset - piece.offset, Event(trace.header, bare, {}, trace)
            continue
        start = trace.exception.offset - piece.offset
        if trace.teardown:
            yield start, None
            continue
        event = found.get(start)
        if trace.between_processes and any(name in trace.exception.text for name in pipes.any):
            line = event.line if event else trace.exception
            yield start, Event(line, pipes, {}, trace)
            continue
        if event is not None:
            hidden = event.signature.role == "noise" and not trace.handled
            signature = bare if hidden else event.signature
            yield start, Event(event.line, signature, event.captures, trace)
            continue
        line = parse(
            trace.exception.raw.encode(), trace.exception.offset, counter.at(start), source
        )
        matched = match(catalogue, line.text)
        signature, captures = matched if matched else (generic, {})
        yield start, Event(line, signature, captures, trace)


def _nan_line(piece: Piece, counter: _LineCounter, source: str) -> Line | None:
    """The first of the last lines with a loss, if all of the last three have none that is one."""
    data, values = piece.data, []
    tail = max(0, len(data) - _SAMPLE)
    for value in _NAN_LOSS.finditer(data, tail):
        values.append(value)
    bad: list[re.Match[bytes]] = []
    for value in reversed(values):
        if value["value"].lower().lstrip(b"-") != b"nan":
            break
        bad.append(value)
    if len(bad) < _NAN_LINES:
        return None
    start, end = candidates.line_around(data, bad[-1].start())
    return parse(data[start:end], piece.offset + start, counter.at(start), source)


_NAN_LINES = 3
"""Losses in a row that are no number before training counts as diverged; fewer may heal."""
