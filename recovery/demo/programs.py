"""Slurm's and munge's programs on this machine: what a private cluster needs, and where it lies."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

PROGRAMS = ("slurmctld", "slurmd", "scontrol", "sinfo", "sbatch", "srun", "squeue", "munged")

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Daemons lie in sbin, which is not on every user's PATH."""


class ClusterError(Exception):
    """The private cluster cannot be had, or something that was waited for did not happen."""


def find_programs() -> dict[str, str]:
    """Return the paths of Slurm's and munge's programs, by name.

    Raises:
        ClusterError: some are missing; the text says which and how to get them.
    """
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    found = {name: shutil.which(name, path=path) for name in PROGRAMS}
    missing = [name for name, where in found.items() if where is None]
    if missing:
        raise ClusterError(
            f"no private cluster without {', '.join(missing)}: "
            "apt-get install slurmctld slurmd slurm-client munge"
        )
    return {name: where for name, where in found.items() if where is not None}


def release(slurmctld: str) -> tuple[int, int]:
    """Return a slurmctld's release, such as ``(22, 5)`` for 22.05.8.

    Raises:
        ClusterError: it does not say.
    """
    said = subprocess.run([slurmctld, "-V"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"(\d+)\.(\d+)", said)
    if match is None:
        raise ClusterError(f"{slurmctld} -V says {said[:60]!r}")
    return int(match[1]), int(match[2])
