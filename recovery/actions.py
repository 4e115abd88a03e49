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
anybody else has drained stays as they left it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from recovery.decision import Action, ActionKind, Decision
from recovery.guard import OUR_REASON, is_ours
from recovery.incident import FAILED_STATES
from recovery.slurm.base import CommandRefused, Job, Node, Scheduler
from slurm_hooks.record import seconds_of, utc

RESTART_GAP_SECONDS = 1.0
"""Least time between the previous attempt's end and its start: restarted within the same second,
4 of 9 new attempts died at once on 24.11, with this second between them 0 of 18 (measured)."""

GIVE_UP_SECONDS = 300.0
"""An action that could not be brought to its end for so long is handed to a person."""

_STARTED = frozenset(("RUNNING", "CONFIGURING", "COMPLETED", "SUSPENDED"))
_LIVE = _STARTED | {"COMPLETING"}


@dataclass(frozen=True)
class View:
    """A fresh look at what a decision's actions are about; a job or node may be missing."""

    job: Job | None
    nodes: Mapping[str, Node]


def intents(decision: Decision, now: str) -> tuple[Action, ...]:
    """Return the actions that a decision asks for: drains first, so that nothing restarts there."""
    drains = [
        Action("drain", answer.node, "planned", now)
        for answer in decision.nodes
        if answer.verdict == "drain"
    ]
    job: list[Action] = []
    if decision.job.verdict in ("requeue", "hold"):
        kind: ActionKind = "release" if decision.gated else decision.job.verdict
        job.append(Action(kind, decision.job_target, "planned", now))
    return (*drains, *job)


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
        "drain": _drain,
        "requeue": _requeue,
        "release": _release,
        "hold": _hold,
    }
    try:
        return steps[action.kind](action, decision, view, scheduler, now)
    except CommandRefused as refused:
        return replace(action, state="failed", detail=f"Slurm refused {action.step}: {refused}")


def reason_text(decision: Decision, node: str) -> str:
    """Return the drain reason: whose it is, which decision, and what a person wants to know."""
    why = next(answer.reason for answer in decision.nodes if answer.node == node)
    return f"{OUR_REASON} {decision.id}: {why}"


def comment_text(decision: Decision) -> str:
    """Return the AdminComment of a held job: the why, and how to go on."""
    release = f"Mend it, then: scontrol release {decision.job_target}"
    return f"{OUR_REASON} {decision.id}: {decision.job.reason}. {release}"


# -- drain ----------------------------------------------------------------------------------


def _drain(
    action: Action, decision: Decision, view: View, scheduler: Scheduler, now: float
) -> Action:
    node = view.nodes.get(action.target)
    if node is None:
        return replace(action, state="abandoned", detail="Slurm knows no such node")
    ours = f"{OUR_REASON} {decision.id}:"
    if node.drained and node.reason.startswith(ours):
        return replace(action, state="verified", detail=node.reason)
    if node.drained and is_ours(node.reason):
        return replace(action, state="verified", detail=f"drained already: {node.reason}")
    if node.drained or (node.reason and not is_ours(node.reason)):
        by = f"by {node.reason!r}" if node.reason else "without a reason"
        return replace(action, state="abandoned", detail=f"somebody else's already, {by}")
    if action.state == "done":
        detail = "undone by somebody: the node is in service again"
        return replace(action, state="abandoned", detail=detail)
    if action.step != "drain":
        return replace(action, step="drain")
    scheduler.drain([action.target], reason_text(decision, action.target))
    return replace(action, state="done")


# -- requeue --------------------------------------------------------------------------------


