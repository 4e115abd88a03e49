"""`recovery explain`: a job, a decision or a node as one document, gathered from the index.

Owns what is read for a story and how much of it; what the events say is ``story``'s, of a node
``node_story``'s.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from recovery import concerns, inventory, naming, timeline
from recovery.decision import Decision
from recovery.report import node_story, nodes, story, undecided
from recovery.report.story import Event, Known, Look
from recovery.report.undecided import Service, Told, Undecided
from recovery.slurm import hostlist
from recovery.store import Store
from slurm_hooks.config import Policy
from slurm_hooks.record import seconds_of, utc

SCHEMA = "story/v1"

_DECISIONS_LIMIT = 50
_LATE_SECONDS = 86_400.0
_BEFORE_SECONDS = 7 * 86_400.0
_DAY_SECONDS = 86_400.0


def document(store: Store, name: str, now: str, policy: Policy) -> dict[str, Any] | None:
    """Return ``story/v1`` of a decision's id, a job or a node; None for what is not known.

    ``to_do`` is what a person must do, ``settled`` why there is nothing where it is empty;
    ``events`` are in time order, ``decisions`` the whole records that they were made from.

    Raises:
        naming.Ambiguous: it is the beginning of several decisions' ids.
    """
    decision_id = naming.decision_id(store.file, name)
    decision = store.decision(decision_id) if decision_id else None
    if decision is not None:
        return _of_decision(store, decision, now)
    try:
        job = naming.job(name)
    except naming.UnknownForm:
        return _of_node(store, name, now, policy)
    found = store.decisions(job=job, limit=_DECISIONS_LIMIT)[::-1]
    told = _untold(store, job, found)
    if found:
        return _of_job(store, job, found, told, now, policy)
    return _of_records(store, told, now, policy) if told else _of_node(store, name, now, policy)


def _of_decision(store: Store, decision: Decision, now: str) -> dict[str, Any]:
    facts = []
    if decision.attempt is not None:
        job = decision.attempt.job_id
        others = len(store.decisions(job=str(job), limit=_DECISIONS_LIMIT)) - 1
        if others:
            facts.append(f"the whole job, {others + 1} decisions: recovery explain {job}")
    title = f"decision {decision.id} on {_about(decision)}"
    return _told(store, [decision], title, facts, now)


def _of_job(
    store: Store,
    name: str,
    found: list[Decision],
    told: Sequence[Undecided],
    now: str,
    policy: Policy,
) -> dict[str, Any]:
    """The story of the latest job of that name; of an array's number, of the task that has it."""
    ids = {one.attempt.job_id for one in found if one.attempt}
    job_id = int(name) if name.isdecimal() and int(name) in ids else max(ids)
    of_it = [one for one in found if one.attempt and one.attempt.job_id == job_id]
    mine = story.same_job(of_it)
    facts = []
    if len(ids) > 1:
        facts.append(f"other tasks of {name} were decided on: recovery decisions --job {name}")
    if len(mine) < len(of_it):
        other = of_it[len(of_it) - len(mine) - 1]
        facts.append(f"an earlier job had this number: recovery explain {other.id}")
    later = [one for one in told if one.number > story.number_of(mine[-1])]
    attempts = max(story.number_of(one) for one in mine)
    latest = mine[-1].outcome
    attempts += latest is not None and bool(latest.started)
    attempts = max([attempts, *(one.number for one in later)])
    title = f"{_about(mine[-1])}: {_many(attempts, 'attempt')}, {_many(len(mine), 'decision')}"
    document = _told(store, mine, title, facts, now)
    if later and undecided.waits(later[-1], policy, now):
        document |= _awaited(store, later[-1], now, policy)
    added = [event for one in later for event in undecided.events(one)]
    events = [Event(**one) for one in document["events"]]
    return {**document, "events": _documents(story.in_order([*events, *added]))}


