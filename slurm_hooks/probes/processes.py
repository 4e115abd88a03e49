"""The processes probe: what a finished job left behind on this node and on its GPUs.

Runs in the epilog. A process is the job's because it carries the job's id (``process_table``), and
for no other reason: not because it is the same user's, and not because Slurm did not answer. What
is found is reported; it is ended only where the configuration says so, and nothing is ended while
anything of another job that may be the same user's is on the node.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

from slurm_hooks import catalog
from slurm_hooks.probes import Look, Probe, Seen, Skipped
from slurm_hooks.probes.nvml_processes import gpus_by_pid
from slurm_hooks.probes.process_table import FIRST_USER_UID, Process, Table, survey, waits_in
from slurm_hooks.record import Evidence, Finding, RecordJob

_SOURCE = "processes"
_EVIDENCE_LIMIT = 16
_NAMES_LIMIT = 4
_JOBS_LIMIT = 16
_KILL_SECONDS = 1.0
"""How long a process that was sent SIGKILL may take to be gone."""

_NVML_SECONDS = 2.0
"""Time for asking NVML who is on the GPUs; a healthy one takes tens of milliseconds."""

_MORE_ROUNDS = 2
"""How often what was started while others were ended is looked for again, without a grace."""


def look(given: Look) -> Seen:
    """Return what the job has left, after ending it where that is configured and safe.

    Raises:
        Skipped: no job has just ended here, or it was a system user's.
    """
    settings = given.config.probes.processes
    job = given.context.job
    if given.context.hook != "epilog" or job is None or job.uid is None:
        raise Skipped("looks at what a finished job left, in its epilog")
    if job.uid < FIRST_USER_UID:
        raise Skipped(f"uid {job.uid} is a system user's, whose processes are left alone")
    table = survey(job.uid)
    on_gpus: Mapping[int, tuple[int, ...]] = {}
    if any(job.uid in process.uids for process in table.processes):
        on_gpus = gpus_by_pid(job.gpus, min(_NVML_SECONDS, settings.deadline / 4))
        table = _with_gpus(table, job, on_gpus)
    left, loose = _left_by(job, table), _loose_on_gpus(job, table)
    why_not = _why_not_end(job, table)
    findings: list[Finding] = []
    if left and settings.end and not why_not:
        found = left
        for grace in (settings.grace, *(0.0,) * _MORE_ROUNDS):
            stayed, why_not = _end(job, left, grace)
            left = _left_after(job, _with_gpus(survey(job.uid), job, on_gpus), stayed)
            if why_not or all(_same(process, stayed) for process in left):
                break  # else some were started meanwhile
        gone = [process for process in found if not _same(process, left)]
        findings += _told("processes.ended", job, gone)
        findings += _held([*left, *loose], job)
        if not why_not:
            findings += _told("processes.unkillable", job, left)
            left = []
    else:
        findings += _held([*left, *loose], job)
    findings += _told("processes.left_behind", job, left, f" ({why_not})" if why_not else "")
    return Seen(tuple(findings), notes={"left": len(left), "other_jobs": _others(job, table)})


def _with_gpus(table: Table, job: RecordJob, on_gpus: Mapping[int, tuple[int, ...]]) -> Table:
    """The table with what NVML says of the user's processes; of others nothing is looked at."""
    known = tuple(
        replace(process, gpus=tuple(sorted({*process.gpus, *on_gpus[process.pid]})))
        if process.pid in on_gpus and job.uid in process.uids
        else process
        for process in table.processes
    )
    return replace(table, processes=known)


def _left_by(job: RecordJob, table: Table) -> list[Process]:
    """The processes that carry the job's id, but for the hook's own.

    A later attempt of the job has the same id: what it was started with tells them apart.
    """
    hook = frozenset({os.getpid(), os.getppid()})
    return [
        process
        for process in table.processes
        if process.job == job.id
        and (process.restart is None or process.restart == job.restart)
        and not table.descends_from(process.pid, hook)
    ]


def _left_after(job: RecordJob, table: Table, stayed: Sequence[Process]) -> list[Process]:
    """What is left once some were ended; ``stayed`` are those that were still there then.

    One in state D is not asked for its environment again: that it was the job's is known.
    """
    left = _left_by(job, table)
    now = {(process.pid, process.started): process for process in table.processes}
    for process in stayed:
        found = now.get((process.pid, process.started))
        if found and not _same(found, left):
            left.append(replace(process, state=found.state))
    return left


def _loose_on_gpus(job: RecordJob, table: Table) -> list[Process]:
    """The user's processes of no job at all that are on one of the job's GPUs."""
    return [
        process
        for process in table.processes
        if process.job is None and job.uid in process.uids and set(process.gpus) & set(job.gpus)
    ]


