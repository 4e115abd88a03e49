"""The story of scripts/compose-test: faults that only separate machines have, on containers.

    python -m recovery.demo.container_story FOLDER docker-compose -p NAME -f docker-compose.yml

Brings the cluster up, trains, loses a GPU, a container, a network and a file system, takes the
cluster down and prints what was promised, what was observed and whether it was kept; exit 0 only if
all of it was.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from recovery.decision import Decision
from recovery.demo import promises
from recovery.demo.containers import NODES, SLOW_NODE, Containers
from recovery.demo.programs import ClusterError
from recovery.demo.promises import Ledger, Promise
from recovery.demo.teller import Teller
from recovery.demo.training import Run
from recovery.demo.until import Until
from recovery.slurm.base import Job, Node, SchedulerError
from slurm_hooks.node_config import Budget
from slurm_hooks.record import seconds_of

UP = "one command: every container becomes healthy"
ACCOUNTED = "a job trains on two nodes, and slurmdbd has it"
KILLED = "killed container: its job runs again without it, to the end"
BACK = "started again, the node is back in service"
CUT = "cut-off node: its job runs again without it, to the end"
MENDED = "network back: node in service, nothing left of the old attempt"
HUNG = "hung volume: prolog and epilog end within their budgets"
OTHERS = "hung volume: jobs of other nodes go on"
FORWARDED = "volume back: the record it could not take arrives"
GONE = "taken down: no container, network or volume is left"

PROMISES = (
    UP,
    ACCOUNTED,
    promises.DRAINED,
    promises.ELSEWHERE,
    promises.FROM_CHECKPOINT,
    promises.RESUMED,
    promises.SAME_WEIGHTS,
    KILLED,
    BACK,
    CUT,
    MENDED,
    HUNG,
    OTHERS,
    FORWARDED,
    GONE,
)

GPU = 3
STEPS, STEP_SECONDS, SAVE_EVERY = 160, 0.1, 20
FAULT_STEP = 50

LIMIT_SECONDS = 400.0
"""slurmctld calls a node lost 50 to 60 s after its last word, and has taken 77 to 160 s to hear
again of one whose network was back (seen on 24.11 with SlurmdTimeout=30)."""

EXAMPLES = "/opt/slurm-recovery/share/slurm-recovery/examples"
BUFFER = "/var/spool/slurm-recovery"
SLACK_SECONDS = 3.0
"""slurmd counts whole seconds, from before a busy machine has started the hook's first line."""

UNTOLD_SECONDS = 4
"""slurmd says nothing of a hook that ran for less than 5 s (seen on 24.11)."""


