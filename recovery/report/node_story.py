"""The story of a node: what it found, who named it, drains, returns, checks, boots. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from recovery.decision import Decision
from recovery.report import story
from recovery.report.story import Event, Look
from recovery.timeline import Turn
from slurm_hooks.record import SEVERITIES, seconds_of

EVENTS_LIMIT = 60
"""Most events of one story, the latest."""

_ONE_FAULT_SECONDS = 86_400.0
"""A fault that is told again within this is the same one, still there."""

_CHECKS = {
    "check.passed": "deep check passed",
    "check.failed": "deep check FAILED",
    "check.refused": "deep check waits",
}


def events(
    node: str, decisions: Sequence[Decision], looks: Sequence[Look], turns: Sequence[Turn]
) -> tuple[list[Event], int]:
    """Return what happened to ``node``, in order, and how many earlier events are left out.

    ``decisions`` are those that name it and ``looks`` its records, both oldest first; ``turns``
    are of those decisions and of the node itself.
    """
    named = {f"{kind} {node}" for kind in ("drain", "return")}
    own = [
        turn
        for turn in turns
        if turn.kind == "ack"
        or (turn.kind == "action" and f"{turn.what['kind']} {turn.what['target']}" in named)
    ]
    found = story.in_order(
        [
            *_faults(looks),
            *_boots(looks),
            *_checks(looks),
            *_decided(node, decisions),
            *story.followed(own),
        ]
    )
    left_out = max(0, len(found) - EVENTS_LIMIT)
    return found[left_out:], left_out


def settled(node: str, decisions: Sequence[Decision]) -> str:
    """Return why nobody has to do anything about ``node``, in a sentence."""
    if not decisions:
        return "no decision has named it"
    for decision in reversed(decisions):
        for action in decision.actions:
            if action.target == node and action.kind == "return" and action.state == "verified":
                return f"it was returned to service by {decision.id}"
    latest = decisions[-1]
    answer = next((one for one in latest.nodes if one.node == node), None)
    if answer is None:
        return f"it was avoided, last by {latest.id}"
    return f"{answer.verdict}: {answer.reason}"


def _faults(looks: Iterable[Look]) -> Iterable[Event]:
    """Each fault once, with how often it was told within a day of the last time."""
    runs: dict[tuple[object, ...], list[tuple[Look, str]]] = {}
    closed: list[list[tuple[Look, str]]] = []
    lines: dict[str, tuple[str, ...]] = {}
    for look in looks:
        for finding in look.findings:
            if SEVERITIES.index(finding["severity"]) < story.NOTEWORTHY:
                continue
            if finding["code"] in _CHECKS:
                continue
            key = (finding["code"], finding.get("gpu"), finding.get("pci"), finding.get("link"))
            said = f"{finding['code']} ({finding['severity']}): {finding['summary']}"
            run = runs.get(key)
            if run and seconds_of(look.time) - seconds_of(run[-1][0].time) > _ONE_FAULT_SECONDS:
                closed.append(runs.pop(key))
            runs.setdefault(key, []).append((look, said))
            lines.setdefault(said, story.quoted(finding))
    for run in [*closed, *runs.values()]:
        (first, said), last = run[0], run[-1][0]
        again = f"; told {len(run)} times until {last.time[:19]}Z" if len(run) > 1 else ""
        told = f"{first.hook} saw {story.short(said)}{again}"
        yield Event(first.time, "seen", told, lines[said])


def _checks(looks: Iterable[Look]) -> Iterable[Event]:
    for look in looks:
        for finding in look.findings:
            if finding["code"] in _CHECKS:
                why = finding["summary"].partition(": ")[2]
                told = f"{_CHECKS[finding['code']]}: {why}" if why else _CHECKS[finding["code"]]
                yield Event(look.time, "seen", story.short(told))


def _boots(looks: Sequence[Look]) -> Iterable[Event]:
    for before, after in pairwise(looks):
        if before.boot_id != after.boot_id:
            yield Event(after.time, "seen", "it has booted since it was last heard of")


def _decided(node: str, decisions: Iterable[Decision]) -> Iterable[Event]:
    for decision in decisions:
        cause, job = decision.cause, decision.attempt
        about = f"job {job.job_id}: {decision.job.verdict}" if job else "of the node itself"
        avoided = f" without {node}" if node in decision.job.excluded else ""
        details = [f"cause: {cause.fault_class}, {cause.confidence}: {cause.summary}"]
        details += [
            f"{one.node}: {one.verdict}: {one.reason}" for one in decision.nodes if one.node == node
        ]
        details += [f"limited by: {text}" for text in decision.limited_by]
        text = f"decided {decision.id}, {about}{avoided}"
        yield Event(decision.time, "followed", text, tuple(details), 0, decision.id)
