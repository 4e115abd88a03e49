"""One pass: ingest, observe, correlate, decide, act, verify; and the loop that repeats it.

Owns the order of things and when the scheduler is asked for everything. What is pure lies in
``incident``, ``cause``, ``policy``, ``guard`` and ``outcome``, what is durable in ``ledger``, what
is put together for a decision in ``deciding``. What a crash takes from this process is found again
at the next start: attempts from the records of the last hours and from the scheduler, actions from
the journal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from recovery import actions, gate_slots, grants, guard, review
from recovery.acting import Acting
from recovery.checking import Checking
from recovery.deciding import Deciding
from recovery.decision import Decision
from recovery.hangs import Hangs
from recovery.inbox_child import ChildInbox
from recovery.ledger import Ledger
from recovery.notify import Notifier
from recovery.outcome import rerun_time
from recovery.publish import Publisher
from recovery.rejudging import Rejudging
from recovery.slurm.base import Job, Node, Scheduler, SchedulerUnavailable
from recovery.upkeep import Upkeep
from recovery.watch import Watch
from slurm_hooks.config import Config
from slurm_hooks.record import FaultRecord, seconds_of, utc

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
        self._notifier = Notifier(
            config.notify, config.controller.cluster, self._ledger.store, clock
        )
        self._standings: tuple[guard.Standing, ...] = ()
        self._standings_seq = -1
        last_pass = self._ledger.store.meta("last_pass")
        down_since = seconds_of(last_pass) - config.policy.gather_max if last_pass else 0.0
        self._watch = Watch(config.policy, down_since)
        self._upkeep = Upkeep(config, self._ledger.store, clock)
        self._hangs = Hangs(config.policy, config.spool.path)
        self._deciding = Deciding(
            config, scheduler, self._ledger, self._watch, self._upkeep, self._hangs, clock
        )
        self._rejudging = Rejudging(config, scheduler, self._ledger, self._deciding, clock)
        self._acting = Acting(scheduler, self._ledger, config.guard, clock)
        self._checking = Checking(config, scheduler, self._ledger.store)
        self._untold: list[FaultRecord] = []
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
            self._named_jobs.update(one.attempt.job_id for one in decided if one.attempt)
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
        busy = got.more or bool(self._watch) or bool(self._deciding) or under_way
        return Pass(
            len(got.accepted), len(got.rejected), tuple(decided), tuple(problems), busy, asking
        )

    def _weigh_grants(self) -> None:
        """See which grants the evidence carries, where it may have changed, and say so."""
        if self._standings_seq == self._ledger.store.last_seq():
            return
        self._standings = grants.standings(self._config, self._ledger.store)
        self._deciding.standings = self._standings
        if self._config.mode == "act":
            for change in grants.changes(self._ledger.store, self._standings):
                grant = next(g for g in self._config.grant if grants.key_of(g) == change.key)
                scope = f"{', '.join(grant.actions)} ({grants.scope_text(grant)})"
                self._ledger.grant_changed(change, scope)
        self._standings_seq = self._ledger.store.last_seq()

    def _note_reruns(self, jobs: Collection[Job], now: float) -> None:
        """Note when people ran again what was only recorded, which acting would have saved, or
        what was held for them."""
        for known in self._ledger.store.decisions(since=utc(now - _DAY_SECONDS), limit=200):
            theirs = {("requeue", "recorded"), ("hold", "recorded"), ("hold", "verified")}
            waits = any((action.kind, action.state) in theirs for action in known.actions)
            if waits and not known.rerun:
                started = rerun_time(known, jobs)
                if started:
                    self._ledger.rerun(known.id, utc(started))

    def _take_in(self) -> None:
        """Note which attempts, jobs and nodes new records of this cluster speak of.

        Which cluster this is, Slurm is asked once where the configuration does not say it: two of
        them may share a spool, and have jobs and nodes of the same names.
        """
        self._deciding.cluster = self._deciding.cluster or self._scheduler.cluster()
        records, self._untold = self._untold, []
        for record in filter(self._deciding.is_of_this_cluster, records):
            self._watch.note(record)
            self._checking.note(record)
            self._hangs.note(record)
            if record.job is not None:
                self._named_jobs.add(record.job.id)
            self._named_jobs.update(f.job_id for f in record.findings if f.job_id is not None)
            self._deciding.note(record)

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
        self._deciding.begin_pass(snapshot)
        if self._watch:
            jobs = self._scheduler.jobs(self._watch.job_ids)
            steady = time.monotonic()
            heard = steady - self._inbox.unread_seconds
            ready = self._watch.ready(jobs, self._deciding.is_decided, now, steady, heard)
            decided += self._deciding.attempts(ready)
        for late in self._watch.late(now):
            decided += self._rejudging.reopen(late)
        wanted = self._hangs.due(now)
        if wanted:
            found = self._hangs.judge(wanted, self._scheduler.jobs(wanted), now)
            decided += self._deciding.running(found)
        if self._deciding:
            decided += self._deciding.sick_nodes()
        decided += self._deciding.fleets.look()
        decided += self._rejudging.first_hits()
        return snapshot

    def _look_at_nodes(self, decided: list[Decision]) -> None:
        """What a full look at the nodes is for: gates, returns, repeat offenders."""
        granted = {action for grant in self._config.grant for action in grant.actions}
        offend = self._upkeep.due()
        nodes = self._scheduler.nodes()
        self._checking.look(nodes, self._standings, self._clock())
        self._upkeep.note_nodes(nodes)
        self._deciding.note_nodes(nodes)
        if "gate" in granted:
            self._count_gate_slots(nodes)
        if "return" in granted:
            for decision in self._upkeep.returns(nodes, self._config.mode):
                decided.append(self._deciding.planned(decision))
        for case in self._upkeep.offenders(nodes) if offend else ():
            decided.append(self._deciding.decide(case, ()))

    def _count_gate_slots(self, nodes: Mapping[str, Node]) -> None:
        """See how many nodes may gate themselves now, and free the slots of those in service."""
        self._gate_slots = guard.gate_slots(self._config.guard, self._standings, nodes.values())
        for node in gate_slots.free(self._config.spool.path, nodes):
            log.info("%s is back in service: its gate slot is free", node)

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
