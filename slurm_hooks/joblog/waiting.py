"""Who died first, or did not come: the causes of collectives that fail on everybody else.

Pure. A rank that died explains its peers' timeouts; where none is seen to have died, whoever is
behind, absent or out of reach is suspected: by torch's flight recorder, NCCL's own report and the
watchdogs' lines, in that order. All together in one collective: nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_hooks.joblog import collectives
from slurm_hooks.joblog.cause import Cause, Implicated, Surroundings, cause_of, first_of
from slurm_hooks.joblog.places import Places
from slurm_hooks.joblog.scan import Event

_CRASH_NUMBERS = frozenset({4, 7, 8, 11})
_CRASH_NAMES = frozenset(
    {
        *("Illegal instruction", "Bus error", "Floating point exception", "Segmentation fault"),
        *("SIGILL", "SIGBUS", "SIGFPE", "SIGSEGV"),
    }
)
"""Signals that a program's own instruction raises: SIGILL, SIGBUS, SIGFPE, SIGSEGV."""

_STEP_ENDS = ("slurm.step_ended", "slurm.step_terminated")
_ENDS_OTHERS = ("collective.timeout", "scheduler.cancelled")
_TIER_THREE = ("collective.timeout", "collective.failed", "collective.peer_lost", "rendezvous")
_FIRST_FAILURE = "torchrun.root_cause"
_ENDED_BY_LAUNCHER = -15
_SHELL_SIGNAL = 128
"""What a shell adds to the number of the signal that ended its command, for an exit code."""


def first_failure(events: Sequence[Event]) -> Event | None:
    """Return torchrun's own word on which rank failed first, if it is the only one.

    Each node has a torchrun that says it; the ones that only ended theirs (SIGTERM) do not count.
    """
    told = [event for event in _words(events) if _code(event) != _ENDED_BY_LAUNCHER]
    return (
        told[0]
        if len({(e.captures.get("host"), e.captures.get("rank")) for e in told}) == 1
        else None
    )


def died_first(events: Sequence[Event]) -> Cause | None:
    """The task that a signal ended before srun ended the others: its peers' errors echo its death.

    A signal that a program's own instruction raises is the program's. Of any other nothing tells
    who sent it or why, so it names no cause and blames no node. SIGABRT and SIGTERM do not count:
    a watchdog ends its own process by the one, a launcher its tasks by the other. Nor does a death
    after a timeout, which may be its consequence.
    """
    words = _words(events)
    for event in events:
        fault_class = event.signature.fault_class
        if event.signature.id in _STEP_ENDS or fault_class in _ENDS_OTHERS:
            return None
        if _crashed(event) and (event in words or not words):
            return cause_of(event, fault_class="program.crash", confidence="probable")
        alone = event.captures.get("tasks", "").isdigit()
        if alone and event.captures.get("signal") not in (None, "Terminated", "Aborted"):
            return cause_of(event, fault_class="unknown", confidence="unknown")
    return None


def collective(events: Sequence[Event], around: Surroundings, places: Places) -> Cause | None:
    """The collective that failed, and the one rank or node that is to be suspected of it."""
    event = first_of(events, *_TIER_THREE)
    if event is None and not around.flight.stuck:
        return None
    timeout = first_of(events, "collective.timeout") or event
    by_recorder = _flight(timeout, around, places)
    if by_recorder:
        return by_recorder
    if event is None or timeout is None:
        return Cause("collective.timeout", "unknown", "")
    barrier = next((e for e in events if e.signature.blame == "rank"), None)
    if barrier is not None:
        return _barrier(barrier, places)
    unreachable = _unreachable(timeout, around, places)
    if unreachable:
        return unreachable
    seen = collectives.picture(events, around.layout)
    if seen.mismatch:
        return cause_of(timeout, fault_class="program.desync", confidence="probable")
    if seen.suspects:
        return _suspect(timeout, seen.suspects, seen.why, places)
    return cause_of(timeout)


def signalled(event: Event) -> bool:
    """Whether ``event`` says that a signal ended a process."""
    code = _code(event)
    told = event.captures.keys() & {"signal", "signal2", "number"}
    return bool(told) or (code is not None and not 0 <= code < _SHELL_SIGNAL)


def _words(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.signature.id == _FIRST_FAILURE]


def _code(event: Event) -> int | None:
    text = event.captures.get("code", "")
    return int(text) if text.lstrip("-").isdigit() else None


def _crashed(event: Event) -> bool:
    if event.signature.role != "exit":
        return False
    code, number = _code(event), event.captures.get("number", "")
    return (
        event.captures.get("signal") in _CRASH_NAMES
        or (code is not None and {-code, code - _SHELL_SIGNAL} & _CRASH_NUMBERS != set())
        or (number.isdigit() and int(number) in _CRASH_NUMBERS)
    )


def _flight(timeout: Event | None, around: Surroundings, places: Places) -> Cause | None:
    """What the flight recorders say, where they name one rank, one node, or the program."""
    flight = around.flight
    if flight.mismatch:
        return _at(timeout, "program.desync")
    if flight.suspects:
        named = tuple(
            Implicated(places.of_rank(one.rank), one.rank, None, one.why) for one in flight.suspects
        )
        return _at(timeout, "collective.timeout", named) if _of_one(named) else None
    silent = tuple(
        Implicated(
            places.of_rank(rank), rank, None, "wrote no dump while the others wait for a collective"
        )
        for rank in flight.silent
    )
    shared = len({places.of_rank(rank) for rank in flight.ranks}) > 1
    # Dumps of several nodes lie together here, so that of one more would, had it been written.
    if silent and shared and flight.stuck and len(silent) < len(flight.waiting) and _of_one(silent):
        return _at(timeout, "collective.timeout", silent)
    return None


def _of_one(named: Sequence[Implicated]) -> bool:
    """Whether they are one rank, or ranks of one known node."""
    nodes = {one.node for one in named}
    return len(named) == 1 or (len(nodes) == 1 and None not in nodes)


def _at(event: Event | None, fault_class: str, named: tuple[Implicated, ...] = ()) -> Cause:
    if event is None:
        return Cause(fault_class, "probable", "", implicated=named)
    return cause_of(event, named, fault_class=fault_class, confidence="probable")


def _unreachable(timeout: Event, around: Surroundings, places: Places) -> Cause | None:
    """The one node whose processes NCCL's own report could not reach, while it did most others."""
    report = around.ras
    if report is None or not report.missing:
        return None
    named = tuple(
        Implicated(places.node(one.host), None, one.gpu, f"NCCL's RAS {one.how} process {one.pid}")
        for one in report.missing
    )
    nodes = {one.node for one in named}
    most = report.processes is not None and 2 * len(named) < report.processes
    if len(nodes) != 1 or None in nodes or not most:
        return None
    return cause_of(timeout, named, confidence="probable")


def _barrier(barrier: Event, places: Places) -> Cause:
    ranks = [int(rank) for rank in barrier.captures["ranks"].replace(",", " ").split()]
    nodes = {places.of_rank(rank) for rank in ranks}
    one_of_several = len(nodes) == 1 and None not in nodes and len(places.layout.nodes) > 1
    if len(ranks) == 1 or one_of_several:
        return _suspect(barrier, ranks, "did not come to the barrier", places)
    return cause_of(barrier, confidence="unknown")


def _suspect(event: Event, ranks: Sequence[int], why: str, places: Places) -> Cause:
    named = tuple(Implicated(places.of_rank(rank), rank, None, why) for rank in ranks)
    return cause_of(event, named, confidence="probable")
