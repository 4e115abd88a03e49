"""A hung job that its time limit ends is called hung, in whatever order its last records come."""

from __future__ import annotations

from pathlib import Path

import pytest

from recovery.hangs import Hangs
from recovery.slurm.base import Job
from recovery.stalls import Hang
from tests.incidents import ENDED, POLICY, health_check, job, progress

MINUTE = 60.0


def watched(folder: Path) -> Hangs:
    """Seen to step each minute for an hour, and to stand still for the half hour to its end."""
    (folder / "requests").mkdir()
    hangs = Hangs(POLICY, folder)
    for minute in range(90):
        looked = (minute - 90) * MINUTE
        hangs.note(health_check("n1", [progress(min(minute, 60))], after_end=looked))
    return hangs


def of_ninety_minutes(state: str) -> Job:
    return job(state=state, start_time=int(ENDED - 95 * MINUTE))


def test_one_judged_between_its_end_and_its_decision_is_still_called_hung(tmp_path: Path) -> None:
    hangs, ended = watched(tmp_path), of_ninety_minutes("TIMEOUT")
    assert hangs.judge({ended.id}, {ended.id: ended}, ENDED + 1) == [], "it runs no more"
    assert isinstance(hangs.at_end(ended, ENDED), Hang)


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED"])
def test_time_in_which_somebody_had_suspended_it_is_no_hang(state: str, tmp_path: Path) -> None:
    hangs, ended = watched(tmp_path), of_ninety_minutes("TIMEOUT")
    before = of_ninety_minutes(state)
    hangs.judge({before.id}, {before.id: before}, ENDED - MINUTE)
    assert (hangs.at_end(ended, ENDED) is None) is (state == "SUSPENDED")
