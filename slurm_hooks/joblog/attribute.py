"""From events to a cause: which line is the first primary failure, and whom it names.

Pure. The order of precedence is the classes' tier, then the order of the lines; a traceback that
was raised from another counts as the first of them; what happened before training went on again
is not the cause of its end. Wrongly restarting a program's bug, or blaming an innocent node, is
the dearer mistake, so where two readings are possible, this module takes the careful one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from slurm_hooks.joblog import waiting
from slurm_hooks.joblog.cause import Cause, Implicated, Surroundings, cause_of, first_of
from slurm_hooks.joblog.layout import LayoutError, expand
from slurm_hooks.joblog.places import Places
from slurm_hooks.joblog.scan import LAST_RESORT, Event
from slurm_hooks.joblog.signatures import Catalogue


def attribute(events: Sequence[Event], around: Surroundings, catalogue: Catalogue) -> Cause:
    """Return the cause that ``events`` (in order of time) tell."""
    events = _unhandled(_without_chained(events))
    counts = Counter(event.signature.id for event in events)
    counts.update(around.repeats)
    places = Places(events, around.layout, around.addresses)
    cause = (
        _schedulers_word(events, places)
        or _hardware(events, places)
        or _deterministic(events, around, places)
        or waiting.died_first(events)
        or waiting.collective(events, around, places)
        or _end(events)
    )
    cascade = sum(
        1
        for event in events
        if event is not cause.event and event.signature.role in ("cascade", "exit", "root")
    ) + sum(around.repeats.values())
    job = cause.job_verdict or catalogue.classes[cause.fault_class].job
    return Cause(
        fault_class=cause.fault_class,
        confidence=cause.confidence,
        job_verdict=job,
        event=cause.event,
        line=cause.line or (cause.event.line if cause.event else None),
        implicated=cause.implicated,
        cascade=cascade,
        signatures=dict(counts),
    )


def _without_chained(events: Sequence[Event]) -> list[Event]:
    """Drop exceptions that were raised from an earlier one of the same writer.

    The first of a chain stays, unless it is a library's own everyday exception (a missed cache, an
    empty queue) and a later one says what kind of failure it is.
    """
    kept: list[Event] = []
    last: dict[object, int] = {}
    for event in events:
        writer = event.line.writer
        at = last.get(writer)
        if event.signature.id in LAST_RESORT and event.trace and event.trace.chained and kept:
            continue
        if event.trace is not None and event.trace.chained and at is not None:
            first = kept[at]
            if first.signature.id in LAST_RESORT or (
                _everyday(first) and event.signature.id != "python.exception"
            ):
                kept[at] = event
            continue
        if event.trace is not None:
            last[writer] = len(kept)
        kept.append(event)
    return kept


def _unhandled(events: Sequence[Event]) -> Sequence[Event]:
    """Drop exceptions that the program says it goes on after, if any other failure is there."""
    left = [event for event in events if event.trace is None or not event.trace.handled]
    return left if any(event.signature.role == "root" for event in left) else events


def _everyday(event: Event) -> bool:
    return (
        event.signature.id == "python.exception"
        and event.trace is not None
        and event.trace.in_library
    )


def _schedulers_word(events: Sequence[Event], places: Places) -> Cause | None:
    for name in ("scheduler.time_limit", "scheduler.preempted", "scheduler.requeued"):
        event = first_of(events, name)
        if event:
            return cause_of(event)
    event = first_of(events, "node.lost")
    if event:
        named = [e for e in events if e.signature.id == "slurm.node_failure_named"]
        lost = [name for one in named for name in _nodes(one)]
        nodes = [node for node in dict.fromkeys(map(places.node, lost)) if node]
        why = "Slurm lost this node"
        return cause_of(
            named[0] if named else event,
            tuple(Implicated(node, None, None, why) for node in nodes),
        )
    event = first_of(events, "program.stop_requested")
    if event:
        return cause_of(event)
    cancelled = first_of(events, "scheduler.cancelled")
    if cancelled is None or any(e.signature.id in _SLURM_MEMORY for e in events):
        return None
    by_job = [e for e in events if e.signature.id == "slurm.job_cancelled"]
    if by_job:
        return cause_of(by_job[0])
    before = [e for e in events if e.line.offset < cancelled.line.offset]
    if _ended_by_srun(before):
        return None
    failures = [e for e in before if e.signature.id not in _ENDED_BY_SIGNAL]
    others = [
        e
        for e in events
        if e.signature.role == "root" and e.signature.fault_class != "scheduler.cancelled"
    ]
    return None if failures or others else cause_of(cancelled)


def _ended_by_srun(before: Sequence[Event]) -> bool:
    """Whether srun had begun to end the step before it was cancelled: a task of it had failed."""
    said = {event.signature.id for event in before}
    return "slurm.step_terminated" in said and "slurm.step_ended" not in said


_SLURM_MEMORY = ("slurm.oom_kill", "slurm.task_oom", "slurm.memory_limit")

_ENDED_BY_SIGNAL = ("noise.interrupt", "slurm.task_signalled", "slurm.force_terminated")


def _nodes(event: Event) -> list[str]:
    text = event.captures.get("nodes", "").rstrip(":,.")
    try:
        return list(expand(text))
    except LayoutError:
        return []


def _hardware(events: Sequence[Event], places: Places) -> Cause | None:
    event = first_of(
        events, "hardware.gpu", "hardware.link", "hardware.host", "hardware.gpu.contained"
    )
    if event is None:
        return None
    if event.signature.fault_class == "hardware.gpu.contained":
        # An uncontained error of the same GPU may follow the contained one: it decides.
        graver = first_of(events, "hardware.gpu", "hardware.link")
        event = graver or event
    if event.signature.blame != "reporter":
        return cause_of(event)
    named = _reporter(event, places)
    told = waiting.first_failure(events)
    if named.node is None and named.rank is None and told and "rank" in told.captures:
        rank = int(told.captures["rank"])
        node = places.node(told.captures.get("host", "")) or places.of_rank(rank)
        named = Implicated(node, rank, named.gpu, named.why)
    return cause_of(event, (named,))


def _reporter(event: Event, places: Places) -> Implicated:
    pci = event.signature.id.split(":", 2)[2] if event.signature.id.startswith("kernel:") else ""
    why = "its device reported the error" if not pci else "the driver reported this device"
    if event.signature.fault_class == "network.fabric":
        why = "its own network adapter reported the error"
    return Implicated(
        places.of_line(event.line),
        places.rank_of(event.line),
        pci.removesuffix(".0")
        or (event.line.gpu if event.line.gpu is not None else event.line.local),
        why,
    )


_YIELDING = ("remote_service", "network.port_in_use")
"""Causes that programs survive by trying again: a failure of another kind after them decides."""

_NEEDS_THE_NETWORK = ("mpi.start",)
"""Failures that an error of the network's own, seen with them, explains."""

