"""Who has been hit by what, and when: so that many hit by one cause make one fleet event.

Keeps the hits of one window in memory, and which events are open; what makes an event and what is
decided on it is ``fleet``'s. A crash loses nothing: records and decisions tell of the same hits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from recovery import fleet, policy
from recovery.decision import Cause, Decision
from recovery.fleet import Hit, Membership
from recovery.incident import Incident
from recovery.ledger import Ledger
from slurm_hooks.config import Config, Fleet
from slurm_hooks.record import FaultRecord, seconds_of, utc

_DAY_SECONDS = 86_400.0
_KNOWN_LIMIT = 1000


@dataclass
class _Event:
    """An open event: who is known to be hit, and when the last of them was (seconds)."""

    decision: str
    subjects: set[str]
    last: float


def in_window(hits: Mapping[str, Hit], now: float, limits: Fleet) -> dict[str, Hit]:
    """Return those of one cause's ``hits``, by subject, that lie within a window before ``now``."""
    oldest = now - limits.window
    return {name: one for name, one in hits.items() if one.time >= oldest}


def begins(
    key: str, hits: Mapping[str, Hit], size: int, config: Config, now: float, mode: str
) -> Decision | None:
    """Return the decision on the event that ``hits`` of one window make in a fleet of ``size``."""
    extent = fleet.extent(hits.values(), size, config.fleet)
    if extent is None:
        return None
    rule = policy.rule_for(key.partition("/")[0], config.policy.classes)
    return fleet.decision(key, list(hits.values()), extent, rule, config.fleet, now, mode)


class FleetWatch:
    """The fleet's hits and events; ``clock`` returns seconds since the epoch.

    ``size`` is how many nodes there are, as far as is known.
    """

    def __init__(self, config: Config, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._config, self._ledger, self._clock = config, ledger, clock
        self._hits: dict[str, dict[str, Hit]] = {}
        self._first: dict[str, float] = {}
        self._events: dict[str, _Event] = {}
        self._new: set[str] = set()
        self._followed: set[str] = set()
        self._begun: dict[str, None] = {}
        self.size = 1
        self._remember()

    def note(self, record: FaultRecord) -> None:
        """Take notice of a node that shows a fault, whether a job has failed of it or not."""
        for key, hit in fleet.hits_of(record, self._clock()):
            self._add(key, hit)

    def note_case(self, case: Incident, cause: Cause) -> None:
        """Take notice of an attempt that is about to be decided on: before any of its pass is."""
        key = fleet.of_cause(cause)
        if key and case.attempt is not None and case.job is not None and not case.gated:
            subject = f"job {case.attempt.job_id}"
            now = self._clock()
            self._first.setdefault(f"{key}/{case.key}", now)
            self._add(key, fleet.hit(subject, now, cause, case.job.uid))

    def waits(self, case: Incident, cause: Cause) -> bool:
        """Whether others may show the same within moments, which is worth waiting for."""
        key = fleet.of_cause(cause)
        if not fleet.waits(key) or case.gated or self._event(key):
            return False
        first = self._first.setdefault(f"{key}/{case.key}", self._clock())
        return 0 <= self._clock() - first < self._config.fleet.gather

    def event_of(self, case: Incident, cause: Cause) -> Membership | None:
        """Return the event that an incident belongs to, which is recorded where it begins now."""
        key = fleet.of_cause(cause)
        if not key or case.gated:
            return None
        self._first.pop(f"{key}/{case.key}", None)
        hits = self._hits.get(key, {})
        event = self._event(key) or self._begin(key)
        if event is None:
            return None
        event.last = max([event.last, *(one.time for one in hits.values())])
        self._followed.add(event.decision)
        extent = fleet.extent_of(hits.values())
        return Membership(event.decision, str(extent), fleet.avoided(hits.values()))

    def look(self) -> list[Decision]:
        """Record events that nodes alone show, and who has joined one; return what is new."""
        made: list[Decision] = []
        for key in sorted(self._new):
            known = self._event(key)
            event = known or self._begin(key)
            if event is None:
                continue
            hits = self._hits[key]
            event.last = max([event.last, *(one.time for one in hits.values())])
            new = [one for name, one in hits.items() if name not in event.subjects]
            event.subjects.update(one.subject for one in new)
            nodes = [one.member for one in new if not one.is_job]
            if nodes:
                self._ledger.joined(event.decision, nodes)
            decided = self._ledger.store.decision(event.decision)
            made += [decided] if decided and known is None else []
        for decision_id in sorted(self._followed):
            self._ledger.publish_again(decision_id)
        self._followed.clear()
        self._new.clear()
        self._forget()
        return made

    def begun(self) -> tuple[str, ...]:
        """Return the events whose first hits may have been decided on before they were events."""
        return tuple(self._begun)

    def taken_in(self, decision_id: str) -> None:
        """Take notice that an event's first hits follow it now."""
        self._begun.pop(decision_id, None)

    def _add(self, key: str, hit: Hit) -> None:
        before = self._hits.setdefault(key, {}).get(hit.subject)
        if before is None or before.time <= hit.time:
            self._hits[key][hit.subject] = hit
            self._new.add(key)

    def _event(self, key: str) -> _Event | None:
        """The open event of a key: one that has hit somebody within a window of now."""
        event = self._events.get(key)
        if event and abs(self._clock() - event.last) > self._config.fleet.window:
            del self._events[key]
            return None
        return event

    def _begin(self, key: str) -> _Event | None:
        now = self._clock()
        hits = in_window(self._hits.get(key, {}), now, self._config.fleet)
        made = begins(key, hits, self.size, self._config, now, self._config.mode)
        if made is None:
            return None
        self._ledger.decided(made)
        event = _Event(made.id, set(hits), max(one.time for one in hits.values()))
        self._events[key] = event
        self._begun[made.id] = None
        return event

    def _forget(self) -> None:
        now = self._clock()
        kept = {key: in_window(hits, now, self._config.fleet) for key, hits in self._hits.items()}
        self._hits = {key: hits for key, hits in kept.items() if hits}
        oldest = now - self._config.fleet.window
        self._first = {name: time for name, time in self._first.items() if time >= oldest}

    def _remember(self) -> None:
        """Take in what was decided before this aggregator began."""
        now = self._clock()
        since = utc(now - _DAY_SECONDS)
        for known in reversed(self._ledger.store.decisions(since=since, limit=_KNOWN_LIMIT)):
            if known.incident.startswith(fleet.INCIDENT):
                last = max(seconds_of(one.time) for one in known.members)
                subjects = {one.subject for one in known.members}
                self._events[known.cause.fingerprint] = _Event(known.id, subjects, last)
                self._begun[known.id] = None
            elif known.attempt is not None and not known.gated:
                key = fleet.of_cause(known.cause)
                subject, time = f"job {known.attempt.job_id}", seconds_of(known.time)
                if key and now - time <= self._config.fleet.window:
                    self._add(key, fleet.hit(subject, time, known.cause, known.uid))
