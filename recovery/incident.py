"""Incidents: all evidence about one failed attempt, or about one sick node.

Pure: ``of_attempt`` and ``of_node`` join records to what they speak of, by node and by time, never
by job id alone: a health check may have read the kernel line that the epilog looked for. What the
evidence amounts to is ``cause``'s to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from recovery.decision import Attempt, Cause
from recovery.slurm.base import Job, Node
from recovery.stalls import Hang, Slowdown
from slurm_hooks import catalog, optin
from slurm_hooks.optin import OptIn
from slurm_hooks.record import SEVERITIES, FaultRecord, Finding, seconds_of

BEFORE_END_SECONDS = 600.0
AFTER_END_SECONDS = 300.0
"""The window around an attempt's end in which a fault may be its cause (operators' practice)."""

FAILED_STATES = frozenset(
    ("FAILED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL", "LAUNCH_FAILED", "DEADLINE")
)
OTHER_ENDS = frozenset(("COMPLETED", "CANCELLED", "PREEMPTED", "REVOKED"))
"""Base states in which an attempt is over (man squeue, JOB STATE CODES)."""


_NODE_CLASSES = ("hardware", "node.software", "network.fabric")
"""Classes that open an incident on a node by themselves; others need a job that failed of them."""


@dataclass(frozen=True)
class Sighting:
    """One finding, and the record that reports it. ``fault_class`` is the catalogue's.

    ``boot_id`` is the node's when it was seen.
    """

    node: str
    record: str
    hook: str
    time: str
    finding: Finding
    fault_class: str
    boot_id: str = ""


@dataclass(frozen=True)
class LogVerdict:
    """What the job's own log says (``log-verdict/v1``), and which record brought it."""

    record: str
    node: str
    time: str
    fault_class: str
    confidence: str
    text: str
    implicated: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Incident:
    """Evidence joined to an attempt, or to a node where ``attempt`` is None.

    ``job`` is the attempt as the scheduler showed it at its end. ``reported`` names the nodes
    whose epilog has spoken, ``silent`` the others. ``lost`` are nodes that Slurm itself calls down
    or not responding. ``gated`` are nodes that kept the attempt from starting.
    ``gpus`` is how many of them the attempt held on the nodes that spoke.
    ``known_cause`` is set where the incident is made of a cause and not of records.
    ``requeued``: Slurm has put the job back into the queue by itself, and ``job`` shows it there.
    ``hang``: its progress has stopped, now or before its time limit; ``slowdown``: it runs slowly.
    """

    key: str
    time: str
    nodes: tuple[str, ...]
    attempt: Attempt | None = None
    job: Job | None = None
    wishes: OptIn = field(default_factory=OptIn)
    sightings: tuple[Sighting, ...] = ()
    log: LogVerdict | None = None
    reported: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    gated: tuple[str, ...] = ()
    requeued: bool = False
    checkpoint_step: int | None = None
    checkpoints_broken: bool = False
    progress_step: int | None = None
    partitions: tuple[str, ...] = ()
    gpus: int = 0
    known_cause: Cause | None = None
    hang: Hang | None = None
    slowdown: Slowdown | None = None

    @property
    def running(self) -> bool:
        """Whether the attempt has not ended: it hangs, or is slow."""
        return self.job is not None and self.job.state == "RUNNING" and not self.requeued

    @property
    def silent(self) -> tuple[str, ...]:
        """The attempt's nodes that have not reported."""
        return tuple(node for node in self.nodes if node not in self.reported)


