"""The files that running jobs write to, remembered at each health check (``joblog.open_files``)."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_hooks.joblog import open_files
from slurm_hooks.probes import Look, Seen
from slurm_hooks.probes.process_table import survey
from slurm_hooks.running_jobs import RunningJob

_RESERVE_SECONDS = 0.5


def look(given: Look, jobs: Sequence[RunningJob]) -> Seen:
    """Remember the files of ``jobs``, which run here; nothing of it is a finding."""
    where = open_files.folder(given.config.spool, given.context.node)
    share = max(0.2, (given.config.probes.joblog.deadline - _RESERVE_SECONDS) / len(jobs))
    kept = {}
    for job in jobs:
        pids = [one.pid for one in survey(job.uid).processes if one.job == job.id]
        kept[str(job.id)] = open_files.remember(job, pids, where, share)
    return Seen(notes={"files": kept})
