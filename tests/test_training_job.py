"""The example training job: resumes from what is whole, ends with the same bits, dies honestly."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from recovery.demo.cluster import Cluster
from slurm_hooks import optin, progress
from tests.train_program import EXAMPLES, step_of

COMMANDS = Path(sys.executable).parent


@dataclass(frozen=True)
class Run:
    """A run's folder, what is in it, and the processes that were started by hand."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def log(self) -> str:
        path = self.folder / "train.log"
        return path.read_text("utf-8") if path.exists() else ""

    @property
    def step(self) -> int:
        return step_of(self.folder)

    @property
    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "ckpt").iterdir())

    @property
    def final(self) -> bytes:
        return (self.folder / "final.json").read_bytes()

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Start one rank of train.py by itself, without Slurm and without a GPU."""
        outside = {key: text for key, text in os.environ.items() if not key.startswith("SLURM_")}
        return self._start(outside, options)

    def start_rank(self, rank: int, *options: str) -> subprocess.Popen[bytes]:
        """Start one of two ranks as srun would."""
        told = {"SLURM_JOB_ID": "7", "SLURM_PROCID": str(rank), "SLURM_NTASKS": "2"}
        return self._start({**os.environ, **told}, options)

    def _start(
        self, environment: Mapping[str, str], options: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        program = [sys.executable, str(EXAMPLES / "train.py"), "--no-gpu-check"]
        argv = [*program, "--run", str(self.folder), *options]
        with (self.folder / "train.log").open("ab") as log:
            process = subprocess.Popen(argv, env=environment, stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def verdict(self) -> dict[str, Any]:
        return asked("verify-checkpoint", "--json", self.folder / "ckpt")

    def classified(self) -> dict[str, Any]:
        return asked("classify-log", "--json", "--layout=n[1-2]:4", self.folder / "train.log")


def asked(*command: str | Path) -> dict[str, Any]:
    """The document that ``slurm-hooks COMMAND`` prints."""
    argv = [str(COMMANDS / "slurm-hooks"), *map(str, command)]
    printed = subprocess.run(argv, stdout=subprocess.PIPE, check=False).stdout
    document: dict[str, Any] = json.loads(printed)
    return document


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[Callable[[str], Run]]:
    runs = []

    def make(name: str) -> Run:
        (tmp_path / name).mkdir()
        runs.append(Run(tmp_path / name))
        return runs[-1]

    yield make
    for process in (process for run in runs for process in run.processes):
        process.kill()
        process.wait()


@pytest.fixture
def interrupted(new_run: Callable[[str], Run]) -> Iterator[Run]:
    """A run killed between two checkpoints, of which three are there: steps 20, 30 and 40."""
    run = new_run("interrupted")
    process = run.start("--steps=60", "--save-every=10", "--step-seconds=0.02")
    until(lambda: run.step >= 42, "the run gets to step 42")
    process.kill()
    process.wait()
    assert [path.name for path in run.checkpoints if path.name.startswith("step-")] == [
        f"step-{step:08}.json" for step in (20, 30, 40)
    ]
    yield run


@pytest.fixture
def uninterrupted(new_run: Callable[[str], Run]) -> Run:
    run = new_run("uninterrupted")
    assert run.start("--steps=60", "--save-every=10", "--step-seconds=0").wait(30) == 0
    return run


FINISH = ("--steps=60", "--save-every=10", "--step-seconds=0")


def test_a_run_killed_between_checkpoints_ends_with_the_same_bits(
    interrupted: Run, uninterrupted: Run
) -> None:
    assert interrupted.start(*FINISH).wait(30) == 0
    assert "resuming from step-00000040.json" in interrupted.log
    assert "starting at step=40" in interrupted.log
    assert interrupted.final == uninterrupted.final


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda whole: whole[: len(whole) // 2], "it is cut off or no JSON"),
        (lambda whole: b"", "it is cut off or no JSON"),
        (lambda whole: whole.replace(b'"step": 40', b'"step": 41'), "does not match its own"),
        (lambda whole: b"[]", "does not match its own"),
        (lambda whole: b"\0" * len(whole), "it is cut off or no JSON"),
    ],
    ids=["truncated", "empty", "altered", "another document", "zeros"],
)
def test_a_damaged_newest_checkpoint_is_passed_over_with_its_reason(
    interrupted: Run, uninterrupted: Run, damage: Callable[[bytes], bytes], why: str
) -> None:
    newest = interrupted.checkpoints[-1]
    newest.write_bytes(damage(newest.read_bytes()))
    # What the toolkit foretells is what the program then does.
    assert interrupted.verdict()["step"] == 30
    assert interrupted.start(*FINISH).wait(30) == 0
    assert f"checkpoint {newest.name} does not count: " in interrupted.log
    assert why in interrupted.log
    assert "resuming from step-00000030.json" in interrupted.log
    assert interrupted.final == uninterrupted.final


def test_a_checkpoint_of_another_run_does_not_count(interrupted: Run) -> None:
    assert interrupted.start(*FINISH, "--seed=2").wait(30) == 0
    assert "does not count: its seed is 1, not 2" in interrupted.log
    assert "starting at step=0" in interrupted.log.splitlines()[-62]


def test_the_toolkit_calls_its_checkpoints_complete_and_reads_its_step(uninterrupted: Run) -> None:
    verdict = uninterrupted.verdict()
    assert (verdict["status"], verdict["step"]) == ("complete", 60)
    assert uninterrupted.step == 60
    told = progress.in_text(uninterrupted.log)
    assert told is not None
    assert told.step == 60


def test_the_batch_scripts_comment_is_understood_and_its_paths_are_those_of_its_run() -> None:
    script = (EXAMPLES / "train.sbatch").read_text("utf-8")
    comment = re.search(r'^#SBATCH --comment="(.*)"$', script, re.MULTILINE)
    folder = re.search(r'^RUN="\$\{RUN:-(.*)\}"$', script, re.MULTILINE)
    assert comment
    assert folder
    wishes = optin.parse(comment[1])
    assert wishes.opted_in
    assert (wishes.mode, wishes.max_restarts) == ("requeue", 3)
    assert wishes.checkpoint == f"{folder[1]}/ckpt"
    assert wishes.progress == f"{folder[1]}/progress"
    assert wishes.logs == (f"{folder[1]}/*.log",)


# On a real cluster, by the batch script itself.

STEPS = ("--steps=60", "--save-every=10", "--step-seconds=0.04")


@pytest.fixture
def submit(cluster: Cluster) -> Iterator[Callable[..., Any]]:
    """Submit examples/train.sbatch; give the run and the job's id."""

    def start(name: str, *options: str) -> tuple[Run, int]:
        run = Run(cluster.work / f"{name}-{time.monotonic_ns()}")
        run.folder.mkdir()
        folder = run.folder
        comment = f"recovery=requeue,max_restarts=3,checkpoint={folder}/ckpt"
        comment += f",progress={folder}/progress,logs={folder}/*.log"
        return run, cluster.submit(
            f"--output={folder}/train.log",
            f"--comment={comment}",
            "--nodelist=n[1-2]",
            EXAMPLES / "train.sbatch",
            *options,
            env={"RUN": str(folder), "PROGRAM": f"{EXAMPLES}/train.py"},
        )

    yield start
    for node in cluster.node_names:
        cluster.mend_gpus(node)


