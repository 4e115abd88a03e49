"""The files of a private cluster: slurm.conf, gres.conf, the wrappers of its hooks, recovery.toml.

Text only: what a line is for stands beside it. ``cluster`` decides the values and writes the files.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CPUS_PER_NODE = 8
MEMORY_PER_NODE_MEGABYTES = 4000

HOOKS = {
    "prolog": "slurm-hook-prolog",
    "epilog": "slurm-hook-epilog",
    "health-check": "slurm-hook-health-check",
}
"""Wrapper in the cluster's bin folder: the hook that it runs."""

CGROUP_CAN_BE_DISABLED = (23, 2)
"""The first release with cgroup.conf's CgroupPlugin=disabled. 26.05 starts no step without it where
there is no cgroup to be had, as in a container, although no plugin of slurm.conf asks for one."""

TASK_PROLOG = "slurm-hook-task-prolog"

_JOBS_OF_A_PORT = 10
"""Job numbers of two clusters lie so far apart a port; neighbouring ports are rare."""


@dataclass(frozen=True)
class Layout:
    """Where things of the cluster in ``folder`` lie; ``node`` is a name such as ``n3``."""

    folder: Path

    @property
    def slurm_conf(self) -> Path:
        """What SLURM_CONF names; gres.conf lies beside it."""
        return self.folder / "slurm.conf"

    @property
    def recovery_toml(self) -> Path:
        """What SLURM_RECOVERY_CONFIG names."""
        return self.folder / "recovery.toml"

    @property
    def munge_socket(self) -> Path:
        """The socket of the cluster's own munged."""
        return self.folder / "munge" / "socket"

    @property
    def controller_log(self) -> Path:
        """slurmctld's log; every call it receives is in it."""
        return self.folder / "controller" / "slurmctld.log"

    @property
    def aggregator_log(self) -> Path:
        """What all aggregators that were run beside this cluster have said."""
        return self.folder / "aggregator.log"

    @property
    def library_folder(self) -> Path:
        """Where hooks and jobs find libnvidia-ml.so.1."""
        return self.folder / "lib"

    def node(self, node: str) -> Path:
        """Everything that would be on this node's own disk."""
        return self.folder / "nodes" / node

    def slurmd_log(self, node: str) -> Path:
        """The node's slurmd.log."""
        return self.node(node) / "slurmd.log"

    def gpu_state(self, node: str) -> Path:
        """What the fake NVML library of this node reads."""
        return self.node(node) / "gpus.json"


def slurm_conf(
    layout: Layout,
    *,
    user: str,
    slurmd_user: str,
    controller_host: str,
    controller_port: int,
    node_ports: Mapping[str, int],
    gpus: int,
    hooks: bool,
    health_check_seconds: int,
    slurmd_timeout_seconds: int,
    extra: str,
) -> str:
    """Return slurm.conf; ``extra`` is the caller's own lines.

    Slurm takes the last of two lines with one key, so ``extra`` also replaces what stands before.
    """
    folder, bin_folder = layout.folder, layout.folder / "bin"
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    lines = [
        "ClusterName=private",
        f"SlurmctldHost={controller_host}(127.0.0.1)",
        f"SlurmctldPort={controller_port}",
        "# Nothing of this cluster listens beyond this machine.",
        "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny",
        f"SlurmUser={user}",
        f"SlurmdUser={slurmd_user}",
        "# Its own munged with its own key: no other cluster's credential counts here.",
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.munge_socket}",
        f"StateSaveLocation={folder}/controller",
        f"SlurmctldPidFile={folder}/controller/slurmctld.pid",
        f"SlurmctldLogFile={layout.controller_log}",
        "# Numbers of its own: a hook that looks for a job's processes sees those of all clusters.",
        f"FirstJobId={controller_port * _JOBS_OF_A_PORT}",
        "# At this level slurmctld logs each call it receives: who changed what can be read there.",
        "SlurmctldDebug=debug2",
        f"SlurmdSpoolDir={folder}/nodes/%n/slurmd",
        f"SlurmdPidFile={folder}/nodes/%n/slurmd.pid",
        f"SlurmdLogFile={folder}/nodes/%n/slurmd.log",
        "SlurmdDebug=verbose",
        "SlurmdParameters=config_overrides",
        f"SlurmdTimeout={slurmd_timeout_seconds}",
        "ReturnToService=1",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SchedulerType=sched/backfill",
        "# A job that may start does so within a second, whichever of the two looks first.",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1",
        "JobRequeue=1",
        "MinJobAge=300",
        "# Ranks that do not end on SIGTERM are killed after this; 30 s is the default.",
        "KillWait=2",
        "PrologFlags=Alloc",
        f"TaskProlog={bin_folder}/task-prolog",
    ]
    if hooks:
        lines += [
            f"Prolog={bin_folder}/prolog",
            f"Epilog={bin_folder}/epilog",
            "# Longer than a hook's own budget, so that it ends by itself; no limit by default.",
            "PrologEpilogTimeout=60",
            f"HealthCheckProgram={bin_folder}/health-check",
            f"HealthCheckInterval={health_check_seconds}",
            "HealthCheckNodeState=ANY",
        ]
    if gpus:
        lines.append("GresTypes=gpu")
    lines += [
        f"NodeName={node} NodeHostname={controller_host} NodeAddr=127.0.0.1 Port={port}"
        f" CPUs={max(CPUS_PER_NODE, gpus)} RealMemory={MEMORY_PER_NODE_MEGABYTES}{gres}"
        for node, port in node_ports.items()
    ]
    lines.append(f"PartitionName=train Nodes={','.join(node_ports)} Default=YES State=UP")
    return "\n".join([*lines, extra.strip(), ""])


