"""The journal: every decision, action and outcome as one JSON line, in order, never changed.

    >>> import tempfile, pathlib
    >>> journal = Journal(pathlib.Path(tempfile.mkdtemp()) / "journal")
    >>> journal.append({"type": "addendum", "decision": "d1", "time": "…", "text": "later"})
    1
    >>> [event["seq"] for event in journal.events()]
    [1]

Owns the truth on the controller's own disk; the index (``store``) is derived from it. A part of
the journal is ``<first seq>.<day>.jsonl``, so that names sort as events happened even when the
clock was set back. Events are dictionaries; what one means is the business of who reads it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from slurm_hooks.record import utc

log = logging.getLogger(__name__)

PART_LIMIT_BYTES = 32 * 1024 * 1024
"""A part that has grown beyond this is followed by a new one, as it is on every new day."""

EVENT_LIMIT_BYTES = 4 * 1024 * 1024
"""Longest line written or read; a decision with all its excerpts is some kilobytes."""

LOCK_SECONDS = 5.0
"""Longest wait for another process's append; one takes milliseconds."""

_PART = re.compile(r"([0-9]{12})\.([0-9]{4}-[0-9]{2}-[0-9]{2})\.jsonl")
_CHUNK_BYTES = 64 * 1024


class JournalError(Exception):
    """The journal cannot be written or trusted; its text says what to do."""


@dataclass(frozen=True)
class _End:
    """Where the journal ends: its last part (None: there is none yet), that one's size, its seq."""

    part: Path | None
    size: int
    seq: int


class Journal:
    """The journal in ``folder``; safe for several processes, one thread in each.

    Reading changes nothing and needs no lock. Appending first mends what a crash has left.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._end: _End | None = None

    def append(self, event: Mapping[str, Any]) -> int:
        """Add an event, return its ``seq``; afterwards it is on disk.

        Raises:
            JournalError: it was not recorded; the journal is as it was before.
        """
        try:
            self._prepare()
            with self._locked():
                return self._append(event)
        except OSError as error:
            self._end = None
            raise JournalError(
                f"{self.folder}: event not recorded: {error.strerror}; "
                "make room or mend the controller's disk, then it goes on by itself"
            ) from error

    def events(self, after: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the events whose ``seq`` is greater than ``after``, in order.

        A line that cannot be read is logged and left out; a last line without an end, which may
        be one that is being written just now, is left out.
        """
        parts = self._parts()
        for place, part in enumerate(parts):
            following = parts[place + 1] if place + 1 < len(parts) else None
            if following and _first_seq(following) <= after + 1:
                continue
            yield from _events_of(part, after)

    def last_seq(self) -> int:
        """Return the ``seq`` of the last event, 0 where there is none."""
        return self._find_end().seq

    def _append(self, event: Mapping[str, Any]) -> int:
        end = self._find_end()
        if end.part:
            _move_torn_tail_aside(end)
        seq = end.seq + 1
        line = _encode({"seq": seq, **{k: v for k, v in event.items() if k != "seq"}})
        part, size = end.part, end.size
        if part is None or size >= PART_LIMIT_BYTES or _day(part) != utc()[:10]:
            part, size = self.folder / f"{seq:012d}.{utc()[:10]}.jsonl", 0
        _write(part, size, line)
        if size == 0:
            _sync_folder(self.folder)
        self._end = _End(part, size + len(line), seq)
        return seq

    def _find_end(self) -> _End:
        """Where the last whole line ends; read anew only where somebody else has written."""
        parts = self._parts()
        if not parts:
            return _End(None, 0, 0)
        known = self._end
        if known and known.part == parts[-1] and parts[-1].stat().st_size == known.size:
            return known
        return _read_end(parts[-1])

    def _parts(self) -> list[Path]:
        try:
            names = os.listdir(self.folder)  # noqa: PTH208 - names are all that is wanted
        except FileNotFoundError:
            return []
        return [self.folder / name for name in sorted(names) if _PART.fullmatch(name)]

    def _prepare(self) -> None:
        if not self.folder.is_dir():
            self.folder.mkdir(mode=0o750, parents=True, exist_ok=True)
            _sync_folder(self.folder.parent)
        found = self.folder.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise JournalError(f"{self.folder} is not a folder; move it away")
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
            raise JournalError(
                f"{self.folder} can be written by others; chmod go-w it and make this user own it"
            )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the journal against other processes.

        A lock of fcntl's kind belongs to the process: a child forked meanwhile, stuck on some
        dead file system, cannot keep it.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.folder / ".lock", flags, 0o640)
        give_up = time.monotonic() + LOCK_SECONDS
        try:
            while True:
                try:
                    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except (BlockingIOError, PermissionError) as error:
                    if time.monotonic() > give_up:
                        raise JournalError(
                            f"{self.folder}: another process has kept the journal locked for "
                            f"{LOCK_SECONDS:g} s; see who with: fuser {self.folder}/.lock"
                        ) from error
                    time.sleep(0.005)
            yield
        finally:
            os.close(descriptor)


