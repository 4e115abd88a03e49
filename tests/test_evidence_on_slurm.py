"""A failed job's own evidence on real Slurm: who is to blame, where it resumes, what is not read.

Two nodes with four ranks each, the aggregator beside them, examples/train.py as the job. Where the
tests run as root, the job is somebody else's: files of a job of root are never read.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recovery.demo.cluster import Cluster
from tests.failing_job import NOBODY, decisions
from tests.train_program import EXAMPLES, staged, step_of

pytestmark = pytest.mark.slurm

ROOT = os.geteuid() == 0

WAIT_SECONDS = 60.0

CONFIG = """
mode = "act"
[policy]
settle = 2
[[grant]]
partitions = ["train"]
actions = ["requeue", "hold", "drain"]
accept_untested = "a private cluster"
"""

SECRET = "hunter2"

Decision = dict[str, Any]


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with (
        Cluster(nodes=2, gpus=8, config=CONFIG, health_check_seconds=2) as cluster,
        cluster.aggregator(),
    ):
        staged(cluster)
        yield cluster


@pytest.fixture
def run(running: Cluster, request: pytest.FixtureRequest) -> Iterator[Run]:
    """A run of its own; what it leaves is ended and no node of the next one is still busy."""
    folder = running.folder / "runs" / request.node.name.replace("[", "-").strip("]")
    folder.mkdir(parents=True)
    if ROOT:
        os.chown(folder, NOBODY, NOBODY)
    yield Run(running, folder)
    names = running.run("squeue", "--noheader", "--format=%A").stdout.split()
    if names:
        running.run("scancel", *names)
    running.wait(
        lambda: set(running.run("sinfo", "--noheader", "--format=%T").stdout.split()) == {"idle"},
        WAIT_SECONDS,
        "every node is idle, none is drained",
    )


@dataclass(frozen=True)
class Run:
    """A run of train.py on the cluster: its folder, and what is said of its job."""

    cluster: Cluster
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "train.log").read_text("utf-8")

    @property
    def step(self) -> int:
        return step_of(self.folder)

    @property
    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "ckpt").glob("step-*.json"))

    def submit(
        self,
        *options: str,
        output: Path | None = None,
        wishes: str = "",
        sbatch: Sequence[str] = (),
    ) -> int:
        """Submit train.sbatch with train.py's ``options``; return the job's id.

        ``wishes`` go into the comment in place of checkpoint and progress, ``sbatch`` are options.
        """
        folder, program = self.folder, self.cluster.folder / "program"
        wishes = wishes or f"checkpoint={folder}/ckpt,progress={folder}/progress"
        return self.cluster.submit(
            *self.as_user,
            *("--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4"),
            f"--output={output or folder / 'train.log'}",
            f"--comment=recovery=requeue,{wishes}",
            *sbatch,
            EXAMPLES / "train.sbatch",
            *("--save-every=10", *options),
            env={
                "RUN": str(folder),
                "PROGRAM": f"{program}/train.py",
                "PATH": "/usr/bin:/bin",
            },
        )

    @property
    def as_user(self) -> tuple[str, ...]:
        return (f"--chdir={self.folder}", *((f"--uid={NOBODY}",) if ROOT else ()))

    def until_step(self, step: int) -> None:
        self.cluster.wait(lambda: self.step >= step, WAIT_SECONDS, f"the run gets to step {step}")

    def until_state(self, job: int, state: str) -> None:
        self.cluster.wait(
            lambda: self.cluster.job(job)["JobState"] == state, WAIT_SECONDS, f"job {job} {state}"
        )

    def kill_rank(self, job: int, rank: int) -> None:
        """SIGKILL one rank from outside, as a kernel or an admin would."""
        # Another cluster of this machine may have a job of this number.
        told = {"RUN": str(self.folder), "SLURM_JOB_ID": str(job), "SLURM_PROCID": str(rank)}
        os.kill(_process(told), signal.SIGKILL)

    def decision(self, job: int, outcome: str = "") -> Decision:
        """Wait for the first decision on a job, and for its outcome where one is named."""

        def found() -> bool:
            about = [
                d for d in decisions(self.cluster) if (d["attempt"] or {}).get("job_id") == job
            ]
            seen = [one["state"] for one in about[0]["outcomes"]] if about else []
            return bool(about) and (not outcome or outcome in seen)

        self.cluster.wait(found, WAIT_SECONDS, f"a decision on job {job} {outcome}")
        first: Decision = json.loads(self._explain(job, "--json"))["decisions"][0]
        return first

    def story(self, job: int) -> str:
        return " ".join(self._explain(job).split())

    def _explain(self, job: int, *options: str) -> str:
        return self.cluster.run("recovery", "explain", str(job), *options, check=False).stdout

    def findings(self, job: int) -> dict[str, Mapping[str, Any]]:
        """What the epilogs of a job's nodes have found, by code."""
        return {
            found["code"]: found for record in self._epilogs(job) for found in record["findings"]
        }

    def probe(self, job: int, name: str) -> Mapping[str, Any]:
        """How a probe ended in the epilog of the job's first attempt on its batch host."""
        record = next(one for one in self._epilogs(job) if one["node"] == "n1")
        found: Mapping[str, Any] = next(one for one in record["probes"] if one["name"] == name)
        return found

    def _epilogs(self, job: int) -> Iterator[dict[str, Any]]:
        for path in sorted((self.cluster.spool / "archive").rglob("*.jsonl")):
            for line in path.read_text("utf-8").splitlines():
                record = json.loads(line)["record"]
                if record["hook"] == "epilog" and (record["job"] or {}).get("id") == job:
                    yield record


