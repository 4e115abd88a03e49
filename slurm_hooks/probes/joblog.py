"""The job-log probe: what a failed job's own log says of why it ended.

Reads on the batch host, in the epilog; where that host is lost, the next node of an opted-in job
takes over. A health check remembers which files the processes of running jobs that opted in write
to. Most jobs end well and have nothing to read: the probe says so before it loads
``joblog_reading``, which takes 40 ms (measured). A user can write anything into a log, so what is
found there is never worse than a warning.
"""

from __future__ import annotations

from slurm_hooks import optin, running_jobs
from slurm_hooks.probes import Look, Probe, Seen, Skipped

CODES = (
    "log.cascade",
    "log.collective_failed",
    "log.collective_peer_lost",
    "log.collective_timeout",
    "log.hardware_gpu",
    "log.hardware_gpu_contained",
    "log.hardware_host",
    "log.hardware_link",
    "log.hardware_link_nonfatal",
    "log.network_fabric",
    "log.network_port_in_use",
    "log.node_lost",
    "log.node_software",
    "log.none",
    "log.program_access",
    "log.program_checkpoint",
    "log.program_config",
    "log.program_crash",
    "log.program_dataloader",
    "log.program_desync",
    "log.program_exception",
    "log.program_gpu_fault",
    "log.program_gpu_oom",
    "log.program_host_oom",
    "log.program_import",
    "log.program_input",
    "log.program_nan_loss",
    "log.program_shared_memory",
    "log.program_stop_requested",
    "log.remote_service",
    "log.rendezvous",
    "log.scheduler_cancelled",
    "log.scheduler_preempted",
    "log.scheduler_requeued",
    "log.scheduler_time_limit",
    "log.storage",
    "log.storage_full",
    "log.unknown",
    "log.unreadable",
)


def look(given: Look) -> Seen:
    """Return one finding in an epilog: the verdict on the job's logs; none in a health check.

    Raises:
        Skipped: no job, one that ended well, or not the host that has its output.
    """
    if given.context.hook == "health_check":
        jobs = running_jobs.running(given.config.spool.jobs_of(given.context.node))
        if not jobs:
            raise Skipped("no job that opted in runs here")
        from slurm_hooks.probes import joblog_watching

        return joblog_watching.look(given, list(jobs.values()))
    job = given.context.job
    if job is None:
        raise Skipped("no job, or nobody's")
    # After NODE_FAIL the other nodes are told 0:0 (measured on 22.05), so that an opted-in job of
    # several nodes is looked at all the same; the batch host is told the truth or does not run.
    of_several = "," in (job.nodes or "") or "[" in (job.nodes or "")
    watched = of_several and optin.parse(job.comment).opted_in
    if job.exit == "0:0" and not watched:
        raise Skipped("the job's script exited 0")
    from slurm_hooks.probes import joblog_reading

    return joblog_reading.look(given)


PROBE = Probe(
    name="joblog",
    look=look,
    needs="root, to become the job's user; the file systems of the job's output",
    cost="reads up to 9 MB of a log, more where its end is all echo; a look at /proc",
    codes=CODES,
)