def _encode(event: Mapping[str, Any]) -> bytes:
    text = json.dumps(event, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # A user's text may hold half a surrogate pair, which UTF-8 cannot; the event matters more.
    line = text.encode("utf-8", "backslashreplace") + b"\n"
    if len(line) > EVENT_LIMIT_BYTES:
        raise JournalError(
            f"an event of {len(line)} bytes is not recorded: the limit is {EVENT_LIMIT_BYTES}"
        )
    return line


def _write(part: Path, size: int, line: bytes) -> None:
    """Append ``line`` to ``part`` and make it durable; a part of a line does not stay."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(part, flags, 0o640)
    try:
        try:
            # One write, unless the disk takes it short; the next one then says why (ENOSPC).
            written = 0
            while written < len(line):
                written += os.write(descriptor, line[written:])
            os.fsync(descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def _read_end(part: Path) -> _End:
    """Find the last whole line of ``part`` and its seq, reading from the end.

    Where the last lines do not read, each still counts as one event, so that no seq is used twice.
    """
    with _opened(part) as source:
        position = source.seek(0, os.SEEK_END)
        tail, end, unread = b"", -1, 0
        while position > 0:
            step = min(_CHUNK_BYTES, position)
            position -= step
            source.seek(position)
            tail = source.read(step) + tail
            if end < 0:
                newline = tail.rfind(b"\n")
                if newline < 0:
                    continue
                end = position + newline + 1
                tail = tail[: newline + 1]
            lines = tail.split(b"\n")[:-1]
            whole = lines if position == 0 else lines[1:]
            for line in reversed(whole):
                event = _decode(line)
                if event:
                    return _End(part, end, event["seq"] + unread)
                unread += 1
            tail = b"" if position == 0 else lines[0] + b"\n"
    return _End(part, max(end, 0), _first_seq(part) - 1 + unread)


def _move_torn_tail_aside(end: _End) -> None:
    """Cut off what follows the last whole line; it is kept beside the part, and said."""
    assert end.part
    with _opened(end.part) as source:
        source.seek(end.size)
        torn = source.read(EVENT_LIMIT_BYTES)
        surplus = source.seek(0, os.SEEK_END) - end.size
    if not surplus:
        return
    aside = end.part.with_name(f"{end.part.name}.torn-{end.size}-{os.urandom(3).hex()}")
    _write(aside, 0, torn)
    _sync_folder(end.part.parent)
    descriptor = os.open(end.part, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, end.size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    log.warning(
        "%s ended in a line of %d bytes that a crash had cut short; it is now in %s",
        end.part, surplus, aside.name,
    )  # fmt: skip


def _events_of(part: Path, after: int) -> Iterator[dict[str, Any]]:
    try:
        source = _opened(part)
    except OSError as error:
        log.error("%s: its events are missing: %s", part, error.strerror)
        return
    with source:
        number = 0
        while line := source.readline(EVENT_LIMIT_BYTES + 1):
            number += 1
            if not line.endswith(b"\n"):
                if len(line) <= EVENT_LIMIT_BYTES:
                    return
                while line and not line.endswith(b"\n"):
                    line = source.readline(EVENT_LIMIT_BYTES + 1)
                line = b""
            event = _decode(line)
            if event is None:
                log.error("%s: line %d cannot be read and is left out", part, number)
            elif event["seq"] > after:
                yield event


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or type(event.get("seq")) is not int:
        return None
    return event


def _opened(part: Path) -> BinaryIO:
    descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    return os.fdopen(descriptor, "rb")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_seq(part: Path) -> int:
    return int(part.name[:12])


def _day(part: Path) -> str:
    return part.name[13:23]
