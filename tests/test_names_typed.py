"""What people type at three in the morning is understood, or told in one line what is meant."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slurm_hooks import spool
from slurm_hooks.record import new_id, utc
from tests.records import beat
from tests.test_recovery_commands import Controller

LONG_AGO = new_id(time.time() - 86_400)
TASK, OTHER_TASK, HET, PLAIN = (new_id() for _ in range(4))


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    """Decisions on two tasks of the array 6, on a heterogeneous job, and on two others."""
    made = Controller(tmp_path)
    spool.create(made.spool)
    made.decided(TASK, job_id=8, job_target="6_2")
    made.decided(OTHER_TASK, job_id=6, job_target="6_3")
    made.decided(HET, job_id=123, job_target="123", job_parts=(123, 124))
    made.decided(PLAIN, job_id=12, job_target="12")
    made.decided(LONG_AGO, job_id=13, time=utc(time.time() - 86_400))
    return made


@pytest.mark.parametrize("command", ["decisions", "incidents"])
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("8", {TASK}),
        ("6_2", {TASK}),
        ("6", {TASK, OTHER_TASK}),
        ("6_3", {OTHER_TASK}),
        ("123", {HET}),
        ("123+1", {HET}),
        ("124", {HET}),
        ("0012", {PLAIN}),
        ("6_4", set()),
        ("12+1", set()),
        ("12_0", set()),
    ],
)
def test_a_job_is_found_by_every_name_that_slurm_has_for_it(
    controller: Controller, command: str, name: str, found: set[str]
) -> None:
    if command == "decisions":
        ids = {one["id"] for one in controller.json(command, "--job", name)["decisions"]}
    else:
        answer = controller.json(command, f"--job={name}")["incidents"]
        ids = {one for incident in answer for one in incident["decisions"]}
    assert ids == found


@pytest.mark.parametrize("name", ["x", "6_", "6_[1-5]", "12.batch", "-1", "12+", "9" * 40, ""])
@pytest.mark.parametrize("command", ["decisions", "incidents", "nodes"])
def test_what_is_no_job_is_one_line_that_says_how_one_is_written(
    controller: Controller, command: str, name: str
) -> None:
    out, err = controller.run(command, f"--job={name}", status=2)
    assert (out, err.count("\n")) == ("", 1)
    assert "is no job as squeue names one: 12, task 6_2, part 12+1" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["6_2"], "job 8 of ann"),
        (["6"], "other tasks of 6 were decided on: recovery decisions --job 6"),
        (["124"], "job 123 of ann"),
        (["123+1"], "job 123 of ann"),
        (["job", "12"], "job 12 of ann"),
        (["job 12"], "job 12 of ann"),
        (["node", "n3"], "node n3: 5 decisions named it"),
        ([LONG_AGO.lower()], f"decision {LONG_AGO} on job 13"),
        ([LONG_AGO[:10]], f"decision {LONG_AGO} on job 13"),
        ([f"{LONG_AGO[:10]}:"], f"decision {LONG_AGO} on job 13"),
    ],
)
def test_explain_takes_what_status_squeue_and_sinfo_show(
    controller: Controller, words: list[str], said: str
) -> None:
    assert said in " ".join(controller.run("explain", *words)[0].split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["N3"], "did you mean n3?"),
        (["n3.cluster.site"], "did you mean n3?"),
        (["n[1-4]"], "those are 4 nodes: recovery nodes 'n[1-4]'"),
        (["n9"], "see: recovery decisions"),
        (["n[1-"], "see: recovery decisions"),
    ],
)
def test_what_is_not_known_comes_with_what_may_be_meant(
    controller: Controller, words: list[str], said: str
) -> None:
    beat(controller.spool, "n3")
    controller.run("once")
    out, err = controller.run("explain", *words, status=1)
    assert (out, err.count("\n")) == ("", 1)
    assert err.endswith(f"{said}\n")


def test_the_beginning_of_several_ids_is_told_with_all_of_them(controller: Controller) -> None:
    out, err = controller.run("explain", PLAIN[:6], status=1)
    assert (out, err.count("\n")) == ("", 1)
    assert PLAIN in err
    assert HET in err
    assert controller.run("explain", "12", "13", status=2)[1].count("\n") == 1
