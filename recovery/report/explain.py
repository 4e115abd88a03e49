"""`recovery explain`: a job, a decision or a node as one document, gathered from the index.

Owns what is read for a story and how much of it; what the events say is ``story``'s, of a node
``node_story``'s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from recovery import concerns, timeline
from recovery.decision import Decision
from recovery.report import node_story, nodes, story
from recovery.report.story import Event, Known, Look
from recovery.store import Store
from slurm_hooks.record import seconds_of, utc

SCHEMA = "story/v1"

_DIGITS = 19
"""More than SQLite's integers have; no cluster counts so far."""

_DECISIONS_LIMIT = 50
_LATE_SECONDS = 86_400.0
_BEFORE_SECONDS = 7 * 86_400.0
_DAY_SECONDS = 86_400.0


def document(store: Store, name: str, now: str) -> dict[str, Any] | None:
    """Return ``story/v1`` of a decision's id, a job number or a node; None for what is not known.

    ``to_do`` is what a person must do, ``settled`` why there is nothing where it is empty;
    ``events`` are in time order, ``decisions`` the whole records that they were made from.
    """
    decision = store.decision(name)
    if decision is not None:
        return _of_decision(store, decision, now)
    job = _job_id(store, name)
    found = store.decisions(job=job, limit=_DECISIONS_LIMIT)[::-1] if job is not None else []
    if found:
        return _of_job(store, found, now)
    return _of_node(store, name, now)


def _job_id(store: Store, name: str) -> int | None:
    """The job that a number stands for, or a task of an array as squeue shows it (``6_2``)."""
    if name.isdecimal() and len(name) < _DIGITS:
        return int(name)
    if not re.fullmatch(r"\d+_\d+", name, re.ASCII):
        return None
    rows = store.file.rows(
        "SELECT job_id FROM commands WHERE target = ? ORDER BY time DESC LIMIT 1", (name,)
    )
    return int(rows[0][0]) if rows and rows[0][0] is not None else None


def _of_decision(store: Store, decision: Decision, now: str) -> dict[str, Any]:
    facts = []
    if decision.attempt is not None:
        job = decision.attempt.job_id
        others = len(store.decisions(job=job, limit=_DECISIONS_LIMIT)) - 1
        if others:
            facts.append(f"the whole job, {others + 1} decisions: recovery explain {job}")
    title = f"decision {decision.id} on {_about(decision)}"
    return _told(store, [decision], title, facts, now)


def _of_job(store: Store, found: list[Decision], now: str) -> dict[str, Any]:
    mine = story.same_job(found)
    facts = []
    if len(mine) < len(found):
        other = found[len(found) - len(mine) - 1]
        facts.append(f"an earlier job had this number: recovery explain {other.id}")
    attempts = max(story.number_of(one) for one in mine)
    latest = mine[-1].outcome
    attempts += latest is not None and bool(latest.started)
    title = f"{_about(mine[-1])}: {_many(attempts, 'attempt')}, {_many(len(mine), 'decision')}"
    return _told(store, mine, title, facts, now)


def _about(decision: Decision) -> str:
    if decision.attempt is None:
        return decision.incident.replace("/", " ")
    name = f" {decision.job_name!r}" if decision.job_name else ""
    return (
        f"job {decision.attempt.job_id}{name} of {decision.owner or 'nobody known'},"
        f" partition {decision.partition or 'unknown'}"
    )


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _told(
    store: Store, decisions: Sequence[Decision], title: str, facts: Sequence[str], now: str
) -> dict[str, Any]:
    latest = decisions[-1]
    subjects = [f"node {answer.node}" for one in decisions for answer in one.nodes]
    if latest.attempt is not None:
        subjects.insert(0, f"job {latest.attempt.job_id}")
    if latest.members:
        subjects.insert(0, concerns.subject_of(latest))
    ids = {one.id for one in decisions}
    needed = [one for one in concerns.of(store.file, subjects) if one.decision in ids]
    needed.sort(key=lambda one: subjects.index(one.subject))
    named = [*ids, *(one.subject for one in needed)]
    members = [store.decision(one.decision) for one in latest.members if one.decision]
    followers = {one.id: one for one in members if one is not None}
    known = Known(_looks(store, decisions), timeline.of(store.file, named), followers)
    return {
        "schema": SCHEMA,
        "subject": subjects[0] if subjects else latest.incident,
        "title": title,
        "to_do": [_needed(one, now) for one in needed],
        "settled": settled(latest),
        "facts": list(facts),
        "events": _documents(story.of_decisions(decisions, known)),
        "decisions": [one.to_dict() for one in decisions],
    }


