"""One pass: ingest, observe, correlate, decide, act, verify; and the loop that repeats it.

Owns the order of things and what is asked of the scheduler when. What is pure lies in ``incident``,
``cause``, ``policy``, ``guard`` and ``outcome``; what is durable in ``journal``. Everything that a
crash may lose here is found again at the next start: attempts from the records of the last hours,
actions from the journal, the world from the scheduler.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from recovery import actions, guard, incident, outcome, policy
from recovery import cause as causes
from recovery.decision import FINAL_ACTIONS, Action, Attempt, Decision
from recovery.inbox_child import ChildInbox
from recovery.journal import Journal
from recovery.publish import Publisher
from recovery.slurm.base import Job, Node, Scheduler, SchedulerUnavailable
from recovery.slurm.hostlist import HostlistError, expand
from recovery.store import Store, open_store
from slurm_hooks import catalog
from slurm_hooks.config import Config
from slurm_hooks.record import SEVERITIES, FaultRecord, seconds_of, utc

log = logging.getLogger("recovery.aggregator")

LOOK_BACK_SECONDS = 6 * 3600.0
"""How far back a start looks for attempts that no decision was made on yet."""

OUTCOME_SECONDS = 2.0
"""How often a restarted job is looked at while its outcome is open and no record names it."""

_INGEST_SECONDS = 0.2
_DAY_SECONDS = 86400.0
_NODES_LIMIT = 10_000
"""Most nodes of one attempt that a record's hostlist is expanded to."""

_SINGLE_FAULT_CLASSES = ("hardware", "node.software", "network.fabric")
"""Classes that open an incident on a node by themselves; others need a job that failed of them."""


@dataclass
class _Watched:
    """An attempt that may have failed, and since when its nodes could have reported."""

    job_id: int
    restart: int
    uid: int | None
    nodes: tuple[str, ...]
    seen: str
    reported: set[str] = field(default_factory=set)
    left_completing: float | None = None
    first_look: float | None = None


@dataclass(frozen=True)
class Pass:
    """What one pass did, for the loop and for ``recovery once``."""

    accepted: int = 0
    rejected: int = 0
    decided: tuple[Decision, ...] = ()
    problems: tuple[str, ...] = ()
    busy: bool = False


