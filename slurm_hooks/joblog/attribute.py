"""From events to a cause: which line is the first primary failure, and whom it names.

Pure. The order of precedence is the classes' tier, then the order of the lines; a traceback that
was raised from another counts as the first of them; what happened before training went on again
is not the cause of its end. Wrongly restarting a program's bug, or blaming an innocent node, is
the dearer mistake, so where two readings are possible, this module takes the careful one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurm_hooks.joblog import collectives
from slurm_hooks.joblog.layout import Layout, LayoutError, expand
from slurm_hooks.joblog.lines import Line
from slurm_hooks.joblog.places import Places
from slurm_hooks.joblog.scan import Event
from slurm_hooks.joblog.signatures import Catalogue, Signature


@dataclass(frozen=True)
class Implicated:
    """A resource that the cause names. ``gpu`` is a CUDA device or a PCI address."""

    node: str | None
    rank: int | None
    gpu: int | str | None
    why: str


@dataclass(frozen=True)
class Cause:
    """The answer: class, confidence, the job's verdict, the line, and whom it names."""

    fault_class: str
    confidence: str
    job_verdict: str
    event: Event | None = None
    line: Line | None = None
    implicated: tuple[Implicated, ...] = ()
    cascade: int = 0
    signatures: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Surroundings:
    """What is known besides the events: the layout, who is where, and which hosts failed.

    ``task_hosts`` are Slurm's own words on where a task ran; ``addresses`` the hosts of IP
    addresses; ``nan_line`` a loss that stopped being a number.
    """

    layout: Layout = field(default_factory=Layout)
    addresses: Mapping[str, str] = field(default_factory=dict)
    repeats: Mapping[str, int] = field(default_factory=dict)
    nan_line: Line | None = None


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
        or _died_first(events)
        or _collective(events, around, places)
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
        if event.trace is not None and event.trace.chained and at is not None:
            first = kept[at]
            if _everyday(first) and event.signature.id != "python.exception":
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
        event.signature.id in ("python.exception", "python.control_flow")
        and event.trace is not None
        and bool(event.trace.in_library)
    )


def _first(events: Sequence[Event], *classes: str) -> Event | None:
    for event in events:
        if event.signature.role == "root" and event.signature.fault_class in classes:
            return event
    return None


def _cause(event: Event, implicated: tuple[Implicated, ...] = (), **changes: str) -> Cause:
    return Cause(
        fault_class=changes.get("fault_class", event.signature.fault_class),
        confidence=changes.get("confidence", event.signature.confidence),
        job_verdict=changes.get("job_verdict", ""),
        event=event,
        implicated=implicated,
    )


def _schedulers_word(events: Sequence[Event], places: Places) -> Cause | None:
    for name in ("scheduler.time_limit", "scheduler.preempted", "scheduler.requeued"):
        event = _first(events, name)
        if event:
            return _cause(event)
    event = _first(events, "node.lost")
    if event:
        named = [e for e in events if e.signature.id == "slurm.node_failure_named"]
        lost = [name for one in named for name in _nodes(one)]
        nodes = [node for node in dict.fromkeys(map(places.node, lost)) if node]
        why = "Slurm lost this node"
        return _cause(
            named[0] if named else event,
            tuple(Implicated(node, None, None, why) for node in nodes),
        )
    event = _first(events, "program.stop_requested")
    if event:
        return _cause(event)
    cancelled = _first(events, "scheduler.cancelled")
    if cancelled is None or any(e.signature.id in _SLURM_MEMORY for e in events):
        return None
    by_job = [e for e in events if e.signature.id == "slurm.job_cancelled"]
    if by_job:
        return _cause(by_job[0])
    before = [e for e in events if e.line.offset < cancelled.line.offset]
    failures = [e for e in before if e.signature.id not in _ENDED_BY_SIGNAL]
    others = [
        e
        for e in events
        if e.signature.role == "root" and e.signature.fault_class != "scheduler.cancelled"
    ]
    return None if failures or others else _cause(cancelled)


_SLURM_MEMORY = ("slurm.oom_kill", "slurm.task_oom", "slurm.memory_limit")

_ENDED_BY_SIGNAL = ("noise.interrupt", "slurm.task_signalled", "slurm.force_terminated")


def _nodes(event: Event) -> list[str]:
    text = event.captures.get("nodes", "").rstrip(":,.")
    try:
        return list(expand(text))
    except LayoutError:
        return []


