"""From what can be decided on now to a recorded decision, with its actions planned or not.

Owns which records make an incident, what of the past bears on it, and that each attempt and each
fault is decided on once. What is decided is ``policy``'s, who is hit at once ``fleet_watch``'s,
when something can be decided on ``watch``'s and ``hangs``'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from recovery import actions, guard, incident, late, pausing, policy, precedents
from recovery import cause as causes
from recovery.budgets import History
from recovery.decision import Action, Attempt, Cause, Decision
from recovery.fleet import names_a_part
from recovery.fleet_watch import FleetWatch
from recovery.hangs import Found, Hangs
from recovery.ledger import Ledger
from recovery.slurm.base import Job, Node, Scheduler
from recovery.upkeep import Upkeep
from recovery.watch import Ready, Watch
from slurm_hooks.config import Config
from slurm_hooks.record import FaultRecord, seconds_of, utc

_DAY_SECONDS = 86400.0


class Deciding:
    """Decides for one aggregator; ``clock`` returns seconds since the epoch.

    ``cluster`` is Slurm's name of it, ``standings`` how the grants stand: both are the
    aggregator's to keep up to date.
    """

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        ledger: Ledger,
        watch: Watch,
        upkeep: Upkeep,
        hangs: Hangs,
        clock: Callable[[], float],
    ) -> None:
        self._config, self._scheduler, self._ledger = config, scheduler, ledger
        self._watch, self._upkeep, self._hangs, self._clock = watch, upkeep, hangs, clock
        self.cluster = config.controller.cluster
        self.standings: tuple[guard.Standing, ...] = ()
        self.fleets = FleetWatch(config, ledger, clock)
        self._sick: dict[str, FaultRecord] = {}
        self._in_service: dict[str, str] = {}
        self._all_jobs: Mapping[int, Job] | None = None

    def __bool__(self) -> bool:
        """Whether a sick node is still to be decided on."""
        return bool(self._sick)

    def note(self, record: FaultRecord) -> None:
        """Take notice of a node that reports a fault of its own."""
        self.fleets.note(record)
        if any(incident.opens_incident(finding) for finding in record.findings):
            self._sick[record.node] = record

    def begin_pass(self, all_jobs: Mapping[int, Job] | None) -> None:
        """Take the pass's full look at the jobs; where it makes none, one is made when needed."""
        self._all_jobs = all_jobs

    def note_nodes(self, nodes: Mapping[str, Node]) -> None:
        """Take notice of all nodes at a full look: since when each is seen in service."""
        now = utc(self._clock())
        self.fleets.size = len(nodes)
        self._in_service = {
            name: self._in_service.get(name, now)
            for name, node in nodes.items()
            if not node.drained
        }

    def is_of_this_cluster(self, record: FaultRecord) -> bool:
        """Whether a record speaks of this cluster: two of them may share a spool."""
        return not record.cluster or record.cluster == self.cluster

    # -- attempts ---------------------------------------------------------------------------

    def attempts(self, can: Sequence[Ready]) -> list[Decision]:
        """Decide on attempts that can be decided on; who is hit by one cause is seen first."""
        states = self._scheduler.nodes({node for ready in can for node in ready.nodes})
        told: list[tuple[Ready, incident.Incident, Cause]] = []
        for ready in can:
            case = self.case_of(ready, states)
            if case.requeued and not (case.lost or case.gated or ready.job.held_by_expedite):
                # A person's requeue, or one whose reason Slurm alone knows: left to them.
                self._watch.forget(ready)
                continue
            cause = causes.of(case)
            self.fleets.note_case(case, cause)
            told.append((ready, case, cause))
        made: list[Decision] = []
        for ready, case, cause in told:
            if self.fleets.waits(case, cause):
                continue
            assert case.attempt is not None
            made.append(self.decide(case, self.earlier(ready.job, case.attempt)))
            self._watch.settle(ready, self._clock())
        return made

    def case_of(
        self, ready: Ready, states: Mapping[str, Node], former: Decision | None = None
    ) -> incident.Incident:
        """Return all evidence about an ended attempt, once more where ``former`` has judged it."""
        job, now = ready.job, self._clock()
        attempt = self.attempt_of(job, ready.restart)
        known = seconds_of(former.time) if former else now
        ended = known if ready.requeued else float(job.end_time or known)
        if job.held_by_expedite:
            ended = float(job.submit_time)  # renewed when the attempt ended (measured on 26.05)
        records = self._records(ready.nodes, ended - incident.BEFORE_END_SECONDS)
        if former is not None:
            records = [record for record in records if late.belongs(record, former)]
        nodes = [states[name] for name in ready.nodes if name in states]
        hang = self._hangs.at_end(job, ended)
        open_to_doubt = {one.node for one in records if incident.wants_an_owner(one, ended)}
        return incident.of_attempt(
            *(attempt, job, ready.nodes, records, ended, nodes, utc(now)),
            hang=hang,
            reused=self._begun_on(open_to_doubt, ready, ended) if open_to_doubt else {},
        )

    def _begun_on(self, nodes: set[str], ready: Ready, since: float) -> dict[str, float]:
        """When others began on those of ``nodes``; their hooks may not have spoken.

        Slurm's times are whole seconds, and what is seen in the first is none of their doing yet.
        """
        own = {(job, ready.restart) for job in (ready.job.id, *ready.job.het_parts)}
        if self._all_jobs is None:
            self._all_jobs = self._scheduler.jobs()
        begun = dict[str, float]()
        for job in self._all_jobs.values():
            if job.start_time >= since and (job.id, job.restarts) not in own:
                for node in nodes.intersection(job.nodes):
                    begun[node] = min(begun.get(node, math.inf), job.start_time + 1.0)
        return begun

    def running(self, found: Sequence[Found]) -> list[Decision]:
        """Decide on jobs that hang or are slow; of each kind once for an attempt."""
        told = [(one, case) for one in found if (case := self._of_running(one)) is not None]
        for _, case in told:
            self.fleets.note_case(case, causes.of(case))
        made = []
        for one, case in told:
            assert case.attempt is not None
            made.append(self.decide(case, self.earlier(one.job, case.attempt)))
        for one in found:
            self._hangs.settle(one)
        return made

    def _of_running(self, found: Found) -> incident.Incident | None:
        job, now = found.job, self._clock()
        attempt = self.attempt_of(job, job.restarts)
        known = self._ledger.store.job_decisions(attempt.cluster, job.id, job.uid)
        kinds = [d.cause.fault_class == "slowdown" for d in known if d.attempt == attempt]
        if (found.slowdown is not None) in kinds:
            return None
        stopped = found.hang.stall.since if found.hang else now
        records = self._records(job.nodes, stopped - incident.BEFORE_END_SECONDS)
        states = self._scheduler.nodes(job.nodes).values()
        return incident.of_attempt(
            *(attempt, job, job.nodes, records, now, states, utc(now)),
            hang=found.hang,
            slowdown=found.slowdown,
        )

    def is_decided(self, job: Job, restart: int) -> bool:
        """Whether the job's attempt has its decision; a requeue has changed the job's own key."""
        attempt = self.attempt_of(job, restart)
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

    def attempt_of(self, job: Job, restart: int) -> Attempt:
        """Return the job's attempt with that restart count; a later one's SLUID is not its own."""
        sluid = job.sluid if restart == job.restarts else None
        return Attempt(self.cluster, job.id, restart, job.submit_time, sluid)

    def earlier(self, job: Job, attempt: Attempt) -> tuple[Decision, ...]:
        """Return the decisions on the job's former attempts that still hold, oldest first."""
        known = self._ledger.store.job_decisions(attempt.cluster, job.id, job.uid)
        revised = {one.revises for one in known}
        return tuple(
            one
            for one in known
            if one.settles and policy.same_attempt(one, attempt) and one.id not in revised
        )

    def _records(self, nodes: Iterable[str], since: float) -> list[FaultRecord]:
        until = utc(self._clock() + _DAY_SECONDS)
        seen = self._ledger.store.records(tuple(nodes), utc(since), until)
        return [record for record in seen if self.is_of_this_cluster(record)]

    # -- nodes ------------------------------------------------------------------------------

    def sick_nodes(self) -> list[Decision]:
        """Decide on nodes that report a fault of their own, each fault once a day.

        A node that one cause has hit with many others is listed by their decision, and has none of
        its own unless it names a part of it that is broken.
        """
        states = self._scheduler.nodes(sorted(self._sick))
        made = []
        for name, record in sorted(self._sick.items()):
            if self._watch.names(name):
                continue  # its job's decision will speak of it first
            if name not in states or self._is_known(record, states[name]):
                del self._sick[name]
                continue
            case = incident.of_node(record, states[name].partitions, utc(self._clock()))
            cause = causes.of(case)
            if self.fleets.waits(case, cause):
                continue
            del self._sick[name]
            event = self.fleets.event_of(case, cause)
            if event is None or names_a_part(cause):
                made.append(self.decide(case, ()))
        return made

    def _is_known(self, record: FaultRecord, node: Node) -> bool:
        """Whether a decision of the last day names this node for what the record shows.

        A lost GPU shows as several codes, one after the other: one of them told is enough. What
        was told before the node returned to service, by us or by a person, is told again: whoever
        says that it is mended, its next check has the last word. Slurm does not tell when a person
        has returned a node, so a record is such a check only where the node was seen in service
        before it.
        """
        codes = {finding.code for finding in record.findings if incident.opens_incident(finding)}
        since = utc(self._clock() - _DAY_SECONDS)
        back = self._in_service.get(record.node)
        is_news = back is not None and back < record.time
        for known in self._ledger.store.decisions(node=record.node, since=since):
            returned = [a for a in known.actions if (a.kind, a.state) == ("return", "verified")]
            if returned:
                return record.time < returned[0].time
            if any(i.node == record.node and i.code in codes for i in known.cause.implicated):
                return node.drained or not (is_news and _was_out(known, record))
        return False

    # -- the decision -----------------------------------------------------------------------

    def decide(self, case: incident.Incident, earlier: tuple[Decision, ...]) -> Decision:
        """Decide, and record the decision with its actions: planned, or only recorded."""
        now, mode = self._clock(), self._config.mode
        history = self.history(case, earlier, now)
        return self.planned(policy.decide(case, history, self._config.policy, now, mode))

    def planned(
        self, decision: Decision, kept: Callable[[Action], str] = lambda action: ""
    ) -> Decision:
        """Record a decision with its actions, each planned where it may be taken.

        ``kept`` says of an action why what it is for is left as it is, and nothing where it is not.
        """
        now, mode = self._clock(), self._config.mode
        pauses = self._ledger.store.pauses()
        planned: list[Action] = []
        limited: list[str] = []
        for action in actions.intents(decision, utc(now)):
            why = guard.refusal(action, decision, mode, self.standings)
            why = why or pausing.refusal(action, decision, pauses)
            why = why or kept(action)
            planned.append(replace(action, state="recorded", detail=why) if why else action)
            limited += [f"{action.name}: {why}"] if why else []
        decision = replace(decision, actions=tuple(planned), limited_by=tuple(limited))
        self._ledger.decided(decision)
        return decision

    def history(
        self, case: incident.Incident, earlier: tuple[Decision, ...], now: float, besides: str = ""
    ) -> History:
        """Return what bears on ``case`` of what came before, the decision ``besides`` apart."""
        suspects = self._upkeep.suspects() if case.job else {}
        history = precedents.of(self._ledger.store, case, earlier, suspects, now, besides)
        return replace(history, fleet=self.fleets.event_of(case, causes.of(case)))


def _was_out(known: Decision, record: FaultRecord) -> bool:
    """Whether a decision had its node drained, or found it so, before ``record`` was written."""
    return any(
        (one.kind, one.target) == ("drain", record.node)
        and (one.state == "verified" or one.detail.startswith(guard.TAKEN))
        and one.time < record.time
        for one in known.actions
    )
