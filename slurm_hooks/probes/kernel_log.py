"""The kernel-log probe: what the kernel said since the last look on this node.

Reads /dev/kmsg (``kmsg``) or a text file (``log_tail``) from its cursor on and hands the lines to
``catalog.kernel_lines``. The cursor travels in the probe's state, with the boot it belongs to: no
line is reported twice, and one from before the last reboot is no fault of today.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slurm_hooks import catalog
from slurm_hooks.catalog.kernel_line import KernelLine
from slurm_hooks.context import HookContext, boot_id
from slurm_hooks.frozen import frozen
from slurm_hooks.probes import Look, Probe, Seen, Skipped
from slurm_hooks.probes.gpu_minors import read_minors
from slurm_hooks.probes.kmsg import KMSG_DEVICE, read_ring, reader
from slurm_hooks.probes.log_tail import is_cursor, is_plain_log, open_log, read_tail
from slurm_hooks.record import SEVERITIES, Finding

CODES = (
    "fabric.cable_fault",
    "fabric.link_down",
    "fabric.nic_failed",
    "fabric.nic_hot",
    "fabric.nic_slow_slot",
    "gpu.application_fault",
    "gpu.drain_p2p",
    "gpu.driver_assertion",
    "gpu.driver_mismatch",
    "gpu.driver_stuck",
    "gpu.ecc_contained",
    "gpu.ecc_double_bit",
    "gpu.ecc_uncontained",
    "gpu.engine_error",
    "gpu.fell_off_bus",
    "gpu.gsp_timeout",
    "gpu.hardware_error",
    "gpu.hardware_suspect",
    "gpu.init_failed",
    "gpu.nvlink_error",
    "gpu.nvlink_nonfatal",
    "gpu.nvlink_peer_error",
    "gpu.recover_imex_domain",
    "gpu.recovery_action",
    "gpu.remap_failed",
    "gpu.remap_pending",
    "gpu.reset_required",
    "gpu.xid_cascade",
    "gpu.xid_information",
    "gpu.xid_unknown",
    "host.cgroup_out_of_memory",
    "host.cpu_stuck",
    "host.cpu_throttled",
    "host.error_corrected",
    "host.hung_task",
    "host.kernel_oops",
    "host.machine_check",
    "host.memory_error",
    "host.out_of_memory",
    "host.pcie_corrected",
    "host.pcie_fatal",
    "host.pcie_nonfatal",
    "job.out_of_memory",
    "kernel_log.lost",
    "kernel_log.more",
    "kernel_log.old",
    "kernel_log.skipped",
    "nvswitch.fatal_error",
    "nvswitch.nonfatal_error",
    "storage.client_evicted",
    "storage.disk_error",
    "storage.filesystem_error",
    "storage.server_silent",
)
"""Every code that the kernel's lines, or the reading of them, can become."""

FIRST_LOOK_SECONDS = 3600.0
"""How far back the first look on a node believes a fault to be of today. A node that was up for
months when this toolkit came to it may have been mended since; what is still broken shows in
NVML and in new lines. After a reboot the whole boot is read, since a cursor is there."""

_CLOCK_SECONDS = 60.0
"""How far the kernel's clock and the wall's may be apart without the stamp being another boot's."""

_BANNER = "Linux version "
"""The first line of a boot."""

_OLD_EVIDENCE = 3


@frozen
class _Read:
    """What a source gave: new lines, stale ones, what is missing, and its part of the state."""

    new: Sequence[KernelLine]
    old: Sequence[KernelLine]
    notes: tuple[Finding, ...]
    cursor: Mapping[str, Any]


