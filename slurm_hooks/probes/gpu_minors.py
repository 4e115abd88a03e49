"""Which GPU is which: minor numbers (the N of /dev/nvidiaN) by PCI address, as the driver says.

Slurm counts GPUs by minor number, the kernel names them by address. The driver's files in /proc
take its locks, so they are read while nothing is known to be wrong, and remembered.
"""

from __future__ import annotations

import re
from pathlib import Path

PROC_GPUS = Path("/proc/driver/nvidia/gpus")

_GPUS_LIMIT = 128
_FILE_BYTES = 4096
_ADDRESS = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
_MINOR = re.compile(rb"^Device Minor:\s*(\d{1,4})\s*$", re.MULTILINE)


def read_minors(gpus: Path = PROC_GPUS) -> dict[str, int]:
    """Return minor numbers by address (``0000:3b:00.0``); nothing where there is no driver."""
    minors: dict[str, int] = {}
    try:
        folders = sorted(gpus.iterdir())
    except OSError:
        return {}
    from slurm_hooks.catalog.xid import canonical_pci  # only where there is a driver to ask

    for folder in folders[:_GPUS_LIMIT]:
        if not _ADDRESS.fullmatch(folder.name):
            continue
        try:
            with (folder / "information").open("rb") as source:
                match = _MINOR.search(source.read(_FILE_BYTES))
        except OSError:
            continue
        if match:
            minors[canonical_pci(folder.name)] = int(match[1])
    return minors
