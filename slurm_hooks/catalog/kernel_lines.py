"""Kernel log lines to findings: the one door for the probe and for whoever has a log in hand.

    >>> [one.code for one in parse_kernel_lines(["NVRM: Xid (PCI:0000:17:00): 45, pid=7, name=x"])]
    ['gpu.xid_cascade']

The NVIDIA driver's lines are read by ``xid_facts``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from slurm_hooks.catalog.kernel_fact import KernelLine, fold
from slurm_hooks.catalog.kernel_prefix import undress
from slurm_hooks.catalog.xid_facts import driver_facts
from slurm_hooks.record import Finding

CODES = (
    "gpu.application_fault",
    "gpu.ecc_contained",
    "gpu.ecc_double_bit",
    "gpu.ecc_uncontained",
    "gpu.engine_error",
    "gpu.fell_off_bus",
    "gpu.gsp_timeout",
    "gpu.hardware_error",
    "gpu.hardware_suspect",
    "gpu.nvlink_error",
    "gpu.nvlink_nonfatal",
    "gpu.nvlink_peer_error",
    "gpu.recovery_action",
    "gpu.row_remap_failed",
    "gpu.row_remap_pending",
    "gpu.xid_cascade",
    "gpu.xid_information",
    "gpu.xid_unknown",
    "kernel_log.lost",
    "kernel_log.more",
    "kernel_log.old",
    "kernel_log.skipped",
    "nvswitch.fatal_error",
    "nvswitch.nonfatal_error",
)
"""Every code that lines of the kernel, or the reading of them, can become."""

_TRIGGER = re.compile(r"NVRM|nvswitch")
"""Cheap first look: a line without any of these is not looked at again."""


def parse_kernel_lines(lines: Iterable[KernelLine | str]) -> list[Finding]:
    """Return the findings in ``lines``, equal ones folded into one with a count.

    A ``str`` is a line of a text log, whose dmesg, journal or syslog prefix is taken off; a
    ``KernelLine`` is a message as the kernel logged it.
    """
    messages = (KernelLine(undress(line).text) if isinstance(line, str) else line for line in lines)
    wanted = [line for line in messages if _TRIGGER.search(line.text)]
    return fold(driver_facts(wanted))
