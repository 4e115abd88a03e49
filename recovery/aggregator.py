"""One pass: ingest, observe, correlate, decide, act, verify; and the loop that repeats it.

Owns the order of things and when the scheduler is asked for everything. What is pure lies in
``incident``, ``cause``, ``policy``, ``guard`` and ``outcome``, what is durable in ``ledger``. What
a crash takes from this process is found again at the next start: attempts from the records of the
last hours and from the scheduler, actions from the journal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from recovery import (
    actions,
    gate_slots,
    grants,
    guard,
    incident,
    late,
    pausing,
    policy,
    precedents,
    review,
)
from recovery.acting import Acting
from recovery.checking import Checking
from recovery.decision import Action, Attempt, Decision
from recovery.hangs import Found, Hangs
from recovery.inbox_child import ChildInbox
from recovery.ledger import Ledger
from recovery.notify import Notifier
from recovery.outcome import rerun_time
from recovery.publish import Publisher
from recovery.slurm.base import Job, Node, Scheduler, SchedulerUnavailable
from recovery.upkeep import Upkeep
from recovery.watch import Ready, Watch
from slurm_hooks import catalog
from slurm_hooks.config import Config
from slurm_hooks.record import SEVERITIES, FaultRecord, Finding, seconds_of, utc

log = logging.getLogger("recovery.aggregator")

LOOK_BACK_SECONDS = 6 * 3600.0
"""How far back a start looks for attempts that no decision was made on yet."""

BUSY_POLL_SECONDS = 0.1
"""Between two passes while an attempt is gathered or an action is under way."""

ASKING_SHARE = 0.25
CALM_SECONDS = 5.0
"""Slurm is asked for at most such a share of the time, so that the looks at a large or slow
cluster, which take longer, come less often; and at least so often."""

INGEST_SECONDS = 0.2
"""How long a pass waits for the spool before it goes on to Slurm."""

_DAY_SECONDS = 86400.0

_NODE_CLASSES = ("hardware", "node.software", "network.fabric")
"""Classes that open an incident on a node by themselves; others need a job that failed of them."""


@dataclass(frozen=True)
class Pass:
    """What one pass did. ``busy`` says that the next one should follow soon.

    ``asking_seconds`` is the time spent on Slurm's answers.
    """

    accepted: int = 0
    rejected: int = 0
    decided: tuple[Decision, ...] = ()
    problems: tuple[str, ...] = ()
    busy: bool = False
    asking_seconds: float = 0.0


class Aggregator:
    """Decides, and acts where it may. One at a time for a state folder (see ``commands``).

    ``clock`` returns seconds since the epoch.
    """

    def __init__(
        self, config: Config, scheduler: Scheduler, clock: Callable[[], float] = time.time
    ) -> None:
        self._config, self._scheduler, self._clock = config, scheduler, clock
        self._publisher = Publisher(config.spool.path)
        self._ledger = Ledger(config.controller.state, self._publisher, clock)
        reviewers, self._unknown_reviewers = review.reviewer_uids(config.review.reviewers)
        days = config.controller.index_days
        self._inbox = ChildInbox(config.spool.path, config.spool, days, reviewers)
        self._cluster = config.controller.cluster
        self._notifier = Notifier(config.notify, self._cluster, self._ledger.store, clock)
        self._standings: tuple[guard.Standing, ...] = ()
        self._standings_seq = -1
        last_pass = self._ledger.store.meta("last_pass")
        down_since = seconds_of(last_pass) - config.policy.gather_max if last_pass else 0.0
        self._watch = Watch(config.policy, down_since)
        self._upkeep = Upkeep(config, self._ledger.store, clock)
        self._hangs = Hangs(config.policy, config.spool.path)
        self._acting = Acting(scheduler, self._ledger, config.guard, clock)
        self._checking = Checking(config, scheduler, self._ledger.store)
        self._untold: list[FaultRecord] = []
        self._sick: dict[str, FaultRecord] = {}
        self._named_jobs: set[int] = set()
        self._said: set[str] = set()
        self._snapshot_due = 0.0
        self._gate_slots = 0
        since, until = utc(clock() - LOOK_BACK_SECONDS), utc(clock() + _DAY_SECONDS)
        self._untold += self._ledger.store.records(None, since, until)
        published = self._ledger.store.meta("published") or ""
        self._ledger.republish(since, min(published, utc(clock() - actions.GIVE_UP_SECONDS)))

    def close(self) -> None:
        """Let go of the spool and the index."""
        self._notifier.close()
        self._inbox.close()
        self._ledger.close()

    def pass_once(self, spool_seconds: float = INGEST_SECONDS) -> Pass:
        """Do what can be done now; waits for Slurm as configured, for the spool as told here."""
        store = self._ledger.store
        self._ledger.catch_up()
        got = self._inbox.ingest(store, spool_seconds)
        self._untold += got.accepted
        for rejected in got.rejected:
            log.warning("rejected %s: %s", rejected.name, rejected.reason)
        for decision_id, made in got.reviews:
            self._ledger.reviewed(decision_id, made)
        problems = list(got.problems)
        problems += [f"reviewer {name}: no such user" for name in self._unknown_reviewers]
        self._weigh_grants()
        decided: list[Decision] = []
        under_way = False
        began = time.monotonic()
        try:
            self._take_in()
            snapshot = self._observe(decided)
            under_way = self._acting.act()
            self._acting.follow(self._named_jobs, snapshot)
            self._named_jobs.clear()
        except SchedulerUnavailable as error:
            problems.append(f"Slurm does not answer, nothing is decided until it does: {error}")
        asking = time.monotonic() - began
        now = utc(self._clock())
        written = self._publisher.publish(
            guard.effective(self._config, self._standings, self._gate_slots, now), now[:10]
        )
        problems += [text for text in (written, self._notifier.step()) if text]
        self._say_once(problems)
        if self._publisher.level:
            store.put_meta("published", now)
        store.put_meta("last_pass", now)
        store.put_meta("problems", "\n".join(problems))
        busy = got.more or bool(self._watch) or bool(self._sick) or under_way
        return Pass(
            len(got.accepted), len(got.rejected), tuple(decided), tuple(problems), busy, asking
        )

    def _weigh_grants(self) -> None:
        """See which grants the evidence carries, where it may have changed, and say so."""
        if self._standings_seq == self._ledger.store.last_seq():
            return
        self._standings = grants.standings(self._config, self._ledger.store)
        if self._config.mode == "act":
            for change in grants.changes(self._ledger.store, self._standings):
                grant = next(g for g in self._config.grant if grants.key_of(g) == change.key)
                scope = f"{', '.join(grant.actions)} ({grants.scope_text(grant)})"
                self._ledger.grant_changed(change, scope)
        self._standings_seq = self._ledger.store.last_seq()

    def _note_reruns(self, jobs: Collection[Job], now: float) -> None:
        """Note when people ran again what was only recorded: what acting would have saved."""
        for known in self._ledger.store.decisions(since=utc(now - _DAY_SECONDS), limit=200):
            requeues = [action.state for action in known.actions if action.kind == "requeue"]
            if requeues == ["recorded"] and not known.rerun:
                started = rerun_time(known, jobs)
                if started:
                    self._ledger.rerun(known.id, utc(started))

    def _take_in(self) -> None:
        """Note which attempts, jobs and nodes new records of this cluster speak of.

        Which cluster this is, Slurm is asked once where the configuration does not say it: two of
        them may share a spool, and have jobs and nodes of the same names.
        """
        self._cluster = self._cluster or self._scheduler.cluster()
        records, self._untold = self._untold, []
        for record in filter(self._is_of_this_cluster, records):
            self._watch.note(record)
            self._checking.note(record)
            self._hangs.note(record)
            if record.job is not None:
                self._named_jobs.add(record.job.id)
            self._named_jobs.update(f.job_id for f in record.findings if f.job_id is not None)
            if any(_opens_incident(finding) for finding in record.findings):
                self._sick[record.node] = record

    def _is_of_this_cluster(self, record: FaultRecord) -> bool:
        return not record.cluster or record.cluster == self._cluster

    def _observe(self, decided: list[Decision]) -> Mapping[int, Job] | None:
        """Look at the jobs that matter, and add to ``decided`` what can be decided now.

        Returns all jobs where it was time for a full look.
        """
        now, snapshot = self._clock(), None
        # A clock that was set back must not put the next full look off by as much.
        if not 0 < self._snapshot_due - now <= self._config.controller.snapshot:
            snapshot = self._scheduler.jobs()
            self._watch.note_snapshot(snapshot, now)
            self._note_reruns(snapshot.values(), now)
            self._upkeep.note_jobs(snapshot, now)
            self._hangs.note_snapshot(snapshot)
            self._snapshot_due = now + self._config.controller.snapshot
            self._ledger.store.put_meta("last_snapshot", utc(now))
            self._ledger.store.forget_records(
                utc(now - self._config.controller.index_days * _DAY_SECONDS)
            )
            self._look_at_nodes(decided)
        elif self._checking.answered:
            self._checking.look(self._scheduler.nodes(), self._standings, now)
        if self._watch:
            jobs = self._scheduler.jobs(self._watch.job_ids)
            can = self._watch.ready(jobs, self._is_decided, now)
            states = self._scheduler.nodes({node for ready in can for node in ready.nodes})
            for ready in can:
                self._decide_attempt(ready, states, decided)
        for ready in self._watch.late(now):
            self._reopen(ready, decided)
        wanted = self._hangs.due(now)
        if wanted:
            for found in self._hangs.judge(wanted, self._scheduler.jobs(wanted), now):
                self._decide_running(found, decided)
        if self._sick:
            self._judge_nodes(decided)
        return snapshot

    def _look_at_nodes(self, decided: list[Decision]) -> None:
        """What a full look at the nodes is for: gates, returns, repeat offenders."""
        granted = {action for grant in self._config.grant for action in grant.actions}
        offend = self._upkeep.due()
        nodes = self._scheduler.nodes()
        self._checking.look(nodes, self._standings, self._clock())
        self._upkeep.note_nodes(nodes)
        if "gate" in granted:
            self._count_gate_slots(nodes)
        if "return" in granted:
            for decision in self._upkeep.returns(nodes, self._config.mode):
                decided.append(self._planned(decision))
        for case in self._upkeep.offenders(nodes) if offend else ():
            decided.append(self._decide(case, ()))

    def _count_gate_slots(self, nodes: Mapping[str, Node]) -> None:
        """See how many nodes may gate themselves now, and free the slots of those in service."""
        self._gate_slots = guard.gate_slots(self._config.guard, self._standings, nodes.values())
        for node in gate_slots.free(self._config.spool.path, nodes):
            log.info("%s is back in service: its gate slot is free", node)

    def _decide_attempt(
        self, ready: Ready, nodes: Mapping[str, Node], decided: list[Decision]
    ) -> None:
        job, now = ready.job, self._clock()
        attempt = replace(self._attempt(job), restart=ready.restart)
        ended = now if ready.requeued else float(job.end_time or now)
        since = utc(ended - incident.BEFORE_END_SECONDS)
        seen = self._ledger.store.records(ready.nodes, since, utc(now + _DAY_SECONDS))
        records = filter(self._is_of_this_cluster, seen)
        states = [nodes[name] for name in ready.nodes if name in nodes]
        hang = self._hangs.at_end(job, ended)
        case = incident.of_attempt(
            attempt, job, ready.nodes, records, ended, states, utc(now), hang=hang
        )
        if case.requeued and not (case.lost or case.gated):
            # A person's requeue, or one whose reason Slurm alone knows: left to them.
            self._watch.forget(ready)
            return
        decided.append(self._decide(case, self._earlier(job, attempt)))
        self._watch.settle(ready, now)

    def _earlier(self, job: Job, attempt: Attempt) -> tuple[Decision, ...]:
        """The decisions on the job's former attempts that still hold, oldest first."""
        known = self._ledger.store.job_decisions(attempt.cluster, job.id, job.uid)
        revised = {one.revises for one in known}
        return tuple(
            one
            for one in known
            if one.settles and policy.same_attempt(one, attempt) and one.id not in revised
        )

    def _reopen(self, ready: Ready, decided: list[Decision]) -> None:
        """Judge an attempt again for late evidence; what was acted on gets an addendum instead."""
        attempt = replace(self._attempt(ready.job), restart=ready.restart)
        former = self._ledger.store.attempt_decision(attempt.key)
        if former is None:
            return
        now = self._clock()
        ended = float(ready.job.end_time or seconds_of(former.time))
        since = utc(ended - incident.BEFORE_END_SECONDS)
        records = [
            record
            for record in self._ledger.store.records(ready.nodes, since, utc(now + _DAY_SECONDS))
            if self._is_of_this_cluster(record) and late.belongs(record, former)
        ]
        states = self._scheduler.nodes(ready.nodes).values()
        case = incident.of_attempt(
            attempt, ready.job, ready.nodes, records, ended, states, utc(now)
        )
        history = self._history(case, self._earlier(ready.job, attempt), now, besides=former.id)
        again = policy.decide(case, history, self._config.policy, now, self._config.mode)
        if late.same_answer(former, again):
            return
        if not former.acted_on:
            decided.append(self._planned(replace(again, revises=former.id)))
        elif (text := late.addendum(again)) not in former.addenda:
            self._ledger.added(former, text)

    def _decide_running(self, found: Found, decided: list[Decision]) -> None:
        """Decide on a job that hangs or is slow; of each kind once for an attempt."""
        job, now = found.job, self._clock()
        attempt = self._attempt(job)
        known = self._ledger.store.job_decisions(attempt.cluster, job.id, job.uid)
        kinds = [d.cause.fault_class == "slowdown" for d in known if d.attempt == attempt]
        if (found.slowdown is not None) not in kinds:
            stopped = found.hang.stall.since if found.hang else now
            since = utc(stopped - incident.BEFORE_END_SECONDS)
            seen = self._ledger.store.records(job.nodes, since, utc(now + _DAY_SECONDS))
            records = filter(self._is_of_this_cluster, seen)
            states = self._scheduler.nodes(job.nodes).values()
            case = incident.of_attempt(
                *(attempt, job, job.nodes, records, now, states, utc(now)),
                hang=found.hang,
                slowdown=found.slowdown,
            )
            decided.append(self._decide(case, self._earlier(job, attempt)))
        self._hangs.settle(found)

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

        A lost GPU shows as several codes, one after the other: one of them told is enough. What
        was told before the node returned to service is told again.
        """
        codes = {finding.code for finding in record.findings if _opens_incident(finding)}
        since = utc(self._clock() - _DAY_SECONDS)
        for known in self._ledger.store.decisions(node=record.node, since=since):
            if any(one.kind == "return" and one.state == "verified" for one in known.actions):
                return False
            if any(i.node == record.node and i.code in codes for i in known.cause.implicated):
                return True
        return False

    def _decide(self, case: incident.Incident, earlier: tuple[Decision, ...]) -> Decision:
        """Decide, and record the decision with its actions: planned, or only recorded."""
        now, mode = self._clock(), self._config.mode
        history = self._history(case, earlier, now)
        return self._planned(policy.decide(case, history, self._config.policy, now, mode))

    def _planned(self, decision: Decision) -> Decision:
        """Record a decision with its actions, each planned where it may be taken."""
        now, mode = self._clock(), self._config.mode
        pauses = self._ledger.store.pauses()
        planned: list[Action] = []
        limited: list[str] = []
        for action in actions.intents(decision, utc(now)):
            why = guard.refusal(action, decision, mode, self._standings)
            why = why or pausing.refusal(action, decision, pauses)
            planned.append(replace(action, state="recorded", detail=why) if why else action)
            limited += [f"{action.name}: {why}"] if why else []
        decision = replace(decision, actions=tuple(planned), limited_by=tuple(limited))
        self._ledger.decided(decision)
        if decision.attempt:
            self._named_jobs.add(decision.attempt.job_id)
        return decision

    def _history(
        self, case: incident.Incident, earlier: tuple[Decision, ...], now: float, besides: str = ""
    ) -> policy.History:
        suspects = self._upkeep.suspects() if case.job else {}
        return precedents.of(self._ledger.store, case, earlier, suspects, now, besides)

    def _attempt(self, job: Job) -> Attempt:
        return Attempt(self._cluster, job.id, job.restarts, job.submit_time, job.sluid)

    def _is_decided(self, job: Job, restart: int) -> bool:
        """Whether the job's attempt has its decision; a requeue has changed the job's own key."""
        attempt = self._attempt(job)
        known = self._ledger.store.job_decisions(attempt.cluster, job.id, job.uid)
        since = "" if job.known else utc(job.end_time)
        return any(
            d.settles
            and d.attempt is not None
            and d.attempt.restart == restart
            and d.time >= since
            # A requeue has changed the job's own key; before one, it tells two jobs apart.
            and (restart != job.restarts or not job.known or d.attempt.key == attempt.key)
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
        done = aggregator.pass_once()
        pause = min(BUSY_POLL_SECONDS, poll_seconds) if done.busy else poll_seconds
        pause = max(pause, min(done.asking_seconds / ASKING_SHARE, CALM_SECONDS))
        time.sleep(max(0.01, pause - (time.monotonic() - began)))


def _opens_incident(finding: Finding) -> bool:
    if SEVERITIES.index(finding.severity) < SEVERITIES.index("fault"):
        return False
    known = catalog.entries().get(finding.code)
    return known is not None and known.fault_class.startswith(_NODE_CLASSES)
