"""Acting: intent, command, verification, so that a crash repeats nothing and loses nothing.

``advance`` moves one action by at most one command and returns it in its new state; the caller has
journaled the state it was given, and journals the one it gets back before it calls again. So the
step that is about to run is durable before it runs, and what a step did is found out by a fresh
look at the scheduler, never by memory:

    planned, no step    nothing has been sent
    planned, a step     that command is about to run, or ran before a crash
    done                every command has run
    verified            the scheduler shows what was wanted

A job is touched only while it is the attempt decided on, in the state decided on. A node that
anybody else has drained stays as they left it, and only what we drained returns. Between the look
and the command lies one command's time; Slurm offers no compare-and-set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from recovery import node_actions, slurm_texts
from recovery.decision import NODE_ACTIONS, Action, ActionKind, Decision
from recovery.guard import OUR_REASON
from recovery.incident import FAILED_STATES
from recovery.room import too_few
from recovery.slurm.base import CommandRefused, Job, Scheduler
from recovery.view import View
from slurm_hooks.record import seconds_of, utc

RESTART_GAP_SECONDS = 1.0
"""Least time between the previous attempt's end and its start: restarted within the same second,
4 of 9 new attempts died at once on 24.11, with this second between them 0 of 18 (measured)."""

GIVE_UP_SECONDS = 300.0
"""An action that could not be brought to its end for so long is handed to a person."""

CONSIDERED_SECONDS = 10.0
"""How long after it has become eligible a pending job may stay without a word of the scheduler's.

