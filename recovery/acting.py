"""Bring the open actions of decisions forward, and follow decisions to their outcome.

Owns when the scheduler is looked at for it, and the circuit breaker; what one step does is
``actions``', what a look means ``outcome``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from recovery import actions, guard
from recovery.decision import FINAL_ACTIONS, Decision
from recovery.ledger import Ledger
from recovery.outcome import outcomes
from recovery.slurm.base import Job, Node, Scheduler
from slurm_hooks.config import Guard
from slurm_hooks.record import seconds_of, utc

OUTCOME_SECONDS = 2.0
YOUNG_SECONDS = 30.0
"""How often a restarted job is looked at by name, and for how long after its decision or a record
that names it; from then on the full looks that are made anyway tell of it."""

_DAY_SECONDS = 86400.0


class Acting:
    """Acts for one aggregator; ``clock`` returns seconds since the epoch."""

    def __init__(
        self, scheduler: Scheduler, ledger: Ledger, limits: Guard, clock: Callable[[], float]
    ) -> None:
        self._scheduler, self._ledger, self._limits = scheduler, ledger, limits
        self._clock = clock
        self._outcomes_due = 0.0
        self._heard: dict[int, float] = {}

    def act(self) -> bool:
        """Take every step that needs no waiting; return whether something is left to be done.

        Raises:
            SchedulerUnavailable: Slurm did not answer; the next call goes on from where this was.
        """
        while open_decisions := self._with_open_actions():
            jobs, nodes = self._look(open_decisions)
            moved = [self._advance(decision, jobs, nodes) for decision in open_decisions]
            if not any(moved):
                return True
        return False

    def follow(self, named_jobs: Collection[int], snapshot: Mapping[int, Job] | None) -> None:
        """Look what became of restarted jobs.

        All of them are looked up in ``snapshot`` where there is one; else only those that have
        just been restarted, or that records have just named, are asked for.

        Raises:
            SchedulerUnavailable: Slurm did not answer.
        """
        now = self._clock()
        waiting = [one for one in self._ledger.store.open_decisions() if one.awaits_outcome]
        self._heard.update(dict.fromkeys(named_jobs, now))
        self._heard = {job: time for job, time in self._heard.items() if _is_young(now - time)}
        jobs: Mapping[int, Job] = snapshot or {}
        if snapshot is None:
            young = {
                one.attempt.job_id
                for one in waiting
                if one.attempt
                and (_is_young(now - seconds_of(one.time)) or one.attempt.job_id in self._heard)
            }
            # A clock that was set back must not put this off by as much.
            due = not 0 < self._outcomes_due - now <= OUTCOME_SECONDS
            if not young or (young.isdisjoint(named_jobs) and not due):
                return
            self._outcomes_due = now + OUTCOME_SECONDS
            waiting = [one for one in waiting if one.attempt and one.attempt.job_id in young]
            jobs = self._scheduler.jobs(young)
        for decision in waiting:
            self._follow(decision, jobs, now)

    def _follow(self, decision: Decision, jobs: Mapping[int, Job], now: float) -> None:
        attempt, store = decision.attempt, self._ledger.store
        if attempt is None:
            return
        job = jobs.get(attempt.job_id)
        if job and not decision.outcome and actions.excluded_in_vain(job, decision):
            restart = next(one for one in decision.actions if one.kind == "requeue")
            # Taken up again: what is to be done about it is an action's own affair.
            self._ledger.acted(decision, replace(restart, state="done", time=utc(now)))
            return
        known = store.job_decisions(attempt.cluster, attempt.job_id, decision.uid)
        following = next(
            (one.id for one in known if one.attempt and one.attempt.restart == attempt.restart + 1),
            "",
        )
        records = store.job_records(attempt.job_id, since=decision.time)
        if job:
            records += store.records(job.nodes, decision.time, utc(now + _DAY_SECONDS))
        for new in outcomes(decision, job, records, now, following):
            decision = decision.with_outcome(new)
            self._ledger.ended(decision, new)

    def _with_open_actions(self) -> list[Decision]:
        return [
            decision
            for decision in self._ledger.store.open_decisions()
            if any(action.state not in FINAL_ACTIONS for action in decision.actions)
        ]

    def _look(
        self, decisions: Collection[Decision]
    ) -> tuple[Mapping[int, Job], Mapping[str, Node]]:
        """One fresh look for all of them: their jobs, and all nodes where those are needed.

        That is for a drain, and before a job is requeued off some nodes.
        """
        job_ids = {decision.attempt.job_id for decision in decisions if decision.attempt}
        nodes_matter = any(
            action.kind == "drain"
            or (action.kind == "requeue" and not action.step and decision.job.excluded)
            for decision in decisions
            for action in decision.actions
            if action.state not in FINAL_ACTIONS
        )
        nodes = self._scheduler.nodes() if nodes_matter else {}
        return (self._scheduler.jobs(job_ids) if job_ids else {}), nodes

    def _advance(
        self, decision: Decision, jobs: Mapping[int, Job], nodes: Mapping[str, Node]
    ) -> bool:
        """Advance the first open action of a decision by one step; return whether it moved."""
        action = next(one for one in decision.actions if one.state not in FINAL_ACTIONS)
        if action.kind == "drain" and not action.step:
            if self._drain_under_way():
                return False  # the guard counts what a fresh look shows: one drain at a time
            why = self._drain_refusal(action.target, nodes)
            if why:
                self._ledger.acted(decision, replace(action, state="abandoned", detail=why))
                return True
        job = jobs.get(decision.attempt.job_id) if decision.attempt else None
        view = actions.View(job, nodes)
        after = actions.advance(action, decision, view, self._scheduler, self._clock())
        if after == action:
            return False
        self._ledger.acted(decision, after)
        return True

    def _drain_under_way(self) -> bool:
        return any(
            action.kind == "drain" and action.step and action.state not in FINAL_ACTIONS
            for decision in self._with_open_actions()
            for action in decision.actions
        )

    def _drain_refusal(self, node: str, nodes: Mapping[str, Node]) -> str:
        """Why the guard forbids a drain; the first time it does, the circuit breaker opens."""
        if node in nodes and nodes[node].drained:
            return ""  # nothing will be drained that is not already
        breaker = self._ledger.store.breakers().get("drain")
        if breaker and breaker.tripped:
            return f"the circuit breaker is open since {breaker.time}: {breaker.why}"
        why = guard.drain_refusal(node, nodes, self._limits)
        if why:
            self._ledger.tripped("drain", why)
        return why


def _is_young(seconds: float) -> bool:
    return 0 <= seconds < YOUNG_SECONDS
