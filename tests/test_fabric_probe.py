"""What the fabric probe promises, on a made-up sysfs of a node's ports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slurm_hooks.config import Config, ConfigError, load
from slurm_hooks.context import HookContext
from slurm_hooks.probe_config import FabricProbe, Probes
from slurm_hooks.probes import Look, Seen, Skipped
from slurm_hooks.probes import load as load_probe
from slurm_hooks.record import Finding, RecordJob
from tests.node import Node

COUNTERS = ("symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors")
HW_COUNTERS = ("local_ack_timeout_err", "rnr_nak_retry_err", "roce_slow_restart")
FAILED = RecordJob(12, 0, exit="1:0")


class Machine:
    """A tree such as sysfs has it, and a probe that looks at it again and again."""

    def __init__(self, root: Path, ports: int) -> None:
        self.root = root
        self.state: Mapping[str, Any] = {}
        for number in range(ports):
            self.add(f"mlx5_{number}", f"0000:{number:02x}:00.0")

    def add(
        self, device: str, pci: str, layer: str = "InfiniBand", rate: str = "400 Gb/sec (4X NDR)"
    ) -> None:
        """Add an adapter with one active port."""
        place = self.root / "sys/devices/pci0000:00" / pci
        here = self.root / "sys/class/infiniband" / device
        for folder in (place, here / "ports/1/counters", here / "ports/1/hw_counters"):
            folder.mkdir(parents=True)
        (here / "device").symlink_to(place)
        (here / "hca_type").write_text("MT4129\n")
        for name in COUNTERS:
            (here / "ports/1/counters" / name).write_text("0\n")
        for name in HW_COUNTERS:
            (here / "ports/1/hw_counters" / name).write_text("0\n")
        self.set(device, link_layer=layer, rate=rate)
        self.set(device, state="4: ACTIVE", phys_state="5: LinkUp")

    def set(self, device: str, **attributes: str) -> None:
        for name, value in attributes.items():
            path = self.root / "sys/class/infiniband" / device / "ports/1" / name
            path.write_text(value + "\n")

    def count(self, device: str, counter: str, value: int) -> None:
        kind = "hw_counters" if counter in HW_COUNTERS else "counters"
        self.set(device, **{f"{kind}/{counter}": str(value)})

    def pull(self, device: str) -> None:
        self.set(device, state="1: DOWN", phys_state="2: Polling")

    def service(self, name: str, pids: str) -> None:
        """Let systemd run a service of this machine, or not."""
        (self.root / "proc/1").mkdir(parents=True, exist_ok=True)
        (self.root / "proc/1/comm").write_text("systemd\n")
        folder = self.root / f"sys/fs/cgroup/system.slice/{name}.service"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.procs").write_text(pids)

    def look(
        self, hook: str = "health_check", job: RecordJob | None = None, **settings: Any
    ) -> tuple[Finding, ...]:
        section = FabricProbe(root=self.root, **settings)
        config = Config(probes=Probes(fabric=section))
        seen: Seen = load_probe("fabric").look(
            Look(HookContext(hook, "n1", job=job), config, self.state)
        )
        assert seen.state is not None
        self.state = seen.state
        return seen.findings

    def told(self, *args: Any, **settings: Any) -> list[tuple[str, str, str | None]]:
        return [(one.code, one.severity, one.port) for one in self.look(*args, **settings)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, ports=4)


def test_a_machine_without_fabric_is_skipped_and_healthy(tmp_path: Path) -> None:
    with pytest.raises(Skipped, match="no InfiniBand"):
        Machine(tmp_path, ports=0).look()


def test_a_healthy_machine_is_silent_in_every_hook(machine: Machine) -> None:
    machine.add("roce0", "0000:40:00.0", layer="Ethernet", rate="100 Gb/sec (4X EDR)")
    machine.count("mlx5_0", "symbol_error", 90_000)  # from before the first look
    for hook in ("health_check", "prolog", "epilog", "health_check"):
        assert machine.look(hook, FAILED) == ()


def test_a_port_that_lost_its_link_is_a_fault_of_the_fabric(machine: Machine) -> None:
    machine.look()
    machine.pull("mlx5_2")
    (finding,) = machine.look("prolog")
    assert (finding.code, finding.severity) == ("fabric.port_down", "fault")
    assert (finding.port, finding.pci) == ("mlx5_2/1", "0000:02:00.0")
    assert "2: Polling" in finding.evidence[0].text
    machine.set("mlx5_2", state="4: ACTIVE", phys_state="5: LinkUp")
    assert machine.look() == ()


def test_a_roce_port_is_watched_as_well(machine: Machine) -> None:
    machine.add("roce0", "0000:40:00.0", layer="Ethernet", rate="100 Gb/sec (4X EDR)")
    machine.look()
    machine.set("roce0", state="1: DOWN", phys_state="3: Disabled")
    assert machine.told() == [("fabric.port_down", "fault", "roce0/1")]


def test_a_port_that_was_never_used_is_no_fault_unless_it_is_configured(machine: Machine) -> None:
    machine.pull("mlx5_3")
    assert machine.look() == ()
    assert machine.look() == ()
    assert machine.told(devices=("mlx5_3",)) == [("fabric.port_down", "fault", "mlx5_3/1")]


def test_a_reboot_and_new_device_names_do_not_hide_a_dead_port(machine: Machine) -> None:
    machine.look()
    machine.state = {**machine.state, "boot": "the one before"}
    folder = machine.root / "sys/class/infiniband"
    (folder / "mlx5_1").rename(folder / "mlx5_9")
    machine.pull("mlx5_9")
    assert machine.told() == [("fabric.port_down", "fault", "mlx5_9/1")]


def test_a_port_that_waits_for_its_subnet_manager_is_a_fault_once_it_has_lasted(
    machine: Machine,
) -> None:
    machine.look()
    machine.set("mlx5_0", state="2: INIT")
    assert machine.told() == [("fabric.port_not_active", "warning", "mlx5_0/1")]
    assert machine.told(hold=0.0) == [("fabric.port_not_active", "fault", "mlx5_0/1")]


def test_a_missing_adapter_is_a_fault_where_it_is_configured(machine: Machine) -> None:
    assert machine.told(devices=("mlx5_0", "mlx5_7/1")) == [
        ("fabric.device_missing", "fault", "mlx5_7/1")
    ]
    folder = machine.root / "sys/class/infiniband"
    (folder / "mlx5_1").rename(machine.root / "gone")
    assert machine.told() == [("fabric.device_missing", "warning", "mlx5_1/1")]
    assert machine.told(ignore=("mlx5_1",)) == []


def test_all_adapters_gone_are_not_taken_for_a_machine_without_fabric(machine: Machine) -> None:
    machine.look()
    (machine.root / "sys/class/infiniband").rename(machine.root / "gone")
    assert {code for code, _, _ in machine.told()} == {"fabric.device_missing"}


def test_the_one_slow_port_among_its_peers_is_named(machine: Machine) -> None:
    machine.set("mlx5_3", rate="200 Gb/sec (2X NDR)")
    (finding,) = machine.look()
    assert (finding.code, finding.severity, finding.port) == (
        "fabric.port_slow",
        "warning",
        "mlx5_3/1",
    )
    assert "200" in finding.summary and "400" in finding.summary
    machine.set("mlx5_2", rate="200 Gb/sec (2X NDR)")
    assert machine.look() == ()  # two of a kind are meant so
    for device in ("mlx5_0", "mlx5_2"):
        machine.set(device, state="1: DOWN")
    machine.state = {}
    assert machine.look() == ()  # and between two nobody can tell which is wrong
    for device in ("mlx5_0", "mlx5_2"):
        machine.set(device, state="4: ACTIVE")
    assert machine.told(devices=("mlx5_2",), rate=400.0) == [
        ("fabric.port_slow", "fault", "mlx5_2/1")
    ]


def test_counters_count_as_growth_since_the_last_look(machine: Machine) -> None:
    machine.count("mlx5_0", "link_downed", 7)
    assert machine.look() == ()
    machine.count("mlx5_0", "link_downed", 9)
    machine.count("mlx5_1", "symbol_error", 700)
    down, errors = machine.look()
    assert (down.code, down.severity, down.count, down.port) == (
        "fabric.link_down",
        "warning",
        2,
        "mlx5_0/1",
    )
    assert (errors.code, errors.severity) == ("fabric.port_errors", "warning")
    assert "symbol_error +700" in errors.summary
    assert machine.look() == ()


def test_a_prolog_leaves_the_counters_to_the_next_look(machine: Machine) -> None:
    machine.look()
    machine.count("mlx5_0", "link_downed", 1)
    assert machine.look("prolog") == ()
    assert machine.told("epilog") == [("fabric.link_down", "warning", "mlx5_0/1")]


def test_a_few_errors_and_counters_that_were_reset_are_no_finding(machine: Machine) -> None:
    machine.count("mlx5_0", "symbol_error", 900)
    machine.look()
    machine.count("mlx5_0", "symbol_error", 8)
    machine.count("mlx5_0", "port_rcv_errors", 100)
    assert machine.look() == ()
    machine.count("mlx5_0", "symbol_error", 12)
    assert machine.told(errors_per_minute={"symbol_error": 1.0}) == [
        ("fabric.port_errors", "warning", "mlx5_0/1")
    ]


def test_a_silent_peer_is_told_only_of_a_job_that_failed(machine: Machine) -> None:
    machine.look()
    machine.count("mlx5_0", "rnr_nak_retry_err", 3)
    (finding,) = machine.look("epilog", FAILED)
    assert (finding.code, finding.severity, finding.job_id) == (
        "fabric.transport_errors",
        "info",
        12,
    )
    machine.count("mlx5_0", "rnr_nak_retry_err", 6)
    assert machine.look("epilog", RecordJob(13, 0, exit="0:0")) == ()
    machine.count("mlx5_0", "rnr_nak_retry_err", 9)
    assert machine.look("health_check") == ()


def test_virtual_functions_and_ignored_devices_are_left_alone(machine: Machine) -> None:
    machine.look()
    physical = machine.root / "sys/devices/pci0000:00/0000:01:00.0"
    (physical / "physfn/net").mkdir(parents=True)
    machine.pull("mlx5_1")
    machine.pull("mlx5_2")
    assert [port for _, _, port in machine.told(ignore=("mlx5_2",))] == ["mlx5_1/1"]
    machine.state = {}
    assert machine.look() == ()


def test_a_machine_with_nvswitches_needs_its_fabric_manager(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ports=0)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia-nvswitch0").touch()
    machine.service("nvidia-fabricmanager", "4711\n")
    assert machine.look() == ()
    machine.service("nvidia-fabricmanager", "")
    assert machine.told() == [("fabric.service_down", "warning", None)]  # it may be starting
    (finding,) = machine.look(hold=0.0)
    assert (finding.severity, finding.resolution) == ("fault", "restart_fabric_manager")


def test_in_a_container_the_hosts_services_are_not_judged(tmp_path: Path) -> None:
    machine = Machine(tmp_path, ports=1)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia-nvswitch0").touch()
    machine.service("nvidia-fabricmanager", "")
    (tmp_path / "proc/1/comm").write_text("slurmd\n")
    assert machine.look(hold=0.0) == ()


def test_imex_is_needed_where_it_is_enabled_and_has_channels(machine: Machine) -> None:
    machine.service("nvidia-imex", "")
    wants = machine.root / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(parents=True)
    (wants / "nvidia-imex.service").touch()
    assert machine.look() == ()
    (machine.root / "dev/nvidia-caps-imex-channels").mkdir(parents=True)
    (machine.root / "dev/nvidia-caps-imex-channels/channel0").touch()
    (finding,) = machine.look(hold=0.0)
    assert (finding.code, finding.resolution) == ("fabric.service_down", "restart_imex")


@pytest.mark.parametrize(
    "damage",
    [
        {"active": 3},
        {"active": {"x": 1}, "counters": {"0000:00:00.0/1": 7}},
        {"since": [], "counted": "yesterday"},
        {"counters": {"0000:00:00.0/1": {"symbol_error": "many"}}},
    ],
)
def test_a_damaged_memory_only_costs_its_memory(machine: Machine, damage: dict[str, Any]) -> None:
    machine.look()
    machine.state = {**machine.state, **damage}
    assert {code for code, _, _ in machine.told()} <= {"fabric.device_missing"}
    machine.count("mlx5_0", "link_downed", 1)
    assert ("fabric.link_down", "warning", "mlx5_0/1") in machine.told()


def test_rubbish_in_sysfs_is_survived(machine: Machine) -> None:
    machine.set("mlx5_0", state="", rate="fast", phys_state="?", link_layer="\0")
    machine.set("mlx5_1", **{"counters/link_downed": "-1"})
    machine.set("mlx5_1", **{"counters/symbol_error": "9" * 5000})
    (machine.root / "sys/class/infiniband/mlx5_2/device").unlink()
    (machine.root / "sys/class/infiniband/mlx5_2/device").symlink_to("device")
    (machine.root / "sys/class/infiniband/README").touch()
    assert machine.look() == ()


def test_a_mistyped_counter_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "recovery.toml"
    path.write_text("[probes.fabric.errors_per_minute]\nsymbol_errors = 3\n")
    with pytest.raises(ConfigError, match="no counter 'symbol_errors'"):
        load(path)


def test_a_dead_port_reaches_the_record_of_a_health_check(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    node, machine = Node(tmp_path / "node", "fabric1"), Machine(tmp_path / "root", ports=2)
    node.configure(f'[probes.fabric]\nroot = "{machine.root}"\ndevices = ["mlx5_0"]\n')
    assert node.run("health_check").status == 0
    assert node.heartbeat()["verdict"] == "ok"
    machine.pull("mlx5_0")
    assert node.run("health_check").status == 0
    (record,) = node.records()
    assert [one["code"] for one in record["findings"]] == ["fabric.port_down"]
    assert record["verdict"] == "fault"
