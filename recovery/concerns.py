"""What needs a person: jobs and nodes that keep failing, or that only a person can mend.

Owns that table of the index. A concern stays open, with its age, until somebody has said who looks
after it (event ``ack``), the job has finished, or the node was returned to service.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from recovery import fleet, naming
from recovery.decision import Decision
from recovery.index_file import IndexFile
from slurm_hooks.record import seconds_of, utc

REPEATED = 2
"""Decisions on one job, or naming one node within WINDOW_SECONDS, that make it keep failing."""

WINDOW_SECONDS = 7 * 86_400.0


@dataclass(frozen=True)
class Concern:
    """A job (``job 12``) or node (``node n3``) that a person must see to.

    ``what`` is what to do, ``decision`` the latest one on it, ``owner`` the job's, ``who`` has said
    to look after it (empty: nobody), ``count`` how many decisions spoke of it.
    """

    subject: str
    time: str
    last: str
    count: int
    who: str
    what: str
    decision: str
    owner: str


def put(file: IndexFile, decision: Decision) -> None:
    """Open, renew or close what a decision as it stands now calls for."""
    for subject, count, what in _calls(file, decision):
        file.change(
            "INSERT INTO concerns VALUES (?, ?, ?, ?, '', ?, ?, ?) ON CONFLICT (subject) DO UPDATE"
            " SET last = excluded.last, count = excluded.count, what = excluded.what,"
            " decision = excluded.decision WHERE excluded.last >= last",
            (subject, decision.time, decision.time, count, what, decision.id, decision.owner),
        )
    for subject in _settled(decision):
        file.change(
            "DELETE FROM concerns WHERE subject = ? AND last <= ?", (subject, decision.time)
        )


def subject_of(event: Decision) -> str:
    """Return what the concern about a fleet event is called."""
    return f"fleet event {event.cause.fingerprint} of {event.time[:16]}Z"


def put_ack(file: IndexFile, event: Mapping[str, Any]) -> None:
    """Take in that somebody looks after a subject."""
    row = (str(event["who"]), str(event["subject"]))
    file.change("UPDATE concerns SET who = ? WHERE subject = ?", row)


def unowned(file: IndexFile, limit: int = 100) -> list[Concern]:
    """Return the concerns that nobody looks after, oldest first."""
    return _concerns(file, "WHERE who = '' ORDER BY time LIMIT ?", (limit,))


def since(file: IndexFile, time: str) -> list[Concern]:
    """Return the concerns that were opened or renewed from ``time`` on, oldest first."""
    return _concerns(file, "WHERE last >= ? ORDER BY last LIMIT 1000", (time,))


def find(file: IndexFile, name: str) -> Concern | None:
    """Return the concern of a subject, a job by any of its names, a node, or a decision's id.

    Raises:
        naming.Ambiguous: several decisions' ids begin so.
    """
    query = "WHERE subject IN (?, ?, ?) LIMIT 1"
    found = _concerns(file, query, (name, f"job {name}", f"node {name}"))
    if not found:
        called = name.removeprefix("job ")
        query = "WHERE decision = ? OR decision IN (SELECT decision FROM job_names WHERE name = ?)"
        decision = naming.decision_id(file, name) or ""
        found = _concerns(file, f"{query} ORDER BY last DESC LIMIT 1", (decision, called))
    return found[0] if found else None


def of(file: IndexFile, subjects: Collection[str]) -> list[Concern]:
    """Return the concerns of ``subjects`` (``job 12``), looked after or not, oldest first."""
    marks = ",".join("?" * len(subjects))
    return _concerns(file, f"WHERE subject IN ({marks}) ORDER BY time", tuple(subjects))


def _concerns(file: IndexFile, query: str, arguments: tuple[Any, ...]) -> list[Concern]:
    names = "subject, time, last, count, who, what, decision, owner"
    return [Concern(*row) for row in file.rows(f"SELECT {names} FROM concerns {query}", arguments)]


def _calls(file: IndexFile, decision: Decision) -> list[tuple[str, int, str]]:
    found: list[tuple[str, int, str]] = []
    if decision.revised_by:
        return found  # another one speaks in its place
    failed = [a for a in decision.actions if a.state == "failed"]
    if decision.members:
        subject = subject_of(decision)
        return [(subject, len(decision.members), fleet.to_do(decision))]
    if decision.fleet and not failed:
        return []  # one notice, that of the event, and not one for each of its members
    if decision.attempt is not None:
        job_id = decision.attempt.job_id
        query = "SELECT count(*) FROM decisions WHERE job_id = ? AND cluster = ?"
        count = int(file.rows(query, (job_id, decision.attempt.cluster))[0][0])
        what = _for_job(decision, count, [a.detail for a in failed if a.kind != "drain"])
        if what:
            found.append((f"job {job_id}", count, what))
    oldest = utc(seconds_of(decision.time) - WINDOW_SECONDS)
    for answer in decision.nodes:
        query = "SELECT count(*) FROM decision_nodes WHERE node = ? AND time >= ?"
        count = int(file.rows(query, (answer.node, oldest))[0][0])
        undone = [a.detail for a in failed if a.target == answer.node]
        if answer.verdict == "drain":
            done = any(
                a.name == f"drain {answer.node}" and a.state == "verified" for a in decision.actions
            )
            verb = "repair it, it is drained" if done else "drain it"
            found.append((f"node {answer.node}", count, f"{verb}: {answer.reason}"))
        elif undone:
            found.append((f"node {answer.node}", count, f"look at it: {undone[0]}"))
        elif answer.verdict == "watch" and count >= REPEATED:
            what = f"look at it, named {count} times in a week: {answer.reason}"
            found.append((f"node {answer.node}", count, what))
    return found


def _for_job(decision: Decision, count: int, failed: list[str]) -> str:
    if failed:
        return f"look at it, an action failed: {failed[0]}"
    if decision.job.verdict == "hold":
        return f"mend it, then scontrol release {decision.job_target}: {decision.job.reason}"
    if decision.outcome and decision.outcome.state in ("failed_again", "lost"):
        return f"look at it: {decision.outcome.detail}"
    if decision.job.verdict == "requeue" and all(
        action.state == "recorded" for action in decision.actions
    ):
        return f"run it again, nobody else will: {decision.job.reason}"
    return f"it has failed {count} times: {decision.cause.summary}" if count >= REPEATED else ""


def _settled(decision: Decision) -> list[str]:
    found = []
    if decision.attempt and decision.outcome and decision.outcome.state == "finished":
        found.append(f"job {decision.attempt.job_id}")
    if decision.attempt and decision.rerun:
        found.append(f"job {decision.attempt.job_id}")
    if decision.fleet and decision.revises:  # its event speaks for it from now on
        found.append(fleet.member_of(decision).subject)
    found += [
        f"node {action.target}"
        for action in decision.actions
        if action.kind == "return" and action.state == "verified"
    ]
    return found