def settled(decision: Decision) -> str:
    """Return how a decision stands in a sentence: why nobody has to do anything now."""
    for action in decision.actions:
        if action.state in ("planned", "done"):
            return f"{action.name} is under way"
    if decision.rerun:
        return "somebody else ran the job again"
    if decision.outcome is not None:
        detail = f", {decision.outcome.detail}" if decision.outcome.detail else ""
        return f"{decision.outcome.state}{detail}"
    if decision.awaits_outcome:
        return "it waits in the queue for its next attempt"
    if decision.attempt is not None and decision.job.verdict == "leave":
        return f"it is left as it is: {decision.job.reason}"
    return f"how it stands: {decision.standing}"


def _needed(one: concerns.Concern, now: str) -> dict[str, Any]:
    waited = round(seconds_of(now) - seconds_of(one.time))
    return {**asdict(one), "age_seconds": waited}


def _documents(events: Iterable[Event]) -> list[dict[str, Any]]:
    return [asdict(one) for one in events]


# -- what hooks saw ---------------------------------------------------------------------------


def _looks(store: Store, decisions: Sequence[Decision]) -> dict[str, Look]:
    """The records of the attempts that were decided on, and those that excerpts were taken from."""
    found: dict[str, Look] = {}
    for decision in decisions:
        attempt = decision.attempt
        if attempt is not None:
            began = decision.started_time or decision.ended_time or decision.time
            since = began if decision.started_time else utc(seconds_of(began) - _BEFORE_SECONDS)
            until = utc(seconds_of(decision.time) + _LATE_SECONDS)
            query = "job_id = ? AND restart = ? AND time >= ? AND time < ? ORDER BY time LIMIT ?"
            arguments = (attempt.job_id, attempt.restart, since, until, story.LOOKS_LIMIT)
            for look, job in _read(store, query, arguments):
                if job and job.get("uid") in (None, decision.uid):
                    found[look.record] = look
    ids = {one.record for decision in decisions for one in decision.evidence} - found.keys()
    if ids:
        marks = ",".join("?" * len(ids))
        found.update({look.record: look for look, _ in _read(store, f"id IN ({marks})", (*ids,))})
    return found


def _read(
    store: Store, query: str, arguments: Sequence[Any]
) -> Iterable[tuple[Look, Mapping[str, Any] | None]]:
    columns = "id, node, time, hook, restart, document"
    for record, node, time, hook, restart, text in store.file.rows(
        f"SELECT {columns} FROM records WHERE {query}", arguments
    ):
        made = json.loads(text)
        findings = tuple(made["findings"])
        yield Look(record, node, time, hook, made["boot_id"], restart, findings), made["job"]


# -- a node -----------------------------------------------------------------------------------


def _of_node(store: Store, name: str, now: str) -> dict[str, Any] | None:
    since = utc(seconds_of(now) - nodes.HISTORY_SECONDS)
    until = utc(seconds_of(now) + _DAY_SECONDS)
    listed = nodes.document(store, nodes.Wanted(names=(name,)), now)["nodes"]
    found = store.decisions(node=name, limit=_DECISIONS_LIMIT)[::-1]
    query = "node = ? AND time >= ? AND time < ? ORDER BY time DESC LIMIT ?"
    looks = [look for look, _ in _read(store, query, (name, since, until, story.LOOKS_LIMIT))][::-1]
    if not (listed or found or looks):
        return None
    subject = f"node {name}"
    needed = concerns.of(store.file, (subject,))
    turns = timeline.of(store.file, [subject, *(one.id for one in found)])
    events, left_out = node_story.events(name, found, looks, turns)
    facts = nodes.facts(listed[0], now) if listed else ["no heartbeat of it has ever been seen"]
    if left_out:
        facts.append(f"{left_out} earlier events are left out")
    return {
        "schema": SCHEMA,
        "subject": subject,
        "title": f"{subject}: {_many(len(found), 'decision')} named it",
        "to_do": [_needed(one, now) for one in needed],
        "settled": node_story.settled(name, found),
        "facts": facts,
        "events": _documents(events),
        "node": listed[0] if listed else None,
        "decisions": [one.to_dict() for one in found],
    }
