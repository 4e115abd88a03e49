"""A job of --requeue=expedite that Slurm holds after a failure: run again, or its hold explained.

Slurm 25.11 and later has it. Told apart by what 26.05 says of such jobs; the rest on a real one.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from recovery.cause import STOP_REQUESTED
from recovery.decision import Attempt
from recovery.demo.cluster import Cluster
from recovery.demo.programs import find_programs, release
from recovery.incident import of_attempt
from recovery.slurm.documents import read_jobs
from slurm_hooks.record import Finding, utc
from tests.failing_job import (
    ACT,
    SLURM_CONF,
    WAIT_SECONDS,
    FailingJob,
    actions,
    submit,
    tidy,
    wait_for_a_full_look,
)
from tests.incidents import ENDED, NOW, decided, epilog, finding, job, log
from tests.test_crash_between_steps import aggregator as killed_aggregator

CAPTURED = Path(__file__).parent / "data" / "slurm" / "26.05" / "squeue-expedited.json"

FIRST = (25, 11)
EXPEDITE = "--requeue=expedite"
ENABLED = "SlurmctldParameters=enable_expedited_requeue"
HELD = "REQUEUE_HOLD"
PYTHON_FAILS = "echo 'Traceback (most recent call last):'; echo \"KeyError: 'x'\"; exit 1"


@pytest.mark.parametrize(
    ("name", "by_expedite", "by_slurm"),
    [("by_slurm", True, True), ("by_admin", False, False), ("by_person", False, False)],
)
def test_slurms_own_hold_is_told_apart_from_a_persons(
    name: str, by_expedite: bool, by_slurm: bool
) -> None:
    (job,) = (job for job in read_jobs(CAPTURED.read_text()).values() if job.name == name)
    assert job.held and job.pending and job.restarts == 1
    assert (job.held_by_expedite, job.held_by_slurm) == (by_expedite, by_slurm)


def test_a_plain_job_is_no_expedited_one() -> None:
    text = CAPTURED.read_text().replace("EXPEDITED_REQUEUE", "SPREAD_JOB")
    assert not any(job.held_by_expedite for job in read_jobs(text).values())


HELD_JOB = job(
    state="PENDING", restarts=1, end_time=0, start_time=0, exit_code=7, held_by_expedite=True
)


@pytest.mark.parametrize(
    ("exit_code", "seen", "verdict", "why"),
    [
        (7, finding("gpu.lost", gpu=3), "requeue", "without n3"),
        (7, log("program.exception", "KeyError: 'x'"), "hold", "would fail again"),
        (STOP_REQUESTED, finding("gpu.lost", gpu=3), "leave", "asks not to be run again"),
    ],
)
def test_it_is_decided_on_like_any_other(
    exit_code: int, seen: Finding, verdict: str, why: str
) -> None:
    shown = replace(HELD_JOB, exit_code=exit_code)
    attempt = Attempt("c1", shown.id, 0, shown.submit_time)
    records = [epilog("n3", [seen], replace(shown, restarts=0))]
    case = of_attempt(attempt, shown, ["n3"], records, ENDED, [], utc(NOW))
    decision = decided(case)
    assert (decision.job.verdict, decision.requeued) == (verdict, True)
    assert why in decision.job.reason
    assert decision.ended == f"{exit_code}:0, requeued and held by Slurm (--requeue=expedite)"


def skip_where_none_is_expedited() -> None:
    if release(find_programs()["slurmctld"]) < FIRST:
        pytest.skip("Slurm 25.11 and later expedite requeues: scripts/test-matrix sid")


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    skip_where_none_is_expedited()
    conf = f"{SLURM_CONF}\n{ENABLED}"
    with Cluster(3, 8, config=ACT, slurm_conf_extra=conf, health_check_seconds=0) as running:
        yield running


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    shared.configure(ACT)
    yield shared
    tidy(shared)


def fail(job: FailingJob, how: str = "exit 1") -> None:
    """Let its first attempt fail, and wait until Slurm holds it."""
    job.fail(how)
    job.wait_for(HELD)


class TestOnSlurm:
    pytestmark = pytest.mark.slurm

    @pytest.mark.smoke
    def test_it_runs_again_without_the_node_that_failed(self, cluster: Cluster) -> None:
        with cluster.aggregator():
            job = submit(cluster, EXPEDITE)
            before = cluster.mutations()
            lost = job.lose_gpu()
            cluster.wait(job.finished, WAIT_SECONDS, "it finishes elsewhere")
            decision = job.decision()
        changed = cluster.mutations() - before
        assert job.node != lost and job.shown()["ExcNodeList"] == lost
        assert decision["requeued"] and decision["job"]["verdict"] == "requeue"
        assert "requeued and held by Slurm" in decision["ended"]
        assert set(actions(decision).values()) == {"verified"}
        assert changed["REQUEST_JOB_REQUEUE"] == 0, "Slurm has requeued it already"

    def test_killed_again_and_again_the_aggregator_releases_it_once(
        self, cluster: Cluster, tmp_path: Path
    ) -> None:
        job = submit(cluster, EXPEDITE)
        before = cluster.mutations()
        job.lose_gpu()
        job.wait_for(HELD)
        told = tmp_path / "steps"
        for steps in itertools.cycle((1, 2)):
            if job.finished():
                break
            with killed_aggregator(cluster, steps, told) as process:
                process.join(WAIT_SECONDS)
                assert process.exitcode == -signal.SIGKILL, "it takes a step, and is killed for it"
        with cluster.aggregator():
            decision = job.decision()
        assert set(actions(decision).values()) == {"verified"}
        assert job.attempts() == 2 and job.shown()["Restarts"] == "1"
        changed = cluster.mutations() - before
        assert changed["REQUEST_UPDATE_NODE"] == 1 and changed["REQUEST_JOB_REQUEUE"] == 0
        assert {"CliScheduler.start_now", "CliScheduler.release"} <= set(told.read_text().split())

    def test_one_that_would_fail_again_stays_held_and_says_why(self, cluster: Cluster) -> None:
        job = submit(cluster, EXPEDITE)
        fail(job, PYTHON_FAILS)
        with cluster.aggregator():
            decision = job.decision()
        assert decision["job"]["verdict"] == "hold"
        assert actions(decision) == {f"hold {job.id}": "verified"}
        shown = job.shown()
        assert shown["JobState"] == HELD and shown["Priority"] == "0"
        assert f"recovery: {decision['id']}" in shown["AdminComment"]
        cluster.run("scontrol", "release", str(job.id))
        cluster.wait(job.finished, WAIT_SECONDS, "its owner's release starts it")

    def test_one_that_asks_not_to_be_run_again_is_not(self, cluster: Cluster) -> None:
        job = submit(cluster, EXPEDITE)
        fail(job, "exit 93")
        with cluster.aggregator():
            decision = job.decision()
        assert decision["cause"]["fault_class"] == "program.stop_requested"
        assert job.state == HELD and job.attempts() == 1

    def test_what_an_administrator_holds_besides_stays_held(self, cluster: Cluster) -> None:
        job = submit(cluster, EXPEDITE)
        job.lose_gpu()
        job.wait_for(HELD)
        cluster.run("scontrol", "hold", str(job.id))
        before = cluster.mutations()
        with cluster.aggregator():
            wait_for_a_full_look(cluster)
            wait_for_a_full_look(cluster)
        assert job.state == HELD and job.attempts() == 1
        changed = cluster.mutations() - before
        assert not [kind for kind in changed if "JOB" in kind], changed

    def test_one_that_a_person_requeued_and_held_stays_held(self, cluster: Cluster) -> None:
        job = submit(cluster, EXPEDITE)
        with cluster.aggregator():
            wait_for_a_full_look(cluster)
            cluster.run("scontrol", "requeuehold", str(job.id))
            job.wait_for("PENDING")
            wait_for_a_full_look(cluster)
            wait_for_a_full_look(cluster)
        assert job.shown()["Priority"] == "0" and job.attempts() == 1

    def test_in_monitor_mode_it_stays_as_slurm_left_it(self, cluster: Cluster) -> None:
        cluster.configure(ACT.replace('"act"', '"monitor"', 1))
        job = submit(cluster, EXPEDITE)
        job.lose_gpu()
        job.wait_for(HELD)
        before = cluster.mutations()
        with cluster.aggregator():
            decision = job.decision()
            wait_for_a_full_look(cluster)
        assert set(actions(decision).values()) == {"recorded"}
        assert job.state == HELD and not cluster.mutations() - before
