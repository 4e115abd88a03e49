"""What a private cluster has on its disk before its first daemon starts.

Owns the folder and who may enter it, and where each file goes; ``slurm_conf`` has their text.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recovery.demo import fake_nvml, slurm_conf
from recovery.demo.programs import ClusterError
from recovery.demo.slurm_conf import Layout
from slurm_hooks import spool

COMMANDS = Path(sys.executable).parent
"""Where the console scripts of this installation lie."""

_FOLDER_LIMIT_CHARACTERS = 50
"""Slurm puts sockets below it, whose whole path may have 107 characters (unix(7))."""

_TAIL_LINES = 20


@dataclass(frozen=True)
class Wanted:
    """The cluster that the files are for; the words are those of ``Cluster``."""

    release: tuple[int, int]
    node_ports: Mapping[str, int]
    controller_port: int
    gpus: int
    hooks: bool
    health_check_seconds: int
    slurmd_timeout_seconds: int
    slurm_conf_extra: str
    slurm_files: Sequence[Path]
    slurm_user: str


def new_folder(wanted: Path | None) -> Path:
    """Return an empty folder for a cluster, ``wanted`` or a new temporary one.

    Raises:
        ClusterError: Slurm cannot live there, or something lies there already.
    """
    folder = wanted.absolute() if wanted else Path(tempfile.mkdtemp(prefix="slurm-"))
    if not re.fullmatch(r"[\w./-]+", str(folder), re.ASCII):
        raise ClusterError(f"{folder}: slurm.conf takes no path with such characters")
    if len(str(folder)) > _FOLDER_LIMIT_CHARACTERS:
        raise ClusterError(
            f"{folder}: more than {_FOLDER_LIMIT_CHARACTERS} characters: Slurm's sockets do not fit"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ClusterError(f"{folder}: not empty, and the cluster would remove it at its end")
    folder.chmod(0o755)  # munge and the jobs of other users must get in
    return folder


def write(layout: Layout, wanted: Wanted) -> None:
    """Write everything but recovery.toml and the state of the GPUs."""
    folder = layout.folder
    for name in ("munge", "controller", "bin", "lib", "gpus", "run", "state", "work"):
        (folder / name).mkdir()
    spool.create(folder / "spool")
    for node in wanted.node_ports:
        (layout.node(node) / "slurmd").mkdir(parents=True)
        (layout.node(node) / "kernel.log").touch()
    _munge_key(layout.munge_socket.parent / "key")
    _slurm(layout, wanted)
    _gpus(layout, wanted)
    _hooks(layout, wanted)
    account = pwd.getpwnam(wanted.slurm_user)
    if account.pw_uid != os.getuid():
        theirs = [folder / name for name in ("controller", "state", "spool")]
        for path in (*theirs, *(folder / "spool").rglob("*")):
            os.chown(path, account.pw_uid, account.pw_gid)


def replace(path: Path, text: str) -> None:
    """Write a file; whoever reads it meanwhile sees the old text or the new one, never half."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def read(path: Path) -> str:
    """Return a file's text, empty where there is none."""
    return path.read_text(encoding="utf-8", errors="backslashreplace") if path.exists() else ""


def last_log_lines(layout: Layout, nodes: Sequence[str]) -> str:
    """Return the end of every daemon's log, for whoever asks why something did not happen."""
    logs = [layout.aggregator_log, layout.controller_log, layout.controller_log.with_suffix(".err")]
    logs += [layout.munge_socket.parent / "err"]
    logs += [layout.slurmd_log(node) for node in nodes]
    logs += [layout.node(node) / "slurmd.err" for node in nodes]
    texts = [(log, read(log).splitlines()[-_TAIL_LINES:]) for log in logs if log.exists()]
    return "\n".join(f"== {log}\n" + "\n".join(lines) for log, lines in texts if lines)


def _munge_key(key: Path) -> None:
    key.touch(mode=0o400)
    key.chmod(0o600)
    key.write_bytes(os.urandom(128))


def _slurm(layout: Layout, wanted: Wanted) -> None:
    text = slurm_conf.slurm_conf(
        layout,
        user=wanted.slurm_user,
        slurmd_user=pwd.getpwuid(os.getuid()).pw_name,
        controller_host=socket.gethostname().partition(".")[0],
        controller_port=wanted.controller_port,
        node_ports=wanted.node_ports,
        gpus=wanted.gpus,
        hooks=wanted.hooks,
        health_check_seconds=wanted.health_check_seconds,
        slurmd_timeout_seconds=wanted.slurmd_timeout_seconds,
        extra=wanted.slurm_conf_extra,
    )
    layout.slurm_conf.write_text(text, encoding="utf-8")
    if wanted.release >= slurm_conf.CGROUP_CAN_BE_DISABLED:
        (layout.folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n", encoding="utf-8")
    for path in wanted.slurm_files:
        shutil.copy(path, layout.slurm_conf.parent)


def _gpus(layout: Layout, wanted: Wanted) -> None:
    folder = layout.folder
    gres = slurm_conf.gres_conf(layout, tuple(wanted.node_ports), wanted.gpus)
    (folder / "gres.conf").write_text(gres, encoding="utf-8")
    for number in range(wanted.gpus):
        (folder / "gpus" / f"nvidia{number}").symlink_to(os.devnull)
    if wanted.gpus:
        fake_nvml.build(layout.library_folder)


def _hooks(layout: Layout, wanted: Wanted) -> None:
    scripts = layout.folder / "bin"
    for wrapper, hook in slurm_conf.HOOKS.items():
        _script(scripts / wrapper, slurm_conf.hook_wrapper(layout, COMMANDS / hook))
    task_prolog = COMMANDS / slurm_conf.TASK_PROLOG if wanted.hooks else None
    _script(scripts / "task-prolog", slurm_conf.task_prolog(layout, task_prolog))


def _script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
