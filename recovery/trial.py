"""The trial: what decisions and their reviews amount to, by class and action. Pure.

    >>> round(Share(14, 14).low, 2)
    0.78

Owns what counts as agreement. A decision counts once, as its reviews amount to it
(``review.judgment``); ambiguous is not agreement; an action that ended badly counts against it with
no review at all. What a grant then may do is ``grants``'.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

from recovery.decision import Decision
from recovery.review import judgment
from slurm_hooks.config import Grant
from slurm_hooks.record import seconds_of

WILSON_Z = 1.959964
"""Two-sided 95% (Wilson 1927, score interval)."""

RERUN_LIMIT_SECONDS = 86_400.0
"""A job that was run again later than this was not waiting to be."""

NO_ACTION = "leave"

_REASONS_LIMIT = 20
_HOUR_SECONDS = 3600.0


@dataclass(frozen=True)
class Share:
    """``count`` of ``total``, with its 95% Wilson interval, which is 0 to 1 where total is 0."""

    count: int
    total: int

    @property
    def low(self) -> float:
        """The lower end."""
        return max(0.0, self._end(-1))

    @property
    def high(self) -> float:
        """The upper end."""
        return min(1.0, self._end(1)) if self.total else 1.0

    def _end(self, sign: int) -> float:
        if not self.total:
            return 0.0
        share, square = self.count / self.total, WILSON_Z**2
        middle = share + square / (2 * self.total)
        spread = math.sqrt(share * (1 - share) / self.total + square / (4 * self.total**2))
        return (middle + sign * WILSON_Z * spread) / (1 + square / self.total)


@dataclass(frozen=True)
class Case:
    """What a trial wants to know of one decision.

    ``actions`` are the kinds it asks for, or only ``leave``. ``verdict`` is what its reviews amount
    to. ``bad`` says how acting on it ended badly, empty where it did not. ``delay_seconds`` is from
    the failure to the decision. ``saved_gpu_seconds`` is how long GPUs waited, or would not have
    had to wait, for the job to run again; negative where a restart only burned them.
    """

    decision: str
    time: str
    fault_class: str
    actions: tuple[str, ...]
    verdict: str = ""
    bad: str = ""
    delay_seconds: float | None = None
    saved_gpu_seconds: float | None = None
    partitions: tuple[str, ...] = ()
    account: str = ""
    owner: str = ""
    qos: str = ""
    notes: tuple[tuple[str, str, str], ...] = ()

    @property
    def judged(self) -> bool:
        """Whether it says anything about agreement."""
        return bool(self.verdict or self.bad)

    def to_dict(self) -> dict[str, Any]:
        """Return what ``from_dict`` reads, without what is empty."""
        return {key: value for key, value in asdict(self).items() if value not in ("", (), None)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Case:
        """Read what ``to_dict`` wrote."""
        known = dict(document)
        for key in ("actions", "partitions"):
            known[key] = tuple(known.get(key, ()))
        known["notes"] = tuple(
            (who, verdict, note) for who, verdict, note in known.get("notes", ())
        )
        return cls(**known)


def case_of(decision: Decision) -> Case:
    """Return what a trial wants to know of a decision."""
    kinds = dict.fromkeys(action.kind for action in decision.actions)
    latest = {review.uid: review for review in decision.reviews}
    notes = [
        (
            one.who,
            one.verdict,
            ", ".join(filter(None, (one.would_have and f"would have: {one.would_have}", one.note))),
        )
        for one in latest.values()
        if one.verdict != "helpful"
    ]
    ended = decision.ended_time
    return Case(
        decision.id,
        decision.time,
        decision.cause.fault_class,
        tuple(kinds) or (NO_ACTION,),
        judgment(decision.reviews),
        _bad(decision),
        seconds_of(decision.time) - seconds_of(ended) if ended else None,
        _saved(decision),
        tuple(filter(None, decision.partition.split(","))),
        decision.account,
        decision.owner,
        decision.qos,
        tuple(notes),
    )


def _bad(decision: Decision) -> str:
    """How acting ended badly: it failed, a person undid it, or it burned a restart for nothing."""
    for action in decision.actions:
        if action.state == "failed":
            return f"{action.name} failed: {action.detail}"
        if action.state == "abandoned" and action.detail.startswith("undone by somebody"):
            return f"{action.name} was undone by a person"
    states = [outcome.state for outcome in decision.outcomes]
    if "failed_again" in states and "resumed" not in states:
        return "the restart failed again without having resumed"
    return ""


def _saved(decision: Decision) -> float | None:
    """GPU-seconds that acting saved or would have saved, or cost; None where nobody can tell.

    Where a person ran the job again, acting would have spared the wait for them. Where this toolkit
    ran it again and that attempt failed before it resumed, it burned what the attempt held.
    """
    if not decision.gpus:
        return None
    times = {outcome.state: seconds_of(outcome.time) for outcome in decision.outcomes}
    if "failed_again" in times and "restarted" in times and "resumed" not in times:
        return -decision.gpus * (times["failed_again"] - times["restarted"])
    if decision.rerun and decision.job.verdict == "requeue":
        waited = seconds_of(decision.rerun) - seconds_of(decision.time)
        return decision.gpus * max(0.0, waited) if waited <= RERUN_LIMIT_SECONDS else None
    return None


def covers(grant: Grant, case: Case) -> bool:
    """Whether a case lies in a grant's scope, and asks for one of its actions."""
    scopes = (
        (grant.partitions, case.partitions),
        (grant.accounts, (case.account,)),
        (grant.users, (case.owner,)),
        (grant.qos, (case.qos,)),
    )
    inside = all(not wanted or set(wanted) & set(have) for wanted, have in scopes)
    # A gate's release is the action that a decision shows of it.
    asked = {"gate" if kind == "release" else kind for kind in case.actions}
    return inside and bool(asked & set(grant.actions))


