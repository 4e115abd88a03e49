"""Pauses: what a person's order to stop covers. Pure.

    >>> from recovery.controls import Pause
    >>> ordered = Pause("node", "n3", "new risers", "ann", "2026-12-02T05:31:37.123456Z")
    >>> ordered_by(ordered)
    'paused by ann since 2026-12-02T05:31:37Z (node n3): new risers'

A pause stops the next command, also of an action already begun: what Slurm has been told by then
stays told, and the action ends as ``abandoned``, so that no command comes as a surprise hours
later. One whose commands have all been sent is still verified. Deciding goes on, and a decision
made meanwhile is only recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from recovery.controls import Pause
from recovery.decision import NODE_ACTIONS, Action, Decision
from recovery.slurm.base import CommandRefused, Job, Node, SchedulerUnavailable


class Stopped:
    """A Scheduler (``slurm.base``) by which nothing changes, and that shows what was seen before.

    ``job`` and ``nodes`` are of the last look.
    """

    def __init__(self, job: Job | None, nodes: Mapping[str, Node]) -> None:
        self._jobs = {job.id: job} if job else {}
        self._nodes = nodes

    def cluster(self) -> str:
        raise SchedulerUnavailable("paused")

    def jobs(self, ids: Collection[int] | None = None) -> Mapping[int, Job]:
        return self._jobs

    def nodes(self, names: Collection[str] | None = None) -> Mapping[str, Node]:
        return self._nodes

    def reservations(self) -> Mapping[str, Collection[str]]:
        return {}

    def _refuse(self, *_arguments: object, **_named: object) -> None:
        raise CommandRefused("paused before it could be verified")

    requeue = requeue_hold = start_now = hold = release = explain_hold = _refuse
    drain = undrain = set_reason = _refuse


def refusal(action: Action, decision: Decision, pauses: Iterable[Pause]) -> str:
    """Return why ``action`` may not go on, or an empty text where no pause covers it."""
    return next((ordered_by(one) for one in pauses if _covers(one, action, decision)), "")


def ordered_by(pause: Pause) -> str:
    """Return who ordered a pause, since when, of what, and why."""
    about = f" ({pause.scope} {pause.name})" if pause.name else ""
    return f"paused by {pause.who} since {pause.time[:19]}Z{about}: {pause.why}"


def _covers(pause: Pause, action: Action, decision: Decision) -> bool:
    if pause.scope == "all":
        return True
    if pause.scope == "partition":
        return pause.name in decision.partition.split(",")
    if pause.scope == "node":
        return action.kind in NODE_ACTIONS and action.target == pause.name
    # An array task is named as itself (6_2), by its own number, or with its whole array (6).
    if action.kind in NODE_ACTIONS or decision.attempt is None:
        return False
    names = {action.target, action.target.partition("_")[0], str(decision.attempt.job_id)}
    return pause.name in names
