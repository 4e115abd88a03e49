"""Which processes of this node are stuck in the kernel, and which jobs still have steps here.

One walk over /proc. Threads other than the first of a process are not looked at: they would make
the walk many times longer, and what blocks them mostly blocks the first as well.
"""

from __future__ import annotations

import re
from pathlib import Path

from slurm_hooks.frozen import frozen
from slurm_hooks.probes.kernel_files import names, text

_MAX_BLOCKED = 256
_MAX_STEPS = 4096

_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD in the flags of /proc/PID/stat: drivers' own threads may wait in D for ever."""

_STATE, _FLAGS, _START = 0, 6, 19
"""Fields of /proc/PID/stat, counted behind the name (proc(5): state is the third)."""


@frozen
class Blocked:
    """A process in uninterruptible sleep (D), with the place in the kernel where it waits.

    ``identity`` names it for ever (pid and start time); it has not run as long as ``switches``,
    its voluntary context switches, stays the same.
    """

    pid: int
    identity: str
    name: str
    place: str
    switches: int


@frozen
class Processes:
    """What one walk saw: blocked processes, and the jobs that have a slurmstepd here.

    ``has_steps`` is true as well for a slurmstepd that does not say yet whose it is.
    """

    blocked: tuple[Blocked, ...]
    jobs: frozenset[int]
    has_steps: bool


def walk(proc: Path) -> Processes:
    """Look at every process under ``proc``."""
    blocked: list[Blocked] = []
    jobs: set[int] = set()
    has_steps = False
    for entry in names(str(proc)):
        if not entry.isdigit():
            continue
        here = f"{proc}/{entry}"
        name, _, rest = (text(f"{here}/stat") or "").partition("(")[2].rpartition(")")
        fields = rest.split()
        if len(fields) <= _START:
            continue
        if fields[_STATE] == "D" and len(blocked) < _MAX_BLOCKED:
            one = _blocked(here, entry, name, fields)
            blocked += [one] if one else []
        elif name == "slurmstepd" and len(jobs) < _MAX_STEPS:
            job = _step_of(here)
            has_steps |= job != _NOBODYS
            jobs |= {int(job)} if job.isdigit() else set()
    return Processes(tuple(blocked), frozenset(jobs), has_steps)


def _blocked(here: str, pid: str, name: str, fields: list[str]) -> Blocked | None:
    flags = fields[_FLAGS]
    if not flags.isdigit() or int(flags) & _KERNEL_THREAD:
        return None
    place = text(f"{here}/wchan") or ""
    if "refrigerator" in place:  # a paused container: frozen, not stuck
        return None
    switches = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", text(f"{here}/status") or "", re.M)
    return Blocked(
        pid=int(pid),
        identity=f"{pid}:{fields[_START]}",
        name="".join(letter if letter.isprintable() else "?" for letter in name),
        place="" if place == "0" else place,
        switches=int(switches.group(1)) if switches else -1,
    )


_NOBODYS = "infinity"


def _step_of(here: str) -> str:
    """The job's number in ``slurmstepd: [12.batch]``, or ``infinity``, or nothing.

    ``slurmstepd infinity`` only keeps the node's cgroup (Slurm, cgroup/v2 plugin) and never ends.
    """
    title = (text(f"{here}/cmdline") or "").replace("\0", " ").strip()
    if title.endswith(" infinity"):
        return _NOBODYS
    step = re.search(r"\[(\d{1,10})[.\]]", title)
    return step.group(1) if step else ""
