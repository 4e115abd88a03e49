"""Out-of-memory kills: whose memory limit it was, and which Slurm job it hit.

A job that passes its own limit is the job's affair; a machine without memory is the node's. The
kernel's summary line (``oom-kill:constraint=…``, since Linux 5.0; mm/oom_kill.c) names both the
cgroup whose limit was reached and the victim's; older kernels say ``Task in … killed as a result
of limit of …``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from slurm_hooks.catalog.kernel_fact import Fact
from slurm_hooks.catalog.kernel_line import KernelLine

_SUMMARY = re.compile(
    r"oom-kill:constraint=CONSTRAINT_\w+,.*?"
    r"(?:,oom_memcg=(?P<limit>[^,]*)|,global_oom)?"
    r",task_memcg=(?P<cgroup>[^,]*),task=(?P<task>.*),pid=(?P<pid> *\d+),uid=(?P<uid> *\d+)$",
    re.DOTALL,
)
_OLD_SUMMARY = re.compile(r"Task in (?P<cgroup>\S+) killed as a result of limit of (?P<limit>\S+)")
_KILLED = re.compile(
    r"(?P<memcg>Memory cgroup out|Out) of memory(?: \([^)]*\))?: Kill(?:ed)? process (?P<pid>\d+) "
    r"\((?P<task>.*?)\)"
)
_JOB = re.compile(r"(?:/slurm[^/]*|/[^/]*slurmstepd\.scope)/(?:uid_\d+/)?job_(\d{1,10})(?:/|$)")
"""Slurm's own part of a cgroup's path, v1 and v2. The first match counts: what is below it may
have been made by the job."""


@dataclass(frozen=True)
class _Kill:
    limit: str | None
    cgroup: str | None


def oom_facts(lines: Iterable[KernelLine]) -> list[Fact]:
    """Return the facts of the out-of-memory kills in ``lines``, in order."""
    facts: list[Fact] = []
    by_pid: dict[str, Fact] = {}
    older: _Kill | None = None
    for line in lines:
        summary = _SUMMARY.match(line.text)
        old_summary = _OLD_SUMMARY.match(line.text)
        killed = _KILLED.match(line.text)
        if summary:
            kill = _Kill(summary["limit"], summary["cgroup"])
            fact = _fact(kill, summary["task"], line)
            by_pid[summary["pid"].strip()] = fact
            facts.append(fact)
        elif old_summary:
            older = _Kill(old_summary["limit"], old_summary["cgroup"])
        elif killed and killed["pid"] in by_pid:
            facts.append(replace(by_pid[killed["pid"]], line=line, times=0))
        elif killed:
            unknown = _Kill("(a cgroup not named)" if "cgroup" in killed["memcg"] else None, None)
            facts.append(_fact(older or unknown, killed["task"], line))
            older = None
    return facts


def slurm_job(cgroup: str | None) -> int | None:
    """Return the Slurm job that a cgroup's path belongs to, if it is one of Slurm's.

    >>> slurm_job("/system.slice/slurmstepd.scope/job_12/step_0/user/task_0")
    12
    """
    match = _JOB.search(cgroup or "")
    return int(match[1]) if match else None


def _fact(kill: _Kill, task: str, line: KernelLine) -> Fact:
    job = slurm_job(kill.limit)
    details = {"task": task[:32], "cgroup": (kill.limit or "")[:128]}
    if job is not None:
        return Fact("job.out_of_memory", line, about={"job_id": job}, details=details)
    if kill.limit is None or slurm_job(kill.cgroup) is not None:
        return Fact("host.out_of_memory", line, details=details)
    return Fact("host.cgroup_out_of_memory", line, tag=kill.limit, details=details)
