"""What each GPU says of itself through NVML: asked call by call, so that no answer hides another.

Owns the calls; what the answers mean belongs to ``nvml_judgement``. An answer that a GPU does not
have (NOT_SUPPORTED and its kin) is None, never a fault.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

from slurm_hooks.frozen import frozen

LOST, RESET_REQUIRED, INTERRUPTS, INFOROM = 15, 16, 11, 14
"""NVML_ERROR_GPU_IS_LOST, RESET_REQUIRED, IRQ_ISSUE, CORRUPTED_INFOROM (nvml.h)."""

_NOT_SUPPORTED = frozenset({3, 13})
"""NVML_ERROR_NOT_SUPPORTED and FUNCTION_NOT_FOUND: will not change while the driver is loaded."""

_NO_ANSWER = frozenset({2, 4, 6, 21, 22, 25, 26, 27, 29})
"""Codes that say a question does not fit here (argument, permission, no data, version, state)."""

BLACKWELL = 10
"""NVML_DEVICE_ARCH_BLACKWELL; from it on NVLink errors are counted in other fields (nvml.h)."""

_RECOVERY_ACTION, _LINK_COUNT, _SLOWDOWN_LIMIT, _LINK_STATE = 230, 91, 194, 165
_LINK_UP = frozenset({1, 2})
"""Active, and asleep to save power (NVML_NVLINK_STATE_*)."""

_COUNTERS = {"replay": 161, "recovery": 162, "crc": 163}
_COUNTERS_NVLINK5 = {"recovery": 213, "recovery_failed": 214, "integrity": 211, "rcv": 208}

_PCIE_ERRORS = {
    "NAKs received": 174,
    "receiver errors": 175,
    "bad TLPs": 176,
    "NAKs sent": 177,
    "bad DLLPs": 178,
    "non-fatal errors": 179,
    "fatal errors": 180,
    "LCRC errors": 182,
    "lane errors": 183,
}
"""NVML_FI_DEV_PCIE_COUNT_*: 173 is the sum of the correctable ones, 181 counts requests that a
device does not support, which is a question of software."""

MAX_LINKS = 36
"""NVML_NVLINK_MAX_LINKS."""


@frozen
class Device:
    """Which GPU: NVML's index, and as far as known what others call it.

    ``minor`` is the N of /dev/nvidiaN, ``pci`` an address like ``0000:3b:00.0``.
    """

    index: int
    minor: int | None = None
    uuid: str | None = None
    pci: str | None = None
    name: str = ""

    @property
    def key(self) -> str:
        """What its memory is kept under between runs."""
        return self.uuid or f"index {self.index}"


@frozen
class Fabric:
    """nvmlDeviceGetGpuFabricInfoV: state, the registration's status, health mask and summary."""

    state: int
    status: int
    mask: int
    summary: int


@frozen
class Reading:
    """A GPU's answers. None: it does not say. Temperatures in Celsius, power in milliwatts.

    ``errors`` has the NVML code by function for each call that failed in earnest.
    """

    device: Device
    errors: Mapping[str, int] = field(default_factory=dict)
    recovery_action: int | None = None
    ecc_mode: tuple[int, int] | None = None
    ecc_uncorrectable: int | None = None
    dram_uncorrectable: int | None = None
    sram_uncorrectable: int | None = None
    sram_aggregate: int | None = None
    sram_threshold_exceeded: bool = False
    remapped: tuple[int, int, int, int] | None = None
    banks_without_spare: int | None = None
    retired_pending: int | None = None
    retired_pages: tuple[int, int] | None = None
    slow: int | None = None
    hot: str | None = None
    pcie_width: tuple[int, int] | None = None
    pcie_generation: tuple[int, int] | None = None
    pcie_replays: int | None = None
    pcie_errors: Mapping[str, int] = field(default_factory=dict)
    utilization: int | None = None
    links_up: Mapping[int, bool] = field(default_factory=dict)
    link_counters: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    fabric: Fabric | None = None
    persistence: int | None = None
    mig_mode: tuple[int, int] | None = None
    power_limit: tuple[int, int] | None = None


class Gone(Exception):
    """The GPU answers nothing any more: lost, or in need of a reset."""


