"""Where a job's GPU time went is told from its decisions alone, and what nobody saw is not guessed.

A job of 16 GPUs: 1000 s to step 100 with a checkpoint at step 80, 60 s of waiting, then again from
step 80 to its end.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from recovery.decision import Decision, Outcome
from recovery.effort import of_jobs
from recovery.journal import Journal
from slurm_hooks.record import utc
from tests.node import Node
from tests.records import decision

BEGAN = 1796189000.0


def failed(began: float, ended: float, restart: int = 0, **known: object) -> Decision:
    made = decision(
        f"d{restart}",
        restart=restart,
        time=utc(ended + 2),
        started_time=utc(began),
        ended_time=utc(ended),
        gpus=16,
    )
    return replace(made, **known)  # type: ignore[arg-type]


FIRST = failed(BEGAN, BEGAN + 1000, progress_step=100, checkpoint_step=80)
NEXT = Outcome("restarted", utc(BEGAN + 1062), started=utc(BEGAN + 1060))
END = Outcome("finished", utc(BEGAN + 3062), started=utc(BEGAN + 1060), ended=utc(BEGAN + 3060))


def test_replay_and_downtime_are_lost_and_the_rest_is_productive() -> None:
    (job,) = of_jobs([replace(FIRST, outcomes=(NEXT, END))]).jobs
    first, last = job.attempts
    assert (first.allocated, first.replay, first.productive) == (16_000, 3_200, 12_800)
    assert first.downtime == 16 * 60
    assert (last.ended, last.allocated, last.productive, last.downtime) == (
        "finished", 32_000, 32_000, 0,
    )  # fmt: skip
    assert job.ratio == pytest.approx((12_800 + 32_000) / (16_000 + 32_000 + 960))
    assert (job.failures, job.outcome, job.recovery_seconds) == (1, "finished", (60,))


def test_a_second_failure_loses_only_what_its_own_checkpoints_do_not_keep() -> None:
    second = failed(BEGAN + 1060, BEGAN + 2060, restart=1, progress_step=180, checkpoint_step=160)
    again = replace(NEXT, state="failed_again", decision=second.id)
    (job,) = of_jobs([replace(FIRST, outcomes=(NEXT, again)), second]).jobs
    assert [one.replay for one in job.attempts] == [3_200, 3_200], "20 of 100 steps, both times"
    assert job.failures == 2


@pytest.mark.parametrize("unseen", ["progress_step", "checkpoint_step"])
def test_what_nobody_saw_is_not_known_and_not_in_the_fleets_ratio(unseen: str) -> None:
    blind = replace(FIRST, **{unseen: None}, outcomes=(NEXT, END))  # type: ignore[arg-type]
    fleet = of_jobs([blind])
    (job,) = fleet.jobs
    assert (job.replay, job.ratio, fleet.ratio) == (None, None, None)
    assert job.allocated == 48_000


def test_means_are_over_attempts_and_over_those_that_came_back() -> None:
    held = replace(failed(BEGAN, BEGAN + 500), attempt=replace(FIRST.attempt, job_id=13))  # type: ignore[type-var]
    fleet = of_jobs([replace(FIRST, outcomes=(NEXT, END)), held])
    assert fleet.mean_time_to_failure == (1000 + 2000 + 500) / 2
    assert fleet.mean_time_to_recovery == 60
    assert of_jobs([]).mean_time_to_failure is None
    assert of_jobs([]).ratio is None


def test_a_number_that_is_given_out_again_is_another_job() -> None:
    later = replace(failed(BEGAN + 9000, BEGAN + 9100), id="d9")
    assert [one.failures for one in of_jobs([FIRST, later]).jobs] == [1, 1]


def test_recovery_metrics_prints_prometheus_text_and_json(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from recovery.cli import main

    node = Node(tmp_path)
    with node.config.open("a") as file:
        file.write(f'[controller]\nstate = "{tmp_path}/state"\n')
    (tmp_path / "state").mkdir()
    journal = Journal(tmp_path / "state" / "journal")
    recent = replace(FIRST, time=utc(), outcomes=(NEXT, END))
    journal.append({"time": utc(), "type": "decision", "decision": recent.to_dict()})
    run = CliRunner(env={"SLURM_RECOVERY_CONFIG": str(node.config)})
    text = run.invoke(main, ["metrics"]).output
    assert "slurm_recovery_gpu_seconds_downtime 960\n" in text
    assert 'slurm_recovery_jobs_by_outcome{outcome="finished"} 1\n' in text
    for line in text.splitlines():
        assert line.startswith("#") or len(line.split()) == 2
    document = json.loads(run.invoke(main, ["metrics", "--json"]).output)
    assert document["schema"] == "metrics/v1"
    assert document["fleet"]["effective_training_time_ratio"] == pytest.approx(0.915, abs=0.001)
