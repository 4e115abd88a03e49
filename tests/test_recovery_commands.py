"""What the ``recovery`` command says and how it exits, on a controller where no Slurm answers.

Exit status: 0 done, 1 the answer is no, 2 wrong usage or configuration, and then one line on
standard error that says what to do.
"""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from recovery.decision import Action
from recovery.journal import Journal
from slurm_hooks.record import utc
from tests.node import PROGRAMS
from tests.records import archived, decision, drop, make_spool, record

EARLY, LATE = "2026-12-02T05:00:00.000000Z", "2026-12-02T06:00:00.000000Z"

GRANT = '[[grant]]\npartitions = ["trial"]\nactions = ["requeue", "drain"]\n'


class Controller:
    """A controller's folders, and its command."""

    def __init__(self, root: Path) -> None:
        self.root, self.config = root, root / "recovery.toml"
        self.spool, self.state = make_spool(root / "spool"), root / "state"
        for name in ("control", "decisions", "archive", "rejected"):
            (self.spool / name).mkdir(exist_ok=True)
        self.journal = Journal(self.state / "journal")
        self.environment: dict[str, str] = {}
        self.configure()

    def configure(self, text: str = "", mode: str = "monitor") -> None:
        """Write recovery.toml."""
        self.config.write_text(
            f'mode = "{mode}"\n[spool]\npath = "{self.spool}"\ntrusted_uids = [{os.geteuid()}]\n'
            f'[controller]\nstate = "{self.state}"\npoll = 0.05\n{text}'
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the command; there is no Slurm where it looks."""
        return subprocess.Popen(
            [PROGRAMS / "recovery", *arguments],
            env={
                "SLURM_RECOVERY_CONFIG": str(self.config),
                "PATH": str(self.root / "nothing"),
                **self.environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, status: int = 0) -> tuple[str, str]:
        """Run the command, which must exit so; return what it says on either stream."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=60)
        assert process.returncode == status, err
        return out, err

    def json(self, *arguments: str, status: int = 0) -> dict[str, Any]:
        """Run the command with --json and return its document."""
        document: dict[str, Any] = json.loads(self.run(*arguments, "--json", status=status)[0])
        return document

    def knows(self, event: dict[str, Any]) -> None:
        """Put an event into the journal."""
        self.journal.append({"time": LATE, **event})

    def decided(self, name: str, **changes: Any) -> None:
        """Put a decision into the journal."""
        made = decision(name, **changes)
        self.knows({"type": "decision", "decision": made.to_dict()})


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    return Controller(tmp_path)


def wait(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


ALL = (
    ["status"], ["decisions"], ["explain", "12"], ["grants"], ["resume", "--why", "x"],
    ["once"], ["run"],
)  # fmt: skip


@pytest.mark.parametrize("command", ALL, ids=" ".join)
def test_a_mistake_in_the_configuration_is_one_line_that_names_file_line_and_key(
    controller: Controller, command: list[str]
) -> None:
    controller.configure("snapshoot = 3\n")
    out, err = controller.run(*command, status=2)
    number = controller.config.read_text().splitlines().index("snapshoot = 3") + 1
    assert out == ""
    assert err.startswith(f"{controller.config}:{number}: unknown key 'controller.snapshoot'")
    assert "did you mean 'snapshot'?" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [["status"], ["decisions"], ["explain", "12"], ["resume", "--why", "x"]],
    ids=" ".join,
)
def test_before_an_aggregator_has_ever_run_one_line_says_so(
    controller: Controller, command: list[str]
) -> None:
    out, err = controller.run(*command, status=2)
    assert (out, err.count("\n")) == ("", 1)
    assert "start `recovery run`" in err
    assert str(controller.state) in err
    assert not controller.state.exists(), "a question leaves nothing behind"


@pytest.mark.parametrize("command", [["status", "--json"], ["--help"]])
def test_output_that_takes_no_more_is_told_in_one_line(
    controller: Controller, command: list[str]
) -> None:
    controller.decided("d1")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [PROGRAMS / "recovery", *command],
            env={"SLURM_RECOVERY_CONFIG": str(controller.config)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Error: the output is cut short: No space left")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["explode"],
        ["explain"],
        ["resume"],
        ["pause"],
        ["status", "--yaml"],
        ["decisions", "--job=x"],
    ],
)
def test_wrong_usage_exits_2_with_one_line(controller: Controller, command: list[str]) -> None:
    (line,) = controller.run(*command, status=2)[1].splitlines()
    assert line.endswith(" --help")