def of_attempt(
    attempt: Attempt,
    job: Job,
    nodes: Sequence[str],
    records: Iterable[FaultRecord],
    ended: float,
    states: Iterable[Node],
    now: str,
    hang: Hang | None = None,
    slowdown: Slowdown | None = None,
    reused: Mapping[str, float] = MappingProxyType({}),
) -> Incident:
    """Join ``records`` of the attempt's ``nodes`` around ``ended`` (seconds since the epoch).

    What another hook saw before the attempt began is not its story: the node may have been mended
    since, and what still stands its own prolog and epilog report. Where Slurm does not show its
    begin any more, others' epilogs tell until when its GPUs were theirs. A finding about a GPU that
    another job of a shared node holds is left out; so is what a health check saw on a node once
    others had begun there, which may be theirs: ``reused`` tells when, and where it does not, what
    their hooks have said since the end tells that they did. Where progress stopped earlier than the
    attempt ended, or has not ended it yet, the story begins there.
    """
    started = float(job.start_time) if job.restarts == attempt.restart else 0.0
    stopped = hang.stall.since if hang else slowdown.since if slowdown else ended
    since = max(min(stopped, ended) - BEFORE_END_SECONDS, started)
    of_nodes = [record for record in records if record.node in nodes]
    ours, others = list[FaultRecord](), list[FaultRecord]()
    for record in of_nodes:
        (ours if _is_ours(record, attempt, job) else others).append(record)
    epilogs = [record for record in ours if record.hook == "epilog"]
    held = {r.node: frozenset(r.job.gpus) for r in ours if r.job and r.job.gpus}
    begun = _when_others_let_go(epilogs, others) if job.restarts > attempt.restart else {}
    heard = {record.node for record in others if _came_after(record, attempt, job, ended)}
    near = list(ours)
    for record in others:
        seen = seconds_of(record.time)
        until = ended + (0.0 if record.node in heard else AFTER_END_SECONDS)
        until = min(reused.get(record.node, until), ended + AFTER_END_SECONDS)
        if begun.get(record.node, 0.0) < seen and since <= seen <= until:
            near.append(record)
    sightings = [
        sighting
        for record in sorted(near, key=lambda record: record.time)
        for sighting in _sightings(record)
        if _concerns(sighting.finding, held.get(record.node), attempt.job_id)
    ]
    steps = {
        code: _highest(sightings, code, attempt.job_id)
        for code in ("checkpoint.seen", "progress.seen")
    }
    return Incident(
        key=f"attempt/{attempt.key}",
        time=now,
        nodes=tuple(nodes),
        attempt=attempt,
        job=job,
        wishes=optin.parse(job.comment),
        sightings=tuple(_without_repeats(sightings)),
        log=_log_verdict(sightings),
        reported=tuple(sorted({record.node for record in epilogs})),
        lost=tuple(
            node.name
            for node in states
            if node.name in nodes and (node.state == "DOWN" or "NOT_RESPONDING" in node.flags)
        ),
        gated=tuple(sorted({record.node for record in ours if closed_gate(record)})),
        requeued=job.restarts > attempt.restart,
        checkpoint_step=steps["checkpoint.seen"],
        checkpoints_broken=any(s.finding.code == "checkpoint.all_broken" for s in sightings),
        progress_step=max((step for step in steps.values() if step is not None), default=None),
        gpus=sum(map(len, held.values())),
        hang=hang,
        slowdown=slowdown,
    )


def of_node(record: FaultRecord, partitions: Sequence[str], now: str) -> Incident:
    """Return the incident of a node whose record shows a fault outside any ended attempt."""
    return Incident(
        key=f"node/{record.node}",
        time=now,
        nodes=(record.node,),
        sightings=tuple(_sightings(record)),
        reported=(record.node,),
        partitions=tuple(partitions),
    )


def closed_gate(record: FaultRecord) -> bool:
    """Whether a prolog reports that its node has drained itself and sent the job back."""
    closed = any(finding.code == "hook.gate_closed" for finding in record.findings)
    return closed and record.hook == "prolog"


def class_of(finding: Finding) -> str:
    """Return the catalogue's class of a finding; a site probe's own code has none (``none``)."""
    known = catalog.entries().get(finding.code)
    return known.fault_class if known else "none"


def wants_an_owner(record: FaultRecord, ended: float) -> bool:
    """Whether a record shows what may be the fault of whoever has begun on the node since."""
    told = any(finding.severity != "info" for finding in record.findings)
    return record.job is None and told and seconds_of(record.time) > ended


def opens_incident(finding: Finding) -> bool:
    """Whether a finding opens an incident on its node by itself, with no job that failed of it."""
    if SEVERITIES.index(finding.severity) < SEVERITIES.index("fault"):
        return False
    known = catalog.entries().get(finding.code)
    return known is not None and known.fault_class.startswith(_NODE_CLASSES)


