"""What the host probe promises, on a made-up /proc and /sys, and on this very machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_hooks.config import Config, Spool
from slurm_hooks.context import HookContext
from slurm_hooks.probe_config import HostProbe, Probes
from slurm_hooks.probes import Look, load
from slurm_hooks.probes.host import judge_clock
from slurm_hooks.probes.kernel_clock import KernelClock, read_clock
from slurm_hooks.record import Finding, RecordJob
from slurm_hooks.slurm_conf import NodeSize, read_size
from tests.node import Node, job

GIB = 1024**2
"""A GiB in /proc/meminfo's kB."""

JOB = RecordJob(12, 0)


class Machine:
    """A node's /proc and /sys, and a probe that looks at it again and again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state: Mapping[str, Any] = {}
        self.put("proc/sys/kernel/random/boot_id", "boot-1\n")
        self.put("proc/loadavg", "8.00 8.00 8.00 9/2000 4711\n")
        self.put("sys/devices/system/cpu/online", "0-7\n")
        self.huge(0)
        self.memory(used=2)
        self.process(1, "systemd")

    def put(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def memory(self, used: int, total: int = 128) -> None:
        """Give it ``total`` GiB: ``used``, 16 that are set aside as huge pages, and the rest."""
        lines = {
            "MemTotal": total,
            "MemFree": 1,
            "MemAvailable": total - used - 16,
            "Shmem": used - 1,
        }
        self.put("proc/meminfo", "".join(f"{k}: {v * GIB} kB\n" for k, v in lines.items()))

    def huge(self, used: int, pages: int = 16) -> None:
        folder = "sys/kernel/mm/hugepages/hugepages-1048576kB"
        self.put(f"{folder}/nr_hugepages", f"{pages}\n")
        self.put(f"{folder}/free_hugepages", f"{pages - used}\n")

    def process(
        self, pid: int, name: str, state: str = "S", title: str = "", switches: int = 5, **more: Any
    ) -> None:
        """Let a process run; its name may hold anything, as ``prctl`` allows."""
        flags, place = more.get("flags", 0), more.get("place", "0")
        fields = f"{state} 1 1 1 0 -1 {flags} 0 0 0 0 3 3 0 0 20 0 1 0 {pid * 100} 0 0"
        self.put(f"proc/{pid}/stat", f"{pid} ({name}) {fields}\n")
        self.put(f"proc/{pid}/cmdline", title.replace(" ", "\0"))
        self.put(f"proc/{pid}/status", f"Name:\tx\nvoluntary_ctxt_switches:\t{switches}\n")
        self.put(f"proc/{pid}/wchan", place)

    def throttle(self, **cpus: int) -> None:
        for cpu, milliseconds in cpus.items():
            name = "thermal_throttle/core_throttle_total_time_ms"
            self.put(f"sys/devices/system/cpu/{cpu}/{name}", f"{milliseconds}\n")

    def reboot(self) -> None:
        self.put("proc/sys/kernel/random/boot_id", "boot-2\n")

    def look(
        self, hook: str = "health_check", job: RecordJob | None = None, **settings: Any
    ) -> tuple[Finding, ...]:
        spaces = settings.pop("spaces", ())
        section = HostProbe(root=self.root, spaces=spaces, clock="any", **settings)
        config = Config(spool=Spool(buffer=str(self.root / "none")), probes=Probes(host=section))
        seen = load("host").look(Look(HookContext(hook, "n1", job=job), config, self.state))
        assert seen.state is not None
        self.state = seen.state
        return seen.findings

    def told(self, *args: Any, **settings: Any) -> list[tuple[str, str]]:
        return [(one.code, one.severity) for one in self.look(*args, **settings)]

    def wait(self, seconds: float) -> None:
        """Let the earlier looks lie ``seconds`` further back."""
        blocked = {k: [at - seconds, n] for k, (at, n) in self.state["blocked"].items()}
        jobs = {k: at - seconds for k, at in self.state["jobs"].items()}
        measured = self.state["measured"] and self.state["measured"] - seconds
        self.state = {**self.state, "blocked": blocked, "jobs": jobs, "measured": measured}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The slurm.conf that hooks are told of."""
    path = tmp_path / "slurm.conf"
    monkeypatch.setenv("SLURM_CONF", str(path))
    return path