def _hardware(events: Sequence[Event], places: Places) -> Cause | None:
    event = _first(
        events, "hardware.gpu", "hardware.link", "hardware.host", "hardware.gpu.contained"
    )
    if event is None:
        return None
    if event.signature.fault_class == "hardware.gpu.contained":
        # An uncontained error of the same GPU may follow the contained one: it decides.
        graver = _first(events, "hardware.gpu", "hardware.link")
        event = graver or event
    if event.signature.blame != "reporter":
        return _cause(event)
    return _cause(event, (_reporter(event, places),))


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
    if fabric and (first is None or fabric[0].line.offset < first.line.offset):
        named = _fabric(fabric, places)
        if first is None or named.implicated:
            return named
    if first is not None:
        return _lonely(first, places) if first.signature.blame != "none" else _cause(first)
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
        return _cause(own[0], (_reporter(own[0], places),) if one_host else ())
    pairs = [event for event in events if "peer" in event.captures and event.line.host]
    partners: dict[str, set[str]] = {}
    for event in pairs:
        if event.signature.blame == "peer":
            partners.setdefault(event.captures["peer"], set()).add(str(event.line.host))
    ranked = sorted(partners.items(), key=lambda item: -len(item[1]))
    if not ranked:
        return _cause(events[0])
    peer, reporters = ranked[0]
    alone = len(ranked) == 1 or len(ranked[1][1]) < len(reporters)
    node = places.node(peer)
    if len(reporters) < _PARTNERS_MIN or not alone or node is None:
        return _cause(events[0])
    if any(str(event.line.host).partition(".")[0] == node for event in pairs):
        return _cause(events[0])
    why = f"{len(reporters)} nodes lost their connection to it"
    return _cause(events[0], (Implicated(node, None, None, why),))


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
        return _cause(event, (Implicated(nodes[0], None, None, why),))
    if event.signature.everywhere == "hold":
        return _cause(event, fault_class="program.config", job_verdict="hold")
    return _cause(event, confidence="unknown")


def _died_first(events: Sequence[Event]) -> Cause | None:
    """The task that a signal ended before srun ended the others: its peers' errors echo its death.

    Nothing tells who sent the signal or why, so it names no cause and blames no node. SIGABRT and
    SIGTERM do not count: a watchdog ends its own process by the one, a launcher its tasks by the
    other. Nor does a death after a timeout, which may be its consequence.
    """
    for event in events:
        fault_class = event.signature.fault_class
        if event.signature.id == "slurm.step_ended" or fault_class in _ENDS_OTHERS:
            return None
        alone = event.captures.get("tasks", "").isdigit()
        if alone and event.captures.get("signal") not in (None, "Terminated", "Aborted"):
            return _cause(event, fault_class="unknown", confidence="unknown")
    return None


_ENDS_OTHERS = ("collective.timeout", "scheduler.cancelled")


def _collective(events: Sequence[Event], around: Surroundings, places: Places) -> Cause | None:
    event = _first(events, *_TIER_THREE)
    if event is None:
        return None
    timeout = _first(events, "collective.timeout") or event
    barrier = next((e for e in events if e.signature.blame == "rank"), None)
    if barrier is not None:
        ranks = [int(rank) for rank in barrier.captures["ranks"].replace(",", " ").split()]
        if len(ranks) == 1:
            return _suspect(barrier, ranks, "did not come to the barrier", places)
        return _cause(barrier, confidence="unknown")
    seen = collectives.picture(events, around.layout)
    if seen.mismatch:
        return _cause(timeout, fault_class="program.desync", confidence="probable")
    if seen.suspects:
        return _suspect(timeout, seen.suspects, seen.why, places)
    return _cause(timeout)


_TIER_THREE = ("collective.timeout", "collective.failed", "collective.peer_lost", "rendezvous")


def _suspect(event: Event, ranks: Sequence[int], why: str, places: Places) -> Cause:
    named = tuple(Implicated(places.of_rank(rank), rank, None, why) for rank in ranks)
    return _cause(event, named, confidence="probable")


def _end(events: Sequence[Event]) -> Cause:
    """Nothing primary: a bare exit, victims alone, or nothing at all."""
    nonfatal = _first(events, "hardware.link.nonfatal")
    if nonfatal:
        return _cause(nonfatal)
    kernels = [e for e in events if e.signature.id.startswith("kernel:")]
    if (
        kernels
        and all(e.signature.role == "cascade" for e in kernels)
        and len(kernels) == len(events)
    ):
        return _cause(kernels[0])
    lost = next((e for e in events if e.signature.fault_class == "collective.peer_lost"), None)
    if lost:
        return _cause(lost, confidence="unknown")
    ended = next((e for e in events if e.signature.role == "exit"), None)
    if ended:
        return _cause(ended, fault_class="unknown", confidence="unknown")
    interrupted = [e for e in events if e.signature.role == "cascade"]
    if interrupted:
        return _cause(interrupted[0], fault_class="unknown", confidence="unknown")
    return Cause("unknown", "unknown", "")


def signature_of(cause: Cause) -> Signature | None:
    """Return the signature of the line that is the cause, if a signature found it."""
    return cause.event.signature if cause.event else None
