"""How much processor and memory this node has, and how much of it is in use, as the kernel says."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from slurm_hooks.context import parse_indices
from slurm_hooks.frozen import frozen
from slurm_hooks.probes.kernel_files import names, number, text

_MAX_CPUS = 8192


@frozen
class Memory:
    """The node's memory in bytes. ``used`` is what no program could get, huge pages left out.

    ``shared`` (files in memory, /dev/shm) and ``kernel`` (what it cannot give back) are parts of
    it that outlive a process; ``huge_used`` is in huge pages of all sizes.
    """

    total: int
    used: int
    shared: int
    kernel: int
    huge_used: int


def read_memory(root: Path) -> Memory | None:
    """Return the memory below ``root``, or None where it is not told."""
    lines = (text(str(root / "proc/meminfo"), 16 * 1024) or "").splitlines()
    pairs = (re.match(r"(\w+):\s+(\d{1,18}) kB$", line.strip()) for line in lines)
    kib = {pair.group(1): int(pair.group(2)) for pair in pairs if pair}
    if "MemTotal" not in kib or "MemAvailable" not in kib:
        return None
    huge_total = huge_used = 0
    for folder in names(str(root / "sys/kernel/mm/hugepages")):
        size = re.fullmatch(r"hugepages-(\d{1,12})kB", folder)
        here = f"{root}/sys/kernel/mm/hugepages/{folder}"
        pages, free = number(f"{here}/nr_hugepages"), number(f"{here}/free_hugepages")
        if size and pages is not None and free is not None:
            huge_total += pages * int(size.group(1))
            huge_used += max(0, pages - free) * int(size.group(1))
    return Memory(
        total=kib["MemTotal"] * 1024,
        used=max(0, kib["MemTotal"] - kib["MemAvailable"] - huge_total) * 1024,
        shared=kib.get("Shmem", 0) * 1024,
        kernel=kib.get("SUnreclaim", 0) * 1024,
        huge_used=huge_used * 1024,
    )


def count_cpus(root: Path) -> int | None:
    """Return how many logical processors are online, or None where it is not told."""
    online = text(str(root / "sys/devices/system/cpu/online")) or ""
    return len(parse_indices(online)) or None


def read_load(root: Path) -> tuple[float, float] | None:
    """Return the load averages over 5 and 15 minutes, or None."""
    averages = re.match(r"[\d.]+ (\d+\.\d+) (\d+\.\d+) ", text(str(root / "proc/loadavg")) or "")
    return (float(averages.group(1)), float(averages.group(2))) if averages else None


def read_throttled(root: Path) -> dict[str, int]:
    """Return by processor for how many milliseconds it has been slowed by heat since it booted.

    Source: Linux kernel, intel_thermal_throttle.rst; other makers' processors do not tell.
    """
    folder = f"{root}/sys/devices/system/cpu"
    found = {}
    for cpu in names(folder)[:_MAX_CPUS]:
        if re.fullmatch(r"cpu\d+", cpu):
            here = f"{folder}/{cpu}/thermal_throttle"
            spent = number(f"{here}/core_throttle_total_time_ms")
            if spent is None and cpu == "cpu0":
                return {}  # none has it, and there may be hundreds to ask
            found[cpu] = spent or 0
    return found


@frozen
class Space:
    """A local file system: the folder asked about, and what is free of it for users."""

    folder: str
    size_bytes: int
    free_bytes: int
    inodes: int
    free_inodes: int


def read_spaces(folders: Iterator[Path]) -> list[Space]:
    """Return the file systems of ``folders``, each once; a folder that is not there is left out."""
    found: dict[int, Space] = {}
    for folder in folders:
        try:
            device, now = folder.stat().st_dev, os.statvfs(folder)
        except (OSError, ValueError):
            continue
        unit = now.f_frsize
        found.setdefault(
            device,
            Space(str(folder), now.f_blocks * unit, now.f_bavail * unit, now.f_files, now.f_favail),
        )
    return list(found.values())
