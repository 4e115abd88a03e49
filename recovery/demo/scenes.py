"""The scenes of the story: each makes something happen on a real Slurm, watches, and judges.

Each wait is for a condition, with a limit. What was observed goes to the ``Ledger``; a wait in
vain (ClusterError) ends the story, and what it would have shown counts as broken.
"""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from recovery.decision import Decision
from recovery.demo import promises
from recovery.demo.cluster import Cluster
from recovery.demo.promises import Ledger
from recovery.demo.service import Service
from recovery.demo.teller import WIDTH, Teller
from recovery.demo.training import STEPS, Run, Training
from recovery.demo.until import Until
from recovery.slurm.base import Job, Node
from slurm_hooks.record import seconds_of

GPU = 3
FAULT_STEP = 30
"""The fault comes after this step; checkpoints are saved every 20."""

LIMIT_SECONDS = 60.0
"""Longest wait for one thing; on an idle machine the longest takes about ten seconds."""

XID_79 = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python3, GPU has fallen off the bus."
"""What the driver logs when a GPU falls off the bus (Xid 79 of NVIDIA's catalogue)."""

MONITOR = ""
"""Nothing configured: watch, decide, record."""

ACT = """
mode = "act"
[[grant]]
partitions = ["train"]
actions = ["requeue", "hold", "drain"]
accept_untested = "a private cluster, for a demonstration"
"""


@dataclass
class Stage:
    """What the scenes share.

    ``reference`` is the run that nothing happened to, ``avoided`` the node that was sick in an
    earlier scene: owners of jobs stay off it, as people do.
    """

    cluster: Cluster
    training: Training
    teller: Teller
    ledger: Ledger
    aggregator: Service
    reference: Run | None = None
    avoided: str = ""
    jobs: list[int] = field(default_factory=list)
    until: Until = field(init=False)

    def __post_init__(self) -> None:
        self.until = Until(self.cluster, self.teller, LIMIT_SECONDS, STEPS)

    def submit(self, name: str, *arguments: str) -> Run:
        """Submit a run and wait until it trains."""
        run = self.training.submit(name, *arguments, avoided=self.avoided)
        self.jobs.append(run.job_id)
        self.until(lambda: run.step > 0, f"job {run.job_id} trains", run)
        nodes = ", ".join(self.job(run).nodes)
        self.teller.say(f"job {run.job_id} ({name}) trains on {nodes}: 8 ranks, 8 GPUs")
        return run

    def job(self, run: Run) -> Job:
        """Return the job as Slurm shows it now."""
        return self.cluster.scheduler().jobs([run.job_id])[run.job_id]

    def nodes(self) -> dict[str, Node]:
        """Return all nodes as Slurm shows them now."""
        return dict(self.cluster.scheduler().nodes())

    def drained(self) -> list[str]:
        """Return the names of drained nodes."""
        return sorted(name for name, node in self.nodes().items() if node.drained)

    def told(self, run: Run) -> list[Decision]:
        """Return the decision on a run's first failure in each of its states so far."""
        versions = []
        for path in sorted((self.cluster.spool / "decisions").glob("*.jsonl")):
            # A line that is still being written has no end yet.
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n"):
                    versions.append(Decision.from_dict(json.loads(line)))
        return [one for one in versions if one.attempt and one.attempt.job_id == run.job_id]

    def decided(self, run: Run) -> Decision:
        """Wait for the decision on a run's failure, and tell it."""
        self.until(lambda: self.told(run), f"the failure of job {run.job_id} is decided on", run)
        decision = self.told(run)[0]
        answers = [f"{decision.job.verdict} job {run.job_id}"]
        answers += [f"{answer.verdict} {answer.node}" for answer in decision.nodes]
        after = seconds_of(decision.time) - seconds_of(decision.ended_time)
        self.teller.say(
            f"decided {after:.1f} s after the job's end: {', '.join(answers)}"
            f" ({decision.cause.fault_class}, {decision.cause.confidence})"
        )
        return decision

    def explain(self, decision: Decision, headings: Sequence[str] = ()) -> None:
        """Show what `recovery explain` says, or the sections with these headings."""
        told = self.cluster.run("recovery", "explain", decision.id).stdout.rstrip().splitlines()
        if headings:
            told = sections(told, headings)
        self.teller.quote(f"recovery explain {decision.id}", told)


def healthy(stage: Stage) -> None:
    """A run that nothing happens to; its weights are the reference."""
    stage.teller.title("1. A healthy run")
    run = stage.submit("healthy")
    stage.until(lambda: run.weights, f"job {run.job_id} finishes", run)
    stage.until(lambda: stage.job(run).state == "COMPLETED", f"job {run.job_id} completes")
    stage.teller.say(f"finished at step {run.step}, weights {(run.weights or '')[:12]}…")
    stage.reference = run


