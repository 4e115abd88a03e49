"""What the story promises, and how each promise is judged: pure functions of what was observed.

    >>> judged = resumed_work(("restarted", "resumed", "finished"))
    >>> judged.kept
    True
    >>> resumed_work(("restarted",)).observed
    'outcome: restarted'

The real story (``scenes``) and the replayed one (``replayed``) share them, so that neither can be
easier on the product than the other. A promise that the story never reached is a broken one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from recovery.decision import Decision
from recovery.slurm.base import Job, Node

ALONE = "a healthy run is left alone"
RECOGNISED = "the lost GPU is found and named"
RECOMMENDED = "monitor: the recommendation is recorded"
UNTOUCHED = "monitor: nothing is touched"
DRAINED = "act: the node is drained, and the reason explains itself"
ELSEWHERE = "act: the job runs again at once, elsewhere"
FROM_CHECKPOINT = "act: it goes on from its newest checkpoint"
RESUMED = "act: success means resumed work, then the end"
SAME_WEIGHTS = "act: the weights equal the uninterrupted run's"
ONCE = "act: exactly one requeue and one drain"
HELD = "bug: the job is held for its owner, not restarted"
TOLD = "bug: its owner is told why"
INNOCENT = "bug: the node is innocent"

STORY = (
    ALONE,
    RECOGNISED,
    RECOMMENDED,
    UNTOUCHED,
    DRAINED,
    ELSEWHERE,
    FROM_CHECKPOINT,
    RESUMED,
    SAME_WEIGHTS,
    ONCE,
    HELD,
    TOLD,
    INNOCENT,
)
"""What the real story promises, in its order."""

REPLAY = (RECOGNISED, RECOMMENDED, UNTOUCHED, HELD, INNOCENT)
"""What can be shown without a Slurm."""

AT_ONCE_SECONDS = 10.0
"""Measured: 1 to 2 s; a busy machine is slow. A plain requeue is eligible after 121 s."""


@dataclass(frozen=True)
class Promise:
    """One row of the table."""

    promise: str
    observed: str
    kept: bool


class Ledger:
    """What has been observed so far of the promises ``expected``."""

    def __init__(self, expected: Sequence[str]) -> None:
        self._expected = tuple(expected)
        self._seen: dict[str, Promise] = {}
        self._trouble = ""

    def add(self, *promises: Promise) -> None:
        """Take in what was observed."""
        self._seen.update((one.promise, one) for one in promises)

    def stop(self, trouble: str) -> None:
        """Say why what has not been observed will not be."""
        self._trouble = trouble

    def table(self) -> tuple[Promise, ...]:
        """Return every promise; what was never observed is broken."""
        missing = [expected for expected in self._expected if expected not in self._seen]
        broken = {expected: Promise(expected, "not reached", False) for expected in missing}
        if missing and self._trouble:
            broken[missing[0]] = Promise(missing[0], f"not reached: {self._trouble}", False)
        return tuple({**broken, **self._seen}[expected] for expected in self._expected)


# A healthy run.


def left_alone(state: str, steps: int | None, decisions: Collection[Decision]) -> Promise:
    """Judge a run that nothing happened to: the job's end, its last step, decisions about it."""
    said = f"{len(decisions)} decisions" if decisions else "no decision about it"
    kept = state == "COMPLETED" and steps is not None and not decisions
    return Promise(ALONE, f"{state} at step {steps}; {said}", kept)


# A lost GPU.


def recognised(decision: Decision | None, node: str, gpu: int) -> Promise:
    """Judge whether the fault was attributed to that GPU of that node, and to nothing else."""
    if decision is None:
        return Promise(RECOGNISED, "no decision", False)
    cause = decision.cause
    things = {(item.node, item.gpu) for item in cause.implicated if item.gpu is not None}
    nodes = {item.node for item in cause.implicated}
    named = ", ".join(f"GPU {n} of {name}" for name, n in sorted(things)) or "no GPU"
    kept = (
        cause.fault_class == "hardware.gpu"
        and cause.confidence == "established"
        and things == {(node, gpu)}
        and nodes == {node}
    )
    return Promise(RECOGNISED, f"{cause.fault_class}, {cause.confidence}: {named}", kept)


def recommended(decision: Decision | None, node: str) -> Promise:
    """Judge whether the right answers were recorded, and only recorded."""
    if decision is None:
        return Promise(RECOMMENDED, "no decision", False)
    verdicts = {answer.node: answer.verdict for answer in decision.nodes}
    states = {action.state for action in decision.actions}
    kept = (
        decision.job.verdict == "requeue"
        and node in decision.job.excluded
        and verdicts == {node: "drain"}
        and states == {"recorded"}
    )
    answers = [f"{decision.job.verdict} without {','.join(decision.job.excluded) or 'nothing'}"]
    answers += [f"{verdict} {name}" for name, verdict in verdicts.items()]
    return Promise(RECOMMENDED, f"{', '.join(answers)}: {'/'.join(sorted(states))}", kept)