def test_this_very_machine_has_no_fault() -> None:
    probe = load("host")
    state: dict[str, Any] = {}
    for hook in ("prolog", "health_check", "epilog"):
        seen = probe.look(Look(HookContext(hook, "n1", job=JOB), Config(), state))
        assert [one for one in seen.findings if one.severity in ("fault", "fatal")] == []
        state = dict(seen.state or {})


def test_a_healthy_busy_machine_is_silent_in_every_hook(machine: Machine) -> None:
    machine.memory(used=110)
    machine.huge(used=16)
    machine.put("proc/loadavg", "30.00 20.00 16.00 30/2000 4711\n")
    machine.process(70, "python", state="D")
    machine.process(71, "slurmstepd", title="slurmstepd: [12.batch]")
    for hook in ("prolog", "health_check", "epilog", "health_check"):
        assert machine.look(hook, JOB) == ()


def test_a_node_smaller_than_slurm_counts_on_is_a_fault(machine: Machine, conf: Path) -> None:
    conf.write_text("NodeName=n[1-4] CPUs=8 RealMemory=131072\n")
    assert machine.look() == ()
    machine.put("sys/devices/system/cpu/online", "0-3,6\n")
    machine.memory(used=2, total=124)
    cpus, memory = machine.look()
    assert (cpus.code, cpus.severity) == ("host.cpus_missing", "fault")
    assert "5 processors" in cpus.summary and "8" in cpus.summary
    assert (memory.code, memory.severity) == ("host.memory_missing", "fault")


def test_a_little_less_memory_is_no_lost_module(machine: Machine, conf: Path) -> None:
    conf.write_text("NodeName=n1 CPUs=8 RealMemory=131200\n")
    assert machine.told() == [("host.memory_missing", "warning")]
    conf.write_text("SlurmctldParameters=node_reg_mem_percent=90\nNodeName=n1 RealMemory=140000\n")
    assert machine.told() == []


@pytest.mark.parametrize(
    ("lines", "cpus", "memory"),
    [
        ("NodeName=n1 CPUs=8 RealMemory=1000", 8, 1000),
        ("NodeName=n1 Sockets=2 CoresPerSocket=16 ThreadsPerCore=2", 64, None),
        ("NodeName=n1 Boards=2 SocketsPerBoard=1 CoresPerSocket=4 CPUs=4", 4, None),
        ("NodeName=DEFAULT RealMemory=500 CPUs=2\nNodeName=n[0-3] CPUs=3", 3, 500),
        ("NodeName=n1 State=UNKNOWN", None, None),
        ("SlurmdParameters=config_overrides\nNodeName=n1 CPUs=800", None, None),
        ("NodeName=n1 CPUs=many RealMemory=-1", None, None),
    ],
)
def test_slurms_idea_of_a_nodes_size(
    tmp_path: Path, lines: str, cpus: int | None, memory: int | None
) -> None:
    (tmp_path / "slurm.conf").write_text(lines + "\n")
    size = read_size(tmp_path / "slurm.conf", "n1")
    assert size is not None and (size.cpus, size.memory_mib) == (cpus, memory)
    assert NodeSize.from_dict(size.to_dict()) == size and size.is_current()
    assert read_size(tmp_path / "slurm.conf", "other") is None


def test_a_reboot_under_a_job_is_a_fault_that_names_the_job(machine: Machine) -> None:
    machine.look("prolog", JOB)
    machine.look("prolog", RecordJob(13, 0))
    machine.look("epilog", RecordJob(13, 0))
    machine.reboot()
    (finding,) = machine.look()
    assert (finding.code, finding.severity, finding.job_id) == ("host.rebooted", "fault", 12)
    assert "boot-1" in finding.evidence[0].text and "boot-2" in finding.evidence[0].text
    assert machine.look() == ()


def test_a_reboot_without_a_job_is_nothing(machine: Machine) -> None:
    machine.look("prolog", JOB)
    machine.look("epilog", JOB)
    machine.reboot()
    assert machine.look("prolog", RecordJob(13, 0)) == ()


