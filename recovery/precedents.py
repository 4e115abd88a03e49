"""What bears on a new incident of what was decided before, as the index has it.

Owns the questions to the index that make a ``policy.History``; what follows is ``policy``'s.
"""

from __future__ import annotations

from collections.abc import Mapping

from recovery import cause as causes
from recovery.budgets import History
from recovery.decision import Cause, Decision
from recovery.incident import Incident
from recovery.store import Store
from slurm_hooks.record import utc

_HOUR_SECONDS = 3600.0
_DAY_SECONDS = 86400.0
_WEEK_SECONDS = 7 * _DAY_SECONDS


def of(
    store: Store,
    case: Incident,
    earlier: tuple[Decision, ...],
    suspects: Mapping[str, str],
    now: float,
    besides: str = "",
) -> History:
    """Return what came before ``now``, in seconds since the epoch.

    Of the decision ``besides``, which is being revised, nothing counts.
    """
    hour = [
        one
        for one in store.commands_since("requeue", utc(now - _HOUR_SECONDS))
        if one.decision != besides
    ]
    since, cause = utc(now - _DAY_SECONDS), causes.of(case)
    named: dict[str, int] = {}
    for node in {item.node for item in cause.implicated}:
        told = store.decisions(node=node, since=since)
        replaced = {besides, *(known.revises for known in told)}
        named[node] = sum(
            known.cause.fault_class == cause.fault_class
            and known.id not in replaced
            and not known.fleet  # what hit many at once says nothing against this node
            and any(item.node == node for item in known.cause.implicated)
            for known in told
        )
    uid = case.job.uid if case.job else None
    return History(
        earlier,
        named,
        sum(one.uid == uid for one in hour),
        len(hour),
        _gpu_users(store, cause, now),
        suspects,
    )


def _gpu_users(store: Store, cause: Cause, now: float) -> dict[tuple[str, str], frozenset[int]]:
    """Of each GPU of which a program failed now, whose programs did within a week."""
    if not cause.fault_class.startswith("program."):
        return {}
    since = utc(now - _WEEK_SECONDS)
    return {
        (item.node, item.device): frozenset(
            known.uid
            for known in store.decisions(node=item.node, since=since)
            if known.uid is not None
            and any(
                (one.device, one.code) == (item.device, item.code) for one in known.cause.implicated
            )
        )
        for item in cause.implicated
        if item.device
    }
