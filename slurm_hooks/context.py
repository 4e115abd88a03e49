"""What Slurm told the hook: its environment, read once, believed little.

Owns the names of Slurm's variables. Every value may be missing (a HealthCheckProgram on 22.05 is
told only SLURMD_NODENAME) and every text in it may have been written by a user.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from slurm_hooks.frozen import frozen
from slurm_hooks.record import RecordJob

_TEXT_LIMIT = 4096
"""Longest text taken from one variable, in characters; a comment can be megabytes."""

_GPU_RANGE_LIMIT = 1024
"""Most GPUs believed of one job on one node."""


@frozen
class HookContext:
    """Where, when and for which job a hook runs.

    ``hook`` is ``prolog``, ``epilog``, ``health_check`` or ``task_prolog``. ``work_dir``,
    ``stdout`` and ``stderr`` are the job's, not expanded (``%j`` and the like stand in them), and
    are None where Slurm does not tell them. ``deep``: somebody has asked for a thorough look, and
    the node is drained and idle.
    """

    hook: str
    node: str
    cluster: str | None = None
    job: RecordJob | None = None
    work_dir: str | None = None
    stdout: str | None = None
    stderr: str | None = None
    deep: bool = False

    @property
    def output(self) -> str | None:
        """The job's standard output as Slurm told it, else the name that sbatch gives it.

        Slurm tells no SLURM_JOB_STDOUT of a job that named none (measured on 22.05); its output
        is then where sbatch(1) says. An interactive job has no such file.
        """
        if self.stdout or self.job is None or self.work_dir is None:
            return self.stdout
        return "slurm-%A_%a.out" if self.job.array else "slurm-%j.out"

    @classmethod
    def from_environ(cls, hook: str, environ: Mapping[str, str]) -> HookContext:
        """Read the variables that slurmd sets (names: ``man prolog``; measured 22.05-26.05)."""
        return cls(
            hook=hook,
            node=_text(environ, "SLURMD_NODENAME") or os.uname().nodename.partition(".")[0],
            cluster=_text(environ, "SLURM_CLUSTER_NAME"),
            job=_job(environ),
            work_dir=_text(environ, "SLURM_JOB_WORK_DIR"),
            stdout=_text(environ, "SLURM_JOB_STDOUT"),
            stderr=_text(environ, "SLURM_JOB_STDERR"),
        )


def told(hook: str) -> tuple[HookContext, str]:
    """Return what Slurm told this process, a hook, its node's name made safe; and the boot's id."""
    from slurm_hooks.bounds import node_name

    context = HookContext.from_environ(hook, os.environ)
    return replace(context, node=node_name(context.node)), boot_id()


def boot_id() -> str:
    """Return the kernel's identifier of this boot (proc(5))."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def parse_indices(text: str | None) -> tuple[int, ...]:
    """Return the numbers of ``0,2-4`` as ``(0, 2, 3, 4)``; nothing for what is not such a list.

    Slurm writes GPUs' minor numbers in SLURM_JOB_GPUS this way.
    """
    if not text or not re.fullmatch(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", text):
        return ()
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
        if len(numbers) > _GPU_RANGE_LIMIT:
            return ()
    return tuple(sorted(set(numbers)))


def _job(environ: Mapping[str, str]) -> RecordJob | None:
    job_id = _number(environ, "SLURM_JOB_ID")
    if job_id is None:
        return None
    array_job, array_task = (
        _number(environ, "SLURM_ARRAY_JOB_ID"),
        _number(environ, "SLURM_ARRAY_TASK_ID"),
    )
    return RecordJob(
        id=job_id,
        restart=_number(environ, "SLURM_JOB_RESTART_COUNT") or 0,
        user=_text(environ, "SLURM_JOB_USER"),
        uid=_number(environ, "SLURM_JOB_UID"),
        partition=_text(environ, "SLURM_JOB_PARTITION"),
        nodes=_text(environ, "SLURM_JOB_NODELIST") or _text(environ, "SLURM_NODELIST"),
        gpus=parse_indices(environ.get("SLURM_JOB_GPUS")),
        array=f"{array_job}_{array_task}" if array_job and array_task is not None else None,
        sluid=_text(environ, "SLURM_JOB_SLUID"),
        exit=_text(environ, "SLURM_JOB_EXIT_CODE2"),
        comment=_text(environ, "SLURM_JOB_COMMENT"),
    )


def _text(environ: Mapping[str, str], name: str) -> str | None:
    """A variable's text, shortened, and with bytes that are not UTF-8 made visible."""
    raw = environ.get(name)
    if not raw:
        return None
    return raw[:_TEXT_LIMIT].encode("utf-8", "backslashreplace").decode("utf-8")


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if re.fullmatch(r"[0-9]{1,10}", text) else None
