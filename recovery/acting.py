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
from slurm_hooks.record import utc

OUTCOME_SECONDS = 2.0
"""How often a restarted job is looked at while its outcome is open and no record names it."""

_DAY_SECONDS = 86400.0


class Acting:
    """Acts for one aggregator; ``clock`` returns seconds since the epoch."""

    def __init__(
        self, scheduler: Scheduler, ledger: Ledger, limits: Guard, clock: Callable[[], float]
    ) -> None:
        self._scheduler, self._ledger, self._limits = scheduler, ledger, limits
        self._clock = clock
        self._outcomes_due = 0.0

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

    def follow(self, named_jobs: Collection[int]) -> None:
        """Look what became of restarted jobs: at once of ``named_jobs``, else now and then.

        Raises:
            SchedulerUnavailable: Slurm did not answer.
        """
        now, store = self._clock(), self._ledger.store
        waiting = {
            d.attempt.job_id: d for d in store.open_decisions() if d.awaits_outcome and d.attempt
        }
        if not waiting or (waiting.keys().isdisjoint(named_jobs) and now < self._outcomes_due):
            return
        self._outcomes_due = now + OUTCOME_SECONDS
        jobs = self._scheduler.jobs(waiting.keys())
        for job_id, decision in waiting.items():
            job = jobs.get(job_id)
            hosts = job.nodes if job else ()
            records = store.records(hosts, decision.time, utc(now + _DAY_SECONDS))
            for new in outcomes(decision, job, records, utc(now)):
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
        """One fresh look for all of them: their jobs, and all nodes where one is to be drained."""
        job_ids = {decision.attempt.job_id for decision in decisions if decision.attempt}
        drains = any(
            action.kind == "drain" and action.state not in FINAL_ACTIONS
            for decision in decisions
            for action in decision.actions
        )
        nodes = self._scheduler.nodes() if drains else {}
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
