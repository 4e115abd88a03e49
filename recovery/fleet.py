"""Fleet events: one cause that hits many nodes or jobs at once is one incident with many members.

    >>> hits = [Hit(f"node n{number}", 1.8e9 + number, (f"n{number}",)) for number in range(5)]
    >>> extent(hits, 8, Fleet())
    Extent(nodes=5, jobs=0)

Pure. Owns what two incidents must have in common to be of one event (``key_of``), how many of them
make one (``extent``), and the decision that speaks for all. ``fleet_watch`` keeps who has been hit.

A switch, a file server, a roll-out or a power cut shows on many nodes within seconds, under several
codes. Nobody is drained for it: what all of them show is no node's own fault. A fault of one GPU,
which the node's kernel log or NVML names, stays that node's own, however many others have one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from recovery.decision import (
    MEMBERS_LIMIT,
    Cause,
    Decision,
    Implicated,
    JobAnswer,
    Member,
)
from recovery.incident import class_of
from slurm_hooks.config import ClassRule, Fleet
from slurm_hooks.record import SEVERITIES, FaultRecord, new_id, seconds_of, utc

INCIDENT = "fleet/"
"""How the incident of a fleet event begins; its key follows."""

_TOGETHER = (
    "storage.full",
    "storage",
    "network.fabric",
    "node.lost",
    "remote_service",
    "collective",
    "rendezvous",
    "hang",
    "hardware.gpu",
    "hardware.link",
    "hardware.host",
)
"""Classes whose codes tell of one thing: a dead file server shows as a hang, an I/O error and a
line in the kernel's log."""

_ONE_BY_ONE = ("node.software",)
"""Classes whose codes have nothing to do with each other."""

_FAULT = SEVERITIES.index("fault")
_OWN = ("hardware",)
_NO_EVIDENCE = ("log", "history")


@dataclass(frozen=True)
class Hit:
    """One node that shows a fault, or one attempt that failed of it, at ``time`` (seconds).

    ``subject`` is ``node n3`` or ``job 12``; ``nodes`` are those that show it themselves, of which
    ``own`` have evidence of a part of theirs. ``by_text``: only what a user can write says so.
    """

    subject: str
    time: float
    nodes: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    uid: int | None = None
    by_text: bool = False

    @property
    def is_job(self) -> bool:
        """Whether it is an attempt that failed."""
        return self.subject.startswith("job ")

    @property
    def member(self) -> Member:
        """Return it as a decision lists it."""
        return Member(self.subject, utc(self.time), self.nodes)


@dataclass(frozen=True)
class Extent:
    """How many nodes and jobs an event has hit."""

    nodes: int
    jobs: int

    def __str__(self) -> str:
        nodes = f"{self.nodes} node{'s' * (self.nodes != 1)}" if self.nodes else ""
        jobs = f"{self.jobs} job{'s' * (self.jobs != 1)}" if self.jobs else ""
        return " and ".join(filter(None, (nodes, jobs)))


@dataclass(frozen=True)
class Membership:
    """What the decision on one member must know of its event.

    ``decision`` is the event's; ``extent`` its size so far, in words; ``avoided`` are its nodes
    that are not drained, and that nobody should be sent to.
    """

    decision: str
    extent: str = ""
    avoided: tuple[str, ...] = ()


def key_of(fault_class: str, code: str) -> str:
    """Return what all incidents of one event share, empty for what concerns its own job alone."""
    for above in _TOGETHER:
        if _within(fault_class, above):
            return above
    return f"{fault_class}/{code}" if fault_class.startswith(_ONE_BY_ONE) else ""


def of_cause(cause: Cause) -> str:
    """Return the key of a cause; its fingerprint ends with the code."""
    return key_of(cause.fault_class, cause.fingerprint.rpartition("/")[2])


def waits(key: str) -> bool:
    """Whether it is worth a few seconds to see who else is hit; a broken GPU is not."""
    return bool(key) and not key.startswith(_OWN)


def is_own(item: Implicated, fault_class: str) -> bool:
    """Whether the node itself has named a part of it that is broken."""
    named = item.gpu is not None or bool(item.pci) or bool(item.uuid)
    return fault_class.startswith(_OWN) and named and item.source not in _NO_EVIDENCE


def names_a_part(cause: Cause) -> bool:
    """Whether a node says of one of its own parts that it is broken."""
    return any(is_own(item, cause.fault_class) for item in cause.implicated)


def hits_of(record: FaultRecord, now: float) -> Iterable[tuple[str, Hit]]:
    """Yield the hits that a node's record is, each with its key; ``now`` in seconds."""
    for finding in record.findings:
        if SEVERITIES.index(finding.severity) < _FAULT or finding.code.startswith("log."):
            continue
        fault_class = class_of(finding)
        named = finding.gpu is not None or bool(finding.pci) or bool(finding.uuid)
        own = fault_class.startswith(_OWN) and named
        key, nodes = key_of(fault_class, finding.code), (record.node,)
        if key:
            time = min(seconds_of(record.time), now)
            yield key, Hit(f"node {record.node}", time, nodes, nodes if own else ())


