"""What PyTorch's flight recorder says of a hang: which rank did not enter what the others wait in.

Each rank writes its last collectives into ``nccl_trace_rank_N`` when its watchdog gives up; what
is in such a file is ``flight_dumps``'. Nothing is ever unpickled. The judgement is pure.

Meaning (torch/distributed/flight_recorder): a process group counts its collectives; a rank whose
last number is below the one that the others wait for never got there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurm_hooks.joblog import plain_pickle
from slurm_hooks.joblog.flight_dumps import Dump, Entry, content_of, newest, parse

TOTAL_BYTES = 512 << 20
"""Most bytes read of all dumps of one job."""

_DEFAULT_NAMES = frozenset({"0", "default_pg"})
"""Names of the group of all ranks: torch numbers groups from 0."""

_WAITING_MIN = 2
"""Ranks that must wait in one collective before one that is not there is suspected."""


@dataclass(frozen=True)
class Suspect:
    """A global rank, and why it is suspected, in words."""

    rank: int
    why: str


@dataclass(frozen=True)
class FlightVerdict:
    """What all dumps together say; empty where they say nothing.

    ``ranks`` have a dump. ``operation`` and ``sequence`` are the collective that most wait in,
    ``waiting`` the ranks that do. ``suspects`` did not enter it, or did not begin it on their
    device, and wait for nobody themselves. ``silent`` are members of the group without a dump:
    they may be dead or stopped, or their dump lies on another disk. ``mismatch`` is a sentence
    where ranks entered different collectives at one place: a fault of the program. ``unreadable``
    says by file name why a dump did not count.
    """

    ranks: tuple[int, ...] = ()
    operation: str | None = None
    sequence: int | None = None
    waiting: tuple[int, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    silent: tuple[int, ...] = ()
    mismatch: str | None = None
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @property
    def stuck(self) -> bool:
        """Whether ranks wait in a collective."""
        return len(self.waiting) >= _WAITING_MIN


def read(
    paths: Iterable[Path], since: float | None = None, deadline_seconds: float = 5.0
) -> FlightVerdict:
    """Return what the dumps ``paths`` say together.

    A file's rank is the number at the end of its name. Of two files of one rank, the newer counts.
    Files changed before ``since`` (seconds since the epoch) are another attempt's. What is not
    read when the deadline passes is in ``unreadable``. Raises nothing for any content.
    """
    ends = time.monotonic() + deadline_seconds
    dumps: dict[int, Dump] = {}
    unreadable: dict[str, str] = {}
    left = TOTAL_BYTES
    for path, rank, size in newest(paths, since, unreadable):
        try:
            if time.monotonic() > ends:
                raise plain_pickle.NotPlain("there was no time left to read it")
            if size > left:
                raise plain_pickle.NotPlain(f"all dumps together are larger than {TOTAL_BYTES}")
            left -= size
            seconds = max(0.1, ends - time.monotonic())
            dumps[rank] = parse(rank, content_of(path, seconds))
        except (plain_pickle.NotPlain, OSError) as problem:
            unreadable[path.name] = str(problem)[:200]
    return replace(judge(list(dumps.values())), unreadable=unreadable)


def judge(dumps: Sequence[Dump]) -> FlightVerdict:
    """Return what ``dumps``, one of each rank, say together. Pure."""
    ranks = tuple(sorted(dump.rank for dump in dumps))
    fronts = [front for group in _groups(dumps) for front in _fronts(group)]
    fronts.sort(key=lambda front: (-len(front.waiting), front.group.name))
    mismatch = next((text for text in map(_mismatch, _groups(dumps)) if text), None)
    if not fronts:
        return FlightVerdict(ranks, mismatch=mismatch)
    busy = {dump.rank for dump in dumps if any(not entry.finished for entry in dump.entries)}
    top = fronts[0]
    verdict = FlightVerdict(
        ranks, top.operation, top.sequence, top.waiting, silent=top.silent, mismatch=mismatch
    )
    if mismatch:
        return verdict
    # Who waits in another group's collective is itself a victim: follow it to whoever does not.
    suspects: dict[int, Suspect] = {}
    for front in fronts:
        late = [rank for rank in front.late if rank not in busy]
        if len(front.waiting) >= _WAITING_MIN and len(late) < len(front.waiting):
            for rank in late:
                suspects.setdefault(rank, Suspect(rank, front.why("has not entered", "wait in")))
    if not suspects:
        for front in fronts:
            if len(front.begun) >= _WAITING_MIN and len(front.queued) == 1:
                rank = front.queued[0]
                if _only_waits_here(rank, front, dumps):
                    why = front.why("has queued but not begun", "are in", front.begun)
                    suspects[rank] = Suspect(rank, why)
    return replace(verdict, suspects=tuple(suspects[rank] for rank in sorted(suspects)))


@dataclass(frozen=True)
class _Group:
    """One process group: its members, None where no dump tells, and the dumps of those."""

    name: str
    members: tuple[int, ...] | None
    dumps: tuple[Dump, ...]


@dataclass(frozen=True)
class _Front:
    """A collective that ranks wait in. ``late`` have a dump that ends before it."""

    group: _Group
    operation: str
    sequence: int
    waiting: tuple[int, ...]
    begun: tuple[int, ...]
    queued: tuple[int, ...]
    late: tuple[int, ...]
    silent: tuple[int, ...]

    def why(self, did: str, others: str, ranks: tuple[int, ...] | None = None) -> str:
        wait = ranked(ranks or self.waiting)
        return f"{did} {self.operation} #{self.sequence} that {wait} {others}"


def ranked(ranks: Sequence[int]) -> str:
    """Return ranks as people write them.

    >>> ranked([0, 1, 2, 3, 6, 8, 9]), ranked([4])
    ('ranks 0-3,6,8-9', 'rank 4')
    """
    parts: list[str] = []
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 1 else [str(rank) for rank in run]
    shown = ",".join(parts) if len(parts) <= 12 else f"{','.join(parts[:12])},…"
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}"


def _groups(dumps: Sequence[Dump]) -> list[_Group]:
    """The process groups; two of one name with other members are two.

    A group that no dump gives members to is its ranks' own default group, or left out.
    """
    found: dict[tuple[str, tuple[int, ...] | None], list[Dump]] = {}
    for dump in dumps:
        for name in dict.fromkeys(
            [*dump.members, *(entry.group for entry in dump.entries if not entry.point_to_point)]
        ):
            members = dump.members.get(name)
            if members and dump.rank not in members:
                continue
            found.setdefault((name, members), []).append(dump)
    return [
        _Group(name, members, tuple(those))
        for (name, members), those in found.items()
        if members or name in _DEFAULT_NAMES
    ]


def _fronts(group: _Group) -> list[_Front]:
    """The collective of the group that most of its members wait in, if any does."""
    waits: dict[int, Entry] = {}
    gave_up: dict[int, Entry] = {}
    reached: dict[int, int] = {}
    for dump in group.dumps:
        own = [e for e in dump.entries if e.group == group.name and not e.point_to_point]
        last = max((entry.sequence for entry in own), default=dump.enqueued.get(group.name))
        if last is None:
            continue  # what it did in this group is no longer, or was never, in its buffer
        reached[dump.rank] = max(last, dump.enqueued.get(group.name, last))
        pending = [entry for entry in own if not entry.finished]
        if pending:
            waits[dump.rank] = min(pending, key=lambda entry: entry.sequence)
        elif own and not own[-1].completed:
            gave_up[dump.rank] = own[-1]
    if not waits:
        return []
    sequence = Counter(entry.sequence for entry in waits.values()).most_common(1)[0][0]
    waits |= {rank: entry for rank, entry in gave_up.items() if entry.sequence == sequence}
    waiting = tuple(sorted(r for r, entry in waits.items() if entry.sequence == sequence))
    operation = Counter(waits[rank].operation for rank in waiting).most_common(1)[0][0]
    begun = tuple(rank for rank in waiting if waits[rank].started)
    return [
        _Front(
            group,
            operation,
            sequence,
            waiting,
            begun,
            tuple(rank for rank in waiting if rank not in begun) if begun else (),
            tuple(sorted(rank for rank, last in reached.items() if last < sequence)),
            tuple(sorted(set(group.members or ()) - {dump.rank for dump in group.dumps})),
        )
    ]


def _only_waits_here(rank: int, front: _Front, dumps: Sequence[Dump]) -> bool:
    """Whether the rank's oldest unfinished work is this collective."""
    for dump in dumps:
        if dump.rank == rank:
            pending = [entry for entry in dump.entries if not entry.finished]
            first = pending[0] if pending else None
            return (
                first is not None
                and first.group == front.group.name
                and (first.sequence == front.sequence)
            )
    return False


