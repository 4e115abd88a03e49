"""One look at Slurm, as an action's next step is judged by."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from recovery.slurm.base import Job, Node


@dataclass(frozen=True)
class View:
    """A fresh look at what a decision's actions are about; a job or node may be missing.

    ``reserved`` are the nodes of reservations, of those alone whose jobs stay within them.
    """

    job: Job | None
    nodes: Mapping[str, Node]
    reserved: Mapping[str, Collection[str]] = field(default_factory=dict)
