"""Work counts as resumed only by a step that the next attempt itself has written."""

from __future__ import annotations

import time

import pytest

from recovery.outcome import outcomes
from recovery.slurm.base import Job
from slurm_hooks.record import Evidence, Finding, utc
from tests.records import decision, record

DECIDED = time.time()

NEXT_ATTEMPT = Job(
    12, "train", "ann", 1001, "", "train", "", "RUNNING", nodes=("n1", "n2"), restarts=1
)


@pytest.mark.parametrize(
    ("written", "failed_at", "resumed"),
    [
        (DECIDED + 5, 27, True),
        (DECIDED + 5, None, True),
        (DECIDED + 5, 40, False),
        (DECIDED - 5, 27, False),
        (DECIDED - 5, None, False),
    ],
    ids=["beyond", "nobody saw the failed one", "not yet beyond", "left over", "left over, unseen"],
)
def test_a_step_that_the_failed_attempt_left_behind_is_not_resumed_work(
    written: float, failed_at: int | None, resumed: bool
) -> None:
    evidence = Evidence("progress_file", "step 31", time=utc(written))
    seen = Finding("progress.seen", "info", "step 31", step=31, job_id=12, evidence=(evidence,))
    read = record("n1", job=None, hook="health_check", time=utc(DECIDED + 10), findings=(seen,))
    decided = decision(time=utc(DECIDED), progress_step=failed_at)
    states = [new.state for new in outcomes(decided, NEXT_ATTEMPT, [read], DECIDED + 11)]
    assert states == (["restarted", "resumed"] if resumed else ["restarted"])
