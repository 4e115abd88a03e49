"""What another policy would have decided on recorded history: a diff, with reasons.

    compare(read(spool), configuration_now, configuration_then)

Owns how an incident is put together again from a spool's readable decisions and archived records.
What the scheduler alone knew (whether a job could be requeued, which nodes it asked for) is in
neither, and is taken as a decision shows it; so two policies are both replayed and the replays
compared, and what does not replay as it was recorded is counted. No clock and no scheduler is
asked: the same spool and policies give the same answer. Who was hit at once is ``fleet_replay``'s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recovery import cause as causes
from recovery import fleet, fleet_replay
from recovery import policy as policies
from recovery.budgets import History
from recovery.decision import Decision
from recovery.fleet_replay import Case, Event, Events
from recovery.incident import Incident, closed_gate, of_attempt, of_node, opens_incident
from recovery.slurm.base import Job, Node
from recovery.slurm.hostlist import compress
from slurm_hooks.config import Config, Fleet, Policy
from slurm_hooks.record import FaultRecord, seconds_of, utc

LINE_LIMIT_BYTES = 16 * 1024 * 1024

_HOUR_SECONDS = 3600.0
_DAY_SECONDS = 86_400.0


@dataclass(frozen=True)
class Recorded:
    """What a spool holds: decisions in the order they were made, records of their nodes by time.

    ``shown`` are the records of all nodes by which one may be part of a fleet event, each with when
    it was received (seconds since the epoch); ``nodes`` counts the nodes that were ever heard of.
    ``unread`` counts lines that are neither decision nor record.
    """

    decisions: tuple[Decision, ...]
    records: dict[str, list[FaultRecord]]
    shown: tuple[tuple[float, FaultRecord], ...] = ()
    nodes: int = 1
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
    """What one configuration has decided so far, and the fleet events that it sees."""

    policy: Policy
    limits: Fleet
    fleets: Events
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
    shown: list[tuple[float, FaultRecord]] = []
    heard = {path.stem for path in (spool / "heartbeat").glob("*.json")} | wanted
    for document in _lines(sorted((spool / "archive").glob("*/*.jsonl"))):
        try:
            record = FaultRecord.from_dict(document["record"])
            received = seconds_of(document.get("received") or record.time)
        except (KeyError, TypeError, AttributeError, ValueError):
            unread += 1
            continue
        heard.add(record.node)
        if record.node in records:
            records[record.node].append(record)
        if any(True for _ in fleet.hits_of(record, received)):
            shown.append((received, record))
    for found in records.values():
        found.sort(key=lambda record: (record.time, record.id))
    shown.sort(key=lambda one: (one[0], one[1].id))
    return Recorded(tuple(ordered), records, tuple(shown), max(1, len(heard)), unread)


def compare(recorded: Recorded, now: Config, then: Config) -> Replayed:
    """Return which decisions configuration ``then`` would have made otherwise than ``now``."""
    told = [one for one in recorded.decisions if one.incident.startswith(fleet.INCIDENT)]
    alone = [one for one in recorded.decisions if one not in told]
    incidents = {one.id: _incident(one, recorded) for one in alone}
    cases = [
        _case(one, case, recorded, now) for one in alone if (case := incidents[one.id]) is not None
    ]
    before = _run(cases, recorded, told, now)
    after = _run(cases, recorded, [one.decision for one in before.fleets.events] or told, then)
    changes: list[Change] = []
    differently = not_replayed = 0
    for decision in alone:
        incident = incidents[decision.id]
        if incident is None:
            not_replayed += 1
            continue
        one, other = (_decide(run, incident, decision) for run in (before, after))
        differently += _verdicts(one) != _verdicts(decision)
        if _verdicts(one) != _verdicts(other):
            changes.append(_change(decision, one, other))
    seen = {one.decision.id for one in before.fleets.events}
    showing = {record.node for _, record in recorded.shown}
    for event in told:
        nodes = {node for member in event.members for node in member.nodes}
        kept = nodes & showing or any(incidents.get(one.decision) for one in event.members)
        not_replayed += not kept
        differently += bool(kept) and event.id not in seen
    differently += len(seen - {one.id for one in told})
    changes += _event_changes(before, after, alone)
    changes.sort(key=lambda one: (one.time, one.decision))
    return Replayed(len(recorded.decisions), tuple(changes), differently, not_replayed)


def _run(
    cases: Sequence[Case], recorded: Recorded, told: Sequence[Decision], config: Config
) -> _Run:
    mode = told[0].mode if told else config.mode
    found = fleet_replay.events(cases, recorded.shown, told, recorded.nodes, config, mode)
    return _Run(config.policy, config.fleet, found)


def _case(decision: Decision, incident: Incident, recorded: Recorded, now: Config) -> Case:
    """When an incident was first seen: it waits for others, ``gather`` seconds at most."""
    cause, decided = causes.of(incident), seconds_of(decision.time)
    seen = decided
    if fleet.waits(fleet.of_cause(cause)):
        about = decision.attempt
        told = [
            seconds_of(record.time)
            for node in decision.job_nodes
            for record in recorded.records[node]
            if about and record.job and record.time <= decision.time
            if (record.job.id, record.job.restart) == (about.job_id, about.restart)
        ]
        seen = max([decided - now.fleet.gather, *told])
    stands = decision.acted_on or bool(decision.revised_by)
    return Case(decision.id, incident, cause, seen, stands)


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
    history = replace(history, fleet=run.fleets.of.get(recorded.id))
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
            one.cause.fault_class == cause.fault_class
            and item.node in _implicated(one)
            and not one.fleet  # what hit many at once says nothing against this node
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


def _event_changes(before: _Run, after: _Run, alone: Sequence[Decision]) -> Iterable[Change]:
    """The events that are one under the first configuration only, or under the other."""
    known = {one.decision.id: one for one in before.fleets.events}
    other = {one.decision.id: one for one in after.fleets.events}
    for name in sorted({*known, *other}):
        one, then = known.get(name), other.get(name)
        event = one or then
        assert event is not None
        if one and then and one.decision.job.verdict == then.decision.job.verdict:
            continue
        by_themselves = _by_themselves(event, alone)
        yield Change(
            name,
            event.decision.time,
            f"fleet event of {event.key}",
            event.decision.cause.fault_class,
            _as_event(one, before, by_themselves),
            _as_event(then, after, by_themselves),
            fleet.measured(event.extent, before.limits),
            fleet.measured(event.extent, after.limits),
        )


def _as_event(event: Event | None, run: _Run, by_themselves: Sequence[FaultRecord]) -> str:
    """What there is in one configuration: the event, or else a decision for each of its nodes."""
    if event is not None:
        return f"one decision for {event.extent}, each job {event.decision.job.verdict}"
    nodes: dict[str, list[str]] = {}
    for record in by_themselves:
        case = of_node(record, (), record.time)
        made = policies.decide(case, History(), run.policy, seconds_of(record.time), "monitor")
        for answer in made.nodes:
            nodes.setdefault(answer.verdict, []).append(answer.node)
    answers = [f"{verdict} {compress(names)}" for verdict, names in sorted(nodes.items())]
    return "; ".join(["no event, each is decided on alone", *answers])


def _by_themselves(event: Event, alone: Sequence[Decision]) -> list[FaultRecord]:
    """The records of its nodes that only the event speaks of, and that call for a decision."""
    told = {
        node
        for one in alone
        if abs(seconds_of(one.time) - event.first) <= event.last - event.first + _HOUR_SECONDS
        for node in (*one.job_nodes, *_implicated(one))
    }
    return [
        record
        for _, record in sorted(event.shown.items())
        if record.node not in told and any(map(opens_incident, record.findings))
    ]


def _why(decision: Decision) -> str:
    reasons = [decision.job.reason] if decision.attempt else []
    reasons += [f"{one.node}: {one.reason}" for one in decision.nodes]
    return f"{'; '.join(reasons)} (rule {decision.rule})"
