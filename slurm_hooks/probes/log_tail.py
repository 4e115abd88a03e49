"""Read a growing text log from where the last look ended, across rotation and truncation.

A cursor is the file's device and inode, the offset of the first byte not yet read, and a digest of
the file's first bytes: a file that was cut and filled again keeps its inode (logrotate's
``copytruncate``). What was left unread is looked for in what logrotate makes of the old file:
``<path>.1``, ``<path>.2.gz``, ``<path>-20261202`` and the like, whichever begins as it did.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Mapping
from typing import Any

from slurm_hooks.frozen import frozen

_HEAD_BYTES = 256
"""How much of a file's beginning tells it from its successor; a log's first line has its time."""

_ROTATED_LIMIT = 4
"""How many rotated logs are looked at for what was left unread, the newest first."""

_UNPACKED_BYTES = 256 << 20
"""Most bytes unpacked of one compressed log; a second's work."""

_LINE_BYTES = 8192
"""A line longer than this without its end is passed over, so that it cannot stop the cursor."""


@frozen
class Tail:
    """What one look at a log found: (key, line) pairs, and the cursor for the next look.

    A key is ``<inode>:<offset>:<checksum>``: the first two come again after a truncation.

    ``lost`` says in a phrase that lines may be gone unread; ``skipped_bytes`` were left out to
    stay within the limit, from the middle of what was new: its beginning tells what broke first.
    """

    lines: tuple[tuple[str, bytes], ...]
    cursor: Mapping[str, Any]
    lost: str | None = None
    skipped_bytes: int = 0


def open_log(path: str) -> int:
    """Open ``path`` for reading without following a link or waiting for a FIFO's writer.

    Raises:
        OSError: it is not there, is a symbolic link, or may not be read.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
    return os.open(path, flags)


def is_plain_log(status: os.stat_result) -> bool:
    """Whether it is a regular file in which not just anybody can write."""
    return stat.S_ISREG(status.st_mode) and not status.st_mode & stat.S_IWOTH


def is_cursor(kept: object) -> bool:
    """Whether it is a cursor as ``Tail`` has it: a damaged one must not stop every later look."""
    return (
        isinstance(kept, Mapping)
        and all(isinstance(kept.get(key), int) for key in ("device", "inode", "offset"))
        and isinstance(kept.get("head_bytes"), int)
        and 0 <= kept["head_bytes"] <= _HEAD_BYTES
        and kept["offset"] >= 0
    )


def read_tail(descriptor: int, path: str, cursor: Mapping[str, Any] | None, max_bytes: int) -> Tail:
    """Return the complete lines of the open regular file since ``cursor`` (None: from its start).

    The last line is left for the next look if
    its end is not written yet.
    """
    status = os.fstat(descriptor)
    lines: list[tuple[str, bytes]] = []
    lost, skipped, offset = None, 0, 0
    if cursor is not None:
        offset = cursor["offset"]
        if not _is_same(descriptor, status, cursor):
            older, skipped, found = _rest_of_rotated(path, cursor, max_bytes)
            lines += older
            if not found:
                lost = "the log was rotated or cut, and what it held since the last look is gone"
            offset = 0
    end, more, more_skipped = _read_lines(descriptor, status, offset, max_bytes)
    lines += more
    head_bytes = min(_HEAD_BYTES, end)
    after = {
        "device": status.st_dev,
        "inode": status.st_ino,
        "offset": end,
        "head_bytes": head_bytes,
        "head": _digest(descriptor, head_bytes),
    }
    return Tail(tuple(lines), after, lost, skipped + more_skipped)


def _is_same(descriptor: int, status: os.stat_result, cursor: Mapping[str, Any]) -> bool:
    identity = (status.st_dev, status.st_ino)
    return identity == (cursor["device"], cursor["inode"]) and _continues(
        descriptor, status, cursor
    )


def _continues(descriptor: int, status: os.stat_result, cursor: Mapping[str, Any]) -> bool:
    """Whether the file begins as the one the cursor was in, and reaches as far."""
    if status.st_size < cursor["offset"]:
        return False
    same: bool = _digest(descriptor, cursor["head_bytes"]) == cursor["head"]
    return same


def _rest_of_rotated(
    path: str, cursor: Mapping[str, Any], max_bytes: int
) -> tuple[list[tuple[str, bytes]], int, bool]:
    """Lines after the cursor in rotated logs, bytes skipped, and whether that log was there.

    Between it and the log of today may lie others, of which nothing has been read.
    """
    if not cursor["offset"]:
        return [], 0, True
    newer: list[tuple[list[tuple[str, bytes]], int]] = []
    for older in _rotated(path):
        try:
            descriptor = open_log(older)
        except OSError:
            continue
        try:
            status = os.fstat(descriptor)
            if not is_plain_log(status):
                continue
            read = _read_gzip if older.endswith(".gz") else _read_plain
            rest = read(descriptor, status, cursor, max_bytes)
            if rest is not None:
                parts = [rest, *reversed(newer)]
                return [one for part in parts for one in part[0]], sum(p[1] for p in parts), True
            whole = read(descriptor, status, None, max_bytes)
            newer += [whole] if whole else []
        finally:
            os.close(descriptor)
    return [], 0, False


def _rotated(path: str) -> list[str]:
    """What may have become of ``path``, the newest first."""
    folder, name = os.path.split(path)
    try:
        entries = [
            (entry.stat(follow_symlinks=False).st_mtime, entry.path)
            for entry in os.scandir(folder or ".")
            if entry.name.startswith((f"{name}.", f"{name}-"))
        ]
    except OSError:
        return []
    return [found for _, found in sorted(entries, reverse=True)[:_ROTATED_LIMIT]]


_Lines = tuple[list[tuple[str, bytes]], int]


def _read_plain(
    descriptor: int, status: os.stat_result, cursor: Mapping[str, Any] | None, max_bytes: int
) -> _Lines | None:
    """The lines after ``cursor`` (None: all) and bytes skipped; None if it is another file's."""
    if cursor is not None and not _continues(descriptor, status, cursor):
        return None
    offset = cursor["offset"] if cursor is not None else 0
    _, lines, skipped = _read_lines(descriptor, status, offset, max_bytes)
    return lines, skipped


