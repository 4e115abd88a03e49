"""Slurm's configuration files as they are written: lines, includes, and which node a line means.

    >>> names_node("n[1-4,9],login", "n3")
    True

Owns the syntax (slurm.conf(5)) and what a NodeName line says of a node's size. It is tolerant: what
it does not understand it passes over, and where it cannot know it says None. No command is run.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurm_hooks.frozen import frozen

USUAL_FILES = (Path("/run/slurm/conf/slurm.conf"), Path("/etc/slurm/slurm.conf"))
"""Where slurm.conf is when nobody says: slurmd's own copy on a configless cluster comes first."""

_MAX_BYTES = 4 * 1024 * 1024
_MAX_FILES = 32

Stamp = tuple[str, int, int]
"""A file as it was read: path, modification time in nanoseconds, size in bytes."""


@frozen
class NodeSize:
    """What Slurm was told of a node: CPUs, and memory in MiB; None where it was not told.

    Memory is what Slurm insists on at registration. ``files`` are those that said so.
    """

    cpus: int | None
    memory_mib: int | None
    files: tuple[Stamp, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data that ``from_dict`` reads."""
        return {"cpus": self.cpus, "memory_mib": self.memory_mib, "files": list(self.files)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> NodeSize:
        """Read what ``to_dict`` wrote.

        Raises:
            KeyError, TypeError, ValueError: somebody else wrote it.
        """
        sizes = [document[name] for name in ("cpus", "memory_mib")]
        cpus, memory = (None if size is None else int(size) for size in sizes)
        files = tuple((str(path), int(mtime), int(size)) for path, mtime, size in document["files"])
        return cls(cpus, memory, files)

    def is_current(self) -> bool:
        """Whether every file is as it was when it was read."""
        return bool(self.files) and all(stamp_of(Path(file[0])) == file for file in self.files)


def find_size(node: str, slurm_conf: str | None, known: NodeSize | None = None) -> NodeSize | None:
    """Return what Slurm was told of the size of ``node``, or None where that cannot be known.

    ``slurm_conf`` is the file Slurm named, if it did. ``known`` is an earlier answer: it stands
    while its files are unchanged. Other than for GPUs it is no last resort: a cluster whose
    configuration cannot be read says nothing of a processor.
    """
    if known and known.is_current() and slurm_conf in (None, known.files[0][0]):
        return known
    for path in (*([Path(slurm_conf)] if slurm_conf else []), *USUAL_FILES):
        size = read_size(path, node)
        if size:
            return size
    return None


def read_size(slurm_conf: Path, node: str) -> NodeSize | None:
    """Return what ``slurm_conf`` says of ``node``; None where no line names it.

    Under ``config_overrides`` (one real machine that plays many) sizes are made up: None for both.
    """
    files: list[Stamp] = []
    defaults: dict[str, str] = {}
    told: dict[str, str] | None = None
    overridden, percent = False, 100.0
    for line in lines_of(slurm_conf, files):
        overridden |= "config_overrides" in line.get("slurmdparameters", "").lower()
        overridden |= line.get("fastschedule") == "2"
        share = re.search(
            r"node_reg_mem_percent=(\d+(?:\.\d+)?)", line.get("slurmctldparameters", "")
        )
        percent = float(share.group(1)) if share else percent
        names = line.get("nodename")
        if names is None:
            continue
        if names.upper() == "DEFAULT":
            defaults.update(line)
        elif told is None and names_node(names, node):
            told = {**defaults, **line}
    if told is None:
        return None
    if overridden:
        return NodeSize(None, None, tuple(files))
    memory = _whole(told.get("realmemory"))
    least = None if memory is None else int(memory * min(percent, 100.0) / 100)
    return NodeSize(_cpus(told), least, tuple(files))


def _cpus(line: Mapping[str, str]) -> int | None:
    """CPUs, or the product of what makes them up; None where none of these is given."""
    cpus = _whole(line.get("cpus")) or _whole(line.get("procs"))
    if cpus:
        return cpus
    boards = _whole(line.get("boards")) or 1
    sockets = _whole(line.get("sockets"))
    each_board = _whole(line.get("socketsperboard"))
    cores, threads = (_whole(line.get(name)) for name in ("corespersocket", "threadspercore"))
    if not (sockets or each_board or cores or threads):
        return None
    return (sockets or boards * (each_board or 1)) * (cores or 1) * (threads or 1)


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 10 else None


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


def lines_of(path: Path, files: list[Stamp]) -> Iterator[Mapping[str, str]]:
    """Yield the ``Key=value`` pairs of each line of a file and its includes, keys in lower case.

    Each file that could be read is added to ``files``.
    """
    stamp = stamp_of(path)
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
            yield from lines_of(path.parent / included.group(1), files)
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


def stamp_of(path: Path) -> Stamp | None:
    """Return how a file is now, or None where it cannot be seen."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return (str(path), status.st_mtime_ns, status.st_size)
