"""The archive: every accepted record, one line each, in one file for each day.

A line is ``{"received": "2026-12-02T…Z", "record": {…}}`` in ``archive/2026-12-02/records.jsonl``:
the record as its node wrote it, and when it arrived, by which the days go. ``jq .record.node``
reads it. Owns these files; what the index covers of them is counted in bytes of each day's file,
which stays right when the clock is set back and an earlier day grows again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FOLDER = "archive"
FILE = "records.jsonl"
LINE_LIMIT_BYTES = 20 * 1024 * 1024

_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


@dataclass
class Tail:
    """Archived records that the index does not have: ``(received, document)`` in order.

    ``covered`` is what the index covers of each day once it has them; ``more`` says there is more.
    """

    records: list[tuple[str, Any]] = field(default_factory=list)
    covered: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    more: bool = False


def append(spool: int, received: str, documents: Sequence[str]) -> dict[str, int]:
    """Add records to their day's file; afterwards they are on disk.

    Args:
        spool: descriptor of the spool's folder.
        received: when they arrived.
        documents: each record's JSON, on one line.

    Returns:
        The day, and how long its file then is.

    Raises:
        OSError: nothing was added.
    """
    day = received[:10]
    with _folder(FOLDER, spool, create=True) as archive, _folder(day, archive, True) as folder:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(FILE, flags, 0o644, dir_fd=folder)
        try:
            size = os.fstat(descriptor).st_size
            lines = "".join(f'{{"received":"{received}","record":{doc}}}\n' for doc in documents)
            content = lines.encode("utf-8")
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                # A crash cut a line short. Its record is still in incoming; here the line only
                # has to end, so that the next one can be read.
                content = b"\n" + content
            try:
                view = memoryview(content)
                while view:
                    view = view[os.write(descriptor, view) :]
                os.fsync(descriptor)
            except OSError:
                with contextlib.suppress(OSError):
                    _take_back(descriptor, size, len(content) - len(view))
                raise
            if size == 0:
                os.fsync(folder)
            # What else has been added meanwhile, by a child given up that woke again, are records
            # that are still in incoming.
            return {day: os.fstat(descriptor).st_size}
        finally:
            os.close(descriptor)


def _take_back(descriptor: int, size: int, written: int) -> None:
    """Cut off a part of our lines, unless somebody else's already follow them."""
    if os.fstat(descriptor).st_size == size + written:
        os.ftruncate(descriptor, size)


def beyond(
    spool: int, covered: Mapping[str, int], oldest: str, limit: int, trusted: Collection[int]
) -> Tail:
    """Return up to ``limit`` records that lie beyond what is ``covered``.

    ``oldest`` is the first day that matters. A file that untrusted uids could have written is a
    problem, and not read.

    Raises:
        OSError: the archive cannot be read.
    """
    tail = Tail()
    try:
        with _folder(FOLDER, spool, create=False) as archive:
            names = os.listdir(archive)  # noqa: PTH208 - a descriptor, not a path
            days = sorted(name for name in names if _DAY.fullmatch(name))
            for day in days:
                if day >= oldest:
                    _read_day(archive, day, covered.get(day, 0), limit, trusted, tail)
    except FileNotFoundError:
        return tail
    return tail


def _read_day(
    archive: int, day: str, position: int, limit: int, trusted: Collection[int], tail: Tail
) -> None:
    try:
        with _folder(day, archive, create=False) as folder:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(FILE, flags, dir_fd=folder)
    except FileNotFoundError:
        return
    with os.fdopen(descriptor, "rb") as source:
        found = os.fstat(descriptor)
        if found.st_size <= position:
            return
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o022 or found.st_uid not in trusted:
            tail.problems.append(f"archive/{day}/{FILE} can be written by others; it is not read")
            return
        source.seek(position)
        while len(tail.records) < limit:
            line = source.readline(LINE_LIMIT_BYTES)
            if not line.endswith(b"\n"):
                return
            position += len(line)
            tail.covered[day] = position
            entry = _decode(line)
            if entry:
                tail.records.append(entry)
            elif line != b"\n":
                tail.problems.append(
                    f"archive/{day}/{FILE}: the line before byte {position} cannot be read"
                )
        tail.more = True


def _decode(line: bytes) -> tuple[str, Any] | None:
    try:
        entry = json.loads(line)
        return str(entry["received"]), entry["record"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


@contextlib.contextmanager
def _folder(name: str, parent: int, create: bool) -> Iterator[int]:
    """Open a folder by its name in ``parent``, following no link; make it where it is missing."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        if not create:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=parent)
        os.fsync(parent)
        descriptor = os.open(name, flags, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
