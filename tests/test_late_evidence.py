"""What a slow spool holds is waited for; what comes late about a decided attempt is heard."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recovery.decision import Attempt
from recovery.incident import of_attempt
from recovery.watch import LATE_SECONDS, Ready, Watch
from slurm_hooks.record import FaultRecord, utc
from tests.incidents import ENDED, POLICY, epilog, failed, finding, health_check, job


def test_a_full_look_in_the_same_pass_does_not_undo_what_has_been_heard() -> None:
    watch, failed = Watch(POLICY, 0.0), job()
    now = ENDED + 10
    watch.settle(Ready(failed, failed.nodes, 0), now)
    watch.note(health_check("n3", [finding("gpu.ecc_uncontained", gpu=3)], after_end=11))
    watch.note_snapshot({failed.id: failed}, now + 2)
    assert watch.ready({failed.id: failed}, lambda *_: True, now + 2, 2, 2) == []
    assert [ready.job.id for ready in watch.late(now + 2)] == [failed.id]
    assert watch.late(now + 3) == [], "once"


def test_an_attempt_that_lies_there_for_days_is_not_kept_in_mind() -> None:
    watch, failed = Watch(POLICY, 0.0), job()
    now = ENDED + LATE_SECONDS + 60
    watch.note_snapshot({failed.id: failed}, now)
    assert watch.ready({failed.id: failed}, lambda *_: True, now, 0, 0) == []
    late = health_check("n3", [finding("gpu.ecc_uncontained", gpu=3)], after_end=now - ENDED + 1)
    assert late.time == utc(now + 1)
    watch.note(late)
    assert watch.late(now + 2) == []


@pytest.mark.parametrize(
    ("after", "heard", "ready"),
    [
        (POLICY.settle + 1, POLICY.settle, True),
        (POLICY.settle + 1, POLICY.settle - 1, False),
        (POLICY.settle + 60, -60, False),
        (POLICY.gather_max, -60, True),
    ],
)
def test_silent_is_whose_record_is_not_in_the_spool_either(
    after: float, heard: float, ready: bool
) -> None:
    watch, failed = Watch(POLICY, 0.0), job()
    began = ENDED + 1
    watch.note_snapshot({failed.id: failed}, began)

    def at(seconds: float, until: float) -> bool:
        return bool(
            watch.ready({failed.id: failed}, lambda *_: False, began + seconds, seconds, until)
        )

    assert not at(0, 0)
    assert at(after, heard) is ready


def test_what_a_later_job_on_the_node_met_is_not_told_of_the_former_one() -> None:
    lost = finding("gpu.ecc_uncontained", gpu=3)
    seen = health_check("n3", [lost], after_end=20)
    assert [one.node for one in failed(extra=[seen]).sightings] == ["n3"]
    following = replace(epilog("n3", [lost], job(id=13)), time=utc(ENDED + 19))
    assert failed(extra=[following, seen]).sightings == ()
    before_the_end = health_check("n3", [lost], after_end=-20)
    told = failed(extra=[following, seen, before_the_end]).sightings
    assert [one.record for one in told] == [before_the_end.id]


def test_what_was_seen_before_the_later_job_began_stays_the_former_ones() -> None:
    lost = [finding("gpu.ecc_uncontained", gpu=3)]
    before, after = (health_check("n3", lost, after_end=at) for at in (20, 60))
    following = replace(epilog("n3", lost, job(id=13)), time=utc(ENDED + 62))
    failed_job, attempt = job(), Attempt("c1", 12, 0, int(ENDED) - 600)

    def seen(*records: FaultRecord, begun: float) -> list[str]:
        case = of_attempt(
            *(attempt, failed_job, ("n3",), records, ENDED, [], utc(ENDED + 70)),
            reused={"n3": ENDED + begun},
        )
        return [one.record for one in case.sightings]

    assert seen(before, after, following, begun=40) == [before.id]
    assert seen(after, following, begun=40) == []
    assert seen(health_check("n3", lost, after_end=400), begun=500) == [], "too late in any case"


def test_what_an_earlier_job_met_is_not_told_of_one_that_slurm_has_requeued() -> None:
    """Slurm shows the begin of the next attempt then; that GPUs go from one job to one tells it."""
    lost = [finding("gpu.ecc_uncontained", gpu=3)]
    requeued = job(restarts=1, state="PENDING", start_time=0)
    attempt = Attempt("c1", requeued.id, 0, requeued.submit_time)

    def seen(*records: FaultRecord) -> list[str]:
        own = with_gpus(epilog("n3", of=job()), (2, 3))
        case = of_attempt(attempt, requeued, ("n3",), [*records, own], ENDED, [], utc(ENDED + 2))
        return [one.record for one in case.sightings]

    before = replace(epilog("n3", lost, job(id=11)), id="before", time=utc(ENDED - 30))
    check = health_check("n3", lost, after_end=-40)
    assert seen(check, with_gpus(before, (3,))) == [], "its GPU was the other's until then"
    assert seen(check, with_gpus(before, (0, 1))) == [check.id], "beside it on a shared node"
    during = health_check("n3", lost, after_end=-20)
    assert seen(check, with_gpus(before, (3,)), during) == [during.id]


def with_gpus(record: FaultRecord, gpus: tuple[int, ...]) -> FaultRecord:
    assert record.job is not None
    return replace(record, job=replace(record.job, gpus=gpus))
