"""Where a job's output is: Slurm's file name patterns, expanded as Slurm does.

    >>> names = {"j": "12", "u": "ann", "A": "12", "a": "4294967294"}
    >>> to_glob("logs/%u-%6j.out", names, "/home/ann")
    '/home/ann/logs/ann-000012.out'

The answer is a shell pattern, since an epilog is not told everything that a user may have put into
a name (the job's name, for one): what is unknown matches anything, if the job's number is there to
tell its files from others'. Source: ``man sbatch``, "filename pattern", and Slurm 22.05 to 26.05.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping

from slurm_hooks.context import HookContext

_PATTERN = re.compile(r"%(?P<width>\d{1,2})?(?P<letter>[A-Za-z%])")

_NO_ARRAY_TASK = "4294967294"
"""What Slurm prints for %a of a job that is no array task (NO_VAL)."""

_JOB_LETTERS = frozenset("jJA")

_WIDTH_LIMIT = 10
"""Slurm pads numbers to at most ten digits."""


def to_glob(pattern: str, names: Mapping[str, str], work_dir: str | None) -> str | None:
    """Return a shell pattern for the file, or None where it cannot be told from other jobs'.

    ``names`` holds the value of each letter that is known. A backslash anywhere turns the letters
    off. A relative path is the job's folder's.
    """
    if "\\" in pattern:
        path = glob.escape(pattern.replace("\\", ""))
    else:
        letters = {match["letter"] for match in _PATTERN.finditer(pattern)}
        if letters - names.keys() - {"%"} and not letters & _JOB_LETTERS:
            return None
        parts, at = [], 0
        for match in _PATTERN.finditer(pattern):
            parts += [glob.escape(pattern[at : match.start()]), _value(match, names)]
            at = match.end()
        path = "".join([*parts, glob.escape(pattern[at:])])
    if path.startswith("/"):
        return path
    return f"{glob.escape(work_dir.rstrip('/'))}/{path}" if work_dir else None


def letters(context: HookContext) -> Mapping[str, str]:
    """Return what is known of the letters of a batch job's own output file.

    ``%n`` and ``%t`` are 0 for the batch step, ``%N`` its host, ``%s`` its step.
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
        "n": "0",
        "t": "0",
        "s": "batch",
        "N": context.node.partition(".")[0],
    }
    if task:
        found["b"] = str(int(task) % 10)
    if job.user:
        found["u"] = job.user
    return found


def _value(match: re.Match[str], names: Mapping[str, str]) -> str:
    letter = match["letter"]
    if letter == "%":
        return "%"
    if letter not in names:
        return "*"
    text, width = names[letter], int(match["width"] or 0)
    return glob.escape(text.zfill(min(width, _WIDTH_LIMIT)) if text.isdigit() else text)