def test_a_job_whose_end_was_missed_is_forgotten_once_it_has_no_steps(machine: Machine) -> None:
    machine.look("prolog", JOB)
    machine.look("prolog", RecordJob(13, 0))
    machine.process(71, "slurmstepd", title="slurmstepd: [13.extern]")
    machine.wait(3600)
    machine.look()
    machine.reboot()
    assert [one.job_id for one in machine.look()] == [13]


def test_where_no_epilog_is_looked_at_no_reboot_is_called_unexpected(machine: Machine) -> None:
    machine.look("prolog", JOB, hooks=("prolog", "health_check"))
    machine.reboot()
    assert machine.look() == ()


def test_memory_left_by_the_last_job_is_said_with_the_jobs_number(machine: Machine) -> None:
    machine.look()
    machine.memory(used=30)
    machine.huge(used=8)
    left, huge = machine.look("epilog", JOB)
    assert (left.code, left.severity, left.job_id) == ("host.memory_left", "warning", 12)
    assert "28.0 GiB" in left.summary
    assert (huge.code, huge.job_id) == ("host.huge_pages_left", 12)


def test_memory_in_use_while_another_job_runs_is_nobodys_fault(machine: Machine) -> None:
    machine.look()
    machine.process(71, "slurmstepd", title="slurmstepd: [13.0]")
    machine.memory(used=30)
    assert machine.look("epilog", JOB) == ()
    machine.process(71, "slurmstepd")  # just started, and does not say yet whose it is
    assert machine.look("epilog", JOB) == ()
    machine.process(71, "slurmstepd", title="/usr/sbin/slurmstepd infinity")
    assert machine.told("epilog", JOB) == [("host.memory_left", "warning")]


def test_memory_that_a_daemon_always_holds_is_not_left_by_a_job(machine: Machine) -> None:
    machine.memory(used=40)
    machine.huge(used=16)
    machine.look()
    assert machine.look("epilog", JOB) == ()
    machine.reboot()
    machine.memory(used=50)
    assert machine.look("epilog", JOB) == ()


def test_a_process_stuck_in_the_kernel_is_named_once_it_has_lasted(machine: Machine) -> None:
    machine.process(70, "python)\n D 3", state="D", place="folio_wait_bit_common")
    assert machine.look() == ()
    machine.wait(150)
    (finding,) = machine.look()
    assert (finding.code, finding.severity, finding.count) == (
        "host.processes_blocked",
        "warning",
        1,
    )
    assert "python)? D 3 (70)" in finding.summary
    assert "folio_wait_bit_common" in finding.evidence[0].text


@pytest.mark.parametrize(
    "why",
    [{"switches": 6}, {"flags": 0x00200040}, {"place": "__refrigerator"}, {"state": "S"}],
    ids=["has run since", "kernel thread", "frozen", "no longer"],
)
def test_a_process_that_only_waits_is_not_stuck(machine: Machine, why: dict[str, Any]) -> None:
    machine.process(70, "python", **{"state": "D", **why, "switches": 5})
    machine.look()
    machine.wait(150)
    machine.process(70, "python", **{"state": "D", **why})
    assert machine.look() == ()


def test_many_stuck_processes_are_one_finding(machine: Machine) -> None:
    for pid in range(100, 700):
        machine.process(pid, "x" * 15, state="D")
    machine.look()
    machine.wait(150)
    (finding,) = machine.look()
    assert finding.count == 256 and len(finding.evidence) == 8
    assert len(finding.summary) < 300


def test_a_load_is_high_only_when_it_stays(machine: Machine) -> None:
    machine.put("proc/loadavg", "90.00 80.00 10.00 9/2000 4711\n")
    assert machine.look() == ()
    machine.put("proc/loadavg", "1.00 80.00 70.00 9/2000 4711\n")
    assert machine.told() == [("host.load_high", "warning")]


