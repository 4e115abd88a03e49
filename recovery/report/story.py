"""The story of a job, a decision or a node: what happened, in the order in which it happened. Pure.

Owns which events a story has, what they say and how what repeats is folded; where they are read is
``explain``'s, how they look on a terminal is ``telling``'s.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from recovery.decision import Decision, Excerpt, Member, Outcome
from recovery.report.words import age
from recovery.slurm.hostlist import compress
from recovery.timeline import Turn
from slurm_hooks.record import SEVERITIES, seconds_of

Kind = Literal["began", "seen", "ended", "decided", "followed"]

_ORDER: Mapping[Kind, int] = {"began": 0, "seen": 1, "ended": 2, "decided": 3, "followed": 4}
"""Of what happened within the same moment."""

_LINE_CHARACTERS = 240
"""Longest quotation; the whole of it is in the decision, as ``--json`` prints it."""

NOTEWORTHY = SEVERITIES.index("warning")
"""The mildest severity that is told by itself."""

LOOKS_LIMIT = 5000
"""Most records of one attempt that are read; where there are more, nobody is called silent."""

_LOGS = ("kernel_log", "job_log")
"""Sources of evidence that is a line as it was written."""

COMMAND = "once it is mended: scontrol"
"""How a detail begins, or goes on, that is a command to be copied whole."""

_DATED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)Z ")


@dataclass(frozen=True)
class Event:
    """One thing that happened at ``time``: a sentence, and what belongs to it, a line each.

    ``attempt`` counts a job's attempts from 1 (0: none is meant), ``decision`` is the id of the
    one that it belongs to.
    """

    time: str
    kind: Kind
    text: str
    details: tuple[str, ...] = ()
    attempt: int = 0
    decision: str = ""


@dataclass(frozen=True)
class Look:
    """The gist of a fault record: what one run of a hook on ``node`` saw.

    ``findings`` are the record's own documents, ``restart`` the attempt's (None: of no job).
    """

    record: str
    node: str
    time: str
    hook: str
    boot_id: str
    restart: int | None
    findings: tuple[Mapping[str, Any], ...]

    @property
    def worst(self) -> str:
        """The gravest severity among the findings, or ``ok``."""
        return max((one["severity"] for one in self.findings), key=SEVERITIES.index, default="ok")


@dataclass(frozen=True)
class Known:
    """What a story is made of besides the decisions: ``looks`` by record, ``turns`` in order.

    ``followers`` are the decisions on the members of a fleet event, by their id.
    """

    looks: Mapping[str, Look] = field(default_factory=dict)
    turns: Sequence[Turn] = ()
    followers: Mapping[str, Decision] = field(default_factory=dict)


def of_decisions(decisions: Sequence[Decision], known: Known) -> list[Event]:
    """Return what happened to a job (or to what single decisions are about), in order."""
    events: dict[Event, None] = {}
    told = set[tuple[str, ...]]()
    attempts = {one.attempt.restart for one in decisions if one.attempt}
    for decision in decisions:
        found = [
            *_attempt(decision, attempts),
            *_sightings(decision, known, told),
            *_silence(decision, known),
            _decided(decision, known),
            *_followed(decision, known),
        ]
        events.update(dict.fromkeys(found))
    acks = [turn for turn in known.turns if turn.kind == "ack"]
    events.update(dict.fromkeys(followed(acks)))
    return in_order(events)


def in_order(events: Iterable[Event]) -> list[Event]:
    """Return events by time, and within one moment in the order of their kinds."""
    return sorted(events, key=lambda one: (one.time, _ORDER[one.kind]))


def followed(turns: Sequence[Turn]) -> Iterable[Event]:
    """Return the steps of actions, and who looks after something, as events."""
    for place, turn in enumerate(turns):
        if turn.kind == "ack":
            yield Event(turn.time, "followed", f"{turn.what['who']} looks after {turn.subject}")
        elif turn.kind == "action" and not _is_idle(turn, turns[place + 1 :]):
            yield Event(turn.time, "followed", _step(turn.what))


def same_job(decisions: Sequence[Decision]) -> list[Decision]:
    """Return those of ``decisions`` (oldest first, of one job number) that are on the latest job.

    Numbers are used again: another owner, or a restart count that has gone back, is another job.
    """
    kept: list[Decision] = []
    for one in reversed(decisions):
        if kept and (one.uid != kept[-1].uid or number_of(one) > number_of(kept[-1])):
            break
        kept.append(one)
    return kept[::-1]


def number_of(decision: Decision) -> int:
    """Return which attempt of its job a decision is about, from 1; 0 where it is about none."""
    return decision.attempt.restart + 1 if decision.attempt else 0


def short(text: str) -> str:
    """Return a quotation of bounded length; where it is cut, that shows."""
    return text if len(text) <= _LINE_CHARACTERS else f"{text[:_LINE_CHARACTERS]}…"


def quoted(finding: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the line of a log that a finding was made from, where its summary does not say it."""
    lines = [one["text"] for one in finding.get("evidence", ()) if one["source"] in _LOGS]
    return (short(lines[0]),) if lines and lines[0] not in finding["summary"] else ()