def _process(wanted: Mapping[str, str]) -> int:
    """The one process of train.py that has these variables."""
    lines = {f"{name}={value}".encode() for name, value in wanted.items()}
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            is_rank = folder.name.isdigit() and b"train.py" in (folder / "cmdline").read_bytes()
            if is_rank and lines <= set((folder / "environ").read_bytes().split(b"\0")):
                found.append(int(folder.name))
    assert len(found) == 1, found
    return found[0]


def _told_first(line: str, log: str) -> bool:
    return 0 <= log.find(line) < log.find("Terminating StepId")


LONG = ("--steps=5000", "--step-seconds=0.1")


def blames_nobody(decided: Decision) -> bool:
    """Whether a decision leaves every node as it was."""
    return not (decided["cause"]["implicated"] or decided["nodes"] or decided["job"]["excluded"])


def text_of(decided: Decision, code: str) -> str:
    """What a decision keeps as evidence of this code."""
    return "\n".join(one["text"] for one in decided["evidence"] if one["code"] == code)


def test_a_killed_rank_blames_no_node_and_the_job_is_seen_to_resume(run: Run) -> None:
    job = run.submit(*LONG)
    run.until_step(15)
    run.kill_rank(job, 5)
    decided = run.decision(job, "resumed")
    assert (decided["cause"]["implicated"], decided["job"]["verdict"]) == ([], "requeue")
    assert blames_nobody(decided)
    # srun tells of the killed rank before or after it ends the others. Only in the first case can
    # its end be told from theirs. In both, what peers say is an echo: all seven of them, unless
    # srun ended some before they spoke.
    fault_class = "unknown" if _told_first("task 5: Killed", run.log) else "collective.peer_lost"
    found = run.findings(job)[f"log.{fault_class.replace('.', '_')}"]
    document = json.loads(found["evidence"][1]["text"])
    spoke = run.log.count("ConnectionResetError: connection closed by peer")
    assert document["cascade"] >= min(spoke, 7) > 0
    if fault_class == "unknown":
        assert "task 5: Killed" in text_of(decided, "log.unknown")
    outcome = decided["outcome"]
    assert outcome["step"] > decided["progress_step"] >= 15
    told = f"resumed: at step {outcome['step']}, beyond {decided['progress_step']}"
    assert told in run.story(job)


