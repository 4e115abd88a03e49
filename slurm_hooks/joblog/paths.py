"""Where a job's output is: Slurm's file name patterns, expanded as Slurm does.

    >>> names = {"j": "12", "x": "train", "u": "ann", "A": "12", "a": "4294967294"}
    >>> expand("logs/%x-%6j.out", names, "/home/ann")
    '/home/ann/logs/train-000012.out'

Source: ``man sbatch``, section "filename pattern", and src/common/job_io of Slurm 22.05.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from slurm_hooks.context import HookContext

_PATTERN = re.compile(r"%(?P<width>\d{1,2})?(?P<letter>[A-Za-z%])")

_NO_ARRAY_TASK = "4294967294"
"""What Slurm prints for %a of a job that is no array task (NO_VAL)."""

WIDTH_LIMIT = 10
"""Slurm pads numbers to at most ten digits."""


def expand(pattern: str, names: Mapping[str, str], work_dir: str | None) -> str | None:
    """Return the path for ``pattern``, or None where it cannot be known.

    ``names`` holds the value of each letter. A backslash anywhere turns the patterns off. A
    relative path is the job's folder's.
    """
    if "\\" in pattern:
        path = pattern.replace("\\", "")
    else:
        unknown = False

        def value(match: re.Match[str]) -> str:
            nonlocal unknown
            letter = match["letter"]
            if letter == "%":
                return "%"
            if letter not in names:
                unknown = True
                return ""
            text, width = names[letter], int(match["width"] or 0)
            return text.zfill(min(width, WIDTH_LIMIT)) if text.isdigit() else text

        path = _PATTERN.sub(value, pattern)
        if unknown:
            return None
    if path.startswith("/"):
        return path
    return f"{work_dir.rstrip('/')}/{path}" if work_dir else None


def letters(context: HookContext, job_name: str | None = None) -> Mapping[str, str]:
    """Return what each letter stands for in a batch job's own output file.

    ``%n`` and ``%t`` are 0 for the batch step, ``%N`` its host, ``%s`` its step (batch).
    """
    job = context.job
    if job is None:
        return {}
    master, _, task = (job.array or "").partition("_")
    found = {
        "j": str(job.id),
        "J": str(job.id),
        "A": master or str(job.id),
        "a": task or _NO_ARRAY_TASK,
        "b": str(int(task) % 10) if task else "4",
        "n": "0",
        "t": "0",
        "s": "batch",
        "N": context.node.partition(".")[0],
    }
    if job.user:
        found["u"] = job.user
    if job_name:
        found["x"] = job_name
    return found
