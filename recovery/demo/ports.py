"""TCP ports on loopback that are ours alone while we live, also before a daemon listens on them.

Finding a port free and letting a daemon bind it later leaves a gap in which another cluster finds
the same one. A claim is an abstract socket named after the port (unix(7)): the kernel gives a name
to one process, in this network namespace as the port itself, and takes it back when that ends.
"""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

_FIRST, _LAST = 20_000, 60_000
"""Where to look. Privileged and well-known ports lie below."""


class Ports:
    """Claims ``count`` free TCP ports; ``numbers`` are theirs until ``close``.

    Raises:
        OSError: no such number of free ports.
    """

    def __init__(self, count: int) -> None:
        self._claims: list[socket.socket] = []
        self.numbers: list[int] = []
        candidates = list(range(_FIRST, _first_ephemeral()))
        random.shuffle(candidates)
        for port in candidates:
            if len(self.numbers) == count:
                return
            claim = _claim(port)
            if claim is not None:
                self._claims.append(claim)
                self.numbers.append(port)
        if len(self.numbers) < count:
            self.close()
            raise OSError(errno.EADDRINUSE, f"fewer than {count} free ports above {_FIRST}")

    def close(self) -> None:
        """Give the ports back."""
        for claim in self._claims:
            claim.close()
        self._claims.clear()


def _claim(port: int) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0slurm-recovery/port/{port}")
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("", port))
    except OSError as error:
        claim.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return claim


def _first_ephemeral() -> int:
    """The kernel hands out ports from here on to connections: one of those could take ours."""
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(path.read_text(encoding="ascii").split()[0]) if path.exists() else _LAST
    return min(first, _LAST) if first > _FIRST + 100 else _LAST
