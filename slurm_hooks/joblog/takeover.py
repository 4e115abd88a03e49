"""Which node reads a job's log when its batch host is lost, agreed through the spool.

Nothing tells an epilog that another node of its job is gone: on NODE_FAIL the other nodes' epilogs
run with exit 0:0, as after success (measured on 22.05). So the batch host's epilog lays a claim
into the spool's ``claims/`` before it reads; the next nodes of the list look for it, each a little
longer than the one before, and whoever then makes it with O_EXCL reads instead. A batch host that
comes late reads all the same: two readings of one log harm nobody.

A claim is a file named after the attempt that holds the name of the node. All of this blocks where
the spool hangs: it runs in children (``deadline``).
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from slurm_hooks.context import HookContext

FOLDER = "claims"

STANDBY_NODES = 2
"""Nodes after the batch host that stand by: of a thousand nodes, two wait."""

_PATIENCE_SECONDS = 2.0
"""How long the next node waits for the batch host's claim; the one after it twice as long."""

_LOOK_SECONDS = 0.1
_STALE_SECONDS = 3600.0
"""An older claim is an earlier job's of the same number: numbers wrap."""

_PRUNED_AT_ONCE = 256
_NAME_BYTES = 256


def claim(spool: Path, context: HookContext, wait_seconds: float = 0.0) -> bool:
    """Return whether this node is the one to read, after ``wait_seconds`` without another's claim.

    Raises:
        OSError: the spool takes no claim.
    """
    folder = spool / FOLDER
    path = folder / _name(context)
    ends = time.monotonic() + wait_seconds
    while True:
        owner = _owner(path)
        if owner is not None:
            return owner == context.node
        if time.monotonic() >= ends:
            break
        time.sleep(_LOOK_SECONDS)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o755)
    _prune(folder, path)
    try:
        # What decides is the file server, not a cached look: O_EXCL is atomic on NFS from v3 on.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    except FileExistsError:
        return _owner(path) == context.node
    with os.fdopen(descriptor, "wb") as file:
        file.write(context.node.encode())
    return True


def patience(position: int) -> float | None:
    """Return how long the node at ``position`` of the job's list waits; None if it never reads."""
    return _PATIENCE_SECONDS * position if 0 < position <= STANDBY_NODES else None


def _name(context: HookContext) -> str:
    job = context.job
    parts = (context.cluster, job.sluid, job.id, job.restart) if job else ()
    return ".".join(re.sub(r"[^A-Za-z0-9_-]", "_", str(part)) for part in parts if part is not None)


def _owner(path: Path) -> str | None:
    """The node that holds the claim; empty while it is being written, None where there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        old = time.time() - os.fstat(descriptor).st_mtime > _STALE_SECONDS
        return None if old else file.read(_NAME_BYTES).decode("utf-8", "replace")


def _prune(folder: Path, own: Path) -> None:
    """Take away claims that have had their time: this attempt's name, and a few others."""
    with os.scandir(folder) as entries:
        paths = [folder / one.name for one, _ in zip(entries, range(_PRUNED_AT_ONCE), strict=False)]
    for path in (own, *paths):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _STALE_SECONDS:
                path.unlink()
