"""The cluster of docker-compose.yml, driven from outside: up, commands in it, faults, down.

    >>> with Containers(["docker-compose", "-p", "try"], folder) as cluster:    # doctest: +SKIP
    ...     cluster.up()
    ...     cluster.run("n2", "fake-gpus", "break", "3")
    ...     cluster.kill("n3")

Speaks to a Docker engine on this machine, as root: files of the shared volume are read where the
engine keeps them, and one node gets the volume through a FUSE mount that can be made to hang.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from recovery.demo.programs import SYSTEM_PATH, ClusterError
from recovery.demo.waiting import wait_for
from recovery.slurm.cli import CliScheduler

T = TypeVar("T")

NODES = ("n1", "n2", "n3", "n4")
SERVICES = ("dbd", "controller", *NODES)

SLOW_NODE = "n4"
"""The node whose shared volume can be made to hang."""

UP_SECONDS = 300.0
POLL_SECONDS = 0.3
"""Each look is a process or two: two cores have a cluster to run beside it."""

_SLURM_COMMANDS = ("scontrol", "squeue", "sinfo")


class Containers:
    """The cluster, from ``up`` to the end of the ``with``.

    ``compose`` is the compose command with its project (``-p NAME``) and its file; ``folder``, an
    empty one, holds what is needed on this machine beside the containers.
    """

    def __init__(self, compose: Sequence[str], folder: Path) -> None:
        self.project = compose[compose.index("-p") + 1]
        self._override = folder / "one-node-by-fuse.yml"
        self._compose = (*compose, "-f", str(self._override))
        self._shared = folder / "shared"
        self._bin = folder / "bin"
        self._server: subprocess.Popen[bytes] | None = None
        self._ids: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._shared.mkdir()
        self._bin.mkdir()
        self._override.write_text(
            f'services: {{{SLOW_NODE}: {{volumes: ["{self._shared}:/data"]}}}}\n', encoding="utf-8"
        )

    def __enter__(self) -> Containers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    # From nothing to a cluster, and back

    def up(self) -> None:
        """Build the image if it lacks, start everything, and wait until all of it is healthy.

        Raises:
            ClusterError: it cannot be started, or is not healthy in time.
        """
        self._composed("up", "--no-start")
        self._serve()
        self._composed("up", "-d")
        self._ids = {one: self._composed("ps", "-q", one).strip() for one in SERVICES}
        for command in _SLURM_COMMANDS:
            wrapper = self._bin / command
            call = f"docker exec {self._ids['controller']} {command}"
            wrapper.write_text(f'#!/bin/sh\nexec {call} "$@"\n', encoding="utf-8")
            wrapper.chmod(0o755)
        self.wait(self._healthy, UP_SECONDS, "every container is healthy")

    def down(self) -> None:
        """Remove containers, network, volumes and image; safe to repeat."""
        self.hang(False)
        self._composed("down", "-v", "--rmi", "all", "--remove-orphans", "-t", "5", check=False)
        if self._server is not None:
            _call(["umount", "-l", str(self._shared)], check=False)
            # Not left to end by itself: a mount namespace of anybody's may still hold the mount.
            self._server.kill()
            self._server.wait()
            self._server = None

    def left(self) -> list[str]:
        """Return what the engine still has of this project."""
        label = f"label=com.docker.compose.project={self.project}"
        asked = {
            "container": ("ps", "--all"),
            "network": ("network", "ls"),
            "volume": ("volume", "ls"),
        }
        return [
            f"{kind} {name}"
            for kind, command in asked.items()
            for name in _call(["docker", *command, "-q", "--filter", label]).split()
        ]

    # Commands

    def run(self, service: str, *argv: str, check: bool = True, options: Sequence[str] = ()) -> str:
        """Return what a command printed in a container; ``options`` are docker exec's own."""
        return _call(["docker", "exec", *options, self._ids[service], *argv], check=check)

    def scheduler(self) -> CliScheduler:
        """Return a Scheduler that calls Slurm's commands in the controller's container."""
        environment = {**os.environ, "PATH": f"{self._bin}:{os.environ['PATH']}:{SYSTEM_PATH}"}
        return CliScheduler(environment=environment, timeout_seconds=30.0)

    def file(self, *parts: str) -> Path:
        """Return a path of the shared volume, as it lies on this machine."""
        return self._volume().joinpath(*parts)

    def wait(self, condition: Callable[[], T | None], timeout_seconds: float, what: str) -> T:
        """Return the first true value of ``condition``.

        Raises:
            ClusterError: none came in time.
        """
        return wait_for(condition, timeout_seconds, what, poll_seconds=POLL_SECONDS)

    def logs(self, *services: str) -> str:
        """Return the last lines of these containers, or of all."""
        return self._composed("logs", "--tail=60", "--no-color", *services, check=False)

    # Faults

    def kill(self, service: str) -> None:
        """End every process of a container at once, as a power failure does."""
        _call(["docker", "kill", self._ids[service]])

    def start(self, service: str) -> None:
        """Start a container that was killed."""
        _call(["docker", "start", self._ids[service]])

    def cut_off(self, service: str, cut: bool = True) -> None:
        """Take a container's network away, or give it back; its processes run on."""
        network, container = f"{self.project}_cluster", self._ids[service]
        if cut:
            form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
            self._addresses[service] = _call(["docker", "inspect", "-f", form, container]).strip()
            _call(["docker", "network", "disconnect", network, container])
        else:
            address = self._addresses[service]
            _call(["docker", "network", "connect", "--ip", address, network, container])

    def hang(self, hung: bool = True) -> None:
        """Make each access of SLOW_NODE to the shared volume block, or end that."""
        if self._server is not None:
            self._server.send_signal(signal.SIGSTOP if hung else signal.SIGCONT)

    # Inside

    def _composed(self, *argv: str, check: bool = True) -> str:
        return _call([*self._compose, *argv], check=check, timeout_seconds=1200)

    def _volume(self) -> Path:
        name = f"{self.project}_data"
        return Path(_call(["docker", "volume", "inspect", "-f", "{{.Mountpoint}}", name]).strip())

    def _serve(self) -> None:
        self._server = subprocess.Popen(["bindfs", "-f", str(self._volume()), str(self._shared)])
        self.wait(self._shared.is_mount, 30, "bindfs serves the volume")

    def _healthy(self) -> bool:
        form = "{{.State.Status}} {{.State.Health.Status}}"
        states = _call(["docker", "inspect", "-f", form, *self._ids.values()]).splitlines()
        for service, state in zip(self._ids, states, strict=True):
            if not state.startswith("running"):
                raise ClusterError(f"container {service} has ended\n{self.logs()}")
        return set(states) == {"running healthy"}


def _call(argv: Sequence[str], check: bool = True, timeout_seconds: float = 60.0) -> str:
    finished = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        timeout=timeout_seconds,
        check=False,
    )
    if check and finished.returncode != 0:
        said = (finished.stderr or finished.stdout).strip()
        raise ClusterError(f"{' '.join(argv)}: status {finished.returncode}: {said[-2000:]}")
    return finished.stdout
