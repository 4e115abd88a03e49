"""Builders of incidents and of their history: what four nodes saw of one failed job of ann's.

failed(n3=[finding("gpu.lost", gpu=3)])                  n3's epilog saw it, the others nothing
failed(n1=[log("program.exception", "ValueError: x")], of=job(restarts=1), silent=["n4"])
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from recovery.budgets import History
from recovery.decision import Attempt, Cause, Decision, Implicated
from recovery.incident import Incident, of_attempt, of_node
from recovery.policy import decide, same_attempt
from recovery.slurm.base import Job, Node
from recovery.stalls import Hang, Slowdown
from slurm_hooks import catalog
from slurm_hooks.config import Policy
from slurm_hooks.record import Evidence, FaultRecord, Finding, RecordJob, utc

NODES = ("n1", "n2", "n3", "n4")
ENDED = 1796189600.0
NOW = ENDED + 6
POLICY = Policy()


class _Details(dict[str, Any]):
    """What a summary wants to know and no test cares about."""

    def __missing__(self, key: str) -> str:
        return f"<{key}>"


def job(**changes: Any) -> Job:
    """A batch job that its owner opted in, as it lies after its failure."""
    made = Job(
        id=12,
        name="train",
        user="ann",
        uid=1001,
        account="physics",
        partition="train",
        qos="normal",
        state="FAILED",
        nodes=NODES,
        batch_host="n1",
        submit_time=int(ENDED) - 600,
        start_time=int(ENDED) - 500,
        end_time=int(ENDED),
        exit_code=1,
        comment="recovery=requeue",
    )
    return replace(made, **changes)


def finding(code: str, *evidence: str, **about: Any) -> Finding:
    """A finding as its probe makes it; ``evidence`` are lines of the kernel's log."""
    known = catalog.entry(code)
    severity = about.pop("severity", known.severity)
    lines = tuple(Evidence("kernel_log", text) for text in evidence)
    summary = known.summary.format_map(_Details(about))
    return Finding(code, severity, summary, evidence=lines or (Evidence("nvml", code),), **about)


def log(
    fault_class: str,
    text: str = "",
    confidence: str = "established",
    implicated: Sequence[dict[str, Any]] = (),
) -> Finding:
    """What the job-log probe makes of a log of that class."""
    document = {
        "schema": "log-verdict/v1",
        "class": fault_class,
        "confidence": confidence,
        "implicated": list(implicated),
    }
    verdict = Evidence("log_verdict", json.dumps(document))
    lines = (Evidence("job_log", text),) if text else ()
    code = f"log.{fault_class.replace('.', '_')}"
    severity = catalog.entry(code).severity
    return Finding(code, severity, fault_class, job_id=12, evidence=(*lines, verdict))


def progress(step: int) -> Finding:
    """Where the job's work stood."""
    return finding("progress.seen", job_id=12, step=step)


def checkpoint(step: int) -> Finding:
    """The newest whole checkpoint."""
    return finding("checkpoint.seen", job_id=12, step=step)


def epilog(node: str, findings: Iterable[Finding] = (), of: Job | None = None) -> FaultRecord:
    """What a node's epilog reports a second after the job's end."""
    of = of or job()
    told = RecordJob(of.id, of.restarts, user=of.user, uid=of.uid, nodes="n[1-4]", exit="1:0")
    return _record(node, "epilog", ENDED + 1, findings, told)


def health_check(node: str, findings: Iterable[Finding], after_end: float = -60) -> FaultRecord:
    """What a node's health check reports, knowing nothing of jobs."""
    return _record(node, "health_check", ENDED + after_end, findings, None)


def _record(
    node: str, hook: str, time: float, findings: Iterable[Finding], told: RecordJob | None
) -> FaultRecord:
    name = f"{hook}-{node}-{time:.0f}"
    return FaultRecord(name, "c1", node, "boot", utc(time), hook, told, tuple(findings))


def node(name: str, **changes: Any) -> Node:
    """A node as Slurm shows it."""
    return replace(Node(name, "IDLE", partitions=("train",)), **changes)


def failed(
    of: Job | None = None,
    silent: Collection[str] = (),
    lost: Collection[str] = (),
    extra: Iterable[FaultRecord] = (),
    **seen: Sequence[Finding],
) -> Incident:
    """The incident of a failed job: each node's epilog says what ``seen`` has for it.

    ``silent`` nodes say nothing, ``lost`` ones are down as Slurm sees it; ``extra`` are records
    besides the epilogs'.
    """
    of = of or job()
    records = [epilog(n, seen.get(n, ()), of) for n in of.nodes if n not in silent]
    states = [node(n, state="DOWN" if n in lost else "IDLE") for n in of.nodes]
    attempt = Attempt("c1", of.id, of.restarts, of.submit_time, of.sluid)
    return of_attempt(attempt, of, of.nodes, [*records, *extra], ENDED, states, utc(NOW - 1))


def running(
    of: Job | None = None,
    hang: Hang | None = None,
    slowdown: Slowdown | None = None,
    **seen: Sequence[Finding],
) -> Incident:
    """The incident of a job that runs, and hangs or is slow: health checks say ``seen``."""
    of = of or job(state="RUNNING", end_time=int(ENDED) + 3600, exit_code=0)
    records = [health_check(n, seen[n], after_end=-10) for n in of.nodes if n in seen]
    attempt = Attempt("c1", of.id, of.restarts, of.submit_time, of.sluid)
    states = [node(n, state="ALLOCATED") for n in of.nodes]
    return of_attempt(
        *(attempt, of, of.nodes, records, ENDED, states, utc(NOW - 1)), hang=hang, slowdown=slowdown
    )


def sick(name: str, *findings: Finding) -> Incident:
    """The incident of an idle node whose health check found something."""
    return of_node(health_check(name, findings), ["train"], utc(NOW - 1))


def offender(name: str = "n3") -> Incident:
    """The incident of a node that fails more often than chance lets it, and shows nothing now."""
    why = "a repeat offender: 5 faults of its own"
    accused = Implicated(name, why, "history", "node.repeat_offender")
    cause = Cause("node.repeat_offender", "established", f"{name} is {why}", (accused,))
    return Incident(f"node/{name}", utc(NOW - 1), (name,), partitions=("train",), known_cause=cause)


def decided(
    incident: Incident, policy: Policy = POLICY, mode: str = "act", **history: Any
) -> Decision:
    """What the policy says of an incident after that history."""
    return decide(incident, History(**history), policy, NOW, mode)


def attempts(*incidents: Incident) -> tuple[Decision, ...]:
    """The decisions on a job's attempts, one after the other, each knowing those before it."""
    made: tuple[Decision, ...] = ()
    for number, one in enumerate(incidents):
        assert one.job is not None and one.attempt is not None
        assert one.job.restarts == number, "attempts are numbered from 0 on"
        earlier = tuple(former for former in made if same_attempt(former, one.attempt))
        made = (*made, decided(one, earlier=earlier))
    return made
