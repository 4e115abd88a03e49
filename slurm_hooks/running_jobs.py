"""The opted-in jobs that run on this node: what their prolog noted for health checks.

Owns one file for each job, in a local folder that only root may use. slurmd tells a job's owner,
comment and output to Prolog and Epilog, while a health check is told of no job at all. A file
each, since a prolog and a health check run at the same time: in one file for all, the one that
wrote last would undo what the other noted. A health check clears away what has ended.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import itertools
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from slurm_hooks import as_user, optin, spool
from slurm_hooks.config import Spool
from slurm_hooks.context import HookContext
from slurm_hooks.joblog import paths

LIMIT = 64
"""Most jobs noted on one node; the oldest make room."""

LOGS_LIMIT = 32
"""Most files that a job's outputs and ``logs=`` are looked for in."""

_STARTING_SECONDS = 900
"""A job without a batch step is forgotten after this; before, it may be starting."""

_BETWEEN_STEPS_SECONDS = 30 * 86_400
"""The same where another node is its batch host; the oldest of LIMIT make room long before."""

_NOTE_LIMIT_BYTES = 256 * 1024

_SIZES_SECONDS = 0.5
"""Time for looking at how long a job's logs are already, in its user's file system."""


@dataclass(frozen=True)
class RunningJob:
    """What is noted of a job: whose it is, what its owner asked for, where it began.

    ``outputs`` are shell patterns of its standard output and error. ``log_bytes`` tells how long
    each log was before this attempt wrote to it: what is there is an earlier attempt's, where the
    job appends. ``since`` is the prolog's Unix time. ``gpus`` are the minor numbers of what it has
    here; only its batch host, the first of its nodes, looks at its files.
    """

    id: int
    uid: int
    comment: str
    work_dir: str | None
    outputs: Sequence[str]
    restart: int
    since: float
    log_bytes: Mapping[str, int] = field(default_factory=dict)
    gpus: Sequence[int] = ()
    batch_host: bool = True

    def absolute(self, path: str) -> str:
        """Return a path that the owner named, from the job's folder."""
        return str(Path(self.work_dir or "/") / path)

    def logs(self) -> list[str]:
        """Return the files that match the outputs and what the owner named; as its user only."""
        folder = Path(glob.escape(self.work_dir or "/"))
        files: dict[str, None] = {}
        for pattern in (*optin.parse(self.comment).logs, *self.outputs):
            found = glob.iglob(str(folder / pattern))  # noqa: PTH207 - an absolute pattern
            files.update(dict.fromkeys(itertools.islice(found, LOGS_LIMIT)))
        return list(files)


def of(context: HookContext) -> RunningJob | None:
    """Return the hook's job, or None where it has not opted in."""
    told = context.job
    if told is None or told.uid is None:
        return None
    if not optin.parse(told.comment).opted_in:
        return None
    known = paths.letters(context)
    patterns = [
        paths.to_glob(pattern, known, context.work_dir)
        for pattern in (context.output, context.stderr)
        if pattern
    ]
    return RunningJob(
        id=told.id,
        uid=told.uid,
        comment=told.comment or "",
        work_dir=context.work_dir,
        outputs=tuple(dict.fromkeys(pattern for pattern in patterns if pattern)),
        restart=told.restart,
        since=time.time(),
        gpus=told.gpus,
        batch_host=is_batch_host(context),
    )


def is_batch_host(context: HookContext) -> bool:
    """Whether this node is the first of the job's list, or the list is not known.

    The batch script runs on the first node of the job's list (man sbatch).
    """
    nodes = context.job.nodes if context.job else None
    first = re.match(r"([^\[,]*)(?:\[(\d+))?", nodes or "")
    return not nodes or not first or context.node == first[1] + (first[2] or "")


def note(context: HookContext, place: Spool) -> None:
    """Run in a child of a prolog: note its job, if health checks are to look at it.

    Raises:
        SpoolError: the local disk does not take it.
    """
    job = of(context)
    if job is None:
        return
    where = place.jobs_of(context.node)
    spool.make_private(where)
    told = asdict(job)
    if job.batch_host:
        sizes = as_user.look(job.uid, functools.partial(_sizes, job), _SIZES_SECONDS)
        if sizes.status == "ok":
            told["log_bytes"] = json.loads(sizes.output)
    spool.write(where, str(job.id), json.dumps(told).encode(), durable=False, mode=0o600)
    others = sorted(known(where).values(), key=lambda one: one.since)
    _forget(where, (one.id for one in others[:-LIMIT]))


def known(where: Path) -> dict[int, RunningJob]:
    """Return the jobs noted in the folder, by their number; a broken note counts for nothing."""
    found = {}
    try:
        names = [entry.name for entry in where.iterdir() if entry.name.isdigit()]
    except OSError:
        return {}
    for name in names:
        with contextlib.suppress(spool.SpoolError, ValueError, TypeError, RecursionError):
            job = RunningJob(**json.loads(spool.read_regular(where / name, _NOTE_LIMIT_BYTES)))
            found[job.id] = job
    return found


def running(where: Path) -> dict[int, RunningJob]:
    """Return the noted jobs whose batch step runs here, and clear away those that have ended."""
    noted, steps = known(where), steps_here()
    batch = {job for job, step in steps if step == "batch"}
    now = time.time()
    _forget(where, (j.id for j in noted.values() if j.id not in batch and _is_old(j, now)))
    return {j.id: j for j in noted.values() if j.id in batch and j.batch_host}


def active(where: Path) -> dict[int, RunningJob]:
    """Return the noted jobs that have a step on this node, whichever node is their batch host."""
    jobs = {job for job, _ in steps_here()}
    return {job.id: job for job in known(where).values() if job.id in jobs}


def _is_old(job: RunningJob, now: float) -> bool:
    # Away from the batch host, a job's next step may come any time until the job ends.
    limit = _STARTING_SECONDS if job.batch_host else _BETWEEN_STEPS_SECONDS
    return abs(now - job.since) > limit


def _forget(where: Path, jobs: Iterable[int]) -> None:
    for number in jobs:
        with contextlib.suppress(OSError):  # gone, or tried again at the next health check
            (where / str(number)).unlink()


def _sizes(job: RunningJob) -> bytes:
    """Run as the user: the length of each log that is there, by its path."""
    sizes = {}
    for path in job.logs():
        with contextlib.suppress(OSError), as_user.open_regular(path) as file:
            sizes[path] = file.seek(0, 2)
    return json.dumps(sizes).encode()


def steps_here() -> set[tuple[int, str]]:
    """Return the job and the name (``batch``, ``extern``, ``0``) of each step on this node.

    By slurmstepd's own title (``slurmstepd: [12.batch]``, measured on 22.05; a heterogeneous job's
    has ``12+0``).
    """
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                title = (process / "cmdline").read_bytes()[:200]
            except OSError:
                continue
            match = re.match(rb"slurmstepd: \[(\d{1,10})(?:\+\d+)?\.(\w{1,20})", title)
            if match:
                found.add((int(match[1]), match[2].decode()))
    return found
