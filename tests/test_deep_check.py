"""A node looks deeply when somebody who may asks, and is taken in by nobody else.

Slurm is a script here that notes each question; tests/test_deep_check_on_slurm.py has the real one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_hooks import check_request
from slurm_hooks.check_request import Request
from slurm_hooks.record import new_id, utc
from tests.node import Node

FAULT = {"code": "site.bad", "severity": "fault", "summary": "GPU 3 is unwell", "gpu": 3}

Put = Callable[[Path, bytes], object]


class Asked:
    """A node, what Slurm says of it, and what is asked of it."""

    def __init__(self, folder: Path) -> None:
        self.node = Node(folder)
        self.scontrol = folder / "scontrol"
        self.questions = folder / "questions"
        self.says("IDLE+DRAIN")
        self.node.configure(f'[hooks]\nscontrol = "{self.scontrol}"\n')

    def says(self, state: str, cpus: int = 0, then: str = "") -> None:
        line = f"NodeName=n1 CPUAlloc={cpus} State={state} Partitions=train Reason=x"
        script = f"#!/bin/sh\necho \"$@\" >>{self.questions}\n{then}\necho '{line}'\n"
        self.scontrol.write_text(script, encoding="utf-8")
        self.scontrol.chmod(0o755)

    def ask(self, **changes: str) -> Request:
        told = {"id": new_id(), "node": "n1", "kind": "asked", "time": utc(), "why": "a doubt"}
        request = Request(**{**told, **changes})
        check_request.write(self.node.spool, request)
        return request

    def check(self) -> list[dict[str, Any]]:
        """Run a health check and return what it reports, nothing where it reports nothing."""
        before = len(self.node.records())
        assert self.node.run("health_check").status == 0
        new = self.node.records()[before:]
        return [finding for record in new for finding in record["findings"]]

    @property
    def number_of_questions(self) -> int:
        return len(self.questions.read_text().splitlines()) if self.questions.exists() else 0


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path)


def codes(findings: list[dict[str, Any]]) -> list[str]:
    return [finding["code"] for finding in findings]


def test_a_request_is_answered_once_with_its_id_and_one_question_to_slurm(asked: Asked) -> None:
    request = asked.ask()
    (finding,) = asked.check()
    assert finding["code"] == "check.passed"
    (evidence,) = finding["evidence"]
    assert evidence["key"] == request.id
    assert evidence["text"] == "asked: a doubt"
    assert asked.check() == []
    assert asked.number_of_questions == 1


def test_where_nobody_asks_slurm_is_asked_nothing(asked: Asked) -> None:
    assert asked.check() == []
    assert asked.number_of_questions == 0


def test_a_second_request_has_an_answer_of_its_own(asked: Asked) -> None:
    first, second = asked.ask(), None
    assert codes(asked.check()) == ["check.passed"]
    second = asked.ask()
    (finding,) = asked.check()
    keys = [item.get("key") for item in finding["evidence"]]
    assert second.id in keys and first.id not in keys


def test_a_fault_or_a_probe_that_hangs_is_no_pass(asked: Asked) -> None:
    asked.node.finds(FAULT)
    asked.ask()
    found = asked.check()
    assert codes(found) == ["site.bad", "check.failed"]
    assert "GPU 3 is unwell" in found[1]["summary"]
    asked.node.probe("site_check", "sleep 60")
    asked.ask()
    assert "site_check" in asked.check()[-1]["summary"]


@pytest.mark.parametrize(
    ("state", "cpus"),
    [
        ("IDLE", 0),
        ("MIXED", 4),
        ("ALLOCATED+DRAIN", 8),
        ("MIXED+DRAIN", 4),
        ("IDLE+DRAIN", 1),
        ("IDLE+COMPLETING+DRAIN", 0),
        ("IDLE+DRAIN+REBOOT_REQUESTED", 0),
        ("IDLE+DRAIN+REBOOT_ISSUED", 0),
        ("DOWN+COMPLETING", 0),
        ("UNKNOWN", 0),
        ("IDLE+MAINTENANCE", 0),
    ],
)
def test_nothing_is_run_where_a_job_is_or_could_start(asked: Asked, state: str, cpus: int) -> None:
    asked.says(state, cpus)
    asked.ask()
    assert codes(asked.check()) == ["check.refused"]
    assert asked.check() == [], "the same refusal is told once"
    asked.says("IDLE+DRAIN")
    assert codes(asked.check()) == ["check.passed"], "and it is tried again"


@pytest.mark.parametrize(
    "state", ["IDLE+DRAIN", "DOWN", "DOWN+DRAIN", "DOWN*+DRAIN", "IDLE*+DRAIN"]
)
def test_a_node_that_is_out_and_empty_is_checked(asked: Asked, state: str) -> None:
    asked.says(state)
    asked.ask()
    assert codes(asked.check()) == ["check.passed"]


@pytest.mark.parametrize("then", ["exit 1", "sleep 60", "echo nonsense; exit 0"])
def test_a_slurm_that_does_not_answer_is_no_leave(asked: Asked, then: str) -> None:
    asked.says("IDLE+DRAIN", then=then)
    asked.ask()
    (finding,) = asked.check()
    assert finding["code"] == "check.refused"
    assert "Slurm does not say" in finding["summary"]


def by_a_stranger(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    os.chown(path, 51_001, 51_001)


def for_all_to_write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o666)


def by_a_link(path: Path, content: bytes) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    elsewhere.write_bytes(content)
    path.symlink_to(elsewhere)


def by_a_fifo(path: Path, _content: bytes) -> None:
    os.mkfifo(path)


def by_a_folder(path: Path, _content: bytes) -> None:
    path.mkdir()


def huge(path: Path, content: bytes) -> None:
    path.write_bytes(content + b" " * 10_000_000)


def rubbish(path: Path, _content: bytes) -> None:
    path.write_bytes(b"\xff\x00{]")


def deeply_nested(path: Path, _content: bytes) -> None:
    path.write_bytes(b"[" * 4000)


def for_another_node(path: Path, content: bytes) -> None:
    path.write_bytes(content.replace(b'"n1"', b'"n2"'))


def of_an_unknown_kind(path: Path, content: bytes) -> None:
    path.write_bytes(content.replace(b'"asked"', b'"ordered"'))


def with_more_fields(path: Path, content: bytes) -> None:
    path.write_bytes(content.replace(b'"kind"', b'"force": true, "kind"'))


def with_an_id_that_is_none(path: Path, content: bytes) -> None:
    document = json.loads(content)
    path.write_text(json.dumps({**document, "id": "../../etc"}))


def with_control_characters(path: Path, content: bytes) -> None:
    path.write_text(json.dumps({**json.loads(content), "why": "a\u001b[2Jb"}))


def in_a_folder_of_a_stranger(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    os.chown(path.parent, 51_001, 51_001)


def in_a_folder_that_is_a_link(path: Path, content: bytes) -> None:
    path.parent.rename(path.parent.parent / "moved")
    path.parent.symlink_to(path.parent.parent / "moved")
    path.write_bytes(content)


@pytest.mark.parametrize(
    "put",
    [
        by_a_stranger,
        for_all_to_write,
        by_a_link,
        by_a_fifo,
        by_a_folder,
        huge,
        rubbish,
        deeply_nested,
        for_another_node,
        of_an_unknown_kind,
        with_more_fields,
        with_an_id_that_is_none,
        with_control_characters,
        in_a_folder_of_a_stranger,
        in_a_folder_that_is_a_link,
    ],
)
def test_what_is_no_request_of_somebody_who_may_ask_is_told_and_not_followed(
    asked: Asked, put: Put
) -> None:
    asked.ask()
    path = asked.node.spool / "requests" / "n1"
    content = path.read_bytes()
    path.unlink()
    put(path, content)
    assert codes(asked.check()) == ["hook.request_unusable"]
    assert asked.check() == [], "told once"
    assert asked.number_of_questions == 0


def test_only_a_health_check_follows_a_request(asked: Asked) -> None:
    asked.ask()
    for hook in ("prolog", "epilog"):
        asked.node.run(hook, SLURM_JOB_ID="7", SLURM_JOB_UID="0", SLURM_JOB_EXIT_CODE2="0:0")
    assert asked.node.records() == []
    assert asked.number_of_questions == 0
