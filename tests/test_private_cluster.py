"""A private cluster: real, alone, hooked up as on a site, and gone without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from recovery.demo.cluster import Cluster
from recovery.demo.programs import ClusterError

pytestmark = pytest.mark.slurm

OWNER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from recovery.demo.cluster import Cluster

    with Cluster(nodes=2, gpus=0, folder=Path(sys.argv[1]), hooks=False) as cluster:
        job = cluster.submit("--nodes=2", "--wrap", "srun sleep 1000")
        steps = lambda: cluster.run("squeue", "-hs", "-o", "%i").stdout.split()
        cluster.wait(lambda: f"{job}.0" in steps(), 30, "the step runs")
        cluster.wait(lambda: cluster.job(job)["JobState"] == "RUNNING", 30, "the job runs")
        print("up", flush=True)
        sys.stdin.read()
        raise RuntimeError("the owner's own mistake")
    """
)
"""A program that owns a cluster with a running job and ends in one way or another."""


def below(process: psutil.Process) -> list[psutil.Process]:
    """All that runs below a process: the keeper of a cluster is the parent of every orphan."""
    return process.children(recursive=True)


def names(processes: list[psutil.Process]) -> set[str]:
    """The names of those that still run; one that only waits to be reaped does not."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.name())
    return found


def until(condition: Callable[[], object], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


def finished(cluster: Cluster, job: int) -> str:
    """Wait until the job has ended and its epilogs with it; return its state."""
    ended = ("COMPLETED", "FAILED", "CANCELLED")
    cluster.wait(lambda: cluster.job(job)["JobState"] in ended, 30, f"job {job} ends")
    return cluster.job(job)["JobState"]


def records(cluster: Cluster, job: int) -> list[dict[str, Any]]:
    """The fault records about a job that its hooks have dropped so far."""
    texts = [path.read_text("utf-8") for path in sorted(cluster.spool.glob("incoming/*.json"))]
    documents = [json.loads(text) for text in texts]
    return [one for one in documents if (one.get("job") or {}).get("id") == job]


@pytest.fixture
def short_folder() -> Path:
    """A path that does not exist yet: pytest's own are too long for Slurm's sockets."""
    folder = Path(f"/tmp/cluster-test-{os.getpid()}-{time.monotonic_ns()}")
    assert not folder.exists()
    return folder


@pytest.fixture
def owner(tmp_path: Path, short_folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with a cluster and a running job; it fails once nobody writes to it any more."""
    program = tmp_path / "owner.py"
    program.write_text(OWNER, "utf-8")
    pipe = subprocess.PIPE
    argv = [sys.executable, str(program), str(short_folder)]
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind_however_the_owner_ends(
    owner: subprocess.Popen[str], short_folder: Path, number: signal.Signals | None
) -> None:
    expected = {"slurmctld", "slurmd", "slurmstepd", "munged", "sleep"}
    assert until(lambda: expected <= names(below(psutil.Process(owner.pid))))
    started = below(psutil.Process(owner.pid))
    if number is not None:
        owner.send_signal(number)
    _, complaint = owner.communicate(timeout=30)
    assert owner.returncode == (1 if number is None else -number)
    assert ("the owner's own mistake" in complaint) == (number is None)
    assert until(lambda: not short_folder.exists()), list(short_folder.iterdir())
    assert until(lambda: not names(started)), names(started)


def test_two_clusters_run_side_by_side(cluster: Cluster) -> None:
    before = below(psutil.Process())
    with Cluster(nodes=1, gpus=1) as other:
        first = cluster.submit("--comment=recovery=requeue", "--wrap", "hostname; sleep 1")
        second = other.submit("--comment=recovery=requeue", "--job-name=other", "--wrap", "sleep 1")
        assert finished(cluster, first) == finished(other, second) == "COMPLETED"
        assert other.job(second)["JobName"] == "other"
        assert other.run("sinfo", "-hN", "-o", "%N").stdout.split() == ["n1"]
        assert len(cluster.run("sinfo", "-hN", "-o", "%N").stdout.split()) == 4
        other.wait(lambda: records(other, second), 10, "its epilog reports to its own spool")
        folder, started = other.folder, set(below(psutil.Process())) - set(before)
        assert "slurmctld" in names(list(started))
    assert not folder.exists()
    assert names(list(started)) == set()
    assert cluster.run("scontrol", "ping").returncode == 0


def test_a_folder_in_use_is_refused_and_stays_as_it_is(short_folder: Path) -> None:
    short_folder.mkdir()
    precious = short_folder / "precious"
    precious.touch()
    try:
        with pytest.raises(ClusterError, match="not empty"), Cluster(1, 0, folder=short_folder):
            pass
        assert precious.exists()
    finally:
        precious.unlink()
        short_folder.rmdir()


def test_slurmd_runs_the_hooks_and_a_lost_gpu_is_in_the_epilogs_record(cluster: Cluster) -> None:
    cluster.break_gpu("n2", 3, "lost")
    try:
        job = cluster.submit("--nodelist=n2", "--gpus-per-node=1", "--wrap", "exit 3")
        assert finished(cluster, job) == "FAILED"
        epilog = cluster.wait(
            lambda: [one for one in records(cluster, job) if one["hook"] == "epilog"],
            30,
            "the epilog reports",
        )[0]
    finally:
        cluster.mend_gpus("n2")
    assert epilog["node"] == "n2"
    assert (3, "fatal") in [(one.get("gpu"), one["severity"]) for one in epilog["findings"]]


def test_a_task_is_told_what_its_job_opted_in_to(cluster: Cluster) -> None:
    wrapped = ("--output=%j.out", "--wrap", "srun env")
    asked = cluster.submit("--comment=recovery=requeue,progress=/data/step", *wrapped)
    silent = cluster.submit(*wrapped)
    assert finished(cluster, asked) == finished(cluster, silent) == "COMPLETED"
    line = "RECOVERY_PROGRESS_FILE=/data/step\n"
    assert line in (cluster.work / f"{asked}.out").read_text("utf-8")
    assert "RECOVERY_PROGRESS_FILE" not in (cluster.work / f"{silent}.out").read_text("utf-8")


def test_every_change_is_counted_and_no_look_is(cluster: Cluster) -> None:
    job = cluster.submit("--hold", "--wrap", "true")
    before = cluster.mutations()
    scheduler = cluster.scheduler()
    assert scheduler.jobs([job])[job].id == job
    assert set(scheduler.nodes()) == {"n1", "n2", "n3", "n4"}
    cluster.job(job)
    cluster.node("n1")
    assert cluster.mutations() - before == {}

    cluster.run("scontrol", "update", "nodename=n4", "state=drain", "reason=a test")
    cluster.run("scontrol", "update", "nodename=n4", "state=resume")
    cluster.run("scontrol", "update", f"job={job}", "comment=a test")
    cluster.run("scancel", str(job))
    assert cluster.mutations() - before == {
        "REQUEST_UPDATE_NODE": 2,
        "REQUEST_UPDATE_JOB": 1,
        "REQUEST_KILL_JOB": 1,
    }


def test_its_aggregator_can_be_killed_and_started_again(cluster: Cluster) -> None:
    def passes() -> str:
        told = cluster.run("recovery", "status", check=False).stdout.splitlines()
        return next((line for line in told if line.startswith("last pass") and ":" in line), "")

    with cluster.aggregator() as first:
        seen = cluster.wait(passes, 15, "a first pass")
        first.kill()
        assert not first.alive
    with cluster.aggregator() as second:
        cluster.wait(lambda: passes() not in ("", seen), 15, "a pass of the second")
        assert second.alive
    assert not second.alive, second.said()
