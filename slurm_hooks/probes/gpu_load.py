"""How busy a job's GPUs are: a few samples of utilisation and power, and what they look like.

    >>> judged(Load(3, 100, 118.0, 700.0)), judged(Load(3, 0, 71.0, 700.0))
    ('spinning', 'idle')

A GPU whose kernel waits for a peer is fully busy to NVML, since a kernel runs, and draws little,
since nothing is computed. So it is power that tells work from waiting.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from slurm_hooks.probes.nvml_reading import Gone, Gpu, identify

_SAMPLES, _APART_SECONDS = 3, 0.2
"""A single sample may fall into the gap between two steps (NVML averages over 1/6 to 1 s)."""

IDLE_PERCENT, BUSY_PERCENT = 5, 90

SPINNING_SHARE = 0.5
"""Least share of the power limit that a GPU at work draws. A kernel that waits draws a fifth to a
third of it (H100: 120-250 of 700 W); training draws most of it."""


@dataclass(frozen=True)
class Load:
    """The highest of the samples of one GPU, by minor number; power in watts, None if not told."""

    gpu: int
    percent: int
    watts: float | None
    limit_watts: float | None

    @property
    def told(self) -> str:
        """The load in words."""
        power = f" at {self.watts:.0f}" if self.watts is not None else ""
        power += f" of {self.limit_watts:.0f} W" if power and self.limit_watts else ""
        return f"GPU {self.gpu} {self.percent} % busy{power}"


def judged(load: Load) -> str:
    """Return ``idle``, ``spinning`` or ``working``; what cannot be told apart works."""
    if load.percent <= IDLE_PERCENT:
        return "idle"
    if load.percent >= BUSY_PERCENT and load.watts is not None and load.limit_watts:
        return "spinning" if load.watts < SPINNING_SHARE * load.limit_watts else "working"
    return "working"


def read(minors: Collection[int]) -> list[Load]:
    """Return the load of the GPUs ``minors``; those that do not answer are left out.

    None answers where NVML does not start: the NVML probe says why.
    """
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        count = min(pynvml.nvmlDeviceGetCount(), 1024)
    except pynvml.NVMLError:
        return []
    gpus: dict[int, Gpu] = {}
    for index in range(count):
        try:
            gpu = Gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index))
            minor = identify(gpu, index).minor
        except (pynvml.NVMLError, Gone):
            continue
        if minor in minors and minor is not None:
            gpus[minor] = gpu
    loads: dict[int, Load] = {}
    for sample in range(_SAMPLES):
        time.sleep(_APART_SECONDS if sample else 0)
        for minor, gpu in list(gpus.items()):
            try:
                seen = _sample(gpu, minor)
            except Gone:
                del gpus[minor]
                loads.pop(minor, None)
                continue
            if seen is not None:
                loads[minor] = _higher(loads.get(minor), seen)
    return [loads[minor] for minor in sorted(loads)]


def _sample(gpu: Gpu, minor: int) -> Load | None:
    rates = gpu.ask("UtilizationRates")
    if rates is None:  # MIG: utilisation is not told of the whole device
        return None
    power, limit = gpu.ask("PowerUsage"), gpu.ask("EnforcedPowerLimit")
    return Load(
        minor,
        int(rates.gpu),
        None if power is None else power / 1000,
        None if limit is None else limit / 1000,
    )


def _higher(one: Load | None, other: Load) -> Load:
    if one is None:
        return other
    watts = [load.watts for load in (one, other) if load.watts is not None]
    percent = max(one.percent, other.percent)
    return Load(other.gpu, percent, max(watts, default=None), other.limit_watts)
