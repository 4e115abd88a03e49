"""Whose job a process belongs to, and which jobs are alive on this node, as /proc tells.

No Slurm command is asked, so none can fail to answer: a process belongs to the job whose cgroup it
is in, else to the one whose SLURM_JOB_ID it was started with; a job is alive while a slurmstepd
of it runs. What follows from that is ``processes``' to decide.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

FIRST_USER_UID = 1000
"""Lower ones are the system's (login.defs(5), UID_MIN); nothing of theirs is anybody's leftover."""

PROCESSES_LIMIT = 65_536
_FDS_LIMIT = 4_096
_FILE_BYTES = 8_192
_ENVIRON_BYTES = 1 << 20

_CGROUP_JOB = re.compile(r"/job_(\d{1,10})(?:/|$)", re.MULTILINE)
"""``/slurm/uid_1000/job_7/step_0`` (cgroup v1), ``/system.slice/slurmstepd.scope/job_7/step_0``
(v2): Slurm's documentation of both plugins."""

_STEP_TITLE = re.compile(rb"slurmstepd: \[(\d{1,10})(?:[.+_][^\]]*)?\]")
"""How slurmstepd names itself: ``slurmstepd: [7.batch]``, measured on 22.05."""

_SCOPE_KEEPER = b"infinity"
"""``slurmstepd infinity`` keeps the systemd scope of cgroup v2 and belongs to no job."""

_GPU_FILE = re.compile(r"/dev/nvidia(\d{1,4})")


@dataclass(frozen=True)
class Process:
    """A process of a user.

    ``uids`` are the real, effective and saved ones. ``started`` is in clock ticks since boot: with
    the pid, it names a process for good. ``job`` is the job it belongs to, told ``by`` its cgroup
    or its environment, and ``restart`` the attempt that the environment names. ``gpus`` are minor
    numbers of the GPUs it is on; of those only the asked user's processes are known.
    """

    pid: int
    parent: int
    name: str
    state: str
    uids: tuple[int, int, int]
    started: int
    job: int | None = None
    by: str = ""
    restart: int | None = None
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Step:
    """A running slurmstepd; ``job`` is None where its title does not tell it (yet)."""

    pid: int
    job: int | None


@dataclass(frozen=True)
class Table:
    """All users' processes, the slurmstepds, and every process's parent, at one moment."""

    processes: tuple[Process, ...]
    steps: tuple[Step, ...]
    parents: Mapping[int, int]

    def descends_from(self, pid: int, ancestors: frozenset[int]) -> bool:
        """Whether ``pid`` is one of ``ancestors`` or a descendant of one."""
        seen: set[int] = set()
        while pid > 0 and pid not in seen:
            if pid in ancestors:
                return True
            seen.add(pid)
            pid = self.parents.get(pid, 0)
        return False

    def other_jobs(self, job: int, uid: int) -> frozenset[int]:
        """Return the jobs but ``job`` that have something on this node and may be the user's.

        One whose user nothing tells counts as theirs.
        """
        found = {p.job for p in self.processes if p.job is not None and uid in p.uids}
        for step in self.steps:
            if step.job is not None and not self._is_someone_elses(step, uid):
                found.add(step.job)
        return frozenset(found - {job, None})

    def _is_someone_elses(self, step: Step, uid: int) -> bool:
        mine = frozenset({step.pid})
        users = {
            process.uids
            for process in self.processes
            if process.job == step.job or self.descends_from(process.pid, mine)
        }
        return bool(users) and not any(uid in uids for uids in users)


def survey(uid: int) -> Table:
    """Read /proc; more than the names and owners is read of processes of ``uid`` alone."""
    processes: list[Process] = []
    steps: list[Step] = []
    parents: dict[int, int] = {}
    numbers = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    for _, pid in zip(range(PROCESSES_LIMIT), numbers, strict=False):
        status = _fields(_read(pid, "status"))
        uids = _uids(status.get("Uid", ""))
        if uids is None:
            continue  # it ended meanwhile
        parent, state = int(status.get("PPid") or 0), status.get("State", "?")[:1]
        parents[pid] = parent
        name = status.get("Name", "")
        if uids[0] in (0, os.geteuid()) and name.startswith("slurmstepd"):
            step = _step(pid, state)
            steps += [step] if step else []
        elif min(uids) >= FIRST_USER_UID and state not in ("Z", "X"):
            process = _process(pid, parent, name, state, uids, uid)
            processes += [process] if process else []
    return Table(tuple(processes), tuple(steps), parents)


_NODE_SCRIPTS = (b"prolog_slurmd", b"epilog_slurmd")
"""SLURM_SCRIPT_CONTEXT of slurmd's own scripts, such as this hook: told of a job, and none
of its processes. They run as the job's user where slurmd itself does."""


