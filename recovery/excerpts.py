"""Which evidence a decision keeps, word for word: what is cut out of it no longer exists elsewhere.

Pure. A requeue truncates the log and ends the processes, so that a decision carries what it rests
on: the log first, then what names the cause, then the rest as far as there is room.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from recovery.decision import Cause, Excerpt
from recovery.incident import Incident, Sighting

LIMIT = 16
"""Most excerpts of one decision."""

_EXCERPT_CHARACTERS = 600
_HANG_EXCERPT_CHARACTERS = 6000


def of(incident: Incident, cause: Cause) -> tuple[Excerpt, ...]:
    """Return what is kept of the incident's evidence, the weightiest first."""
    return tuple(islice(_ranked(incident, cause), LIMIT))


def _ranked(incident: Incident, cause: Cause) -> Iterable[Excerpt]:
    named = {(item.node, item.code) for item in cause.implicated}
    if incident.log and incident.log.text:
        log = incident.log
        text = log.text[:_EXCERPT_CHARACTERS]
        yield Excerpt(log.record, log.node, log.time, f"log.{log.fault_class}", text)
    ranked = sorted(
        _last_words(incident.sightings),
        key=lambda s: (
            (s.node, s.finding.code) not in named,
            not s.finding.code.startswith("hang."),
            s.finding.severity == "info",
            s.finding.code.startswith("activity."),  # every health check of every node tells some
            s.time,
        ),
    )
    for sighting in ranked:
        finding = sighting.finding
        hung = finding.code.startswith("hang.")  # a requeue ends the processes that it tells of
        texts = [evidence.text for evidence in finding.evidence[: None if hung else 2]]
        limit = _HANG_EXCERPT_CHARACTERS if hung else _EXCERPT_CHARACTERS
        text = " | ".join([finding.summary, *texts])[:limit]
        yield Excerpt(sighting.record, sighting.node, sighting.time, finding.code, text)


def _last_words(sightings: Iterable[Sighting]) -> Iterable[Sighting]:
    """Leave out what a log says, whose verdict is told, and what a node has told anew since.

    That a log could not be read is told by itself. Only of what is merely told ("info") does the
    last word count; a fault counts whenever it was seen.
    """
    last: dict[tuple[object, ...], Sighting] = {}
    for one in sorted(sightings, key=lambda s: s.time):
        found = one.finding
        if found.code.startswith("log.") and found.code != "log.unreadable":
            continue
        again = (one.node, found.code, found.file, found.gpu) if found.severity == "info" else ()
        last[again or (one.node, found.code, one.record, len(last))] = one
    return last.values()
