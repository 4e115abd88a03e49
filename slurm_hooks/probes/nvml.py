"""The NVML probe: are all the GPUs there that Slurm counts on, and is each of them well?

Owns finding the GPUs and telling which is which: by device minor number, as Slurm does, never by
NVML's index. What each says is read in ``nvml_reading`` and judged in ``nvml_judgement``; how many
there should be is ``gres``' to say.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from types import ModuleType
from typing import Any

from slurm_hooks import catalog, gres
from slurm_hooks.context import boot_id
from slurm_hooks.probes import Look, Probe, Seen, Skipped
from slurm_hooks.probes.nvml_judgement import Judge, held_slowdowns
from slurm_hooks.probes.nvml_memory import Memory
from slurm_hooks.probes.nvml_reading import (
    Device,
    Gone,
    Gpu,
    Reading,
    identify,
    read,
    slow_reasons,
)
from slurm_hooks.record import Evidence, Finding

_RESAMPLE_SECONDS = 0.05
"""A slowdown is asked for twice before it is reported, so that the end of one is not caught."""

_MAX_GPUS = 1024

_DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND = 9, 12
_INIT_CODES = {
    _DRIVER_NOT_LOADED: "gpu.driver_not_loaded",
    _LIBRARY_NOT_FOUND: "gpu.library_missing",
    18: "gpu.driver_mismatch",
    27: "gpu.driver_not_ready",
}
"""nvmlReturn_t of nvmlInit: DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, LIB_RM_VERSION_MISMATCH,
NOT_READY."""


def look(look: Look) -> Seen:
    """Look at every GPU of this node.

    Raises:
        Skipped: there is no driver or no library, and nothing says that this node has GPUs.
    """
    try:
        pynvml = _imported_pynvml()
    except ImportError:
        raise Skipped("the Python package nvidia-ml-py is not installed") from None
    state = look.state
    expected = _expected(look)
    kept = {**state, "gres": expected.to_dict()} if expected and expected.files else dict(state)
    try:
        pynvml.nvmlInit()
        count = min(pynvml.nvmlDeviceGetCount(), _MAX_GPUS)
        driver = str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        return Seen((_no_driver(look, error, expected),), kept)

    boot = boot_id()
    earlier = state if (state.get("boot"), state.get("driver")) == (boot, driver) else {}
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    memory = Memory.recall(earlier, now, boot, look.config.probes.nvml.hold)
    remembered = _remembered(state)
    handles = _handles(pynvml, count)
    named = _name_the_silent(handles, remembered, earlier.get("count") == count)
    readings, unsupported = _read_all(pynvml, named, _unsupported(earlier), memory)

    job = look.context.job
    held = (job.id, frozenset(job.gpus)) if job else None
    judge = Judge(look.config.probes.nvml, memory, held)
    findings = [finding for reading in readings for finding in judge.judge(reading)]
    findings += judge.links_missing(readings)
    devices = tuple(reading.device for reading in readings)
    mig = any(reading.mig_mode and reading.mig_mode[0] for reading in readings)
    if expected and job and expected.count > len(devices) and _runs_in(job.id):
        # Constrained to the job's devices, NVML shows no others (cgroup.conf, ConstrainDevices).
        expected = gres.ConfiguredGpus(len(job.gpus), job.gpus)
    if expected and not mig:  # for Slurm each MIG instance is a GPU
        findings += _missing(judge, devices, expected, remembered)
    known = {device.minor: device for device in (*remembered, *devices) if device.minor is not None}
    kept |= {
        "boot": boot,
        "driver": driver,
        "count": count,
        "devices": [asdict(device) for device in known.values()],
        "unsupported": {name: sorted(functions) for name, functions in unsupported.items()},
        **memory.to_dict(),
    }
    models = sorted({device.name for device in devices if device.name})
    return Seen(tuple(findings), kept, {"driver": driver, "gpus": count, "models": models})


def _remembered(state: Mapping[str, Any]) -> tuple[Device, ...]:
    """Return the GPUs seen at earlier looks, also before a reboot; an unusable memory is none."""
    try:
        return tuple(Device(**known) for known in state.get("devices", ()))
    except TypeError:
        return ()


def _unsupported(earlier: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return by model the functions found to be unsupported; an unusable memory is none."""
    try:
        return {str(name): tuple(known) for name, known in earlier.get("unsupported", {}).items()}
    except (AttributeError, TypeError):
        return {}


