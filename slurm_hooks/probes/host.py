"""The host probe: is this node as large, as free and as steady as Slurm and its jobs believe?

Judges what ``host_reading``, ``host_processes`` and ``kernel_clock`` read. Reports what stays wrong
when a job is gone or what the node has lost, never that it is busy. All of it is read from the
kernel's files: importing psutil takes 15 ms, and its walk three times as long for each process,
where a whole look takes 0.2 ms in a prolog and otherwise 11 us for each process (measured).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slurm_hooks import catalog, slurm_conf
from slurm_hooks.context import HookContext, boot_id
from slurm_hooks.probe_config import HostProbe
from slurm_hooks.probes import Look, Probe, Seen
from slurm_hooks.probes.host_processes import Processes, walk
from slurm_hooks.probes.host_reading import (
    Memory,
    Space,
    count_cpus,
    read_load,
    read_memory,
    read_spaces,
    read_throttled,
)
from slurm_hooks.probes.host_remembered import Remembered
from slurm_hooks.probes.kernel_files import text
from slurm_hooks.record import Evidence, Finding, utc

if TYPE_CHECKING:
    from slurm_hooks.probes.kernel_clock import KernelClock

CODES = (
    "host.clock_offset",
    "host.clock_unsynchronised",
    "host.cpu_throttled",
    "host.cpus_missing",
    "host.huge_pages_left",
    "host.inodes_low",
    "host.load_high",
    "host.memory_left",
    "host.memory_missing",
    "host.processes_blocked",
    "host.rebooted",
    "host.space_low",
)

_GIB = 1024**3
_HUGE_LEFT_BYTES = _GIB
_MODULE_SHARE = 0.02
"""The smallest share of a node's memory that a lost module can be; less is a kernel's own need."""

_LOW_SHARE = 0.05
"""Of a small file system, less than this is low; of a large one ``min_free_mib`` counts."""

_FULL_BYTES, _FULL_INODES, _LOW_INODES = 1024**2, 16, 1000

_STEPLESS_SECONDS = 600.0
"""A job without a step for so long, and without an epilog seen, is not believed to run here."""

_SETTLED_SECONDS = 1800.0
"""Time after a boot in which a clock may still be looking for its server."""

_SHORTEST_GAP_SECONDS = 30.0
_NAMED = 8
_MAX_REBOOTED = 16


def look(given: Look) -> Seen:
    """Look at the node; a prolog leaves out what takes a walk over all processes."""
    config, context = given.config.probes.host, given.context
    boot = text(str(config.root / "proc/sys/kernel/random/boot_id")) or boot_id()
    earlier = Remembered.recall(given.state)
    before, now = earlier.of_boot(boot), time.clock_gettime(time.CLOCK_BOOTTIME)
    size = slurm_conf.find_size(
        context.node,
        os.environ.get("SLURM_CONF") or given.config.hooks.slurm_conf or None,
        _known_size(given.state),
    )
    memory, cpus = read_memory(config.root), count_cpus(config.root)
    buffer = given.config.spool.buffer_of(context.node)
    findings = [
        *_rebooted(earlier, boot),
        *_smaller(size, memory, cpus, boot),
        *_crowded(config, cpus, boot),
        *_filled(read_spaces(iter((*config.spaces, buffer))), config, context, boot),
    ]
    jobs = _running(before.jobs if earlier.boot == boot else {}, context, config)
    after = replace(before, boot=boot, looked=time.time(), jobs=jobs)
    if context.hook != "prolog":
        more, after = _walked(config, context, memory, after, now)
        findings += more
    state = {**after.to_dict(), "size": size.to_dict() if size else None}
    notes = {
        "cpus": cpus,
        "memory_gib": round(memory.total / _GIB, 1) if memory else None,
        "memory_used_gib": round(memory.used / _GIB, 1) if memory else None,
        "uptime_hours": round(now / 3600, 1),
        "slurm": size and {"cpus": size.cpus, "memory_mib": size.memory_mib},
    }
    return Seen(tuple(findings), state, notes)


def _running(
    known: Mapping[int, float], context: HookContext, config: HostProbe
) -> dict[int, float]:
    """The jobs on this node, as far as hooks tell; none where no epilog would tell their end."""
    jobs = dict(known)
    job = context.job
    if job is not None and context.hook == "prolog" and "epilog" in config.hooks:
        jobs[job.id] = time.time()
    elif job is not None and context.hook == "epilog":
        jobs.pop(job.id, None)
    return jobs


def _walked(
    config: HostProbe, context: HookContext, memory: Memory | None, was: Remembered, now: float
) -> tuple[list[Finding], Remembered]:
    """What takes longer to see, and the memory with it."""
    from slurm_hooks.probes.kernel_clock import read_clock  # ctypes: 2 ms that a prolog can spare

    processes, throttled = walk(config.root / "proc"), read_throttled(config.root)
    blocked = {}
    for one in processes.blocked:
        first, switches = was.blocked.get(one.identity, (now, one.switches))
        blocked[one.identity] = (first if switches == one.switches else now, one.switches)
    findings = [
        *_stuck(processes, blocked, config, now, str(was.boot)),
        *_slowed(throttled, was, config, now),
    ]
    idle_used, idle_huge = was.idle_used, was.idle_huge
    if memory and not processes.has_steps and not was.jobs:
        if context.hook == "epilog":
            findings += _left(memory, was, config, context)
        idle_used = min(memory.used, memory.used if idle_used is None else idle_used)
        idle_huge = min(memory.huge_used, memory.huge_used if idle_huge is None else idle_huge)
    clock = read_clock()
    if clock:
        findings += judge_clock(clock, config, was_synchronised=was.clock, uptime_seconds=now)
    recent = time.time() - _STEPLESS_SECONDS
    jobs = {job: at for job, at in was.jobs.items() if at > recent or job in processes.jobs}
    return findings, replace(
        was,
        jobs=jobs,
        clock=was.clock or bool(clock and clock.synchronised),
        idle_used=idle_used,
        idle_huge=idle_huge,
        blocked=blocked,
        throttled=throttled,
        measured=now,
    )


def _rebooted(earlier: Remembered, boot: str) -> Iterator[Finding]:
    """The jobs that ran here when the node last looked in another boot."""
    if earlier.boot in (None, boot):
        return
    for job in list(earlier.jobs)[-_MAX_REBOOTED:]:
        seen = f"job {job} ran here at {utc(earlier.looked)} in boot {earlier.boot}; now it is boot"
        yield _finding("host.rebooted", f"{seen} {boot}", f"{boot}:rebooted:{job}", job_id=job)


def _smaller(
    size: slurm_conf.NodeSize | None, memory: Memory | None, cpus: int | None, boot: str
) -> Iterator[Finding]:
    """Less than Slurm was told; Slurm being told less than there is, is common and right."""
    if size and size.cpus and cpus and cpus < size.cpus:
        seen = f"{cpus} processors online, slurm.conf says {size.cpus}"
        details = {"now": cpus, "wanted": size.cpus}
        yield _finding("host.cpus_missing", seen, f"{boot}:cpus:{cpus}", details=details)
    mib = memory.total // 1024**2 if memory else None
    if size and size.memory_mib and mib is not None and mib < size.memory_mib:
        is_module = mib < size.memory_mib * (1 - _MODULE_SHARE)
        yield _finding(
            "host.memory_missing",
            f"MemTotal is {mib} MiB, slurm.conf says {size.memory_mib}",
            f"{boot}:memory:{mib}",
            severity="fault" if is_module else "warning",
            details={"now": mib, "wanted": size.memory_mib},
        )


def _crowded(config: HostProbe, cpus: int | None, boot: str) -> Iterator[Finding]:
    load = read_load(config.root)
    if load and cpus and min(load) > config.load * cpus:
        seen = f"load averages over 5 and 15 minutes: {load[0]}, {load[1]}; {cpus} processors"
        details = {"load": f"{load[1]:.0f}", "cpus": cpus}
        yield _finding("host.load_high", seen, f"{boot}:load", details=details)


def _filled(
    spaces: list[Space], config: HostProbe, context: HookContext, boot: str
) -> Iterator[Finding]:
    """Local file systems with too little left.

    A full one is a fault before a job starts. Later it may be the job that fills it.
    """
    for space in spaces:
        low = min(config.min_free_mib * 1024**2, space.size_bytes * _LOW_SHARE)
        full = space.free_bytes < min(_FULL_BYTES, low)
        if space.free_bytes < low:
            free = f"{space.free_bytes / 1024**2:.0f} MiB"
            seen = f"{space.folder}: {free} free of {space.size_bytes / 1024**2:.0f} MiB"
            yield _space(
                "host.space_low", seen, space, free, boot, full and context.hook == "prolog"
            )
        few = min(_LOW_INODES, space.inodes * _LOW_SHARE)
        if space.free_inodes < few:
            seen = f"{space.folder}: {space.free_inodes} inodes free of {space.inodes}"
            free, none = str(space.free_inodes), space.free_inodes < min(_FULL_INODES, few)
            yield _space(
                "host.inodes_low", seen, space, free, boot, none and context.hook == "prolog"
            )


def _space(code: str, seen: str, space: Space, free: str, boot: str, is_fault: bool) -> Finding:
    return _finding(
        code,
        seen,
        f"{boot}:{code}:{space.folder}",
        severity="fault" if is_fault else "warning",
        details={"free": free},
        file=space.folder,
    )


def _stuck(
    processes: Processes,
    blocked: Mapping[str, tuple[float, int]],
    config: HostProbe,
    now: float,
    boot: str,
) -> Iterator[Finding]:
    """Processes that have not run at all since they were first seen blocked, long ago."""
    stuck = [one for one in processes.blocked if now - blocked[one.identity][0] >= config.blocked]
    if not stuck:
        return
    named = ", ".join(f"{one.name} ({one.pid})" for one in stuck[:_NAMED])
    evidence = tuple(
        Evidence(
            "proc",
            f"{one.name}, pid {one.pid}: in D state for {now - blocked[one.identity][0]:.0f} s"
            + (f" at {one.place}" if one.place else ""),
            key=f"{boot}:blocked:{one.identity}",
        )
        for one in stuck[:_NAMED]
    )
    details = {"named": named + (", …" if len(stuck) > _NAMED else "")}
    yield catalog.finding(
        "host.processes_blocked", evidence=evidence, details=details, count=len(stuck)
    )


def _slowed(
    throttled: Mapping[str, int], was: Remembered, config: HostProbe, now: float
) -> Iterator[Finding]:
    """Processors that were slowed by heat for a good part of the time since the last look."""
    if was.measured is None or now - was.measured < _SHORTEST_GAP_SECONDS:
        return
    gap = (now - was.measured) * 1000
    shares = {
        cpu: (spent - was.throttled[cpu]) / gap
        for cpu, spent in throttled.items()
        if cpu in was.throttled
    }
    slow = [cpu for cpu, share in shares.items() if share >= config.throttled]
    if slow:
        worst = max(slow, key=lambda cpu: shares[cpu])
        seen = (
            f"{len(slow)} processors throttled since the last look, "
            f"{worst} for {min(1.0, shares[worst]):.0%} of the time"
        )
        yield _finding("host.cpu_throttled", seen, f"{was.boot}:throttled")


def _left(
    memory: Memory, was: Remembered, config: HostProbe, context: HookContext
) -> Iterator[Finding]:
    """What is still held when the last job on the node is gone, more than without a job before."""
    job = context.job.id if context.job else None
    more = 0 if was.idle_used is None else memory.used - was.idle_used
    if more > config.memory_left * memory.total:
        seen = (
            f"{memory.used / _GIB:.1f} of {memory.total / _GIB:.1f} GiB in use without a job, "
            f"{more / _GIB:.1f} more than before; files in memory {memory.shared / _GIB:.1f}, "
            f"kernel {memory.kernel / _GIB:.1f}"
        )
        details = {"more": f"{more / _GIB:.1f}"}
        key = f"{was.boot}:memory_left:{job}"
        yield _finding("host.memory_left", seen, key, details=details, job_id=job)
    huge = 0 if was.idle_huge is None else memory.huge_used - was.idle_huge
    if huge > _HUGE_LEFT_BYTES:
        seen = f"{memory.huge_used / _GIB:.1f} GiB of huge pages in use, {huge / _GIB:.1f} more"
        details = {"more": f"{huge / _GIB:.1f}"}
        key = f"{was.boot}:huge_pages_left:{job}"
        yield _finding("host.huge_pages_left", seen, key, details=details, job_id=job)


def judge_clock(
    clock: KernelClock, config: HostProbe, *, was_synchronised: bool, uptime_seconds: float
) -> list[Finding]:
    """Return what is wrong with the clock; a node that never told of a server is no fault.

    chrony without ``rtcsync`` and some virtual machines' clocks leave the kernel's mark unset.
    """
    wanted = config.clock == "required" or (config.clock == "as_before" and was_synchronised)
    findings = []
    if wanted and not clock.synchronised and uptime_seconds > _SETTLED_SECONDS:
        seen = f"adjtimex: unsynchronised, maximum error {clock.maximum_error_seconds:.3f} s"
        findings.append(_finding("host.clock_unsynchronised", seen, "clock"))
    if clock.synchronised and abs(clock.offset_seconds) > config.max_clock_offset:
        seen = f"adjtimex: offset {clock.offset_seconds:.3f} s"
        details = {"offset": f"{clock.offset_seconds:.3f}"}
        findings.append(_finding("host.clock_offset", seen, "clock", details=details))
    return findings


def _finding(
    code: str,
    seen: str,
    key: str,
    *,
    severity: str | None = None,
    details: Mapping[str, Any] | None = None,
    **about: Any,
) -> Finding:
    evidence = (Evidence("host", seen, key=key),)
    return catalog.finding(code, evidence=evidence, severity=severity, details=details, **about)


def _known_size(state: Mapping[str, Any]) -> slurm_conf.NodeSize | None:
    document = state.get("size")
    try:
        return slurm_conf.NodeSize.from_dict(document) if document else None
    except (KeyError, TypeError, ValueError):
        return None


PROBE = Probe(
    name="host",
    look=look,
    needs="/proc and /sys; slurm.conf to know what the node should have",
    cost="milliseconds; walks over the processes in epilogs and health checks only",
    codes=CODES,
)