def resolution_of(finding: Finding) -> str:
    """Return what mends a finding: its own word, else the catalogue's, else an empty text."""
    known = catalog.entries().get(finding.code)
    return finding.resolution or (known.resolution if known else "")


def _when_others_let_go(
    epilogs: Iterable[FaultRecord], records: Iterable[FaultRecord]
) -> dict[str, float]:
    """When the last epilog before an attempt's own ended, by node, that had one of its GPUs."""
    own = {record.node: (record.time, record.job) for record in epilogs if record.job}
    found = dict[str, float]()
    for record in records:
        if record.hook != "epilog" or record.job is None or record.node not in own:
            continue
        time, job = own[record.node]
        if record.time < time and set(job.gpus).intersection(record.job.gpus):
            found[record.node] = max(found.get(record.node, 0.0), seconds_of(record.time))
    return found


def _came_after(record: FaultRecord, attempt: Attempt, shown: Job, ended: float) -> bool:
    """Whether a record of others is by a hook that ran for another attempt after this one's end.

    Each part of a heterogeneous job has its own number, and its records are its leader's story.
    """
    job = record.job
    if job is None or seconds_of(record.time) <= ended:
        return False
    return job.id not in shown.het_parts or job.restart != attempt.restart


def _is_ours(record: FaultRecord, attempt: Attempt, shown: Job) -> bool:
    """Whether a hook ran for this attempt, and not for an earlier job under its number."""
    job = record.job
    if job is None or job.id != attempt.job_id or job.restart != attempt.restart:
        return False
    if job.uid is not None and job.uid != shown.uid:
        return False
    # A requeue renews the submit time: only the attempt's own tells what came before it.
    if shown.restarts == attempt.restart and seconds_of(record.time) < attempt.submit_time:
        return False
    return not (job.sluid and attempt.sluid and job.sluid != attempt.sluid)


def _sightings(record: FaultRecord) -> list[Sighting]:
    return [
        Sighting(
            record.node,
            record.id,
            record.hook,
            record.time,
            finding,
            class_of(finding),
            record.boot_id,
        )
        for finding in record.findings
    ]


def _concerns(finding: Finding, held: frozenset[int] | None, job_id: int) -> bool:
    """Whether a finding of one of its nodes can be this job's affair."""
    if finding.job_id is not None:
        return finding.job_id == job_id
    return finding.gpu is None or held is None or finding.gpu in held


def _highest(sightings: Iterable[Sighting], code: str, job_id: int) -> int | None:
    steps = [
        s.finding.step
        for s in sightings
        if s.finding.code == code and s.finding.job_id == job_id and s.finding.step is not None
    ]
    return max(steps, default=None)


def _without_repeats(sightings: Iterable[Sighting]) -> Iterable[Sighting]:
    """Two hooks that saw one kernel line, or one standing fact, make one sighting."""
    known = set[tuple[object, ...]]()
    for sighting in sorted(sightings, key=lambda s: (s.time, s.record)):
        finding = sighting.finding
        keys = tuple(evidence.key for evidence in finding.evidence if evidence.key)
        mark = (sighting.node, finding.code, finding.gpu, finding.pci, finding.link, keys)
        if mark not in known:
            known.add(mark)
            yield sighting


def _log_verdict(sightings: Iterable[Sighting]) -> LogVerdict | None:
    """The verdict on the job's log that came last; a later epilog may have read more of it."""
    found: LogVerdict | None = None
    for sighting in sightings:
        document = _log_document(sighting.finding)
        if document is None:
            continue
        text = next((e.text for e in sighting.finding.evidence if e.source == "job_log"), "")
        found = LogVerdict(
            sighting.record,
            sighting.node,
            sighting.time,
            str(document["class"]),
            str(document["confidence"]),
            text,
            tuple(item for item in document.get("implicated", ()) if isinstance(item, dict)),
        )
    return found


def _log_document(finding: Finding) -> dict[str, Any] | None:
    if not finding.code.startswith("log."):
        return None
    for evidence in finding.evidence:
        if evidence.source == "log_verdict":
            try:
                document = json.loads(evidence.text)
            except ValueError:
                return None
            whole = isinstance(document, dict) and {"class", "confidence"} <= document.keys()
            return document if whole else None
    return None