def gres_conf(layout: Layout, nodes: Sequence[str], gpus: int) -> str:
    """Return gres.conf: the same files serve as GPUs of every node.

    Slurm wants character devices (with plain files a job is told of no GPU, measured on 22.05) and
    opens none of them: links to /dev/null do, and need no root.
    """
    if not gpus:
        return ""
    files = f"{layout.folder}/gpus/nvidia[0-{gpus - 1}]"
    return f"NodeName={','.join(nodes)} Name=gpu File={files}\n"


def hook_wrapper(layout: Layout, program: Path) -> str:
    """Return the script that slurmd runs as a hook: it says which node's things are meant.

    On real nodes one path means a different disk on each; here slurmd's SLURMD_NODENAME tells the
    nodes apart. HealthCheckProgram is given no other variable, so everything is set here.
    """
    return (
        "#!/bin/sh\n"
        f"export SLURM_RECOVERY_CONFIG={layout.recovery_toml}\n"
        f"export LD_LIBRARY_PATH={layout.library_folder}\n"
        f"export FAKE_NVML_STATE={layout.gpu_state('$SLURMD_NODENAME')}\n"
        f"exec {shlex.quote(str(program))}\n"
    )


def task_prolog(layout: Layout, program: Path | None) -> str:
    """Return the TaskProlog: Slurm puts each ``export …`` it prints into the task's environment.

    ``program`` is the hook that may add to them, None where the cluster has no hooks.
    """
    text = (
        "#!/bin/sh\n"
        f'echo "export LD_LIBRARY_PATH={layout.library_folder}'
        '${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"\n'
        f'echo "export FAKE_NVML_STATE={layout.gpu_state("$SLURMD_NODENAME")}"\n'
    )
    if program is None:
        return text
    configured = f"export SLURM_RECOVERY_CONFIG={layout.recovery_toml}\n"
    # It runs as the job's user, who may not be allowed into a checkout in somebody's home folder.
    return f"{text}{configured}{shlex.quote(str(program))} 2>/dev/null || exit 0\n"


def recovery_toml(layout: Layout, trusted: Collection[int], site: str) -> str:
    """Return recovery.toml: this cluster's places, and over them the keys of the text ``site``.

    Raises:
        tomllib.TOMLDecodeError: ``site`` is not TOML.
    """
    places: dict[str, Any] = {
        "spool": {
            "path": f"{layout.folder}/spool",
            "buffer": f"{layout.folder}/nodes/%n/buffer",
            "trusted_uids": sorted(trusted),
        },
        # A folder of its own: two clusters have nodes and jobs of the same names.
        "hooks": {"slurm_conf": str(layout.slurm_conf), "run": f"{layout.folder}/run"},
        "probes": {
            "kernel_log": {"path": f"{layout.folder}/nodes/%n/kernel.log"},
            # All these nodes are one machine, whose load is none of a node's own.
            "host": {"load": 1000.0},
        },
        "controller": {"state": f"{layout.folder}/state"},
    }
    return _toml(_merged(places, tomllib.loads(site)))


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        both_tables = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = _merged(below, value) if both_tables and below is not None else value
    return merged


def _toml(document: Mapping[str, Any]) -> str:
    """Plain keys first, then one section a table; a list of tables as ``[[name]]``."""
    lines: list[str] = []
    _section(document, (), lines)
    return "\n".join(lines).strip() + "\n"


def _section(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    rows = {key: value for key, value in table.items() if _is_list_of_tables(value)}
    plain = {key: value for key, value in table.items() if key not in tables and key not in rows}
    if path and plain:
        lines += ["", f"[{'.'.join(map(_key, path))}]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in tables.items():
        _section(value, (*path, key), lines)
    for key, items in rows.items():
        for item in items:
            lines += ["", f"[[{'.'.join(map(_key, (*path, key)))}]]"]
            # Inside a row of a list a table is written inline: no header could say which row's.
            lines += [f"{_key(name)} = {_value(value)}" for name, value in item.items()]


def _is_list_of_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _key(key: str) -> str:
    return (
        key if key.replace("_", "a").replace("-", "a").isalnum() and key.isascii() else _value(key)
    )


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_key(key)} = {_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, (str, bool)):
        return json.dumps(value)  # of TOML's strings and JSON's the escapes agree
    return str(value)
