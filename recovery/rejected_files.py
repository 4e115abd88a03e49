"""What could not be accepted, moved to the spool's ``rejected``, unopened, its reason beside it.

Owns the names there, which a terminal survives whatever a file was called. Runs in the spool's
child (``spool_reader``).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from slurm_hooks.record import utc


def move(spool: int, source: str, folder: int, name: str, reason: str) -> None:
    """Move ``name`` out of ``folder``, which is the spool's folder ``source``, for ``reason``.

    ``spool`` and ``folder`` are descriptors.

    Raises:
        OSError: it stays where it is.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir("rejected", 0o755, dir_fd=spool)
    with opened("rejected", spool) as rejected:
        target = _free_name(name, rejected)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        # The reason first: a crash in between leaves a file that is judged again.
        why = os.open(f"{target}.why", flags, 0o644, dir_fd=rejected)
        try:
            os.write(why, f"{utc()} {source}/{shown(name)}: {reason}\n".encode())
        finally:
            os.close(why)
        os.rename(name, target, src_dir_fd=folder, dst_dir_fd=rejected)


def shown(name: str) -> str:
    """Return a file's name for people: a terminal must survive it, whatever it is made of."""
    return name if name.isprintable() else ascii(name)


@contextlib.contextmanager
def opened(folder: str | Path, parent: int | None = None) -> Iterator[int]:
    """Open a folder; below ``parent`` (a descriptor) no link is followed."""
    follow = 0 if parent is None else os.O_NOFOLLOW
    descriptor = os.open(
        folder, os.O_RDONLY | os.O_DIRECTORY | follow | os.O_CLOEXEC, dir_fd=parent
    )
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _free_name(name: str, rejected: int) -> str:
    """A name for a rejected file: its own where that is plain and free."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:120].lstrip(".") or "unnamed"
    if plain.endswith(".why"):
        plain += ".file"
    try:
        os.stat(plain, dir_fd=rejected, follow_symlinks=False)
    except FileNotFoundError:
        return plain
    return f"{plain}.{os.urandom(4).hex()}"
