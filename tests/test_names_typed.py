"""What people type at three in the morning is understood, or told in one line what is meant."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from recovery.commands import opening
from recovery.decision import JobAnswer
from recovery.store_opening import open_store
from slurm_hooks import spool
from slurm_hooks.config import Config
from slurm_hooks.record import utc
from tests.failing_job import NOBODY
from tests.records import beat
from tests.test_recovery_commands import Controller

LONG_AGO = "01M8SKRRQVYC4RN4DNYVV1M35G"
TASK, OTHER_TASK = "01M8W5S2B5W90CT0459K10KM7K", "01M8W5S4G81EMP6P6CMSR0VTWW"
HET, PLAIN = "01M8W5S9DAQ3WH78T8Y62VHHW7", "01M8W5SA30VS5QH4XBPM9WQEXE"


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


def test_where_no_pass_has_been_for_long_that_may_be_why_a_job_is_not_known(
    controller: Controller,
) -> None:
    controller.run("once")
    store = open_store(controller.state / "index.sqlite", controller.journal)
    store.put_meta("last_pass", utc(time.time() - 7200))
    store.close()
    said = controller.run("explain", "99", status=1)[1]
    assert "start recovery run: its last pass was 2 h ago" in said


@pytest.mark.parametrize(
    "words", [["job", "8"], ["job 8"], ["8"], ["6_2"], ["job", "6_2"], [TASK.lower()], [TASK]]
)
def test_who_looks_after_a_job_is_said_by_any_of_its_names(
    controller: Controller, words: list[str]
) -> None:
    hold = JobAnswer("hold", "KeyError: a restart would fail again")
    controller.decided(TASK, job_id=8, job_target="6_2", job=hold, nodes=())
    assert controller.run("ack", *words, "--owner", "ben")[0] == "job 8: ben looks after it\n"


def test_a_decision_is_reviewed_by_the_beginning_of_its_id_in_any_case(
    controller: Controller,
) -> None:
    controller.configure(f'[review]\nreviewers = ["{os.geteuid()}"]\n')
    said = controller.run("review", LONG_AGO[:10].lower(), "helpful")[0]
    assert said.startswith(f"{LONG_AGO}: helpful")
    controller.run("once")
    (judged,) = controller.json("decisions", "--job=13")["decisions"]
    assert [one["verdict"] for one in judged["reviews"]] == ["helpful"]
    assert PLAIN in controller.run("review", PLAIN[:6], "helpful", status=1)[1]


def test_a_pause_takes_the_same_names_and_of_a_part_means_the_whole_job(
    controller: Controller,
) -> None:
    assert controller.run("pause", "--job", "123+1", "--why", "x")[0] == "job 123: paused\n"
    assert controller.run("pause", "--job", "06_2", "--why", "x")[0] == "job 6_2: paused\n"
    assert "is no job as squeue" in controller.run("drill", "x", status=2)[1]
    assert "the JobId of: scontrol show job 6_2" in controller.run("drill", "6_2", status=2)[1]


def test_a_narrow_terminal_gets_narrow_lines_and_what_is_cut_shows_that(
    controller: Controller,
) -> None:
    controller.environment["COLUMNS"] = "40"
    for command in (["status"], ["decisions"], ["incidents"], ["nodes"], ["explain", "12"]):
        lines = controller.run(*command)[0].splitlines()
        assert max(map(len, lines)) <= 40, lines
    assert "…" in controller.run("incidents")[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_who_may_not_work_on_the_controller_is_told_who_may(
    mode: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one line, and not as SQLite or the journal would say it."""
    with tempfile.TemporaryDirectory() as folder:  # which others may enter, unlike pytest's
        Path(folder).chmod(0o755)
        state = Path(folder) / "state"
        state.mkdir(mode)
        config = replace(Config(), controller=replace(Config().controller, state=state))
        child = os.fork()  # others may not get into a developer's checkout to start a program
        if child == 0:
            os.setuid(NOBODY)
            try:
                opening.state_folder(config)
            except SystemExit as ended:
                os._exit(int(str(ended.code)))
            finally:
                os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "sudo -u root" in line
    assert "docs/spool.md" in line


def test_the_beginning_of_several_ids_is_told_with_all_of_them(controller: Controller) -> None:
    out, err = controller.run("explain", PLAIN[:6], status=1)
    assert (out, err.count("\n")) == ("", 1)
    assert PLAIN in err
    assert HET in err
    assert controller.run("explain", "12", "13", status=2)[1].count("\n") == 1
