"""A private, real Slurm on this machine: for the demo, the tests, and a site's own rehearsals.

    >>> with Cluster(nodes=4, gpus=8) as cluster:
    ...     job = cluster.submit("--gpus-per-node=1", "--wrap", "nvidia-smi; sleep 60")
    ...     cluster.break_gpu("n1", 3, "lost")
    ...     cluster.log_kernel("n1", "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.")
    ...     cluster.wait(lambda: cluster.job(job)["JobState"] == "FAILED", 30, "the job fails")

One munged, one slurmctld and a slurmd per node, nodes named ``n1`` to ``nN``, on loopback, with
ports, a key and a folder of their own, so that two clusters live side by side. GPUs are files, NVML
a library of ours that reads one state file per node. Whatever ends this process, nothing stays:
see ``processes``. Needs Slurm's and munge's programs; root is needed for nothing, but without it
every job is the caller's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from recovery.demo import fake_nvml, files, slurm_conf, slurm_text
from recovery.demo.daemons import POLL_SECONDS, Daemons
from recovery.demo.ports import Ports
from recovery.demo.processes import Keeper
from recovery.demo.programs import SYSTEM_PATH, ClusterError, find_programs, release
from recovery.demo.service import Service
from recovery.demo.slurm_conf import Layout
from recovery.demo.waiting import wait_for
from recovery.slurm.cli import CliScheduler

T = TypeVar("T")

_NOT_STARTED = "the cluster has not been started: use it in a with statement"


class Cluster:
    """A private cluster, up between ``with`` and its end.

    ``folder`` must not exist yet or be empty; by default it is a new one below the system's
    temporary folder. It is removed at the end unless ``keep``. ``config`` is text of
    recovery.toml, ``slurm_conf_extra`` lines of slurm.conf; both win over what the cluster sets
    itself. ``slurm_files`` are copied beside slurm.conf, where Slurm looks for its plugins'
    scripts. Without ``hooks`` Slurm runs no Prolog, Epilog or HealthCheckProgram. slurmctld runs
    as ``slurm_user``, which then owns spool and state (only root may choose; else the caller).

    ``environment`` is for everything that talks to this cluster: SLURM_CONF, PATH,
    SLURM_RECOVERY_CONFIG and the caller's other variables, without those of another Slurm.
    """

    def __init__(
        self,
        nodes: int = 4,
        gpus: int = 8,
        folder: Path | None = None,
        config: str = "",
        slurm_conf_extra: str = "",
        slurm_files: Sequence[Path] = (),
        slurm_user: str = "",
        hooks: bool = True,
        health_check_seconds: int = 30,
        slurmd_timeout_seconds: int = 300,
        keep: bool = False,
    ) -> None:
        self.node_names = tuple(f"n{number}" for number in range(1, nodes + 1))
        self.gpus = gpus
        self._wanted_folder = folder
        self._config, self._slurm_conf_extra, self._hooks = config, slurm_conf_extra, hooks
        self._slurm_files = tuple(slurm_files)
        self._slurm_user = slurm_user or pwd.getpwuid(os.getuid()).pw_name
        self._health_check_seconds = health_check_seconds
        self._slurmd_timeout_seconds = slurmd_timeout_seconds
        self._keep = keep
        self._programs: dict[str, str] = {}
        self._layout: Layout | None = None
        self._ports: Ports | None = None
        self._keeper: Keeper | None = None
        self._daemons: Daemons | None = None
        self.environment: Mapping[str, str] = {}

    def __enter__(self) -> Cluster:
        self._programs = find_programs()
        folder = files.new_folder(self._wanted_folder)
        self._layout = Layout(folder)
        try:
            self._keeper = Keeper(folder, remove_folder=not self._keep)
            self._ports = Ports(1 + len(self.node_names))
            self._write_files()
            self._daemons = Daemons(
                self._layout, self._keeper, self._programs, self.node_names, self._ports.numbers[0]
            )
            self._daemons.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the cluster and remove its folder; safe to repeat."""
        if self._keeper is not None:
            self._keeper.close()
        if self._ports is not None:
            self._ports.close()

    def leave_running(self) -> str:
        """Let the cluster outlive this process; return the command that ends it."""
        assert self._keeper is not None
        self._keeper.detach()
        return f"kill {self._keeper.pid}"

    # What lies where

    @property
    def layout(self) -> Layout:
        """Where the cluster's files lie.

        Raises:
            ClusterError: the cluster has not been started.
        """
        if self._layout is None:
            raise ClusterError(_NOT_STARTED)
        return self._layout

    @property
    def folder(self) -> Path:
        """The cluster's own folder."""
        return self.layout.folder

    @property
    def spool(self) -> Path:
        """The shared folder through which records travel."""
        return self.folder / "spool"

    @property
    def config_path(self) -> Path:
        """The recovery.toml of nodes and controller."""
        return self.layout.recovery_toml

    @property
    def work(self) -> Path:
        """Where ``run`` and ``submit`` run commands, and so where jobs write their output."""
        return self.folder / "work"

    @property
    def slurmctld_log(self) -> str:
        """slurmctld.log so far; it names every call that slurmctld has received."""
        return files.read(self.layout.controller_log)

    def kernel_log(self, node: str) -> Path:
        """The file that stands for the node's kernel log."""
        return self.layout.node(node) / "kernel.log"

    def gpu_state(self, node: str) -> Path:
        """The file that says how the node's GPUs are."""
        return self.layout.gpu_state(node)

    def slurmd_log(self, node: str) -> str:
        """The node's slurmd.log so far."""
        return files.read(self.layout.slurmd_log(node))

    # Commands

    def run(
        self,
        *argv: str | Path,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        timeout_seconds: float = 60.0,
        user: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the cluster's environment, ``env`` added to it; return its output.

        ``user`` names the account that it runs as, which only root may choose.

        Raises:
            ClusterError: it ended with another status than 0 and ``check`` is set.
            subprocess.TimeoutExpired: it took longer than ``timeout_seconds``.
        """
        finished = subprocess.run(
            [str(word) for word in argv],
            env={**self.environment, **(env or {})},
            cwd=self.work,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=timeout_seconds,
            **({} if user is None else _as_user(user)),
        )
        if check and finished.returncode != 0:
            said = (finished.stderr or finished.stdout).strip()
            raise ClusterError(f"{' '.join(map(str, argv))}: status {finished.returncode}: {said}")
        return finished

    def submit(
        self,
        *argv: str | Path,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> int:
        """Return the job id of ``sbatch ARGV…``, run as ``user``; the job inherits ``env``.

        Not by ``--export=ALL,NAME=…``: 26.05 then asks the user's login shell for an environment,
        and holds the job of an account that has none ("user env retrieval failed").
        """
        said = self.run("sbatch", "--parsable", *argv, user=user, env=env).stdout
        return int(said.split(";")[0])

    def job(self, job_id: int) -> dict[str, str]:
        """Return what ``scontrol show job`` says, by its own names."""
        return slurm_text.fields(self.run("scontrol", "show", "job", str(job_id)).stdout)

    def node(self, name: str) -> dict[str, str]:
        """Return what ``scontrol show node`` says, by its own names."""
        return slurm_text.fields(self.run("scontrol", "show", "node", name).stdout)

    def wait(self, condition: Callable[[], T | None], timeout_seconds: float, what: str) -> T:
        """Return the first true value of ``condition``, asked again and again.

        Raises:
            ClusterError: none came in time; the text says ``what`` was waited for and ends with
                the last lines of the cluster's logs.
        """
        return wait_for(
            condition,
            timeout_seconds,
            what,
            poll_seconds=POLL_SECONDS,
            look_into=self._running().last_log_lines,
        )

    def scheduler(self) -> CliScheduler:
        """Return a Scheduler that speaks to this cluster by Slurm's commands."""
        return CliScheduler(environment=self.environment, timeout_seconds=20.0)

    def mutations(self) -> Counter[str]:
        """Count the calls that changed a job or a node, by Slurm's names for them.

        >>> before = cluster.mutations()                            # doctest: +SKIP
        >>> cluster.run("scontrol", "requeue", "12")                # doctest: +SKIP
        >>> cluster.mutations() - before                            # doctest: +SKIP
        Counter({'REQUEST_JOB_REQUEUE': 1})
        """
        return slurm_text.mutations(self.slurmctld_log)

    @contextlib.contextmanager
    def aggregator(self, *arguments: str) -> Iterator[Service]:
        """Run ``recovery run ARGUMENTS…`` until the end of the ``with``, then SIGTERM it.

        The one given out can be killed earlier. All of them append to one log.
        """
        service = self.start_aggregator(*arguments)
        try:
            yield service
        finally:
            service.stop()

    def start_aggregator(self, *arguments: str) -> Service:
        """Run ``recovery run ARGUMENTS…`` for as long as the cluster is up."""
        assert self._keeper is not None
        log = self.layout.aggregator_log
        argv = [str(files.COMMANDS / "recovery"), "run", *arguments]
        return Service("the aggregator", self._keeper.start(argv, self.environment, log), log)

    def configure(self, config: str) -> None:
        """Replace what the caller had put into recovery.toml; the next run of a hook reads it."""
        trusted = {os.getuid(), pwd.getpwnam(self._slurm_user).pw_uid}
        text = slurm_conf.recovery_toml(self.layout, trusted, config)
        files.replace(self.layout.recovery_toml, text)

    # Faults

    def set_gpus(self, node: str, state: Mapping[str, Any]) -> None:
        """Replace the node's GPU state.

        ``state`` is as in ``{"count": 8, "gpus": {"3": {"lost": true}}, "hang_seconds": 0}``.
        """
        fake_nvml.write_state(self.gpu_state(node), state)

    def break_gpu(self, node: str, gpu: int, fault: str, value: Any = True) -> None:
        """Add a fault (``lost``, …) to those that the node's GPU ``gpu`` has already."""
        state = json.loads(files.read(self.gpu_state(node)))
        state.setdefault("gpus", {}).setdefault(str(gpu), {})[fault] = value
        self.set_gpus(node, state)

    def mend_gpus(self, node: str) -> None:
        """Make every GPU of the node healthy, and as many as Slurm expects."""
        self.set_gpus(node, {"count": self.gpus, "every": dict(fake_nvml.HOPPER)})

    def log_kernel(self, node: str, line: str) -> None:
        """Append a line to the node's kernel log."""
        with self.kernel_log(node).open("a", encoding="utf-8") as log:
            log.write(line + "\n")

    # Daemons

    def start_node(self, node: str, *options: str, boot_id: str = "") -> None:
        """Start the node's slurmd; ``-b`` makes it say that the node has rebooted.

        With ``boot_id`` it has one of its own (root only).
        """
        self._running().start_node(node, *options, boot_id=boot_id)

    def stop_node(self, node: str, signal_number: int = signal.SIGTERM) -> None:
        """Signal the node's slurmd and wait until it has ended; its job steps run on."""
        self._running().stop_node(node, signal_number)

    def reboot_node(self, node: str) -> None:
        """What a node's reboot looks like: slurmd ends, and comes back with another boot id.

        Its hooks see that id in place of the kernel's, which takes root (mount_namespaces(7)).
        """
        self._running().reboot_node(node)

    def restart_controller(self, signal_number: int = signal.SIGTERM) -> None:
        """End slurmctld, start it again and wait until it answers."""
        self._running().restart_controller(signal_number)

    def _running(self) -> Daemons:
        if self._daemons is None:
            raise ClusterError(_NOT_STARTED)
        return self._daemons

    # Files

    def _write_files(self) -> None:
        assert self._ports is not None
        wanted = files.Wanted(
            release=release(self._programs["slurmctld"]),
            node_ports=dict(zip(self.node_names, self._ports.numbers[1:], strict=True)),
            controller_port=self._ports.numbers[0],
            gpus=self.gpus,
            hooks=self._hooks,
            health_check_seconds=self._health_check_seconds,
            slurmd_timeout_seconds=self._slurmd_timeout_seconds,
            slurm_conf_extra=self._slurm_conf_extra,
            slurm_files=self._slurm_files,
            slurm_user=self._slurm_user,
        )
        files.write(self.layout, wanted)
        for node in self.node_names:
            self.mend_gpus(node)
        self.configure(self._config)
        self.environment = self._environment()

    def _environment(self) -> dict[str, str]:
        outer = re.compile(r"(SLURM|SBATCH|SALLOC|SQUEUE|SINFO|SCONTROL)_")
        inherited = {name: value for name, value in os.environ.items() if not outer.match(name)}
        path = inherited.get("PATH", "")
        return {
            **inherited,
            "PATH": f"{files.COMMANDS}:{path}:{SYSTEM_PATH}",
            "SLURM_CONF": str(self.layout.slurm_conf),
            "SLURM_RECOVERY_CONFIG": str(self.layout.recovery_toml),
        }


def _as_user(name: str) -> dict[str, Any]:
    """The arguments of subprocess.run by which a command loses the caller's own groups too."""
    account = pwd.getpwnam(name)
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