def look(given: Look) -> Seen:
    """Return what was logged since the state's cursor; the new cursor is the state to keep.

    Raises:
        Skipped: there is no such log here, it may not be read, or it is nothing to be trusted.
    """
    settings = given.config.probes.kernel_log
    path = settings.path.replace("%n", given.context.node)
    try:
        descriptor = open_log(path)
    except OSError as error:
        raise Skipped(f"{path} cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == KMSG_DEVICE:
            read = _read_ring(descriptor, given.state, settings.max_bytes)
        elif is_plain_log(status):
            read = _read_file(descriptor, path, given.state, settings.max_bytes)
        else:
            raise Skipped(f"{path} is neither /dev/kmsg nor a file that only its owner can write")
    finally:
        os.close(descriptor)
    boot = boot_id()
    minors = given.state.get("minors") if given.state.get("boot") == boot else None
    findings = _parse(read.new, minors)
    if minors is None:
        # Reading them can hang where a GPU is sick: then this boot goes without.
        minors = {} if any(map(_is_sick_gpu, findings)) else read_minors() or None
    findings = [_with_job(finding, given.context) for finding in findings]
    findings += [*_old(read.old), *read.notes]
    state = {"boot": boot, "looked": time.time(), "minors": minors, **read.cursor}
    return Seen(tuple(findings), state, {"source": path, "lines": len(read.new)})


def _read_ring(descriptor: int, state: Mapping[str, Any], max_bytes: int) -> _Read:
    boot, now = boot_id(), time.time()
    known = state.get("sequence")
    known = known if isinstance(known, int) else None
    ring = read_ring(
        reader(descriptor),
        boot=boot,
        start=known if state.get("boot") == boot else None,
        max_bytes=max_bytes,
        boot_seconds=now - time.monotonic(),
    )
    notes = []
    if ring.lost:
        notes.append(_note("kernel_log.lost", why=f"{ring.lost} records were overwritten"))
    if ring.skipped:
        notes.append(_note("kernel_log.skipped", amount=f"{ring.skipped} records"))
    oldest = now - FIRST_LOOK_SECONDS if known is None else 0.0
    new, old = _split(ring.lines, oldest)
    return _Read(new, old, tuple(notes), {"sequence": ring.next_sequence})


def _read_file(descriptor: int, path: str, state: Mapping[str, Any], max_bytes: int) -> _Read:
    now = time.time()
    booted = now - time.monotonic()
    cursor = state.get("file") if state.get("path") == path else None
    cursor = cursor if is_cursor(cursor) else None
    looked = state.get("looked") if cursor else None
    tail = read_tail(descriptor, path, cursor, max_bytes)
    lines: list[KernelLine] = []
    banner = 0
    if tail.lines:
        from slurm_hooks.catalog.kernel_prefix import undress  # as in _parse
    for key, raw in tail.lines:
        message = undress(raw.decode("utf-8", "replace"), now)
        seconds = message.seconds
        if seconds is None and message.uptime is not None and looked is not None:
            # Only a stamp that falls between the two looks is surely one of this boot.
            since_boot = booted + message.uptime
            if looked - _CLOCK_SECONDS <= since_boot <= now + _CLOCK_SECONDS:
                seconds = since_boot
        if message.text.startswith(_BANNER):
            banner = len(lines)
        lines.append(KernelLine(message.text, key, seconds))
    oldest = booted - _CLOCK_SECONDS
    if cursor is None:
        oldest = max(oldest, now - FIRST_LOOK_SECONDS)
        if os.fstat(descriptor).st_mtime < oldest:
            banner = len(lines)
    new, old = _split(lines[banner:], oldest)
    notes = []
    if tail.lost:
        notes.append(_note("kernel_log.lost", why=tail.lost))
    if tail.skipped_bytes:
        notes.append(_note("kernel_log.skipped", amount=f"{tail.skipped_bytes} bytes"))
    return _Read(
        new, [*lines[:banner], *old], tuple(notes), {"path": path, "file": dict(tail.cursor)}
    )


def _split(lines: Iterable[KernelLine], oldest: float) -> tuple[list[KernelLine], list[KernelLine]]:
    """Lines of today, and those logged before ``oldest``; a line without a time is of today."""
    new: list[KernelLine] = []
    old: list[KernelLine] = []
    for line in lines:
        stale = line.seconds is not None and line.seconds < oldest
        (old if stale else new).append(line)
    return new, old


def _old(lines: Sequence[KernelLine]) -> list[Finding]:
    """One information on faults that count for nothing now, the gravest quoted; or nothing."""
    findings = [one for one in _parse(lines) if one.severity != "info"]
    if not findings:
        return []
    gravest = sorted(findings, key=lambda one: SEVERITIES.index(one.severity), reverse=True)
    return [
        catalog.finding(
            "kernel_log.old",
            evidence=tuple(one.evidence[0] for one in gravest[:_OLD_EVIDENCE] if one.evidence),
            details={"gravest": gravest[0].summary},
            count=sum(one.count for one in findings),
        )
    ]


def _parse(lines: Sequence[KernelLine], minors: Mapping[str, int] | None = None) -> list[Finding]:
    """The parser's findings; it is loaded (some 20 ms) only where there is something to parse."""
    if not lines:
        return []
    from slurm_hooks.catalog.kernel_lines import parse_kernel_lines

    return parse_kernel_lines(lines, minors)


def _is_sick_gpu(finding: Finding) -> bool:
    return finding.code.startswith("gpu.") and finding.severity in ("fault", "fatal")


def _with_job(finding: Finding, context: HookContext) -> Finding:
    """In an epilog, a GPU's fault belongs to the job that held that GPU."""
    job = context.job
    if context.hook != "epilog" or job is None or finding.gpu not in job.gpus:
        return finding
    return replace(finding, job_id=job.id)


def _note(code: str, **details: str) -> Finding:
    return catalog.finding(code, details=details)


PROBE = Probe(
    name="kernel_log",
    look=look,
    needs="/dev/kmsg readable (root, or CAP_SYSLOG), or a log file",
    cost="milliseconds: reads what is new, at most max_bytes",
    codes=CODES,
)
