"""A job that hangs on real Slurm: seen, its nodes asked, run again; and what only looks like it.

Two nodes with two ranks each, health checks every two seconds, examples/train.py as the job: its
ranks wait for each other at every step. A rank that is sent SIGSTOP is what its peers wait for.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recovery.demo import fake_nvml
from recovery.demo.cluster import Cluster
from tests import failing_job
from tests.failing_job import NOBODY, actions, tidy
from tests.train_program import EXAMPLES, staged, step_of

pytestmark = pytest.mark.slurm

WAIT_SECONDS = 90.0

HANGS = """
hang_minimum = 6
hang_maximum = 300
hang_factor = 2
hang_evidence = 30
"""

ACT = failing_job.ACT.replace("[policy]", "[policy]" + HANGS)
MONITOR = ACT.replace('"act"', '"monitor"', 1)

SPINNING = {"utilization": 100, "power_usage": 140_000}
WORKING = {"utilization": 100, "power_usage": 610_000}

SCRIPT = """#!/bin/sh
step=0
while [ ! -e pause ]; do step=$((step + 1)); echo "step=$step"; sleep 0.2; done
while [ ! -e go ]; do sleep 0.2; done
"""
"""A job that stops to tell steps when it is told to, and ends when it is told to."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with Cluster(2, 4, config=ACT, health_check_seconds=2) as running:
        staged(running)
        yield running


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """Two idle nodes whose GPUs spin, an aggregator beside them that may act."""
    load(shared, SPINNING)
    yield shared
    tidy(shared)
    shared.configure(ACT)


def load(cluster: Cluster, how: dict[str, int]) -> None:
    """Let every GPU look like that."""
    for node in cluster.node_names:
        every = {**fake_nvml.HOPPER, **how}
        cluster.set_gpus(node, {"count": cluster.gpus, "every": every})