@dataclass
class Stage:
    """What the scenes share."""

    cluster: Containers
    teller: Teller
    ledger: Ledger
    reference: str | None = None
    runs: list[Run] = field(default_factory=list)
    until: Until = field(init=False)

    def __post_init__(self) -> None:
        self.until = Until(self.cluster, self.teller, LIMIT_SECONDS, STEPS)

    def sbatch(self, *argv: str, environment: str = "") -> int:
        """Submit as ann, from the folder of the examples; return the job id."""
        options = ["--user", "ann", "--workdir", EXAMPLES, "--env", environment or "NOTHING="]
        said = self.cluster.run("controller", "sbatch", "--parsable", *argv, options=options)
        return int(said.split(";")[0])

    def train(self, name: str) -> Run:
        """Submit a training run that works in ann's home, and wait until it trains."""
        folder = f"/data/home/ann/{name}"
        self.cluster.run("controller", "mkdir", folder, options=["--user", "ann"])
        job = self.sbatch(
            f"--job-name={name}",
            f"--output={folder}/train.log",
            f"--comment=recovery=requeue,max_restarts=3,checkpoint={folder}/ckpt,"
            f"progress={folder}/progress,logs={folder}/*.log",
            "train.sbatch",
            f"--steps={STEPS}",
            f"--step-seconds={STEP_SECONDS}",
            f"--save-every={SAVE_EVERY}",
            environment=f"RUN={folder}",
        )
        run = Run(job, self.cluster.file("home", "ann", name))
        self.runs.append(run)
        self.until(lambda: run.step > 0, f"job {job} trains", run)
        self.teller.say(f"job {job} ({name}) trains on {', '.join(self.job(job).nodes)}")
        return run

    def job(self, job_id: int) -> Job:
        """Return the job as Slurm shows it now."""
        return self.cluster.scheduler().jobs([job_id])[job_id]

    def node(self, name: str) -> Node:
        """Return the node as Slurm shows it now."""
        return self.cluster.scheduler().nodes([name])[name]

    def idle(self, name: str) -> bool:
        """Whether the node is in service and has nothing to do."""
        shown = self.cluster.run("controller", "sinfo", "-h", f"--nodes={name}", "--format=%T")
        return shown.strip() == "idle"

    def told(self, job_id: int) -> list[Decision]:
        """Return the decisions on a job in each of their states so far."""
        versions = []
        for path in sorted(self.cluster.file("slurm-recovery", "decisions").glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n"):
                    versions.append(Decision.from_dict(json.loads(line)))
        return [one for one in versions if one.attempt and one.attempt.job_id == job_id]

    def outcomes(self, job_id: int) -> list[str]:
        """Return the outcomes of the decisions on a job, each once, in their order."""
        seen = [one.outcome.state for one in self.told(job_id) if one.outcome]
        return list(dict.fromkeys(seen))

    def runs_again(self, run: Run) -> Job:
        """Wait until a later attempt of the job runs, and return the job."""

        def again() -> Job | None:
            job = self.job(run.job_id)
            return job if job.state == "RUNNING" and job.restarts > 0 else None

        job = self.until(again, f"job {run.job_id} runs again", run)
        assert job is not None
        self.teller.say(f"job {run.job_id} runs again on {', '.join(job.nodes)}")
        return job

    def finishes(self, run: Run) -> None:
        """Wait until the job has completed."""
        self.until(
            lambda: self.job(run.job_id).state == "COMPLETED", f"job {run.job_id} completes", run
        )
        self.teller.say(f"job {run.job_id} completed, weights {(run.weights or 'none')[:12]}…")


def trains(stage: Stage) -> None:
    """A healthy run; its weights are the reference."""
    stage.teller.title("1. A healthy run")
    run = stage.train("healthy")
    stage.finishes(run)
    stage.reference = run.weights
    argv = ("sacct", "-X", "-n", "-P", "-j", str(run.job_id), "--format=State,NNodes")
    accounted = stage.until(
        lambda: said if (said := stage.cluster.run("dbd", *argv).strip()) != "RUNNING|2" else "",
        "slurmdbd has the job's end",
    )
    kept = accounted == "COMPLETED|2" and run.weights is not None
    stage.ledger.add(Promise(ACCOUNTED, f"step {run.step}; sacct: {accounted}", kept))


def act(stage: Stage) -> None:
    """The admin lets the grant of recovery.toml count."""
    switch = r's/^mode = .*/mode = "act"/'
    stage.cluster.run("controller", "sed", "-i", switch, "/etc/slurm/recovery.toml")
    stage.cluster.run("controller", "pkill", "-f", "bin/recovery run")

    def acts() -> bool:
        status = stage.cluster.run("controller", "recovery", "status", check=False)
        return "mode        act" in status and "silent: none" in status

    stage.until(acts, "the aggregator runs in act mode")
    stage.teller.say('an admin sets mode = "act"; the grant covers requeue, hold and drain')


def loses_a_gpu(stage: Stage) -> None:
    """A GPU falls off the bus; the node is drained, and the job goes on elsewhere."""
    stage.teller.title("2. A GPU falls off the bus, in act mode")
    act(stage)
    run = stage.train("gpu")
    stage.until(lambda: run.step >= FAULT_STEP, f"step {FAULT_STEP}", run)
    before = stage.job(run.job_id).nodes
    sick = before[1]
    stage.cluster.run(sick, "fake-gpus", "break", str(GPU))
    stage.teller.say(f"step {run.step}: GPU {GPU} of {sick} falls off the bus (Xid 79)")
    stage.until(lambda: stage.told(run.job_id), "its failure is decided on", run)
    decision = stage.told(run.job_id)[0]
    saved, reached = run.newest_checkpoint, run.step
    stage.teller.say(
        f"decided: {decision.job.verdict} ({decision.cause.fault_class},"
        f" {decision.cause.confidence})"
    )
    job = stage.runs_again(run)
    seconds = time.time() - seconds_of(decision.time)
    stage.ledger.add(promises.elsewhere(seconds, before, sick, job))
    stage.until(lambda: run.began(1), f"job {run.job_id} trains again", run)
    stage.ledger.add(
        promises.from_checkpoint(saved, run.began_at(1), reached),
        promises.drained(decision, stage.node(sick), GPU),
    )
    stage.finishes(run)
    stage.until(lambda: "finished" in stage.outcomes(run.job_id), "its outcome is finished")
    stage.ledger.add(
        promises.resumed_work(stage.outcomes(run.job_id)),
        promises.same_weights(stage.reference, run.weights),
    )
    stage.cluster.run(sick, "fake-gpus", "mend")
    stage.cluster.run("controller", "scontrol", "update", f"nodename={sick}", "state=resume")
    stage.until(lambda: stage.idle(sick), f"{sick} is back")
    stage.teller.say(f"an admin mends {sick} and resumes it")


def loses_a_container(stage: Stage) -> None:
    """A node's container is killed, and started again."""
    stage.teller.title("3. A node's container is killed")
    lost = _lost_by(stage, "container", stage.cluster.kill, KILLED)
    stage.cluster.start(lost)
    stage.until(lambda: stage.idle(lost), f"{lost} is in service")
    stage.teller.say(f"{lost} was started again and is in service")
    stage.ledger.add(Promise(BACK, f"{lost} idle", True))


def loses_its_network(stage: Stage) -> None:
    """A node is cut off the network, its processes running on, and connected again."""
    stage.teller.title("4. A node is cut off the network")
    lost = _lost_by(stage, "network", stage.cluster.cut_off, CUT)
    running = _ranks(stage, lost)
    stage.cluster.cut_off(lost, False)
    stage.until(lambda: stage.idle(lost) and not _ranks(stage, lost), f"{lost} is in service")
    stage.teller.say(f"{lost} is connected again and in service")
    stage.ledger.add(
        Promise(MENDED, f"{lost} idle; ranks of the old attempt: {running} while cut, 0 now", True)
    )


def hangs(stage: Stage) -> None:
    """The shared volume hangs for one node while a job begins and fails there."""
    stage.teller.title(f"5. The shared volume hangs for {SLOW_NODE}")
    budget = Budget()
    stage.until(lambda: stage.idle(SLOW_NODE), f"{SLOW_NODE} is idle")
    stage.cluster.hang()
    job_id = stage.sbatch(
        f"--nodelist={SLOW_NODE}",
        "--chdir=/tmp",
        "--output=/dev/null",
        "--no-requeue",
        "--comment=recovery=requeue",
        "--wrap=exit 3",
    )
    stage.until(lambda: stage.job(job_id).state in ("FAILED", "COMPLETING"), f"job {job_id} ends")
    stage.until(lambda: stage.idle(SLOW_NODE), f"the epilog of job {job_id} ends")
    limits = {"prolog": budget.prolog, "epilog": budget.epilog}
    took = {hook: _hook_seconds(stage, hook, job_id) for hook in limits}
    said = ", ".join(f"{hook} {took[hook]} s of {limits[hook]:g}" for hook in limits)
    stage.teller.say(f"job {job_id} began and ended on {SLOW_NODE}: {said}")
    kept = all(took[hook] <= limits[hook] + SLACK_SECONDS for hook in limits)
    stage.ledger.add(Promise(HUNG, f"job {stage.job(job_id).state}; {said}", kept))
    other = stage.sbatch(f"--exclude={SLOW_NODE}", "--output=/data/home/ann/other.log", "--wrap=id")
    stage.until(lambda: stage.job(other).state == "COMPLETED", f"job {other} completes")
    stage.ledger.add(Promise(OTHERS, f"job {other} completed meanwhile", True))
    waiting = _buffered(stage)
    stage.teller.say(f"{waiting} records wait on {SLOW_NODE}; the volume comes back")
    stage.cluster.hang(False)
    began = time.monotonic()
    stage.until(lambda: _archived(stage, job_id), f"the record on job {job_id} arrives")
    seconds = time.monotonic() - began
    stage.until(lambda: not _buffered(stage), f"nothing waits on {SLOW_NODE}")
    said = f"{waiting} waiting while it hung; arrived {seconds:.0f} s after, none waiting now"
    stage.ledger.add(Promise(FORWARDED, said, waiting > 0))


SCENES = (trains, loses_a_gpu, loses_a_container, loses_its_network, hangs)


def _lost_by(stage: Stage, name: str, lose: Callable[[str], None], promise: str) -> str:
    """Lose the second node of a training run that way; return it once the run has completed."""
    run = stage.train(name)
    stage.until(lambda: run.step >= FAULT_STEP, f"step {FAULT_STEP}", run)
    before = stage.job(run.job_id).nodes
    lost = before[1]
    lose(lost)
    stage.teller.say(f"step {run.step}: {lost} is lost")
    began = time.monotonic()
    job = stage.runs_again(run)
    seconds = time.monotonic() - began
    stage.finishes(run)
    said = f"{seconds:.0f} s later, {','.join(before)} -> {','.join(job.nodes)}"
    said += f", resumed at {run.began_at(1)}, completed"
    kept = lost not in job.nodes and bool(run.began_at(1)) and run.weights == stage.reference
    stage.ledger.add(Promise(promise, said, kept))
    return lost


def _ranks(stage: Stage, node: str) -> int:
    """Count the training processes of a node."""
    return len(stage.cluster.run(node, "pgrep", "-f", "train.py --run", check=False).split())


def _hook_seconds(stage: Stage, hook: str, job_id: int) -> int:
    """Return how long slurmd says the hook of a job ran on SLOW_NODE; at least UNTOLD_SECONDS."""
    told = re.findall(rf"{hook} for job {job_id} ran for (\d+) s", stage.cluster.logs(SLOW_NODE))
    return max(map(int, told), default=UNTOLD_SECONDS)


def _buffered(stage: Stage) -> int:
    """Count the records that wait on SLOW_NODE's own disk."""
    argv = ("find", BUFFER, "-maxdepth", "1", "-name", "*.json")
    return len(stage.cluster.run(SLOW_NODE, *argv).split())


def _archived(stage: Stage, job_id: int) -> bool:
    """Whether the epilog's record on a job has come from SLOW_NODE."""
    for path in stage.cluster.file("slurm-recovery", "archive").glob("*/*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)["record"]
            about = (record["node"], record["hook"], (record["job"] or {}).get("id"))
            if about == (SLOW_NODE, "epilog", job_id):
                return True
    return False


def tell(cluster: Containers, teller: Teller) -> Ledger:
    """Bring the cluster up, play all scenes, take it down; return what was observed."""
    ledger = Ledger(PROMISES)
    stage = Stage(cluster, teller, ledger)
    try:
        with cluster:
            teller.title(f"A controller, slurmdbd with MariaDB, {len(NODES)} nodes: containers")
            teller.progress("starting containers")
            cluster.up()
            teller.say("every container is healthy")
            ledger.add(Promise(UP, f"{teller.seconds:.0f} s", True))
            try:
                for scene in SCENES:
                    scene(stage)
            except (ClusterError, SchedulerError, subprocess.SubprocessError, OSError):
                # Said while the containers can still be asked.
                print(cluster.logs(), file=sys.stderr)
                raise
            teller.title("Taking everything down")
    except (ClusterError, SchedulerError, subprocess.SubprocessError, OSError) as error:
        what = str(error).partition("\n")[0]
        teller.say(f"the story cannot go on: {what}")
        ledger.stop(what)
    left = cluster.left()
    ledger.add(Promise(GONE, ", ".join(left) or "nothing left", not left))
    return ledger


def main() -> int:
    """Tell the story with the compose command of the command line; return the exit status."""
    folder, *compose = sys.argv[1:]
    teller = Teller(sys.stdout)
    table = tell(Containers(compose, Path(folder)), teller).table()
    teller.table(table)
    return 0 if all(one.kept for one in table) else 1


if __name__ == "__main__":
    sys.exit(main())
