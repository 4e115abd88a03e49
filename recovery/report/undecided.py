"""The story of attempts that nodes have told of and that no decision is on, and why not. Pure.

Owns which of a job's records are of one attempt, what each of its nodes saw, and what a decision on
it waits for; the story of what was decided is ``story``'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recovery.report import story
from recovery.report.story import Event, Look
from recovery.report.text import LATE_PASS_SECONDS
from recovery.report.words import age
from recovery.slurm.hostlist import HostlistError, compress, expand
from slurm_hooks.config import Policy
from slurm_hooks.record import SEVERITIES, seconds_of

_ENDED_WELL = "0:0"


@dataclass(frozen=True)
class Told:
    """One look of a hook, and the job that it was for: the ``job`` object of its record."""

    look: Look
    job: Mapping[str, Any]


@dataclass(frozen=True)
class Service:
    """How the aggregator does: the time of its last pass (empty: none), and its problems then."""

    last_pass: str
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Undecided:
    """An attempt of a job as its records tell it, oldest first; there is at least one."""

    told: tuple[Told, ...]

    @property
    def job_id(self) -> int:
        """The job's own number."""
        return int(self.told[-1].job["id"])

    @property
    def number(self) -> int:
        """Which attempt of the job it is, from 1."""
        return int(self.told[-1].job["restart"]) + 1

    @property
    def job(self) -> Mapping[str, Any]:
        """What the last record says of the job."""
        return self.told[-1].job

    @property
    def began(self) -> str:
        """The time of the first record."""
        return self.told[0].look.time

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where it ran, as Slurm has told its hooks; at least those that speak."""
        spoke = dict.fromkeys(one.look.node for one in self.told)
        for one in self.told:
            if one.job.get("nodes"):
                try:
                    return tuple(dict.fromkeys((*expand(one.job["nodes"]), *spoke)))
                except HostlistError:
                    continue
        return tuple(spoke)

    @property
    def ends(self) -> tuple[Told, ...]:
        """What epilogs have told of its end."""
        return tuple(one for one in self.told if one.look.hook == "epilog" and one.job.get("exit"))

    @property
    def failed(self) -> bool:
        """Whether a node has told of an end that was not a good one."""
        return any(one.job["exit"] != _ENDED_WELL for one in self.ends)

    @property
    def silent(self) -> tuple[str, ...]:
        """Its nodes that have told nothing of its end."""
        spoke = {one.look.node for one in self.told if one.look.hook == "epilog"}
        return tuple(node for node in self.nodes if node not in spoke)


def attempts(told: Iterable[Told]) -> list[Undecided]:
    """Return the attempts of one job that records are of, oldest first."""
    found: dict[int, list[Told]] = {}
    for one in told:
        found.setdefault(int(one.job["restart"]), []).append(one)
    return [Undecided(tuple(found[restart])) for restart in sorted(found)]


def events(attempt: Undecided) -> list[Event]:
    """Return what its nodes saw and how it ended, in order."""
    number, found = attempt.number, list[Event]()
    worst: dict[str, int] = {}
    for one in attempt.told:
        look = one.look
        grave = SEVERITIES.index(look.worst) if look.worst != "ok" else -1
        worst[look.node] = max(grave, worst.get(look.node, -1))
        found += [
            Event(look.time, "seen", *_saw(look, finding), number)
            for finding in look.findings
            if SEVERITIES.index(finding["severity"]) >= story.NOTEWORTHY
        ]
    last = attempt.told[-1].look.time
    calm = [node for node, grave in worst.items() if grave < story.NOTEWORTHY]
    if calm:
        found.append(Event(last, "seen", f"{compress(calm)} looked and saw no fault", (), number))
    if attempt.ends:
        if attempt.silent:
            text = f"{compress(attempt.silent)} has not reported"
            found.append(Event(last, "seen", text, (), number))
        found.append(_ended(attempt))
    return story.in_order(dict.fromkeys(found))


def _ended(attempt: Undecided) -> Event:
    by_exit: dict[str, list[str]] = {}
    for one in attempt.ends:
        by_exit.setdefault(one.job["exit"], []).append(one.look.node)
    told = ", ".join(f"{code} on {compress(nodes)}" for code, nodes in by_exit.items())
    time = attempt.ends[-1].look.time
    return Event(time, "ended", f"ended, its epilogs say: {told}", (), attempt.number)


def _saw(look: Look, finding: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """What a look saw in a sentence, and below it the line of a log that it was seen in."""
    lines = story.quoted(finding)
    if finding["code"].startswith("log."):
        line = lines[0] if lines else story.short(finding["summary"])
        return f"the job's log, {finding['code']}: {line}", ()
    said = f"{finding['code']} ({finding['severity']}): {story.short(finding['summary'])}"
    return f"{look.node} saw {said}", lines


# -- why nothing is decided ------------------------------------------------------------------------


def waits(attempt: Undecided, policy: Policy, now: str) -> bool:
    """Whether a decision on it is still to come, as far as its records tell."""
    since = seconds_of(attempt.ends[-1].look.time) if attempt.ends else 0.0
    return attempt.failed and seconds_of(now) - since <= policy.gather_max + LATE_PASS_SECONDS


def hindrance(service: Service, now: str) -> str:
    """Return what keeps anything from being decided and a person must mend, else nothing."""
    unanswered = [one for one in service.problems if one.startswith("Slurm does not answer")]
    if not service.last_pass:
        return "start recovery run: it has never passed, and nothing is decided until it does"
    quiet = seconds_of(now) - seconds_of(service.last_pass)
    if quiet > LATE_PASS_SECONDS:
        return f"start recovery run: its last pass was {age(quiet)} ago, nothing is decided since"
    return f"see why {unanswered[0]}" if unanswered else ""


def why(attempt: Undecided, policy: Policy, now: str) -> str:
    """Return why there is no decision on it, in a sentence that ``TO DO nothing:`` begins."""
    name = attempt.job.get("array") or attempt.job_id
    if not attempt.ends:
        return (
            "no decision, since no node has told of an end: it runs, or its epilogs have yet to"
            f" report; scontrol show job {name}"
        )
    if not attempt.failed:
        return f"no decision, since it ended well ({_ENDED_WELL})"
    if waits(attempt, policy, now):
        for_whom = f"{compress(attempt.silent)} to report" if attempt.silent else "Slurm's word"
        return (
            f"no decision yet: it waits for {for_whom}, {policy.settle:g} s from when Slurm"
            f" shows the job's end, {policy.gather_max:g} s at most"
        )
    return (
        "no decision, and none to come: Slurm showed no failed end (it was cancelled, preempted,"
        f" or run again by somebody), or had forgotten the job; sacct -j {name}"
    )


def of_faults(looks: Sequence[Look]) -> bool:
    """Whether a node has told of more than warnings."""
    return any(look.worst in ("fault", "fatal") for look in looks)


def why_no_decision(looks: Sequence[Look], policy: Policy, now: str) -> str:
    """Return why no decision has named a node, whose records are ``looks``, oldest first."""
    grave = [look for look in looks if of_faults([look])]
    if not grave:
        return "no decision has named it, and it has told of nothing graver than a warning"
    told = f"of {grave[-1].worst} severity at {grave[-1].time[11:19]}Z"
    if seconds_of(now) - seconds_of(grave[-1].time) <= policy.gather_max + LATE_PASS_SECONDS:
        return (
            f"no decision yet on what it told {told}: the next pass decides, or the decision on"
            " the job that failed there"
        )
    return (
        f"no decision, and none to come, on what it told {told}: that is no fault of the node's"
        " own, or Slurm does not know the node"
    )
