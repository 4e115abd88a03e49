"""Which file is the configuration, and what stands in it, unparsed.

Apart from ``config`` so that a hook can have the file read while it loads what understands it.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # typing.TYPE_CHECKING without typing, which a quiet prolog has no time for
if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_NAME = "/etc/slurm/recovery.toml"

PATH_VARIABLE = "SLURM_RECOVERY_CONFIG"
"""Environment variable that names another file; a wrapper script of a hook may set it."""

SIZE_LIMIT_BYTES = 512 * 1024
"""Largest configuration file read; a real one is a few kilobytes."""


def name() -> str:
    """Return the file to read: SLURM_RECOVERY_CONFIG, else /etc/slurm/recovery.toml."""
    return os.environ.get(PATH_VARIABLE) or DEFAULT_NAME


def path() -> Path:
    """Return the file to read as a path."""
    from pathlib import Path

    return Path(name())


def read(path: Path) -> bytes:
    """Return a file's content, a byte more than ``SIZE_LIMIT_BYTES`` at most.

    Raises:
        OSError: as ``open`` and ``read`` do.
    """
    with path.open("rb") as source:
        return source.read(SIZE_LIMIT_BYTES + 1)
