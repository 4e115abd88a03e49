"""One rank's flight-recorder dump as a few facts: what it entered, and who is in its groups.

Knows torch's format (torch/csrc/distributed/c10d/FlightRecorder, dump versions 2.x, pickled or as
JSON) and how to open a file that may be anything; what the dumps of all ranks say together is
``flight_recorder``'s.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_hooks import as_user
from slurm_hooks.joblog import plain_pickle

FILES_LIMIT = 16_384
"""Most dumps read of one job; the largest jobs have a rank for each of so many GPUs."""

JSON_BYTES = 16 << 20

_RANK = re.compile(r"(?P<rank>\d{1,6})(?:\.(?:json|pkl|pickle|bin))?$")
_SAME_SIZES = frozenset({"all_reduce", "broadcast"})
"""Collectives in which every rank's input has one size (others may differ rank by rank)."""


@dataclass(frozen=True)
class Entry:
    """One collective as one rank recorded it. ``started`` is its device's word, where told.

    gloo retires what failed too, and never says ``completed``.
    """

    group: str
    sequence: int
    operation: str
    finished: bool
    completed: bool
    started: bool
    point_to_point: bool
    size: tuple[int, ...] | None


@dataclass(frozen=True)
class Dump:
    """One rank's dump: entries in order, and each group's members and last number enqueued."""

    rank: int
    entries: tuple[Entry, ...]
    members: Mapping[str, tuple[int, ...]]
    enqueued: Mapping[str, int]


def rank_of(name: str) -> int | None:
    """Return the rank in a dump's file name, None where it has none.

    >>> rank_of("nccl_trace_rank_12"), rank_of("rank_3.json"), rank_of("core")
    (12, 3, None)
    """
    found = _RANK.search(name)
    return int(found["rank"]) if found else None


def newest(
    paths: Iterable[Path], since: float | None, unreadable: dict[str, str]
) -> list[tuple[Path, int, int]]:
    """Return each rank's newest file, the rank and the file's size, by rank.

    Files changed before ``since`` are left out; ``unreadable`` takes up what cannot be looked at.
    """
    found: dict[int, tuple[float, Path, int]] = {}
    for path, _ in zip(paths, range(FILES_LIMIT), strict=False):
        rank = rank_of(path.name)
        if rank is None:
            continue
        try:
            status = path.stat()
        except OSError as problem:
            unreadable[path.name] = problem.strerror or "it cannot be read"
            continue
        if since is not None and status.st_mtime < since:
            continue
        if rank not in found or status.st_mtime > found[rank][0]:
            found[rank] = (status.st_mtime, path, status.st_size)
    return [(path, rank, size) for rank, (_, path, size) in sorted(found.items())]


def content_of(path: Path, seconds: float) -> Any:
    """Return what a dump holds: the plain data of a pickle or of JSON, whatever it may be.

    Raises:
        NotPlain: it is neither, or passes a limit.
        OSError: no regular file, or none that may be read.
    """
    limits = plain_pickle.Limits(seconds=seconds)
    with as_user.open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limits.bytes:
            raise plain_pickle.NotPlain(f"it has {size} bytes, more than {limits.bytes}")
    content = as_user.read_start(path, limits.bytes)
    if content[:1] not in (b"{", b"[", b" ", b"\n"):
        return plain_pickle.load(content, limits)
    if len(content) > JSON_BYTES:
        raise plain_pickle.NotPlain(f"as JSON it has more than {JSON_BYTES} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as problem:
        raise plain_pickle.NotPlain(f"it is damaged or cut off: {problem}"[:160]) from problem
    except MemoryError:
        raise plain_pickle.NotPlain("it needs too much memory") from None


def parse(rank: int, content: Any) -> Dump:
    """Return what is needed of a document that may hold anything.

    Raises:
        NotPlain: it is no flight recorder's.
    """
    if not isinstance(content, dict) or not {"version", "pg_config"} & content.keys():
        raise plain_pickle.NotPlain("it is no flight recorder's dump")
    listed = content.get("entries", [])
    entries, numbers = [], {}
    for item in listed if isinstance(listed, list) else []:
        entry = _entry(item)
        if entry:
            entries.append(entry)
            numbers[str(item.get("pg_id"))] = entry.group
    members: dict[str, tuple[int, ...]] = {}
    for name, told in _items(content.get("pg_config")):
        ranks = re.findall(r"\d{1,6}", str(told.get("ranks", ""))[: 8 * FILES_LIMIT])
        if ranks:
            members[f"{name}"] = tuple(sorted({int(one) for one in ranks}))
    enqueued = {}
    for number, told in _items(content.get("pg_status")):
        last = _whole(told.get("last_enqueued_collective"))
        if number in numbers and last is not None:
            enqueued[numbers[number]] = last
    return Dump(rank, tuple(entries), members, enqueued)


def _items(table: Any) -> Iterable[tuple[str, Mapping[str, Any]]]:
    if isinstance(table, dict):
        for name, told in table.items():
            if isinstance(name, str) and isinstance(told, dict):
                yield name, told


def _entry(item: Any) -> Entry | None:
    if not isinstance(item, dict):
        return None
    group, sequence = item.get("process_group"), _whole(item.get("collective_seq_id"))
    name, state = item.get("profiling_name"), item.get("state")
    if not isinstance(group, (list, tuple)) or not group or not isinstance(group[0], str):
        return None
    if sequence is None or not isinstance(name, str) or not isinstance(state, str):
        return None
    operation = name.rpartition(":")[2].split(" ")[0][:80]
    return Entry(
        group=group[0][:200],
        sequence=sequence,
        operation=operation,
        finished=state == "completed" or item.get("retired") is True,
        completed=state == "completed",
        started=state == "started",
        point_to_point=item.get("is_p2p") is True or operation in ("send", "recv"),
        size=_size(item.get("input_sizes")) if operation in _SAME_SIZES else None,
    )


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
        return int(value)
    return value if type(value) is int else None


def _size(sizes: Any) -> tuple[int, ...] | None:
    """The elements of each input, None where that is not told plainly."""
    if not isinstance(sizes, (list, tuple)) or not 0 < len(sizes) <= 64:
        return None
    counts = []
    for shape in sizes:
        if not isinstance(shape, (list, tuple)) or len(shape) > 16:
            return None
        count = 1
        for one in shape:
            if type(one) is not int or not 0 <= one < 1 << 40:
                return None
            count *= one
        counts.append(count)
    return tuple(counts)
