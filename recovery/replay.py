"""What another policy would have decided on recorded history: a diff, with reasons.

    changes(read(spool), policy_now, policy_then)

Owns how an incident is put together again from a spool's readable decisions and archived records.
What the scheduler alone knew (whether a job could be requeued, which nodes it asked for) is in
neither, and is taken as a decision shows it; so two policies are both replayed and the replays
compared, and what does not replay as it was recorded is counted. No clock and no scheduler is
asked: the same spool and policies give the same answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recovery import cause as causes
from recovery import policy as policies
from recovery.budgets import History
from recovery.decision import Decision
from recovery.fleet import Membership
from recovery.incident import Incident, closed_gate, of_attempt, of_node
from recovery.slurm.base import Job, Node
from slurm_hooks.config import Policy
from slurm_hooks.record import FaultRecord, seconds_of, utc

LINE_LIMIT_BYTES = 16 * 1024 * 1024

_HOUR_SECONDS = 3600.0
_DAY_SECONDS = 86_400.0


@dataclass(frozen=True)
class Recorded:
    """What a spool holds: decisions in the order they were made, records of their nodes by time.

    ``unread`` counts lines that are neither.
    """

    decisions: tuple[Decision, ...]
    records: dict[str, list[FaultRecord]]
    unread: int = 0


@dataclass(frozen=True)
class Change:
    """A decision that would have been another one; verdicts as ``requeue, drain n3``."""

    decision: str
    time: str
    subject: str
    fault_class: str
    before: str
    after: str
    why_before: str
    why_after: str


@dataclass(frozen=True)
class Replayed:
    """A replay's result; ``differently`` counts what does not replay as it was recorded."""

    decisions: int
    changes: tuple[Change, ...]
    differently: int
    not_replayed: int


@dataclass
class _Run:
    """What one policy has decided so far."""

    policy: Policy
    made: list[Decision] = field(default_factory=list)


def read(spool: Path) -> Recorded:
    """Return what the spool holds.

    Raises:
        OSError: it cannot be read.
    """
    known: dict[str, Decision] = {}
    unread = 0
    for document in _lines(sorted((spool / "decisions").glob("*.jsonl"))):
        try:
            decision = Decision.from_dict(document)
            known[decision.id] = decision
        except (KeyError, TypeError, AttributeError, ValueError):
            unread += 1
    ordered = sorted(known.values(), key=lambda d: (d.time, d.id))
    wanted = {node for one in ordered for node in (*one.job_nodes, *_implicated(one))}
    records: dict[str, list[FaultRecord]] = {node: [] for node in sorted(wanted)}
    for document in _lines(sorted((spool / "archive").glob("*/*.jsonl"))):
        try:
            record = FaultRecord.from_dict(document["record"])
        except (KeyError, TypeError, AttributeError, ValueError):
            unread += 1
            continue
        if record.node in records:
            records[record.node].append(record)
    for found in records.values():
        found.sort(key=lambda record: (record.time, record.id))
    return Recorded(tuple(ordered), records, unread)


def compare(recorded: Recorded, now: Policy, then: Policy) -> Replayed:
    """Return which decisions policy ``then`` would have made otherwise than policy ``now``."""
    before, after = _Run(now), _Run(then)
    changes: list[Change] = []
    differently = not_replayed = 0
    for decision in recorded.decisions:
        incident = _incident(decision, recorded)
        if incident is None:
            not_replayed += 1
            continue
        one, other = (_decide(run, incident, decision) for run in (before, after))
        differently += _verdicts(one) != _verdicts(decision)
        if _verdicts(one) != _verdicts(other):
            changes.append(_change(decision, one, other))
    return Replayed(len(recorded.decisions), tuple(changes), differently, not_replayed)


def _lines(paths: Iterable[Path]) -> Iterator[Any]:
    for path in paths:
        if not path.is_file() or path.is_symlink():
            continue
        with path.open("rb") as source:
            while line := source.readline(LINE_LIMIT_BYTES):
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError):
                    yield None


