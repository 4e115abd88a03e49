"""Bounded access to files that may be anything: what every format reads through.

Owns the limits of one search: entries listed, bytes read, seconds spent, and the two looks at a
file that tell whether it still grows. Names that end up in a message are made printable here.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_hooks.as_user import open_regular
from slurm_hooks.checkpoints.verdict import Broken, Unverified, Writing

CHUNK_BYTES = 1 << 20

JSON_BYTES = 16 << 20
"""Largest JSON document read; the index of a model of a thousand shards has some 10 MB."""

_SETTLING_SECONDS = 5.0
"""A file changed this recently is looked at twice."""

_BETWEEN_LOOKS_SECONDS = 0.4

TEMPORARY = re.compile(
    r"""^\.?~?(tmp|temp)[-_.~]             # tmp-checkpoint-500, .tmp_step
      | [-_.~](tmp|temp|part|partial|incomplete|inprogress|unfinished|writing)([-_.~]|\d|$)
      | \.orbax-checkpoint-tmp
      | ~$ | ^\.\#
      | ^\..+\.(?-i:(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{6})$  # rsync's name of a file under way
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Names that savers give to what they have not finished."""

_STEP_WORDS = re.compile(
    r"(?:^|[^a-z0-9]|(?<=[a-z])(?=global_step|iter|step))"
    r"(?:global[-_]?steps?|steps?|iteration|iters?|it|batch|ba|checkpoint|ckpt)[-_=.]?(\d{1,15})(?!\d)",
    re.IGNORECASE,
)
_ONLY_NUMBER = re.compile(r"(\d{1,15})(?:\.[a-z]+)?")


@dataclass(frozen=True)
class Limits:
    """Bounds of one search. ``read_bytes`` does not bind a deep one, which reads everything."""

    entries: int = 50_000
    depth: int = 4
    read_bytes: int = 256 << 20
    seconds: float = 8.0
    candidates: int = 12


@dataclass(frozen=True)
class Listing:
    """A folder: its regular files and its folders by name, symlinks followed."""

    path: Path
    files: Mapping[str, os.stat_result]
    folders: Mapping[str, os.stat_result]

    @property
    def modified(self) -> float:
        """When its newest file was changed, in seconds since the epoch; else the folder."""
        times = [status.st_mtime for status in self.files.values()]
        return max(times) if times else self.path.stat().st_mtime


@dataclass
class Reader:
    """One search's access to files, and what it may still spend."""

    limits: Limits = field(default_factory=Limits)
    deep: bool = False
    entries_left: int = 0
    bytes_left: int = 0
    until: float = 0.0
    touched: dict[str, tuple[int, int]] = field(default_factory=dict)
    complete: bool = True

    def __post_init__(self) -> None:
        self.entries_left = self.limits.entries
        self.bytes_left = self.limits.read_bytes
        self.until = time.monotonic() + self.limits.seconds

    def listing(self, folder: Path) -> Listing:
        """List a folder, sorted by name, as far as the limit of entries allows.

        Raises:
            Broken: it cannot be listed.
        """
        files: dict[str, os.stat_result] = {}
        folders: dict[str, os.stat_result] = {}
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    self.spend(0)
                    if self.entries_left <= 0:
                        self.complete = False
                        break
                    self.entries_left -= 1
                    try:
                        status = entry.stat()
                    except OSError:
                        continue  # gone since, or a dangling link
                    if stat.S_ISDIR(status.st_mode):
                        folders[entry.name] = status
                    elif stat.S_ISREG(status.st_mode):
                        files[entry.name] = status
        except OSError as error:
            raise Broken(f"{shown(folder.name)} cannot be listed: {error.strerror}") from error
        return Listing(folder, dict(sorted(files.items())), dict(sorted(folders.items())))

    def open(self, path: Path) -> Source:
        """Open a regular file for bounded reading.

        Raises:
            Broken: it is missing, empty, not a regular file or not readable.
        """
        self.spend(0)
        try:
            file = open_regular(path)
        except FileNotFoundError:
            raise Broken(f"{shown(path.name)} is missing") from None
        except OSError as error:
            reason = error.strerror or "not a regular file"
            raise Broken(f"{shown(path.name)} cannot be read: {reason}") from error
        status = os.fstat(file.fileno())
        self.touched[str(path)] = (status.st_size, status.st_mtime_ns)
        if status.st_size == 0:
            file.close()
            raise Broken(f"{shown(path.name)} is empty")
        return Source(file, path.name, status.st_size, self)

    def small(self, path: Path, limit_bytes: int) -> bytes:
        """Return a whole small file.

        Raises:
            Broken: as ``open``.
            Unverified: it is larger than the limit.
        """
        with self.open(path) as source:
            if source.size > limit_bytes:
                raise Unverified(f"{source.name} has {source.size} bytes, too many to be looked at")
            return source.exactly(0, source.size)

    def json(self, path: Path, limit_bytes: int = JSON_BYTES) -> dict[str, Any]:
        """Return the JSON object in a file.

        Raises:
            Broken: it is cut off, or not such a document.
        """
        try:
            document = json.loads(self.small(path, limit_bytes))
        except (ValueError, RecursionError) as error:
            raise Broken(f"{shown(path.name)} is not valid JSON: {error}"[:200]) from error
        if not isinstance(document, dict):
            raise Broken(f"{shown(path.name)} is not a JSON object")
        return document

    def spend(self, count: int) -> None:
        """Account for ``count`` bytes about to be read.

        Raises:
            Unverified: the bytes or the seconds are spent.
        """
        if time.monotonic() > self.until:
            self.complete = False
            raise Unverified("the time for looking was over")
        if not self.deep:
            self.bytes_left -= count
            if self.bytes_left < 0:
                raise Unverified("more would have to be read than a hook may; use --deep")

    def forget(self) -> None:
        """Begin a new checkpoint: forget which files the last one had."""
        self.touched = {}

    @property
    def total_bytes(self) -> int:
        """Size of the files looked at since ``forget``."""
        return sum(size for size, _time in self.touched.values())

    @property
    def modified(self) -> float:
        """When the newest of them was changed, in seconds since the epoch; 0 if there is none."""
        return max((changed for _size, changed in self.touched.values()), default=0) / 1e9

    def look_again(self) -> None:
        """Compare the files with how they were when first opened.

        Raises:
            Writing: one has changed since, or is gone.
        """
        if time.time() - self.modified < _SETTLING_SECONDS:
            time.sleep(max(0.0, min(_BETWEEN_LOOKS_SECONDS, self.until - time.monotonic())))
        for path, first in self.touched.items():
            try:
                status = os.stat(path)  # noqa: PTH116 - thousands of shards
            except OSError:
                raise Writing(f"{shown(os.path.basename(path))} went away meanwhile") from None  # noqa: PTH119
            if (status.st_size, status.st_mtime_ns) != first:
                name = shown(os.path.basename(path))  # noqa: PTH119
                grown = f"from {first[0]} to {status.st_size} bytes"
                raise Writing(f"{name} changed while it was looked at ({grown})")


class Source(io.RawIOBase):
    """A regular file, read within a Reader's budget; also a seekable file for zip and tar."""

    def __init__(
        self, file: io.FileIO, name: str, size: int, reader: Reader, start: int = 0
    ) -> None:
        super().__init__()
        self.name, self.size = shown(name), size
        self._file, self._reader, self._start = file, reader, start

    def readable(self) -> bool:
        """Tell that it can be read."""
        return True

    def seekable(self) -> bool:
        """Tell that it can be sought."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move, as a file does."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise ValueError("a place before the start")
        return self._file.seek(self._start + base + offset) - self._start

    def tell(self) -> int:
        """Return the place in bytes."""
        return self._file.tell() - self._start

    def window(self, offset: int, count: int) -> Source:
        """Return a stretch of this file as a file of its own, valid while this one is open.

        Raises:
            Broken: the file ends before.
        """
        if offset < 0 or count <= 0 or offset + count > self.size:
            raise Broken(f"{self.name} has {self.size} of {offset + count} bytes")
        return Source(self._file, self.name, count, self._reader, self._start + offset)

    def close(self) -> None:
        """Close the file; a window leaves that to whom it is a part of."""
        if self._start == 0:
            self._file.close()
        super().close()

    def read(self, size: int | None = -1) -> bytes:
        """Return at most ``size`` bytes from here, the rest of the file by default.

        Raises:
            Broken: the disk does not give them.
            Unverified: they are more than the budget holds.
        """
        left = max(0, self.size - self.tell())
        wanted = left if size is None or size < 0 else min(size, left)
        self._reader.spend(wanted)
        if wanted > self._reader.limits.read_bytes:
            raise Unverified(f"{self.name} asks for {wanted} bytes to be read at once")
        parts = []
        while wanted > 0:
            try:
                part = self._file.read(min(wanted, CHUNK_BYTES))
            except OSError as error:
                raise Broken(f"{self.name} cannot be read: {error.strerror}") from error
            if not part:
                break
            parts.append(part)
            wanted -= len(part)
        return b"".join(parts)

    def exactly(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes at ``offset``.

        Raises:
            Broken: the file ends before.
        """
        if offset < 0 or count < 0 or offset + count > self.size:
            raise Broken(f"{self.name} ends at {self.size} bytes, {offset + count} are needed")
        self.seek(offset)
        content = self.read(count)
        if len(content) < count:
            raise Broken(f"{self.name} is shorter than its {self.size} bytes")
        return content

    def chunks(self, offset: int, count: int) -> Iterator[bytes]:
        """Yield ``count`` bytes from ``offset`` on, piece by piece.

        Raises:
            Broken: the file ends before.
        """
        while count > 0:
            piece = self.exactly(offset, min(count, CHUNK_BYTES))
            yield piece
            offset, count = offset + len(piece), count - len(piece)

    def crc32(self, offset: int, count: int) -> int:
        """Return the CRC-32 of a stretch."""
        value = 0
        for piece in self.chunks(offset, count):
            value = zlib.crc32(piece, value)
        return value

    def refuse_holes(self) -> None:
        """Doubt a file with a hole in it: a copy that was cut off leaves one; savers do not.

        Raises:
            Unverified: there is one. File systems that compress may make holes of zeros, so this
                is no proof.
        """
        try:
            hole = os.lseek(self._file.fileno(), 0, os.SEEK_HOLE)
        except OSError:
            return  # the file system does not tell
        if hole < self.size:
            raise Unverified(f"{self.name} has a hole at byte {hole}, as an unfinished copy has")


def shown(name: str) -> str:
    """Return a file's name as it may stand in a message: printable, and not long."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    printable = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return printable if len(printable) <= 120 else printable[:119] + "…"


def plain_name(name: str) -> str:
    """Return a name without what marks it as temporary: ``step_5.pt`` of ``step_5.pt.tmp``."""
    by_rsync = re.fullmatch(r"\.(.+)\.[A-Za-z0-9]{6}", name) if TEMPORARY.search(name) else None
    if by_rsync:
        return by_rsync[1]
    return re.sub(r"\.{2,}", ".", TEMPORARY.sub(".", name)).strip(".") or name


def step_of(name: str) -> int | None:
    """Return the step in a file's or folder's name, None where it has none.

    >>> step_of("epoch=3-step=400.ckpt"), step_of("iter_0000100"), step_of("epoch_2.pt")
    (400, 100, None)
    """
    only = _ONLY_NUMBER.fullmatch(name)
    if only:
        return int(only[1])
    found: list[str] = _STEP_WORDS.findall(name)
    return int(found[-1]) if found else None


def whole(value: object) -> int | None:
    """Return ``value`` where it is a step as a document would have it, else None."""
    return value if type(value) is int and 0 <= value < 10**15 else None
