"""Does a running job still make progress, at its own pace? Pure.

    >>> looks = [Look(60.0 * n, min(n, 30)) for n in range(90)]
    >>> stalled(looks, began=0.0, limits=Limits()).seconds
    3540.0

What a job's health checks saw of its step goes in; whether it stands still for longer than it ever
has goes out. Time is judged by looks alone: between two looks nothing is known, so a monitor that
is silent makes no job stand still. Whether a job that stands still hangs, its GPUs and processes
say (``hang``).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from recovery.decision import Implicated

LOOKS_LIMIT = 1440
"""Most looks kept of one job: a day of one a minute."""

_LEARNED_FROM = 3
"""Intervals between steps seen from which on a job's cadence is known."""

_OWN_PAUSE = 1.5
"""How much longer than the longest pause that it has come back from a job may stand still."""

_GAP = 3.0
"""Looks further apart than this many usual gaps are the monitor's pause, not the job's."""


@dataclass(frozen=True)
class Look:
    """A health check's look at a job: when (seconds since the epoch), its step, and who looked."""

    time: float
    step: int
    node: str = ""


@dataclass(frozen=True)
class Limits:
    """When a job stands still, and when it is slow; ``config.Policy`` says it in full. Seconds."""

    minimum: float = 900.0
    maximum: float = 7200.0
    factor: float = 5.0
    slow_loss: float = 0.3
    slow_window: float = 1800.0


@dataclass(frozen=True)
class Stall:
    """A job's step has been ``step`` from ``since`` on, as seen at looks ``seconds`` apart.

    ``allowed`` is what its own cadence allows; ``told`` says in words where that comes from.
    """

    step: int
    since: float
    seconds: float
    allowed: float
    told: str

    @property
    def suspected(self) -> bool:
        """Whether it has stood still for longer than it may."""
        return self.seconds >= self.allowed


@dataclass(frozen=True)
class Activity:
    """What one node has shown of a job: finding codes, and what it named. ``time`` is its own.

    ``named`` are processes stopped, blocked or gone; ``suspects`` ranks that PyTorch's flight
    recorder names, with why; ``ranks`` those that run on the node; ``missing`` evidence that could
    not be taken, in sentences. ``asked`` is the request that it answers.
    """

    node: str
    time: float
    codes: frozenset[str] = frozenset()
    named: tuple[Implicated, ...] = ()
    suspects: tuple[tuple[int, str], ...] = ()
    ranks: frozenset[int] = frozenset()
    missing: tuple[str, ...] = ()
    asked: str = ""


