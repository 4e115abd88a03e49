"""Health checks, which are told of no job, look at each job that a prolog has been told of."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node import Node, job

USER = 65534 if os.geteuid() == 0 else os.geteuid()  # files of a job of root are not read

PROBES = '[probes.checkpoint]\nhooks = ["prolog", "epilog", "health_check"]\n'


@pytest.fixture
def node(tmp_path: Path) -> Node:
    made = Node(tmp_path)
    made.configure(f'[hooks]\nrun = "{tmp_path}/run"\nrepeat = 0\n{PROBES}')
    return made


def told(job_id: int, home: Path, restart: int = 0) -> dict[str, str]:
    """What slurmd tells the hooks of a job whose log is appended to."""
    return {
        **job(job_id, comment="recovery=requeue"),
        "SLURM_JOB_UID": str(USER),
        "SLURM_JOB_RESTART_COUNT": str(restart),
        "SLURM_JOB_WORK_DIR": str(home),
        "SLURM_JOB_STDOUT": str(home / f"{job_id}.log"),
    }


@contextlib.contextmanager
def batch_step(*jobs: int) -> Iterator[None]:
    """Processes with the title by which a batch step is known."""
    command = 'exec -a "slurmstepd: [$0.batch]" sleep 60'
    steps = [subprocess.Popen(["bash", "-c", command, str(number)]) for number in jobs]
    for step in steps:
        while b"slurmstepd" not in Path(f"/proc/{step.pid}/cmdline").read_bytes():
            time.sleep(0.01)
    yield
    for step in steps:
        step.kill()
        step.wait()


def steps_seen(node: Node) -> dict[int, int]:
    """Run a health check; return the step it has seen each job at, by the job's number."""
    assert node.run("health_check").status == 0
    newest = node.records()[-1]
    assert newest["hook"] == "health_check"
    return {
        found["job_id"]: found["step"]
        for found in newest["findings"]
        if found["code"] == "progress.seen"
    }


def test_a_job_that_starts_during_a_health_check_is_watched_by_the_next_one(
    node: Node, home: Path
) -> None:
    node.run("prolog", **told(71, home))
    (home / "71.log").write_text("step=71\n")
    begun = node.root / "begun"
    once = f"[ -e {begun} ] || {{ touch {begun}; until [ -e {node.root}/end ]; do :; done; }}"
    node.probe("slow", f"{once}; echo '[]'")
    with batch_step(71, 72):
        checking = node.start("health_check")
        while not begun.exists():
            time.sleep(0.01)
        node.run("prolog", **told(72, home))
        (home / "72.log").write_text("step=72\n")
        (node.root / "end").touch()
        assert checking.wait() == 0
        assert steps_seen(node) == {71: 71, 72: 72}


def test_steps_that_an_earlier_attempt_has_left_in_the_log_are_not_this_ones(
    node: Node, home: Path
) -> None:
    log = home / "73.log"
    log.write_text("step=500\n")
    node.run("prolog", **told(73, home, restart=1))
    with batch_step(73):
        node.finds({"code": "site.x", "severity": "info", "summary": "x"})
        assert steps_seen(node) == {}
        with log.open("a") as more:
            more.write("step=480\n")
        assert steps_seen(node) == {73: 480}
        log.write_text("step=1\n")  # begun anew
        assert steps_seen(node) == {73: 1}


def test_the_progress_file_that_a_task_prolog_names_is_read(node: Node, home: Path) -> None:
    node.run("prolog", **told(74, home, restart=2))
    folder = home / ".recovery" / "74.2"
    folder.mkdir(parents=True)
    (folder / "progress").write_text('{"step": 12}')
    with batch_step(74):
        assert steps_seen(node) == {74: 12}


def test_a_job_that_has_ended_is_not_looked_at(node: Node, home: Path) -> None:
    (home / "75.log").write_text("")
    node.run("prolog", **told(75, home))
    (home / "75.log").write_text("step=1\n")
    node.finds({"code": "site.x", "severity": "info", "summary": "x"})
    assert steps_seen(node) == {}


def test_a_job_of_somebody_who_did_not_opt_in_is_not_noted(node: Node, home: Path) -> None:
    node.run("prolog", **{**told(76, home), "SLURM_JOB_COMMENT": "a comment"})
    assert not list((node.root / "buffer").rglob("jobs/*"))
