"""Probes: one look at one thing on this node.

A probe is a module of this package with a constant ``PROBE``. To add one, write the module, name
it below, add its section to ``probe_config`` and its codes to ``catalog/findings/``. A probe always
runs in a forked child under a deadline, so it may hang, crash or raise: it reports facts and leaves
safety to ``deadline``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from slurm_hooks.context import HookContext
from slurm_hooks.frozen import frozen
from slurm_hooks.node_config import NodeConfig
from slurm_hooks.record import Finding

NAMES = (
    "nvml",
    "kernel_log",
    "fabric",
    "host",
    "joblog",
    "checkpoint",
    "activity",
    "hang_evidence",
    "storage",
    "processes",
    "nccl",
)
"""The probes that ship, in the order in which records list them."""

_OF_RUNNING_JOBS = ("joblog", "checkpoint", "activity", "hang_evidence")
"""What looks at opted-in jobs alone in a health check."""


class Skipped(Exception):
    """Raised by a probe that cannot look here (no driver, no such device); its text says why."""


@frozen
class Look:
    """What a probe is given.

    ``state`` is what the same probe kept at its previous run on this node (an empty mapping at
    first): cursors, counters, the last sample. It is JSON data.
    """

    context: HookContext
    config: NodeConfig
    state: Mapping[str, Any] = field(default_factory=dict)


@frozen
class Seen:
    """What a probe answers: its findings, and the state to keep for its next run.

    The state is kept only after the record that holds the findings is safe, so that a line is
    reported at least once; ``Evidence.key`` lets a reader drop the rare second report.
    ``notes`` are facts worth printing by hand (driver version, devices seen), never verdicts.
    """

    findings: tuple[Finding, ...] = ()
    state: Mapping[str, Any] | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


@frozen
class Probe:
    """A probe and what an admin wants to know before running it.

    ``needs`` and ``cost`` are one short phrase each. ``codes`` are the finding codes it can
    yield, each of which has an entry in the catalogue.
    """

    name: str
    look: Callable[[Look], Seen]
    needs: str
    cost: str
    codes: tuple[str, ...]


def idle(name: str, context: HookContext, config: NodeConfig) -> str | None:
    """Return why the probe ``name`` has nothing to look at, where that is known without looking.

    It is then told as skipped, and neither a child nor the probe's libraries are needed for that.
    """
    job, mounts = context.job, config.probes.storage
    if name == "storage" and not (mounts.mounts or mounts.read_only):
        return "no mounts are configured (probes.storage.mounts)"
    if name == "checkpoint" and context.hook == "prolog" and not (job and job.comment):
        return "the job has not opted in"
    # Of a job with a comment, which may have opted in, another node's epilog is told 0:0 as well
    # when the batch host is lost (measured on 22.05).
    if name == "joblog" and job and job.exit == "0:0" and not job.comment:
        return "the job's script exited 0"
    return None


def has_no_job(name: str, context: HookContext, config: NodeConfig) -> bool:
    """Whether a health check's probe of running jobs has none to look at; asks the local disk.

    Called in the probe's child, before anything that the probe needs is loaded.
    """
    if context.hook != "health_check" or name not in _OF_RUNNING_JOBS:
        return False
    try:
        noted = os.listdir(config.spool.jobs_of(context.node))  # noqa: PTH208 - names will do
    except OSError:
        return True
    return not any(name.isdigit() for name in noted)


def load(name: str) -> Probe:
    """Import the probe called ``name``; only then is its library loaded.

    Raises:
        KeyError: no probe has that name.
    """
    if name not in NAMES:
        raise KeyError(name)
    probe: Probe = importlib.import_module(f"{__name__}.{name}").PROBE
    return probe