def _requeue(
    action: Action, decision: Decision, view: View, scheduler: Scheduler, now: float
) -> Action:
    job, attempt = view.job, decision.attempt
    if job is None or attempt is None:
        return replace(action, state="abandoned", detail="Slurm no longer knows the job")
    if job.restarts == attempt.restart and _is_the_failed_one(job, decision):
        if action.step != "requeue":
            return replace(action, step="requeue")
        scheduler.requeue(action.target)
        return action
    if decision.running and action.step and "COMPLETING" in job.flags:
        return action
    ours = bool(action.step) or decision.requeued
    if not ours or job.restarts != attempt.restart + 1 or job.uid != decision.uid:
        return _superseded(action, job)
    if decision.running and action.step in ("requeue", "gap") and job.state not in _STARTED:
        # Its attempt ends with the requeue: only then does the gap before the next one begin.
        if not job.pending:
            return action
        if action.step == "requeue":
            return replace(action, step="gap", detail=utc(now))
        if now < seconds_of(action.detail) + RESTART_GAP_SECONDS:
            return action
    return _start(action, decision, job, scheduler, now)


def _start(
    action: Action, decision: Decision, job: Job, scheduler: Scheduler, now: float
) -> Action:
    """The job is back in the queue: make it eligible now, off the nodes named, and verify it."""
    wanted = tuple(sorted({*job.excluded, *decision.job.excluded}))
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
    if job.held:
        detail = f"held by somebody since ({job.reason})"
        return replace(action, state="abandoned", detail=detail)
    if job.reason == "BadConstraints":
        detail = "the nodes left do not satisfy the job's own constraints (BadConstraints)"
        return replace(action, state="failed", detail=detail)
    if action.state == "done" and set(wanted) <= set(job.excluded) and job.eligible_time <= now + 1:
        listed = f", off {','.join(wanted)}" if wanted else ""
        return replace(action, state="verified", detail=f"eligible at once{listed}")
    if now < _earliest_start(decision):
        return action
    if action.step != "start":
        return replace(action, step="start")
    scheduler.start_now(action.target, wanted)
    return replace(action, state="done")


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

    Off the gated nodes and eligible first, then released: it starts elsewhere 0.9-3.9 s later
    (measured on 22.05, 24.11 and 26.05).
    """
    job, attempt = view.job, decision.attempt
    if job is None or attempt is None:
        return replace(action, state="abandoned", detail="Slurm no longer knows the job")
    if job.restarts != attempt.restart + 1 or job.uid != decision.uid:
        return _superseded(action, job)
    if job.state in _LIVE:
        return replace(action, state="verified", detail=f"running on {','.join(job.nodes)}")
    if not job.pending:
        return action
    if not job.held:
        if not action.step:
            return replace(action, state="abandoned", detail="somebody has released it already")
        return replace(action, state="verified", detail="released")
    if not held_by_launch_failure(job):
        return replace(action, state="abandoned", detail=f"held by somebody since ({job.reason})")
    wanted = tuple(sorted({*job.excluded, *decision.job.excluded}))
    if not action.step:
        return replace(action, step="start")
    if action.step == "start" and not set(wanted) <= set(job.excluded):
        scheduler.start_now(action.target, wanted)
        return action
    if action.step == "start":
        return replace(action, step="release")
    scheduler.release(action.target)
    return replace(action, state="done")


def held_by_launch_failure(job: Job) -> bool:
    """Whether Slurm itself holds the job because it could not be launched (measured words)."""
    return job.held and "launch" in job.reason.lower()


# -- hold -----------------------------------------------------------------------------------


def _hold(
    action: Action, decision: Decision, view: View, scheduler: Scheduler, now: float
) -> Action:
    job, attempt = view.job, decision.attempt
    if job is None or attempt is None:
        return replace(action, state="abandoned", detail="Slurm no longer knows the job")
    ours = f"{OUR_REASON} {decision.id}:"
    if job.restarts == attempt.restart and _is_the_failed_one(job, decision):
        if action.step != "requeue_hold":
            return replace(action, step="requeue_hold")
        scheduler.requeue_hold(action.target)
        return action
    if not action.step or job.restarts > attempt.restart + 1 or job.uid != decision.uid:
        return _superseded(action, job)
    if job.admin_comment.startswith(ours):
        return replace(action, state="verified", detail=f"{job.state}, held for its owner")
    if not job.held:
        return action
    if action.step != "comment":
        return replace(action, step="comment")
    scheduler.set_admin_comment(action.target, comment_text(decision))
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