class Run:
    """A job in a folder of its own, and what is known of it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.folder = Path(tempfile.mkdtemp(dir=cluster.folder, prefix="run-"))
        self.folder.chmod(0o755)
        self.user: tuple[str, ...] = ()
        if os.geteuid() == 0:
            os.chown(self.folder, NOBODY, NOBODY)
            self.user = (f"--uid={NOBODY}",)
        self.id = 0

    def train(self) -> Run:
        """Submit train.sbatch: four ranks, two on each node."""
        folder, program = self.folder, self.cluster.folder / "program"
        self.id = self.cluster.submit(
            *(*self.user, f"--chdir={folder}"),
            *("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2"),
            f"--output={folder}/train.log",
            f"--comment=recovery=requeue,checkpoint={folder}/ckpt,progress={folder}/progress",
            EXAMPLES / "train.sbatch",
            *("--save-every=10", "--steps=100000", "--step-seconds=0.05"),
            env={"RUN": f"{folder}", "PROGRAM": f"{program}/train.py", "PATH": "/usr/bin:/bin"},
        )
        return self

    def gloo(self, python: str) -> Run:
        """Submit four ranks that meet in torch's all_reduce, two on each node."""
        folder, script = self.folder, self.folder / "job.sh"
        program = shutil.copy(Path(__file__).parent / "data" / "gloo_train.py", folder)
        script.write_text(f"#!/bin/sh\nsrun --kill-on-bad-exit=1 {python} {program} {folder}\n")
        self.id = self.cluster.submit(
            *(*self.user, f"--chdir={folder}"),
            *("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2"),
            f"--comment=recovery=requeue,progress={folder}/progress",
            script,
        )
        return self

    def script(self) -> Run:
        """Submit a job of one node that tells its steps in its log."""
        script = self.folder / "job.sh"
        script.write_text(SCRIPT)
        given = (f"--chdir={self.folder}", "--comment=recovery=requeue", "--gpus-per-node=4")
        self.id = self.cluster.submit(*self.user, *given, script)
        return self

    @property
    def step(self) -> int:
        return step_of(self.folder)

    def looks(self, code: str) -> list[dict[str, Any]]:
        """The records that hold a finding with that code about the job, as they were archived."""
        found = []
        for file in sorted(self.cluster.spool.glob("archive/*/records.jsonl")):
            for line in file.read_text().splitlines():
                record = json.loads(line)["record"]
                if any(
                    f["code"] == code and f["job_id"] == self.id
                    for f in record["findings"]
                    if "job_id" in f
                ):
                    found.append(record)
        return found

    def is_known(self) -> None:
        """Wait until its cadence has been seen: four looks at which it had come further."""
        self.cluster.wait(
            lambda: (
                len(
                    {
                        f["step"]
                        for r in self.looks("progress.seen")
                        for f in r["findings"]
                        if f["code"] == "progress.seen" and f["job_id"] == self.id
                    }
                )
                >= 4
            ),
            WAIT_SECONDS,
            f"four steps of job {self.id} are seen",
        )

    def rank(self, number: int) -> int:
        """The pid of a rank."""
        # Another cluster on this machine may have a job of that number.
        ours = f"SLURM_CONF={self.cluster.layout.slurm_conf}"
        wanted = {ours, f"SLURM_JOB_ID={self.id}", f"SLURM_PROCID={number}", "SLURM_STEP_ID=0"}
        for process in Path("/proc").iterdir():
            try:
                told = (process / "environ").read_bytes().decode().split("\0")
                name = (process / "comm").read_text().strip()
            except (OSError, UnicodeDecodeError):
                continue
            if wanted <= set(told) and name.startswith("python"):
                return int(process.name)
        raise AssertionError(f"no rank {number} of job {self.id}")

    def decisions(self) -> list[dict[str, Any]]:
        """What has been decided on it, and acted upon."""
        return [
            one
            for one in failing_job.decisions(self.cluster)
            if (one["attempt"] or {}).get("job_id") == self.id
            and not any(a["state"] in ("planned", "done") for a in one["actions"])
        ]

    def decision(self, number: int = 0) -> dict[str, Any]:
        self.cluster.wait(
            lambda: len(self.decisions()) > number, WAIT_SECONDS, f"decision {number} on {self.id}"
        )
        return self.decisions()[number]


def test_a_job_with_a_stopped_rank_is_run_again_and_resumes_and_the_ranks_node_is_named(
    cluster: Cluster,
) -> None:
    with cluster.aggregator() as service:
        run = Run(cluster).train()
        run.is_known()
        assert not run.decisions(), "while it goes on, GPUs at low power mean nothing"
        os.kill(run.rank(3), signal.SIGSTOP)
        decision = run.decision()
        stood = decision["progress_step"]
        cluster.wait(lambda: run.step > stood, WAIT_SECONDS, "it goes on from its checkpoint")
        cluster.wait(
            lambda: "resumed" in [o["state"] for o in run.decision()["outcomes"]],
            WAIT_SECONDS,
            "that is seen",
        )
    assert decision["cause"]["fault_class"] == "hang"
    assert [(one["node"], one["rank"]) for one in decision["cause"]["implicated"]] == [("n2", 3)]
    assert "rank 3, python3" in decision["cause"]["summary"]
    assert "is stopped" in decision["cause"]["summary"]
    assert "busy at low power" in decision["cause"]["summary"]
    assert (decision["job"]["verdict"], decision["job"]["excluded"]) == ("requeue", [])
    assert [(one["node"], one["verdict"]) for one in decision["nodes"]] == [("n2", "watch")]
    assert actions(decision) == {f"requeue {run.id}": "verified"}
    told = {
        one["node"]: one["text"] for one in decision["evidence"] if one["code"] == "hang.evidence"
    }
    assert sorted(told) == ["n1", "n2"], "both nodes were asked before their processes were ended"
    assert "rank 3, python3" in told["n2"]
    assert "state T in do_signal_stop" in told["n2"] or "state T; in do_signal_stop" in told["n2"]
    assert any("flight recorder: no dump" in text for text in decision["considered"])
    assert f"job {run.id} is suspected to hang" in service.said()
    assert cluster.job(run.id)["Restarts"] == "1"
    assert not list((cluster.spool / "requests").iterdir()), "and are asked no longer"