class Gpu:
    """Asks one GPU; remembers which functions it does not support and which failed."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml = nvml
        self._handle = handle
        self._skip: frozenset[str] = frozenset()
        self.unsupported: set[str] = set()
        self.errors: dict[str, int] = {}

    def skip(self, functions: Iterable[str]) -> None:
        """Do not ask these: an earlier run found that no GPU of this model supports them."""
        self._skip = frozenset(functions)
        self.unsupported |= self._skip

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return the answer of ``nvmlDeviceGet<function>``, or None.

        Raises:
            Gone: the GPU is lost or needs a reset; nothing else is worth asking.
        """
        if function in self._skip:
            return None
        call = getattr(self.nvml, "nvmlDeviceGet" + function, None)
        if call is None:
            return None
        try:
            return call(self._handle, *arguments)
        except self.nvml.NVMLError as error:
            code = int(error.value)
        if code in _NOT_SUPPORTED:
            self.unsupported.add(function)
        elif code not in _NO_ANSWER:
            self.errors[function] = code
        if code in (LOST, RESET_REQUIRED):
            raise Gone
        return None

    def fields(self, wanted: list[tuple[int, int]]) -> dict[tuple[int, int], int]:
        """Return the field values among ``wanted`` (field id, scope id) that the GPU has."""
        answers = self.ask("FieldValues", wanted) if wanted else None
        return {
            key: _field_number(answer)
            for key, answer in zip(wanted, answers or (), strict=False)
            if answer.nvmlReturn == 0
        }


def identify(gpu: Gpu, index: int) -> Device:
    """Return which GPU this is.

    Raises:
        Gone: it does not say any more.
    """
    pci = gpu.ask("PciInfo")
    address = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0" if pci else None
    return Device(
        index, gpu.ask("MinorNumber"), gpu.ask("UUID"), address, str(gpu.ask("Name") or "")
    )


def read(gpu: Gpu, device: Device) -> Reading:
    """Ask everything; what was answered before the GPU went away is kept."""
    answers: dict[str, Any] = {}
    with contextlib.suppress(Gone):
        for part in (_condition, _memory, _speed, _pcie, _links, _settings):
            part(gpu, answers)
    return Reading(device=device, errors=dict(gpu.errors), **answers)


def slow_reasons(gpu: Gpu) -> int | None:
    """Return the bits of nvmlDeviceGetCurrentClocksEventReasons (ThrottleReasons before R535)."""
    reasons: int | None = gpu.ask("CurrentClocksEventReasons")
    if reasons is None:
        reasons = gpu.ask("CurrentClocksThrottleReasons")
    return reasons


def _condition(gpu: Gpu, answers: dict[str, Any]) -> None:
    wanted = (_RECOVERY_ACTION, _LINK_COUNT, _SLOWDOWN_LIMIT, *_PCIE_ERRORS.values())
    fields = gpu.fields([(number, 0) for number in wanted])
    answers["pcie_errors"] = {
        name: fields[number, 0] for name, number in _PCIE_ERRORS.items() if (number, 0) in fields
    }
    answers["recovery_action"] = fields.get((_RECOVERY_ACTION, 0))
    _temperature(gpu, answers, fields.get((_SLOWDOWN_LIMIT, 0)))
    answers["links_up"] = dict.fromkeys(range(fields.get((_LINK_COUNT, 0), 0)), True)


def _memory(gpu: Gpu, answers: dict[str, Any]) -> None:
    nvml = gpu.nvml
    mode = gpu.ask("EccMode")
    answers["ecc_mode"] = tuple(mode) if mode else None
    if mode is None or mode[0]:
        kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        answers["ecc_uncorrectable"] = gpu.ask("TotalEccErrors", kind, nvml.NVML_VOLATILE_ECC)
        if answers["ecc_uncorrectable"]:
            for name, place in (("dram", 2), ("sram", 7)):  # NVML_MEMORY_LOCATION_DRAM, _SRAM
                answers[f"{name}_uncorrectable"] = gpu.ask(
                    "MemoryErrorCounter", kind, nvml.NVML_VOLATILE_ECC, place
                )
        status_kind = getattr(nvml, "c_nvmlEccSramErrorStatus_v1_t", None)
        status = status_kind() if status_kind else None
        if status and gpu.ask("SramEccErrorStatus", ctypes.byref(status)) is not None:
            answers["sram_aggregate"] = status.aggregateUncParity + status.aggregateUncSecDed
            answers["sram_threshold_exceeded"] = bool(status.bThresholdExceeded)
    answers["remapped"] = gpu.ask("RemappedRows")
    histogram = gpu.ask("RowRemapperHistogram")
    answers["banks_without_spare"] = histogram.none if histogram else None
    answers["retired_pending"] = gpu.ask("RetiredPagesPendingStatus")
    pages = [gpu.ask("RetiredPages", cause) for cause in (0, 1)]  # single-bit, double-bit
    if None not in pages:
        answers["retired_pages"] = tuple(len(found) for found in pages)