def _read_gzip(
    descriptor: int, status: os.stat_result, cursor: Mapping[str, Any] | None, max_bytes: int
) -> _Lines | None:
    """The same of a compressed file, of which no more is unpacked than a limit."""
    import gzip  # only where a log was rotated under the cursor
    import hashlib

    offset = cursor["offset"] if cursor is not None else 0
    head = cursor["head_bytes"] if cursor is not None else 0
    beginning, kept, tail, at = bytearray(), bytearray(), bytearray(), 0
    half = max_bytes // 2
    try:
        with os.fdopen(os.dup(descriptor), "rb") as raw, gzip.GzipFile(fileobj=raw) as log:
            while at < _UNPACKED_BYTES and (chunk := log.read(1 << 16)):
                beginning += chunk[: head - len(beginning)]
                at += len(chunk)
                fresh = chunk[max(0, len(chunk) - (at - offset)) :] if at > offset else b""
                room = half - len(kept)
                kept += fresh[:room]
                tail += fresh[room:]
                del tail[: -half or None]
    except (OSError, EOFError, zlib.error):
        return None
    if cursor is not None:
        same = hashlib.sha256(beginning).hexdigest() == cursor["head"]
        if at < offset or not same:
            return None
    skipped = max(0, at - offset - len(kept) - len(tail))
    lines = _numbered(bytes(kept), offset, status)
    if skipped:
        cut = tail.find(b"\n") + 1
        skipped += cut
        del tail[:cut]
        lines += _numbered(bytes(tail), at - len(tail), status)
    else:
        lines = _numbered(bytes(kept + tail), offset, status)
    return lines, skipped


def _numbered(block: bytes, at: int, status: os.stat_result) -> list[tuple[str, bytes]]:
    """The complete lines of a block that begins at ``at``, each with its key."""
    lines = []
    for line in block.split(b"\n")[:-1]:
        lines.append((f"{status.st_ino}:{at}:{zlib.crc32(line):08x}", line.rstrip(b"\r")))
        at += len(line) + 1
    return lines


def _read_lines(
    descriptor: int, status: os.stat_result, offset: int, max_bytes: int
) -> tuple[int, list[tuple[str, bytes]], int]:
    """Where the next look begins, the complete lines from ``offset`` on, and bytes skipped."""
    size = status.st_size
    if size - offset <= max_bytes:
        spans = [(offset, size)]
        skipped = 0
    else:
        half = max_bytes // 2
        spans = [(offset, offset + half), (size - half, size)]
        skipped = size - offset - 2 * half
    lines: list[tuple[str, bytes]] = []
    end = offset
    for number, (first, last) in enumerate(spans):
        block = os.pread(descriptor, last - first, first)
        at = first
        if number:
            # The second span begins inside a line.
            cut = block.find(b"\n") + 1
            skipped += cut
            at, block = first + cut, block[cut:]
        *complete, partial = block.split(b"\n")
        for line in complete:
            lines.append((f"{status.st_ino}:{at}:{zlib.crc32(line):08x}", line.rstrip(b"\r")))
            at += len(line) + 1
        if len(partial) > _LINE_BYTES:
            at += len(partial)
        end = at
    return end, lines, skipped


def _digest(descriptor: int, size: int) -> str:
    import hashlib  # 3 ms, for a log file alone: /dev/kmsg needs none of it

    return hashlib.sha256(os.pread(descriptor, size, 0)).hexdigest()