def monitored(stage: Stage) -> None:
    """A GPU is lost in monitor mode: the answer is recorded, and nothing else happens."""
    stage.teller.title("2. A GPU falls off the bus: monitor mode, as every deployment begins")
    before = stage.cluster.mutations()
    run = stage.submit("monitored")
    sick = lose_gpu(stage, run)
    decision = stage.decided(run)
    stage.explain(decision, ("Decided", "What followed"))
    calls = stage.cluster.mutations() - before
    untouched = promises.untouched(calls, stage.job(run).state, stage.drained())
    stage.teller.say(f"slurmctld's log since then: {untouched.observed}")
    stage.ledger.add(
        promises.recognised(decision, sick, GPU),
        promises.recommended(decision, sick),
        untouched,
    )
    # Long after the healthy run's end: whatever would have been decided about it is by now.
    if (healthy_run := stage.reference) is not None:
        told = stage.told(healthy_run)
        state = stage.job(healthy_run).state
        stage.ledger.add(promises.left_alone(state, healthy_run.step, told))
    stage.cluster.mend_gpus(sick)
    stage.avoided = sick


def grant(stage: Stage) -> None:
    """The admin reads what was recommended, and lets the aggregator act."""
    stage.cluster.configure(ACT)
    stage.aggregator.stop()
    stage.aggregator = stage.cluster.start_aggregator()


def acted(stage: Stage) -> None:
    """The same fault, and the aggregator may act: the job comes back."""
    stage.teller.title("3. The same fault, in act mode")
    grant(stage)
    stage.teller.say(
        f"an admin mends {stage.avoided}, and grants requeue, hold and drain in partition train;"
        f" the owner's next job still avoids it (--exclude={stage.avoided})"
    )
    before = stage.cluster.mutations()
    run = stage.submit("acted")
    nodes_before = stage.job(run).nodes
    sick = lose_gpu(stage, run)
    decision = stage.decided(run)
    saved, reached = run.newest_checkpoint, run.step

    def runs_again() -> bool:
        job = stage.job(run)
        return job.state == "RUNNING" and job.restarts > 0

    stage.until(runs_again, f"job {run.job_id} runs again")
    seconds = time.time() - seconds_of(decision.time)
    job = stage.job(run)
    stage.teller.say(
        f"job {run.job_id} runs again on {', '.join(job.nodes)},"
        f" {seconds:.1f} s after the decision (ExcNodeList={','.join(job.excluded)})"
    )
    stage.until(lambda: run.began(1), f"job {run.job_id} trains again", run)
    stage.teller.say(f"resumed at step {run.began_at(1)}; it had failed after step {reached}")
    stage.ledger.add(
        promises.elsewhere(seconds, nodes_before, sick, job),
        promises.from_checkpoint(saved, run.began_at(1), reached),
    )
    stage.ledger.add(promises.drained(decision, stage.nodes().get(sick), GPU))
    stage.until(lambda: "resumed" in _outcomes(stage, run), "work beyond the failure is seen", run)
    stage.teller.say("work has gone beyond the step of the failure: outcome resumed")
    stage.until(lambda: "finished" in _outcomes(stage, run), f"job {run.job_id} finishes", run)
    stage.teller.say(f"finished at step {run.step}, weights {(run.weights or 'none')[:12]}…")
    reference = stage.reference.weights if stage.reference else None
    stage.ledger.add(
        promises.resumed_work(_outcomes(stage, run)),
        promises.same_weights(reference, run.weights),
        promises.acted_once(stage.cluster.mutations() - before),
    )
    stage.explain(decision)
    reason = stage.nodes()[sick].reason
    stage.teller.quote(f"scontrol show node {sick}", _wrapped(f"Reason={reason}"))


def raised(stage: Stage) -> None:
    """A program with a bug: running it again would not help, and no node is to blame."""
    stage.teller.title("4. A program that raises an exception")
    before = stage.cluster.mutations()
    run = stage.submit("buggy", f"--raise-at={FAULT_STEP}")
    decision = stage.decided(run)

    def settled() -> bool:
        latest = stage.told(run)[-1]
        return all(action.state == "verified" for action in latest.actions)

    stage.until(settled, f"job {run.job_id} is held for its owner")
    job = stage.job(run)
    stage.teller.say(f"job {run.job_id} is {job.state}: held until its owner has looked")
    stage.explain(decision, ("Decided",))
    stage.teller.quote(
        f"scontrol show job {run.job_id}", _wrapped(f"AdminComment={job.admin_comment}")
    )
    calls = stage.cluster.mutations() - before
    stage.ledger.add(
        promises.held(job, run.attempts, decision),
        promises.told(job.admin_comment, "ValueError"),
        promises.innocent(decision, calls),
    )


def lose_gpu(stage: Stage, run: Run) -> str:
    """Let a GPU of the run's second node fall off the bus, mid-training; return the node."""
    stage.until(lambda: run.step >= FAULT_STEP, f"step {FAULT_STEP}", run)
    sick = stage.job(run).nodes[1]
    stage.cluster.break_gpu(sick, GPU, "lost")
    stage.cluster.log_kernel(sick, XID_79)
    stage.teller.say(f"step {run.step}: GPU {GPU} of {sick} falls off the bus (Xid 79)")
    return sick


def _outcomes(stage: Stage, run: Run) -> list[str]:
    seen = [one.outcome.state for one in stage.told(run) if one.outcome]
    return list(dict.fromkeys(seen))


def sections(lines: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """The paragraphs of `recovery explain` whose heading begins with one of ``wanted``."""
    paragraphs = "\n".join(lines).split("\n\n")
    chosen = [text for text in paragraphs if text.startswith(tuple(wanted))]
    return "\n\n".join(chosen).splitlines()


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="      ")
