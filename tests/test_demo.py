"""`recovery demo`: every promise is kept on a real Slurm, and the table can say no."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from recovery.demo import promises, replayed
from recovery.demo.promises import Ledger, Promise
from recovery.demo.recording import Recording
from recovery.demo.teller import WIDTH, Teller

RECOVERY = Path(sys.executable).with_name("recovery")
STORY_SECONDS = 240
"""The story takes a minute; a machine that is busy with other tests is slow."""


@dataclass(frozen=True)
class Told:
    """How `recovery demo --json` ended, and what it printed."""

    status: int
    document: dict[str, Any]
    story: str


class Terminal(io.StringIO):
    """A terminal, as far as a writer can tell."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def told() -> Told:
    argv = [str(RECOVERY), "demo", "--json"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=STORY_SECONDS)
    # Anything but one document on standard output is an error here.
    return Told(ended.returncode, json.loads(ended.stdout), ended.stderr)


def folder_of(story: str) -> Path:
    """Where the story says that its cluster lies."""
    found = re.search(r"up, in (\S+)", story)
    assert found, story
    return Path(found[1])


def replay(recorded: Path, limit_seconds: float = replayed.LIMIT_SECONDS) -> dict[str, Promise]:
    ledger = replayed.tell(Teller(io.StringIO()), recorded, limit_seconds)
    return {one.promise: one for one in ledger.table()}


@pytest.mark.slurm
@pytest.mark.parametrize("promise", promises.STORY)
def test_the_demo_keeps_its_promise_on_a_real_slurm(told: Told, promise: str) -> None:
    rows = {row["promise"]: row for row in told.document["promises"]}
    assert rows[promise]["kept"], f"{rows[promise]}\n{told.story}"


@pytest.mark.slurm
def test_the_demo_ends_well_in_two_minutes_and_leaves_nothing_behind(told: Told) -> None:
    assert told.status == 0
    assert told.document["schema"] == "demo/v1"
    assert len(told.document["promises"]) == len(promises.STORY)
    assert told.document["seconds"] < 120
    assert not folder_of(told.story).exists()


@pytest.mark.slurm
def test_the_story_in_a_pipe_is_plain_text_of_80_columns(told: Told) -> None:
    assert "\033" not in told.story
    assert "\r" not in told.story
    assert [line for line in told.story.splitlines() if len(line) > WIDTH] == []


@pytest.mark.slurm
def test_the_story_shows_why_the_node_was_drained(told: Told) -> None:
    reason = " ".join(told.story.partition("Reason=")[2].split("\n\n")[0].split())
    assert re.match(r"recovery: \w{26}: GPU 3 is lost: it has fallen off the bus", reason)


@pytest.mark.slurm
def test_ctrl_c_leaves_nothing_behind() -> None:
    with subprocess.Popen([RECOVERY, "demo"], stdout=subprocess.PIPE, text=True) as story:
        assert story.stdout is not None
        lines = []
        for line in story.stdout:
            lines.append(line)
            if "trains on" in line:
                break
        folder = folder_of("".join(lines))
        assert folder.exists()
        story.send_signal(signal.SIGINT)
        rest = story.stdout.read()
        assert story.wait(timeout=60) == 130
    assert "interrupted" in rest
    assert "Traceback" not in rest
    assert not folder.exists()


def test_without_slurm_a_recorded_run_keeps_what_can_be_shown_of_it() -> None:
    table = replay(replayed.RECORDED)
    assert tuple(table) == promises.REPLAY
    assert [one for one in table.values() if not one.kept] == []


def test_a_story_whose_fault_was_left_out_breaks_its_promise(tmp_path: Path) -> None:
    recording = Recording.load(replayed.RECORDED)
    healthy = tuple(
        replace(record, findings=()) if record.node == "n2" else record
        for record in recording.records
    )
    without = tmp_path / "without.json"
    without.write_text(replace(recording, records=healthy).dump())
    table = replay(without)
    assert not table[promises.RECOGNISED].kept
    assert not table[promises.RECOMMENDED].kept
    assert table[promises.INNOCENT].kept


def test_a_story_whose_jobs_never_failed_breaks_its_promises(tmp_path: Path) -> None:
    recording = Recording.load(replayed.RECORDED)
    completed = tuple(replace(job, state="COMPLETED") for job in recording.jobs)
    without = tmp_path / "without.json"
    without.write_text(replace(recording, jobs=completed).dump())
    assert [one.promise for one in replay(without, limit_seconds=2.0).values() if one.kept] == []


@pytest.mark.parametrize(
    "broken",
    [
        promises.untouched({"REQUEST_JOB_REQUEUE": 1}, "FAILED", []),
        promises.untouched({}, "PENDING", []),
        promises.untouched({}, "FAILED", ["n2"]),
        promises.acted_once({"REQUEST_UPDATE_NODE": 1, "REQUEST_JOB_REQUEUE": 2}),
        promises.acted_once({}),
        promises.same_weights("a" * 64, "b" * 64),
        promises.same_weights(None, None),
        promises.resumed_work(("restarted", "finished")),
        promises.resumed_work(("resumed", "failed_again")),
        promises.from_checkpoint(20, 0, 31),
        promises.from_checkpoint(None, None, 31),
        promises.elsewhere(1.0, ["n1", "n2"], "n2", None),
        promises.left_alone("FAILED", 100, []),
        promises.told("recovery: 01K: it failed", "ValueError"),
    ],
    ids=lambda promise: promise.observed,
)
def test_a_broken_promise_is_called_broken(broken: Promise) -> None:
    assert not broken.kept


def test_what_was_never_reached_counts_as_broken_and_says_why() -> None:
    ledger = Ledger(promises.STORY)
    ledger.add(promises.left_alone("COMPLETED", 100, []))
    ledger.stop("not within 60 s: job 2 trains")
    first, second, *rest = ledger.table()
    assert first.kept
    assert second == Promise(
        promises.RECOGNISED, "not reached: not within 60 s: job 2 trains", False
    )
    assert not any(one.kept for one in rest)


def test_on_a_terminal_a_wait_is_shown_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    teller = Teller(terminal)
    teller.progress("waiting, step 1")
    teller.progress("waiting, step 2")
    teller.say("done")
    assert terminal.getvalue().count("\n") == 1
    assert terminal.getvalue().count("\r") == 3