def test_throttling_counts_as_a_share_of_the_time_since_the_last_look(machine: Machine) -> None:
    machine.throttle(cpu0=900_000, cpu1=5)
    assert machine.look() == ()
    machine.wait(60)
    machine.throttle(cpu0=901_000, cpu1=5)
    assert machine.look() == ()
    machine.wait(60)
    machine.throttle(cpu0=931_000, cpu1=5)
    (finding,) = machine.look()
    assert (finding.code, finding.severity) == ("host.cpu_throttled", "warning")
    assert "1 processors" in finding.evidence[0].text


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB with 400 inodes."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=400", "none", str(folder)]
    if os.geteuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_local_file_system_is_a_fault_before_a_job_only(
    machine: Machine, small: Path
) -> None:
    assert machine.look(spaces=(small, small, small / "absent")) == ()
    (small / "core").write_bytes(bytes(8 * 1024**2))
    assert machine.told(spaces=(small, small)) == [("host.space_low", "warning")]
    (finding,) = machine.look("prolog", JOB, spaces=(small,))
    assert (finding.code, finding.severity, finding.file) == ("host.space_low", "fault", str(small))


def test_a_file_system_without_inodes_is_told(machine: Machine, small: Path) -> None:
    for number in range(395):
        (small / str(number)).touch()
    assert machine.told(spaces=(small,)) == [("host.inodes_low", "warning")]
    assert machine.told("prolog", JOB, spaces=(small,)) == [("host.inodes_low", "fault")]


KEPT = KernelClock(True, 0.0, 0.01)
LOOSE = KernelClock(False, 0.0, 16.0)


@pytest.mark.parametrize(
    ("clock", "wanted", "was", "uptime", "codes"),
    [
        (KEPT, "required", True, 9e5, []),
        (LOOSE, "as_before", False, 9e5, []),
        (LOOSE, "as_before", True, 9e5, ["host.clock_unsynchronised"]),
        (LOOSE, "as_before", True, 60.0, []),
        (LOOSE, "required", False, 9e5, ["host.clock_unsynchronised"]),
        (LOOSE, "any", True, 9e5, []),
        (replace(KEPT, offset_seconds=-0.4), "any", True, 9e5, ["host.clock_offset"]),
    ],
)
def test_a_clock_is_judged_by_what_the_node_is_used_to(
    clock: KernelClock, wanted: Any, was: bool, uptime: float, codes: list[str]
) -> None:
    found = judge_clock(clock, HostProbe(clock=wanted), was_synchronised=was, uptime_seconds=uptime)
    assert [one.code for one in found] == codes
    assert {one.severity for one in found} <= {"warning"}


def test_the_kernel_tells_of_its_clock() -> None:
    clock = read_clock()
    assert clock is None or abs(clock.offset_seconds) <= 0.5  # the kernel's own limit


@pytest.mark.parametrize(
    "damage",
    [
        {"jobs": 3},
        {"jobs": {"x": 1}},
        {"blocked": {"1:2": 3}},
        {"throttled": {"cpu0": "hot"}},
        {"idle_used": "all", "measured": []},
        {"size": {"cpus": "x"}},
        {"size": 7},
    ],
)
def test_a_damaged_memory_only_costs_its_memory(machine: Machine, damage: dict[str, Any]) -> None:
    machine.look("prolog", JOB)
    machine.state = {**machine.state, **damage}
    assert machine.look() == ()


def test_rubbish_in_the_kernels_files_is_survived(machine: Machine) -> None:
    machine.put("proc/meminfo", "MemTotal: lots\n" * 10_000)
    machine.put("proc/loadavg", "\0")
    machine.put("sys/devices/system/cpu/online", "0-")
    machine.put("proc/70/stat", "70 (x")
    machine.put("proc/71/stat", "")
    (machine.root / "proc/72").mkdir()
    os.mkfifo(machine.root / "proc/72/stat")
    for hook in ("prolog", "health_check", "epilog"):
        assert machine.look(hook, JOB) == ()


def test_a_reboot_under_a_job_reaches_the_record(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    node, machine = Node(tmp_path / "node", "host1"), Machine(tmp_path / "root")
    node.configure(f'[probes.host]\nroot = "{machine.root}"\nspaces = []\nclock = "any"\n')
    assert node.run("prolog", **job(7)).status == 0
    assert node.records() == []
    machine.reboot()
    assert node.run("health_check").status == 0
    (record,) = node.records()
    assert [(one["code"], one["job_id"]) for one in record["findings"]] == [("host.rebooted", 7)]
    assert node.run("health_check").status == 0
    assert len(node.records()) == 1
