"""Slurm is asked and told through its own commands, and its silence is never an answer."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recovery.demo.cluster import Cluster
from recovery.slurm.base import CommandRefused, Job, Scheduler, SchedulerError, SchedulerUnavailable
from recovery.slurm.cli import CliScheduler

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=3, hooks=False) as running:
        yield running


@pytest.fixture
def scheduler(cluster: Cluster) -> Scheduler:
    return CliScheduler(cluster.environment)


def submit(cluster: Cluster, script: str, *options: str) -> int:
    return cluster.submit("--output=/dev/null", *options, "--wrap", script)


def wait_for(cluster: Cluster, job: int, what: str, condition: Callable[[Job], bool]) -> Job:
    """Return the job once ``condition`` holds; ended or not, it must be there."""
    scheduler = CliScheduler(cluster.environment)

    def seen() -> Job | None:
        found = scheduler.jobs([job])[job]
        return found if condition(found) else None

    found = cluster.wait(seen, 30, f"job {job} is {what}")
    assert found is not None
    return found


def test_an_ended_job_is_still_seen_and_an_unknown_one_is_absent(
    cluster: Cluster, scheduler: Scheduler
) -> None:
    job = submit(cluster, "exit 9", "--comment", "recovery=requeue JobState=RUNNING")
    failed = wait_for(cluster, job, "FAILED", lambda job: job.state == "FAILED")
    assert (failed.exit_code, failed.comment) == (9, "recovery=requeue JobState=RUNNING")
    assert set(scheduler.jobs([job, 999_999])) == {job}
    assert scheduler.jobs([999_999]) == {}
    assert scheduler.jobs([]) == {}
    assert job in scheduler.jobs()


def test_an_array_task_is_found_by_its_own_id(cluster: Cluster, scheduler: Scheduler) -> None:
    array = submit(cluster, "exit 1", "--array=1-2")

    def both() -> list[Job]:
        tasks = [
            job for job in scheduler.jobs().values() if (job.array or "").startswith(str(array))
        ]
        return tasks if [job.state for job in tasks] == ["FAILED", "FAILED"] else []

    tasks = cluster.wait(both, 30, "both tasks have failed")
    for task in tasks:
        found = scheduler.jobs([task.id])
        assert {job.id: job.array for job in found.values()} == {task.id: task.array}
    first = min(tasks, key=lambda job: str(job.array))
    scheduler.requeue(first.name_for_commands)
    requeued = wait_for(cluster, first.id, "pending", lambda job: job.pending)
    assert (requeued.array, requeued.restarts) == (f"{array}_1", 1)


def test_a_failed_job_restarts_at_once_off_the_excluded_nodes(
    cluster: Cluster, scheduler: Scheduler
) -> None:
    # It fails the first time and runs the second.
    script = '[ "$SLURM_RESTART_COUNT" = 1 ] && sleep 60; exit 9'
    job = submit(cluster, script, "--exclude=n3")
    wait_for(cluster, job, "FAILED", lambda job: job.state == "FAILED")
    scheduler.requeue(str(job))
    pending = wait_for(cluster, job, "pending", lambda job: job.pending)
    assert pending.eligible_time > time.time() + 60
    scheduler.start_now(str(job), [*pending.excluded, "n1"])
    running = wait_for(cluster, job, "RUNNING", lambda job: job.state == "RUNNING")
    assert (running.nodes, running.restarts, running.excluded) == (("n2",), 1, ("n1", "n3"))
    cluster.run("scancel", str(job))


def test_a_job_is_put_back_held_for_its_owner_and_says_why(
    cluster: Cluster, scheduler: Scheduler
) -> None:
    job = submit(cluster, "exit 3")
    wait_for(cluster, job, "FAILED", lambda job: job.state == "FAILED")
    scheduler.requeue_hold(str(job))
    special = wait_for(cluster, job, "SPECIAL_EXIT", lambda job: job.state == "SPECIAL_EXIT")
    assert special.held
    scheduler.explain_hold(str(job), 'recovery: d1: "KeyError"\nmend, then: JobState=x, go')
    assert scheduler.jobs([job])[job].admin_comment == (
        "recovery: d1: 'KeyError' mend, then: JobState=x, go"
    )
    scheduler.explain_hold(str(job), "x" * 100_000)
    assert len(scheduler.jobs([job])[job].admin_comment) == 2000


def test_a_pending_job_is_held_and_released(cluster: Cluster, scheduler: Scheduler) -> None:
    job = submit(cluster, "true", "--begin=now+1hour", "--exclude=n1")
    scheduler.hold(str(job))
    assert scheduler.jobs([job])[job].held
    scheduler.release(str(job))
    assert not scheduler.jobs([job])[job].held
    scheduler.start_now(str(job), [])
    done = wait_for(cluster, job, "COMPLETED", lambda job: job.state == "COMPLETED")
    assert done.excluded == ()


def test_reservations_that_keep_their_jobs_within_are_read_with_their_nodes(
    cluster: Cluster, scheduler: Scheduler
) -> None:
    assert scheduler.reservations() == {}
    for name, flags in (("ours", "maint,overlap"), ("loose", "flex,overlap")):
        cluster.run(
            "scontrol", "create", "reservation", f"reservationname={name}", f"flags={flags}",
            "users=root", "starttime=now", "duration=60", "nodes=n[1-2]",
        )  # fmt: skip
    try:
        job = cluster.submit("--reservation=ours", "--hold", "--wrap", "true")
        assert scheduler.jobs([job])[job].reservation == "ours"
        assert scheduler.reservations() == {"ours": ("n1", "n2")}
        cluster.run("scancel", str(job))
    finally:
        for name in ("ours", "loose"):
            cluster.run("scontrol", "delete", f"reservationname={name}")


def test_nodes_are_drained_in_one_command_and_returned(
    cluster: Cluster, scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "recovery.slurm")
    scheduler.drain(["n2", "n1"], '"GPU 3"\nhas fallen off the bus State=IDLE [x@y]')
    nodes = scheduler.nodes(["n1", "n2", "n3", "n99"])
    assert {name: node.drained for name, node in nodes.items()} == {
        "n1": True,
        "n2": True,
        "n3": False,
    }
    assert nodes["n1"].reason == "'GPU 3' has fallen off the bus State=IDLE [x@y]"
    assert nodes["n1"].reason_uid == 0
    assert nodes["n1"].gpus == 8
    scheduler.undrain(["n1", "n2"])
    assert not any(node.drained for node in scheduler.nodes().values())
    logged = [vars(record)["command"] for record in caplog.records]
    assert [command[:3] for command in logged] == [
        ["scontrol", "update", "nodename=n[1-2]"],
        ["scontrol", "update", "nodename=n[1-2]"],
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda slurm: slurm.requeue("999999"), "Invalid job id specified"),
        (lambda slurm: slurm.hold("999999"), "Invalid job id specified"),
        (lambda slurm: slurm.start_now("999999", ["n1"]), "Invalid job id specified"),
        (lambda slurm: slurm.drain(["n99"], "x"), "Invalid node name specified"),
        (lambda slurm: slurm.undrain(["n1"]), "Invalid node state"),
        (lambda slurm: slurm.requeue("--help"), "not a job id"),
        (lambda slurm: slurm.requeue("1 2"), "not a job id"),
        (lambda slurm: slurm.start_now("1", ["n1 State=RESUME"]), "not a node name"),
        (lambda slurm: slurm.drain(["n[1-3]"], "x"), "not a node name"),
        (lambda slurm: slurm.drain(["ALL\n"], "x"), "not a node name"),
        (lambda slurm: slurm.drain(["n1"], "\n"), "needs a reason"),
    ],
)
def test_what_slurm_refuses_is_told_in_its_own_words(
    scheduler: Scheduler, change: Callable[[Scheduler], None], said: str
) -> None:
    with pytest.raises(CommandRefused, match=said):
        change(scheduler)


def test_the_administrators_shell_does_not_narrow_the_answer(cluster: Cluster) -> None:
    job = submit(cluster, "exit 1")
    wait_for(cluster, job, "FAILED", lambda job: job.state == "FAILED")
    narrowed = {"SQUEUE_STATES": "RUNNING", "SQUEUE_USERS": "nobody", "SQUEUE_PARTITION": "none"}
    asked = CliScheduler({**cluster.environment, **narrowed, "SINFO_PARTITION": "none"})
    assert job in asked.jobs()
    assert set(asked.nodes()) == {"n1", "n2", "n3"}


QUESTIONS_AND_CHANGES: list[Callable[[Scheduler], object]] = [
    lambda slurm: slurm.jobs(),
    lambda slurm: slurm.jobs([1]),
    lambda slurm: slurm.nodes(),
    lambda slurm: slurm.requeue("1"),
    lambda slurm: slurm.hold("1"),
    lambda slurm: slurm.release("1"),
    lambda slurm: slurm.start_now("1", ["n1"]),
    lambda slurm: slurm.drain(["n1"], "x"),
]


def assert_all_unavailable(scheduler: Scheduler, within_seconds: float) -> None:
    """Ask and tell everything at once; each must end in time, and as SchedulerUnavailable."""

    def ending(call: Callable[[Scheduler], object]) -> tuple[str, bool]:
        began = time.monotonic()
        try:
            call(scheduler)
        except SchedulerError as error:
            return type(error).__name__, time.monotonic() - began < within_seconds
        return "an answer", False

    with ThreadPoolExecutor(len(QUESTIONS_AND_CHANGES)) as pool:
        endings = list(pool.map(ending, QUESTIONS_AND_CHANGES))
    assert endings == [("SchedulerUnavailable", True)] * len(QUESTIONS_AND_CHANGES)


def test_a_frozen_controller_is_unavailable_within_the_timeout(cluster: Cluster) -> None:
    config = cluster.run("scontrol", "show", "config").stdout
    pid_file = next(line for line in config.splitlines() if line.startswith("SlurmctldPidFile"))
    controller = int(Path(pid_file.split("=")[1].strip()).read_text())
    os.kill(controller, signal.SIGSTOP)
    try:
        assert_all_unavailable(CliScheduler(cluster.environment, timeout_seconds=1), 2.5)
    finally:
        os.kill(controller, signal.SIGCONT)


def test_a_stopped_controller_is_unavailable_and_never_an_empty_cluster(cluster: Cluster) -> None:
    cluster.run("scontrol", "shutdown", "slurmctld")
    try:
        assert_all_unavailable(CliScheduler(cluster.environment), 20)
    finally:
        cluster.restart_controller()
    assert CliScheduler(cluster.environment).nodes()


@pytest.mark.parametrize(
    "environment", [{"PATH": "/nonexistent"}, {"SLURM_CONF": "/nonexistent/slurm.conf"}]
)
def test_commands_that_cannot_work_are_unavailable(
    cluster: Cluster, environment: dict[str, str]
) -> None:
    lost = CliScheduler({**cluster.environment, **environment}, timeout_seconds=1)
    with pytest.raises(SchedulerUnavailable):
        lost.jobs()
    with pytest.raises(SchedulerUnavailable):
        lost.requeue("1")


@pytest.mark.parametrize(
    "script",
    [
        "exit 0",
        "echo '{\"jobs\": ['",
        "echo '{}'",
        "kill -9 $$",
        "cat /dev/zero",
        "sleep 60 & wait",
        'echo \'{"jobs": [], "errors": []}\'; exit 1',
    ],
)
def test_a_squeue_that_prints_no_answer_is_unavailable(tmp_path: Path, script: str) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\n{script}\n")
    squeue.chmod(0o755)
    broken = CliScheduler({"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout_seconds=1)
    with pytest.raises(SchedulerUnavailable, match="squeue"):
        broken.jobs()