_KILLED = ("dataloader.killed",)
"""Ends of processes that an out-of-memory kill, told by Slurm later, explains."""

_SAME_FAILURE_BYTES = 24 << 10
"""How far below its first exception the same process's last words may stand."""


def _deterministic(events: Sequence[Event], around: Surroundings, places: Places) -> Cause | None:
    tier = [
        event
        for event in events
        if event.signature.role == "root" and event.signature.fault_class in _TIER_TWO
    ]
    fabric = [event for event in tier if event.signature.fault_class == "network.fabric"]
    others = [event for event in tier if event.signature.fault_class != "network.fabric"]
    first = others[0] if others else None
    if first and first.signature.fault_class in _YIELDING:
        first = next(
            (
                event
                for event in others
                if event.signature.fault_class not in _YIELDING and not _same_failure(first, event)
            ),
            first,
        )
    if first and first.signature.id in _KILLED:
        first = next((event for event in others if event.signature.id in _SLURM_MEMORY), first)
    if fabric and first and first.signature.id in _NEEDS_THE_NETWORK:
        first = None
    if fabric and (first is None or fabric[0].line.offset < first.line.offset):
        named = _fabric(fabric, places)
        if first is None or named.implicated:
            return named
    if first is not None:
        return _lonely(first, places) if first.signature.blame != "none" else cause_of(first)
    if around.nan_line is not None:
        return Cause("program.nan_loss", "probable", "", None, around.nan_line)
    return None