def _expected(look: Look) -> gres.ConfiguredGpus | None:
    """Return the GPUs that this node should have; None where nobody says."""
    wanted = look.config.probes.nvml.expect_gpus
    if wanted != "gres":
        return gres.ConfiguredGpus(wanted)
    return gres.find(look.context.node, os.environ.get("SLURM_CONF"), gres.known_from(look.state))


def _no_driver(look: Look, error: Any, expected: gres.ConfiguredGpus | None) -> Finding:
    """Return the finding for an NVML that does not start.

    Without it a node looks like one that never had GPUs, so what Slurm and this probe know of the
    node decides which of the two it is.

    Raises:
        Skipped: nothing says that there should be GPUs.
    """
    code = int(error.value)
    job = look.context.job
    count = expected.count if expected else 0
    count = count or len(job.gpus if job else ()) or len(_remembered(look.state))
    if expected and expected.count == 0:
        count = 0
    if not count and code in (_DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND):
        raise Skipped(f"no GPUs here: {error}")
    seen = Evidence(
        "nvml", f"nvmlInit: {error} (NVML error {code})", key=f"{boot_id()}:init:{code}"
    )
    details = {"number": count or "some", "error": error}
    return catalog.finding(
        _INIT_CODES.get(code, "gpu.driver_error"), evidence=(seen,), details=details
    )


Found = tuple[Device, "Gpu | None", Mapping[str, int]]
"""A device, what asks it (None: NVML gives no handle), and the errors met so far."""


def _handles(nvml: Any, count: int) -> list[Found]:
    """Return each device that NVML counts; one whose handle fails hides no other."""
    found: list[Found] = []
    for index in range(count):
        try:
            gpu = Gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
        except nvml.NVMLError as error:
            found.append((Device(index), None, {"HandleByIndex": int(error.value)}))
            continue
        try:
            found.append((identify(gpu, index), gpu, {}))
        except Gone:
            found.append((Device(index), None, dict(gpu.errors)))
    return found


def _name_the_silent(
    found: Sequence[Found], remembered: Sequence[Device], same_count: bool
) -> list[Found]:
    """Name the GPUs that do not say who they are.

    By what stood at that index earlier in this boot; else by elimination among the minor numbers
    from zero on, where only one is left or where all others have the minor number of their index.
    """
    by_index = {device.index: device for device in remembered} if same_count else {}
    by_minor = {device.minor: device for device in remembered}
    told = {device.minor for device, _, _ in found if device.minor is not None}
    left = [minor for minor in range(len(found)) if minor not in told]
    silent = sum(device.minor is None for device, _, _ in found)
    in_order = all(device.minor in (None, device.index) for device, _, _ in found)
    named: list[Found] = []
    for device, gpu, errors in found:
        if device.minor is None:
            minor = left[0] if silent == len(left) == 1 else device.index if in_order else None
            known = by_index.get(device.index)
            if device.uuid:
                known = replace(device, minor=minor)
            elif known is None or known.minor in told:
                known = by_minor.get(minor) if minor is not None else None
            device = replace(known or Device(device.index, minor), index=device.index)
        named.append((device, gpu, errors))
    return named


def _read_all(
    nvml: Any,
    found: Sequence[Found],
    unsupported: Mapping[str, Sequence[str]],
    memory: Memory,
) -> tuple[list[Reading], dict[str, set[str]]]:
    """Return each GPU's reading, and by model the functions that none of its GPUs supports."""
    readings: list[Reading] = []
    learned: dict[str, set[str]] = {}
    for device, gpu, errors in found:
        if gpu is None:
            readings.append(Reading(device, errors=errors))
            continue
        gpu.skip(unsupported.get(device.name, ()))
        reading = read(gpu, device)
        if any(memory.would_be_held(what) for what in held_slowdowns(reading)):
            time.sleep(_RESAMPLE_SECONDS)
            try:
                again = slow_reasons(gpu)
            except Gone:
                again = None
            reading = replace(reading, slow=(reading.slow or 0) & (again or 0))
        readings.append(reading)
        learned[device.name] = learned.get(device.name, gpu.unsupported) & gpu.unsupported
    return readings, learned


