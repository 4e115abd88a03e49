"""GPUs for a machine that has none: a ``libnvidia-ml.so.1`` that answers from a state file.

    >>> library = build(Path("/tmp/rehearsal"))              # doctest: +SKIP
    >>> write_state(Path("/tmp/rehearsal/n1.json"),          # doctest: +SKIP
    ...             {"count": 8, "gpus": {"3": {"lost": True}}})
    >>> environment(library, Path("/tmp/rehearsal/n1.json")) # doctest: +SKIP
    {'LD_LIBRARY_PATH': '/tmp/rehearsal', 'FAKE_NVML_STATE': '/tmp/rehearsal/n1.json'}

A program started with that environment finds eight GPUs through the real pynvml, of which GPU 3
has fallen off the bus. The file is read again whenever it has changed.

Keys of the state, for the node:

==========================  =======================================================================
``count``                   how many GPUs (8), all healthy HGX H100 unless said otherwise
``every``                   a table of settings for every GPU, such as one of the profiles below
``gpus``                    ``{"3": {…}}``: settings of one GPU, by its **minor number**
``minor_order``             minor numbers in the order of NVML's index: ``[4, 5, 6, 7, 0, 1, 2, 3]``
``driver_mismatch``         true: nvmlInit says LIB_RM_VERSION_MISMATCH
``driver_not_loaded``       true: nvmlInit says DRIVER_NOT_LOADED, as it does without the file
``driver_version``          text
``hang_seconds, hang_in``   sleep that long in the function named (``nvmlInit``; for a GPU
                            ``nvmlDeviceGetHandleByIndex``); a version suffix may be left out
``crash, crash_in``         die of SIGSEGV there
``errors``                  ``{"nvmlDeviceGetCount": 999}``: the code a function answers
``log``                     a file that gets a line ``function minor`` for each call about a GPU
==========================  =======================================================================

and for a GPU (``hang_*``, ``crash*`` and ``errors`` as above):

==========================  =======================================================================
``lost``                    every call says GPU_IS_LOST
``reset_required``          every call says RESET_REQUIRED
``error``                   every call says this code
``absent``                  not enumerated at all
``not_supported``           function names that say NOT_SUPPORTED
``fields_not_supported``    field ids that do
``fields``                  ``{"230": 1}`` or by link ``{"161": {"4": 12}}``: a field's value
``arch, name, uuid, pci``   7 Ampere, 8 Ada, 9 Hopper, 10 Blackwell; ``0000:3b:00.0``
``recovery_action``         field 230
``ecc_mode, ecc_pending``   1 on, 0 off
``[ecc|sram]_[un]correctable[_aggregate]``
                            error counts of DRAM and SRAM
``sram_threshold_exceeded`` true
``remap_pending, remap_failed, remap_correctable, remap_uncorrectable, remap_banks_without_spare``
                            row remapping (Ampere and later)
``retired_pending, retired_sbe, retired_dbe``
                            page retirement (named: supported)
``thermal, power_brake``    true: slowed down for that reason; else ``clocks_event_reasons`` bits
``temperature, temperature_margin, temperature_[shutdown|slowdown|mem_max|gpu_max]``
                            degrees Celsius
``utilization``             percent
``processes, processes_graphics``
                            pids that compute or draw on it, as a list
``pcie_gen, pcie_gen_max, pcie_width, pcie_width_max, pcie_replay``
                            numbers; ``pcie_errors`` by name, such as ``{"fatal": 1}``
``nvlinks, nvlink_down``    how many links; which of them are down, as a list
``nvlink_errors``           ``{"4": {"replay": 12, "recovery": 1, "crc": 9}}``
``fabric_state, fabric_status, fabric_health_mask, fabric_health_summary``
                            as nvmlDeviceGetGpuFabricInfoV has them
``persistence, mig_mode, mig_pending``
                            1 on, 0 off
``power_limit, power_limit_default, power_limit_enforced, power_usage``
                            milliwatts
==========================  =======================================================================
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LIBRARY = "libnvidia-ml.so.1"

_HERE = Path(__file__).parent
_SOURCES = tuple(sorted(_HERE.glob("fake_nvml*.c")))
_HEADER = _HERE / "fake_nvml.h"

_FLAGS = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread")
_COMPILE_SECONDS = 120

HOPPER: Mapping[str, Any] = {"arch": 9, "name": "NVIDIA H100 80GB HBM3"}
AMPERE: Mapping[str, Any] = {
    "arch": 7,
    "name": "NVIDIA A100-SXM4-80GB",
    "power_limit": 400_000,
    "power_limit_default": 400_000,
}
BLACKWELL: Mapping[str, Any] = {
    "arch": 10,
    "name": "NVIDIA B200",
    "power_limit": 1_000_000,
    "power_limit_default": 1_000_000,
}
MIG: Mapping[str, Any] = {
    **HOPPER,
    "mig_mode": 1,
    "not_supported": ["nvmlDeviceGetUtilizationRates"],
}
"""With MIG on, utilisation is not told for the whole device."""

VGPU: Mapping[str, Any] = {
    "arch": 8,
    "name": "NVIDIA L40S-48Q",
    "nvlinks": 0,
    "fields_not_supported": [91, 193, 194, 230],
    "not_supported": [
        "nvmlDeviceGetCurrPcieLinkGeneration",
        "nvmlDeviceGetCurrPcieLinkWidth",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetEccMode",
        "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetMaxPcieLinkGeneration",
        "nvmlDeviceGetMaxPcieLinkWidth",
        "nvmlDeviceGetMemoryErrorCounter",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetPcieReplayCounter",
        "nvmlDeviceGetPersistenceMode",
        "nvmlDeviceGetPowerManagementDefaultLimit",
        "nvmlDeviceGetPowerManagementLimit",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetRowRemapperHistogram",
        "nvmlDeviceGetSramEccErrorStatus",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetTemperatureThreshold",
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetTotalEccErrors",
    ],
}
"""A guest's vGPU: most of what a physical device tells is absent."""


