"""The limits that a restart meets: budgets of the job, its user and the fleet, and progress. Pure.

Owns what is counted and how it is said; whether a restart is asked for at all is ``policy``'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from recovery.decision import Cause, Decision
from recovery.fleet import Membership
from recovery.incident import Incident
from slurm_hooks.config import ClassRule, Policy


@dataclass(frozen=True)
class History:
    """What came before, as far as it bears on one incident.

    ``earlier`` are the decisions on the job's former attempts, oldest first. ``named_today`` counts
    for each node how often a cause of this class named it within a day, this incident not counted.
    The requeues are those that this toolkit ordered within an hour. ``gpu_users`` are the uids
    whose programs failed of a node's GPU within a week, ``suspects`` the nodes that fail more often
    than chance lets them, each with its history in words, gravest first.
    ``fleet`` is the event that the incident belongs to, where one cause has hit many.
    """

    earlier: tuple[Decision, ...] = ()
    named_today: Mapping[str, int] = field(default_factory=dict)
    requeues_of_user_hour: int = 0
    requeues_hour: int = 0
    gpu_users: Mapping[tuple[str, str], frozenset[int]] = field(default_factory=dict)
    suspects: Mapping[str, str] = field(default_factory=dict)
    fleet: Membership | None = None


@dataclass(frozen=True)
class Limit:
    """A limit as met: the sentence for the record, and whether it is used up."""

    text: str
    spent: bool


def limits_of(
    incident: Incident, cause: Cause, rule: ClassRule, history: History, policy: Policy
) -> list[Limit]:
    """Every limit that a further restart would meet, in the order in which they are told."""
    job, attempt = incident.job, incident.attempt
    if job is None or attempt is None:
        return []
    ceiling = policy.max_restarts
    if incident.wishes.max_restarts is not None:
        ceiling = min(ceiling, incident.wishes.max_restarts)
    limits = [_counted("restarts", attempt.restart, ceiling)]
    if rule.restarts is not None:
        row = _streak(history.earlier, cause.fault_class)
        limits.append(_counted(f"restarts after {cause.fault_class}", row, rule.restarts))
    user, everyone = policy.max_restarts_per_user_hour, policy.max_restarts_per_hour
    limits.append(_counted("restarts of this user in an hour", history.requeues_of_user_hour, user))
    limits.append(_counted("restarts of all in an hour", history.requeues_hour, everyone))
    limits += _progress_limits(incident, cause, history, policy)
    return limits


def _counted(what: str, used: int, allowed: int) -> Limit:
    if used >= allowed:
        return Limit(f"{what}: all {allowed} used", True)
    return Limit(f"{what}: this would be {used + 1} of {allowed}", False)


def _progress_limits(
    incident: Incident, cause: Cause, history: History, policy: Policy
) -> list[Limit]:
    """Attempts without progress. Progress that nobody could see is not "no progress"."""
    reached = incident.progress_step
    if reached is None or not history.earlier:
        return []
    stuck = 0
    for former in reversed(history.earlier):
        if former.progress_step is None or former.progress_step < reached:
            break
        stuck += 1
    limits = []
    last = history.earlier[-1]
    elsewhere = {item.node for item in cause.implicated}.isdisjoint(
        item.node for item in last.cause.implicated
    )
    hardware = cause.fault_class.startswith("hardware") and cause.confidence == "established"
    if stuck and last.cause.fingerprint == cause.fingerprint and not (hardware and elsewhere):
        text = f"the same failure twice with no progress between (step {reached})"
        limits.append(Limit(text, True))
    attempts = stuck + 1
    if attempts >= policy.no_progress:
        text = f"{attempts} attempts ended without progress beyond step {reached}"
        limits.append(Limit(text, True))
    return limits


def _streak(earlier: tuple[Decision, ...], fault_class: str) -> int:
    """How many of the latest attempts in a row ended by this class."""
    others = (n for n, d in enumerate(reversed(earlier)) if d.cause.fault_class != fault_class)
    return next(others, len(earlier))
