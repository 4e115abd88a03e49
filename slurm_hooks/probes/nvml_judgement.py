"""What a GPU's answers mean: one reading and what was remembered in, findings out.

Pure but for the clock it is given. Which limits are whose is said where they stand; what a code
means for job and node is the catalogue's to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from slurm_hooks import catalog
from slurm_hooks.probe_config import NvmlProbe
from slurm_hooks.probes.nvml_memory import Memory
from slurm_hooks.probes.nvml_reading import (
    INFOROM,
    INTERRUPTS,
    LOST,
    RESET_REQUIRED,
    Device,
    Reading,
)
from slurm_hooks.record import Evidence, Finding

_REMAPPED_ROWS_LIMIT = 512
"""Uncorrectable remaps that fail a GPU (Azure's and sichek's node checks)."""

_RETIRED_PAGES_LIMIT = 60
"""Retired pages at which NVIDIA replaces a board (Dynamic Page Retirement guide); 64 is full."""

_SRAM_AGGREGATE_LIMIT = 4
"""Lifetime uncorrectable SRAM errors beyond which operators ask for a replacement."""

_REPLAYS_PER_MINUTE = 8
"""PCIe replays that DCGM's health watch calls too many; of the other errors of a link's signal that
nobody has set a limit for, the same."""

_CRC_PER_MINUTE = 100
"""Link CRC errors below this are noise: each is repaired by a replay."""

_BUSY_PERCENT = 50
"""Utilisation from which a PCIe link must run at its full generation; idle links train down."""

_MANY_LINKS = 4
"""From more links down than this on one GPU on, one finding tells of all."""

_LINKS_BY_MODEL = (
    (r"A100-SXM|A100.*SXM4", 12),
    (r"H100 80GB HBM3|^NVIDIA H200$|B200|B300", 18),
)
"""NVLinks that are up on a healthy board (NVIDIA's data sheets); others go by their neighbours."""

_HW_THERMAL, _POWER_BRAKE, _HW_SLOWDOWN, _SW_THERMAL = 0x40, 0x80, 0x08, 0x20
_SLOWDOWNS = (
    ("gpu.thermal_slowdown", _HW_THERMAL),
    ("gpu.power_brake", _POWER_BRAKE),
    ("gpu.software_thermal_slowdown", _SW_THERMAL),
    ("gpu.hardware_slowdown", _HW_SLOWDOWN),
)
"""nvmlClocksEventReason*; idle (0x1), power cap (0x4) and the like are how a GPU works."""

_RECOVERY = {
    1: ("gpu.recovery_action", "a reset of the GPU", "reset_gpu"),
    2: ("gpu.recovery_action", "a reboot of the node", "reboot_node"),
    3: ("gpu.drain_p2p", "", "reset_gpu"),
    4: ("gpu.recovery_action", "a drain and a reset of the GPU", "reset_gpu"),
    5: ("gpu.recover_imex_domain", "", "restart_imex"),
    6: ("gpu.recovery_action", "a reset of its bus", "reset_node"),
    7: ("gpu.recovery_action", "a reboot of the system", "reboot_node"),
}
"""NVML_GPU_RECOVERY_ACTION_* (nvml.h, 13.x)."""


def held_slowdowns(reading: Reading) -> list[str]:
    """Return under which keys of Memory.since this reading's slowdowns are kept."""
    return [f"{reading.device.key}:{code}" for code, bit in _SLOWDOWNS if (reading.slow or 0) & bit]


class Judge:
    """Turns readings into findings; ``job`` is the hook's job's id and the GPUs it holds."""

    def __init__(
        self, config: NvmlProbe, memory: Memory, job: tuple[int, frozenset[int]] | None = None
    ) -> None:
        self._config = config
        self._memory = memory
        self._job = job

    def finding(
        self, code: str, device: Device, seen: str, value: object = "", **more: Any
    ) -> Finding:
        """Return a finding about ``device``: ``seen`` is the evidence, ``value`` its identity."""
        severity, resolution = more.pop("severity", None), more.pop("resolution", None)
        link = more.pop("link", None)
        key = f"{device.key}:{code}:{value if link is None else link}"
        about: dict[str, Any] = {"gpu": device.minor, "uuid": device.uuid, "pci": device.pci}
        if self._job and device.minor in self._job[1]:
            about["job_id"] = self._job[0]
        if link is not None:
            about["link"] = link
        label = (
            f"GPU {device.minor}" if device.minor is not None else f"GPU at index {device.index}"
        )
        return catalog.finding(
            code,
            severity=severity,
            resolution=resolution,
            evidence=(
                Evidence(
                    "nvml", seen, self._memory.first_seen(key)[1], f"{self._memory.boot}:{key}"
                ),
            ),
            details={"label": label, **more},
            **about,
        )

    def judge(self, reading: Reading) -> Iterator[Finding]:
        """Yield what is wrong with one GPU, gravest subjects first."""
        for part in (_errors, _recovery, _memory_faults, _slow, _pcie, _links, _fabric, _settings):
            yield from part(self, reading, self._memory, self._config)

    def links_missing(self, readings: Sequence[Reading]) -> Iterator[Finding]:
        """Yield GPUs with fewer NVLinks up than their model has, or than their neighbours have."""
        for reading in readings:
            if not reading.links_up or (reading.mig_mode and reading.mig_mode[0]):
                continue  # MIG instances cannot use NVLink, so its state means nothing
            expected = _links_expected(reading, readings, self._config)
            up = sum(reading.links_up.values())
            if up >= expected:
                continue
            down = [link for link, is_up in reading.links_up.items() if not is_up]
            if 0 < len(down) <= _MANY_LINKS:
                for link in down:
                    seen = f"nvmlDeviceGetNvLinkState({link}): inactive; {up} of {expected} are up"
                    yield self.finding("gpu.nvlink_down", reading.device, seen, link=link)
                continue
            seen = f"NVLinks up: {up}, expected: {expected}"
            yield self.finding(
                "gpu.nvlinks_missing", reading.device, seen, up, up=up, expected=expected
            )


Part = Callable[[Judge, Reading, Memory, NvmlProbe], Iterator[Finding]]


def _errors(judge: Judge, reading: Reading, memory: Memory, config: NvmlProbe) -> Iterator[Finding]:
    by_code: dict[int, list[str]] = {}
    for function, code in reading.errors.items():
        by_code.setdefault(code, []).append(f"nvmlDeviceGet{function}")
    codes = {
        LOST: "gpu.lost",
        RESET_REQUIRED: "gpu.reset_required",
        INTERRUPTS: "gpu.interrupts",
        INFOROM: "gpu.inforom_corrupted",
    }
    for code, functions in by_code.items():
        seen = f"{', '.join(functions)[:200]}: NVML error {code}"
        if code in codes:
            yield judge.finding(codes[code], reading.device, seen)
        elif {"nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMinorNumber"} & set(functions):
            yield judge.finding("gpu.not_answering", reading.device, seen, code, error=code)
        else:
            yield judge.finding("gpu.nvml_error", reading.device, seen, code, error=code)


def _recovery(
    judge: Judge, reading: Reading, memory: Memory, config: NvmlProbe
) -> Iterator[Finding]:
    action = reading.recovery_action
    if not action:
        return
    seen = f"field 230 (GPU recovery action): {action}"
    code, words, resolution = _RECOVERY.get(
        action, ("gpu.recovery_action_unknown", str(action), "contact_support")
    )
    yield judge.finding(code, reading.device, seen, action, action=words, resolution=resolution)


def _memory_faults(
    judge: Judge, reading: Reading, memory: Memory, config: NvmlProbe
) -> Iterator[Finding]:
    device = reading.device
    if reading.ecc_uncorrectable:
        places = {"dram": reading.dram_uncorrectable, "sram": reading.sram_uncorrectable}
        told = {place: count for place, count in places.items() if count}
        for place, count in (told or {"": reading.ecc_uncorrectable}).items():
            code = f"gpu.ecc_{place}_uncorrectable" if place else "gpu.ecc_uncorrectable"
            seen = f"uncorrectable volatile ECC errors {place}: {count}"
            yield judge.finding(code, device, seen, count, number=count)
    if reading.sram_threshold_exceeded:
        yield judge.finding("gpu.sram_threshold", device, "SRAM error threshold exceeded")
    if (reading.sram_aggregate or 0) > _SRAM_AGGREGATE_LIMIT:
        number = reading.sram_aggregate
        seen = f"uncorrectable aggregate SRAM errors: {number}"
        yield judge.finding("gpu.ecc_sram_aggregate", device, seen, number, number=number)
    if reading.remapped:
        correctable, uncorrectable, pending, failed = reading.remapped
        seen = (
            f"nvmlDeviceGetRemappedRows: correctable {correctable}, uncorrectable {uncorrectable}, "
            f"pending {pending}, failure {failed}"
        )
        if failed:
            yield judge.finding("gpu.remap_failed", device, seen)
        if pending:
            yield judge.finding("gpu.remap_pending", device, seen)
        if uncorrectable > _REMAPPED_ROWS_LIMIT:
            yield judge.finding("gpu.remapped_rows", device, seen, number=uncorrectable)
    if reading.banks_without_spare:
        number = reading.banks_without_spare
        seen = f"nvmlDeviceGetRowRemapperHistogram: none {number}"
        yield judge.finding("gpu.remap_no_spare", device, seen, number=number)
    if reading.retired_pending:
        yield judge.finding("gpu.retired_pages_pending", device, "pages pending retirement")
    if reading.retired_pages and sum(reading.retired_pages) >= _RETIRED_PAGES_LIMIT:
        single, double = reading.retired_pages
        seen = f"retired pages: {single} for single-bit, {double} for double-bit errors"
        yield judge.finding("gpu.retired_pages", device, seen, single=single, double=double)


def _slow(judge: Judge, reading: Reading, memory: Memory, config: NvmlProbe) -> Iterator[Finding]:
    reasons = reading.slow or 0
    for code, bit in _SLOWDOWNS:
        if reasons & bit and memory.held(f"{reading.device.key}:{code}"):
            # 0x8 stands beside its more exact reasons; alone it is a finding of its own.
            if code == "gpu.hardware_slowdown" and reasons & (_HW_THERMAL | _POWER_BRAKE):
                continue
            seen = f"clocks event reasons: 0x{reasons:x}"
            yield judge.finding(code, reading.device, seen)
    if reading.hot and memory.held(f"{reading.device.key}:hot"):
        yield judge.finding("gpu.too_hot", reading.device, reading.hot, reading=reading.hot)


def _pcie(judge: Judge, reading: Reading, memory: Memory, config: NvmlProbe) -> Iterator[Finding]:
    device = reading.device
    if reading.pcie_width and reading.pcie_width[0] < reading.pcie_width[1]:
        now, most = reading.pcie_width
        seen = f"PCIe width x{now}, maximum x{most}"
        yield judge.finding("gpu.pcie_width", device, seen, now, now=now, most=most)
    if reading.pcie_generation and reading.pcie_generation[0] < reading.pcie_generation[1]:
        now, most = reading.pcie_generation
        busy = (reading.utilization or 0) >= _BUSY_PERCENT
        if busy and memory.held(f"{device.key}:pcie_generation"):
            seen = f"PCIe generation {now}, maximum {most}, at {reading.utilization}% utilisation"
            yield judge.finding("gpu.pcie_generation", device, seen, now, now=now, most=most)
    if reading.pcie_replays is not None:
        grown, minutes = memory.grown(device, "pcie_replays", reading.pcie_replays)
        if grown > _REPLAYS_PER_MINUTE * minutes and grown > _REPLAYS_PER_MINUTE:
            seen = f"PCIe replays: {grown} more in {minutes:.1f} minutes"
            yield judge.finding(
                "gpu.pcie_replays", device, seen, reading.pcie_replays, number=grown
            )
    many = {}
    for name, value in reading.pcie_errors.items():
        grown, minutes = memory.grown(device, f"pcie {name}", value)
        noise = 0 if "fatal" in name else _REPLAYS_PER_MINUTE * max(1.0, minutes)
        if grown > noise:
            many[name] = grown
    if many:
        told = ", ".join(f"{number} {name}" for name, number in many.items())
        total = sum(reading.pcie_errors[name] for name in many)
        yield judge.finding("gpu.pcie_errors", device, f"more since: {told}", total, told=told)


def _links(judge: Judge, reading: Reading, memory: Memory, config: NvmlProbe) -> Iterator[Finding]:
    device = reading.device
    for link, counters in reading.link_counters.items():
        grown: dict[str, int] = {}
        for name, value in counters.items():
            more, minutes = memory.grown(device, f"link {link} {name}", value)
            noise = _CRC_PER_MINUTE * minutes if name == "crc" else 0
            if more > noise:
                grown[name] = more
        if not grown:
            continue
        seen = f"NVLink {link} since the last look: " + ", ".join(
            f"{name} +{more}" for name, more in grown.items()
        )
        failed = "recovery_failed" in grown
        code = "gpu.nvlink_recovery_failed" if failed else "gpu.nvlink_errors"
        yield judge.finding(code, device, seen, link=link)


def _links_expected(reading: Reading, all_readings: Sequence[Reading], config: NvmlProbe) -> int:
    """How many links should be up: as configured, as the model has, or as the best neighbour has.

    Boards whose links are wired to nothing (PCIe cards without a bridge, a single GPU passed to a
    virtual machine) have none up, nor have their neighbours. Where NVSwitches should be behind
    them, the fabric's state tells.
    """
    if config.nvlinks != "model":
        return config.nvlinks
    name = reading.device.name
    best = max(sum(other.links_up.values()) for other in all_readings if other.device.name == name)
    for pattern, links in _LINKS_BY_MODEL:
        if best and re.search(pattern, name):
            return links
    return best


def _fabric(judge: Judge, reading: Reading, memory: Memory, config: NvmlProbe) -> Iterator[Finding]:
    """NVSwitch systems: registered (state 3) with success, and no bad bit in the health mask."""
    fabric = reading.fabric
    if fabric is None or fabric.state == 0:
        return
    seen = (
        f"nvmlDeviceGetGpuFabricInfoV: state {fabric.state}, status {fabric.status}, "
        f"healthMask 0x{fabric.mask:x}, healthSummary {fabric.summary}"
    )
    device = reading.device
    if fabric.state != 3:
        yield judge.finding("gpu.fabric_not_ready", device, seen, fabric.state, state=fabric.state)
        return
    yes = {name: (fabric.mask >> shift) & 3 == 1 for name, shift in _HEALTH_SHIFTS.items()}
    wrong = (fabric.mask >> 8) & 0xF  # 1 is "none", 0 "not supported"
    bad = [name for name in ("route unhealthy", "access time-out") if yes[name]]
    bad += [f"incorrect configuration {wrong}"] if wrong > 1 else []
    bad += [f"status {fabric.status}"] if fabric.status else []
    bad += ["summary unhealthy"] if fabric.summary == 2 else []
    weak = [name for name in ("degraded bandwidth", "route recovery") if yes[name]]
    weak += ["limited capacity"] if fabric.summary == 3 else []
    if bad:
        what = ", ".join(bad)
        yield judge.finding("gpu.fabric_unhealthy", device, seen, what, what=what)
    elif weak:
        what = ", ".join(weak)
        yield judge.finding("gpu.fabric_degraded", device, seen, what, what=what)


_HEALTH_SHIFTS = {
    "degraded bandwidth": 0,
    "route recovery": 2,
    "route unhealthy": 4,
    "access time-out": 6,
}
"""NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_*; each is two bits: 1 yes, 2 no, 0 not supported."""


def _settings(
    judge: Judge, reading: Reading, memory: Memory, config: NvmlProbe
) -> Iterator[Finding]:
    device = reading.device
    words = {0: "off", 1: "on"}
    for name, mode, wanted in (
        ("ecc", reading.ecc_mode, config.ecc),
        ("mig", reading.mig_mode, config.mig),
    ):
        if mode is None:
            continue
        current, pending = (words.get(value, str(value)) for value in mode)
        seen = f"{name.upper()} mode: {current}, pending: {pending}"
        if wanted not in ("any", current):
            yield judge.finding(
                f"gpu.{name}_mode", device, seen, current, now=current, wanted=wanted
            )
        if pending != current:
            yield judge.finding(f"gpu.{name}_mode_pending", device, seen, pending, pending=pending)
    if reading.persistence == 0:
        yield judge.finding("gpu.persistence_off", device, "nvmlDeviceGetPersistenceMode: 0")
    if reading.power_limit and reading.power_limit[0] < reading.power_limit[1]:
        limit, usual = (milliwatts // 1000 for milliwatts in reading.power_limit)
        seen = f"power limit {limit} W, default {usual} W"
        yield judge.finding("gpu.power_limit", device, seen, limit, limit=limit, usual=usual)
