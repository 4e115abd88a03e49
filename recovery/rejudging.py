"""Decisions judged again: for evidence that came late, or since their cause has hit many.

Owns which earlier decisions are looked at once more, and that what a command was sent for stands:
it gets an addendum, anything else gives way to a new decision. Whether the answer is another one is
``late``'s to say, how it is found ``deciding``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from recovery import fleet, late, policy
from recovery import incident as incidents
from recovery.deciding import Deciding
from recovery.decision import Decision, Member
from recovery.fleet import Membership
from recovery.incident import Incident
from recovery.ledger import Ledger
from recovery.slurm.base import Job, Scheduler
from recovery.watch import Ready
from slurm_hooks import optin
from slurm_hooks.config import Config
from slurm_hooks.record import seconds_of, utc

_ALONE_LIMIT = 20
"""Decisions on one job or node that are searched for the one that an event has overtaken."""


class Rejudging:
    """Judges again for one aggregator; ``clock`` returns seconds since the epoch."""

    def __init__(
        self,
        config: Config,
        scheduler: Scheduler,
        ledger: Ledger,
        deciding: Deciding,
        clock: Callable[[], float],
    ) -> None:
        self._config, self._scheduler, self._ledger = config, scheduler, ledger
        self._deciding, self._clock = deciding, clock

    def reopen(self, ready: Ready) -> list[Decision]:
        """Judge an attempt again for late evidence; what was acted on gets an addendum instead."""
        attempt = self._deciding.attempt_of(ready.job, ready.restart)
        former = self._ledger.store.attempt_decision(attempt.key)
        if former is None:
            return []
        event = self._ledger.store.decision(former.fleet) if former.fleet else None
        again = self._again(self._of_attempt(ready, former), former, event)
        if late.same_answer(former, again):
            return []
        if not former.acted_on:
            return [self._deciding.planned(again, lambda action: late.kept(former, action))]
        self._add(former, late.addendum(again))
        return []

    def first_hits(self) -> list[Decision]:
        """Take into an event who was decided on by itself before enough were hit to see it.

        Raises:
            SchedulerUnavailable: Slurm did not answer; the next call goes on from here.
        """
        made: list[Decision] = []
        for event_id in self._deciding.fleets.begun():
            event = self._ledger.store.decision(event_id)
            for member in event.members if event else ():
                former = None if member.decision else self._alone(event, member)
                if event is not None and former is not None:
                    made += self._taken_in(former, event)
            self._deciding.fleets.taken_in(event_id)
        return made

    def _alone(self, event: Decision | None, member: Member) -> Decision | None:
        """The decision that a member got by itself, for the same and within the event's window."""
        if event is None:
            return None
        since = utc(seconds_of(member.time) - self._config.fleet.window)
        kind, _, name = member.subject.partition(" ")
        known = (
            self._ledger.store.decisions(job=name, since=since, limit=_ALONE_LIMIT)
            if kind == "job"
            else self._ledger.store.decisions(node=name, since=since, limit=_ALONE_LIMIT)
        )
        for one in known:
            job = str(one.attempt.job_id) if one.attempt else ""  # a task's, not its whole array's
            about = job == name if kind == "job" else one.incident == f"node/{name}"
            same = fleet.of_cause(one.cause) == event.cause.fingerprint
            if about and same and not (one.fleet or one.revised_by or one.gated):
                return one
        return None

    def _taken_in(self, former: Decision, event: Decision) -> list[Decision]:
        case = self._case(former)
        again = self._again(case, former, event) if case else None
        if again is not None and not former.acted_on:
            made = self._deciding.planned(again, lambda _: late.is_over(former))
            self._ledger.publish_again(event.id)
            return [made]
        self._add(former, late.as_one_of_many(event, again))
        self._ledger.joined(event.id, [fleet.member_of(former)])
        return []

    def _case(self, former: Decision) -> Incident | None:
        """What ``former`` was decided on, as it stands now; None where others have moved on."""
        attempt = former.attempt
        if attempt is None:
            return self._as_decided(former, None)
        job = self._scheduler.jobs((attempt.job_id,)).get(attempt.job_id)
        if job is None or job.uid != former.uid:
            return None
        if former.running:
            still = job.state == "RUNNING" and job.restarts == attempt.restart
            # What else than a restart was said of a job that runs is said of it in an event too.
            return self._as_decided(former, job) if still and _restarts(former) else None
        ended = job.pending if former.requeued else job.state in incidents.FAILED_STATES
        if not ended or job.restarts != attempt.restart + former.requeued:
            return None
        return self._of_attempt(Ready(job, former.job_nodes, attempt.restart), former)

    def _as_decided(self, former: Decision, job: Job | None) -> Incident:
        """An incident of the cause that was found then: nothing but the event is news."""
        return Incident(
            key=former.incident,
            time=utc(self._clock()),
            nodes=former.job_nodes or tuple(answer.node for answer in former.nodes),
            attempt=former.attempt,
            job=job,
            wishes=optin.parse(job.comment if job else ""),
            reported=former.job_nodes,
            checkpoint_step=former.checkpoint_step,
            progress_step=former.progress_step,
            partitions=tuple(former.partition.split(",")),
            gpus=former.gpus,
            known_cause=former.cause,
        )

    def _of_attempt(self, ready: Ready, former: Decision) -> Incident:
        return self._deciding.case_of(ready, self._scheduler.nodes(ready.nodes), former)

    def _again(self, case: Incident, former: Decision, event: Decision | None) -> Decision:
        """The decision that ``case`` gets now, in the place of ``former``."""
        now = self._clock()
        earlier = (
            self._deciding.earlier(case.job, case.attempt) if case.job and case.attempt else ()
        )
        history = self._deciding.history(case, earlier, now, besides=former.id)
        if event is not None:
            history = replace(history, fleet=_membership(event, history.fleet))
        again = policy.decide(case, history, self._config.policy, now, self._config.mode)
        if case.known_cause is not None:
            again = replace(again, evidence=former.evidence, ended=former.ended)
        return replace(again, revises=former.id)

    def _add(self, former: Decision, text: str) -> None:
        if text not in former.addenda:
            self._ledger.added(former, text)


def _membership(event: Decision, now: Membership | None) -> Membership:
    """The event as it is open now, which knows the nodes to avoid, else as it was recorded."""
    return now if now and now.decision == event.id else fleet.membership(event)


def _restarts(former: Decision) -> bool:
    return former.job.verdict == "requeue"
