"""The daemons of a private cluster: munged, slurmctld, and a slurmd per node.

Owns how each is started, ended and found to be up. What they read lies there already
(``files``), and they are the keeper's children (``processes``).
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from recovery.demo import files
from recovery.demo.processes import Keeper, alive
from recovery.demo.programs import SYSTEM_PATH, ClusterError
from recovery.demo.slurm_conf import Layout
from recovery.demo.waiting import wait_for

READY_SECONDS = 60.0
"""A busy machine is slow; an idle one needs about four seconds for four nodes."""

POLL_SECONDS = 0.05

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Daemons:
    """The daemons of the cluster whose files lie at ``layout``.

    ``programs`` are paths by name, as ``find_programs`` returns them; slurmctld listens on
    ``controller_port`` of loopback.
    """

    def __init__(
        self,
        layout: Layout,
        keeper: Keeper,
        programs: Mapping[str, str],
        nodes: Sequence[str],
        controller_port: int,
    ) -> None:
        self._layout = layout
        self._keeper = keeper
        self._programs = programs
        self._nodes = nodes
        self._controller_port = controller_port
        self._pids: dict[str, int] = {}

    def start(self) -> None:
        """Start all of them, and wait until every node is idle.

        Raises:
            ClusterError: one ended at once, or they are not up in time.
        """
        self._start_munge()
        self._start_controller()
        for node in self._nodes:
            self.start_node(node)
        self._wait_until_up()
        self._wait(self._all_idle, "every node is idle")

    def start_node(self, node: str, *options: str, boot_id: str = "") -> None:
        """Start the node's slurmd; ``-b`` makes it say that the node has rebooted.

        With ``boot_id`` it has one of its own (root only).
        """
        conf = str(self._layout.slurm_conf)
        argv = [self._programs["slurmd"], "-D", "-N", node, "-f", conf, *options]
        if boot_id:
            booted = self._layout.node(node) / "boot_id"
            booted.write_text(f"{boot_id}\n")
            mount = f'mount --bind {shlex.quote(str(booted))} {_BOOT_ID} && exec "$@"'
            argv = ["/usr/bin/unshare", "--mount", "/bin/sh", "-c", mount, "sh", *argv]
        self._start(node, argv, self._layout.node(node) / "slurmd.err")

    def stop_node(self, node: str, signal_number: int = signal.SIGTERM) -> None:
        """Signal the node's slurmd and wait until it has ended; its job steps run on."""
        self._stop(node, signal_number)

    def reboot_node(self, node: str) -> None:
        """End the node's slurmd, and start one that sees another boot id."""
        self.stop_node(node)
        self.start_node(node, boot_id=str(uuid.uuid4()))

    def restart_controller(self, signal_number: int = signal.SIGTERM) -> None:
        """End slurmctld, start it again and wait until it answers."""
        self._stop("slurmctld", signal_number)
        self._start_controller()
        self._wait_until_up()

    def last_log_lines(self) -> str:
        """Return the end of each daemon's log."""
        return files.last_log_lines(self._layout, self._nodes)

    def _start_munge(self) -> None:
        folder = self._layout.munge_socket.parent
        argv = [self._programs["munged"], "--foreground", f"--socket={self._layout.munge_socket}"]
        argv += [f"--{name}-file={folder}/{name}" for name in ("key", "pid", "log", "seed")]
        self._start("munged", argv, folder / "err")
        self._wait_for("munged", self._layout.munge_socket.exists, "munged opens its socket")

    def _start_controller(self) -> None:
        argv = [self._programs["slurmctld"], "-D", "-f", str(self._layout.slurm_conf)]
        self._start("slurmctld", argv, self._layout.controller_log.with_suffix(".err"))

    def _wait_until_up(self) -> None:
        # Slurm's commands wait seconds between two tries: ask only once somebody listens.
        self._wait_for("slurmctld", self._controller_listens, "slurmctld listens on its port")
        self._wait(lambda: self._asked("scontrol", "ping").returncode == 0, "slurmctld answers")

    def _controller_listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._controller_port)) == 0

    def _all_idle(self) -> bool:
        dead = [name for name, pid in self._pids.items() if not alive(pid)]
        if dead:
            raise ClusterError(f"{', '.join(dead)} ended at once\n{self.last_log_lines()}")
        return self._asked("sinfo", "--noheader", "--format=%T").stdout.split() == ["idle"]

    def _asked(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self._programs[program], *arguments],
            env={"PATH": SYSTEM_PATH, "SLURM_CONF": str(self._layout.slurm_conf)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=READY_SECONDS,
            check=False,
        )

    def _start(self, name: str, argv: Sequence[str], log: Path) -> None:
        if name in self._pids and alive(self._pids[name]):
            raise ClusterError(f"{name} runs already")
        self._pids[name] = self._keeper.start(argv, {"PATH": SYSTEM_PATH}, log)

    def _stop(self, name: str, signal_number: int) -> None:
        pid = self._pids[name]
        try:
            os.kill(pid, signal_number)
        except ProcessLookupError:
            return
        self._wait(lambda: not alive(pid), f"{name} ends")

    def _wait_for(self, name: str, condition: Callable[[], bool], what: str) -> None:
        self._wait(lambda: condition() or not alive(self._pids[name]), what)
        if not alive(self._pids[name]):
            raise ClusterError(f"{name} ended at once\n{self.last_log_lines()}")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        wait_for(
            condition,
            READY_SECONDS,
            what,
            poll_seconds=POLL_SECONDS,
            look_into=self.last_log_lines,
        )