def _others(job: RecordJob, table: Table) -> list[int]:
    return sorted(table.other_jobs(job.id, job.uid or 0))


def _why_not_end(job: RecordJob, table: Table) -> str:
    """Why nothing of this job may be ended now; empty if it may."""
    others = _others(job, table)
    if others:
        shown = ", ".join(map(str, others[:_JOBS_LIMIT]))
        return f"not ended: job {shown}, which may be the same user's, is on this node"
    for step in table.steps:
        if step.job is None:
            return f"not ended: slurmstepd {step.pid} does not say whose it is"
        if step.job == job.id:
            return f"not ended: slurmstepd {step.pid} of this job still runs"
    return ""


def _end(
    job: RecordJob, left: Sequence[Process], grace_seconds: float
) -> tuple[list[Process], str]:
    """End ``left`` by SIGTERM, then SIGKILL; return those that are still there, and why if spared.

    Each is held by a pidfd before a second look confirms that it is still the process that was
    seen, so that nobody who was given the same number since is hit.
    """
    with ExitStack() as held:
        handles: dict[int, Process] = {}
        for process in left:
            with suppress(ProcessLookupError):
                handle = os.pidfd_open(process.pid)
                held.callback(os.close, handle)
                handles[handle] = process
        table = survey(job.uid or 0)
        why_not = _why_not_end(job, table)
        if why_not:
            return list(left), why_not
        confirmed = _left_by(job, table)
        waiting = {
            handle: process for handle, process in handles.items() if _same(process, confirmed)
        }
        for number, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, _KILL_SECONDS)):
            if seconds == 0:
                continue
            for handle in waiting:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, number)
            _wait(waiting, seconds)
        return list(waiting.values()), ""


def _wait(waiting: dict[int, Process], seconds: float) -> None:
    """Take out of ``waiting`` those that end within ``seconds``: their pidfd becomes readable."""
    poll = select.poll()
    for handle in waiting:
        poll.register(handle, select.POLLIN)
    until = time.monotonic() + seconds
    while waiting and time.monotonic() < until:
        for handle, _ in poll.poll(max(1.0, (until - time.monotonic()) * 1000)):
            poll.unregister(handle)
            del waiting[handle]


def _same(process: Process, others: Iterable[Process]) -> bool:
    return any((process.pid, process.started) == (one.pid, one.started) for one in others)


def _told(
    code: str, job: RecordJob, processes: Sequence[Process], why: str = ""
) -> Iterable[Finding]:
    """One finding on ``processes``, or none."""
    if not processes:
        return
    names = [f"{process.name} (pid {process.pid})" for process in processes[:_NAMES_LIMIT]]
    more = len(processes) - len(names)
    yield catalog.finding(
        code,
        evidence=tuple(_evidence(process) for process in processes[:_EVIDENCE_LIMIT]),
        details={"names": ", ".join(names) + (f" and {more} more" if more else ""), "why": why},
        job_id=job.id,
        pid=processes[0].pid,
        count=len(processes),
    )


def _held(processes: Sequence[Process], job: RecordJob) -> Iterable[Finding]:
    """One finding for each GPU that one of ``processes`` still has open."""
    for gpu in sorted({gpu for process in processes for gpu in process.gpus}):
        holders = [process for process in processes if gpu in process.gpus]
        yield catalog.finding(
            "processes.gpu_held",
            evidence=tuple(_evidence(process) for process in holders[:_EVIDENCE_LIMIT]),
            details={"names": ", ".join(f"{one.name} (pid {one.pid})" for one in holders[:4])},
            gpu=gpu,
            job_id=job.id,
            pid=holders[0].pid,
            count=len(holders),
        )


def _evidence(process: Process) -> Evidence:
    words = [f"pid {process.pid} {process.name}, state {process.state}"]
    if process.state == "D" and (place := waits_in(process.pid)):
        words.append(f"in {place}")
    words.append(f"the job's by its {process.by}" if process.by else "of no job, the same user's")
    if process.gpus:
        words.append("is on GPU " + ", ".join(map(str, process.gpus)))
    return Evidence(_SOURCE, ", ".join(words), key=f"{process.pid}:{process.started}")


PROBE = Probe(
    name="processes",
    look=look,
    needs="root, to read other users' /proc files; Linux 5.3 (pidfd) to end what is left",
    cost="reads a few files of /proc for each process, and asks NVML where the user has any",
    codes=(
        "processes.ended",
        "processes.gpu_held",
        "processes.left_behind",
        "processes.unkillable",
    ),
)