def hit(subject: str, time: float, cause: Cause, uid: int | None) -> Hit:
    """Return the hit that an incident with this cause is; ``time`` in seconds since the epoch."""
    shown = [item for item in cause.implicated if item.source not in _NO_EVIDENCE]
    nodes = tuple(dict.fromkeys(item.node for item in shown))
    own = tuple(
        node
        for node in nodes
        if any(item.node == node and is_own(item, cause.fault_class) for item in shown)
    )
    return Hit(subject, time, nodes, own, uid, by_text=not nodes)


def extent(hits: Collection[Hit], fleet: int, limits: Fleet) -> Extent | None:
    """Return the extent of what has hit so many, None where it is not an event.

    ``hits`` lie within one window; the fleet has ``fleet`` nodes. What one user's jobs alone say,
    in their logs, counts once however many they are: nobody can hold the others' jobs so.
    """
    jobs = [one for one in hits if one.is_job]
    said = {one.uid for one in jobs if one.by_text}
    counted = sum(not one.by_text for one in jobs) + len(said)
    needed = max(limits.nodes, math.ceil(limits.share * fleet))
    found = extent_of(hits)
    return found if found.nodes >= needed or counted >= limits.jobs else None


def measured(size: Extent, limits: Fleet) -> str:
    """Return in a sentence how many were hit, and how many it takes."""
    return (
        f"within {limits.window:g} s: {size}; {limits.nodes} nodes"
        f" ({limits.share:.1%} of the fleet), or {limits.jobs} jobs, make one event"
    )


def extent_of(hits: Collection[Hit]) -> Extent:
    """Return how many nodes show it, and how many jobs have failed of it."""
    nodes = {node for one in hits for node in one.nodes}
    return Extent(len(nodes), sum(one.is_job for one in hits))


def avoided(hits: Iterable[Hit]) -> tuple[str, ...]:
    """Return the nodes that show it and that nobody drains."""
    found = {node for one in hits for node in one.nodes if node not in one.own}
    return tuple(sorted(found))[:MEMBERS_LIMIT]


def decision(
    key: str, hits: Sequence[Hit], size: Extent, rule: ClassRule, limits: Fleet, now: float,
    mode: str,
) -> Decision:  # fmt: skip
    """Return the one decision on an event; ``rule`` is its class's row, ``now`` in seconds."""
    first = min(one.time for one in hits)
    digest = hashlib.sha256(f"{INCIDENT}{key}/{first}".encode()).digest()
    summary = f"{key} on {size} since {utc(first)[11:19]}Z: one cause, not so many"
    shown = any(not one.by_text for one in hits)
    return Decision(
        id=new_id(now, digest[:10]),
        time=utc(now),
        incident=f"{INCIDENT}{key}",
        attempt=None,
        cause=Cause(
            key.partition("/")[0],
            "established" if shown else "probable",
            summary,
            fingerprint=key,
        ),
        job=JobAnswer(rule.fleet, f"{_FOR_JOBS[rule.fleet]}; of jobs that have opted in"),
        nodes=(),
        rule=f"fleet: {key}: job {rule.fleet}, node watch",
        mode=mode,
        limits=(measured(size, limits),),
        considered=(
            "a drain of each node: what so many show at once is no node's own fault, so they are"
            " watched until a person has looked; a node that names a broken part is drained",
        ),
        would_change=("fewer of them, or longer apart, would have been decided one by one",),
        members=tuple(one.member for one in hits[:MEMBERS_LIMIT]),
    )


_FOR_JOBS = {
    "hold": "each is held until somebody has mended it: a restart would run into the same",
    "requeue": "each is run again, off the nodes that show it",
    "leave": "each stays as it is",
}


def member_of(followed: Decision) -> Member:
    """Return the member of its event that a decision on one job, or on one node, is about."""
    shown = [one.node for one in followed.cause.implicated if one.source not in _NO_EVIDENCE]
    nodes = tuple(dict.fromkeys(shown))
    subject, verdict = followed.incident.replace("/", " "), ""
    if followed.attempt is not None:
        subject, verdict = f"job {followed.attempt.job_id}", followed.job.verdict
    return Member(subject, followed.time, nodes, followed.id, verdict)


def membership(event: Decision) -> Membership:
    """Return what a member of an event that is over must know of it."""
    nodes = {node for one in event.members for node in one.nodes}
    jobs = sum(one.subject.startswith("job ") for one in event.members)
    return Membership(event.id, str(Extent(len(nodes), jobs)))


def to_do(event: Decision) -> str:
    """Return in a sentence what a person must do about an event."""
    what = f"find what they share: {event.cause.summary}"
    if event.job.verdict != "hold":
        return what
    return f"{what}; once it is mended, recovery explain {event.id} names the jobs to release"


def _within(fault_class: str, above: str) -> bool:
    return fault_class == above or fault_class.startswith(f"{above}.")