# -- an attempt ------------------------------------------------------------------------------


def _attempt(decision: Decision, attempts: Collection[int]) -> Iterable[Event]:
    if decision.attempt is None:
        return
    number, nodes = number_of(decision), compress(decision.job_nodes)
    gpus = f", {decision.gpus} GPUs" if decision.gpus else ""
    if decision.started_time:
        yield Event(decision.started_time, "began", f"began on {nodes}{gpus}", (), number)
    # What has not ended is told as it stood when it was decided on.
    ended = decision.ended_time or decision.time
    after = ""
    if decision.started_time and decision.ended_time:
        after = f" after {age(seconds_of(ended) - seconds_of(decision.started_time))}"
    where = "" if decision.started_time else f" on {nodes}{gpus}"
    yield Event(ended, "ended", f"ended {decision.ended}{where}{after}", _steps(decision), number)
    restarted = next((one for one in decision.outcomes if one.started), None)
    if restarted is not None and number not in attempts:  # its own decision tells it better
        where = restarted.detail if restarted.state == "restarted" else ""
        text = f"began {where}".rstrip()
        yield Event(restarted.started, "began", text, (), number + 1)


def _steps(decision: Decision) -> tuple[str, ...]:
    said = []
    if decision.progress_step is not None:
        said.append(f"work had reached step {decision.progress_step}")
    if decision.checkpoint_step is not None:
        said.append(f"the newest whole checkpoint is at step {decision.checkpoint_step}")
    return ("; ".join(said),) if said else ()


# -- what was seen ---------------------------------------------------------------------------


def _sightings(decision: Decision, known: Known, told: set[tuple[str, ...]]) -> Iterable[Event]:
    """Each excerpt that the decision keeps, once; what is merely informative as one number."""
    notes: list[Excerpt] = []
    for excerpt in decision.evidence:
        key = (excerpt.record, excerpt.code, excerpt.text)
        if key in told:
            continue
        told.add(key)
        finding = _finding(known, excerpt)
        severity = finding["severity"] if finding else ""
        if severity and SEVERITIES.index(severity) < NOTEWORTHY and not _is_log(excerpt):
            notes.append(excerpt)
            continue
        time = _seen_at(excerpt, finding, decision)
        yield Event(time, "seen", _saw(excerpt, finding), (), number_of(decision), decision.id)
    if notes:
        codes = ", ".join(sorted({one.code for one in notes}))
        text = f"noted besides, {len(notes)} in all: {codes}"
        time = max(one.time for one in notes)
        yield Event(time, "seen", short(text), (), number_of(decision), decision.id)


