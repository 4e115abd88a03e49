"""A running job's processes on this node: which rank each is, and what each does.

Owns reading them from /proc, twice a moment apart where a state that passes must be told from one
that stays. What the states mean is ``activity``'s to say. Only the kernel's own files are read,
none of the user's. A process in D state may hold the lock that its ``environ`` waits for (proc(5)),
so of such a one is known only what an earlier look has seen.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurm_hooks.probes.process_table import Process, survey, waits_in
from slurm_hooks.running_jobs import RunningJob

PROCESSES_LIMIT = 512
"""Most processes of one job on one node that are looked at; data-loader workers can be hundreds."""

AGAIN_SECONDS = 0.3
"""Between two looks at what is in D state: a write to disk passes, a dead file system does not."""

THREADS_LIMIT = 256
_ENVIRON_BYTES = 1 << 20
_STACK_LINES = 12
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Task:
    """One process. ``started`` is in clock ticks since boot: with the pid it names it for good.

    ``rank`` is the program's own (RANK, else SLURM_PROCID), ``step`` the job step's number, where
    it was started with them. ``state`` is proc(5)'s letter; ``moved_bytes`` and ``cpu_seconds`` are
    what it has read and written by system calls, and computed, since its start.
    """

    pid: int
    started: int
    name: str
    state: str
    rank: int | None = None
    step: int | None = None
    moved_bytes: int = 0
    cpu_seconds: float = 0.0

    @property
    def key(self) -> str:
        """What names the process on this node."""
        return f"{self.pid}:{self.started}"

    @property
    def told(self) -> str:
        """What a person calls it."""
        rank = "" if self.rank is None else f"rank {self.rank}, "
        return f"{rank}{self.name} (pid {self.pid})"


def of_jobs(
    jobs: Collection[RunningJob], node: str, remembered: Mapping[str, Sequence[Any]]
) -> dict[int, tuple[Task, ...]]:
    """Return each job's processes on ``node`` by the job's number, itself and its hooks excepted.

    ``remembered`` has rank and step by ``Task.key``, from the look before.
    """
    found: dict[int, list[Task]] = {job.id: [] for job in jobs}
    for uid in {job.uid for job in jobs}:
        for process in survey(uid).processes:
            if uid not in process.uids:
                continue
            key = f"{process.pid}:{process.started}"
            place = remembered.get(key) or _place(process, node)
            job_id, rank, step = place or (None, None, None)
            if job_id in found and len(found[job_id]) < PROCESSES_LIMIT:
                moved, cpu = _moved_bytes(process.pid), _cpu_seconds(process.pid)
                task = Task(process.pid, process.started, process.name, process.state, rank, step)
                found[job_id].append(replace(task, moved_bytes=moved, cpu_seconds=cpu))
    return {job_id: tuple(tasks) for job_id, tasks in found.items()}


def _place(process: Process, node: str) -> tuple[int, int | None, int | None] | None:
    """The job, rank and step of a process, None where it is none of this node's."""
    if process.job is None:
        return None
    if process.state == "D":
        return process.job, None, None
    told = _started_with(process.pid)
    if told.get("SLURMD_NODENAME", node) != node:
        return None  # several nodes of a rehearsal share one machine
    step, rank = _number(told.get("SLURM_STEP_ID")), _number(told.get("RANK"))
    if rank is None and step is not None:  # a batch script has number 0 as well
        rank = _number(told.get("SLURM_PROCID"))
    return process.job, rank, step


def still_blocked(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Return those of ``tasks`` that are in D state, and still are a moment later."""
    blocked = [task for task in tasks if task.state == "D"]
    if not blocked:
        return ()
    time.sleep(AGAIN_SECONDS)
    again = [replace(task, state=_state(task.pid)) for task in blocked]
    return tuple(task for task in again if task.state == "D")


def doing(task: Task) -> str:
    """Return in words what a process does: its state, where it waits, its threads, its stack."""
    words = [f"{task.told}: state {_state(task.pid) or 'gone'}"]
    if place := waits_in(task.pid):
        words.append(f"in {place}")
    threads = _threads(task.pid)
    if len(threads) > 1:
        counted = sorted(threads.items(), key=lambda item: -item[1])[:4]
        words.append("threads: " + ", ".join(f"{count} {what}" for what, count in counted))
    stack = _kernel_stack(task.pid)
    if stack:
        words.append(f"kernel stack: {' < '.join(stack)}")
    return "; ".join(words)


def _started_with(pid: int) -> dict[str, str]:
    """The variables that tell whose process this is; of one given twice the first, as getenv."""
    wanted = ("RANK", "SLURM_PROCID", "SLURM_STEP_ID", "SLURMD_NODENAME")
    found: dict[str, str] = {}
    for entry in _read(pid, "environ", _ENVIRON_BYTES).split("\0"):
        name, _, value = entry.partition("=")
        if name in wanted:
            found.setdefault(name, value)
    return found


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[0-9]{1,7}", text) else None


def _state(pid: int) -> str:
    rest = _read(pid, "stat").rpartition(")")[2].split()
    return rest[0] if rest else ""


def _cpu_seconds(pid: int) -> float:
    rest = _read(pid, "stat").rpartition(")")[2].split()
    if len(rest) < 13:
        return 0.0
    return (int(rest[11]) + int(rest[12])) / _TICKS  # utime and stime, proc(5)


def _moved_bytes(pid: int) -> int:
    numbers = re.findall(r"^[rw]char: (\d+)$", _read(pid, "io"), re.MULTILINE)
    return sum(map(int, numbers))


def _threads(pid: int) -> dict[str, int]:
    """How many threads are in which state and place."""
    found: dict[str, int] = {}
    try:
        names = os.listdir(f"/proc/{pid}/task")[:THREADS_LIMIT]  # noqa: PTH208
    except OSError:
        return {}
    for name in names:
        thread = f"{pid}/task/{name}"
        state = _read(thread, "stat").rpartition(")")[2].split()[:1]
        place = _read(thread, "wchan").strip().removeprefix("0")
        what = f"{state[0] if state else '?'} {place}".strip()
        found[what] = found.get(what, 0) + 1
    return found


def _kernel_stack(pid: int) -> list[str]:
    """Functions of the kernel that the process is in, innermost first; root alone may read it."""
    lines = _read(pid, "stack").splitlines()[:_STACK_LINES]
    return [match[1] for line in lines if (match := re.search(r"\] (\w+)", line))]


def _read(pid: int | str, name: str, limit_bytes: int = 8192) -> str:
    """The start of a file of a process; nothing where it ended or the file is not readable."""
    try:
        with Path(f"/proc/{pid}/{name}").open("rb", buffering=0) as source:
            content = b""
            while len(content) < limit_bytes and (more := source.read(limit_bytes - len(content))):
                content += more
            return content.decode("utf-8", "replace")
    except OSError:
        return ""
