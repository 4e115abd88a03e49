"""What the kernel-log probe promises, on real files and this machine's own /dev/kmsg."""

from __future__ import annotations

import gzip
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from slurm_hooks.catalog.kernel_lines import parse_kernel_lines
from slurm_hooks.config import Config
from slurm_hooks.context import HookContext, boot_id
from slurm_hooks.probe_config import KernelLogProbe, Probes
from slurm_hooks.probes import Look, Seen, Skipped, load
from slurm_hooks.probes.gpu_minors import read_minors
from slurm_hooks.probes.kmsg import Ring, read_ring, reader
from slurm_hooks.record import RecordJob, seconds_of, utc

LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.\n"
FAULT = "NVRM: Xid (PCI:0000:3b:00): 31, pid=77, name=python, Ch 00000018, MMU Fault\n"


class Log:
    """A text log and a probe that looks at it again and again, as hooks do on one node."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: Mapping[str, Any] = {}
        path.touch(mode=0o640)

    def write(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as log:
            log.write(text)

    def look(
        self, hook: str = "health_check", job: RecordJob | None = None, **settings: Any
    ) -> Seen:
        section = KernelLogProbe(path=str(self.path), **settings)
        context = HookContext(hook, "n1", job=job)
        config = Config(probes=Probes(kernel_log=section))
        seen = load("kernel_log").look(Look(context, config, self.state))
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


@pytest.mark.parametrize("name", ["kern.log.1.gz", "kern.log-20261202.gz", "kern.log-20261202"])
def test_a_rotated_log_is_read_back_however_it_is_named_and_packed(log: Log, name: str) -> None:
    log.write("nothing special\n")
    log.look()
    log.write(LOST)
    content = log.path.read_bytes()
    log.path.unlink()
    packed = gzip.compress(content) if name.endswith(".gz") else content
    log.path.with_name(name).write_bytes(packed)
    log.write(FAULT)
    assert log.codes() == ["gpu.fell_off_bus", "gpu.application_fault"]
    assert log.codes() == []


def test_two_rotations_between_two_looks_lose_no_line(log: Log) -> None:
    log.write("nothing special\n")
    log.look()
    log.write(LOST)
    log.path.with_name("kern.log.2.gz").write_bytes(gzip.compress(log.path.read_bytes()))
    log.path.with_name("kern.log.1").write_text(f"another day\n{FAULT}", encoding="utf-8")
    os.utime(log.path.with_name("kern.log.2.gz"), (1, 1))
    log.path.unlink()
    log.write("a third day\n")
    assert log.codes() == ["gpu.fell_off_bus", "gpu.application_fault"]
    assert log.codes() == []


@pytest.mark.parametrize("damage", ["cut", "rubbish", "of_another", "fifo", "link", "huge"])
def test_a_packed_log_that_cannot_be_read_back_is_said_to_be_missing(
    log: Log, tmp_path: Path, damage: str
) -> None:
    log.write("nothing special\n")
    log.look()
    log.write(LOST)
    packed = gzip.compress(log.path.read_bytes())
    log.path.unlink()
    older = log.path.with_name("kern.log.1.gz")
    if damage == "fifo":
        os.mkfifo(older)
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(packed)
        older.symlink_to(tmp_path / "elsewhere")
    else:
        contents = {
            "cut": packed[:-12],
            "rubbish": b"\x1f\x8b rubbish",
            "of_another": gzip.compress(b"somebody else's\n" + LOST.encode()),
            "huge": gzip.compress(bytes(300 << 20), 1),
        }
        older.write_bytes(contents[damage])
    log.write(FAULT)
    assert log.codes() == ["gpu.application_fault", "kernel_log.lost"]


def test_a_flood_in_a_packed_log_is_bounded_and_said(log: Log) -> None:
    log.write("nothing special\n")
    log.look()
    log.write(LOST * 2_000)
    log.path.with_name("kern.log.1.gz").write_bytes(gzip.compress(log.path.read_bytes()))
    log.path.unlink()
    log.write("another day\n")
    flood, skipped = log.look(max_bytes=20_000).findings
    assert (flood.code, skipped.code) == ("gpu.fell_off_bus", "kernel_log.skipped")
    assert 200 < flood.count < 250


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


def test_a_fault_from_long_before_the_first_look_counts_for_nothing(log: Log) -> None:
    log.write(f"{utc(time.time() - 3 * 3600)} n1 kernel: {LOST}")
    (finding,) = log.look().findings
    assert (finding.code, finding.severity) == ("kernel_log.old", "info")
    assert finding.evidence[0].text == LOST.strip()


def test_a_fault_of_minutes_ago_counts_at_the_first_look(log: Log) -> None:
    logged = time.time() - 60
    log.write(f"{utc(logged)} n1 kernel: {LOST}")
    (finding,) = log.look().findings
    assert finding.code == "gpu.fell_off_bus"
    assert seconds_of(finding.evidence[0].time or "") == pytest.approx(logged, abs=0.001)


def test_a_fault_from_before_the_last_reboot_counts_for_nothing(log: Log) -> None:
    log.write("nothing special\n")
    log.look()
    log.write(LOST)
    log.write("[    0.000000] Linux version 6.1.0 (builder@host)\n")
    log.write("[    9.000000] " + FAULT)
    assert log.codes() == ["gpu.application_fault", "kernel_log.old"]


def test_the_kernels_own_clock_gives_a_lines_time(log: Log) -> None:
    log.look()
    log.write(f"[{time.monotonic():12.6f}] {LOST}")
    log.write(f"[{time.monotonic() + 9e5:12.6f}] {FAULT}")
    lost, of_another_boot = log.look().findings
    assert seconds_of(lost.evidence[0].time or "") == pytest.approx(time.time(), abs=5)
    assert of_another_boot.evidence[0].time is None


@pytest.mark.parametrize("damage", [{"file": {}}, {"file": 7}, {"file": {"offset": "x"}}])
def test_a_damaged_cursor_only_costs_its_memory(log: Log, damage: dict[str, Any]) -> None:
    log.look()
    log.state = {**log.state, **damage}
    log.write(LOST)
    assert log.codes() == ["gpu.fell_off_bus"]
    assert log.codes() == []


def test_an_unfinished_line_without_end_does_not_stop_the_cursor(log: Log) -> None:
    log.write("x" * 50_000)
    assert log.codes() == []
    log.write("\n" + LOST)
    assert log.codes() == ["gpu.fell_off_bus"]


def test_binary_rubbish_is_survived(log: Log) -> None:
    log.path.write_bytes(os.urandom(20_000) + b"\n" + LOST.encode() + bytes(300) + b"\n")
    assert log.codes() == ["gpu.fell_off_bus"]


def test_a_gpus_fault_belongs_to_the_job_that_held_it(log: Log) -> None:
    log.look()
    log.state = {**log.state, "minors": {"0000:3b:00.0": 3}}
    log.write(FAULT)
    (finding,) = log.look("epilog", RecordJob(12, 0, gpus=(2, 3))).findings
    assert (finding.gpu, finding.job_id) == (3, 12)
    log.write(FAULT)
    (finding,) = log.look("epilog", RecordJob(13, 0, gpus=(0,))).findings
    assert (finding.gpu, finding.job_id) == (3, None)
    assert log.state["boot"] == boot_id()


def test_minor_numbers_are_read_from_the_drivers_files(tmp_path: Path) -> None:
    for name, minor in (("0000:3b:00.0", 3), ("00000001:9C:00.0", 4), ("not-a-gpu", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "information").write_text(f"Model: X\nDevice Minor: \t {minor}\n")
    (tmp_path / "0000:5e:00.0").mkdir()
    assert read_minors(tmp_path) == {"0000:3b:00.0": 3, "0001:9c:00.0": 4}
    assert read_minors(tmp_path / "absent") == {}


def ring_of(*records: bytes, start: int | None = None, max_bytes: int = 10_000) -> Ring:
    """What is read from a device that gives one record for each read, as /dev/kmsg does."""
    device, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with device, kernel:
        device.setblocking(False)
        for record in records:
            kernel.send(record)
        return read_ring(
            reader(device.fileno()), boot="b1", start=start, max_bytes=max_bytes, boot_seconds=1e9
        )


def test_a_record_has_its_time_and_key() -> None:
    ring = ring_of(b"4,17,2500000,-;NVRM: loading \\xe2\\x80\\xa6\n SUBSYSTEM=pci\n")
    assert [(line.text, line.key, line.seconds) for line in ring.lines] == [
        ("NVRM: loading \u2026", "b1:17", 1e9 + 2.5)
    ]
    assert ring.next_sequence == 18


def test_a_line_that_a_program_wrote_into_the_ring_is_not_believed() -> None:
    for priority in (12, 8 + 3, 1 << 3):
        ring = ring_of(f"{priority},1,1,-;{LOST}".encode())
        assert ring.lines == ()
        assert ring.next_sequence == 2
    assert len(ring_of(f"3,1,1,-;{LOST}".encode()).lines) == 1


def test_a_ring_is_read_from_its_cursor_and_its_overwritten_lines_are_counted() -> None:
    records = [f"4,{number},1,-;line {number}\n".encode() for number in (5, 6, 7)]
    assert [line.key for line in ring_of(*records, start=7).lines] == ["b1:7"]
    assert ring_of(*records, start=2).lost == 3
    assert ring_of(*records, start=5).lost == 0


def test_records_lost_while_reading_are_counted() -> None:
    answers: list[Callable[[], bytes]] = [
        lambda: b"4,1,1,-;first\n",
        broken,
        lambda: b"4,9,1,-;x\n",
    ]

    def read(size: int) -> bytes:
        if not answers:
            raise BlockingIOError
        return answers.pop(0)()

    ring = read_ring(read, boot="b1", start=1, max_bytes=1000, boot_seconds=0.0)
    assert (ring.lost, ring.next_sequence, len(ring.lines)) == (7, 10, 2)


def broken() -> bytes:
    raise BrokenPipeError


def test_a_flooded_ring_is_bounded_and_its_cursor_moves_on() -> None:
    records = [f"4,{number},1,-;{LOST}".encode() for number in range(100)]
    ring = ring_of(*records, max_bytes=1000)
    assert len(ring.lines) < 11
    assert ring.skipped == 100 - len(ring.lines)
    assert ring.next_sequence == 100


def test_a_driver_message_of_three_lines_in_one_record_is_understood() -> None:
    ring = ring_of(
        b"3,1,1,-;NVRM: The NVIDIA GPU 0000:b3:00.0\\x0aNVRM: (PCI ID: 10de:2330) installed in "
        b"this system has\\x0aNVRM: fallen off the bus and is not responding to commands.\n"
    )
    assert [one.pci for one in parse_kernel_lines(ring.lines)] == ["0000:b3:00.0"]


def test_damaged_records_are_passed_over() -> None:
    ring = ring_of(b"no semicolon", b"x,y,z;text", b";", b"4,3,?,-;still read\n")
    assert [line.text for line in ring.lines] == ["still read"]