def ended(cluster: Cluster, job: int) -> str:
    states = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
    cluster.wait(lambda: cluster.job(job)["JobState"] in states, 60, f"job {job} ends")
    return cluster.job(job)["JobState"]


@pytest.mark.slurm
def test_a_requeued_job_ends_with_the_bits_of_one_that_was_left_alone(
    cluster: Cluster, submit: Callable[..., tuple[Run, int]]
) -> None:
    alone, first = submit("alone", *STEPS, "--step-seconds=0")
    assert ended(cluster, first) == "COMPLETED"
    requeued, second = submit("requeued", *STEPS)
    cluster.wait(lambda: requeued.step >= 25, 30, "it gets past its second checkpoint")
    cluster.run("scontrol", "requeue", str(second))
    cluster.wait(lambda: cluster.job(second)["JobState"] == "PENDING", 30, "it is pending")
    time.sleep(1.1)  # a job restarted in the second of its death may be refused by slurmd
    cluster.run("scontrol", "update", f"job={second}", "StartTime=now")
    assert ended(cluster, second) == "COMPLETED"
    assert cluster.job(second)["Restarts"] == "1"
    assert f"attempt {second}.1: 8 ranks, starting at step=20" in requeued.log
    assert requeued.log.count(": step=25 ") == 2
    assert requeued.final == alone.final


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("fault", "value", "said"),
    [("lost", True, "GPU is lost"), ("sram_uncorrectable", 1, "uncorrectable ECC error")],
)
def test_a_rank_dies_of_what_nvml_says_and_the_log_names_its_node(
    cluster: Cluster,
    submit: Callable[..., tuple[Run, int]],
    fault: str,
    value: object,
    said: str,
) -> None:
    run, job = submit("gpu", "--steps=2000", "--step-seconds=0.04")
    cluster.wait(lambda: run.step >= 3, 30, "it trains")
    cluster.break_gpu("n2", 2, fault, value)
    assert ended(cluster, job) == "FAILED"
    assert f"GPU 2 of n2: {'NVML: ' if fault == 'lost' else ''}{said}" in run.log
    verdict = run.classified()
    assert (verdict["class"], verdict["job_verdict"]) == ("hardware.gpu", "requeue")
    assert [(one["node"], one["rank"]) for one in verdict["implicated"]] == [("n2", 6)]


@pytest.mark.slurm
def test_an_exception_of_the_program_is_its_own_and_names_nobody(
    cluster: Cluster, submit: Callable[..., tuple[Run, int]]
) -> None:
    run, job = submit("bug", *STEPS, "--raise-at=12")
    assert ended(cluster, job) == "FAILED"
    assert run.step == 11
    verdict = run.classified()
    assert (verdict["class"], verdict["job_verdict"]) == ("program.exception", "hold")
    assert verdict["implicated"] == []


def test_a_stranger_on_the_port_is_turned_away(new_run: Callable[[str], Run]) -> None:
    """Two ranks by hand, and somebody who knocks before the second does."""
    run = new_run("strangers")
    first = run.start_rank(0, "--steps=5")
    meeting = run.folder / "rendezvous-7.0"
    until(meeting.exists, "rank 0 says where it listens")
    port = json.loads(meeting.read_text("ascii"))["port"]
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):  # what TCP says for a text nobody read
            assert stranger.recv(1) == b""
    second = run.start_rank(1, "--steps=5")
    assert first.wait(30) == second.wait(30) == 0
    assert not meeting.exists()


def test_when_one_rank_dies_the_others_end_with_it(new_run: Callable[[str], Run]) -> None:
    run = new_run("peers")
    first, second = (run.start_rank(rank, "--steps=5000") for rank in (0, 1))
    until(lambda: run.step >= 2, "they train")
    second.send_signal(signal.SIGKILL)
    second.wait()
    assert first.wait(30) == 1
    assert "ConnectionResetError: connection closed by peer: rank 1" in run.log
