"""A command that Slurm refuses is looked at again: what was wanted may have come about meanwhile.

Between the look at a job and the command about it, Slurm goes on; the scheduler of this test lets
it go on for certain, at the one moment where it matters.
"""

from __future__ import annotations

from collections.abc import Collection

import pytest

from recovery.demo.cluster import Cluster
from recovery.slurm.cli import CliScheduler
from tests.failing_job import (
    ACT,
    SLURM_CONF,
    WAIT_SECONDS,
    FailingJob,
    actions,
    aggregator_here,
    pass_until_finished,
    submit,
)

pytestmark = pytest.mark.slurm


class Late(CliScheduler):
    """By the time of its first ``start_now``, the pending job has been started already."""

    def __init__(self, cluster: Cluster, job: FailingJob) -> None:
        super().__init__(environment=cluster.environment, timeout_seconds=20)
        self._cluster, self._job = cluster, job
        self.calls = 0

    def start_now(self, job: str, excluded: Collection[str]) -> None:
        self.calls += 1
        if self.calls == 1:
            super().start_now(job, excluded)
            self._cluster.wait(
                lambda: self._job.state not in ("PENDING", "FAILED"),
                WAIT_SECONDS,
                "the restarted job starts",
            )
        super().start_now(job, excluded)


def test_a_job_that_starts_before_the_command_for_it_is_restarted_not_failed() -> None:
    with Cluster(2, 8, config=ACT, slurm_conf_extra=SLURM_CONF, health_check_seconds=0) as cluster:
        job = submit(cluster)
        late = Late(cluster, job)
        bad = job.lose_gpu()
        with aggregator_here(cluster, late) as aggregator:
            pass_until_finished(cluster, job, aggregator)
        decision = job.decision()
        assert actions(decision) == {f"drain {bad}": "verified", f"requeue {job.id}": "verified"}
        assert late.calls == 1, "the refused command is not sent again"
        assert job.attempts() == 2