Nodes excluded in vain show as BadConstraints 0.5-1 s after the update (22.05), but a scheduler with
a long queue may not come to a job for minutes; what it says later is still seen (``acting``)."""

_NOT_CONSIDERED = ("", "None", "BeginTime")
"""Reasons of a pending job that the scheduler has not looked at since it became eligible."""

_UNLISTED = "_unlisted"
"""Ending of a step that leaves ExcNodeList alone: the nodes are drained, and all are needed."""

_STARTED = frozenset(("RUNNING", "CONFIGURING", "COMPLETED", "SUSPENDED"))
_LIVE = _STARTED | {"COMPLETING"}


def intents(decision: Decision, now: str) -> tuple[Action, ...]:
    """Return the actions that a decision asks for: drains first, so that nothing restarts there."""
    drains = [
        Action("drain", answer.node, "planned", now)
        for answer in decision.nodes
        if answer.verdict == "drain"
    ]
    returns = [
        Action("return", answer.node, "planned", now)
        for answer in decision.nodes
        if answer.verdict == "return"
    ]
    job: list[Action] = []
    if decision.job.verdict in ("requeue", "hold"):
        kind: ActionKind = "release" if decision.gated else decision.job.verdict
        job.append(Action(kind, decision.job_target, "planned", now))
    return (*drains, *returns, *job)


def advance(
    action: Action, decision: Decision, view: View, scheduler: Scheduler, now: float
) -> Action:
    """Move ``action`` one command further, or say why it cannot be; see the module's table.

    Raises:
        SchedulerUnavailable: nothing is known of a command that may or may not have run; the
            action stays as it is and is looked at again.
    """
    if now - seconds_of(action.time) > GIVE_UP_SECONDS and action.state in ("planned", "done"):
        what = f"not done within {GIVE_UP_SECONDS:g} s, {action.detail or 'no progress'}"
        return replace(action, state="failed", detail=f"{what}: a person has to look")
    steps: Mapping[str, Callable[[Action, Decision, View, Scheduler, float], Action]] = {
        "drain": node_actions.drain,
        "requeue": _requeue,
        "release": _release,
        "hold": _hold,
        "return": node_actions.put_back,
    }
    try:
        return steps[action.kind](action, decision, view, scheduler, now)
    except CommandRefused as refused:
        if _has_moved_on(action, view, scheduler):
            return action
        return replace(action, state="failed", detail=f"Slurm refused {action.step}: {refused}")


def _has_moved_on(action: Action, view: View, scheduler: Scheduler) -> bool:
    """Whether the target no longer is what it was at the look: the refusal is of what was then.

    A pending job may start between the look and the command ("Job is no longer pending").
    """
    if action.kind in NODE_ACTIONS:
        return scheduler.nodes([action.target]).get(action.target) != view.nodes.get(action.target)
    seen = view.job
    now = scheduler.jobs([seen.id]).get(seen.id) if seen else None
    return seen is None or now is None or _standing(now) != _standing(seen)


def _standing(job: Job) -> tuple[object, ...]:
    return job.state, job.flags, job.restarts, job.held


# -- requeue --------------------------------------------------------------------------------


def _requeue(
    action: Action, decision: Decision, view: View, scheduler: Scheduler, now: float
) -> Action:
    job, attempt = view.job, decision.attempt
    if job is None or attempt is None:
        return replace(action, state="abandoned", detail="Slurm no longer knows the job")
    if job.restarts == attempt.restart and _is_the_failed_one(job, decision):
        if not action.step:
            return _first_step("requeue", action, decision, job, view)
        scheduler.requeue(action.target)
        return action
    if decision.running and action.step and "COMPLETING" in job.flags:
        return action
    ours = bool(action.step) or decision.requeued
    if not ours or job.restarts != attempt.restart + 1 or job.uid != decision.uid:
        return _superseded(action, job)
    if not action.step and job.pending:
        return _first_step("adopt", action, decision, job, view)
    waiting = action.step.removesuffix(_UNLISTED) in ("requeue", "gap")
    if decision.running and waiting and job.state not in _STARTED:
        # Its attempt ends with the requeue: only then does the gap before the next one begin.
        if not job.pending:
            return action
        if action.step.startswith("requeue"):
            step = action.step.replace("requeue", "gap")
            return replace(action, step=step, detail=utc(now))
        if now < seconds_of(action.detail) + RESTART_GAP_SECONDS:
            return action
    return _start(action, decision, job, scheduler, now)


def _first_step(step: str, action: Action, decision: Decision, job: Job, view: View) -> Action:
    """Say whether the job can run off the excluded nodes, before anything is sent.

    Where it cannot, a drain keeps it off them as well: it then waits for their return.
    """
    excluded = decision.job.excluded
    why = too_few(job, excluded, view.nodes, view.reserved) if excluded else ""
    if not why:
        return replace(action, step=step)
    if all(node in view.nodes and view.nodes[node].drained for node in excluded):
        detail = f"{why}, which is drained: it waits for its return"
        return replace(action, step=step + _UNLISTED, detail=detail)
    return replace(action, state="abandoned", detail=f"{why}: it stays as it ended")


def _start(
    action: Action, decision: Decision, job: Job, scheduler: Scheduler, now: float
) -> Action:
    """The job is back in the queue: make it eligible now, off the nodes named, and verify it.

    What Slurm itself holds is released after that.
    """
    unlisted = action.step.endswith(_UNLISTED)
    added = () if unlisted else decision.job.excluded
    wanted = tuple(sorted({*job.excluded, *added}))
    if job.state in _LIVE:
        left = set(decision.job.excluded) & set(job.nodes)
        detail = f"running on {','.join(job.nodes)}" if not left else "started on a node named"
        return replace(action, state="verified", detail=detail)
    if job.state == "CANCELLED":
        return replace(action, state="abandoned", detail="cancelled by somebody since")
    if job.state in FAILED_STATES:
        return replace(action, state="verified", detail=f"started, and has ended {job.state}")
    if not job.pending:
        return action
    if action.step == "give_back" or excluded_in_vain(job, decision):
        return _give_back(action, decision, job, scheduler)
    if job.held and not (decision.requeued and job.held_by_slurm):
        detail = f"held by somebody since ({job.reason})"
        return replace(action, state="abandoned", detail=detail)
    if job.reason == "BadConstraints":
        detail = "the nodes do not satisfy the job's own constraints (BadConstraints)"
        return replace(action, state="failed", detail=detail)
    if action.state == "done" and set(wanted) <= set(job.excluded):
        silent = job.reason in _NOT_CONSIDERED and now - job.eligible_time < CONSIDERED_SECONDS
        listed = f", off {','.join(wanted)}" if wanted else ""
        detail = action.detail if unlisted else f"eligible at once{listed}"
        return action if silent else replace(action, state="verified", detail=detail)
    if 0 < _earliest_start(decision) - now <= RESTART_GAP_SECONDS + 1:
        return action  # by more only where the clock was set back since
    if action.step.startswith("release"):
        if job.held:
            scheduler.release(action.target)
        return replace(action, state="done")
    ending = _UNLISTED if unlisted else ""
    if not action.step.startswith("start"):
        return replace(action, step="start" + ending)
    scheduler.start_now(action.target, wanted)
    return replace(action, step="release" + ending) if job.held else replace(action, state="done")


def excluded_in_vain(job: Job, decision: Decision) -> bool:
    """Whether Slurm finds no node for a waiting job since ``decision`` excluded some."""
    ours = set(decision.job.excluded) & set(job.excluded)
    return job.pending and job.reason == "BadConstraints" and bool(ours)


def _give_back(action: Action, decision: Decision, job: Job, scheduler: Scheduler) -> Action:
    """Put the job's own ExcNodeList back, and keep it held for its owner, who is told why.

    Slurm has taken its priority already (measured); held by a command, it says by whom, and with
    its own list back it does not start before somebody wants it to.
    """
    ours = f"{OUR_REASON} {decision.id}:"
    why = f"no node is left for it without {', '.join(decision.job.excluded)} (BadConstraints)"
    if action.step != "give_back":
        return replace(action, state="planned", step="give_back")
    if job.reason == "BadConstraints":
        scheduler.hold(action.target)
        return action
    if not job.held:
        return replace(action, state="abandoned", detail=f"{why}; released by somebody since")
    own = tuple(node for node in job.excluded if node not in decision.job.excluded)
    if own != job.excluded or not job.admin_comment.startswith(ours):
        text = f"{ours} {decision.cause.summary}; {why}. Its own list of excluded nodes is back."
        how = f"To run it all the same: scontrol release {decision.job_target}"
        scheduler.explain_hold(action.target, f"{text} {how}", own)
        return action
    return replace(action, state="failed", detail=f"{why}: its list is put back, and it is held")


def _earliest_start(decision: Decision) -> float:
    """A second after the previous attempt's end, which lies before the decision.

    Slurm cuts its end time to the second, hence one more where that is the earlier of the two.
    """
    decided = seconds_of(decision.time)
    ended = seconds_of(decision.ended_time) + 1 if decision.ended_time else decided
    return min(ended, decided) + RESTART_GAP_SECONDS


# -- release ----------------------------------------------------------------------------------


def _release(
    action: Action, decision: Decision, view: View, scheduler: Scheduler, now: float
) -> Action:
    """Release a job that Slurm requeued and held because our gate failed its Prolog.

    Off the gated nodes and eligible first, then released: it starts elsewhere within seconds.
    """
    job, attempt = view.job, decision.attempt
    if job is None or attempt is None:
        return replace(action, state="abandoned", detail="Slurm no longer knows the job")
    if job.restarts != attempt.restart + 1 or job.uid != decision.uid:
        return _superseded(action, job)
    if not action.step and job.pending:
        if not job.held:
            return replace(action, state="abandoned", detail="somebody has released it already")
        return _first_step("adopt", action, decision, job, view)
    return _start(action, decision, job, scheduler, now)


# -- hold -----------------------------------------------------------------------------------


def _hold(
    action: Action, decision: Decision, view: View, scheduler: Scheduler, now: float
) -> Action:
    job, attempt = view.job, decision.attempt
    if job is None or attempt is None:
        return replace(action, state="abandoned", detail="Slurm no longer knows the job")
    by_us = f"{OUR_REASON} {decision.id}:"
    if job.restarts == attempt.restart and _is_the_failed_one(job, decision):
        if action.step != "requeue_hold":
            return replace(action, step="requeue_hold")
        scheduler.requeue_hold(action.target)
        return action
    ours = bool(action.step) or (decision.requeued and job.held_by_slurm)
    if not ours or job.restarts > attempt.restart + 1 or job.uid != decision.uid:
        return _superseded(action, job)
    if job.admin_comment.startswith(by_us):
        return replace(action, state="verified", detail=f"{job.state}, held for its owner")
    if job.state in ("RUNNING", "SUSPENDED", "COMPLETED"):
        return replace(action, state="abandoned", detail="released by somebody already")
    if not job.held:
        return action
    if action.step != "comment":
        return replace(action, step="comment")
    scheduler.explain_hold(action.target, slurm_texts.hold_comment(decision))
    return replace(action, state="done")


def _superseded(action: Action, job: Job) -> Action:
    """Somebody else has moved the job on: what was decided is about an attempt that is history."""
    detail = f"superseded: the job is {job.state} with {job.restarts} restarts"
    return replace(action, state="abandoned", detail=detail)


def _is_the_failed_one(job: Job, decision: Decision) -> bool:
    """Whether this is the attempt decided on, still lying as it ended, or still running."""
    attempt = decision.attempt
    if decision.running:
        return attempt is not None and job.state == "RUNNING" and job.uid == decision.uid
    return (
        attempt is not None
        and job.state in FAILED_STATES
        and job.uid == decision.uid
        and (not job.end_time or utc(job.end_time) == decision.ended_time)
    )