_TIER_TWO = frozenset(
    {
        *("network.fabric", "node.software", "storage", "storage.full", "program.exception"),
        *("program.gpu_oom", "program.host_oom", "program.shared_memory", "program.config"),
        *("program.import", "program.input", "program.access", "program.gpu_fault"),
        *("program.crash", "program.nan_loss", "program.checkpoint", "program.desync"),
        *("program.dataloader", "remote_service", "network.port_in_use"),
    }
)


def _same_failure(first: Event, later: Event) -> bool:
    return (
        first.line.writer == later.line.writer
        and later.line.offset - first.line.offset <= _SAME_FAILURE_BYTES
    )


def _fabric(events: Sequence[Event], places: Places) -> Cause:
    own = [event for event in events if event.signature.blame == "reporter"]
    if own:
        # A port that fails on one host is that host's; on many, the switch's or the whole net's.
        one_host = len({event.line.host for event in own}) == 1
        return cause_of(own[0], (_reporter(own[0], places),) if one_host else ())
    pairs = [event for event in events if "peer" in event.captures and event.line.host]
    partners: dict[str, set[str]] = {}
    for event in pairs:
        if event.signature.blame == "peer":
            partners.setdefault(event.captures["peer"], set()).add(str(event.line.host))
    ranked = sorted(partners.items(), key=lambda item: -len(item[1]))
    if not ranked:
        return cause_of(events[0])
    peer, reporters = ranked[0]
    alone = len(ranked) == 1 or len(ranked[1][1]) < len(reporters)
    node = places.node(peer)
    if len(reporters) < _PARTNERS_MIN or not alone or node is None:
        return cause_of(events[0])
    if any(str(event.line.host).partition(".")[0] == node for event in pairs):
        return cause_of(events[0])
    why = f"{len(reporters)} nodes lost their connection to it"
    return cause_of(events[0], (Implicated(node, None, None, why),))


_PARTNERS_MIN = 2
"""Distinct partners that must name an endpoint; one pair alone may be either end."""


def _lonely(event: Event, places: Places) -> Cause:
    """A fault that is the node's if no other node has it, and everybody's otherwise."""
    if event.signature.blame == "named":
        nodes = [node for node in map(places.node, _nodes(event)) if node]
    else:
        own = places.of_line(event.line)
        failing = [node for node in map(places.node, places.failing) if node]
        nodes = [own] if own and set(failing) <= {own} else list(dict.fromkeys(failing))
    if len(nodes) == 1 and len(places.layout.nodes) > 1:
        why = "alone among the job's nodes in failing to start it"
        return cause_of(event, (Implicated(nodes[0], None, None, why),))
    if event.signature.everywhere == "hold":
        return cause_of(event, fault_class="program.config", job_verdict="hold")
    return cause_of(event, confidence="unknown")


def _end(events: Sequence[Event]) -> Cause:
    """Nothing primary: a bare exit, victims alone, or nothing at all."""
    nonfatal = first_of(events, "hardware.link.nonfatal")
    if nonfatal:
        return cause_of(nonfatal)
    kernels = [e for e in events if e.signature.id.startswith("kernel:")]
    if (
        kernels
        and all(e.signature.role == "cascade" for e in kernels)
        and len(kernels) == len(events)
    ):
        return cause_of(kernels[0])
    lost = next((e for e in events if e.signature.fault_class == "collective.peer_lost"), None)
    if lost:
        return cause_of(lost, confidence="unknown")
    raised = next((e for e in events if e.signature.id in LAST_RESORT), None)
    if raised and not any(waiting.signalled(event) for event in events):
        return cause_of(raised)
    ended = next((e for e in events if e.signature.role == "exit"), None)
    if ended:
        return cause_of(ended, fault_class="unknown", confidence="unknown")
    interrupted = [e for e in events if e.signature.role == "cascade"]
    if interrupted:
        return cause_of(interrupted[0], fault_class="unknown", confidence="unknown")
    return Cause("unknown", "unknown", "")
