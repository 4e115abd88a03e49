"""What comes late about a decided attempt is heard, whatever a full look shows meanwhile."""

from __future__ import annotations

from recovery.watch import LATE_SECONDS, Ready, Watch
from slurm_hooks.record import utc
from tests.incidents import ENDED, POLICY, finding, health_check, job


def test_a_full_look_in_the_same_pass_does_not_undo_what_has_been_heard() -> None:
    watch, failed = Watch(POLICY, 0.0), job()
    now = ENDED + 10
    watch.settle(Ready(failed, failed.nodes, 0), now)
    watch.note(health_check("n3", [finding("gpu.ecc_uncontained", gpu=3)], after_end=11))
    watch.note_snapshot({failed.id: failed}, now + 2)
    assert watch.ready({failed.id: failed}, lambda *_: True, now + 2) == []
    assert [ready.job.id for ready in watch.late(now + 2)] == [failed.id]
    assert watch.late(now + 3) == [], "once"


def test_an_attempt_that_lies_there_for_days_is_not_kept_in_mind() -> None:
    watch, failed = Watch(POLICY, 0.0), job()
    now = ENDED + LATE_SECONDS + 60
    watch.note_snapshot({failed.id: failed}, now)
    assert watch.ready({failed.id: failed}, lambda *_: True, now) == []
    late = health_check("n3", [finding("gpu.ecc_uncontained", gpu=3)], after_end=now - ENDED + 1)
    assert late.time == utc(now + 1)
    watch.note(late)
    assert watch.late(now + 2) == []