def _about(decision: Decision) -> str:
    if decision.attempt is None:
        return decision.incident.replace("/", " ")
    name = f" {decision.job_name!r}" if decision.job_name else ""
    target = decision.job_target
    task = f" ({target})" if "_" in target else ""
    return (
        f"job {decision.attempt.job_id}{task}{name} of {decision.owner or 'nobody known'},"
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
            jobs = decision.job_parts or (attempt.job_id,)
            query = (
                f"job_id IN ({','.join('?' * len(jobs))}) AND restart = ?"
                " AND time >= ? AND time < ? ORDER BY time LIMIT ?"
            )
            arguments = (*jobs, attempt.restart, since, until, story.LOOKS_LIMIT)
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


# -- what nothing was decided on ----------------------------------------------------------------


def _untold(store: Store, name: str, found: Sequence[Decision]) -> list[Undecided]:
    """The attempts of the latest job of that name that only records tell of, oldest first."""
    decided = {
        (job, one.attempt.restart)
        for one in found
        if one.attempt
        for job in one.job_parts or (one.attempt.job_id,)
    }
    told: list[Told] = []
    for query, arguments in (
        ("job_id = ?", (naming.whole(name),)),
        ("array_task = ?", (name,)),
        ("array_task >= ? AND array_task < ?", (f"{name}_", f"{name}`")),  # ` comes after _
    ):
        rows = _read(store, f"{query} ORDER BY time DESC LIMIT ?", (*arguments, story.LOOKS_LIMIT))
        told = told or [Told(look, job) for look, job in rows if job]
    if not told:
        return []
    last = told[0]
    since = utc(seconds_of(last.look.time) - _BEFORE_SECONDS)
    of_it = [
        one
        for one in told[::-1]
        if one.look.time >= since
        and (one.job["id"], one.job.get("uid")) == (last.job["id"], last.job.get("uid"))
        and (one.job["id"], one.job["restart"]) not in decided
    ]
    latest = found[-1] if found else None
    if latest and (latest.uid != last.job.get("uid") or last.look.time < latest.time):
        return []
    return undecided.attempts(of_it)


def _of_records(
    store: Store, told: Sequence[Undecided], now: str, policy: Policy
) -> dict[str, Any]:
    latest = told[-1]
    job = latest.job
    nodes = {one.look.node for attempt in told for one in attempt.told}
    title = (
        f"job {latest.job_id} of {job.get('user') or 'nobody known'},"
        f" partition {job.get('partition') or 'unknown'}: {_many(latest.number, 'attempt')},"
        f" no decision, records of {_many(len(nodes), 'node')}"
    )
    return {
        "schema": SCHEMA,
        "subject": f"job {latest.job_id}",
        "title": title,
        **_awaited(store, latest, now, policy),
        "facts": [],
        "events": _documents(event for one in told for event in undecided.events(one)),
        "decisions": [],
    }


def _awaited(store: Store, attempt: Undecided, now: str, policy: Policy) -> dict[str, Any]:
    """What keeps a decision from being taken: ``to_do`` and ``settled`` of the story."""
    hindrance = undecided.hindrance(_service(store), now) if attempt.failed else ""
    needed = []
    if hindrance:
        subject, owner = f"job {attempt.job_id}", attempt.job.get("user") or ""
        needed.append(_hindered(subject, attempt.began, owner, hindrance, now))
    return {"to_do": needed, "settled": undecided.why(attempt, policy, now)}


def _service(store: Store) -> Service:
    problems = (store.meta("problems") or "").split("\n")
    return Service(store.meta("last_pass") or "", tuple(problems))


def _hindered(subject: str, since: str, owner: str, what: str, now: str) -> dict[str, Any]:
    return _needed(concerns.Concern(subject, since, since, 0, "", what, "", owner), now)


# -- a node -----------------------------------------------------------------------------------


def _of_node(store: Store, name: str, now: str, policy: Policy) -> dict[str, Any] | None:
    since = utc(seconds_of(now) - nodes.HISTORY_SECONDS)
    until = utc(seconds_of(now) + _DAY_SECONDS)
    listed = nodes.document(store, nodes.Wanted(names=(name,)), now)["nodes"]
    found = store.decisions(node=name, limit=_DECISIONS_LIMIT)[::-1]
    query = "node = ? AND time >= ? AND time < ? ORDER BY time DESC LIMIT ?"
    looks = [look for look, _ in _read(store, query, (name, since, until, story.LOOKS_LIMIT))][::-1]
    if not (listed or found or looks):
        return None
    subject = f"node {name}"
    needed = [_needed(one, now) for one in concerns.of(store.file, (subject,))]
    settled = node_story.settled(name, found)
    if not found:
        settled = undecided.why_no_decision(looks, policy, now)
        hindrance = undecided.hindrance(_service(store), now)
        if hindrance and undecided.of_faults(looks):
            needed.append(_hindered(subject, looks[-1].time, "", hindrance, now))
    turns = timeline.of(store.file, [subject, *(one.id for one in found)])
    events, left_out = node_story.events(name, found, looks, turns)
    facts = nodes.facts(listed[0], now) if listed else ["no heartbeat of it has ever been seen"]
    if left_out:
        facts.append(f"{left_out} earlier events are left out")
    return {
        "schema": SCHEMA,
        "subject": subject,
        "title": f"{subject}: {_many(len(found), 'decision')} named it",
        "to_do": needed,
        "settled": settled,
        "facts": facts,
        "events": _documents(events),
        "node": listed[0] if listed else None,
        "decisions": [one.to_dict() for one in found],
    }


def meant(store: Store, name: str, now: str) -> str:
    """Return what to try instead of a name that nothing is known by."""
    try:
        several = hostlist.expand(name)
    except hostlist.HostlistError:
        several = ()
    if len(several) > 1:
        return f"those are {len(several)} nodes: recovery nodes {shlex.quote(name)}"
    known = {*store.heartbeats(), *inventory.known(store).names}
    short = name.partition(".")[0].casefold()
    near = next((node for node in sorted(known) if node.casefold() == short), "")
    if near:
        return f"did you mean {near}?"
    service = Service(store.meta("last_pass") or "", ())
    late = undecided.hindrance(service, now) if service.last_pass else ""
    return late or "see: recovery decisions"
