"""How many GPUs Slurm believes a node has: read from slurm.conf and gres.conf, without a command.

Owns what Gres lines say, as far as GPUs go (slurm.conf(5), gres.conf(5)); how the files are written
is ``slurm_conf``'s. What it does not understand it passes over; where it cannot know it says None.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slurm_hooks.frozen import frozen
from slurm_hooks.slurm_conf import USUAL_FILES, Stamp, lines_of, names_node, stamp_of

_MAX_GPUS = 1024


@frozen
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
        return bool(self.files) and all(stamp_of(Path(file[0])) == file for file in self.files)


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
    count = _count_in_slurm_conf(lines_of(slurm_conf, files), node)
    if not files:
        return None
    minors, listed = _devices_in_gres_conf(lines_of(slurm_conf.parent / "gres.conf", files), node)
    if count is None:
        count = listed
    if count is None:
        return None
    return ConfiguredGpus(count, minors if len(minors) == count else (), tuple(files))


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


def known_from(state: Mapping[str, Any]) -> ConfiguredGpus | None:
    """Return the earlier answer kept in a probe's state under ``gres``, if there is a sound one."""
    document = state.get("gres")
    try:
        return ConfiguredGpus.from_dict(document) if isinstance(document, Mapping) else None
    except (KeyError, TypeError, ValueError):
        return None
