"""Each configured mount is looked at by itself: one dead server is named while the others answer.

Mounts are real: tmpfs, and bindfs whose stopped process blocks every access in the kernel. A test
machine where they cannot be had fails, it does not skip: what hangs is what this probe is for.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from slurm_hooks.config import Config, ConfigError, load
from slurm_hooks.context import HookContext
from slurm_hooks.probe_config import Probes, StorageProbe
from slurm_hooks.probes import Look, Seen, Skipped
from slurm_hooks.probes import load as load_probe
from slurm_hooks.probes.storage import read_mounts
from tests.node import Node, job

Mounter = Callable[..., Path]


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Mounter]:
    """Mount tmpfs of the given options; unmounted at the end."""
    assert os.geteuid() == 0, "mounting needs root: run this suite as root, once, in a container"
    made: list[Path] = []

    def mount(name: str, options: str = "size=1m") -> Path:
        point = tmp_path / name
        point.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", point], check=True)
        made.append(point)
        return point

    yield mount
    for point in made:
        subprocess.run(["umount", "-l", point], check=False)


class Hanging:
    """A folder mounted through bindfs, whose process can be stopped and continued."""

    def __init__(self, point: Path, behind: Path) -> None:
        assert shutil.which("bindfs"), "needs bindfs: apt-get install bindfs"
        point.mkdir()
        behind.mkdir()
        self.point, self.behind = point, behind
        self.server = subprocess.Popen(["bindfs", "-f", str(behind), str(point)])
        until = time.monotonic() + 10
        while not point.is_mount():
            assert time.monotonic() < until, "bindfs does not mount"
            time.sleep(0.02)

    def stop(self) -> None:
        self.server.send_signal(signal.SIGSTOP)

    def answer(self) -> None:
        self.server.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.answer()
        subprocess.run(["umount", "-l", self.point], check=False)
        self.server.terminate()
        self.server.wait(10)


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Hanging]:
    assert os.geteuid() == 0, "mounting needs root"
    mount = Hanging(tmp_path / "far", tmp_path / "behind")
    yield mount
    mount.end()


def look(state: Mapping[str, Any] | None = None, **settings: Any) -> Seen:
    section = StorageProbe(**settings)
    given = Look(
        HookContext("health_check", "n1"), Config(probes=Probes(storage=section)), state or {}
    )
    return load_probe("storage").look(given)


def codes(seen: Seen) -> dict[str, str]:
    """Codes by mount; a mount with two findings would lose one, and no test expects two."""
    found = {str(finding.file): finding.code for finding in seen.findings}
    assert len(found) == len(seen.findings)
    return found


def test_a_mount_that_is_well_is_silent_and_keeps_nothing_of_the_look(tmpfs: Mounter) -> None:
    data = tmpfs("data with blank")
    seen = look(mounts=(str(data),))
    assert seen.findings == ()
    assert list(data.iterdir()) == []
    assert seen.state is None
    assert str(data) in seen.notes


def test_one_hung_mount_is_named_and_the_others_answer_in_time(
    tmpfs: Mounter, hanging: Hanging
) -> None:
    data = tmpfs("data")
    hanging.stop()
    started = time.monotonic()
    seen = look(mounts=(str(hanging.point), str(data)), deadline=1.5)
    assert time.monotonic() - started < 1.5
    assert codes(seen) == {str(hanging.point): "storage.hang"}
    (finding,) = seen.findings
    assert finding.severity == "fault"
    assert "storage:statvfs" in finding.summary


def test_what_a_hang_left_behind_is_removed_once_the_mount_answers(hanging: Hanging) -> None:
    hanging.stop()
    hung = look(mounts=(str(hanging.point),), deadline=1.0)
    assert hung.state is not None
    (name,) = hung.state["left"][str(hanging.point)]
    hanging.answer()
    (hanging.behind / name).write_text("written before the hang", encoding="ascii")
    (hanging.behind / "a-users-file").touch()
    mended = look(hung.state, mounts=(str(hanging.point),))
    assert mended.findings == ()
    assert mended.state == {"left": {}}
    assert [path.name for path in hanging.behind.iterdir()] == ["a-users-file"]


def test_a_forged_state_removes_nothing(tmpfs: Mounter) -> None:
    data = tmpfs("data")
    (data / "precious").touch()
    for left in (["precious"], ["../data/precious"], "precious", None, [1]):
        assert look({"left": {str(data): left}}, mounts=(str(data),)).findings == ()
    assert (data / "precious").exists()


def test_a_folder_on_which_nothing_is_mounted_is_not_written_to(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    before = bare.stat().st_mtime_ns
    missing = tmp_path / "missing"
    seen = look(mounts=(str(bare), str(missing)))
    assert codes(seen) == {str(bare): "storage.not_mounted", str(missing): "storage.not_mounted"}
    assert bare.stat().st_mtime_ns == before


def test_a_link_to_a_mount_is_that_mount(tmpfs: Mounter, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmpfs("data"))
    assert look(mounts=(str(tmp_path / "link"),)).findings == ()


def test_a_read_only_mount_is_a_fault_unless_it_should_be_one(tmpfs: Mounter) -> None:
    data = tmpfs("data", "size=1m,ro")
    assert codes(look(mounts=(str(data),))) == {str(data): "storage.read_only"}
    assert look(read_only=(str(data),)).findings == ()


def test_a_mount_listed_as_read_only_is_never_written_to(tmpfs: Mounter) -> None:
    data = tmpfs("data")
    before = data.stat().st_mtime_ns
    assert look(read_only=(str(data),)).findings == ()
    assert data.stat().st_mtime_ns == before


def test_a_full_mount_is_told_from_one_that_is_almost_full(tmpfs: Mounter) -> None:
    full, almost = tmpfs("full", "size=64k"), tmpfs("almost")
    with (full / "fill").open("wb", buffering=0) as fill, pytest.raises(OSError):
        while True:
            fill.write(b"x" * 4096)
    (almost / "fill").write_bytes(b"x" * 1_000_000)
    seen = look(mounts=(str(full), str(almost)), full_percent=90.0)
    found = {finding.code for finding in seen.findings if finding.file == str(full)}
    assert found == {"storage.full"}
    found = {finding.code for finding in seen.findings if finding.file == str(almost)}
    assert found == {"storage.almost_full"}


def test_a_mount_without_inodes_is_full(tmpfs: Mounter) -> None:
    data = tmpfs("data", "size=1m,nr_inodes=4")
    for number in range(3):
        (data / str(number)).touch()
    seen = look(mounts=(str(data),))
    assert {finding.code for finding in seen.findings} == {"storage.full"}
    assert "inodes" in seen.findings[0].summary


def test_a_client_that_lost_its_server_is_an_error_not_a_missing_mount(hanging: Hanging) -> None:
    hanging.server.kill()
    hanging.server.wait(10)
    seen = look(mounts=(str(hanging.point),))
    assert codes(seen) == {str(hanging.point): "storage.error"}
    assert "ENOTCONN" in seen.findings[0].summary


def test_a_hung_mount_delays_no_prolog_and_is_in_its_record(
    tmp_path: Path, tmpfs: Mounter, hanging: Hanging
) -> None:
    (tmp_path / "node").mkdir()
    node = Node(tmp_path / "node")
    node.configure(
        f'[probes.storage]\nmounts = ["{hanging.point}", "{tmpfs("data")}"]\n'
        "[hooks.budget]\nprolog = 2.0\n"
    )
    hanging.stop()
    run = node.run("prolog", **job())
    assert (run.status, run.stdout) == (0, "")
    assert run.seconds < 2.5
    (record,) = node.records()
    assert [finding["code"] for finding in record["findings"]] == ["storage.hang"]
    assert record["findings"][0]["file"] == str(hanging.point)


def test_without_mounts_there_is_nothing_to_look_at() -> None:
    with pytest.raises(Skipped, match="no mounts"):
        look()


def test_paths_that_are_no_mount_points_are_refused_with_their_line(tmp_path: Path) -> None:
    config = tmp_path / "recovery.toml"
    for path in ("data", "/data/", "/data/../etc"):
        config.write_text(f'[probes.storage]\nmounts = ["{path}"]\n', encoding="utf-8")
        with pytest.raises(ConfigError, match=r"recovery\.toml:2: .*absolute paths"):
            load(config)


def test_every_form_of_mountinfo_is_read() -> None:
    text = (
        "36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 shared:7 - ext3 /dev/root rw,errors=x\n"
        "37 35 0:40 / /auto rw - autofs systemd-1 rw,fd=5\n"
        "38 37 0:41 / /auto ro,relatime - nfs4 server:/a,b rw,vers=4.2\n"
        "half a line\n39 35 0:4 / /x\n"
    )
    mounts = read_mounts(text)
    assert sorted(mounts) == ["/auto", "/mnt 2"]
    assert (mounts["/mnt 2"].kind, mounts["/auto"].kind) == ("ext3", "nfs4")
    assert "ro" in mounts["/auto"].options
