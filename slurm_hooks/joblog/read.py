"""Read bounded pieces of a file that somebody else writes.

A FIFO, a device or a folder is refused without waiting for it. A large file is read at its ends:
the beginning says which program it was, the end how it died; what lies between is not looked at,
and the answer says so.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from slurm_hooks import as_user

_CHUNK = 1 << 20


class NotReadable(Exception):
    """The file is not one to read; the text says why."""


@dataclass(frozen=True)
class Limits:
    """How much of one file is read: up to ``whole`` bytes all of it, else ``head`` and ``tail``.

    ``count`` bounds the bytes that are only counted for line numbers, not searched.
    """

    whole: int = 16 << 20
    head: int = 1 << 20
    tail: int = 8 << 20
    count: int = 256 << 20

    def with_tail(self, tail: int) -> Limits:
        """Return these limits with another ``tail``."""
        return Limits(self.whole, self.head, tail, self.count)


@dataclass(frozen=True)
class Piece:
    """Consecutive bytes of a file, from ``offset``; ``first_number`` is its first line's number."""

    offset: int
    data: bytes
    first_number: int | None


@dataclass(frozen=True)
class Excerpt:
    """What was read of ``path``: pieces in order, and how many of its ``size`` bytes were not."""

    path: str
    size: int
    pieces: tuple[Piece, ...]

    @property
    def unread_bytes(self) -> int:
        """Bytes of the file that no piece holds."""
        return self.size - sum(len(piece.data) for piece in self.pieces)


def excerpt(path: Path, limits: Limits) -> Excerpt:
    """Return pieces of the regular file ``path``; symbolic links are followed as this user may.

    Raises:
        NotReadable: no such file, no permission, or not a regular file.
    """
    try:
        with as_user.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            return Excerpt(str(path), size, _pieces(file.fileno(), size, limits))
    except as_user.NotRegular as problem:
        raise NotReadable(str(problem)) from problem
    except OSError as problem:
        raise NotReadable(f"{path}: {problem.strerror}") from problem


def _pieces(descriptor: int, size: int, limits: Limits) -> tuple[Piece, ...]:
    if size <= max(limits.whole, limits.head + limits.tail):
        return (Piece(0, _read(descriptor, 0, size), 1),)
    head = _read(descriptor, 0, limits.head)
    head = head[: head.rfind(b"\n") + 1] or head
    start = size - limits.tail
    tail = _read(descriptor, start, limits.tail)
    cut = tail.find(b"\n", 0, _CHUNK) + 1
    number = None
    if start + cut <= limits.count:
        number = 1 + head.count(b"\n") + _count_lines(descriptor, len(head), start + cut)
    return (Piece(0, head, 1), Piece(start + cut, tail[cut:], number))


def _read(descriptor: int, offset: int, length: int) -> bytes:
    parts: list[bytes] = []
    while length > 0:
        part = os.pread(descriptor, min(length, _CHUNK), offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return b"".join(parts)


def _count_lines(descriptor: int, offset: int, end: int) -> int:
    lines = 0
    while offset < end:
        part = os.pread(descriptor, min(end - offset, _CHUNK), offset)
        if not part:
            break
        lines += part.count(b"\n")
        offset += len(part)
    return lines