def waits_in(pid: int) -> str:
    """Return the kernel function that a process waits in, empty where that is not readable."""
    place = _read(pid, "wchan").strip()
    return "" if place == "0" else place


def runs_in(job: int) -> bool:
    """Whether this process is in that job's own cgroup, as a hook is with PrologFlags=RunInJob."""
    return _cgroup_job(_read(os.getpid(), "cgroup")) == job


def _process(
    pid: int, parent: int, name: str, state: str, uids: tuple[int, int, int], uid: int
) -> Process | None:
    # The name in stat is in parentheses and may hold anything (proc(5)); field 22 is the start.
    rest = _read(pid, "stat").rpartition(")")[2].split()
    if len(rest) < 20:
        return None
    job, by, restart = _cgroup_job(_read(pid, "cgroup")), "cgroup", None
    gpus: tuple[int, ...] = ()
    if uid in uids:
        gpus = _gpus(pid)
        # environ waits for a lock that a stuck process may hold.
        if job is None and state != "D" and set(uids) == {uid}:
            environ = _environ(pid)
            is_script = environ.get(b"SLURM_SCRIPT_CONTEXT") in _NODE_SCRIPTS
            if not (is_script or _is_of_another_slurmd(environ)):
                job, by = _number(environ.get(b"SLURM_JOB_ID")), "environment"
            restart = _number(environ.get(b"SLURM_RESTART_COUNT")) or 0
    return Process(
        *(pid, parent, name, state, uids, int(rest[19])),
        job=job,
        by=by if job is not None else "",
        restart=restart,
        gpus=gpus,
    )


def _step(pid: int, state: str) -> Step | None:
    line = b"" if state == "D" else _read_bytes(pid, "cmdline", _FILE_BYTES)
    if _SCOPE_KEEPER in line.split(b"\0")[1:2] or state in ("Z", "X"):
        return None
    title = _STEP_TITLE.match(line)
    return Step(pid, int(title[1]) if title else None)


def _cgroup_job(text: str) -> int | None:
    jobs = {int(number) for number in _CGROUP_JOB.findall(text)}
    return jobs.pop() if len(jobs) == 1 else None


def _is_of_another_slurmd(environ: Mapping[bytes, bytes]) -> bool:
    """Whether a process was started by another slurmd of this machine, for a job of any number.

    slurmstepd tells each task its node and its slurm.conf, slurmd its hooks (measured on 22.05).
    """
    ours = os.environb
    return any(
        name in environ and name in ours and environ[name] != ours[name]
        for name in (b"SLURMD_NODENAME", b"SLURM_CONF")
    )


def _environ(pid: int) -> dict[bytes, bytes]:
    """The SLURM… variables a process was started with; of one given twice the first, as getenv."""
    found: dict[bytes, bytes] = {}
    for entry in _read_bytes(pid, "environ", _ENVIRON_BYTES).split(b"\0"):
        if entry.startswith(b"SLURM"):
            name, _, value = entry.partition(b"=")
            found.setdefault(name, value)
    return found


def _gpus(pid: int) -> tuple[int, ...]:
    found: set[int] = set()
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)  # noqa: PTH208 - thousands of them, of many processes
    except OSError:
        return ()
    for name in names[:_FDS_LIMIT]:
        try:
            file = _GPU_FILE.fullmatch(os.readlink(f"{folder}/{name}"))  # noqa: PTH115
        except OSError:
            continue
        if file:
            found.add(int(file[1]))
    return tuple(sorted(found))


def _fields(text: str) -> dict[str, str]:
    pairs: Iterable[tuple[str, str, str]] = (line.partition(":\t") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _uids(text: str) -> tuple[int, int, int] | None:
    numbers = text.split()
    if len(numbers) < 3 or not all(number.isdigit() for number in numbers[:3]):
        return None
    return int(numbers[0]), int(numbers[1]), int(numbers[2])


def _number(text: bytes | None) -> int | None:
    return int(text) if text and re.fullmatch(rb"[0-9]{1,10}", text) else None


def _read(pid: int, name: str) -> str:
    return _read_bytes(pid, name, _FILE_BYTES).decode("utf-8", "replace")


def _read_bytes(pid: int, name: str, limit: int) -> bytes:
    """A file of a process, or nothing where the process ended or the file is not readable."""
    content = b""
    try:
        with Path(f"/proc/{pid}/{name}").open("rb", buffering=0) as source:
            while len(content) < limit:
                more = source.read(limit - len(content))
                if not more:
                    break
                content += more
    except OSError:
        return b""
    return content
