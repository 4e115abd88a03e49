"""A prolog with nothing to do ends at once, and nothing but that makes it.

An ordinary prolog that finds nothing writes its note anew, so a note that is the same file as
before is the trace of a prolog that was quiet.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.node import Node, job

OFF = "[probes.site]\nhooks = []\n"
FRESH = "[hooks]\nfreshness = 600\n"
FAULT = {"code": "site.check", "severity": "fault", "summary": "something"}

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def off(tmp_path: Path) -> Node:
    """A node whose prologs have no probes and have noted it."""
    made = Node(tmp_path)
    settings = made.config.read_text().partition("[probes.site]")
    made.config.write_text(settings[0] + OFF + settings[2].partition("\n")[2].partition("\n")[2])
    made.run("prolog", **job())
    assert becomes_quiet(made)
    return made


@pytest.fixture
def fresh(tmp_path: Path) -> Node:
    """A node whose prologs are spared by a health check that has passed."""
    made = Node(tmp_path)
    made.configure(FRESH)
    made.run("health_check")
    assert becomes_quiet(made)
    return made


def note(node: Node) -> Path:
    """Return the one note of a node."""
    (path,) = node.notes.iterdir()
    return path


def is_quiet(node: Node, **environ: str) -> bool:
    """Run a prolog, and say whether it left its note untouched."""
    before = os.lstat(note(node)).st_ino
    run = node.run("prolog", **{**job(), **environ})
    assert (run.status, run.stdout, run.stderr) == (0, "", "")
    return os.lstat(note(node)).st_ino == before


def becomes_quiet(node: Node) -> bool:
    """Whether prologs are quiet; on a busy machine one may find its note too late."""
    return any(is_quiet(node) for _ in range(5))


def test_with_its_probes_off_a_prolog_ends_at_once(off: Node) -> None:
    assert off.records() == []


def test_after_a_health_check_that_passed_a_prolog_ends_at_once(fresh: Node) -> None:
    assert fresh.records() == []


def test_another_configuration_is_obeyed_at_once(off: Node) -> None:
    off.configure()
    off.finds(FAULT)
    off.run("prolog", **job())
    assert len(off.records()) == 1


@pytest.mark.parametrize("comment", ["recovery=requeue", '{"\\u0072ecovery": {}}', "run 12"])
def test_a_job_with_a_comment_gets_the_ordinary_prolog(off: Node, comment: str) -> None:
    assert not is_quiet(off, SLURM_JOB_COMMENT=comment)


def test_an_opted_in_job_is_noted_for_its_tasks(off: Node) -> None:
    with off.config.open("a") as config:
        config.write(f'[hooks]\nrun = "{off.root}/run"\n')
    off.run("prolog", **job())
    assert becomes_quiet(off)
    off.run("prolog", **job(comment="recovery=requeue"))
    assert (off.root / "run" / "n1" / "7").read_text() == "recovery=requeue"


def test_records_that_wait_are_forwarded(off: Node) -> None:
    (off.spool / "incoming").rename(off.spool / "away")
    off.run("epilog", **job(exit_code="1:0"))
    assert len(off.waiting()) == 1
    (off.spool / "away").rename(off.spool / "incoming")
    off.run("prolog", **job())
    assert len(off.records()) == 1
    assert becomes_quiet(off)


def another_boot(content: bytes) -> bytes:
    lines = content.split(b"\n")
    return b"\n".join([*lines[:2], b"another", *lines[3:]])


def another_package(content: bytes) -> bytes:
    lines = content.split(b"\n")
    return b"\n".join([lines[0], b"1 " + lines[1], *lines[2:]])


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


@pytest.mark.parametrize(
    "forge",
    [
        another_boot,
        another_package,
        half,
        lambda _: b"",
        lambda content: content + b"\n",
        lambda content: content + b"#" * 1_000_000,
        lambda _: b"\0" * 100,
        lambda _: b"\n" * 100,
    ],
)
def test_a_note_of_another_time_or_none_at_all_is_not_believed(
    off: Node, forge: Callable[[bytes], bytes]
) -> None:
    path = note(off)
    path.write_bytes(forge(path.read_bytes()))
    assert not is_quiet(off)
    assert becomes_quiet(off)


def test_a_note_behind_a_link_is_not_believed(off: Node) -> None:
    path = note(off)
    path.rename(off.root / "elsewhere")
    path.symlink_to(off.root / "elsewhere")
    assert not is_quiet(off)


def test_a_fifo_for_a_note_delays_nobody(off: Node) -> None:
    path = note(off)
    path.unlink()
    os.mkfifo(path)
    assert not is_quiet(off)


@as_root
def test_a_note_that_belongs_to_a_user_is_not_believed(off: Node) -> None:
    os.chown(note(off), 4242, -1)
    assert not is_quiet(off)


def test_a_note_that_others_can_write_is_not_believed(off: Node) -> None:
    note(off).chmod(0o666)
    assert not is_quiet(off)


def test_a_folder_that_others_can_write_holds_no_notes(off: Node) -> None:
    off.notes.chmod(0o777)
    off.config.write_text(off.config.read_text() + "# changed\n")
    run = off.run("prolog", **job())
    assert run.status == 0
    assert b"# changed" not in note(off).read_bytes()


@pytest.mark.parametrize("name", ["", "../n1", "n\n1", "n" * 300])
def test_a_name_that_is_no_node_s_leaves_notes_where_they_belong(off: Node, name: str) -> None:
    assert off.run("prolog", **{**job(), "SLURMD_NODENAME": name}).status == 0
    assert {path.parent for path in off.root.rglob("*recovery.toml*")} == {off.root, off.notes}


def test_a_finding_voids_what_a_health_check_noted(fresh: Node) -> None:
    fresh.finds(FAULT)
    fresh.run("health_check")
    fresh.run("prolog", **job())
    assert [record["hook"] for record in fresh.records()] == ["health_check", "prolog"]


def test_a_pass_of_another_boot_spares_nothing(fresh: Node) -> None:
    state = fresh.buffer / "state" / "passed.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "boot_id": "another"}))
    fresh.finds(FAULT)
    fresh.run("prolog", **job())
    assert len(fresh.records()) == 1


def test_a_pass_that_has_run_out_spares_nothing(fresh: Node) -> None:
    lines = note(fresh).read_bytes().split(b"\n")
    note(fresh).write_bytes(b"\n".join([*lines[:3], b"1.0", *lines[4:]]))
    state = fresh.buffer / "state" / "passed.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "uptime": 1.0}))
    fresh.finds(FAULT)
    fresh.run("prolog", **job())
    assert len(fresh.records()) == 1


def test_an_epilog_and_a_health_check_are_never_quiet(off: Node) -> None:
    off.run("epilog", **job(exit_code="1:0"))
    assert len(off.records()) == 1
    off.run("health_check")
    assert off.heartbeat()["verdict"] == "ok"


@pytest.fixture
def hung(off: Node) -> Iterator[Node]:
    """A node with a note, whose configuration is on a file system that hangs."""
    if os.geteuid() != 0 or not shutil.which("bindfs"):
        pytest.skip("needs root and bindfs")
    behind, shared = off.root / "behind", off.root / "shared"
    behind.mkdir()
    shared.mkdir()
    shutil.copy(off.config, behind)
    server = subprocess.Popen(["bindfs", "-f", str(behind), str(shared)])
    try:
        until = time.monotonic() + 20
        while not shared.is_mount() and time.monotonic() < until:
            time.sleep(0.01)
        note(off).unlink()
        off.config = shared / off.config.name
        off.run("prolog", **job())
        assert becomes_quiet(off)
        server.send_signal(signal.SIGSTOP)
        yield off
    finally:
        server.send_signal(signal.SIGCONT)
        subprocess.run(["umount", "--lazy", str(shared)], check=False)
        server.wait(timeout=20)


def test_a_configuration_that_hangs_is_waited_for_within_the_budget(hung: Node) -> None:
    run = hung.run("prolog", **job())
    assert run.status == 0
    assert run.seconds < 6


def test_a_prolog_told_to_end_while_its_configuration_hangs_drains_no_node(hung: Node) -> None:
    prolog = hung.start("prolog", **job())
    children = Path(f"/proc/{prolog.pid}/task/{prolog.pid}/children")
    until = time.monotonic() + 5
    while not children.read_text() and time.monotonic() < until:
        time.sleep(0.001)
    prolog.terminate()
    assert prolog.communicate(timeout=10) == ("", "")
    assert prolog.returncode == 0
