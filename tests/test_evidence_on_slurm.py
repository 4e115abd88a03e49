"""A failed job's own evidence on real Slurm: who is to blame, where it resumes, what is not read.

Four nodes with two ranks each, the aggregator beside them, examples/train.py as the job. Where the
tests run as root, the job is somebody else's: files of a job of root are never read.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml
import pytest

from recovery.demo.cluster import Cluster
from slurm_hooks import progress

pytestmark = pytest.mark.slurm

EXAMPLES = Path(__file__).parent.parent / "examples"

NOBODY = 65534
ROOT = os.geteuid() == 0

WAIT_SECONDS = 40.0

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
        Cluster(nodes=4, gpus=8, config=CONFIG, health_check_seconds=2) as cluster,
        cluster.aggregator(),
    ):
        program = cluster.folder / "program"
        program.mkdir()
        # Whoever the job belongs to need not be able to read where this project is installed.
        for source in (EXAMPLES / "train.py", Path(str(pynvml.__file__))):
            shutil.copy(source, program)
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
    running.run("scancel", *names) if names else None
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
        """The step as the toolkit reads it, 0 before the first."""
        path = self.folder / "progress"
        found = progress.in_file(path.read_bytes()) if path.exists() else None
        return found.step if found else 0

    @property
    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "ckpt").glob("step-*.json"))

    def submit(self, *options: str, output: str | Path = "", wishes: str = "") -> int:
        """Submit train.sbatch with train.py's ``options``; return the job's id."""
        folder, program = self.folder, self.cluster.folder / "program"
        wishes = wishes or f"checkpoint={folder}/ckpt,progress={folder}/progress"
        return self.cluster.submit(
            *self.as_user,
            *("--nodes=4", "--ntasks-per-node=2", "--gpus-per-node=2"),
            f"--export=ALL,RUN={folder},PROGRAM={program}/train.py,PATH=/usr/bin:/bin",
            f"--output={output or folder / 'train.log'}",
            f"--comment=recovery=requeue,{wishes}",
            EXAMPLES / "train.sbatch",
            *("--save-every=10", *options),
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
        os.kill(_process({"SLURM_JOB_ID": str(job), "SLURM_PROCID": str(rank)}), signal.SIGKILL)

    def decision(self, job: int, outcome: str = "") -> Decision:
        """Wait for the first decision on a job, and for its outcome where one is named."""

        def found() -> Decision | None:
            told = self._explain(job, "--json")
            first: Decision | None = json.loads(told)["decisions"][0] if told else None
            known = (first or {}).get("outcome") or {}
            return first if not outcome or known.get("state") == outcome else None

        return self.cluster.wait(found, WAIT_SECONDS, f"a decision on job {job} {outcome}")

    def story(self, job: int) -> str:
        return " ".join(self._explain(job).split())

    def _explain(self, job: int, *options: str) -> str:
        return self.cluster.run("recovery", "explain", str(job), *options, check=False).stdout

    def findings(self, job: int) -> dict[str, Mapping[str, Any]]:
        """What the epilogs of a job's nodes have found, by code."""
        codes = dict[str, Mapping[str, Any]]()
        for path in (self.cluster.spool / "archive").rglob("*.jsonl"):
            for line in path.read_text("utf-8").splitlines():
                record = json.loads(line)
                if record["hook"] == "epilog" and (record["job"] or {}).get("id") == job:
                    codes.update({found["code"]: found for found in record["findings"]})
        return codes


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


LONG = ("--steps=5000", "--step-seconds=0.1")


def test_a_killed_rank_blames_no_node_and_the_job_is_seen_to_resume(run: Run) -> None:
    job = run.submit(*LONG)
    run.until_step(25)
    run.kill_rank(job, 5)
    decided = run.decision(job, "resumed")
    print(run.story(job))
    print(run.log[:6500])
    print(json.dumps(decided, indent=1))
    assert 0


def test_a_rank_that_raises_is_held_for_its_owner_and_its_node_is_innocent(run: Run) -> None:
    job = run.submit(*LONG, "--raise-at=12")
    run.until_state(job, "SPECIAL_EXIT")
    decided = run.decision(job)
    print(run.story(job))
    print(json.dumps(decided, indent=1))
    assert 0