def _mismatch(group: _Group) -> str | None:
    """The first place of a group at which its ranks entered different collectives, in words."""
    if len(group.dumps) < _WAITING_MIN:
        return None
    names: dict[int, dict[int, set[str]]] = {}
    sizes: dict[int, dict[int, tuple[int, ...]]] = {}
    for dump in group.dumps:
        for entry in dump.entries:
            if entry.group == group.name and not entry.point_to_point:
                names.setdefault(entry.sequence, {}).setdefault(dump.rank, set()).add(
                    entry.operation
                )
                if entry.size is not None:
                    sizes.setdefault(entry.sequence, {})[dump.rank] = entry.size
    for sequence in sorted(names):
        of_rank = {rank: "+".join(sorted(found)) for rank, found in names[sequence].items()}
        if len(set(of_rank.values())) > 1:
            return _differ(sequence, of_rank)
        counts = {rank: str(size) for rank, size in sizes.get(sequence, {}).items()}
        if len(set(counts.values())) > 1:
            what = next(iter(of_rank.values()))
            return _differ(sequence, {r: f"{what} of {c} elements" for r, c in counts.items()})
    return None


def _differ(sequence: int, of_rank: Mapping[int, str]) -> str:
    kinds = Counter(of_rank.values()).most_common(3)
    parts = [
        f"{ranked([rank for rank, found in of_rank.items() if found == kind])} in {kind}"
        for kind, _ in kinds
    ]
    return f"at collective #{sequence} of one group: {', '.join(parts)}"
