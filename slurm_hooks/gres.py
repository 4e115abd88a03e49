"""How many GPUs Slurm believes a node has: read from slurm.conf and gres.conf, without a command.

    >>> names_node("n[1-4,9],login", "n3")
    True

Owns Slurm's syntax of NodeName and Gres lines, as far as GPUs go (slurm.conf(5), gres.conf(5)).
It is tolerant: what it does not understand it passes over, and where it cannot know it says None.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

USUAL_FILES = (Path("/run/slurm/conf/slurm.conf"), Path("/etc/slurm/slurm.conf"))
"""Where slurm.conf is when nobody says: slurmd's own copy on a configless cluster comes first."""

_MAX_BYTES = 4 * 1024 * 1024
_MAX_FILES = 32
_MAX_GPUS = 1024

Stamp = tuple[str, int, int]
"""A file as it was read: path, modification time in nanoseconds, size in bytes."""


@dataclass(frozen=True)
class ConfiguredGpus:
    """What Slurm was told of a node's GPUs, and the files that said so.

    ``minors`` are the N of the files /dev/nvidiaN that gres.conf lists; empty where it lists none
    (``AutoDetect``) or lists other files (MIG).
    """

    count: int
    minors: tuple[int, ...] = ()
    files: tuple[Stamp, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data that ``from_dict`` reads."""
        return {"count": self.count, "minors": list(self.minors), "files": list(self.files)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> ConfiguredGpus:
        """Read what ``to_dict`` wrote."""
        files = tuple((str(path), int(mtime), int(size)) for path, mtime, size in document["files"])
        minors = tuple(int(minor) for minor in document["minors"])
        return cls(int(document["count"]), minors, files)

    def is_current(self) -> bool:
        """Whether every file is as it was when it was read."""
        return bool(self.files) and all(_stamp(Path(file[0])) == file for file in self.files)


def find(
    node: str, slurm_conf: str | None, known: ConfiguredGpus | None = None
) -> ConfiguredGpus | None:
    """Return what Slurm was told of ``node``, or None where that cannot be known.

    ``slurm_conf`` is the file Slurm named (SLURM_CONF), if it did. ``known`` is an earlier answer:
    it stands while its files are unchanged, and is the last resort where no file can be read.
    """
    if known and known.is_current() and slurm_conf in (None, known.files[0][0]):
        return known
    candidates = [Path(slurm_conf)] if slurm_conf else []
    if known and known.files:
        candidates.append(Path(known.files[0][0]))
    for path in (*candidates, *USUAL_FILES):
        found = read(path, node)
        if found:
            return found
    return known


def read(slurm_conf: Path, node: str) -> ConfiguredGpus | None:
    """Return what ``slurm_conf`` and the gres.conf beside it say of ``node``, or None."""
    files: list[Stamp] = []
    count = _count_in_slurm_conf(lines(slurm_conf, files), node)
    if not files:
        return None
    minors, listed = _devices_in_gres_conf(lines(slurm_conf.parent / "gres.conf", files), node)
    if count is None:
        count = listed
    if count is None:
        return None
    return ConfiguredGpus(count, minors if len(minors) == count else (), tuple(files))


def names_node(expression: str, node: str) -> bool:
    """Whether a hostlist expression (``n[1-4,09],login``) includes ``node``; never expands it."""
    parts = re.split(r",(?![^\[]*\])", expression)
    return any(_matches(part.strip(), node) for part in parts)


def _matches(part: str, node: str) -> bool:
    pieces = re.split(r"\[([^\]]*)\]", part)
    pattern = "".join(
        r"(\d+)" if position % 2 else re.escape(piece) for position, piece in enumerate(pieces)
    )
    found = re.fullmatch(pattern, node)
    return bool(found) and all(
        _in_ranges(number, ranges)
        for number, ranges in zip(found.groups() if found else (), pieces[1::2], strict=True)
    )


def _in_ranges(number: str, ranges: str) -> bool:
    """Whether ``number`` is one of ``1-4,09``; Slurm keeps the width of what it was given."""
    for item in ranges.split(","):
        first, _, last = item.strip().partition("-")
        last = last or first
        if not (first.isdigit() and last.isdigit()):
            continue
        width = len(first) if first.startswith("0") else 0
        if int(first) <= int(number) <= int(last) and number == str(int(number)).zfill(width):
            return True
    return False


def _count_in_slurm_conf(lines: Iterable[Mapping[str, str]], node: str) -> int | None:
    """The GPUs of the NodeName line of ``node``; None where no line names it."""
    default = ""
    for line in lines:
        names = line.get("nodename")
        if names is None:
            continue
        if names.upper() == "DEFAULT":
            default = line.get("gres", default)
        elif names_node(names, node):
            return _gpus_in(line.get("gres", default))
    return None


def _gpus_in(gres: str) -> int:
    """The GPUs of ``gpu:h100:8(S:0-1),shard:32``."""
    total = 0
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        kind, *rest = item.strip().split(":")
        if kind.lower() == "gpu":
            numbers = [int(part) for part in rest if part.isdigit()]
            total += numbers[-1] if numbers else 1
    return min(total, _MAX_GPUS)


def _devices_in_gres_conf(
    lines: Iterable[Mapping[str, str]], node: str
) -> tuple[tuple[int, ...], int | None]:
    """Minor numbers of the listed GPU files, and how many GPUs are listed (None: none are)."""
    minors: set[int] = set()
    count: int | None = None
    for line in lines:
        if line.get("name", "").lower() != "gpu":
            continue
        if "nodename" in line and not names_node(line["nodename"], node):
            continue
        files = tuple(_device_numbers(line.get("file", "")))
        minors.update(files)
        given = line.get("count", "")
        more = int(given) if given.isdigit() else len(files)
        count = min((count or 0) + more, _MAX_GPUS) if more else count
    return tuple(sorted(minors)), count


def _device_numbers(files: str) -> Iterator[int]:
    """The N of ``/dev/nvidia[0-3,7]``; nothing for files of other names."""
    for part in re.split(r",(?![^\[]*\])", files):
        found = re.fullmatch(r".*/nvidia(?:\[([\d,-]+)\]|(\d+))", part.strip())
        for item in (found.group(1) or found.group(2)).split(",") if found else ():
            first, _, last = item.partition("-")
            if first.isdigit() and (last or first).isdigit():
                yield from range(int(first), min(int(last or first), _MAX_GPUS) + 1)


def lines(path: Path, files: list[Stamp]) -> Iterator[Mapping[str, str]]:
    """Yield the ``Key=value`` pairs of each line of a file and of what it includes.

    Keys are in lower case. Each file that could be read is added to ``files``.
    """
    stamp = _stamp(path)
    if stamp is None or len(files) >= _MAX_FILES or stamp in files:
        return
    text = _text(path)
    if text is None:
        return
    files.append(stamp)
    for line in re.sub(r"\\\n", " ", text).splitlines():
        line = line.partition("#")[0].strip()
        included = re.match(r"include\s+(\S+)", line, re.IGNORECASE)
        if included:
            yield from lines(path.parent / included.group(1), files)
            continue
        pairs = re.findall(r"(\w+)\s*=\s*(\"[^\"]*\"|\S+)", line)
        if pairs:
            yield {key.lower(): value.strip('"') for key, value in pairs}


def _text(path: Path) -> str | None:
    """At most _MAX_BYTES of a regular file; a FIFO or a device is never waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        return file.read(_MAX_BYTES).decode("utf-8", "replace")


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return (str(path), status.st_mtime_ns, status.st_size)


def known_from(state: Mapping[str, Any]) -> ConfiguredGpus | None:
    """Return the earlier answer kept in a probe's state under ``gres``, if there is a sound one."""
    document = state.get("gres")
    try:
        return ConfiguredGpus.from_dict(document) if isinstance(document, Mapping) else None
    except (KeyError, TypeError, ValueError):
        return None
