"""Bring the open actions of decisions forward, and follow decisions to their outcome.

Owns when the scheduler is looked at for it, what goes into one command, and the circuit
breakers; what one step does is ``actions``', what a look means ``outcome``'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from recovery import actions, guard, node_actions, pausing, slurm_texts
from recovery.decision import FINAL_ACTIONS, NODE_ACTIONS, RESTART_ACTIONS, Action, Decision
from recovery.ledger import Ledger
from recovery.outcome import outcomes
from recovery.slurm.base import CommandRefused, Job, Node, Scheduler
from recovery.store import Command
from recovery.view import View
from slurm_hooks.config import Guard
from slurm_hooks.record import seconds_of, utc

log = logging.getLogger("recovery.acting")

OUTCOME_SECONDS = 2.0
YOUNG_SECONDS = 30.0
"""How often a restarted job is looked at by name, and for how long after its decision or a record
that names it; from then on the full looks that are made anyway tell of it."""

CLOCK_JUMP_SECONDS = 30.0
"""By so much more than passed the clock is set, and did not merely drift."""

_HOUR_SECONDS = 3600.0
_DAY_SECONDS = 86400.0

JOB_ACTIONS = (*RESTART_ACTIONS, "hold")
"""Kinds of action on a job: one of them is in flight for a job at a time."""


@dataclass(frozen=True)
class _Seen:
    """One look at Slurm: jobs by id, nodes by name, and the nodes of reservations by name."""

    jobs: Mapping[int, Job]
    nodes: Mapping[str, Node]
    reserved: Mapping[str, Collection[str]]

    def of(self, decision: Decision) -> View:
        return View(_job_of(decision, self.jobs), self.nodes, self.reserved)


class Acting:
    """Acts for one aggregator; ``clock`` returns seconds since the epoch."""

    def __init__(
        self, scheduler: Scheduler, ledger: Ledger, limits: Guard, clock: Callable[[], float]
    ) -> None:
        self._scheduler, self._ledger, self._limits = scheduler, ledger, limits
        self._clock = clock
        self._outcomes_due = 0.0
        self._heard: dict[int, float] = {}
        self._last_looked = (clock(), time.monotonic())

    def act(self) -> bool:
        """Take every step that needs no waiting; return whether something is left to be done.

        Raises:
            SchedulerUnavailable: Slurm did not answer; the next call goes on from where this was.
        """
        self._mind_the_clock()
        while open_decisions := self._with_open_actions():
            seen = self._look(open_decisions)
            moved = [self._advance(decision, seen) for decision in open_decisions]
            if not any(moved):
                return True
        return False

    def _mind_the_clock(self) -> None:
        """Give each open action its time anew where the clock has been set forward.

        It would be given up for an hour that has not passed.
        """
        now, since_boot = self._clock(), time.monotonic()
        before, since_boot_before = self._last_looked
        self._last_looked = (now, since_boot)
        if now - before - (since_boot - since_boot_before) < CLOCK_JUMP_SECONDS:
            return
        for decision in self._with_open_actions():
            for action in decision.actions:
                if action.state not in FINAL_ACTIONS:
                    self._ledger.acted(decision, replace(action, time=utc(now)))

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
            restart = next(one for one in decision.actions if one.kind in RESTART_ACTIONS)
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

    def _look(self, decisions: Collection[Decision]) -> _Seen:
        """One fresh look for all of them: their jobs, and all nodes where those are needed.

        That is where a node is drained or returned, and before a job is restarted off some nodes;
        then reservations too, where such a job is to run within one.
        """
        job_ids = {decision.attempt.job_id for decision in decisions if decision.attempt}
        to_move = [one for one in decisions if _is_about_to_move(one)]
        nodes_matter = to_move or any(
            action.kind in NODE_ACTIONS
            for decision in decisions
            for action in decision.actions
            if action.state not in FINAL_ACTIONS
        )
        nodes = self._scheduler.nodes() if nodes_matter else {}
        jobs = self._scheduler.jobs(job_ids) if job_ids else {}
        reserved = any(job and job.reservation for job in (_job_of(one, jobs) for one in to_move))
        return _Seen(jobs, nodes, self._scheduler.reservations() if reserved else {})

    def _advance(self, decision: Decision, seen: _Seen) -> bool:
        """Advance the first open action of a decision by one step; return whether it moved."""
        action = next(one for one in decision.actions if one.state not in FINAL_ACTIONS)
        self._ledger.catch_up()  # a pause is in force before the next command
        paused = pausing.refusal(action, decision, self._ledger.store.pauses())
        if paused and action.state == "done":
            return self._verify_only(decision, action, seen.of(decision))
        if paused:
            self._ledger.acted(decision, replace(action, state="abandoned", detail=paused))
            return True
        if action.kind == "drain":
            return self._drain(decision, action, seen.nodes)
        if action.kind in JOB_ACTIONS and self._job_is_busy(decision):
            return False
        if action.kind in RESTART_ACTIONS and not action.step:
            why = self._requeue_refusal()
            if why:
                self._ledger.acted(decision, replace(action, state="abandoned", detail=why))
                return True
        return self._step(decision, action, seen.of(decision))

    def _verify_only(self, decision: Decision, action: Action, view: View) -> bool:
        """Every command was sent before the pause: see what came of them, and send no other."""
        stopped = pausing.Stopped(view.job, view.nodes)
        after = actions.advance(action, decision, view, stopped, self._clock())
        if after == action:
            return False
        self._ledger.acted(decision, after)
        return True

    def _step(self, decision: Decision, action: Action, view: View) -> bool:
        after = actions.advance(action, decision, view, self._scheduler, self._clock())
        if after == action:
            return False
        self._ledger.acted(decision, after)
        return True

    def _job_is_busy(self, decision: Decision) -> bool:
        """Whether an earlier decision still has an action under way on the same job."""
        attempt = decision.attempt
        return attempt is not None and any(
            other.attempt is not None
            and other.attempt.job_id == attempt.job_id
            and (other.time, other.id) < (decision.time, decision.id)
            and any(one.kind in JOB_ACTIONS for one in other.actions)
            for other in self._with_open_actions()
        )

    # -- drains -----------------------------------------------------------------------------

    def _drain(self, decision: Decision, action: Action, nodes: Mapping[str, Node]) -> bool:
        """Drain together what the decision drains for one reason: one command, not one a node."""
        group = self._drain_group(decision, action)
        view = View(None, nodes)
        if action.step and action.state == "planned" and len(group) > 1:
            waiting = [one for one in group if node_actions.drains_with_others(one, view)]
            if waiting and self._drained_together(decision, [one.target for one in waiting]):
                for one in waiting:
                    self._ledger.acted(decision, replace(one, state="done"))
                    decision = decision.with_action(replace(one, state="done"))
                return True
        if action.step:
            return self._step(decision, action, view)
        if self._drain_under_way():
            return False  # the guard counts what a fresh look shows: one command at a time
        admitted: list[str] = []
        for one in group:
            why = self._drain_refusal(one.target, nodes, admitted)
            if why:
                after = replace(one, state="abandoned", detail=why)
            else:
                after = actions.advance(one, decision, view, self._scheduler, self._clock())
                admitted += [one.target] if after.step else []
            if after != one:
                self._ledger.acted(decision, after)
                decision = decision.with_action(after)
        return True

    def _drained_together(self, decision: Decision, names: list[str]) -> bool:
        """Run the one command; where Slurm refuses it for one of them, each has its own."""
        try:
            self._scheduler.drain(names, slurm_texts.drain_reason(decision, names[0]))
        except CommandRefused as refused:
            log.warning("%s: %s; each is drained by itself", ",".join(names), refused)
            return False
        return True

    def _drain_group(self, decision: Decision, first: Action) -> list[Action]:
        """The open drains of a decision that stand like ``first`` and have its reason."""
        reason = slurm_texts.drain_reason(decision, first.target)
        return [
            one
            for one in decision.actions
            if (one.kind, one.state, one.step) == (first.kind, first.state, first.step)
            and slurm_texts.drain_reason(decision, one.target) == reason
        ]

    def _drain_under_way(self) -> bool:
        return any(
            action.kind == "drain" and action.step and action.state not in FINAL_ACTIONS
            for decision in self._with_open_actions()
            for action in decision.actions
        )

    # -- circuit breakers -------------------------------------------------------------------

    def _drain_refusal(self, node: str, nodes: Mapping[str, Node], besides: Collection[str]) -> str:
        if node in nodes and nodes[node].drained:
            return ""  # nothing will be drained that is not already
        hour = self._within_an_hour("drain")
        drained = {one.target for one in hour if one.state in ("done", "verified")}
        return self._breaker("drain") or self._tripped(
            "drain", guard.drain_refusal(node, nodes, self._limits, len(drained), besides)
        )

    def _requeue_refusal(self) -> str:
        ran = sum(
            one.state in ("done", "verified")
            for kind in RESTART_ACTIONS
            for one in self._within_an_hour(kind)
        )
        return self._breaker("requeue") or self._tripped(
            "requeue", guard.requeue_refusal(ran, self._limits)
        )

    def _within_an_hour(self, kind: str) -> list[Command]:
        since = utc(self._clock() - _HOUR_SECONDS)
        return self._ledger.store.commands_since(kind, since)

    def _breaker(self, kind: str) -> str:
        breaker = self._ledger.store.breakers().get(kind)
        if breaker and breaker.tripped:
            return f"the circuit breaker is open since {breaker.time}: {breaker.why}"
        return ""

    def _tripped(self, kind: str, why: str) -> str:
        """Open the circuit breaker of ``kind`` where there is a reason to; return the reason."""
        if why:
            self._ledger.tripped(kind, why)
        return why


def _job_of(decision: Decision, jobs: Mapping[int, Job]) -> Job | None:
    return jobs.get(decision.attempt.job_id) if decision.attempt else None


def _is_about_to_move(decision: Decision) -> bool:
    """Whether its job is about to be restarted off some nodes: whether enough are left is open."""
    return bool(decision.job.excluded) and any(
        action.kind in RESTART_ACTIONS and not action.step and action.state not in FINAL_ACTIONS
        for action in decision.actions
    )


def _is_young(seconds: float) -> bool:
    return 0 <= seconds < YOUNG_SECONDS
