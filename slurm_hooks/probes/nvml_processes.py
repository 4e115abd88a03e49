"""Which processes the driver itself counts on a GPU, by the GPU's minor number.

A process can have memory on a GPU without an open /dev/nvidiaN to show for it (one that was handed
to it over a socket, a context of a dying process), so what /proc shows is not all. NVML can hang as
long as the driver does: it is asked in a child, and where it does not answer nothing is concluded.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from slurm_hooks.deadline import run_one

_GPUS_LIMIT = 1024
_PIDS_LIMIT = 4096


def gpus_by_pid(minors: Collection[int], seconds: float) -> Mapping[int, tuple[int, ...]]:
    """Return by pid on which of the GPUs ``minors`` it runs; empty where NVML does not say.

    Source: nvml.h, nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetGraphicsRunningProcesses.
    """
    wanted = frozenset(minors)
    if not wanted:
        return {}
    outcome = run_one(lambda: json.dumps(_ask(wanted)).encode(), seconds)
    if outcome.status != "ok":
        return {}
    found: dict[int, set[int]] = {}
    for pid, minor in json.loads(outcome.output):
        found.setdefault(pid, set()).add(minor)
    return {pid: tuple(sorted(gpus)) for pid, gpus in found.items()}


def _ask(wanted: frozenset[int]) -> list[tuple[int, int]]:
    """Run in a child: pairs of pid and minor number."""
    import pynvml

    pynvml.nvmlInit()
    pairs: list[tuple[int, int]] = []
    for index in range(min(pynvml.nvmlDeviceGetCount(), _GPUS_LIMIT)):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            minor = int(pynvml.nvmlDeviceGetMinorNumber(handle))
            if minor in wanted:
                pairs += [(pid, minor) for pid in _pids(pynvml, handle)]
        except pynvml.NVMLError:
            continue  # a GPU that does not answer is the nvml probe's to tell of
    return pairs[:_PIDS_LIMIT]


def _pids(nvml: Any, handle: Any) -> set[int]:
    found: set[int] = set()
    for kind in ("Compute", "Graphics"):
        try:
            listed = getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses")(handle)
        except nvml.NVMLError:
            continue
        found |= {int(one.pid) for one in listed}
    return found