class Aggregator:
    """Decides, and acts where it may. One at a time for a state folder (see ``cli``).

    ``clock`` returns seconds since the epoch.
    """

    def __init__(
        self, config: Config, scheduler: Scheduler, clock: Callable[[], float] = time.time
    ) -> None:
        self._config, self._scheduler, self._clock = config, scheduler, clock
        self.journal = Journal(config.controller.state / "journal")
        self.store: Store = open_store(config.controller.state / "index.sqlite", self.journal)
        settings = config.spool
        self._inbox = ChildInbox(settings.path, settings, config.controller.index_days)
        self._publisher = Publisher(settings.path)
        self._standings = tuple(guard.standing(g, guard.Agreement()) for g in config.grant)
        self._watched: dict[tuple[int, int], _Watched] = {}
        self._sick: dict[str, FaultRecord] = {}
        self._said: set[str] = set()
        self._snapshot_due = 0.0
        self._outcomes_due = 0.0
        self._named_jobs: set[int] = set()
        since, now = utc(clock() - LOOK_BACK_SECONDS), utc(clock() + _DAY_SECONDS)
        self._take_in(self.store.records(None, since, now))

    def close(self) -> None:
        """Let go of the spool and the index."""
        self._inbox.close()
        self.store.close()

    def pass_once(self) -> Pass:
        """Do what can be done now; never waits for the spool, briefly for the scheduler."""
        self._read_journal()
        got = self._inbox.ingest(self.store, _INGEST_SECONDS)
        self._take_in(got.accepted)
        for rejected in got.rejected:
            log.warning("rejected %s: %s", rejected.name, rejected.reason)
        problems = list(got.problems)
        decided: list[Decision] = []
        try:
            decided = self._observe_and_decide()
            self._act()
            self._follow_outcomes()
        except SchedulerUnavailable as error:
            problems.append(f"Slurm does not answer, nothing is decided until it does: {error}")
        effective = guard.effective(self._config, self._standings, utc(self._clock()))
        problems.append(self._publisher.publish(effective, utc(self._clock())[:10]))
        problems = [problem for problem in problems if problem]
        self._say_once(problems)
        self.store.put_meta("last_pass", utc(self._clock()))
        self.store.put_meta("problems", "\n".join(problems))
        return Pass(
            len(got.accepted),
            len(got.rejected),
            tuple(decided),
            tuple(problems),
            busy=got.more or bool(self._watched) or bool(self._acting()),
        )

    # -- what the records say -------------------------------------------------------------

    def _take_in(self, records: Sequence[FaultRecord]) -> None:
        """Note which attempts and nodes new records speak of."""
        ours = self._config.controller.cluster
        for record in records:
            if ours and record.cluster and record.cluster != ours:
                continue
            job = record.job
            if job is not None:
                self._named_jobs.add(job.id)
            if job is not None and record.hook == "epilog" and job.exit not in (None, "0:0"):
                watched = self._watched.setdefault(
                    (job.id, job.restart),
                    _Watched(job.id, job.restart, job.uid, _nodes_of(record), record.time),
                )
                watched.reported.add(record.node)
            self._named_jobs.update(f.job_id for f in record.findings if f.job_id is not None)
            if _shows_sick_node(record):
                self._sick[record.node] = record

    # -- observe, decide ------------------------------------------------------------------

    def _observe_and_decide(self) -> list[Decision]:
        now = self._clock()
        if now >= self._snapshot_due:
            self._watch_failed(self._scheduler.jobs())
            self._snapshot_due = now + self._config.controller.snapshot
        decided: list[Decision] = []
        if self._watched:
            jobs = self._scheduler.jobs(sorted({w.job_id for w in self._watched.values()}))
            for key, watched in sorted(self._watched.items()):
                decision = self._settle(watched, jobs.get(watched.job_id))
                if decision is not None:
                    del self._watched[key]
                    decided += decision
        if self._sick:
            decided += self._judge_nodes()
        return decided

    def _watch_failed(self, jobs: Mapping[int, Job]) -> None:
        """Watch the failed jobs of a full snapshot that no record has named."""
        for job in jobs.values():
            if job.state not in incident.FAILED_STATES:
                continue
            key = (job.id, job.restarts)
            if key in self._watched or self._decided(self._attempt(job)):
                continue
            seen = utc(job.end_time or self._clock())
            self._watched[key] = _Watched(job.id, job.restarts, job.uid, job.nodes, seen)

    def _settle(self, watched: _Watched, job: Job | None) -> list[Decision] | None:
        """Return the decision on an attempt, nothing ([]) where none is due, None to wait on."""
        now = self._clock()
        if job is None or job.uid != (watched.uid if watched.uid is not None else job.uid):
            return []  # purged, or another job under the same number
        if job.restarts != watched.restart:
            return []
        if job.state not in incident.FAILED_STATES | incident.OTHER_ENDS:
            if watched.first_look is None:
                watched.first_look = now
            stuck = now - watched.first_look > self._config.policy.gather_max
            return [] if stuck and job.state not in ("COMPLETING",) else None
        if job.state not in incident.FAILED_STATES or job.submit_time > seconds_of(watched.seen):
            return []
        attempt = self._attempt(job)
        if self._decided(attempt):
            return []
        if watched.left_completing is None:
            watched.left_completing = now
        nodes = job.nodes or watched.nodes
        waited = now - watched.left_completing
        if not set(nodes) <= watched.reported and waited < self._config.policy.settle:
            return None
        return [self._decide_attempt(attempt, job, nodes)]

    def _decide_attempt(self, attempt: Attempt, job: Job, nodes: Sequence[str]) -> Decision:
        now = self._clock()
        ended = float(job.end_time or now)
        records = self.store.records(
            nodes, utc(ended - incident.BEFORE_END_SECONDS), utc(now + _DAY_SECONDS)
        )
        states = self._scheduler.nodes(nodes)
        case = incident.of_attempt(attempt, job, nodes, records, ended, states.values(), utc(now))
        earlier = tuple(
            known
            for known in self.store.job_decisions(attempt.cluster, job.id, job.uid)
            if policy.same_attempt(known, attempt)
        )
        return self._decide(case, earlier)

    def _judge_nodes(self) -> list[Decision]:
        """Decide on nodes that report a fault of their own, each fault once a day."""
        sick, self._sick = self._sick, {}
        try:
            states = self._scheduler.nodes(sorted(sick))
        except SchedulerUnavailable:
            self._sick = sick
            raise
        decided = []
        for name, record in sorted(sick.items()):
            if name not in states or self._known_of(record):
                continue
            if any(name in watched.nodes for watched in self._watched.values()):
                self._sick[name] = record  # its job's decision will speak of it first
                continue
            case = incident.of_node(record, states[name].partitions, utc(self._clock()))
            decided.append(self._decide(case, ()))
        return decided

    def _known_of(self, record: FaultRecord) -> bool:
        """Whether a decision of the last day names this node for what the record shows."""
        codes = {f.code for f in record.findings if _opens_incident(f.severity, f.code)}
        since = utc(self._clock() - _DAY_SECONDS)
        told = {
            item.code
            for known in self.store.decisions(node=record.node, since=since)
            for item in known.cause.implicated
            if item.node == record.node
        }
        # A lost GPU shows as several codes, one after the other: one told is enough.
        return bool(codes & told)

    def _decide(self, case: incident.Incident, earlier: tuple[Decision, ...]) -> Decision:
        now = self._clock()
        decision = policy.decide(
            case, self._history(case, earlier, now), self._config.policy, now, self._config.mode
        )
        planned: list[Action] = []
        limited: list[str] = []
        for action in actions.intents(decision, utc(now)):
            why = guard.refusal(action, decision, self._config.mode, self._standings)
            if why:
                planned.append(replace(action, state="recorded", detail=why))
                limited.append(f"{action.name}: {why}")
            else:
                planned.append(action)
        decision = replace(decision, actions=tuple(planned), limited_by=tuple(limited))
        self._record({"type": "decision", "decision": decision.to_dict()}, decision)
        log.info("decided %s: %s %s", decision.id, decision.job.verdict, decision.job.reason)
        return decision

    def _history(
        self, case: incident.Incident, earlier: tuple[Decision, ...], now: float
    ) -> policy.History:
        hour = self.store.requeues_since(utc(now - 3600))
        uid = case.job.uid if case.job else None
        fault_class = causes.of(case).fault_class
        since = utc(now - _DAY_SECONDS)
        named = {
            node: sum(
                known.cause.fault_class == fault_class
                and any(item.node == node for item in known.cause.implicated)
                for known in self.store.decisions(node=node, since=since)
            )
            for node in {s.node for s in case.sightings} | set(case.lost)
        }
        return policy.History(
            earlier=earlier,
            named_today=named,
            requeues_of_user_hour=sum(one.uid == uid for one in hour),
            requeues_hour=len(hour),
        )

    # -- act, verify ------------------------------------------------------------------------

    def _acting(self) -> list[Decision]:
        return [
            decision
            for decision in self.store.open_decisions()
            if any(action.state not in FINAL_ACTIONS for action in decision.actions)
        ]

    def _act(self) -> None:
        """Bring every open action forward, as far as it goes without waiting."""
        moving = True
        while moving:
            acting = self._acting()
            view = self._view(acting)
            moved = [self._advance(decision, view) for decision in acting]
            moving = any(moved)

    def _view(
        self, decisions: Collection[Decision]
    ) -> tuple[Mapping[int, Job], Mapping[str, Node]]:
        jobs = {d.attempt.job_id for d in decisions if d.attempt}
        drains = any(
            action.kind == "drain" and action.state not in FINAL_ACTIONS
            for decision in decisions
            for action in decision.actions
        )
        # The guard counts over whole partitions, so a drain wants all nodes.
        nodes = self._scheduler.nodes() if drains else {}
        return (self._scheduler.jobs(jobs) if jobs else {}), nodes

    def _advance(
        self, decision: Decision, view: tuple[Mapping[int, Job], Mapping[str, Node]]
    ) -> bool:
        """Advance the first open action of a decision by one command; whether anything changed."""
        jobs, nodes = view
        action = next(a for a in decision.actions if a.state not in FINAL_ACTIONS)
        if action.kind == "drain" and not action.step:
            if self._drain_under_way():
                return False  # the guard counts what a fresh look shows: one drain at a time
            why = self._drain_refusal(action.target, nodes)
            if why:
                stopped = replace(action, state="abandoned", detail=why)
                self._change(decision, stopped)
                return True
        job = jobs.get(decision.attempt.job_id) if decision.attempt else None
        look = actions.View(job, nodes)
        after = actions.advance(action, decision, look, self._scheduler, self._clock())
        if after == action:
            return False
        self._change(decision, after)
        return True

    def _drain_under_way(self) -> bool:
        return any(
            action.kind == "drain" and action.step and action.state not in FINAL_ACTIONS
            for decision in self._acting()
            for action in decision.actions
        )

    def _drain_refusal(self, node: str, nodes: Mapping[str, Node]) -> str:
        breaker = self.store.breakers().get("drain")
        if breaker and breaker.tripped:
            return f"the circuit breaker stands open since {breaker.time}: {breaker.why}"
        if node in nodes and nodes[node].drained:
            return ""  # nothing will be drained that is not already
        why = guard.drain_refusal(node, nodes, self._config.guard)
        if why:
            event = {"type": "breaker", "kind": "drain", "tripped": True, "why": why}
            self._record(event)
            log.error("circuit breaker: %s; `recovery resume --why …` closes it", why)
        return why

    def _change(self, decision: Decision, action: Action) -> None:
        changed = decision.with_action(action)
        event = {"type": "action", "decision": decision.id, "action": asdict(action)}
        self._record(event, changed if action.state in FINAL_ACTIONS else None)
        log.info("%s %s: %s %s", decision.id, action.name, action.state, action.detail)

    # -- outcome ----------------------------------------------------------------------------

    def _follow_outcomes(self) -> None:
        now = self._clock()
        waiting = [d for d in self.store.open_decisions() if d.awaits_outcome and d.attempt]
        named = {d.attempt.job_id for d in waiting if d.attempt} & self._named_jobs
        self._named_jobs.clear()
        if not waiting or (not named and now < self._outcomes_due):
            return
        self._outcomes_due = now + OUTCOME_SECONDS
        jobs = self._scheduler.jobs({d.attempt.job_id for d in waiting if d.attempt})
        for decision in waiting:
            if decision.attempt is None:
                continue
            job = jobs.get(decision.attempt.job_id)
            hosts = job.nodes if job else ()
            records = self.store.records(hosts, decision.time, utc(now + _DAY_SECONDS))
            for new in outcome.outcomes(decision, job, records, utc(now)):
                decision = replace(decision, outcome=new)
                event = {"type": "outcome", "decision": decision.id, "outcome": asdict(new)}
                self._record(event, decision)
                log.info("%s outcome: %s %s", decision.id, new.state, new.detail)

    # -- the record ---------------------------------------------------------------------------

    def _record(self, event: Mapping[str, object], changed: Decision | None = None) -> None:
        """Make an event durable, then visible."""
        whole = {"time": utc(self._clock()), **event}
        seq = self.journal.append(whole)
        if seq == self.store.last_seq() + 1:
            self.store.apply({"seq": seq, **whole})
        else:
            self._read_journal()
        if changed is not None:
            self._publisher.add(changed)

    def _read_journal(self) -> None:
        """Take in what a person has added by a command (``recovery resume``) meanwhile."""
        if self.journal.last_seq() > self.store.last_seq():
            self.store.follow(self.journal)

    def _attempt(self, job: Job) -> Attempt:
        return Attempt(
            self._config.controller.cluster, job.id, job.restarts, job.submit_time, job.sluid
        )

    def _decided(self, attempt: Attempt) -> bool:
        return self.store.attempt_decision(attempt.key) is not None

    def _say_once(self, problems: Sequence[str]) -> None:
        for problem in problems:
            if problem not in self._said:
                log.warning("%s", problem)
        self._said = set(problems)


def _nodes_of(record: FaultRecord) -> tuple[str, ...]:
    try:
        names = expand(record.job.nodes, _NODES_LIMIT) if record.job and record.job.nodes else ()
    except HostlistError:
        names = ()
    return tuple(names) if record.node in names else (record.node,)


def _shows_sick_node(record: FaultRecord) -> bool:
    return any(_opens_incident(f.severity, f.code) for f in record.findings)


def _opens_incident(severity: str, code: str) -> bool:
    if SEVERITIES.index(severity) < SEVERITIES.index("fault") or code.startswith("log."):
        return False
    known = catalog.entries().get(code)
    return known is not None and known.fault_class.startswith(_SINGLE_FAULT_CLASSES)


def run(aggregator: Aggregator, poll_seconds: float, stopped: Callable[[], bool]) -> None:
    """Repeat passes until ``stopped``, ``poll_seconds`` apart."""
    while not stopped():
        began = time.monotonic()
        aggregator.pass_once()
        time.sleep(max(0.02, poll_seconds - (time.monotonic() - began)))
