"""What an attribution says, and what it is made from: types of ``attribute`` and its parts.

Pure data, and the two ways to come from an event to a cause that every part needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurm_hooks.joblog.flight_recorder import FlightVerdict
from slurm_hooks.joblog.layout import Layout
from slurm_hooks.joblog.lines import Line
from slurm_hooks.joblog.ras import RasReport
from slurm_hooks.joblog.scan import Event


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

    ``addresses`` are the hosts of IP addresses; ``nan_line`` is a loss that stopped being a number;
    ``flight`` what the ranks' flight recorders say together; ``ras`` NCCL's last own report.
    """

    layout: Layout = field(default_factory=Layout)
    addresses: Mapping[str, str] = field(default_factory=dict)
    repeats: Mapping[str, int] = field(default_factory=dict)
    nan_line: Line | None = None
    flight: FlightVerdict = field(default_factory=FlightVerdict)
    ras: RasReport | None = None


def first_of(events: Sequence[Event], *classes: str) -> Event | None:
    """Return the first primary event of one of ``classes``."""
    for event in events:
        if event.signature.role == "root" and event.signature.fault_class in classes:
            return event
    return None


def cause_of(event: Event, implicated: tuple[Implicated, ...] = (), **changes: str) -> Cause:
    """Return the cause that ``event`` is, as its signature says but for ``changes``."""
    return Cause(
        fault_class=changes.get("fault_class", event.signature.fault_class),
        confidence=changes.get("confidence", event.signature.confidence),
        job_verdict=changes.get("job_verdict", ""),
        event=event,
        implicated=implicated,
    )
