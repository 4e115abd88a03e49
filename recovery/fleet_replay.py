"""Which fleet events a history has under one configuration: the hits run through once more. Pure.

Owns when each hit was seen, so far as a spool tells it: a node's record when it was received, an
attempt when its last epilog was, or ``gather`` before it was decided on. What makes an event, and
what is decided on it, is ``fleet``'s, as it is for the aggregator; no clock is asked, so the same
history and configuration give the same events.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from recovery import fleet
from recovery.decision import Cause, Decision
from recovery.fleet import Extent, Hit, Membership
from recovery.fleet_watch import begins, in_window
from recovery.incident import Incident
from slurm_hooks.config import Config
from slurm_hooks.record import FaultRecord, seconds_of

_DUE = 2
"""The order of a case that has waited for others for as long as it may."""


@dataclass(frozen=True)
class Case:
    """A recorded decision on one job or node, as an incident that may be part of an event.

    ``stands``: it was acted on, or another decision has taken its place already, so that an event
    that begins later changes nothing about it. ``seen`` is in seconds since the epoch.
    """

    decision: str
    incident: Incident
    cause: Cause
    seen: float
    stands: bool

    @property
    def key(self) -> str:
        """What the case has in common with others, empty for what concerns it alone."""
        return "" if self.incident.gated else fleet.of_cause(self.cause)


@dataclass
class Event:
    """A fleet event, and all who were hit while it was open; ``last`` is when the last of them was.

    ``shown`` are the records by which a node showed it.
    """

    decision: Decision
    hits: dict[str, Hit]
    last: float
    shown: dict[str, FaultRecord] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What its members have in common."""
        return self.decision.cause.fingerprint

    @property
    def first(self) -> float:
        """When the first of them was hit."""
        return min(one.time for one in self.hits.values())

    @property
    def extent(self) -> Extent:
        """How many it has hit in all."""
        return fleet.extent_of(self.hits.values())


@dataclass(frozen=True)
class Events:
    """The events of a history, in order, and who of its decisions belongs to which."""

    events: tuple[Event, ...]
    of: Mapping[str, Membership]


@dataclass(frozen=True, order=True)
class _Moment:
    """Something to look at: of what happens within one moment, records first, then who is due."""

    time: float
    order: int
    place: int
    record: FaultRecord | None = field(default=None, compare=False)
    case: Case | None = field(default=None, compare=False)


def events(
    cases: Sequence[Case],
    records: Iterable[tuple[float, FaultRecord]],
    recorded: Sequence[Decision],
    size: int,
    config: Config,
    mode: str,
) -> Events:
    """Return the events under ``config`` in a fleet of ``size`` nodes.

    ``records`` come with when they were received; an event that was ``recorded`` keeps its id.
    """
    run = _Run(recorded, size, config, mode)
    moments = [
        _Moment(time, 0, place, record=record) for place, (time, record) in enumerate(records)
    ]
    moments += [_Moment(case.seen, 1, place, case=case) for place, case in enumerate(cases)]
    heapq.heapify(moments)
    while moments:
        moment = heapq.heappop(moments)
        if moment.record is not None:
            run.shows(moment.record, moment.time)
        elif moment.case is not None and run.waits(moment.case, moment):
            due = moment.time + config.fleet.gather
            heapq.heappush(moments, replace(moment, time=due, order=_DUE))
    return Events(tuple(run.made), run.of)


class _Run:
    """The hits within a window, the events that are open, and who waits for others."""

    def __init__(self, recorded: Sequence[Decision], size: int, config: Config, mode: str) -> None:
        self._recorded, self._size = recorded, size
        self._config, self._mode = config, mode
        self._hits: dict[str, dict[str, Hit]] = {}
        self._shown: dict[str, dict[str, FaultRecord]] = {}
        self._open: dict[str, Event] = {}
        self._waiting: dict[str, dict[str, Case]] = {}
        self._alone: dict[str, list[tuple[float, Case]]] = {}
        self.made: list[Event] = []
        self.of: dict[str, Membership] = {}

    def shows(self, record: FaultRecord, now: float) -> None:
        """A node shows a fault."""
        for key, hit in fleet.hits_of(record, now):
            self._shown.setdefault(key, {})[hit.subject] = record
            self._add(key, hit, now)

    def waits(self, case: Case, moment: _Moment) -> bool:
        """A case can be decided on: whether it waits for others that may be hit as well."""
        key, now = case.key, moment.time
        if not key:
            return False
        waiting = self._waiting.setdefault(key, {})
        if moment.order == _DUE and case.decision not in waiting:
            return False  # decided on when its event began
        attempt, job = case.incident.attempt, case.incident.job
        if attempt is not None and job is not None:
            subject = f"job {attempt.job_id}"
            self._add(key, fleet.hit(subject, now, case.cause, job.uid), now)
        alone = self._event(key, now) is None
        if alone and moment.order != _DUE and self._config.fleet.gather and fleet.waits(key):
            waiting[case.decision] = case
            return True
        waiting.pop(case.decision, None)
        self._decide(case, now)
        return False

    def _decide(self, case: Case, now: float) -> None:
        event = self._event(case.key, now)
        if event is None:
            self._alone.setdefault(case.key, []).append((now, case))
        else:
            self._follow(case, event)

    def _follow(self, case: Case, event: Event) -> None:
        hits = self._hits.get(event.key, {}).values()
        extent = str(fleet.extent_of(hits))
        self.of[case.decision] = Membership(event.decision.id, extent, fleet.avoided(hits))

    def _add(self, key: str, hit: Hit, now: float) -> None:
        kept = in_window(self._hits.get(key, {}), now, self._config.fleet)
        before = kept.get(hit.subject)
        if before is None or before.time <= hit.time:
            kept[hit.subject] = hit
        self._hits[key] = kept
        event = self._event(key, now) or self._begin(key, now)
        if event is not None:
            event.hits.update({hit.subject: hit})
            event.last = max(event.last, hit.time)
            event.shown.update(self._shown.get(key, {}))

    def _event(self, key: str, now: float) -> Event | None:
        event = self._open.get(key)
        return event if event and abs(now - event.last) <= self._config.fleet.window else None

    def _begin(self, key: str, now: float) -> Event | None:
        hits = in_window(self._hits[key], now, self._config.fleet)
        made = begins(key, hits, self._size, self._config, now, self._mode)
        if made is None:
            return None
        event = Event(self._named(made), hits, max(one.time for one in hits.values()))
        self._open[key] = event
        self.made.append(event)
        oldest = now - self._config.fleet.window
        first = [
            case for time, case in self._alone.pop(key, []) if time >= oldest and not case.stands
        ]
        for case in (*first, *self._waiting.pop(key, {}).values()):
            self._follow(case, event)
        return event

    def _named(self, made: Decision) -> Decision:
        """The event under the id that it was recorded with, where it was."""
        taken = {one.decision.id for one in self.made}
        now = seconds_of(made.time)
        for one in self._recorded:
            near = abs(seconds_of(one.time) - now) <= self._config.fleet.window
            if near and one.cause.fingerprint == made.cause.fingerprint and one.id not in taken:
                return replace(made, id=one.id)
        return made