@dataclass(frozen=True)
class Row:
    """A class and an action of a trial, or all of them (``fault_class`` and ``action`` ``all``).

    ``delay`` is the median and the 90th percentile of the seconds from failure to decision.
    """

    fault_class: str
    action: str
    decisions: int
    reviewed: int
    helpful: int
    ambiguous: int
    disruptive: int
    bad: int
    delay: tuple[float, float] | None
    saved_gpu_hours: float
    cost_gpu_hours: float
    estimated: int

    @property
    def agreement(self) -> Share:
        """Helpful of those that were judged, by people or by how they ended."""
        return Share(self.helpful, self.helpful + self.ambiguous + self.disruptive + self.bad)

    def to_dict(self) -> dict[str, Any]:
        """Return the row for a document, with its interval."""
        share = self.agreement
        interval = [round(share.low, 4), round(share.high, 4)] if share.total else None
        of = round(share.count / share.total, 4) if share.total else None
        return {**asdict(self), "agreement": of, "interval": interval}


def rows(cases: Sequence[Case]) -> tuple[Row, ...]:
    """Return a row for everything, then one for each class and action, most decisions first."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        for action in case.actions:
            groups.setdefault((case.fault_class, action), []).append(case)
    made = [_row(name, action, group) for (name, action), group in groups.items()]
    made.sort(key=lambda row: (-row.decisions, row.fault_class, row.action))
    return (_row("all", "all", cases), *made)


def _row(fault_class: str, action: str, cases: Sequence[Case]) -> Row:
    verdicts = [case.verdict for case in cases]
    delays = [case.delay_seconds for case in cases if case.delay_seconds is not None]
    saved = [case.saved_gpu_seconds for case in cases if case.saved_gpu_seconds is not None]
    return Row(
        fault_class,
        action,
        len(cases),
        sum(map(bool, verdicts)),
        verdicts.count("helpful"),
        verdicts.count("ambiguous"),
        verdicts.count("disruptive"),
        # What people have judged, they have judged knowing how it ended.
        sum(bool(case.bad) and not case.verdict for case in cases),
        _percentiles(delays),
        round(sum(one for one in saved if one > 0) / _HOUR_SECONDS, 2),
        round(-sum(one for one in saved if one < 0) / _HOUR_SECONDS, 2),
        len(saved),
    )


def _percentiles(seconds: Sequence[float]) -> tuple[float, float] | None:
    if not seconds:
        return None
    ninth = quantiles(seconds, n=10, method="inclusive")[8] if len(seconds) > 1 else seconds[0]
    return round(median(seconds), 1), round(ninth, 1)


def objections(cases: Iterable[Case]) -> list[dict[str, str]]:
    """Return who objected to what and why, and what ended badly; newest first."""
    found = []
    for case in sorted(cases, key=lambda one: one.time, reverse=True):
        about = {"decision": case.decision, "class": case.fault_class, "time": case.time}
        about["action"] = ", ".join(case.actions)
        found += [
            {**about, "who": who, "verdict": verdict, "why": note}
            for who, verdict, note in case.notes
        ]
        if case.bad and not case.verdict:
            found.append({**about, "who": "outcome", "verdict": "ended badly", "why": case.bad})
        if len(found) >= _REASONS_LIMIT:
            break
    return found[:_REASONS_LIMIT]


def supported(cases: Iterable[Case], reviews: int, agreement: float) -> list[dict[str, Any]]:
    """Return for each action and partition whether the evidence would carry a grant with needs."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        for partition in case.partitions or ("",):
            for action in case.actions:
                if action != NO_ACTION:
                    groups.setdefault((action, partition), []).append(case)
    found = []
    for (action, partition), group in sorted(groups.items()):
        row = _row("all", action, group)
        low = row.agreement.low
        enough = row.reviewed >= reviews and low >= agreement
        found.append(
            {
                "action": "gate" if action == "release" else action,
                "partition": partition,
                "reviewed": row.reviewed,
                "agreement_at_least": round(low, 4),
                "supported": enough,
            }
        )
    return found
