"""The activity probe: what the GPUs and the processes of opted-in running jobs show.

Looks on every node of such a job, in health checks. Nothing that it finds is a fault of anything by
itself: whether a job hangs is for who sees its progress to say (the controller, ``stalls``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurm_hooks import catalog, running_jobs
from slurm_hooks.context import boot_id
from slurm_hooks.probes import Look, Probe, Seen, Skipped, gpu_load, job_tasks
from slurm_hooks.probes.job_tasks import Task
from slurm_hooks.record import Evidence, Finding
from slurm_hooks.running_jobs import RunningJob

_EVIDENCE_LIMIT = 16
_REMEMBERED_LIMIT = 2048

MOVING_BYTES_PER_SECOND = 1 << 20
"""Reading or writing more than this, a job loads data or writes a checkpoint. Sockets do not count
(/proc/PID/io counts read and write, and collectives use others)."""

IDLE_CPU_SHARE = 0.02
"""Of one processor for each process: what a program uses that waits for its peers."""


def look(look: Look) -> Seen:
    """Return what each job on this node shows, and keep what the next look compares with.

    Raises:
        Skipped: this is no health check, or no job that opted in runs here.
    """
    if look.context.hook != "health_check":
        raise Skipped("looks at running jobs, in health checks")
    jobs = running_jobs.active(look.config.spool.jobs_of(look.context.node))
    if not jobs:
        raise Skipped("no job that opted in runs here")
    state, now = _remembered(look.state), time.clock_gettime(time.CLOCK_BOOTTIME)
    tasks = job_tasks.of_jobs(jobs.values(), look.context.node, state["tasks"])
    steps = running_jobs.steps_here()
    findings: list[Finding] = []
    gone = {job.id: _gone(job, tasks[job.id], state, steps) for job in jobs.values()}
    for job in jobs.values():
        findings += _of_processes(job, tasks[job.id], gone[job.id], state, now)
    findings += _of_gpus(jobs)
    known = {
        task.key: (job, task.rank, task.step)
        for ones in (tasks, gone)
        for job, found in ones.items()
        for task in found
    }
    kept = {
        "boot": boot_id(),
        "time": now,
        "tasks": dict(list(known.items())[:_REMEMBERED_LIMIT]),
        "moved": {str(job): _moved(found) for job, found in tasks.items()},
    }
    return Seen(tuple(findings), kept)


def _remembered(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the look before has kept; nothing of another boot, whose processes are gone."""
    if state.get("boot") != boot_id():
        return {"tasks": {}, "moved": {}, "time": None}
    return state


def _moved(tasks: Iterable[Task]) -> dict[str, tuple[int, float]]:
    return {task.key: (task.moved_bytes, task.cpu_seconds) for task in tasks}


def _gone(
    job: RunningJob,
    tasks: Sequence[Task],
    before: Mapping[str, Any],
    steps: set[tuple[int, str]],
) -> list[Task]:
    """The ranks seen before of steps that still run here, of which no process is left."""
    here = {(task.step, task.rank) for task in tasks}
    found: dict[tuple[int, int], Task] = {}
    for key, (one, rank, step) in before["tasks"].items():
        if one != job.id or rank is None or step is None or (step, rank) in here:
            continue
        if (job.id, str(step)) in steps:
            pid, _, started = key.partition(":")
            found[step, rank] = Task(int(pid), int(started), "its process", "", rank, step)
    return list(found.values())


def _of_processes(
    job: RunningJob,
    tasks: Sequence[Task],
    gone: Sequence[Task],
    before: Mapping[str, Any],
    now: float,
) -> Iterable[Finding]:
    stopped = [task for task in tasks if task.state == "T"]
    yield from _told("activity.process_stopped", job, stopped)
    yield from _told("activity.process_blocked", job, job_tasks.still_blocked(tasks))
    yield from _told("activity.process_gone", job, gone)
    known = before["moved"].get(str(job.id), {})
    if before["time"] is None or not known or now <= before["time"]:
        return
    seconds = now - before["time"]
    same = [(task, known[task.key]) for task in tasks if task.key in known]
    moved = sum(max(0, task.moved_bytes - old[0]) for task, old in same)
    if moved / seconds >= MOVING_BYTES_PER_SECOND:
        yield catalog.finding(
            "activity.moving_data",
            details={"rate": f"{moved / seconds / 1e6:.1f} MB/s"},
            job_id=job.id,
        )
    used = [(task.cpu_seconds - old[1]) / seconds for task, old in same]
    if used and len(same) == len(tasks) and max(used) <= IDLE_CPU_SHARE:
        yield catalog.finding("activity.processes_idle", job_id=job.id, count=len(used))


def _told(code: str, job: RunningJob, tasks: Sequence[Task]) -> Iterable[Finding]:
    if not tasks:
        return
    names = ", ".join(task.told for task in tasks[:4])
    more = f" and {len(tasks) - 4} more" if len(tasks) > 4 else ""
    seen = tuple(
        Evidence("processes", job_tasks.doing(task), key=task.key)
        for task in tasks[:_EVIDENCE_LIMIT]
    )
    yield catalog.finding(
        code,
        evidence=seen,
        details={"names": names + more},
        job_id=job.id,
        rank=tasks[0].rank,
        pid=tasks[0].pid,
        count=len(tasks),
    )


def _of_gpus(jobs: Mapping[int, RunningJob]) -> Iterable[Finding]:
    """One finding for each job that has GPUs here, and whose GPUs say how busy they are."""
    minors = {gpu for job in jobs.values() for gpu in job.gpus}
    loads = gpu_load.read(minors) if minors else []
    for job in jobs.values():
        own = [load for load in loads if load.gpu in job.gpus]
        if not own:
            continue
        states = [gpu_load.judged(load) for load in own]
        kind = next(one for one in ("working", "spinning", "idle") if one in states)
        counts = ", ".join(f"{states.count(one)} {one}" for one in dict.fromkeys(states))
        yield catalog.finding(
            f"activity.gpus_{kind}",
            evidence=(Evidence("nvml", "; ".join(load.told for load in own)[:1500]),),
            details={"counts": counts},
            job_id=job.id,
            count=len(own),
        )


PROBE = Probe(
    name="activity",
    look=look,
    needs="a running job that opted in; for its GPUs the NVIDIA driver and nvidia-ml-py",
    cost="half a second of waiting, where such a job runs",
    codes=(
        "activity.gpus_idle",
        "activity.gpus_spinning",
        "activity.gpus_working",
        "activity.moving_data",
        "activity.process_blocked",
        "activity.process_gone",
        "activity.process_stopped",
        "activity.processes_idle",
    ),
)