def _saw(excerpt: Excerpt, finding: Mapping[str, Any] | None) -> str:
    if _is_log(excerpt):
        echoes = int(finding.get("count", 1)) - 1 if finding else 0
        follow = f"; {echoes} further lines follow from it" if echoes > 0 else ""
        return f"the job's log, {excerpt.code}: {short(excerpt.text)}{follow}"
    grave = f" ({finding['severity']})" if finding else ""
    return f"{excerpt.node} saw {excerpt.code}{grave}: {short(excerpt.text)}"


def _is_log(excerpt: Excerpt) -> bool:
    return excerpt.code.startswith("log.")


def _finding(known: Known, excerpt: Excerpt) -> Mapping[str, Any] | None:
    """The finding that an excerpt was taken from, while the index still holds its record."""
    look = known.looks.get(excerpt.record)
    # An excerpt of the log is named by its class, the finding by a code made of that.
    wanted = excerpt.code.replace(".", "_").replace("log_", "log.", 1)
    names = (excerpt.code, wanted) if _is_log(excerpt) else (excerpt.code,)
    return next((one for one in look.findings if one["code"] in names), None) if look else None


def _seen_at(excerpt: Excerpt, finding: Mapping[str, Any] | None, decision: Decision) -> str:
    """When it happened, as a kernel line tells it, else when the hook saw it.

    Evidence from before the attempt is as old as a node cares to remember: then the hook's time.
    """
    times = [one.get("time") for one in finding.get("evidence", ())] if finding else []
    since = decision.started_time or decision.ended_time or decision.time
    return min((one for one in times if one and since <= one <= excerpt.time), default=excerpt.time)


def _silence(decision: Decision, known: Known) -> Iterable[Event]:
    """Which nodes of the attempt looked and saw nothing, and which were not heard of."""
    if decision.attempt is None:
        return
    mine = [
        look
        for look in known.looks.values()
        if look.restart == decision.attempt.restart and look.node in decision.job_nodes
    ]
    if not mine:
        return
    worst: dict[str, int] = {}
    for look in mine:
        grave = SEVERITIES.index(look.worst) if look.worst != "ok" else -1
        worst[look.node] = max(grave, worst.get(look.node, -1))
    calm = [node for node, grave in worst.items() if grave < NOTEWORTHY]
    silent = set(decision.job_nodes) - worst.keys()
    last, number = max(look.time for look in mine), number_of(decision)
    if calm:
        yield Event(last, "seen", f"{compress(calm)} looked and saw no fault", (), number)
    if silent and len(mine) < LOOKS_LIMIT:
        yield Event(last, "seen", f"{compress(silent)} has not reported", (), number)


# -- the decision, and what followed -----------------------------------------------------------


def _decided(decision: Decision, known: Known) -> Event:
    cause = decision.cause
    details = [f"cause: {cause.fault_class}, {cause.confidence}: {cause.summary}"]
    if decision.attempt or decision.members:
        details.append(f"job: {decision.job.verdict}: {decision.job.reason}")
    if decision.fleet:
        details.append(f"follows {decision.fleet}, on all that one cause has hit")
    details += [f"{one.node}: {one.verdict}: {one.reason}" for one in decision.nodes]
    details.append(f"rule {decision.rule}")
    if decision.revises:
        details.append(f"in the place of {decision.revises}, for what was learnt since")
    for title, texts in (
        ("limit", decision.limits),
        ("considered", decision.considered),
        ("would have changed it", decision.would_change),
        ("limited by", decision.limited_by),
    ):
        details += [f"{title}: {text}" for text in texts]
    details += _members(decision, known)
    number = number_of(decision)
    return Event(decision.time, "decided", decision.id, tuple(details), number, decision.id)


