"""The kernel-log probe: what the kernel said since the last look on this node.

Reads /dev/kmsg (``kmsg``) or a text file (``log_tail``) from its cursor on and hands the lines to
``catalog.kernel_lines``. The cursor travels in the probe's state, with the boot it belongs to: no
line is reported twice, and one from before the last reboot is no fault of today.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from typing import Any

from slurm_hooks import catalog
from slurm_hooks.catalog.kernel_fact import KernelLine
from slurm_hooks.catalog.kernel_lines import CODES, parse_kernel_lines
from slurm_hooks.catalog.kernel_prefix import undress
from slurm_hooks.context import boot_id
from slurm_hooks.probes import Look, Probe, Seen, Skipped
from slurm_hooks.probes.kmsg import KMSG_DEVICE, read_ring, reader
from slurm_hooks.probes.log_tail import is_plain_log, open_log, read_tail
from slurm_hooks.record import Finding


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
            return _look_at_ring(descriptor, given.state, settings.max_bytes)
        if is_plain_log(status):
            return _look_at_file(descriptor, path, given.state, settings.max_bytes)
    finally:
        os.close(descriptor)
    raise Skipped(f"{path} is neither /dev/kmsg nor a plain file that only its owner can write")


def _look_at_ring(descriptor: int, state: Mapping[str, Any], max_bytes: int) -> Seen:
    boot = boot_id()
    same_boot = state.get("boot") == boot and isinstance(state.get("sequence"), int)
    ring = read_ring(
        reader(descriptor),
        boot=boot,
        start=state["sequence"] if same_boot else None,
        max_bytes=max_bytes,
        boot_seconds=time.time() - time.monotonic(),
    )
    findings = parse_kernel_lines(ring.lines)
    if ring.lost:
        findings.append(_note("kernel_log.lost", why=f"{ring.lost} records were overwritten"))
    if ring.skipped:
        findings.append(_note("kernel_log.skipped", amount=f"{ring.skipped} records"))
    return Seen(tuple(findings), {"boot": boot, "sequence": ring.next_sequence})


def _look_at_file(descriptor: int, path: str, state: Mapping[str, Any], max_bytes: int) -> Seen:
    cursor = state.get("file") if state.get("path") == path else None
    tail = read_tail(descriptor, path, cursor, max_bytes)
    lines = []
    for key, raw in tail.lines:
        message = undress(raw.decode("utf-8", "replace"))
        lines.append(KernelLine(message.text, key, message.seconds))
    findings = parse_kernel_lines(lines)
    if tail.lost:
        findings.append(_note("kernel_log.lost", why=tail.lost))
    if tail.skipped_bytes:
        findings.append(_note("kernel_log.skipped", amount=f"{tail.skipped_bytes} bytes"))
    return Seen(tuple(findings), {"boot": boot_id(), "path": path, "file": dict(tail.cursor)})


def _note(code: str, **details: str) -> Finding:
    return catalog.finding(code, details=details)


PROBE = Probe(
    name="kernel_log",
    look=look,
    needs="/dev/kmsg readable (root, or CAP_SYSLOG), or a log file",
    cost="milliseconds: reads what is new, at most max_bytes",
    codes=CODES,
)
