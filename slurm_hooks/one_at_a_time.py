"""One health check at a time: two that overlap would tell everything twice.

Owns the mark of the one that runs.
"""

from __future__ import annotations

import os
import socket
import struct
import zlib

from slurm_hooks import config_file


def mark_running() -> socket.socket | None:
    """Return what marks this health check as the running one, or None if another is running.

    A name in the abstract namespace (unix(7)) lives in memory and is gone with its process, so
    no disk is touched and nothing stale is left. Any local user could take it as well: a holder
    of another user is none of ours and is ignored. Nodes of two clusters on one machine may have
    one name, but have not one configuration.
    """
    node = os.environ.get("SLURMD_NODENAME", "")[:80]
    which = zlib.crc32(os.fsencode(config_file.path()))
    name = f"\0slurm-hook-health-check {which:08x} {node}".encode("utf-8", "backslashreplace")[:107]
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        mark.bind(name)
        mark.listen(64)
        return mark
    except OSError:
        mark.setblocking(False)
    try:
        mark.connect(name)
        peer = mark.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        holder = struct.unpack("3i", peer)[1]
    except OSError:
        return mark
    return None if holder in (0, os.geteuid()) else mark