def _members(decision: Decision, known: Known) -> list[str]:
    """Who one cause has hit: jobs with what was decided for each, and the nodes in one list."""
    if not decision.members:
        return []
    jobs = [one for one in decision.members if one.subject.startswith("job ")]
    nodes = sorted({node for one in decision.members for node in one.nodes})
    lines = [f"members: {len(jobs)} jobs, {len(nodes)} nodes ({compress(nodes)})"]
    for one in jobs:
        answer = f": {one.verdict}, {one.decision}" if one.decision else ""
        lines.append(f"{one.subject}{answer}")
    return [*lines, *_going_on(jobs, known)]


def _going_on(jobs: Sequence[Member], known: Known) -> Iterable[str]:
    """The one command for all members that are held, and for those that lie as they ended."""
    held: list[str] = []
    ended: list[str] = []
    for one in jobs:
        made = known.followers.get(one.decision)
        if made is None or one.verdict != "hold" or made.rerun:
            continue
        verified = any((a.kind, a.state) == ("hold", "verified") for a in made.actions)
        (held if verified else ended).append(made.job_target)
    if held:
        yield f"{COMMAND} release {','.join(held)}"
    if ended:
        lie = "not held, they lie as they ended" if held else "nobody has held them"
        yield f"{lie}; {COMMAND} requeue {','.join(ended)}"


def _followed(decision: Decision, known: Known) -> Iterable[Event]:
    def event(time: str, text: str) -> Event:
        return Event(time, "followed", text, (), number_of(decision), decision.id)

    turns = [turn for turn in known.turns if turn.subject == decision.id]
    told = [turn for turn in turns if turn.kind == "action"]
    for one in followed(told):
        yield replace(one, attempt=number_of(decision), decision=decision.id)
    final = {(turn.what["kind"], turn.what["target"], turn.what["state"]) for turn in told}
    for action in decision.actions:  # what no event of its own has told, such as a revision's
        if (action.kind, action.target, action.state) not in final:
            what = {"detail": action.detail, "state": action.state, "step": action.step}
            yield event(action.time, _step({**what, "kind": action.kind, "target": action.target}))
    late = [turn for turn in turns if turn.kind == "addendum"]
    for turn in late:
        yield event(turn.time, f"later: {turn.what['text']}")
    untold = [text for text in decision.addenda if text not in {t.what["text"] for t in late}]
    for text in untold:  # a revision's, which begins with its time
        dated = _DATED.match(text)
        time = f"{dated[1]}.000000Z" if dated else decision.time
        yield event(time, f"later: {text[dated.end() :] if dated else text}")
    for outcome in decision.outcomes:
        yield event(outcome.time, _became(outcome))
    if decision.rerun:
        yield event(decision.rerun, "somebody else ran the job again")
    for review in decision.reviews:
        would = f", would have: {review.would_have}" if review.would_have else ""
        note = f": {review.note}" if review.note else ""
        yield event(review.time, f"review by {review.who}: {review.verdict}{would}{note}")


def _is_idle(turn: Turn, later: Sequence[Turn]) -> bool:
    """Whether a turn tells nothing that a later one of the same action does not tell."""
    what = turn.what
    if what["state"] != "planned" or what["step"]:
        return False
    action = (turn.subject, what["kind"], what["target"])
    return any(
        one.kind == "action" and (one.subject, one.what["kind"], one.what["target"]) == action
        for one in later
    )


def _step(what: Mapping[str, str]) -> str:
    """An action's step in words; what verifies it is what a fresh look at Slurm has shown."""
    name, state = f"{what['kind']} {what['target']}", what["state"]
    if state == "planned" and what["step"]:
        return f"{name}: sends {what['step'].replace('_', ' ')}"
    if state == "done":
        return f"{name}: sent"
    shown = f", Slurm shows: {what['detail']}" if state == "verified" else f": {what['detail']}"
    return f"{name}: {state}{shown if what['detail'] else ''}"


def _became(outcome: Outcome) -> str:
    return f"outcome {outcome.state}{': ' if outcome.detail else ''}{outcome.detail}"
