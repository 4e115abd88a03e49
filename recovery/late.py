"""What is learnt after the decision: whether it changes the answer, and what is then done.

Pure. That is evidence, or that others have been hit by the same cause. A decision of which no
command has been sent gives way to a new one (``revises``), and its actions end with it, in the same
event of the journal. One that was acted on stands, and an addendum says what was learnt. What was
only recorded leaves the job to people, who may have taken care of it since: a grant or the end of a
pause that came in between changes nothing of that.
"""

from __future__ import annotations

from dataclasses import replace

from recovery.decision import FINAL_ACTIONS, NODE_ACTIONS, Action, Decision
from slurm_hooks.record import FaultRecord


def belongs(record: FaultRecord, former: Decision) -> bool:
    """Whether a record can be evidence of the attempt that ``former`` judged.

    What the next attempt on the same nodes, or another job there, has brought since is not.
    """
    job, attempt = record.job, former.attempt
    if job is None or attempt is None or record.time <= former.time:
        return True
    return (job.id, job.restart) == (attempt.job_id, attempt.restart)


def same_answer(former: Decision, again: Decision) -> bool:
    """Whether the evidence amounts to the same.

    That a budget has been used up meanwhile is no evidence, and revises nothing. That it is one of
    many is news to what was not acted on alone: that follows the event from then on.
    """
    if former.fleet != again.fleet and not former.acted_on:
        return False
    if _cause(former) != _cause(again):
        return False
    return former.job.verdict == again.job.verdict or former.limits != again.limits


def only_recorded(former: Decision) -> str:
    """Return why late evidence changes nothing of what was only recorded, else ''."""
    if former.mode == "act" and not any(one.state == "recorded" for one in former.actions):
        return ""
    return f"{former.id} was only recorded: what is granted since is for failures to come"


def kept(former: Decision, action: Action) -> str:
    """Return why ``action`` is left, which late evidence adds to what ``former`` recorded.

    A node that ``former`` accused is left like the job: it may have been mended and returned. One
    that nobody had heard of yet is not.
    """
    known = action.kind not in NODE_ACTIONS or any(
        one.node == action.target for one in former.nodes
    )
    return only_recorded(former) if known else ""


def is_over(former: Decision) -> str:
    """Return why nothing is done any more of what ``former`` left undone, empty while it is open.

    That others have been hit too says nothing new of its own job and nodes: by now somebody may
    have mended and returned them.
    """
    if (why := only_recorded(former)) or not former.actions:
        return why
    if any(one.state not in FINAL_ACTIONS for one in former.actions):
        return ""
    return f"{former.id} left it undone, and nothing new is known of it"


def revised(former: Decision, by: Decision) -> Decision:
    """Return ``former`` as it stands once ``by`` has taken its place."""
    detail = f"revised by {by.id}: {why(former, by)}"
    actions = tuple(
        action
        if action.state in FINAL_ACTIONS
        else replace(action, state="abandoned", time=by.time, detail=detail)
        for action in former.actions
    )
    text = f"{by.time[:19]}Z {detail}: {by.cause.summary}"
    return replace(former, actions=actions, addenda=(*former.addenda, text), revised_by=by.id)


def why(former: Decision, by: Decision) -> str:
    """Return in a few words what ``by`` has learnt that ``former`` did not know."""
    if by.fleet != former.fleet and _cause(former)[:3] == _cause(by)[:3]:
        return f"it is one of many ({by.fleet})"
    return "evidence came late"


def addendum(again: Decision) -> str:
    """Return in a sentence what late evidence would have made of a decision that was acted on."""
    nodes = "".join(f", {answer.verdict} {answer.node}" for answer in again.nodes)
    cause = f"{again.cause.fault_class}, {again.cause.confidence}: {again.cause.summary}"
    return f"evidence came late and says {cause}; the answer would be {again.job.verdict}{nodes}"


def as_one_of_many(event: Decision, again: Decision | None) -> str:
    """Return in a sentence what a decision stands for that was made before its event was seen.

    ``again`` is the answer that it would get now, None where the job has moved on since.
    """
    text = f"the first of many ({event.id}), decided before the others were hit"
    if again is None:
        return f"{text}; the job has moved on since"
    nodes = "".join(f", {answer.verdict} {answer.node}" for answer in again.nodes)
    return f"{text}; as one of them the answer would be {again.job.verdict}{nodes}"


def _cause(decision: Decision) -> tuple[object, ...]:
    nodes = frozenset((answer.node, answer.verdict) for answer in decision.nodes)
    named = frozenset(item.node for item in decision.cause.implicated)
    return decision.cause.fault_class, decision.cause.confidence, named, nodes
