"""A hook goes by the plan that an earlier one has noted, and only while that plan is surely right.

The plans here are forged, by the one who may: they say that there are no probes. So a fault that
is not reported is the trace of a plan that was believed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.node import Node, Run, job

FAULT = {"code": "site.check", "severity": "fault", "summary": "something"}

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node with a fault, and with a note whose plan has no probes."""
    made = Node(tmp_path)
    made.probe("check", "exit 0")
    made.run("prolog", **job())
    made.finds(FAULT)
    plan = json.loads(line(made, PLAN))
    put(made, PLAN, json.dumps({**plan, "probes": {**plan["probes"], "site": {"hooks": []}}}))
    return made


SCHEMA, PACKAGE, BOOT, PLAN = 0, 1, 2, 7
"""Lines of a note; the configuration's own are after the plan."""


def note(node: Node) -> Path:
    """Return the one note of a node."""
    (path,) = node.notes.iterdir()
    return path


def line(node: Node, number: int) -> str:
    """Return a line of the node's note."""
    return note(node).read_text().split("\n")[number]


def put(node: Node, number: int, text: str) -> None:
    """Write another line into the node's note."""
    lines = note(node).read_text().split("\n")
    note(node).write_text("\n".join([*lines[:number], text, *lines[number + 1 :]]))


def run_until_answered(node: Node, hook: str, **environ: str) -> Run:
    """Run a hook until it is not late for its note; on a busy machine it may be."""
    for _ in range(5):
        run = node.run(hook, **environ)
        if not node.records():
            break
        for path in (node.spool / "incoming").iterdir():
            path.unlink()
    return run


@pytest.mark.parametrize("hook", ["prolog", "epilog", "health_check"])
def test_a_hook_goes_by_the_plan(node: Node, hook: str) -> None:
    told = {"prolog": job(), "epilog": job(exit_code="0:0"), "health_check": {}}[hook]
    run = run_until_answered(node, hook, **told)
    assert (run.status, run.stdout, run.stderr) == (0, "", "")
    assert node.records() == []


def test_a_prolog_with_a_plan_loads_nothing_that_it_has_no_use_for(node: Node) -> None:
    run = run_until_answered(node, "prolog", **job(), PYTHONPROFILEIMPORTTIME="1")
    loaded = {row.rpartition("|")[2].strip() for row in run.stderr.splitlines()}
    assert "slurm_hooks.hooks" in loaded
    assert not loaded & {"inspect", "tomllib", "tomli", "slurm_hooks.config", "slurm_hooks.news"}


def other_schema(node: Node) -> None:
    put(node, SCHEMA, "hook-note/v1")


def other_package(node: Node) -> None:
    put(node, PACKAGE, "1 " + line(node, PACKAGE))


def other_boot(node: Node) -> None:
    put(node, BOOT, "another")


def other_configuration(node: Node) -> None:
    with node.config.open("a") as config:
        config.write("# a comment is enough\n")


def not_json(node: Node) -> None:
    put(node, PLAN, "{")


def not_a_table(node: Node) -> None:
    put(node, PLAN, "[]")


def unknown_key(node: Node) -> None:
    put(node, PLAN, '{"probes": {"sight": {}}}')


def wrong_type(node: Node) -> None:
    put(node, PLAN, '{"probes": {"site": {"hooks": [], "deadline": "1"}}}')


def nested(node: Node) -> None:
    put(node, PLAN, "[" * 20_000)


def cut_short(node: Node) -> None:
    content = note(node).read_bytes()
    note(node).write_bytes(content[: len(content) // 2])


def others_may_write(node: Node) -> None:
    note(node).chmod(0o666)


def folder_of_others(node: Node) -> None:
    node.notes.chmod(0o777)


def link(node: Node) -> None:
    path = note(node)
    path.rename(node.root / "elsewhere")
    path.symlink_to(node.root / "elsewhere")


def fifo(node: Node) -> None:
    path = note(node)
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "spoil",
    [
        other_schema,
        other_package,
        other_boot,
        other_configuration,
        not_json,
        not_a_table,
        unknown_key,
        wrong_type,
        nested,
        cut_short,
        others_may_write,
        folder_of_others,
        link,
        fifo,
    ],
)
@pytest.mark.parametrize("hook", ["prolog", "health_check"])
def test_a_plan_that_may_not_hold_is_not_gone_by(
    node: Node, hook: str, spoil: Callable[[Node], None]
) -> None:
    spoil(node)
    run = node.run(hook, **(job() if hook == "prolog" else {}))
    assert run.status == 0
    assert [record["verdict"] for record in node.records()] == ["fault"]


@as_root
@pytest.mark.parametrize("whose", ["note", "notes"])
def test_a_plan_that_is_a_user_s_is_not_gone_by(node: Node, whose: str) -> None:
    os.chown(note(node) if whose == "note" else node.notes, 4242, -1)
    node.run("prolog", **job())
    assert len(node.records()) == 1


def test_records_that_wait_are_forwarded_in_spite_of_a_plan(node: Node) -> None:
    (node.spool / "incoming").rename(node.spool / "away")
    node.run("epilog", **job(exit_code="1:0"))
    assert len(node.waiting()) == 1
    (node.spool / "away").rename(node.spool / "incoming")
    node.run("health_check")
    assert node.waiting() == []


def test_a_configuration_too_large_to_plan_is_obeyed(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.configure("[probes.storage]\nmounts = [" + '"/proc", ' * 3 + f'"/{"x" * 40_000}"]\n')
    node.finds(FAULT)
    for _ in range(2):
        node.run("prolog", **job())
    found = [{item["code"] for item in record["findings"]} for record in node.records()]
    assert [codes >= {"site.check"} for codes in found] == [True, True]


def test_a_probe_with_nothing_to_look_at_says_so(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.configure("[probes.storage]\nmounts = []\n")
    node.run("health_check")
    (storage,) = (probe for probe in node.heartbeat()["probes"] if probe["name"] == "storage")
    assert (storage["status"], "no mounts" in storage["detail"]) == ("skipped", True)