def test_a_rank_that_raises_is_held_for_its_owner_and_its_node_is_innocent(run: Run) -> None:
    job = run.submit(*LONG, "--raise-at=12")
    run.until_state(job, "SPECIAL_EXIT")
    decided = run.decision(job)
    assert decided["cause"]["fault_class"] == "program.exception"
    assert "ValueError: sample 11 of shard 7" in decided["cause"]["summary"]
    assert decided["job"]["verdict"] == "hold"
    assert blames_nobody(decided)
    run.cluster.wait(
        lambda: "ValueError: sample 11 of shard 7" in run.cluster.job(job).get("AdminComment", ""),
        WAIT_SECONDS,
        "the job itself says why",
    )


def test_a_truncated_newest_checkpoint_is_told_and_the_job_resumes_from_the_one_before(
    run: Run,
) -> None:
    job = run.submit(*LONG, "--save-every=20")
    run.until_step(42)
    newest = run.checkpoints[-1]
    assert newest.name == "step-00000040.json"
    os.truncate(newest, newest.stat().st_size // 2)
    run.kill_rank(job, 5)
    decided = run.decision(job, "resumed")
    assert decided["checkpoint_step"] == 20
    assert "step 40" in text_of(decided, "checkpoint.passed_over")
    assert "from its checkpoint at step 20" in decided["job"]["reason"]
    assert f"attempt {job}.1: 8 ranks, starting at step=20" in run.log
    assert f"checkpoint {newest.name} does not count" in run.log


@pytest.mark.parametrize("kind", ["a FIFO", "a device"])
def test_a_log_that_is_no_file_is_not_read_and_delays_nothing(run: Run, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        output = Path(os.devnull)
        if kind == "a FIFO":
            output = run.folder / "fifo"
            os.mkfifo(output)
            output.chmod(0o666)
            # Somebody who reads has it open, else Slurm would not get to open it.
            stack.callback(os.close, os.open(output, os.O_RDWR | os.O_NONBLOCK))
        job = run.submit(*LONG, output=output)
        run.until_step(5)
        run.kill_rank(job, 5)
        decided = run.decision(job, "resumed")
    assert decided["cause"]["fault_class"] == "unknown"
    assert blames_nobody(decided)
    assert kind in run.findings(job)["log.unreadable"]["summary"]
    joblog = run.probe(job, "joblog")
    assert joblog["status"] == "findings"
    assert joblog["seconds"] < 5


@pytest.mark.skipif(not ROOT, reason="only root can read what the job's user cannot")
def test_nothing_of_a_file_that_a_log_links_to_and_its_user_cannot_read_appears_anywhere(
    run: Run,
) -> None:
    secret = run.cluster.folder / "secret"
    secret.write_text(f"Traceback (most recent call last):\nRuntimeError: {SECRET}\nstep=77\n" * 9)
    secret.chmod(0o600)
    log, named = run.folder / "train.log", run.folder / "named.log"
    named.symlink_to(secret)
    wishes = f"logs={named},progress={named},checkpoint={named}"
    # Slurm itself could not open such a log for another attempt.
    job = run.submit(*LONG, wishes=wishes, sbatch=("--no-requeue",))
    run.until_step(5)
    log.unlink()
    log.symlink_to(secret)
    run.kill_rank(job, 5)
    decided = run.decision(job)
    assert decided["cause"]["fault_class"] == "unknown"
    assert decided["progress_step"] != 77
    assert "Permission denied" in run.findings(job)["log.unreadable"]["summary"]
    said = run.story(job) + run.cluster.run("recovery", "status").stdout
    assert SECRET not in said
    written: dict[Path, bytes] = {}
    for path in run.cluster.folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a record on its way through the spool
            if path != secret and stat.S_ISREG(path.lstat().st_mode):
                written[path] = path.read_bytes()
    assert {"archive", "journal"} <= {parent.name for path in written for parent in path.parents}
    assert [path for path, content in written.items() if SECRET.encode() in content] == []
