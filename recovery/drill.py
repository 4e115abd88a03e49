"""A drill: a noncritical job is interrupted on purpose, and its resumption is judged.

Owns what may be interrupted, the order of things and how each is timed. The job's owner has said
``noncritical`` in its comment, or it is refused. After a kill it is the aggregator that must notice
and restart; after the two requeues it is the job alone that must resume.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from recovery import digests
from recovery.decision import Decision
from recovery.slurm import command
from recovery.slurm.base import CommandRefused, Job, Scheduler, SchedulerUnavailable
from recovery.store import Store
from slurm_hooks import as_user, optin, progress

Kind = Literal["kill", "requeue", "exclude"]

POLL_SECONDS = 0.5
READ_SECONDS = 5.0
CHECK_SECONDS = 600.0
RESTART_GAP_SECONDS = 1.0
"""Least time between an attempt's end and the next one's start (``actions``)."""

_PROGRESS_BYTES = 64 * 1024
_COMMAND_SECONDS = 20.0
_OUTPUT_BYTES = 1 << 20


class DrillRefused(Exception):
    """The job is not interrupted; the text says why."""


@dataclass(frozen=True)
class Step:
    """One part of a drill: how long after the interruption, and what was seen."""

    name: str
    kept: bool
    seconds: float
    detail: str


@dataclass(frozen=True)
class Drill:
    """What is to be done to a job, and what judges its output in the end.

    ``check`` is a command. ``reference`` is a file or folder that a run left which nothing had
    interrupted; ``output`` is where the same is expected of the job, below its working folder
    unless absolute.
    """

    job_id: int
    kind: Kind
    check: Sequence[str] = ()
    timeout_seconds: float = 600.0
    reference: Path | None = None
    output: Path | None = None


def refusal(job: Job | None) -> str:
    """Return why a job must not be interrupted, empty where it may be."""
    if job is None:
        return "Slurm knows no such job"
    wishes = optin.parse(job.comment)
    if not (wishes.noncritical and wishes.opted_in):
        return "its owner has not said recovery=requeue,noncritical=yes in its --comment"
    if job.state != "RUNNING":
        return f"it is {job.state}, not RUNNING"
    if not (job.batch and job.requeue):
        return "it cannot be requeued: no batch job, or --no-requeue"
    if not wishes.progress:
        return "it names no progress=FILE, so nobody could tell whether it resumed"
    return ""


def perform(
    drill: Drill, scheduler: Scheduler, store: Store, catch_up: Callable[[], None]
) -> Iterator[Step]:
    """Interrupt the job, and yield each step once it is known; the first not kept is the last.

    Only the output is judged in every way that was asked for.

    ``catch_up`` brings ``store`` level with the journal.

    Raises:
        DrillRefused: nothing was touched.
        SchedulerError: Slurm did not answer, or refused.
    """
    job = scheduler.jobs([drill.job_id]).get(drill.job_id)
    why = refusal(job)
    if job is None or why:
        raise DrillRefused(why)
    told = progress_of(job)
    if told is None:
        raise DrillRefused("its progress file cannot be read, or holds no step yet")
    wanted = _reference(drill, job)
    before, began = told.step, time.monotonic()
    until = began + drill.timeout_seconds

    def waited(look: Callable[[], str], name: str, missing: str) -> Step:
        while not (seen := look()):
            if time.monotonic() > until:
                return Step(name, False, time.monotonic() - began, missing)
            time.sleep(POLL_SECONDS)
        return Step(name, True, time.monotonic() - began, seen)

    _interrupt(drill, job, scheduler, until)
    yield Step("interrupted", True, time.monotonic() - began, f"{drill.kind} at step {before}")
    if drill.kind == "kill":
        noticed = waited(
            lambda: _decided(job, store, catch_up),
            "noticed",
            "no decision: is recovery run running?",
        )
        yield noticed
        if not noticed.kept:
            return
    restarted = waited(
        lambda: _restarted(job, scheduler), "restarted", "it does not run again: recovery explain"
    )
    yield restarted
    if not restarted.kept:
        return
    resumed = waited(
        lambda: _resumed(job, before, scheduler),
        "resumed",
        f"its work has not gone beyond step {before}",
    )
    yield resumed
    if not (resumed.kept and (drill.check or wanted)):
        return
    ended = waited(lambda: _over(job, scheduler), "ended", "it still runs")
    yield ended
    if ended.kept and drill.check:
        yield _checked(drill.check, began)
    if ended.kept and wanted:
        yield _compared(drill, job, wanted, began)


def progress_of(job: Job) -> progress.Progress | None:
    """Return what a job's progress file tells and when it was written, read as the job's user."""
    path = Path(job.work_dir) / (optin.parse(job.comment).progress or "")

    def look() -> bytes:
        with as_user.open_regular(path) as file:
            written = os.fstat(file.fileno()).st_mtime
            return f"{written!r}\n".encode() + file.read(_PROGRESS_BYTES)

    read = as_user.look(job.uid, look, READ_SECONDS)
    written, _, content = read.output.partition(b"\n")
    return progress.in_file(content, float(written)) if read.status == "ok" else None


def _reference(drill: Drill, job: Job) -> dict[str, str]:
    """The digests that the output must have in the end, read before anything is touched."""
    if drill.reference is None:
        return {}
    try:
        return digests.of(job.uid, drill.reference.absolute(), CHECK_SECONDS)
    except digests.DigestError as error:
        raise DrillRefused(f"there is nothing to compare with: {error}") from error


def _compared(drill: Drill, job: Job, wanted: dict[str, str], began: float) -> Step:
    """Whether the job's files are the reference's, bit for bit."""
    output = Path(job.work_dir) / (drill.output or "")
    try:
        found = digests.of(job.uid, output, CHECK_SECONDS, wanted)
    except digests.DigestError as error:
        return Step("weights", False, time.monotonic() - began, str(error))
    if len(wanted) == len(found) == 1:  # two files, which may have different names
        found = dict(zip(wanted, found.values(), strict=True))
    why = digests.difference(wanted, found)
    name, one = next(iter(wanted.items()))
    same = f"{len(wanted)} files" if len(wanted) > 1 else name
    detail = why or f"{same} as in the reference, sha256 {one[:12]}…"
    return Step("weights", not why, time.monotonic() - began, detail)


def _interrupt(drill: Drill, job: Job, scheduler: Scheduler, until: float) -> None:
    name = job.name_for_commands
    if drill.kind == "kill":
        _kill(name)
        return
    scheduler.requeue(name)
    while True:
        now = scheduler.jobs([job.id]).get(job.id)
        if (now is not None and now.pending) or time.monotonic() > until:
            break
        time.sleep(POLL_SECONDS)
    time.sleep(RESTART_GAP_SECONDS)
    without = job.nodes[:1] if drill.kind == "exclude" else ()
    scheduler.start_now(name, [*job.excluded, *without])


def _kill(job: str) -> None:
    """Abort the ranks of the job's newest step, or its batch script where it has no step.

    Not by SIGKILL: slurmstepd then writes "CANCELLED" into the job's log (22.05, measured), and
    what a person has cancelled is left alone.
    """
    steps = _slurm("squeue", "--steps", f"--jobs={job}", "--noheader", "--format=%i").split()
    ranks = sorted(int(step.split(".")[1]) for step in steps if step.split(".")[-1].isdecimal())
    what = [f"{job}.{ranks[-1]}"] if ranks else ["--batch", job]
    _slurm("scancel", "--signal=ABRT", *what)


def _slurm(*arguments: str) -> str:
    try:
        done = command.run(arguments, os.environ, _COMMAND_SECONDS, _OUTPUT_BYTES)
    except (command.CommandTimeout, command.OutputTooLarge, OSError) as error:
        raise SchedulerUnavailable(f"{arguments[0]}: {error}") from error
    if done.status:
        raise CommandRefused(f"{arguments[0]}: {done.stderr.strip()[-200:]}")
    return done.stdout


def _decided(job: Job, store: Store, catch_up: Callable[[], None]) -> str:
    catch_up()
    for decision in store.decisions(job=str(job.id), limit=20):
        if (
            decision.attempt  # of the number of an array there are its other tasks' as well
            and (decision.attempt.job_id, decision.attempt.restart) == (job.id, job.restarts)
            and decision.uid == job.uid
        ):
            return _told(decision)
    return ""


def _told(decision: Decision) -> str:
    return f"{decision.id}: {decision.job.verdict}: {decision.cause.summary}"


def _restarted(job: Job, scheduler: Scheduler) -> str:
    now = scheduler.jobs([job.id]).get(job.id)
    if now is None or now.restarts <= job.restarts or now.state not in ("RUNNING", "COMPLETED"):
        return ""
    return f"on {', '.join(now.nodes)}"


def _resumed(job: Job, before: int, scheduler: Scheduler) -> str:
    """What the attempt that runs now has written itself, if that is beyond ``before``.

    The interrupted one may have gone on for a step or two after it was looked at.
    """
    told, now = progress_of(job), scheduler.jobs([job.id]).get(job.id)
    if told is None or now is None or told.time is None or told.time < now.start_time:
        return ""
    return f"step {told.step}, beyond {before}" if told.step > before else ""


def _over(job: Job, scheduler: Scheduler) -> str:
    now = scheduler.jobs([job.id]).get(job.id)
    return "COMPLETED" if now is None or now.state == "COMPLETED" else ""


def _checked(check: Sequence[str], began: float) -> Step:
    try:
        done = subprocess.run(
            list(check), stdin=subprocess.DEVNULL, capture_output=True, timeout=CHECK_SECONDS,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return Step("output", False, time.monotonic() - began, f"{check[0]}: {error}")
    said = (done.stdout + done.stderr).decode("utf-8", "replace").strip()[-200:]
    detail = f"{check[0]} says so" if done.returncode == 0 else f"status {done.returncode}: {said}"
    return Step("output", done.returncode == 0, time.monotonic() - began, detail)
