"""A hook that is itself broken exits 0 inside its budget and leaves a record that says so."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from slurm_hooks.config import Spool
from slurm_hooks.spool import Buffer
from tests.node import Node, job

WARNING = {"code": "site.check", "severity": "warning", "summary": "something"}

HOOKS = ("prolog", "epilog", "health_check")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_probe_that_hangs_is_abandoned_and_named(node: Node, hook: str) -> None:
    node.configure("[hooks]\nbudget = {prolog = 2, epilog = 2, health_check = 2}\n")
    node.probe("stuck", "trap '' TERM; sleep 100")
    node.finds(WARNING)
    run = node.run(hook, **job(exit_code="0:0"))
    assert (run.status, run.stdout, run.stderr) == (0, "", "")
    assert run.seconds < 2
    (record,) = node.records()
    ends = {probe["name"]: probe for probe in record["probes"]}
    assert ends["site.site_check"]["status"] == "findings"
    assert ends["site.stuck"]["status"] == "hang"
    assert "stuck in state" in ends["site.stuck"]["detail"]
    assert [finding["code"] for finding in record["findings"]] == ["site.check"]


@pytest.mark.parametrize(
    ("script", "status", "detail"),
    [
        ("exit 3", "error", "exit status 3"),
        ("echo broken >&2; exit 1", "error", "exit status 1: broken"),
        ("echo not json", "error", "not JSON"),
        ("echo '{}'", "error", "not a list"),
        ("""echo '[{"code": "a.b", "severity": "bad", "summary": ""}]'""", "error", "severity"),
        ("""echo '[{"code": "a.b", "severity": "info"}]'""", "error", "lacks 'summary'"),
        ("cat /dev/zero", "error", "printed more than"),
        ("kill -SEGV $$", "error", "exit status -11"),
        ("kill -KILL $PPID", "crash", "SIGKILL"),
    ],
)
def test_a_probe_that_fails_is_no_fault_of_the_node(
    node: Node, script: str, status: str, detail: str
) -> None:
    node.probe("bad", script)
    assert node.run("prolog").status == 0
    (record,) = node.records()
    assert record["verdict"] == "ok"
    (probe,) = record["probes"]
    assert (probe["name"], probe["status"]) == ("site.bad", status)
    assert detail in probe["detail"]


def test_a_probe_that_others_could_change_is_not_run(node: Node) -> None:
    ran = node.root / "ran"
    node.probe("open", f"touch {ran}").chmod(0o777)
    (node.probes / "link").symlink_to(node.probe("target~", f"touch {ran}"))
    node.run("prolog")
    (record,) = node.records()
    details = {probe["name"]: probe["detail"] for probe in record["probes"]}
    assert "can be changed by others" in details["site.open"]
    assert "not a regular file" in details["site.link"]
    assert not ran.exists()


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("[policy]\nmax_restart = 1\n", "did you mean 'max_restarts'?"),
        ("[spool\n", "not valid TOML"),
        ("[policy]\nmax_restarts = 'many'\n", "max_restarts must be"),
        ("mood = 'act'\n", "did you mean 'mode'?"),
    ],
)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_mistake_in_the_configuration_is_reported_where_records_go(
    node: Node, hook: str, wrong: str, expected: str
) -> None:
    good = node.config.read_text()
    node.config.write_text(wrong + good if wrong.startswith("mood") else good + wrong)
    run = node.run(hook)
    assert (run.status, run.stderr) == (0, "")
    (record,) = node.records()
    (finding,) = record["findings"]
    assert finding["code"] == "hook.config_error"
    assert str(node.config) in finding["summary"] and expected in finding["summary"]


def test_a_configuration_that_does_not_answer_costs_a_second(node: Node) -> None:
    node.config.unlink()
    os.mkfifo(node.config)
    default = Buffer(Spool().buffer_of(node.name))
    before = set(default.waiting())
    run = node.run("epilog", **job(exit_code="1:0"))
    assert run.status == 0
    assert run.seconds < 6
    (name,) = set(default.waiting()) - before
    record = json.loads(default.read(name)[1])
    default.forget(name)
    assert "hook.config_unreachable" in [finding["code"] for finding in record["findings"]]


def test_a_bug_of_the_hook_is_recorded(node: Node) -> None:
    broken = node.root / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import slurm_hooks.looking as looking\n"
        "def collect(names, outcomes): raise RuntimeError('half an upgrade')\n"
        "looking.collect = collect\n"
    )
    run = node.run("prolog", PYTHONPATH=str(broken))
    assert run.status == 0
    (record,) = node.records()
    (finding,) = record["findings"]
    assert finding["code"] == "hook.internal_error"
    assert "half an upgrade" in finding["summary"]
    assert "Traceback" in finding["evidence"][0]["text"]


@pytest.mark.parametrize("trouble", ["missing", "full", "link", "file"])
def test_a_record_waits_on_the_node_while_the_spool_is_away(node: Node, trouble: str) -> None:
    incoming = node.spool / "incoming"
    shutil.rmtree(incoming)
    if trouble == "link":
        (node.root / "elsewhere").mkdir()
        incoming.symlink_to(node.root / "elsewhere")
    elif trouble == "file":
        incoming.write_text("")
    elif trouble == "full":
        incoming.symlink_to("/dev/full")
    run = node.run("epilog", **job(exit_code="1:0"))
    assert (run.status, run.stderr) == (0, "")
    assert len(node.waiting()) == 1
    if incoming.is_symlink() or incoming.exists():
        incoming.unlink()
    incoming.mkdir()
    assert node.run("prolog").status == 0
    assert node.waiting() == []
    (record,) = node.records()
    assert record["job"]["exit"] == "1:0"


def test_where_neither_spool_nor_disk_takes_a_record_one_line_says_so(node: Node) -> None:
    shutil.rmtree(node.spool)
    node.buffer.write_text("no folder")
    run = node.run("epilog", **job(exit_code="1:0"))
    assert run.status == 0
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith("slurm-hook-epilog: record ")
    assert "is lost" in run.stderr


def test_a_hook_that_slurmd_ends_does_not_drain_the_node(node: Node) -> None:
    began = node.root / "began"
    node.probe("slow", f"echo $$ > {began}; sleep 30")
    process = node.start("prolog")
    until = time.monotonic() + 20
    while not began.exists() and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=5) == 0
    process.communicate()


def test_users_text_of_any_kind_makes_a_valid_record(node: Node) -> None:
    comment = "recovery=requeue \udcff\x01" + "x" * 50_000
    environ = {**job(exit_code="0:0"), "SLURM_JOB_PARTITION": "\udc80" * 400}
    environ["SLURM_JOB_COMMENT"] = comment
    environ["SLURM_JOB_GPUS"] = "0-9999"
    environ["SLURMD_NODENAME"] = "../../n1"
    assert node.run("epilog", **environ).status == 0
    (record,) = node.records()
    assert record["node"] == "_.._n1"
    json.dumps(record, ensure_ascii=False).encode("utf-8")
