"""The NVML probe, with the real pynvml, over fake GPUs in every condition a real one can be in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from recovery.demo import fake_nvml
from slurm_hooks import catalog, gres
from slurm_hooks.config import ConfigError, load
from slurm_hooks.probes.nvml import PROBE

SERVER = """
import json, os, sys
from pathlib import Path
from slurm_hooks.config import load
from slurm_hooks.context import HookContext
from slurm_hooks.probes import Look, Skipped, load as load_probe
for line in sys.stdin:
    wanted = json.loads(line)
    context = HookContext.from_environ("epilog", wanted["environ"])
    os.environ.pop("SLURM_CONF", None)
    os.environ.update(wanted["environ"])
    look = Look(context, load(Path(wanted["config"])), wanted["kept"])
    try:
        seen = load_probe("nvml").look(look)
        answer = {"findings": [f.to_dict() for f in seen.findings], "state": seen.state}
        answer["notes"] = seen.notes
    except Skipped as why:
        answer = {"skipped": str(why)}
    print(json.dumps(answer), flush=True)
"""


class Node:
    """A node with fake GPUs; the probe keeps its state from look to look as on a real one."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.folder = folder
        self.gpus = folder / "gpus.json"
        self.config = folder / "recovery.toml"
        self.kept: Any = {}
        self.environ = {"SLURMD_NODENAME": "n1"}
        environ = {**os.environ, **fake_nvml.environment(library, self.gpus)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def restart(self) -> None:
        """What a test may have left is gone: memory, configuration, job."""
        self.kept = {}
        self.environ = {"SLURMD_NODENAME": "n1"}
        self.configure("")

    def configure(self, nvml: str, expect: str = "0") -> None:
        self.config.write_text(f"[probes.nvml]\nexpect_gpus = {expect}\n{nvml}\n")

    def answer(self, state: Mapping[str, Any] | None) -> Any:
        if state is None:
            self.gpus.unlink(missing_ok=True)
        else:
            fake_nvml.write_state(self.gpus, state)
        assert self.process.stdin and self.process.stdout
        wanted = {"config": str(self.config), "kept": self.kept, "environ": self.environ}
        self.process.stdin.write(json.dumps(wanted) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        self.kept = answer.get("state", self.kept)
        return answer

    def findings(self, state: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.answer(state)["findings"]
        return found

    def codes(self, state: Mapping[str, Any] | None) -> list[str]:
        return [finding["code"] for finding in self.findings(state)]


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("node")
    node = Node(fake_nvml.build(folder / "nvml"), folder)
    with node.process:
        yield node
        assert node.process.stdin
        node.process.stdin.close()


@pytest.fixture
def node(one_node: Node) -> Node:
    one_node.restart()
    return one_node


def with_gpu_3(
    setting: Mapping[str, Any], every: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    return {"count": 8, "every": every or {}, "gpus": {"3": setting}}


PROFILES = {
    "hopper": fake_nvml.HOPPER,
    "ampere": fake_nvml.AMPERE,
    "blackwell": fake_nvml.BLACKWELL,
    "mig": {**fake_nvml.MIG, "nvlink_down": list(range(18))},
    "vgpu": fake_nvml.VGPU,
    "h200": {"name": "NVIDIA H200"},
    "pcie-cards-without-bridge": {
        "name": "NVIDIA H100 PCIe",
        "nvlink_down": list(range(18)),
        "fabric_state": 0,
    },
    "ecc-off": {"ecc_mode": 0},
    "older-driver": {
        **fake_nvml.AMPERE,
        "fields_not_supported": [165, 193, 194, 230],
        "errors": {"nvmlDeviceGetCurrentClocksEventReasons": 13},
    },
    "turing": {"arch": 6, "name": "Tesla T4", "nvlinks": 0, "retired_pending": 0, "retired_sbe": 0,
               "retired_dbe": 0},
    "idle-links-trained-down": {"pcie_gen": 1},
}  # fmt: skip


@pytest.mark.parametrize("profile", PROFILES)
def test_healthy_gpus_of_every_kind_give_no_finding(node: Node, profile: str) -> None:
    state = {"count": 8, "every": PROFILES[profile]}
    assert node.findings(state) == []
    assert node.findings(state) == []


def test_a_single_gpu_whose_links_lead_nowhere_gives_no_finding(node: Node) -> None:
    alone = {"nvlink_down": list(range(18)), "fabric_state": 0}
    assert node.findings({"count": 1, "every": alone}) == []


@pytest.mark.parametrize(
    "kept",
    [
        {"devices": 1, "since": [], "counters": 3, "unsupported": 1, "gres": 5},
        {"devices": [{"no": 1}], "since": {"a": 1}, "counters": {"a": 1}, "gres": {"count": "x"}},
        {"devices": {"index": 0}, "last_look": "x", "unsupported": {"NVIDIA": 1}, "gres": {}},
    ],
)
def test_a_broken_memory_is_no_memory_and_is_mended(node: Node, kept: Any) -> None:
    node.findings({"count": 8})
    node.configure("", expect='"gres"')
    node.kept = {**node.kept, **kept}
    assert node.codes(with_gpu_3({"lost": True})) == ["gpu.lost"]
    assert node.codes({"count": 8}) == []


def test_mixed_models_give_no_finding(node: Node) -> None:
    gpus = {str(n): dict(fake_nvml.AMPERE) for n in range(4)}
    gpus |= {str(n): {"name": "NVIDIA L4", "arch": 8, "nvlinks": 0} for n in range(4, 8)}
    assert node.findings({"count": 8, "gpus": gpus}) == []


ONE_LOOK = [
    ({"lost": True}, "gpu.lost", "fatal"),
    ({"reset_required": True}, "gpu.reset_required", "fatal"),
    ({"error": 999}, "gpu.not_answering", "fault"),
    ({"error": 11}, "gpu.interrupts", "fault"),
    ({"errors": {"nvmlDeviceGetInforomVersion": 14, "nvmlDeviceGetEccMode": 14}},
     "gpu.inforom_corrupted", "warning"),
    ({"errors": {"nvmlDeviceGetRemappedRows": 999}}, "gpu.nvml_error", "warning"),
    ({"errors": {"nvmlDeviceGetRemappedRows": 15}}, "gpu.lost", "fatal"),
    ({"recovery_action": 1}, "gpu.recovery_action", "fatal"),
    ({"recovery_action": 2}, "gpu.recovery_action", "fatal"),
    ({"recovery_action": 3}, "gpu.drain_p2p", "warning"),
    ({"recovery_action": 4}, "gpu.recovery_action", "fatal"),
    ({"recovery_action": 5}, "gpu.recover_imex_domain", "fault"),
    ({"recovery_action": 99}, "gpu.recovery_action_unknown", "warning"),
    ({"ecc_uncorrectable": 2}, "gpu.ecc_dram_uncorrectable", "fault"),
    ({"sram_uncorrectable": 2}, "gpu.ecc_sram_uncorrectable", "fault"),
    ({"ecc_uncorrectable": 2, "not_supported": ["nvmlDeviceGetMemoryErrorCounter"]},
     "gpu.ecc_uncorrectable", "fault"),
    ({"sram_uncorrectable_aggregate": 5}, "gpu.ecc_sram_aggregate", "warning"),
    ({"sram_threshold_exceeded": True}, "gpu.sram_threshold", "fault"),
    ({"remap_pending": True}, "gpu.remap_pending", "fault"),
    ({"remap_failed": True}, "gpu.remap_failed", "fatal"),
    ({"remap_uncorrectable": 513}, "gpu.remapped_rows", "fault"),
    ({"remap_banks_without_spare": 1}, "gpu.remap_no_spare", "warning"),
    ({"retired_pending": True}, "gpu.retired_pages_pending", "fault"),
    ({"retired_sbe": 50, "retired_dbe": 10}, "gpu.retired_pages", "fault"),
    ({"pcie_width": 8}, "gpu.pcie_width", "fault"),
    ({"nvlink_down": [4]}, "gpu.nvlink_down", "fault"),
    ({"nvlink_down": list(range(18))}, "gpu.nvlinks_missing", "fault"),
    ({"nvlinks": 16}, "gpu.nvlinks_missing", "fault"),
    ({"fabric_state": 1}, "gpu.fabric_not_ready", "fault"),
    ({"fabric_status": 999}, "gpu.fabric_unhealthy", "fault"),
    ({"fabric_health_mask": 0b01 << 6}, "gpu.fabric_unhealthy", "fault"),
    ({"fabric_health_mask": 0b01 << 4}, "gpu.fabric_unhealthy", "fault"),
    ({"fabric_health_mask": 5 << 8}, "gpu.fabric_unhealthy", "fault"),
    ({"fabric_health_mask": 0b01}, "gpu.fabric_degraded", "warning"),
    ({"ecc_pending": 0}, "gpu.ecc_mode_pending", "warning"),
    ({"mig_pending": 1}, "gpu.mig_mode_pending", "warning"),
    ({"persistence": 0}, "gpu.persistence_off", "warning"),
    ({"power_limit": 500_000}, "gpu.power_limit", "info"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "code", "severity"), ONE_LOOK, ids=[f"{c}-{s}" for s, c, _ in ONE_LOOK]
)
def test_a_fault_is_found_and_belongs_to_its_gpu(
    node: Node, setting: Mapping[str, Any], code: str, severity: str
) -> None:
    retires_pages = {"retired_pending": 0, "retired_sbe": 0, "retired_dbe": 0}
    node.findings({"count": 8, "every": retires_pages})
    found = node.findings(with_gpu_3(setting))
    assert [(f["code"], f["severity"]) for f in found] == [(code, severity)]
    assert (found[0]["gpu"], found[0]["pci"]) == (3, "0000:3b:00.0")
    assert found[0]["uuid"].startswith("GPU-")
    assert found[0]["summary"] and found[0]["evidence"][0]["text"]
    again = node.findings(with_gpu_3(setting))
    assert again == found, "the same fact keeps its key and the time when it was first seen"
    assert node.findings({"count": 8}) == []


HELD = [
    ({"thermal": True}, "gpu.thermal_slowdown"),
    ({"power_brake": True}, "gpu.power_brake"),
    ({"clocks_event_reasons": 0x8}, "gpu.hardware_slowdown"),
    ({"clocks_event_reasons": 0x20}, "gpu.software_thermal_slowdown"),
    ({"temperature": 90}, "gpu.too_hot"),
    ({"temperature": 90, "arch": 7, "nvlinks": 18}, "gpu.too_hot"),
    ({"pcie_gen": 1, "utilization": 100}, "gpu.pcie_generation"),
]


@pytest.mark.parametrize(("setting", "code"), HELD, ids=[f"{c}-{s}" for s, c in HELD])
def test_what_comes_and_goes_is_a_fault_only_when_it_stays(
    node: Node, setting: Mapping[str, Any], code: str
) -> None:
    node.configure("hold = 0.2")
    bad = with_gpu_3(setting)
    assert node.codes(bad) == [], "a spike is no fault"
    assert node.codes(bad) == [], "nor are two looks at the same moment"
    time.sleep(0.2)
    assert node.codes(bad) == [code]
    assert node.codes({"count": 8}) == []
    assert node.codes(bad) == [], "it begins anew once it has been away"


def test_links_asleep_to_save_power_are_up(node: Node) -> None:
    asleep = {"fields": {"165": {str(link): 2 for link in range(18)}}}
    assert node.codes(with_gpu_3(asleep)) == []


def test_a_gpu_that_is_lost_half_way_is_left_alone(node: Node, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    setting = {"errors": {"nvmlDeviceGetEccMode": 15}}
    assert node.codes({**with_gpu_3(setting), "log": str(log)}) == ["gpu.lost"]
    calls = [line.split()[0] for line in log.read_text().splitlines() if line.endswith(" 3")]
    assert calls[-1] == "nvmlDeviceGetEccMode"


def test_power_cap_and_idle_clocks_are_how_a_gpu_works(node: Node) -> None:
    node.configure("hold = 0.05")
    state = {"count": 8, "every": {"clocks_event_reasons": 0x1 | 0x2 | 0x4}}
    assert node.codes(state) == []
    time.sleep(0.06)
    assert node.codes(state) == []


GROWING = [
    ({"pcie_replay": 500}, "gpu.pcie_replays", None),
    ({"pcie_errors": {"bad_tlp": 500}}, "gpu.pcie_errors", None),
    ({"pcie_errors": {"fatal": 1}}, "gpu.pcie_errors", None),
    ({"nvlink_errors": {"4": {"replay": 1}}}, "gpu.nvlink_errors", 4),
    ({"nvlink_errors": {"4": {"crc": 1000}}}, "gpu.nvlink_errors", 4),
    ({"nvlink_errors": {"4": {"recovery_failed": 1}}, "arch": 10}, "gpu.nvlink_recovery_failed", 4),
]


@pytest.mark.parametrize(("setting", "code", "link"), GROWING, ids=[str(s) for s, _, _ in GROWING])
def test_counters_count_by_their_growth(
    node: Node, setting: Mapping[str, Any], code: str, link: int | None
) -> None:
    every = {"arch": setting.get("arch", 9)}
    assert node.codes(with_gpu_3(setting)) == [], "what was there at the first look is history"
    assert node.codes(with_gpu_3(setting)) == []
    node.kept = {}
    assert node.codes({"count": 8, "every": every}) == []
    found = node.findings(with_gpu_3(setting, every))
    assert [(f["code"], f["gpu"], f.get("link")) for f in found] == [(code, 3, link)]
    assert node.codes({"count": 8, "every": every}) == [], "a counter that was reset is no growth"


def test_a_few_repaired_pcie_errors_are_no_fault(node: Node) -> None:
    assert node.codes({"count": 8}) == []
    few = {"bad_tlp": 8, "unsupported_req": 900, "correctable": 900}
    assert node.codes(with_gpu_3({"pcie_errors": few})) == []


def test_what_was_remembered_before_a_reboot_is_forgotten(node: Node) -> None:
    node.findings({"count": 8})
    node.kept["boot"] = "another"
    assert node.codes(with_gpu_3({"pcie_replay": 500})) == []


def test_one_bad_gpu_hides_no_other(node: Node) -> None:
    gpus = {
        "0": {"lost": True},
        "2": {"errors": {"nvmlDeviceGetFieldValues": 999}, "remap_failed": True},
        "5": {"error": 999},
        "7": {"ecc_uncorrectable": 1},
    }
    found = node.findings({"count": 8, "gpus": gpus})
    assert {(f.get("gpu"), f["code"]) for f in found} == {
        (0, "gpu.lost"),
        (2, "gpu.nvml_error"),
        (2, "gpu.remap_failed"),
        (5, "gpu.not_answering"),
        (7, "gpu.ecc_dram_uncorrectable"),
    }


def test_gpus_are_named_by_minor_number_in_any_order(node: Node) -> None:
    state = {"count": 8, "minor_order": [4, 5, 6, 7, 0, 1, 2, 3]}
    assert node.codes(state) == []
    found = node.findings({**state, "gpus": {"3": {"lost": True}, "4": {"remap_failed": True}}})
    assert {(f["gpu"], f["code"]) for f in found} == {
        (3, "gpu.lost"),
        (4, "gpu.remap_failed"),
    }
    node.kept = {}
    [lost] = node.findings({**state, "gpus": {"3": {"lost": True}}})
    assert lost["gpu"] == 3, "the only one left over, though nothing is remembered"
    node.kept = {}
    both = node.findings({**state, "gpus": {"2": {"lost": True}, "3": {"lost": True}}})
    assert [f.get("gpu") for f in both] == [None, None], "which is which cannot be known"
    assert "index 6" in both[0]["summary"]


def test_a_gpu_that_does_not_tell_its_minor_number_keeps_its_uuid(node: Node) -> None:
    every = {"not_supported": ["nvmlDeviceGetMinorNumber"]}
    found = node.findings({"count": 2, "every": every, "gpus": {"1": {"remap_failed": True}}})
    assert [(f["gpu"], f["pci"], f["code"]) for f in found] == [
        (1, "0000:1b:00.0", "gpu.remap_failed")
    ]


def test_a_fault_belongs_to_the_job_that_holds_the_gpu(node: Node) -> None:
    node.environ |= {"SLURM_JOB_ID": "12", "SLURM_JOB_GPUS": "2-3"}
    gpus = {"3": {"remap_failed": True}, "6": {"remap_failed": True}}
    found = node.findings({"count": 8, "gpus": gpus})
    assert [(f["gpu"], f.get("job_id")) for f in found] == [(3, 12), (6, None)]


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ({"driver_not_loaded": True}, "gpu.driver_not_loaded"),
        (None, "gpu.driver_not_loaded"),
        ({"driver_mismatch": True}, "gpu.driver_mismatch"),
        ({"errors": {"nvmlInit": 12}}, "gpu.library_missing"),
        ({"errors": {"nvmlInit": 27}}, "gpu.driver_not_ready"),
        ({"errors": {"nvmlInit": 999}}, "gpu.driver_error"),
        ({"errors": {"nvmlDeviceGetCount": 999}}, "gpu.driver_error"),
    ],
)
def test_a_dead_driver_does_not_pass_for_a_node_without_gpus(
    node: Node, state: Mapping[str, Any] | None, code: str
) -> None:
    node.configure("", expect="8")
    assert node.codes(state) == [code]


def test_a_dead_driver_is_noticed_by_a_job_with_gpus_and_by_what_was_seen_before(
    node: Node,
) -> None:
    node.configure("", expect='"gres"')
    assert "skipped" in node.answer(None)
    node.environ |= {"SLURM_JOB_ID": "12", "SLURM_JOB_GPUS": "0"}
    assert node.codes(None) == ["gpu.driver_not_loaded"]
    node.environ = {"SLURMD_NODENAME": "n1"}
    node.findings({"count": 8})
    assert node.codes(None) == ["gpu.driver_not_loaded"]


def test_without_gpus_and_driver_the_probe_says_why_it_did_not_look(node: Node) -> None:
    assert "Driver Not Loaded" in node.answer(None)["skipped"]


@pytest.fixture
def slurm(node: Node, tmp_path: Path) -> Path:
    """A folder with slurm.conf and gres.conf, which the hook is told of."""
    node.configure("", expect='"gres"')
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=c1\nNodeName=DEFAULT CPUs=8\n"
        "NodeName=n[1-4] \\\n  Gres=gpu:h100:8(S:0-1),shard:32 # eight\nNodeName=login\n"
    )
    (tmp_path / "gres.conf").write_text("NodeName=n[1-4] Name=gpu File=/dev/nvidia[0-7]\n")
    node.environ["SLURM_CONF"] = str(tmp_path / "slurm.conf")
    return tmp_path


@pytest.mark.usefixtures("slurm")
def test_a_gpu_that_slurm_counts_on_and_that_is_absent_is_named(node: Node) -> None:
    assert node.codes({"count": 8}) == []
    [missing] = node.findings(with_gpu_3({"absent": True}))
    assert (missing["code"], missing["severity"]) == ("gpu.missing", "fatal")
    assert (missing["gpu"], missing["pci"]) == (3, "0000:3b:00.0")
    assert missing["summary"] == "GPU 3 is missing: NVML finds 7 of 8 GPUs"


@pytest.mark.usefixtures("slurm")
def test_a_hook_inside_its_jobs_cgroup_misses_no_gpu_that_it_cannot_see(
    node: Node, tmp_path: Path
) -> None:
    """PrologFlags=RunInJob with ConstrainDevices: NVML shows the job's GPUs, here two of eight."""
    hidden = {str(minor): {"absent": True} for minor in range(2, 8)}
    node.environ |= {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0-1"}
    pids = Path("/sys/fs/cgroup/pids")
    root = pids if pids.is_dir() else pids.parent
    group = root / f"slurm-{tmp_path.name}-{os.getpid()}" / "job_7"
    group.mkdir(parents=True)
    try:
        (group / "cgroup.procs").write_text(str(node.process.pid))
        assert node.codes({"count": 8, "gpus": hidden}) == []
        lost = {**hidden, "1": {"absent": True}}
        assert node.codes({"count": 8, "gpus": lost}) == ["gpu.missing"]
    finally:
        (root / "cgroup.procs").write_text(str(node.process.pid))
        for folder in (group, group.parent):
            folder.rmdir()
    assert set(node.codes({"count": 8, "gpus": hidden})) == {"gpu.missing"}


def test_a_health_check_counts_as_the_last_hook_that_knew_slurms_file(
    node: Node, slurm: Path
) -> None:
    node.findings({"count": 8})
    del node.environ["SLURM_CONF"]
    assert node.codes(with_gpu_3({"absent": True})) == ["gpu.missing"]
    (slurm / "slurm.conf").write_text("NodeName=n1 Gres=gpu:7\n")
    assert node.codes(with_gpu_3({"absent": True})) == []
    (slurm / "slurm.conf").unlink()
    assert node.codes({"count": 6}) == ["gpu.missing"], "what was read last still counts"
    node.kept = {"gres": node.kept["gres"]}
    assert node.codes({"count": 5}) == ["gpu.count"], "which are missing is not known"


@pytest.mark.usefixtures("slurm")
def test_mig_instances_are_not_counted_as_gpus(node: Node) -> None:
    assert node.codes({"count": 2, "every": fake_nvml.MIG}) == []


def test_settings_are_held_against_the_configuration(node: Node) -> None:
    node.configure('ecc = "on"\nmig = "off"\nnvlinks = 18')
    assert node.codes({"count": 2}) == []
    gpus = {"0": {"ecc_mode": 0, "mig_mode": 1}, "1": {"nvlink_down": [17]}}
    assert node.codes({"count": 2, "gpus": gpus}) == [
        "gpu.ecc_mode",
        "gpu.mig_mode",
        "gpu.nvlink_down",
    ]


def test_what_no_gpu_of_a_model_supports_is_not_asked_again(node: Node, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    state = {"count": 2, "every": fake_nvml.VGPU, "log": str(log)}
    node.findings(state)
    assert "nvmlDeviceGetEccMode" in log.read_text()
    log.unlink()
    node.findings(state)
    assert "nvmlDeviceGetEccMode" not in log.read_text()
    log.unlink()
    node.findings({**state, "driver_version": "575.1"})
    assert "nvmlDeviceGetEccMode" in log.read_text(), "a new driver may know more"


def test_every_code_of_the_probe_is_in_the_catalogue_and_no_other() -> None:
    headers = re.findall(
        r'^\["(.+)"\]$', (catalog.FINDINGS / "nvml.toml").read_text(), re.MULTILINE
    )
    assert sorted(headers) == sorted(PROBE.codes)
    assert all(catalog.entry(code).meaning for code in PROBE.codes)


def test_a_wrong_setting_is_named(tmp_path: Path) -> None:
    path = tmp_path / "recovery.toml"
    path.write_text("[probes.nvml]\nexpect_gpus = -1\n")
    with pytest.raises(ConfigError, match="expect_gpus must be between"):
        load(path)


@pytest.mark.parametrize(
    ("slurm_conf", "gres_conf", "expected"),
    [
        ("NodeName=n1 Gres=gpu:8", "", (8, ())),
        ("NodeName=n1 Gres=gpu", "", (1, ())),
        ("nodename=n[1,3] gres=gpu:a100:4,gpu:v100:4", "", (8, ())),
        ("NodeName=n[01-18] Gres=gpu:8\nNodeName=n1 Gres=gpu:2", "", (2, ())),
        ("NodeName=DEFAULT Gres=gpu:4\nNodeName=n1", "", (4, ())),
        ("NodeName=n1 CPUs=8", "AutoDetect=nvml", (0, ())),
        ("NodeName=n1 Gres=gpu:8", "AutoDetect=nvml", (8, ())),
        ("NodeName=n1 Gres=gpu:4", "Name=gpu File=/dev/nvidia[4-7]", (4, (4, 5, 6, 7))),
        (
            "NodeName=n1 Gres=gpu:2",
            "NodeName=n2 Name=gpu File=/dev/nvidia[0-7]\nName=gpu Type=x File=/dev/nvidia0\n"
            "Name=gpu Type=y File=/dev/nvidia1",
            (2, (0, 1)),
        ),
        ("ClusterName=c", "Name=gpu File=/dev/nvidia[0-7]", (8, tuple(range(8)))),
        ("ClusterName=c", "", None),
        ("NodeName=n[1-", "", None),
        ("Include nodes.conf", "", (6, ())),
        ("Include slurm.conf\nNodeName=n1 Gres=gpu:3", "", (3, ())),
        ("\x00\xff NodeName=n1 Gres=gpu:999999999", "", (1024, ())),
    ],
)
def test_slurms_own_files_say_how_many_gpus_a_node_has(
    tmp_path: Path, slurm_conf: str, gres_conf: str, expected: tuple[int, tuple[int, ...]] | None
) -> None:
    (tmp_path / "slurm.conf").write_text(slurm_conf, encoding="latin-1")
    (tmp_path / "gres.conf").write_text(gres_conf)
    (tmp_path / "nodes.conf").write_text("NodeName=n[1-2] Gres=gpu:6")
    found = gres.read(tmp_path / "slurm.conf", "n1")
    assert (found and (found.count, found.minors)) == expected


def test_a_slurm_conf_that_is_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "slurm.conf")
    assert gres.read(tmp_path / "slurm.conf", "n1") is None
