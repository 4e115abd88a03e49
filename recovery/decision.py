"""Decisions: the recorded answer to "what should happen next", and what became of it.

Owns the data and its JSON form. Who decides is ``policy``, who acts is ``actions``, where it is
kept is ``journal`` and ``store``. A decision changes only by events (``changed``): what was
decided stays as it was, its actions, outcome and addenda grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeVar

SCHEMA = "decision/v1"

Confidence = Literal["established", "probable", "unknown"]
JobVerdict = Literal["requeue", "hold", "leave"]
NodeVerdict = Literal["drain", "watch", "return"]
ActionKind = Literal["requeue", "release", "hold", "drain", "return"]
ActionState = Literal["recorded", "planned", "done", "verified", "failed", "abandoned"]
OutcomeState = Literal["restarted", "resumed", "failed_again", "finished", "lost"]

FINAL_ACTIONS = ("recorded", "verified", "failed", "abandoned")
FINAL_OUTCOMES = ("failed_again", "finished", "lost")

T = TypeVar("T")


@dataclass(frozen=True)
class Attempt:
    """One execution of a job.

    A requeue changes the submit time (measured), so ``job_id`` and rising ``restart`` are what
    ties a job's attempts together; ``sluid`` (24.11 and later) or ``submit_time`` (seconds since
    the epoch) tells two jobs with one number apart.
    """

    cluster: str
    job_id: int
    restart: int
    submit_time: int = 0
    sluid: str | None = None

    @property
    def key(self) -> str:
        """Return the text that identifies this attempt: ``c1/12/1796189498/0``."""
        return f"{self.cluster}/{self.job_id}/{self.sluid or self.submit_time}/{self.restart}"


@dataclass(frozen=True)
class Implicated:
    """A resource held responsible: always a node, perhaps one of its GPUs or ranks.

    ``source`` says whose word it is: ``kernel_log``, ``nvml``, another probe, ``slurm``, or
    ``log`` for the program's own text, on which alone nobody drains a node.
    """

    node: str
    why: str
    source: str
    code: str = ""
    gpu: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Cause:
    """What an incident is attributed to.

    ``fingerprint`` is what failed and not where: two attempts with one fingerprint failed alike.
    """

    fault_class: str
    confidence: Confidence
    summary: str
    implicated: tuple[Implicated, ...] = ()
    fingerprint: str = ""


@dataclass(frozen=True)
class JobAnswer:
    """The verdict for the job, in words, with the nodes it should not run on next."""

    verdict: JobVerdict
    reason: str
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeAnswer:
    """The verdict for one implicated node, in words."""

    node: str
    verdict: NodeVerdict
    reason: str


@dataclass(frozen=True)
class Excerpt:
    """A piece of evidence copied into the decision, since a requeue may destroy the original."""

    record: str
    node: str
    time: str
    code: str
    text: str


@dataclass(frozen=True)
class Action:
    """One scheduler command of a decision, as an intent with a state.

    ``target`` is a job as scontrol names it, or a node. ``step`` is the command about to be run
    or last run of those the kind consists of; ``detail`` what Slurm or the guard answered.
    """

    kind: ActionKind
    target: str
    state: ActionState
    time: str
    step: str = ""
    detail: str = ""

    @property
    def name(self) -> str:
        """Return what identifies the action within its decision: ``drain n3``."""
        return f"{self.kind} {self.target}"


@dataclass(frozen=True)
class Outcome:
    """What became of a decision; ``step`` is the job's own progress counter where known."""

    state: OutcomeState
    time: str
    step: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class Decision:
    """The whole story of one incident, so that ``recovery explain`` needs nothing else.

    ``attempt`` is None for a sick node outside any job. ``owner``, ``uid``, ``partition``,
    ``account`` and ``qos`` are the job's; ``job_nodes`` where it ran. ``rule`` names the row of
    the policy that fired; ``limits`` are sentences (``restarts 1 of 3``); ``considered`` what was
    rejected and why. ``checkpoint_step`` and ``progress_step`` are the job's counters at failure.
    ``limited_by`` says what kept an answer from being acted on (monitor mode, no grant, a guard).
    ``gated`` names the nodes that stopped the attempt before it had begun. ``requeued``: Slurm had
    put the job back into the queue by itself, and the decision adopts what it found there.
    ``running``: the attempt had not ended when it was decided on (it hangs, or is slow).
    """

    id: str
    time: str
    incident: str
    attempt: Attempt | None
    cause: Cause
    job: JobAnswer
    nodes: tuple[NodeAnswer, ...]
    rule: str
    mode: str
    owner: str = ""
    uid: int | None = None
    account: str = ""
    partition: str = ""
    qos: str = ""
    job_name: str = ""
    job_target: str = ""
    job_nodes: tuple[str, ...] = ()
    ended: str = ""
    ended_time: str = ""
    limits: tuple[str, ...] = ()
    considered: tuple[str, ...] = ()
    evidence: tuple[Excerpt, ...] = ()
    checkpoint_step: int | None = None
    progress_step: int | None = None
    limited_by: tuple[str, ...] = ()
    gated: tuple[str, ...] = ()
    requeued: bool = False
    running: bool = False
    actions: tuple[Action, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    addenda: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome | None:
        """What has become of it so far; ``outcomes`` has what came before that."""
        return self.outcomes[-1] if self.outcomes else None

    @property
    def settles(self) -> bool:
        """Whether nothing else is to be decided on this attempt.

        One that still ran, and was not ended by this decision, has its end to come.
        """
        undone = ("recorded", "failed", "abandoned")
        return not self.running or any(
            action.kind == "requeue" and action.state not in undone for action in self.actions
        )

    @property
    def open(self) -> bool:
        """Something is still to be done or to be seen."""
        if any(action.state not in FINAL_ACTIONS for action in self.actions):
            return True
        return self.awaits_outcome

    @property
    def awaits_outcome(self) -> bool:
        """The job was put back to work by this decision, and its next attempt has not ended."""
        restarted = any(
            action.kind in ("requeue", "release") and action.state == "verified"
            for action in self.actions
        )
        return restarted and (self.outcome is None or self.outcome.state not in FINAL_OUTCOMES)

    def with_action(self, action: Action) -> Decision:
        """Return the decision with the action of that name put in place of its former state."""
        others = tuple(known for known in self.actions if known.name != action.name)
        if len(others) == len(self.actions):
            return replace(self, actions=(*self.actions, action))
        swapped = tuple(action if known.name == action.name else known for known in self.actions)
        return replace(self, actions=swapped)

    def with_outcome(self, outcome: Outcome) -> Decision:
        """Return the decision with one more outcome; the same again changes nothing."""
        if outcome in self.outcomes:
            return self
        return replace(self, outcomes=(*self.outcomes, outcome))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of ``decision/v1``; ``outcome`` repeats the last one."""
        latest = asdict(self.outcome) if self.outcome else None
        return {"schema": SCHEMA, **asdict(self), "outcome": latest}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Decision:
        """Read what ``to_dict`` wrote."""
        known = _known(cls, document)
        if known["attempt"]:
            known["attempt"] = Attempt(**_known(Attempt, known["attempt"]))
        known["outcomes"] = _all(Outcome, known.get("outcomes", ()))
        cause = _known(Cause, known["cause"])
        cause["implicated"] = _all(Implicated, cause.get("implicated", ()))
        known["cause"] = Cause(**cause)
        job = _known(JobAnswer, known["job"])
        job["excluded"] = tuple(job.get("excluded", ()))
        known["job"] = JobAnswer(**job)
        known["nodes"] = _all(NodeAnswer, known["nodes"])
        known["evidence"] = _all(Excerpt, known.get("evidence", ()))
        known["actions"] = _all(Action, known.get("actions", ()))
        for name in ("job_nodes", "limits", "considered", "limited_by", "gated", "addenda"):
            known[name] = tuple(known.get(name, ()))
        return cls(**known)


def _known(kind: type[Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of ``document`` that ``kind`` has fields for; a newer version may add some."""
    return {f.name: document[f.name] for f in fields(kind) if f.name in document}


def _all(kind: type[T], documents: Any) -> tuple[T, ...]:
    return tuple(kind(**_known(kind, document)) for document in documents)