def python_with_torch(cluster: Cluster) -> str:
    """A Python with which the job's user can import torch: RECOVERY_TEST_TORCH, else the tests'."""
    python = os.environ.get("RECOVERY_TEST_TORCH", sys.executable)
    user = "nobody" if os.geteuid() == 0 else None
    try:
        has_torch = cluster.run(python, "-c", "import torch", check=False, user=user)
    except PermissionError:
        has_torch = None
    if has_torch is None or has_torch.returncode != 0:
        pytest.skip(f"{python} has no torch that the job's user can import (.[test-torch])")
    return python


def test_a_rank_stopped_in_torchs_all_reduce_is_found_and_the_job_run_again(
    cluster: Cluster,
) -> None:
    python = python_with_torch(cluster)
    with cluster.aggregator():
        run = Run(cluster).gloo(python)
        run.is_known()
        os.kill(run.rank(2), signal.SIGSTOP)
        decision = run.decision()
        stood = decision["progress_step"]
        cluster.wait(lambda: run.step > stood, WAIT_SECONDS, "it goes on")
    assert decision["cause"]["fault_class"] == "hang"
    assert [(one["node"], one["rank"]) for one in decision["cause"]["implicated"]] == [("n2", 2)]
    assert actions(decision) == {f"requeue {run.id}": "verified"}


def test_in_monitor_mode_a_hung_job_is_left_alone_and_its_time_limit_is_called_a_hang(
    cluster: Cluster,
) -> None:
    cluster.configure(MONITOR)
    with cluster.aggregator():
        run = Run(cluster).train()
        run.is_known()
        before = cluster.mutations()
        os.kill(run.rank(1), signal.SIGSTOP)
        decision = run.decision()
        assert decision["job"]["verdict"] == "requeue"
        assert actions(decision) == {f"requeue {run.id}": "recorded"}
        assert cluster.job(run.id)["JobState"] == "RUNNING"
        assert not cluster.mutations() - before
        cluster.run("scontrol", "update", f"job={run.id}", "EndTime=now+1")
        last = run.decision(1)
    assert last["ended"].startswith("TIMEOUT")
    assert (last["cause"]["fault_class"], last["job"]["verdict"]) == ("hang", "requeue")


def test_a_long_evaluation_is_suspected_and_never_called_a_hang(cluster: Cluster) -> None:
    with cluster.aggregator() as service:
        run = Run(cluster).script()
        run.is_known()
        load(cluster, WORKING)
        (run.folder / "pause").touch()
        said = f"job {run.id} is suspected to hang"
        cluster.wait(lambda: said in service.said(), WAIT_SECONDS, "it is suspected")
        cluster.wait(
            lambda: len(run.looks("hang.evidence")) >= 4, WAIT_SECONDS, "it is looked at again"
        )
        assert cluster.job(run.id)["JobState"] == "RUNNING"
        (run.folder / "go").touch()
        cluster.wait(lambda: cluster.job(run.id)["JobState"] == "COMPLETED", WAIT_SECONDS, "done")
        assert run.decisions() == []


def test_a_monitor_that_is_silent_makes_no_job_hang(cluster: Cluster) -> None:
    with cluster.aggregator() as service:
        silent, watched = Run(cluster).script(), Run(cluster).script()
        for run in (silent, watched):
            run.is_known()
        # One and the same pause; only of one of the two does anybody see it.
        cluster.stop_node(cluster.job(silent.id)["BatchHost"])
        for run in (silent, watched):
            (run.folder / "pause").touch()
        assert watched.decision()["cause"]["fault_class"] == "hang"
        assert silent.decisions() == []
        assert f"job {silent.id} is suspected" not in service.said()
        cluster.start_node(cluster.job(silent.id)["BatchHost"])
