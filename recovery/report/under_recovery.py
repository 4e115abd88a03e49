"""The jobs under recovery: put back to work, or about to be, and not yet at an end. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recovery.decision import FINAL_ACTIONS, NODE_ACTIONS, Decision
from recovery.report.words import age, wrapped
from slurm_hooks.record import seconds_of

_SHOWN = 20

_BUDGET = re.compile(r"restarts: (?:this would be \d+ of|all) (\d+)")
"""The sentence in which a decision keeps the budget that it met (``policy``)."""


def jobs(opened: Iterable[Decision], now: str) -> list[dict[str, Any]]:
    """Return each job of the open decisions (oldest first) once, as its latest one tells.

    ``attempt`` is the one that runs or is to run, counted from 1, ``attempts_allowed`` how many
    the job may have in all (None: not known).
    """
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for one in opened:
        job, waits = one.attempt, [a for a in one.actions if a.state not in FINAL_ACTIONS]
        under_way = [action for action in waits if action.kind not in NODE_ACTIONS]
        if job is None or not (one.awaits_outcome or under_way):
            continue
        found[(job.cluster, job.job_id)] = {
            "job": job.job_id,
            "name": one.job_name,
            "owner": one.owner,
            "partition": one.partition,
            "decision": one.id,
            "attempt": job.restart + 1 + one.awaits_outcome,
            "attempts_allowed": _allowed(one),
            "where": _where(one),
            "state": one.outcome.state if one.outcome else "waiting",
            "so_far": f"{under_way[0].name} is under way" if under_way else _so_far(one),
            "age_seconds": round(seconds_of(now) - seconds_of(one.time)),
        }
    return list(found.values())


def text(shown: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line or two for each job, the longest under recovery first."""
    lines: list[str] = []
    for one in shown[:_SHOWN]:
        of = f" of {one['attempts_allowed']}" if one["attempts_allowed"] else ""
        where = f" {one['where']}" if one["where"] else ""
        said = (
            f"job {one['job']} of {one['owner']}, attempt {one['attempt']}{of}{where}:"
            f" {one['so_far']}, for {age(one['age_seconds'])}"
        )
        lines += wrapped("recovering  ", said)
    if len(shown) > _SHOWN:
        lines.append(f"recovering  and {len(shown) - _SHOWN} more: recovery status --json")
    return lines or ["recovering  no job"]


def _allowed(decision: Decision) -> int | None:
    told = next(filter(None, map(_BUDGET.match, decision.limits)), None)
    return int(told[1]) + 1 if told else None


def _where(decision: Decision) -> str:
    """Where the next attempt runs, in the words of the look that saw it start."""
    return next((one.detail for one in decision.outcomes if one.state == "restarted"), "")


def _so_far(decision: Decision) -> str:
    outcome = decision.outcome
    if outcome is None:
        off = f", off {', '.join(decision.job.excluded)}" if decision.job.excluded else ""
        return f"it waits in the queue{off}"
    if outcome.state == "restarted":
        return "restarted, no progress seen yet"
    return f"{outcome.state} {outcome.detail}".rstrip()
