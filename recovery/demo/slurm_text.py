"""What Slurm prints for people, read: ``scontrol show``, and the calls in slurmctld.log."""

from __future__ import annotations

import re
from collections import Counter

MUTATING_CALLS = frozenset(
    {
        "REQUEST_CREATE_RESERVATION",
        "REQUEST_DELETE_RESERVATION",
        "REQUEST_JOB_REQUEUE",
        "REQUEST_KILL_JOB",
        "REQUEST_REBOOT_NODES",
        "REQUEST_RECONFIGURE",
        "REQUEST_SUSPEND",
        "REQUEST_TOP_JOB",
        "REQUEST_UPDATE_JOB",
        "REQUEST_UPDATE_NODE",
        "REQUEST_UPDATE_PARTITION",
        "REQUEST_UPDATE_RESERVATION",
    }
)
"""Calls by which somebody changes a job, a node or how nodes are given out.

``scontrol requeue`` and ``requeuehold`` are REQUEST_JOB_REQUEUE, ``hold`` and ``release``
REQUEST_UPDATE_JOB, ``scancel`` REQUEST_KILL_JOB (measured on 22.05). What sbatch and a job's own
daemons send is not among them.
"""

_CALL = re.compile(r"\] debug2: Processing RPC: (REQUEST_\w+) from UID=", re.ASCII)

_WHOLE_LINES = re.compile(
    "(Reason|Comment|AdminComment|SystemComment|Command|WorkDir|StdErr|StdIn|StdOut|Extra|OS)="
)
"""What scontrol prints on a line of its own, because it may contain blanks."""


def fields(shown: str) -> dict[str, str]:
    """Return what ``scontrol show`` printed about one thing, by its own names."""
    lines = map(str.strip, shown.splitlines())
    words = [word for line in lines for word in _words(line) if "=" in word]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def mutations(controller_log: str) -> Counter[str]:
    """Count the mutating calls that slurmctld received, by name; its log must be at debug2."""
    return Counter(call for call in _CALL.findall(controller_log) if call in MUTATING_CALLS)


def _words(line: str) -> list[str]:
    return [line] if _WHOLE_LINES.match(line) else line.split()
