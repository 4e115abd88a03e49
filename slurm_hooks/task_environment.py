"""What the tasks of an opted-in job are given, and how its prolog tells its task prologs.

Owns the note between the two, and the variables that make a failure explainable. slurmd tells the
job's comment to Prolog and Epilog but not to TaskProlog, so the prolog leaves it, for the job's
user alone to read, in a folder in memory. What a comment says is ``optin``'s to read.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from slurm_hooks import optin
from slurm_hooks.context import HookContext
from slurm_hooks.deadline import run_one
from slurm_hooks.spool import SpoolError, read_regular, write

_FOLDER_SECONDS = 2.0

FLIGHT_RECORDER_EVENTS = "2000"
"""Collectives remembered by each rank: PyTorch's own suggestion, a few megabytes."""

DUMP_NAME = "nccl_trace_rank_"
"""What PyTorch puts before a rank's number: in its dump's name, and in that of the pipe by which it
is asked for one."""

_SAME = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
}
"""Two names of one setting in newer and older PyTorch: a user who set either has set both."""


def note(context: HookContext, run: Path) -> bytes:
    """Run in a child: leave the note before an opted-in job, and take it away after any.

    Raises:
        SpoolError: the folder in memory does not take it.
    """
    job = context.job
    if job is None:
        return b""
    folder = run / context.node
    if context.hook == "epilog":
        with contextlib.suppress(FileNotFoundError):
            (folder / str(job.id)).unlink()
        return b""
    if job.uid is None or not optin.parse(job.comment).opted_in:
        return b""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    write(folder, str(job.id), (job.comment or "").encode(), durable=False, mode=0o400, uid=job.uid)
    return b""


def dump_folder(job_id: int, restart: int) -> str:
    """Return where an attempt's dumps go, from the job's own folder."""
    return f".recovery/{job_id}.{restart}"


def progress_file(job_id: int, restart: int) -> str:
    """Return where an attempt tells its step, from the job's own folder, unless told otherwise."""
    return f"{dump_folder(job_id, restart)}/progress"


def exports(environ: Mapping[str, str], run: Path) -> dict[str, str]:
    """Return the variables for a task, by name; none for a job that did not opt in.

    Whatever the user has set stays. Folders are made as the job's user, in a child: theirs is a
    shared file system that may hang. slurmstepd starts a task prolog in the job's own folder.
    """
    job_id = environ.get("SLURM_JOB_ID", "")
    node = environ.get("SLURMD_NODENAME", "")
    if not re.fullmatch(r"[0-9]{1,10}", job_id) or not re.fullmatch(r"[A-Za-z0-9._-]+", node):
        return {}
    try:
        comment = read_regular(run / node / job_id, 1 << 16).decode("utf-8", "replace")
    except SpoolError:
        return {}
    wishes = optin.parse(comment)
    restart = re.sub(r"[^0-9]", "", environ.get("SLURM_RESTART_COUNT", ""))[:10] or "0"
    dumps = f"{Path.cwd()}/{dump_folder(int(job_id), int(restart))}"
    wanted = {
        "TORCH_FR_BUFFER_SIZE": FLIGHT_RECORDER_EVENTS,
        "TORCH_NCCL_TRACE_BUFFER_SIZE": FLIGHT_RECORDER_EVENTS,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "NCCL_DEBUG": "WARN",
    }
    if wishes.progress:
        wanted["RECOVERY_PROGRESS_FILE"] = wishes.progress
    made = run_one(lambda: _make(dumps), _FOLDER_SECONDS)
    if made.status == "ok":
        wanted["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = f"{dumps}/{DUMP_NAME}"
        if made.output == _TAKES_PIPES:
            wanted["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = f"{dumps}/{DUMP_NAME}"
        wanted["RECOVERY_DUMP_DIR"] = dumps
        progress = f"{Path.cwd()}/{progress_file(int(job_id), int(restart))}"
        wanted.setdefault("RECOVERY_PROGRESS_FILE", progress)
    return {
        name: value
        for name, value in wanted.items()
        if name not in environ and _SAME.get(name, name) not in environ and value.isprintable()
    }


_TAKES_PIPES = b"pipes"


def _make(folder: str) -> bytes:
    """Make the folder, and say whether its file system takes pipes: torch ends where one fails."""
    Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    trial = Path(folder) / f".pipe-{os.getpid()}"
    try:
        os.mkfifo(trial)
        trial.unlink()
    except OSError:
        return b""
    return _TAKES_PIPES