def test_decisions_are_told_newest_first_and_only_those_asked_for(controller: Controller) -> None:
    controller.decided("d1", job_id=12, time=EARLY)
    controller.decided("d2", job_id=13, time=LATE, owner="bob", partition="trial")
    lines = controller.run("decisions")[0].splitlines()
    assert [line.split()[0] for line in lines] == ["d2", "d1"]
    assert "job 13: requeue, drain n3  [hardware.gpu" in lines[0]

    def names(*options: str) -> list[str]:
        document = controller.json("decisions", *options)
        assert document["schema"] == "decisions/v1"
        return [one["id"] for one in document["decisions"]]

    assert names("--user", "ann") == names("--partition", "train") == names("--job=12") == ["d1"]
    assert names("--node", "n3", "--class", "hardware.gpu") == ["d2", "d1"]
    assert names("--limit", "1") == ["d2"]
    assert names("--node", "n9") == []
    assert controller.run("decisions", "--node", "n9", status=1) == ("", "no decision\n")


@pytest.mark.parametrize("name", ["d1", "12", "n3"])
def test_a_decision_is_explained_by_its_id_its_job_or_its_node(
    controller: Controller, name: str
) -> None:
    controller.decided("d1", actions=(Action("drain", "n3", "planned", EARLY),))
    done = Action("drain", "n3", "verified", LATE, "drain", "recovery: d1: gone")
    controller.knows({"type": "action", "decision": "d1", "action": asdict(done)})
    story = controller.run("explain", name)[0]
    for part in ("d1", "job 12", "hardware.gpu, established", "drain n3: verified"):
        assert part in story
    assert max(map(len, story.splitlines())) <= 80
    told = controller.json("explain", name)["decisions"]
    assert [one["actions"][0]["state"] for one in told] == ["verified"]


def test_what_is_not_known_is_one_line_and_exit_1(controller: Controller) -> None:
    controller.decided("d1")
    out, err = controller.run("explain", "n9", status=1)
    assert out == ""
    assert err == "no decision, job or node called 'n9' is known; see: recovery decisions\n"


def test_status_says_what_is_open_and_fits_a_terminal(controller: Controller) -> None:
    controller.decided("d1", actions=(Action("drain", "n3", "planned", EARLY),))
    controller.configure(GRANT, mode="act")
    told = controller.run("status")[0]
    assert "mode        act" in told
    assert "none: is `recovery run` running?" in told
    assert "open        d1 planned: gone" in told
    assert max(map(len, told.splitlines())) <= 80
    document = controller.json("status")
    assert (document["schema"], document["mode"]) == ("status/v1", "act")
    assert [one["id"] for one in document["open"]] == ["d1"]
    assert document["breakers"] == []


@pytest.mark.parametrize("mode", ["monitor", "act"])
def test_a_grant_says_what_it_still_lacks(controller: Controller, mode: str) -> None:
    untested = '[[grant]]\nactions = ["drain"]\naccept_untested = "a rehearsal"\n'
    controller.configure(GRANT + untested, mode=mode)
    waiting, accepted = controller.json("grants")["grants"]
    assert waiting["in_force"] is False
    assert "0 of 20 reviews" in waiting["why"]
    assert accepted["in_force"] is (mode == "act")
    said = controller.run("grants")[0]
    assert "requeue, drain (partitions trial): waiting" in said
    assert ("monitor mode" in said) is (mode == "monitor")


