"""Decisions: the recorded answer to "what should happen next", and what became of it.

Owns the data and its JSON form. Who decides is ``policy``, who acts is ``actions``, where it is
kept is ``journal`` and ``store``. A decision changes only by events (``changed``): what was
decided stays as it was, its actions, outcome and addenda grow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeVar

SCHEMA = "decision/v1"

Confidence = Literal["established", "probable", "unknown"]
JobVerdict = Literal["requeue", "hold", "leave"]
NodeVerdict = Literal["drain", "watch", "return"]
ActionKind = Literal["requeue", "release", "hold", "drain", "return"]
ActionState = Literal["recorded", "planned", "done", "verified", "failed", "abandoned"]
OutcomeState = Literal["restarted", "resumed", "failed_again", "finished", "lost"]

ReviewVerdict = Literal["helpful", "ambiguous", "disruptive"]

NODE_ACTIONS = ("drain", "return")
"""Kinds of action whose target is a node; that of all others is a job."""

RESTART_ACTIONS = ("requeue", "release")
"""Kinds of action that put a job back to work."""

FINAL_ACTIONS = ("recorded", "verified", "failed", "abandoned")
FINAL_OUTCOMES = ("failed_again", "finished", "lost")

MEMBERS_LIMIT = 1000
"""Most members that a fleet event lists; those beyond still follow it, and name it."""

T = TypeVar("T")


@dataclass(frozen=True)
class Attempt:
    """One execution of a job.

    A requeue changes the submit time and the SLUID (measured), so ``job_id`` and rising ``restart``
    are what ties a job's attempts together; ``sluid`` (26.05; 24.11 shows none) or ``submit_time``
    (seconds since the epoch) tells two jobs with one number apart.
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
    ``log`` for the program's own text, on which alone nobody drains a node, ``history`` for what
    the node was part of before. ``resolution`` is what mends it (the catalogue's word), ``uuid``
    and ``pci`` are the GPU's and ``boot_id`` the node's at that time: what must have changed before
    the node returns.
    """

    node: str
    why: str
    source: str
    code: str = ""
    gpu: int | None = None
    rank: int | None = None
    resolution: str = ""
    uuid: str = ""
    pci: str = ""
    boot_id: str = ""

    @property
    def device(self) -> str:
        """Return which GPU of its node: by its address, which a kernel line has, or its number."""
        return self.pci or ("" if self.gpu is None else f"GPU {self.gpu}")


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
    """The verdict for one implicated node, in words.

    ``stands`` is, for a return, the drain reason of ours that must still stand when it is acted on.
    """

    node: str
    verdict: NodeVerdict
    reason: str
    stands: str = ""


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
    """What became of a decision, seen at ``time``.

    ``step`` is the job's own progress counter where known. ``started`` and ``ended`` are the next
    attempt's own times, empty where not known. ``decision`` is the one on that attempt, where it
    has failed again.
    """

    state: OutcomeState
    time: str
    step: int | None = None
    detail: str = ""
    started: str = ""
    ended: str = ""
    decision: str = ""


@dataclass(frozen=True)
class Review:
    """What one person thinks of a decision; ``uid`` wrote it, ``who`` is that uid's name.

    ``would_have`` is the verdict that they would have given. A person's latest review counts.
    """

    id: str
    time: str
    who: str
    uid: int
    verdict: ReviewVerdict
    would_have: str = ""
    note: str = ""


@dataclass(frozen=True)
class Member:
    """One node (``node n3``) or job (``job 12``) of a fleet event, hit at ``time``.

    ``nodes`` are those that show it. ``decision`` is the record of what was done with the job, or
    with a node that has broken by itself, and ``verdict`` what that says of the job.
    """

    subject: str
    time: str
    nodes: tuple[str, ...] = ()
    decision: str = ""
    verdict: str = ""


@dataclass(frozen=True)
class Decision:
    """The whole story of one incident, so that ``recovery explain`` needs nothing else.

    ``attempt`` is None for a sick node outside any job. ``owner``, ``uid``, ``partition``,
    ``account`` and ``qos`` are the job's, ``job_parts`` the ids of all parts of a heterogeneous
    one, its own first; ``job_nodes`` where the attempt ran, with ``gpus`` in all, from
    ``started_time`` to ``ended_time`` (empty where unknown). ``rule`` names the row of the policy
    that fired; ``limits`` are sentences (``restarts 1 of 3``); ``considered`` what was rejected and
    why, ``would_change`` what else would have had to be seen for another answer.
    ``revises`` is the decision in whose place this one was put by what was learnt later; there
    ``revised_by`` names this one. ``checkpoint_step`` and ``progress_step``: the job's at failure.
    ``limited_by`` says what kept an answer from being acted on (monitor mode, no grant, a guard).
    ``gated`` names the nodes that stopped the attempt before it had begun. ``requeued``: Slurm had
    put the job back into the queue by itself, and the decision adopts what it found there.
    ``rerun`` is when somebody else ran the job again, where this toolkit did not.
    ``running``: the attempt had not ended when it was decided on (it hangs, or is slow).
    ``members`` are who one cause has hit, where it has hit many; ``fleet`` names that decision in
    the record of each of them, which follows it.
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
    job_parts: tuple[int, ...] = ()
    job_nodes: tuple[str, ...] = ()
    ended: str = ""
    ended_time: str = ""
    started_time: str = ""
    gpus: int = 0
    limits: tuple[str, ...] = ()
    considered: tuple[str, ...] = ()
    would_change: tuple[str, ...] = ()
    evidence: tuple[Excerpt, ...] = ()
    checkpoint_step: int | None = None
    progress_step: int | None = None
    limited_by: tuple[str, ...] = ()
    gated: tuple[str, ...] = ()
    requeued: bool = False
    revises: str = ""
    revised_by: str = ""
    running: bool = False
    fleet: str = ""
    members: tuple[Member, ...] = ()
    actions: tuple[Action, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    addenda: tuple[str, ...] = ()
    rerun: str = ""
    reviews: tuple[Review, ...] = ()

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
    def standing(self) -> str:
        """Return how it stands, in a word or two: its outcome, else the state that matters most."""
        if self.outcome:
            return self.outcome.state
        states = [action.state for action in self.actions]
        ranked = ("failed", "planned", "done", "abandoned", "verified", "recorded")
        return next((state for state in ranked if state in states), "no action")

    @property
    def open(self) -> bool:
        """Something is still to be done or to be seen."""
        if any(action.state not in FINAL_ACTIONS for action in self.actions):
            return True
        return self.awaits_outcome

    @property
    def acted_on(self) -> bool:
        """A command has been sent for it, or may have been before a crash."""
        return any(action.step or action.state in ("done", "verified") for action in self.actions)

    @property
    def awaits_outcome(self) -> bool:
        """The job was put back to work by this decision, and its next attempt has not ended."""
        restarted = any(
            action.kind in RESTART_ACTIONS and action.state == "verified" for action in self.actions
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

    def with_members(self, new: Iterable[Member]) -> Decision:
        """Return the event with ``new`` members, of which the latest word counts."""
        known = {one.subject: one for one in self.members}
        for one in new:
            before = known.get(one.subject)
            if before is None and len(known) >= MEMBERS_LIMIT:
                continue
            nodes = dict.fromkeys((*(before.nodes if before else ()), *one.nodes))
            told = one if one.decision or before is None else before
            known[one.subject] = replace(told, time=one.time, nodes=tuple(nodes))
        return replace(self, members=tuple(known.values()))

    def with_review(self, review: Review) -> Decision:
        """Return the decision with one more review; one that is known changes nothing."""
        if any(known.id == review.id for known in self.reviews):
            return self
        return replace(self, reviews=(*self.reviews, review))

    def changed(self, event: Mapping[str, Any]) -> Decision:
        """Return the decision as an event of the journal leaves it (``store``)."""
        kind = event["type"]
        if kind == "action":
            return self.with_action(Action(**event["action"]))
        if kind == "outcome":
            return self.with_outcome(Outcome(**event["outcome"]))
        if kind == "review":
            return self.with_review(Review(**event["review"]))
        if kind == "joined":
            return self.with_members(Member(**one) for one in event["members"])
        if kind == "rerun":
            return replace(self, rerun=str(event["rerun"]))
        return replace(self, addenda=(*self.addenda, str(event["text"])))

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
        known["reviews"] = _all(Review, known.get("reviews", ()))
        known["actions"] = _all(Action, known.get("actions", ()))
        members = _all(Member, known.get("members", ()))
        known["members"] = tuple(replace(one, nodes=tuple(one.nodes)) for one in members)
        for name in (
            "job_parts", "job_nodes", "limits", "considered", "would_change", "limited_by", "gated",
            "addenda",
        ):  # fmt: skip
            known[name] = tuple(known.get(name, ()))
        return cls(**known)


def _known(kind: type[Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of ``document`` that ``kind`` has fields for; a newer version may add some."""
    return {f.name: document[f.name] for f in fields(kind) if f.name in document}


def _all(kind: type[T], documents: Any) -> tuple[T, ...]:
    return tuple(kind(**_known(kind, document)) for document in documents)
