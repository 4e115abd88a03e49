"""What else would have had to be seen for another answer: so that nobody argues with a decision.

Pure. Each sentence names evidence or a fact that somebody can look for or change; ``policy`` puts
them into the decision, ``recovery explain`` shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from recovery.decision import Cause, JobAnswer, NodeAnswer
from recovery.fleet import Membership
from recovery.incident import Incident
from slurm_hooks.config import ClassRule


def would_change(
    incident: Incident,
    cause: Cause,
    rule: ClassRule,
    answer: JobAnswer,
    nodes: Sequence[NodeAnswer],
    event: Membership | None = None,
) -> Iterable[str]:
    """Yield what would have led to another answer, for the job first, then for each node.

    ``event`` is the one that the incident belongs to, where one cause has hit many.
    """
    if event is not None:
        yield f"had it not hit {event.extent} at once, it would have been decided by itself"
    if incident.job is not None:
        yield from _for_the_job(incident, cause, rule, answer, event)
    for node in nodes:
        if event is not None and node.verdict == "watch":
            yield f"a broken part that {node.node} names itself would have drained it"
        else:
            yield from _for_a_node(cause, rule, node)


def _for_the_job(
    incident: Incident,
    cause: Cause,
    rule: ClassRule,
    answer: JobAnswer,
    event: Membership | None,
) -> Iterable[str]:
    if cause.fault_class == "unknown":
        yield "a fault on one of its nodes, or a plain line in its log, would have named a cause"
    if answer.verdict == "requeue":
        if not incident.gated:
            yield "the same failure again without progress would have held it"
        return
    wishes, job = incident.wishes, incident.job
    if rule.job == "leave" or job is None:
        if cause.fault_class.startswith("scheduler"):
            yield "another end than the one that Slurm was asked for would have been looked into"
        return
    if not wishes.opted_in:
        yield "its owner's --comment recovery=requeue would have let it be restarted"
    elif job.federated:
        yield "a job of this cluster alone could have been restarted"
    elif not (job.batch and job.requeue):
        yield "a batch job submitted with --requeue could have been restarted"
    elif rule.job == "hold" and event is not None:
        return  # said already: it is held for what has hit the others as well
    elif rule.job == "hold":
        yield (
            f"a fault of a node itself, seen in its kernel log or by a probe, would have"
            f" explained it before {cause.fault_class}"
        )
    elif wishes.mode == "hold":
        yield "recovery=requeue in its comment would have restarted it without asking"
    elif incident.checkpoints_broken:
        yield "one whole checkpoint would have let it be restarted"
    elif answer.verdict == "hold":
        yield from _for_a_limit(incident, answer)


def _for_a_limit(incident: Incident, answer: JobAnswer) -> Iterable[str]:
    reached = incident.progress_step
    if "progress" in answer.reason and reached is not None:
        yield f"work beyond step {reached} would have let it be restarted"
    elif "by name" in answer.reason:
        yield "without the node in its --nodelist it would have been restarted elsewhere"
    else:
        yield "a restart left in that budget would have been used"


def _for_a_node(cause: Cause, rule: ClassRule, node: NodeAnswer) -> Iterable[str]:
    if node.verdict == "drain":
        yield f"had only the program's own text accused {node.node}, it would be watched"
        return
    if rule.node == "watch":
        yield f"a fault of its own, of a class that drains, would have drained {node.node}"
    elif any(item.node == node.node and item.source != "log" for item in cause.implicated):
        if cause.confidence == "established":
            yield f"another such fault of {node.node} within a day would have drained it"
        else:
            yield f"Slurm's or the node's own word that it is {node.node} would have drained it"
    else:
        yield f"{node.node}'s own kernel log, NVML or another probe saying so would have drained it"