def test_without_a_grant_it_says_that_everything_is_only_recorded(controller: Controller) -> None:
    said = controller.run("grants")[0]
    assert said == "no grant is configured: everything is only recorded\n"


def test_a_breaker_is_closed_with_a_reason_that_is_kept(controller: Controller) -> None:
    controller.decided("d1")
    nothing = "nothing of that is paused, and no circuit breaker is open\n"
    assert controller.run("resume", "--why", "x", status=1)[1] == nothing
    controller.knows({"type": "breaker", "kind": "drain", "tripped": True, "why": "8 nodes"})
    assert "BREAKER     drain: 8 nodes" in controller.run("status")[0]
    assert controller.run("resume", "--why", "a bad switch, replaced")[0] == "drain: closed\n"
    assert "BREAKER" not in controller.run("status")[0]
    last = list(controller.journal.events())[-1]
    assert (last["kind"], last["tripped"]) == ("drain", False)
    assert last["why"] == f"{pwd.getpwuid(os.getuid()).pw_name}: a bad switch, replaced"


def test_a_pause_is_kept_with_who_and_why_shown_and_ended_by_the_same_scope(
    controller: Controller,
) -> None:
    controller.decided("d1")
    who = pwd.getpwuid(os.getuid()).pw_name
    said = controller.run("pause", "--node", "n[1-2]", "--partition", "train", "--why", "a move")
    assert said[0] == "node n1: paused\nnode n2: paused\npartition train: paused\n"
    controller.run("pause", "--why", "a power cut")
    status = controller.run("status")[0]
    assert f"PAUSED      paused by {who} since " in status
    assert "(node n[1-2]): a move" in " ".join(status.split())
    told = controller.json("status")["pauses"]
    assert [(one["scope"], one["name"]) for one in told] == [
        ("node", "n1"), ("node", "n2"), ("partition", "train"), ("all", "")
    ]  # fmt: skip
    controller.run("resume", "--job", "6_2", "--why", "x", status=1)
    assert controller.run("resume", "--why", "power is back")[0] == "all: resumed\n"
    assert controller.run("resume", "--node", "n1", "--why", "done")[0] == "node n1: resumed\n"
    refused = controller.run("resume", "--why", "x", status=1)[1]
    assert refused.endswith("; paused: node n2, partition train\n")
    events = [one for one in controller.journal.events() if one["type"] == "pause"]
    assert {one["who"] for one in events} == {who}
    assert (events[-1]["paused"], events[-1]["why"]) == (False, "done")


@pytest.mark.parametrize("wrong", [["--job", "x"], ["--node", "n[1-"], ["--node", "n[1-9999]"]])
def test_a_pause_of_what_cannot_be_is_refused_in_one_line(
    controller: Controller, wrong: list[str]
) -> None:
    controller.decided("d1")
    assert controller.run("pause", *wrong, "--why", "x", status=2)[1].count("\n") == 1
    assert not controller.json("status")["pauses"]


def test_one_pass_without_slurm_takes_records_in_decides_nothing_and_says_why(
    controller: Controller,
) -> None:
    sent = record()
    drop(controller.spool, sent)
    document = controller.json("once")
    assert (document["schema"], document["accepted"]) == ("pass/v1", 1)
    assert document["decisions"] == []
    assert "Slurm does not answer, nothing is decided until it does" in document["problems"][0]
    assert archived(controller.spool) == [sent.id]
    assert controller.run("once")[0] == "0 records taken in, 0 rejected, 0 decisions\n"


def test_the_service_goes_on_without_slurm_says_so_once_and_ends_on_sigterm(
    controller: Controller,
) -> None:
    process = controller.start("run")
    try:
        incoming = controller.spool / "incoming"
        for _ in range(2):
            drop(controller.spool, record(time=utc()))
            wait(lambda: not list(incoming.iterdir()), "records are taken in")
        second = controller.run("run", status=1)
        lock = controller.state / "aggregator.lock"
        assert second == ("", f"another aggregator holds {lock}; stop it first\n")
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0
    assert said.count("Slurm does not answer") == 1
