"""What Slurm is told in words: the reason of a drain, the AdminComment of a held job. Pure."""

from __future__ import annotations

from recovery.decision import Decision
from recovery.guard import OUR_REASON


def drain_reason(decision: Decision, node: str) -> str:
    """Return the drain reason: whose it is, which decision, and what a person wants to know."""
    why = next(answer.reason for answer in decision.nodes if answer.node == node)
    return f"{OUR_REASON} {decision.id}: {why}"


def hold_comment(decision: Decision) -> str:
    """Return the AdminComment of a held job: the why, and how to go on."""
    release = f"Mend it, then: scontrol release {decision.job_target}"
    return f"{OUR_REASON} {decision.id}: {decision.job.reason}. {release}"
