"""The controller's clock jumps while a job fails and restarts: the right attempt, once, or none.

On a real Slurm whose own clock goes on, so that the two disagree from the jump on, as they may
where the aggregator has a host of its own. And the hour that summer time repeats, for all of it.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from recovery.demo.cluster import Cluster
from tests.failing_job import (
    ACT,
    SLURM_CONF,
    WAIT_SECONDS,
    FailingJob,
    actions,
    aggregator_here,
    decisions,
    pass_until_finished,
    submit,
    tidy,
)

pytestmark = pytest.mark.slurm

HOUR = 3600.0

UNTIL_THE_HOUR_REPEATS = 40
"""Seconds from the cluster's start to the end of its summer time: for two jobs to start in, and
one of them to be restarted, which takes twelve."""


@dataclass
class Clock:
    """A clock that can be set."""

    ahead: float = 0.0

    def __call__(self) -> float:
        """Return seconds since the epoch, as it believes."""
        return time.time() + self.ahead


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        repeats = time.time() + UNTIL_THE_HOUR_REPEATS
        patch.setenv("TZ", zone_that_repeats_an_hour(repeats))
        time.tzset()
        with Cluster(3, 8, config=ACT, slurm_conf_extra=SLURM_CONF) as running:
            yield running
    time.tzset()


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    tidy(shared)


def zone_that_repeats_an_hour(at: float) -> str:
    """A zone (POSIX TZ) whose summer time ends at ``at``, in seconds since the epoch."""
    end = datetime.datetime.fromtimestamp(int(at) + HOUR, datetime.timezone.utc)
    begin = end - datetime.timedelta(days=90)

    def rule(moment: datetime.datetime) -> str:
        return f"{moment.timetuple().tm_yday - 1}/{moment:%H:%M:%S}"

    return f"WIN0SUM,{rule(begin)},{rule(end)}"


def test_in_the_hour_that_will_repeat_a_job_is_restarted_at_once(cluster: Cluster) -> None:
    with cluster.aggregator():
        told_once(cluster, submit(cluster))
    assert time.localtime().tm_isdst == 1


def test_in_the_hour_that_repeats_a_job_is_restarted_as_in_any_other(cluster: Cluster) -> None:
    with cluster.aggregator():
        job = submit(cluster)
        began = time.localtime()
        cluster.wait(lambda: not time.localtime().tm_isdst, WAIT_SECONDS, "summer time has ended")
        assert began.tm_isdst == 1 and time.localtime().tm_hour in (
            began.tm_hour,
            began.tm_hour - 1,
        )
        told_once(cluster, job)


def told_once(cluster: Cluster, job: FailingJob) -> None:
    """Let the job lose a GPU, and see it restarted elsewhere, once."""
    before = cluster.mutations()
    lost = job.lose_gpu()
    cluster.wait(job.finished, WAIT_SECONDS, "it finishes elsewhere")
    decision = job.decision()
    restarted_once(cluster, job, lost)
    changed = cluster.mutations() - before
    assert (changed["REQUEST_JOB_REQUEUE"], changed["REQUEST_UPDATE_NODE"]) == (1, 1)
    assert set(actions(decision).values()) == {"verified"}


def restarted_once(cluster: Cluster, job: FailingJob, lost: str) -> None:
    """See that attempt 0 was decided on once, and attempt 1 ran off the lost node."""
    about = [one for one in decisions(cluster) if (one["attempt"] or {}).get("job_id") == job.id]
    assert [one["attempt"]["restart"] for one in about] == [0]
    assert job.attempts() == 2 and job.shown()["Restarts"] == "1"
    assert job.node != lost
    assert cluster.node(lost)["Reason"].startswith(f"recovery: {about[0]['id']}: ")


def has_decided(cluster: Cluster, job: FailingJob) -> bool:
    return any((one["attempt"] or {}).get("job_id") == job.id for one in decisions(cluster))


def is_requeued(cluster: Cluster, job: FailingJob) -> bool:
    return job.shown()["Restarts"] == "1"


def begins_to_fail(cluster: Cluster, job: FailingJob) -> bool:
    return True


@pytest.mark.parametrize("step", [HOUR, -HOUR], ids=["forward", "back"])
@pytest.mark.parametrize("when", [begins_to_fail, has_decided, is_requeued])
def test_a_clock_that_jumps_repeats_no_restart_and_loses_none(
    cluster: Cluster, when: Callable[[Cluster, FailingJob], bool], step: float
) -> None:
    clock = Clock()
    job = submit(cluster)
    lost = job.lose_gpu()
    with aggregator_here(cluster, cluster.scheduler(), clock) as aggregator:

        def jumps() -> bool:
            aggregator.pass_once()
            return when(cluster, job)

        cluster.wait(jumps, WAIT_SECONDS, when.__name__)
        clock.ahead = step
        pass_until_finished(cluster, job, aggregator)
    restarted_once(cluster, job, lost)
