"""One pass: ingest, observe, correlate, decide, act, verify; and the loop that repeats it.

Owns the order of things and when the scheduler is asked for everything. What is pure lies in
``incident``, ``cause``, ``policy``, ``guard`` and ``outcome``, what is durable in ``ledger``. What
a crash takes from this process is found again at the next start: attempts from the records of the
last hours and from the scheduler, actions from the journal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from recovery import actions, gate_slots, guard, incident, policy
from recovery import cause as causes
from recovery.acting import Acting
from recovery.decision import Action, Attempt, Decision
from recovery.hangs import Found, Hangs
from recovery.inbox_child import ChildInbox
from recovery.ledger import Ledger
from recovery.publish import Publisher
from recovery.slurm.base import Job, Scheduler, SchedulerUnavailable
from recovery.watch import Ready, Watch
from slurm_hooks import catalog
from slurm_hooks.config import Config
from slurm_hooks.record import SEVERITIES, FaultRecord, Finding, utc

log = logging.getLogger("recovery.aggregator")

LOOK_BACK_SECONDS = 6 * 3600.0
"""How far back a start looks for attempts that no decision was made on yet."""

BUSY_POLL_SECONDS = 0.1
"""Between two passes while an attempt is gathered or an action is under way."""

_INGEST_SECONDS = 0.2
_HOUR_SECONDS = 3600.0
_DAY_SECONDS = 86400.0

_NODE_CLASSES = ("hardware", "node.software", "network.fabric")
"""Classes that open an incident on a node by themselves; others need a job that failed of them."""


@dataclass(frozen=True)
class Pass:
    """What one pass did. ``busy`` says that the next one should follow soon."""

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
        self._publisher = Publisher(config.spool.path)
        self._ledger = Ledger(config.controller.state, self._publisher, clock)
        self._inbox = ChildInbox(config.spool.path, config.spool, config.controller.index_days)
        self._standings = tuple(guard.standing(g, guard.Agreement()) for g in config.grant)
        self._watch = Watch(config.policy)
        self._hangs = Hangs(config.policy, config.spool.path)
        self._acting = Acting(scheduler, self._ledger, config.guard, clock)
        self._sick: dict[str, FaultRecord] = {}
        self._named_jobs: set[int] = set()
        self._said: set[str] = set()
        self._snapshot_due = 0.0
        self._gate_slots = 0
        since, until = utc(clock() - LOOK_BACK_SECONDS), utc(clock() + _DAY_SECONDS)
        self._take_in(self._ledger.store.records(None, since, until))
        published = self._ledger.store.meta("published") or ""
        self._ledger.republish(since, min(published, utc(clock() - actions.GIVE_UP_SECONDS)))

    def close(self) -> None:
        """Let go of the spool and the index."""
        self._inbox.close()
        self._ledger.close()

    def pass_once(self) -> Pass:
        """Do what can be done now; never waits for the spool, and for Slurm only as configured."""
        store = self._ledger.store
        self._ledger.catch_up()
        got = self._inbox.ingest(store, _INGEST_SECONDS)
        self._take_in(got.accepted)
        for rejected in got.rejected:
            log.warning("rejected %s: %s", rejected.name, rejected.reason)
        problems = list(got.problems)
        decided: list[Decision] = []
        under_way = False
        try:
            self._observe(decided)
            under_way = self._acting.act()
            self._acting.follow(self._named_jobs)
            self._named_jobs.clear()
        except SchedulerUnavailable as error:
            problems.append(f"Slurm does not answer, nothing is decided until it does: {error}")
        now = utc(self._clock())
        written = self._publisher.publish(
            guard.effective(self._config, self._standings, self._gate_slots, now), now[:10]
        )
        problems += [written] if written else []
        self._say_once(problems)
        if self._publisher.level:
            store.put_meta("published", now)
        store.put_meta("last_pass", now)
        store.put_meta("problems", "\n".join(problems))
        busy = got.more or bool(self._watch) or bool(self._sick) or under_way
        return Pass(len(got.accepted), len(got.rejected), tuple(decided), tuple(problems), busy)

    def _take_in(self, records: Sequence[FaultRecord]) -> None:
        """Note which attempts, jobs and nodes new records speak of."""
        ours = self._config.controller.cluster
        for record in records:
            if ours and record.cluster and record.cluster != ours:
                continue
            self._watch.note(record)
            self._hangs.note(record)
            if record.job is not None:
                self._named_jobs.add(record.job.id)
            self._named_jobs.update(f.job_id for f in record.findings if f.job_id is not None)
            if any(_opens_incident(finding) for finding in record.findings):
                self._sick[record.node] = record

    def _observe(self, decided: list[Decision]) -> None:
        """Look at the jobs that matter, and add to ``decided`` what can be decided now."""
        now = self._clock()
        if now >= self._snapshot_due:
            known = self._scheduler.jobs()
            self._watch.note_snapshot(known, now)
            self._hangs.note_snapshot(known)
            self._snapshot_due = now + self._config.controller.snapshot
            self._ledger.store.put_meta("last_snapshot", utc(now))
            self._ledger.store.forget_records(
                utc(now - self._config.controller.index_days * _DAY_SECONDS)
            )
            self._count_gate_slots()
        if self._watch:
            jobs = self._scheduler.jobs(self._watch.job_ids)
            for ready in self._watch.ready(jobs, self._is_decided, now):
                self._decide_attempt(ready, decided)
        wanted = self._hangs.due(now)
        if wanted:
            for found in self._hangs.judge(wanted, self._scheduler.jobs(wanted), now):
                self._decide_running(found, decided)
        if self._sick:
            self._judge_nodes(decided)

    def _count_gate_slots(self) -> None:
        """See how many nodes may gate themselves now, and free the slots of those in service."""
        if not any("gate" in grant.actions for grant in self._config.grant):
            return
        nodes = self._scheduler.nodes()
        self._gate_slots = guard.gate_slots(self._config.guard, self._standings, nodes.values())
        for node in gate_slots.free(self._config.spool.path, nodes):
            log.info("%s is back in service: its gate slot is free", node)

    def _decide_attempt(self, ready: Ready, decided: list[Decision]) -> None:
        job, now = ready.job, self._clock()
        attempt = replace(self._attempt(job), restart=ready.restart)
        ended = now if ready.requeued else float(job.end_time or now)
        since = utc(ended - incident.BEFORE_END_SECONDS)
        records = self._ledger.store.records(ready.nodes, since, utc(now + _DAY_SECONDS))
        states = self._scheduler.nodes(ready.nodes).values()
        hang = self._hangs.at_end(job, ended)
        case = incident.of_attempt(
            attempt, job, ready.nodes, records, ended, states, utc(now), hang=hang
        )
        if case.requeued and not (case.lost or case.gated):
            # A person's requeue, or one whose reason Slurm alone knows: left to them.
            self._watch.forget(ready)
            return
        decided.append(self._decide(case, self._earlier(attempt, job)))
        self._watch.forget(ready)

    def _decide_running(self, found: Found, decided: list[Decision]) -> None:
        """Decide on a job that hangs or is slow; of each kind once for an attempt."""
        job, now = found.job, self._clock()
        attempt = self._attempt(job)
        known = self._ledger.store.job_decisions(attempt.cluster, job.id, job.uid)
        kinds = [d.cause.fault_class == "slowdown" for d in known if d.attempt == attempt]
        if (found.slowdown is not None) not in kinds:
            stopped = found.hang.stall.since if found.hang else now
            since = utc(stopped - incident.BEFORE_END_SECONDS)
            records = self._ledger.store.records(job.nodes, since, utc(now + _DAY_SECONDS))
            states = self._scheduler.nodes(job.nodes).values()
            case = incident.of_attempt(
                *(attempt, job, job.nodes, records, now, states, utc(now)),
                hang=found.hang,
                slowdown=found.slowdown,
            )
            decided.append(self._decide(case, self._earlier(attempt, job)))
        self._hangs.settle(found)

    def _earlier(self, attempt: Attempt, job: Job) -> tuple[Decision, ...]:
        """The decisions on the job's former attempts, oldest first."""
        known = self._ledger.store.job_decisions(attempt.cluster, job.id, job.uid)
        return tuple(d for d in known if d.settles and policy.same_attempt(d, attempt))

    def _judge_nodes(self, decided: list[Decision]) -> None:
        """Decide on nodes that report a fault of their own, each fault once a day."""
        states = self._scheduler.nodes(sorted(self._sick))
        for name, record in sorted(self._sick.items()):
            if self._watch.names(name):
                continue  # its job's decision will speak of it first
            del self._sick[name]
            if name in states and not self._is_known(record):
                now = utc(self._clock())
                decided.append(
                    self._decide(incident.of_node(record, states[name].partitions, now), ())
                )

    def _is_known(self, record: FaultRecord) -> bool:
        """Whether a decision of the last day names this node for what the record shows.

        A lost GPU shows as several codes, one after the other: one of them told is enough.
        """
        codes = {finding.code for finding in record.findings if _opens_incident(finding)}
        since = utc(self._clock() - _DAY_SECONDS)
        return any(
            item.node == record.node and item.code in codes
            for known in self._ledger.store.decisions(node=record.node, since=since)
            for item in known.cause.implicated
        )

    def _decide(self, case: incident.Incident, earlier: tuple[Decision, ...]) -> Decision:
        """Decide, and record the decision with its actions: planned, or only recorded."""
        now, mode = self._clock(), self._config.mode
        history = self._history(case, earlier, now)
        decision = policy.decide(case, history, self._config.policy, now, mode)
        planned: list[Action] = []
        limited: list[str] = []
        for action in actions.intents(decision, utc(now)):
            why = guard.refusal(action, decision, mode, self._standings)
            planned.append(replace(action, state="recorded", detail=why) if why else action)
            limited += [f"{action.name}: {why}"] if why else []
        decision = replace(decision, actions=tuple(planned), limited_by=tuple(limited))
        self._ledger.decided(decision)
        return decision

    def _history(
        self, case: incident.Incident, earlier: tuple[Decision, ...], now: float
    ) -> policy.History:
        store = self._ledger.store
        hour = store.requeues_since(utc(now - _HOUR_SECONDS))
        since, cause = utc(now - _DAY_SECONDS), causes.of(case)
        named = {
            node: sum(
                known.cause.fault_class == cause.fault_class
                and any(item.node == node for item in known.cause.implicated)
                for known in store.decisions(node=node, since=since)
            )
            for node in {item.node for item in cause.implicated}
        }
        uid = case.job.uid if case.job else None
        return policy.History(earlier, named, sum(one.uid == uid for one in hour), len(hour))

    def _attempt(self, job: Job) -> Attempt:
        cluster = self._config.controller.cluster
        return Attempt(cluster, job.id, job.restarts, job.submit_time, job.sluid)

    def _is_decided(self, job: Job, restart: int) -> bool:
        """Whether the job's attempt has its decision; a requeue has changed the job's own key."""
        attempt = self._attempt(job)
        known = self._ledger.store.job_decisions(attempt.cluster, job.id, job.uid)
        return any(
            d.settles
            and d.attempt is not None
            and d.attempt.restart == restart
            # A requeue has changed the job's own key; before one, it tells two jobs apart.
            and (restart != job.restarts or d.attempt.key == attempt.key)
            for d in known[-20:]
        )

    def _say_once(self, problems: Sequence[str]) -> None:
        for problem in problems:
            if problem not in self._said:
                log.warning("%s", problem)
        self._said = set(problems)


def run(aggregator: Aggregator, poll_seconds: float, stopped: Callable[[], bool]) -> None:
    """Repeat passes until ``stopped``: ``poll_seconds`` apart, closer while something is open."""
    while not stopped():
        began = time.monotonic()
        busy = aggregator.pass_once().busy
        pause = min(BUSY_POLL_SECONDS, poll_seconds) if busy else poll_seconds
        time.sleep(max(0.01, pause - (time.monotonic() - began)))


def _opens_incident(finding: Finding) -> bool:
    if SEVERITIES.index(finding.severity) < SEVERITIES.index("fault"):
        return False
    known = catalog.entries().get(finding.code)
    return known is not None and known.fault_class.startswith(_NODE_CLASSES)
