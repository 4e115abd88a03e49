"""What the kernel-log probe promises, on real files and this machine's own /dev/kmsg."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from slurm_hooks.config import Config, KernelLogProbe, Probes
from slurm_hooks.context import HookContext
from slurm_hooks.probes import Look, Seen, Skipped, load

LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.\n"
FAULT = "NVRM: Xid (PCI:0000:3b:00): 31, pid=77, name=python, Ch 00000018, MMU Fault\n"

Looker = Callable[..., Seen]


class Log:
    """A text log and a probe that looks at it again and again, as hooks do on one node."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: Mapping[str, Any] = {}
        path.touch(mode=0o640)

    def write(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as log:
            log.write(text)

    def look(self, hook: str = "health_check", **settings: Any) -> Seen:
        section = KernelLogProbe(path=str(self.path), **settings)
        seen = load("kernel_log").look(
            Look(HookContext(hook, "n1"), Config(probes=Probes(kernel_log=section)), self.state)
        )
        assert seen.state is not None
        self.state = seen.state
        return seen

    def codes(self, **settings: Any) -> list[str]:
        return [finding.code for finding in self.look(**settings).findings]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "kern.log")


def test_a_line_is_reported_once(log: Log) -> None:
    log.write(LOST)
    assert log.codes() == ["gpu.fell_off_bus"]
    assert log.codes() == []
    log.write(FAULT)
    assert log.codes() == ["gpu.application_fault"]


def test_a_line_still_being_written_is_read_when_it_is_whole(log: Log) -> None:
    log.write(LOST[:30])
    assert log.codes() == []
    log.write(LOST[30:])
    assert log.codes() == ["gpu.fell_off_bus"]


@pytest.mark.parametrize("how", ["renamed", "copied_and_truncated"])
def test_rotation_loses_no_line_and_repeats_none(log: Log, how: str) -> None:
    log.write("nothing special\n")
    log.look()
    log.write(LOST)
    older = log.path.with_name("kern.log.1")
    if how == "renamed":
        log.path.rename(older)
        log.path.touch(mode=0o640)
    else:
        older.write_bytes(log.path.read_bytes())
        os.truncate(log.path, 0)
    log.write(FAULT)
    assert log.codes() == ["gpu.fell_off_bus", "gpu.application_fault"]
    assert log.codes() == []


def test_lines_that_were_rotated_away_unread_are_said_to_be_missing(log: Log) -> None:
    log.write("nothing special\n")
    log.look()
    log.path.unlink()
    log.write(FAULT)
    assert log.codes() == ["gpu.application_fault", "kernel_log.lost"]


def test_a_flood_is_one_finding_with_a_count_and_the_rest_is_said(log: Log) -> None:
    log.write(LOST * 2_000)
    flood, skipped = log.look(max_bytes=20_000).findings
    assert flood.code == "gpu.fell_off_bus"
    assert 200 < flood.count < 250
    assert len(flood.evidence) == 3
    assert skipped.code == "kernel_log.skipped"
    assert log.codes(max_bytes=20_000) == []


def test_nothing_but_a_log_is_opened(tmp_path: Path, log: Log) -> None:
    log.path.unlink()
    with pytest.raises(Skipped, match="cannot be read"):
        log.look()
    os.mkfifo(log.path)
    with pytest.raises(Skipped, match="neither"):
        log.look()
    log.path.unlink()
    log.path.symlink_to("/dev/kmsg")
    with pytest.raises(Skipped, match="cannot be read"):
        log.look()
    log.path.unlink()
    log.path.touch()
    log.path.chmod(0o666)
    with pytest.raises(Skipped, match="neither"):
        log.look()


def test_this_machines_ring_is_read_once() -> None:
    if not os.access("/dev/kmsg", os.R_OK):
        pytest.skip("/dev/kmsg may not be read here")
    probe, config = load("kernel_log").look, Config()
    context = HookContext("health_check", "n1")
    first = probe(Look(context, config)).state
    assert first is not None and first["sequence"] > 0
    again = probe(Look(context, config, first)).state
    assert again is not None and again["sequence"] >= first["sequence"]