class BuildError(Exception):
    """The library could not be compiled; the text is one line that says what to do."""


def build(folder: Path) -> Path:
    """Put the library into ``folder`` (made if missing) and return its path.

    It is compiled once for each version of its source: later calls copy it from the user's cache
    folder (XDG_CACHE_HOME, else ~/.cache). Several may build at once.

    Raises:
        BuildError: there is no C compiler, or it refused the source.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / LIBRARY
    cache = _cache_folder()
    cached = cache / f"{LIBRARY}-{_version()}" if cache else None
    if cached and cached.is_file():
        _place(cached, target)
    else:
        _compile(target)
        if cached:
            _place(target, cached)
    return target


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Replace the state file at ``path`` at one stroke, so that no reader sees half of it."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
        json.dump(state, file)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def environment(library: Path, state: Path) -> dict[str, str]:
    """Return the variables under which a program sees the GPUs that ``state`` describes."""
    return {"LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML_STATE": str(state)}


def _version() -> str:
    digest = hashlib.sha256(" ".join((*_FLAGS, platform.machine())).encode())
    for source in (*_SOURCES, _HEADER):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cache_folder() -> Path | None:
    """Return the user's own cache folder, or None where there is none that others cannot write."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "slurm-recovery"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except (OSError, RuntimeError):
        return None
    return folder if status.st_uid == os.geteuid() and not status.st_mode & 0o022 else None


def _place(source: Path, target: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".", delete=False) as file:
        file.write(source.read_bytes())
    Path(file.name).chmod(0o755)
    Path(file.name).replace(target)


def _compile(target: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise BuildError("no C compiler for the fake GPUs: install one (apt-get install gcc)")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
        output = Path(scratch) / LIBRARY
        command = [compiler, *_FLAGS, f"-Wl,-soname,{LIBRARY}", "-o", str(output)]
        command += [str(source) for source in _SOURCES]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise BuildError(
                f"{compiler} took over {_COMPILE_SECONDS} s for the fake GPUs"
            ) from None
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or [""]
            raise BuildError(
                f"{compiler} cannot build the fake GPUs ({lines[0].strip()[:200]}): "
                "install the C library's headers (apt-get install gcc libc6-dev)"
            )
        output.replace(target)