def _speed(gpu: Gpu, answers: dict[str, Any]) -> None:
    answers["slow"] = slow_reasons(gpu)
    rates = gpu.ask("UtilizationRates")
    answers["utilization"] = rates.gpu if rates else None


def _temperature(gpu: Gpu, answers: dict[str, Any], slowdown_limit: int | None) -> None:
    """Say ``hot`` where the device is at its own slowdown point.

    Hopper and later tell the margin left and at which margin they slow down (field 194, at or
    below zero); older ones a temperature and a threshold (nvml.h).
    """
    if slowdown_limit is not None:
        margin = gpu.ask("MarginTemperature")
        if margin is not None:
            if margin <= slowdown_limit:
                answers["hot"] = f"margin {margin} C, slows down at {slowdown_limit} C"
            return
    celsius = gpu.ask("Temperature", 0)
    threshold = gpu.ask("TemperatureThreshold", 1)  # NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    if celsius is not None and threshold and celsius >= threshold:
        answers["hot"] = f"{celsius} C, slows down at {threshold} C"


def _pcie(gpu: Gpu, answers: dict[str, Any]) -> None:
    for name, what in (("pcie_width", "Width"), ("pcie_generation", "Generation")):
        now, most = gpu.ask("CurrPcieLink" + what), gpu.ask("MaxPcieLink" + what)
        answers[name] = (now, most) if now and most else None
    answers["pcie_replays"] = gpu.ask("PcieReplayCounter")


def _links(gpu: Gpu, answers: dict[str, Any]) -> None:
    """States and error counters of all NVLinks in one call, and the fabric behind them."""
    links = list(answers["links_up"])[:MAX_LINKS]
    newer = bool(links) and (gpu.ask("Architecture") or 0) >= BLACKWELL
    counters = _COUNTERS_NVLINK5 if newer else _COUNTERS
    ids = (_LINK_STATE, *counters.values())
    fields = gpu.fields([(wanted, link) for link in links for wanted in ids])
    states: dict[int, bool] = {}
    for link in links:
        state = fields.get((_LINK_STATE, link))
        if state is None:  # before R535 there is no such field
            state = gpu.ask("NvLinkState", link)
        if state is not None:
            states[link] = state in _LINK_UP
    answers["links_up"] = states
    answers["link_counters"] = {
        link: {
            name: fields[wanted, link]
            for name, wanted in counters.items()
            if (wanted, link) in fields
        }
        for link in links
    }
    answers["fabric"] = _fabric(gpu)


def _fabric(gpu: Gpu) -> Fabric | None:
    # The second name is version 2 in every nvidia-ml-py. Its layout is wrong before 12.570 (80
    # bytes of UUID for 16; 12.560.30 and 12.570.86 compared), hence setup.cfg's lower bound.
    for kind in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfoV_t"):
        structure = getattr(gpu.nvml, kind, None)
        info = structure() if structure else None
        if info is not None and gpu.ask("GpuFabricInfoV", ctypes.byref(info)) is not None:
            return Fabric(
                info.state, info.status, info.healthMask, getattr(info, "healthSummary", 0)
            )
    return None


def _settings(gpu: Gpu, answers: dict[str, Any]) -> None:
    answers["persistence"] = gpu.ask("PersistenceMode")
    mig = gpu.ask("MigMode")
    answers["mig_mode"] = tuple(mig) if mig else None
    limit, usual = gpu.ask("PowerManagementLimit"), gpu.ask("PowerManagementDefaultLimit")
    answers["power_limit"] = (limit, usual) if limit and usual else None


def _field_number(answer: Any) -> int:
    """A field's value by its type (nvmlValueType_t)."""
    names = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    kind = answer.valueType
    return int(getattr(answer.value, names[kind] if kind < len(names) else "ullVal"))
