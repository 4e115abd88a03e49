"""Kernel lines in a log: dmesg and journals given to classify-log, or copied into a job's output.

What a kernel line means is known to ``catalog.kernel_lines``; this module hands the lines over and
gives the findings back as signatures of the same kind as any other line's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from slurm_hooks import catalog
from slurm_hooks.catalog.kernel_lines import parse_kernel_lines
from slurm_hooks.joblog.lines import Line
from slurm_hooks.joblog.signatures import Signature
from slurm_hooks.record import Finding

_KERNEL = re.compile(
    rb"(?m)^(?:<\d+>)?(?:\[ *\d{1,9}\.\d{6}\] |[^\n]{0,80} kernel: )"
    rb"|^\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\] "
)
_DATED = re.compile(rb"\[[A-Z][a-z]{2} [A-Z][a-z]{2} ")
_LINE = re.compile(rb"^[^\n]{0,160}?(?:NVRM: |nvidia-nvswitch\d+: SXid)")

_LOOK_BYTES = 64 << 10
_SHARE = 0.6
"""Of the first lines, how many must have the kernel's prefix for the file to be a kernel log."""

_NO_PATTERN = re.compile(r"(?!)")


def is_kernel_log(data: bytes) -> bool:
    """Whether most of the first lines are the kernel's."""
    start = data[:_LOOK_BYTES]
    lines = sum(1 for line in start.split(b"\n") if line.strip())
    return lines > 0 and len(_KERNEL.findall(start)) >= _SHARE * lines


def is_dated(data: bytes) -> bool:
    """Whether the first line has the bracketed date of ``dmesg -T``."""
    return bool(_DATED.match(data))


def is_kernel_line(raw: bytes) -> bool:
    """Whether one line of a job's log is the NVIDIA driver's."""
    return bool(_LINE.match(raw))


def facts(lines: Sequence[Line], kernel_log: bool) -> Iterable[tuple[Line, Signature]]:
    """Return what the kernel's lines say, each with the first line that says it.

    In a ``kernel_log`` the prefix is the kernel's own, which tells the time and whether to believe
    it; in a job's log it is a launcher's, and was taken off.
    """
    if not lines:
        return
    for finding in parse_kernel_lines([line.raw if kernel_log else line.text for line in lines]):
        line = _first_line(finding, lines)
        if line is not None:
            yield line, _signature(finding)


def _first_line(finding: Finding, lines: Sequence[Line]) -> Line | None:
    for evidence in finding.evidence:
        wanted = evidence.text[:200]
        for line in lines:
            if wanted in line.raw:
                return line
    return None


def _signature(finding: Finding) -> Signature:
    known = catalog.entry(finding.code)
    fault_class, role, blame = known.fault_class, "root", "none"
    confidence = "established"
    if finding.code == "gpu.xid_cascade":
        fault_class, role, confidence = "cascade", "cascade", "probable"
    elif finding.code == "host.cgroup_out_of_memory":
        # On its node this is a service's; in a log that is shown to explain a job, the job's.
        fault_class, confidence = "program.host_oom", "probable"
    elif fault_class in ("none", "unknown"):
        role = "noise" if fault_class == "none" else "exit"
    elif fault_class in ("hardware.gpu", "hardware.link"):
        blame = "reporter"
    elif fault_class in ("program.gpu_fault", "hardware.link.nonfatal", "network.fabric"):
        confidence = "probable"
    return Signature(
        id=f"kernel:{finding.code}:{finding.pci or ''}",
        fault_class=fault_class,
        role=role,
        any=(finding.code,),
        pattern=_NO_PATTERN,
        source=known.source,
        confidence=confidence,
        blame=blame,
        resolution=finding.resolution,
    )