def untouched(calls: Mapping[str, int], job_state: str, drained: Collection[str]) -> Promise:
    """Judge monitor mode: the mutating calls that Slurm received, and how things stand."""
    said = f"{_calls(calls)}; job {job_state}, {_drained(drained)}"
    return Promise(UNTOUCHED, said, not calls and job_state == "FAILED" and not drained)


def drained(decision: Decision, node: Node | None, gpu: int) -> Promise:
    """Judge the reason that stands on the drained node: ours, and readable without us."""
    if node is None or not node.drained:
        return Promise(DRAINED, "the node is in service", False)
    kept = node.reason.startswith("recovery: ") and f"GPU {gpu}" in node.reason
    kept = kept and {answer.node: answer.verdict for answer in decision.nodes} == {
        node.name: "drain"
    }
    # The decision's id says nothing to the reader of a table.
    return Promise(DRAINED, f"{node.name}: {node.reason.split(': ', 2)[-1]}", kept)


def elsewhere(seconds: float, before: Collection[str], sick: str, after: Job | None) -> Promise:
    """Judge the restart: ``seconds`` from the decision until the job was seen running."""
    nodes = after.nodes if after else ()
    kept = bool(nodes) and sick not in nodes and seconds <= AT_ONCE_SECONDS
    moved = f"{','.join(sorted(before))} -> {','.join(nodes) or 'nowhere'}"
    return Promise(ELSEWHERE, f"{seconds:.1f} s after the decision, {moved}", kept)


def from_checkpoint(saved: int | None, resumed: int | None, reached: int | None) -> Promise:
    """Judge where the next attempt began: ``saved`` is the newest checkpoint at the failure."""
    said = f"checkpoint of step {saved}, resumed at {resumed}, failed after {reached}"
    kept = saved is not None and saved > 0 and resumed == saved
    return Promise(FROM_CHECKPOINT, said, kept)


def resumed_work(outcomes: Sequence[str]) -> Promise:
    """Judge the outcomes of the decision, in their order."""
    said = f"outcome: {', '.join(outcomes) or 'none'}"
    return Promise(RESUMED, said, tuple(outcomes[-2:]) == ("resumed", "finished"))


def same_weights(reference: str | None, weights: str | None) -> Promise:
    """Judge the sha256 of the final weights of both runs."""
    said = f"sha256 {(weights or 'none')[:12]}, uninterrupted {(reference or 'none')[:12]}"
    return Promise(SAME_WEIGHTS, said, weights is not None and weights == reference)


def acted_once(calls: Mapping[str, int]) -> Promise:
    """Judge what was sent to Slurm: the drain, the requeue, the update that starts it at once."""
    wanted = {"REQUEST_UPDATE_NODE": 1, "REQUEST_JOB_REQUEUE": 1, "REQUEST_UPDATE_JOB": 1}
    return Promise(ONCE, _calls(calls), dict(calls) == wanted)


# A program's own fault.


def held(job: Job | None, attempts: int, decision: Decision | None) -> Promise:
    """Judge what became of the job of a broken program; ``attempts`` as its own log counts."""
    if decision is None or job is None:
        return Promise(HELD, "no decision", False)
    kept = decision.job.verdict == "hold" and attempts == 1
    kept = kept and job.state == "SPECIAL_EXIT" and job.held
    return Promise(HELD, f"{job.state}, held; attempts: {attempts}", kept)


def told(admin_comment: str, error: str) -> Promise:
    """Judge the AdminComment: it holds the program's own error and how to go on."""
    kept = error in admin_comment and "scontrol release" in admin_comment
    return Promise(TOLD, f"AdminComment names {error}" if kept else "AdminComment does not", kept)


def recommended_hold(decision: Decision | None) -> Promise:
    """Judge the same where nothing may be acted on."""
    if decision is None:
        return Promise(HELD, "no decision", False)
    states = {action.state for action in decision.actions}
    said = f"{decision.job.verdict}: {'/'.join(sorted(states))}"
    return Promise(HELD, said, decision.job.verdict == "hold" and states == {"recorded"})


def innocent(decision: Decision | None, calls: Mapping[str, int]) -> Promise:
    """Judge whether a node was blamed for what the program did, or touched for it."""
    if decision is None:
        return Promise(INNOCENT, "no decision", False)
    blamed = [answer.node for answer in decision.nodes if answer.verdict != "return"]
    said = f"{decision.cause.fault_class}: " + (
        f"blamed {', '.join(blamed)}" if blamed else "no node blamed, none drained"
    )
    touched = "REQUEST_UPDATE_NODE" in calls
    kept = decision.cause.fault_class.startswith("program.") and not blamed and not touched
    return Promise(INNOCENT, said, kept)


def _calls(calls: Mapping[str, int]) -> str:
    words = {
        "REQUEST_UPDATE_NODE": "drain",
        "REQUEST_JOB_REQUEUE": "requeue",
        "REQUEST_UPDATE_JOB": "update of the job",
    }
    named = Counter({words.get(call, call): count for call, count in calls.items()})
    return ", ".join(f"{n} {call}" for call, n in named.items()) or "no mutating call"


def _drained(nodes: Collection[str]) -> str:
    return f"drained: {', '.join(sorted(nodes))}" if nodes else "no node drained"