def _incident(decision: Decision, recorded: Recorded) -> Incident | None:
    """The incident as its evidence lies in the archive; None where that is not there."""
    attempt = decision.attempt
    if attempt is None:
        named = {excerpt.record for excerpt in decision.evidence}
        for node in _implicated(decision):
            for record in recorded.records[node]:
                if record.id in named:
                    return of_node(record, decision.partition.split(","), decision.time)
        return None
    records = [
        record
        for node in decision.job_nodes
        for record in recorded.records[node]
        if record.time <= decision.time
    ]
    ours = [
        r
        for r in records
        if r.job and (r.job.id, r.job.restart) == (attempt.job_id, attempt.restart)
    ]
    if not ours and not decision.requeued:
        return None
    ended = seconds_of(decision.ended_time or decision.time)
    lost = {one.node for one in decision.cause.implicated if one.source == "slurm"}
    states = [Node(node, "DOWN" if node in lost else "IDLE") for node in decision.job_nodes]
    job = _job(decision, ours)
    incident = of_attempt(attempt, job, decision.job_nodes, records, ended, states, decision.time)
    gated = decision.gated or tuple(sorted({r.node for r in ours if closed_gate(r)}))
    return replace(incident, gated=gated)


def _job(decision: Decision, ours: Sequence[FaultRecord]) -> Job:
    attempt = decision.attempt
    assert attempt is not None
    comments = [record.job.comment for record in ours if record.job and record.job.comment]
    said = re.match(r"([A-Z_]+) (\d+):(\d+)", decision.ended)
    state, code, signal = (said[1], int(said[2]), int(said[3])) if said else ("FAILED", 1, 0)
    return Job(
        id=attempt.job_id,
        name=decision.job_name,
        user=decision.owner,
        uid=decision.uid or 0,
        account=decision.account,
        partition=decision.partition,
        qos=decision.qos,
        state=state,
        nodes=decision.job_nodes,
        restarts=attempt.restart + decision.requeued,
        batch="is no batch job" not in decision.job.reason,
        requeue="--no-requeue" not in decision.job.reason,
        submit_time=attempt.submit_time,
        end_time=int(seconds_of(decision.ended_time)) if decision.ended_time else 0,
        exit_code=code,
        signal=signal,
        sluid=attempt.sluid,
        comment=comments[-1] if comments else "",
    )


def _decide(run: _Run, incident: Incident, recorded: Decision) -> Decision:
    now = seconds_of(recorded.time)
    history = _history(run, incident, now)
    if recorded.fleet:
        history = replace(history, fleet=Membership(recorded.fleet, "many others"))
    made = policies.decide(incident, history, run.policy, now, recorded.mode)
    run.made.append(made)
    return made


def _history(run: _Run, incident: Incident, now: float) -> History:
    """What this policy itself had decided before."""
    attempt, job = incident.attempt, incident.job
    earlier = tuple(
        one
        for one in run.made
        if attempt is not None
        and one.attempt is not None
        and (one.attempt.cluster, one.attempt.job_id) == (attempt.cluster, attempt.job_id)
        and job is not None
        and one.uid == job.uid
        and policies.same_attempt(one, attempt)
    )
    cause = causes.of(incident)
    today = [one for one in run.made if one.time >= utc(now - _DAY_SECONDS)]
    named = {
        item.node: sum(
            one.cause.fault_class == cause.fault_class and item.node in _implicated(one)
            for one in today
        )
        for item in cause.implicated
    }
    hour = [
        one
        for one in today
        if one.time >= utc(now - _HOUR_SECONDS) and one.job.verdict == "requeue"
    ]
    uid = job.uid if job else None
    return History(earlier, named, sum(one.uid == uid for one in hour), len(hour))


def _implicated(decision: Decision) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item.node for item in decision.cause.implicated))


def _verdicts(decision: Decision) -> str:
    job = [decision.job.verdict] if decision.attempt else []
    without = f" without {', '.join(decision.job.excluded)}" if decision.job.excluded else ""
    answers = [f"{one.verdict} {one.node}" for one in decision.nodes]
    return ", ".join([*(f"{one}{without}" for one in job), *answers]) or "leave"


def _change(recorded: Decision, one: Decision, other: Decision) -> Change:
    attempt = recorded.attempt
    return Change(
        recorded.id,
        recorded.time,
        f"job {attempt.job_id}, restart {attempt.restart}" if attempt else recorded.incident,
        one.cause.fault_class,
        _verdicts(one),
        _verdicts(other),
        _why(one),
        _why(other),
    )


def _why(decision: Decision) -> str:
    reasons = [decision.job.reason] if decision.attempt else []
    reasons += [f"{one.node}: {one.reason}" for one in decision.nodes]
    return f"{'; '.join(reasons)} (rule {decision.rule})"
