"""From an incident and its history to a decision: ``decide`` is a pure function.

    >>> rule_for("hardware.gpu.contained", {}).node
    'watch'

No clock, no file, no scheduler is asked here: the same arguments always give the same decision, so
that any decision can be replayed and a policy tried on last month's records. Whether it may be
acted upon is ``guard``'s question, not the policy's.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from recovery import cause as causes
from recovery import excerpts, fleet, reasons
from recovery.budgets import History, Limit, limits_of
from recovery.decision import (
    Attempt,
    Cause,
    Decision,
    Implicated,
    JobAnswer,
    NodeAnswer,
)
from recovery.incident import Incident
from recovery.slurm.base import Job
from slurm_hooks.config import ClassRule, Policy
from slurm_hooks.record import new_id, utc
from slurm_hooks.toml_reader import read

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = Path(__file__).with_name("policy.toml")

_CONSIDERED_LIMIT = 8


def rule_for(fault_class: str, overrides: Mapping[str, ClassRule]) -> ClassRule:
    """Return the row of the longest class above or at ``fault_class``, else that of ``unknown``."""
    return _row(fault_class, overrides)[1]


def decide(incident: Incident, history: History, policy: Policy, now: float, mode: str) -> Decision:
    """Return the decision on an incident; ``now`` is in seconds since the epoch.

    The decision's id is made from ``now`` and the incident, so that a replay names it alike.
    """
    uid = incident.job.uid if incident.job else None
    cause = causes.with_other_users(
        causes.of(incident), uid, history.gpu_users, policy.users_that_blame_a_gpu
    )
    name, rule = _row(cause.fault_class, policy.classes)
    event = history.fleet
    if event and rule.job == "requeue":
        rule = replace(rule, job=rule.fleet)
    nodes = _node_answers(incident, cause, rule, history)
    limits = limits_of(incident, cause, rule, history, policy)
    answer = _job_answer(incident, cause, rule, limits, history, now)
    job = incident.job
    return Decision(
        id=_decision_id(incident, now),
        time=utc(now),
        incident=incident.key,
        attempt=incident.attempt,
        cause=cause,
        job=_left_running(incident, answer),
        nodes=nodes,
        rule=f"{name}: job {rule.job}, node {rule.node}"
        + (f" after {rule.drain_after} in a day" if rule.drain_after > 1 else "")
        + (", as one of many" if event else ""),
        mode=mode,
        owner=job.user if job else "",
        uid=job.uid if job else None,
        account=job.account if job else "",
        partition=job.partition if job else ",".join(incident.partitions),
        qos=job.qos if job else "",
        job_name=job.name if job else "",
        job_target=job.name_for_commands if job else "",
        job_parts=job.het_parts if job else (),
        job_nodes=incident.nodes if job else (),
        ended=_ended(incident),
        ended_time=_ended_time(incident),
        started_time=utc(job.start_time)
        if job and job.start_time and not incident.requeued
        else "",
        limits=tuple(limit.text for limit in limits),
        considered=tuple(_considered(incident, cause, history, answer)),
        would_change=tuple(reasons.would_change(incident, cause, rule, answer, nodes, event)),
        evidence=excerpts.of(incident, cause),
        checkpoint_step=incident.checkpoint_step,
        progress_step=incident.progress_step,
        gated=incident.gated,
        requeued=incident.requeued,
        gpus=(job.gpus if job else 0) or incident.gpus,
        running=incident.running,
        fleet=event.decision if event else "",
    )


def _ended_time(incident: Incident) -> str:
    """When the attempt ended; of one that runs, Slurm shows when it would have to."""
    job = incident.job
    if job is None or not job.end_time or incident.requeued or incident.running:
        return ""
    return utc(job.end_time)


def _ended(incident: Incident) -> str:
    job = incident.job
    if job is None:
        return ""
    if incident.gated:
        return "before it began"
    if job.held_by_expedite:
        return f"{job.exit_code}:{job.signal}, requeued and held by Slurm (--requeue=expedite)"
    if incident.requeued:
        return "and was requeued by Slurm itself"
    if incident.running:
        return "not yet: it runs" + (" and makes no progress" if incident.hang else "")
    return f"{job.state} {job.exit_code}:{job.signal}"


def same_attempt(earlier: Decision, attempt: Attempt) -> bool:
    """Whether ``earlier`` speaks of a former attempt of the same job.

    A rising restart count is what counts: a requeue changes the submit time, and the SLUID of
    the releases that have one.
    """
    former = earlier.attempt
    return former is not None and former.restart < attempt.restart


def _row(fault_class: str, overrides: Mapping[str, ClassRule]) -> tuple[str, ClassRule]:
    table = {**_default_table(), **overrides}
    parts = fault_class.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in table:
            return name, table[name]
    return "unknown", table["unknown"]


@functools.cache
def _default_table() -> Mapping[str, ClassRule]:
    document = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {name: read(ClassRule, row, (name,)) for name, row in document.items()}


def _decision_id(incident: Incident, now: float) -> str:
    digest = hashlib.sha256(f"{incident.key}/{incident.time}".encode()).digest()
    return new_id(now, digest[:10])


# -- nodes ----------------------------------------------------------------------------------


def _node_answers(
    incident: Incident, cause: Cause, rule: ClassRule, history: History
) -> tuple[NodeAnswer, ...]:
    if rule.node == "none":
        return ()
    by_node: dict[str, list[Implicated]] = {}
    for item in cause.implicated:
        by_node.setdefault(item.node, []).append(item)
    return tuple(
        _node_answer(incident, items, cause, rule, history, history.named_today.get(node, 0))
        for node, items in by_node.items()
    )


def _node_answer(
    incident: Incident,
    items: list[Implicated],
    cause: Cause,
    rule: ClassRule,
    history: History,
    before: int,
) -> NodeAnswer:
    item = next((one for one in items if one.source != "log"), items[0])
    why = item.why
    if incident.attempt:
        why += f" (job {incident.attempt.job_id})"
    if rule.node == "watch":
        return NodeAnswer(item.node, "watch", why)
    if item.source == "log":
        return NodeAnswer(item.node, "watch", f"{why}: only the program's own log says so")
    if cause.confidence != "established":
        return NodeAnswer(item.node, "watch", f"{why}: {cause.confidence}, not established")
    if history.fleet and not any(fleet.is_own(one, cause.fault_class) for one in items):
        return NodeAnswer(item.node, "watch", f"{why}: one of {history.fleet.extent}, no drain")
    if before + 1 < rule.drain_after:
        times = f"{before + 1} of {rule.drain_after} times in a day"
        return NodeAnswer(item.node, "watch", f"{why}: {times}")
    return NodeAnswer(item.node, "drain", why)


# -- the job --------------------------------------------------------------------------------


def _job_answer(
    incident: Incident,
    cause: Cause,
    rule: ClassRule,
    limits: list[Limit],
    history: History,
    now: float,
) -> JobAnswer:
    """The answer; of a federation's job it is only said what it would be were it this cluster's."""
    answer = _own_answer(incident, cause, rule, limits, history, now)
    if answer.verdict == "leave" or incident.job is None or not incident.job.federated:
        return answer
    return JobAnswer("leave", f"{answer.reason}; where it runs is its federation's to say")


def _own_answer(
    incident: Incident,
    cause: Cause,
    rule: ClassRule,
    limits: list[Limit],
    history: History,
    now: float,
) -> JobAnswer:
    job, wishes = incident.job, incident.wishes
    if job is None:
        return JobAnswer("leave", "no job has failed of it")
    excluded = tuple(sorted({item.node for item in cause.implicated})) if rule.exclude else ()
    if incident.gated:
        return _gated_answer(incident, limits)
    if rule.job == "leave":
        return JobAnswer("leave", cause.summary)
    if not wishes.opted_in:
        wrong = f"its comment is not understood: {wishes.problems[0]}" if wishes.problems else ""
        why = wrong or "its owner did not opt in (--comment recovery=requeue)"
        return JobAnswer("leave", f"{cause.summary}; {why}, so it stays as it ended")
    if not job.known:
        text = "Slurm has forgotten the job already: its owner must submit it again"
        return JobAnswer("leave", f"{cause.summary}; {text}")
    if not job.batch or not job.requeue:
        kind = "is no batch job" if not job.batch else "was submitted with --no-requeue"
        return JobAnswer("leave", f"{cause.summary}; it {kind}: its owner must submit it again")
    pointless = _pointless(job, now)
    if pointless:
        return JobAnswer("leave", f"{cause.summary}; {pointless}: a restart is pointless")
    event = history.fleet
    if rule.job == "hold" and event:
        text = f"it has hit {event.extent} ({event.decision}): to be run again once it is mended"
        return JobAnswer("hold", f"{cause.summary}; {text}")
    if rule.job == "hold":
        return JobAnswer("hold", f"{cause.summary}: a restart would fail again")
    if wishes.mode == "hold":
        return JobAnswer("hold", f"{cause.summary}; its owner asked to be asked (recovery=hold)")
    if incident.checkpoints_broken:
        return JobAnswer("hold", f"{cause.summary}; none of its checkpoints is whole")
    spent = next((limit for limit in limits if limit.spent), None)
    if spent:
        return JobAnswer("hold", f"{cause.summary}; {spent.text}")
    left = [node for node in job.required if node in excluded]
    if left:
        named = ", ".join(left)
        return JobAnswer("hold", f"{cause.summary}; it asks for {named} by name (--nodelist)")
    hit = event.avoided if event and rule.exclude else ()
    avoided = [node for node in (*history.suspects, *hit) if node not in job.required]
    excluded = tuple(sorted({*excluded, *avoided}))
    return JobAnswer("requeue", _requeue_reason(cause, excluded, incident), excluded)


def _pointless(job: Job, now: float) -> str:
    """Why a restart could not come to anything, empty where it could.

    Slurm removes a job that can no longer end before its deadline (man sbatch, --deadline), and
    never starts one whose own dependency has failed; ``?`` stands between alternatives.
    """
    needed = job.time_min_seconds or job.time_limit_seconds
    if job.deadline and now + needed > job.deadline:
        return f"it cannot end before its deadline ({utc(job.deadline)[:19]}Z)"
    if "(failed)" in job.dependency and "?" not in job.dependency:
        return f"what it depends on has failed ({job.dependency[:100]})"
    return ""


def _left_running(incident: Incident, answer: JobAnswer) -> JobAnswer:
    """A job that runs is not ended to be held: what nobody may restart is left to its owner."""
    if not incident.running or answer.verdict != "hold":
        return answer
    return JobAnswer("leave", f"{answer.reason}; it runs, and is left to its owner")


def _gated_answer(incident: Incident, limits: list[Limit]) -> JobAnswer:
    """The job never began: no opt-in is asked for, since it was we who kept it from starting."""
    stopped = f"{', '.join(incident.gated)} stopped it before it began"
    if limits and limits[0].spent:
        return JobAnswer("leave", f"{stopped}; {limits[0].text}, so it stays held")
    return JobAnswer("requeue", f"{stopped}: release it elsewhere", incident.gated)


def _requeue_reason(cause: Cause, excluded: tuple[str, ...], incident: Incident) -> str:
    where = f" without {', '.join(excluded)}" if excluded else ""
    step = incident.checkpoint_step
    since = f", from its checkpoint at step {step}" if step is not None else ""
    return f"{cause.summary}: run it again{where}{since}"


# -- what the record shows --------------------------------------------------------------------


def _considered(
    incident: Incident, cause: Cause, history: History, answer: JobAnswer
) -> Iterable[str]:
    """What else spoke, and why it was not the cause; and which other answers were rejected."""
    if answer.verdict == "requeue":
        for node, why in history.suspects.items():
            if node in answer.excluded:
                yield f"{node} is a repeat offender and is avoided: {why}"
    if history.fleet and incident.job and answer.verdict == "hold":
        yield f"a restart at once: {history.fleet.extent} show the same, it would fail of it again"
    log = incident.log
    if log and log.fault_class != cause.fault_class and cause.fault_class != "unknown":
        yield f"the job's log speaks of {log.fault_class}: weaker evidence than the cause"
    if log and log.fault_class == "cascade":
        yield "the job's log holds only victims' lines"
    others = {
        (s.node, s.fault_class)
        for s in incident.sightings
        if s.fault_class not in ("none", cause.fault_class)
        and not s.finding.code.startswith("log.")
    }
    for node, fault_class in sorted(others)[:_CONSIDERED_LIMIT]:
        yield f"{node} also shows {fault_class}: it explains less"
    for text in incident.hang.missing if incident.hang else ():
        yield f"evidence not taken: {text}"
    if incident.silent and incident.attempt and not (incident.gated or incident.running):
        yield f"no report from {', '.join(incident.silent)}: silence blames nobody"
