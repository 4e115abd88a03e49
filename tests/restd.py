"""A real slurmrestd beside a private cluster, as an account without rights that JWTs speak for."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from recovery.demo.cluster import Cluster
from recovery.demo.ports import Ports
from recovery.demo.programs import find_programs, release
from slurm_hooks.config import Slurm

SLURMRESTD = shutil.which("slurmrestd", path="/usr/sbin:/usr/local/sbin")

ACCOUNT = "daemon"
"""It is neither root nor SlurmUser, as whom slurmrestd refuses to run, nor nobody."""

RELEASE = release(find_programs()["slurmctld"])


@dataclass(frozen=True)
class Restd:
    """A slurmrestd; ``socket`` and ``port`` lead to the same process."""

    cluster: Cluster
    socket: Path
    port: int
    process: subprocess.Popen[bytes]

    @property
    def settings(self) -> Slurm:
        """How to reach it, with tokens that scontrol makes."""
        return Slurm(backend="rest", url=f"unix:{self.socket}", user="root")

    @property
    def tcp(self) -> Slurm:
        """The same over TCP, on loopback."""
        return replace(self.settings, url=f"http://127.0.0.1:{self.port}")


def jwt_lines(key: Path) -> str:
    """Make a key, and return the lines of slurm.conf that allow tokens signed with it."""
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(32))
    return f"AuthAltTypes=auth/jwt\nAuthAltParameters=jwt_key={key}"


@contextlib.contextmanager
def running(cluster: Cluster) -> Iterator[Restd]:
    """A slurmrestd for a cluster that allows tokens, ended with the ``with``."""
    assert SLURMRESTD is not None
    account = pwd.getpwnam(ACCOUNT)
    folder = cluster.folder / "rest"
    folder.mkdir(exist_ok=True)
    os.chown(folder, account.pw_uid, account.pw_gid)
    socket, ports = folder / "socket", Ports(1)
    (port,) = ports.numbers
    plugin = "openapi/v0.0.38" if RELEASE < (23, 2) else "openapi/slurmctld"
    argv = [SLURMRESTD, "-f", str(cluster.layout.slurm_conf), "-a", "rest_auth/jwt"]
    log = cluster.folder / "slurmrestd.log"
    with log.open("ab") as said:
        process = subprocess.Popen(
            [*argv, "-s", plugin, f"unix:{socket}", f"127.0.0.1:{port}"],
            # It takes callers' tokens only where it has been told to use them itself.
            env={**cluster.environment, "SLURM_JWT": "daemon"},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            user=account.pw_uid,
            group=account.pw_gid,
            extra_groups=[],
        )
    try:
        cluster.wait(
            lambda: socket.exists() or process.poll() is not None, 60, "slurmrestd listens"
        )
        assert process.poll() is None, log.read_text("utf-8", "replace")[-2000:]
        yield Restd(cluster, socket, port, process)
    finally:
        process.terminate()
        process.wait(30)
        socket.unlink(missing_ok=True)
        ports.close()