@dataclass(frozen=True)
class Hang:
    """A hang as decided: what stood still, what else shows it, who is named, what is missing."""

    stall: Stall
    shown: str
    implicated: tuple[Implicated, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The hang in one sentence."""
        stall = self.stall
        still = f"no progress beyond step {stall.step} for {_minutes(stall.seconds)}"
        return f"{still} ({stall.told}); {self.shown}"


@dataclass(frozen=True)
class Slowdown:
    """A sustained loss of throughput against the job's own best, in steps a second."""

    step: int
    rate: float
    best: float
    since: float

    @property
    def summary(self) -> str:
        """The slowdown in one sentence."""
        loss = 1 - self.rate / self.best
        rates = f"{self.rate:.3g} steps/s, its own best {self.best:.3g}"
        return f"slower by {loss:.0%} for a while: {rates}"


def stalled(looks: Sequence[Look], began: float, limits: Limits) -> Stall | None:
    """Return how long the job stands still at its last look; None where that is not known.

    ``began`` is the running attempt's start: earlier looks teach the cadence and count for nothing
    else. Before its first progress an attempt starts up, and may take the maximum.
    """
    own = [look for look in looks if look.time >= began]
    if not own:
        return None
    last = own[-1]
    since = next(look.time for look in own if look.step == last.step)
    moved = any(look.step != own[0].step for look in own)
    allowed, told = _allowed(looks, limits) if moved else (limits.maximum, "it was starting")
    return Stall(last.step, since, last.time - since, allowed, told)


def _allowed(looks: Sequence[Look], limits: Limits) -> tuple[float, str]:
    pauses = intervals(looks)
    if len(pauses) < _LEARNED_FROM:
        return limits.maximum, f"its cadence is not known yet: {_minutes(limits.maximum)} allowed"
    usual = statistics.quantiles(pauses, n=10)[-1] if len(pauses) > 1 else pauses[0]
    wanted = max(limits.factor * usual, _OWN_PAUSE * max(pauses))
    allowed = min(max(wanted, limits.minimum), limits.maximum)
    return allowed, f"its own cadence allows {_minutes(allowed)}"


def intervals(looks: Sequence[Look]) -> list[float]:
    """Return the seconds between looks at which a new step was first seen.

    Left out is what says nothing of the job's pace: up to its first progress, across a restart,
    and while nobody looked.
    """
    gaps = [after.time - before.time for before, after in itertools.pairwise(looks)]
    usual = statistics.median(gaps) if gaps else 0.0
    found: list[float] = []
    seen: float | None = None
    for before, after in itertools.pairwise(looks):
        if after.step < before.step or after.time - before.time > _GAP * usual:
            seen = None
        elif after.step > before.step:
            if seen is not None:
                found.append(after.time - seen)
            seen = after.time
    return found


def hang(
    stall: Stall, shown: Mapping[str, Activity], nodes: Collection[str], missing: Iterable[str] = ()
) -> Hang | str:
    """Return the hang that GPUs and processes show with ``stall``, or why none is decided yet.

    ``shown`` has each node's last word. A node that works, or moves data, contradicts a hang; some
    node has to show one, since standing still alone may be anything. A stopped, blocked or missing
    process, and a rank that PyTorch's flight recorder names, are named with their node.
    """
    here = [shown[node] for node in sorted(shown) if node in nodes]
    against = contradicted(here)
    if against:
        return against
    named = [item for one in here for item in one.named]
    words = _words(here, named)
    if not words:
        return "neither GPUs nor processes show a hang"
    place = {rank: one.node for one in here for rank in one.ranks}
    suspects = {
        rank: Implicated(place[rank], f"rank {rank} {why}", "log", "hang.suspect_rank", rank=rank)
        for one in here
        for rank, why in one.suspects
        if rank in place
    }
    words += [item.why for item in suspects.values()]
    untold = [f"{one.node}: {text}" for one in here for text in one.missing]
    return Hang(stall, "; ".join(words), (*named, *suspects.values()), (*missing, *untold))


def contradicted(shown: Iterable[Activity]) -> str:
    """Return what shows that the job works after all, empty where nothing does."""
    for one in shown:
        if "activity.gpus_working" in one.codes:
            return f"GPUs of {one.node} work"
        if "activity.moving_data" in one.codes:
            return f"processes on {one.node} read or write"
    return ""


def _words(shown: Sequence[Activity], named: Sequence[Implicated]) -> list[str]:
    """What shows a hang, in words: processes first, then GPUs, then that nothing computes."""
    words = [f"{item.node}: {item.why}" for item in named[:4]]
    kinds = {code for one in shown for code in one.codes if code.startswith("activity.gpus_")}
    if kinds == {"activity.gpus_spinning"}:
        words.append("all its GPUs are busy at low power")
    elif kinds == {"activity.gpus_idle"}:
        words.append("all its GPUs are idle")
    elif kinds:
        words.append("its GPUs are idle, or busy at low power")
    elif shown and all("activity.processes_idle" in one.codes for one in shown):
        words.append("none of its processes computes")
    return words


def slow(looks: Sequence[Look], began: float, limits: Limits) -> Slowdown | None:
    """Return the slowdown of the running attempt, None where there is none or too little is known.

    Windows of ``slow_window`` seconds are compared: a pause within one is in each. The best is one
    that nine of ten windows do not pass, so that a lucky one sets no mark.
    """
    own = [look for look in looks if look.time >= began]
    windows = _windows(own, limits.slow_window)
    if len(windows) < 2 * _LEARNED_FROM:
        return None
    rates = [rate for _, rate in windows]
    best, (since, rate) = statistics.quantiles(rates, n=10)[-1], windows[-1]
    if rate <= 0 or best <= 0 or rate > (1 - limits.slow_loss) * best:
        return None
    return Slowdown(own[-1].step, rate, best, since)


def _windows(looks: Sequence[Look], seconds: float) -> list[tuple[float, float]]:
    """The start and the rate of each stretch of looks that is just as long as ``seconds``."""
    found: list[tuple[float, float]] = []
    first = 0
    for last in looks:
        while first + 1 < len(looks) and last.time - looks[first + 1].time >= seconds:
            first += 1
        start = looks[first]
        span = last.time - start.time
        if seconds <= span <= 2 * seconds and last.step >= start.step:
            found.append((start.time, (last.step - start.step) / span))
    return found


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