def _runs_in(job: int) -> bool:
    from slurm_hooks.probes.process_table import runs_in  # where a GPU seems to be missing

    return runs_in(job)


def _missing(
    judge: Judge,
    devices: Sequence[Device],
    expected: gres.ConfiguredGpus,
    remembered: Sequence[Device],
) -> Iterator[Finding]:
    """Yield the GPUs that Slurm counts on and NVML does not have, by minor number if known."""
    number = expected.count - len(devices)
    if number <= 0:
        return
    seen = f"nvmlDeviceGetCount: {len(devices)}, configured in Slurm: {expected.count}"
    here = {device.minor for device in devices}
    by_minor = {device.minor: device for device in remembered}
    candidates = expected.minors or tuple(range(expected.count))
    gone = [minor for minor in candidates if minor not in here]
    details = {"found": len(devices), "expected": expected.count}
    if len(gone) != number or not (expected.minors or set(gone) <= set(by_minor)):
        evidence = (Evidence("nvml", seen),)
        yield catalog.finding("gpu.count", evidence=evidence, details={"number": number, **details})
        return
    for minor in gone:
        device = by_minor.get(minor, Device(-1, minor))
        yield judge.finding("gpu.missing", device, seen, minor, **details)


def _imported_pynvml() -> ModuleType:
    """Import pynvml without the half of its import that it has no use for.

    It takes find_library from ctypes.util and never calls it (12.535 to 13.615 read); for that,
    ctypes.util brings subprocess, shutil and tempfile: 16 of 28 ms, and a prolog delays every job.
    """
    name = "ctypes.util"
    if name in sys.modules:
        return importlib.import_module("pynvml")
    sys.modules[name] = stand_in = ModuleType(name)
    stand_in.__dict__["find_library"] = _find_library
    try:
        return importlib.import_module("pynvml")
    finally:
        del sys.modules[name]


def _find_library(name: str) -> str | None:
    """What the stand-in answers, should a version ask: the real one's answer."""
    from ctypes.util import find_library

    return find_library(name)


PROBE = Probe(
    name="nvml",
    look=look,
    needs="NVIDIA driver and nvidia-ml-py",
    cost="a few milliseconds for eight GPUs, and a driver start without persistence mode",
    codes=(
        "gpu.count",
        "gpu.driver_error",
        "gpu.driver_mismatch",
        "gpu.driver_not_loaded",
        "gpu.driver_not_ready",
        "gpu.drain_p2p",
        "gpu.ecc_dram_uncorrectable",
        "gpu.ecc_mode",
        "gpu.ecc_mode_pending",
        "gpu.ecc_sram_aggregate",
        "gpu.ecc_sram_uncorrectable",
        "gpu.ecc_uncorrectable",
        "gpu.fabric_degraded",
        "gpu.fabric_not_ready",
        "gpu.fabric_unhealthy",
        "gpu.hardware_slowdown",
        "gpu.inforom_corrupted",
        "gpu.interrupts",
        "gpu.library_missing",
        "gpu.lost",
        "gpu.mig_mode",
        "gpu.mig_mode_pending",
        "gpu.missing",
        "gpu.not_answering",
        "gpu.nvlink_down",
        "gpu.nvlink_errors",
        "gpu.nvlink_recovery_failed",
        "gpu.nvlinks_missing",
        "gpu.nvml_error",
        "gpu.pcie_errors",
        "gpu.pcie_generation",
        "gpu.pcie_replays",
        "gpu.pcie_width",
        "gpu.persistence_off",
        "gpu.power_brake",
        "gpu.power_limit",
        "gpu.recover_imex_domain",
        "gpu.recovery_action",
        "gpu.recovery_action_unknown",
        "gpu.remap_failed",
        "gpu.remap_no_spare",
        "gpu.remap_pending",
        "gpu.remapped_rows",
        "gpu.reset_required",
        "gpu.retired_pages",
        "gpu.retired_pages_pending",
        "gpu.software_thermal_slowdown",
        "gpu.sram_threshold",
        "gpu.thermal_slowdown",
        "gpu.too_hot",
    ),
)
