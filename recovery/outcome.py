"""What became of a decision: did work resume?

Pure. A restart is ``restarted``; only a step beyond the failed attempt's is ``resumed``. Both end
in ``finished``, ``failed_again`` or ``lost``.
"""

from __future__ import annotations

from collections.abc import Iterable

from recovery.decision import Decision, Outcome
from recovery.incident import FAILED_STATES
from recovery.slurm.base import Job
from slurm_hooks.record import FaultRecord, seconds_of

_STARTED = frozenset(("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED"))


def outcomes(
    decision: Decision, job: Job | None, records: Iterable[FaultRecord], now: str
) -> tuple[Outcome, ...]:
    """Return the outcomes that are new, in order; none while nothing has changed.

    ``job`` is a fresh look (None: Slurm no longer knows it), ``records`` are those of its nodes
    since the decision.
    """
    attempt, known = decision.attempt, decision.outcome
    if attempt is None:
        return ()
    state = known.state if known else ""
    if job is None or job.uid != decision.uid or job.restarts <= attempt.restart:
        return (Outcome("lost", now, detail="Slurm no longer knows this job"),)
    new: list[Outcome] = []
    restarted_again = job.restarts > attempt.restart + 1
    over = job.state in FAILED_STATES or restarted_again
    if not state and (job.state in _STARTED or job.state == "COMPLETED"):
        new.append(Outcome("restarted", now, detail=f"on {','.join(job.nodes)}"))
    step = _step_beyond(decision, records)
    if state != "resumed" and step is not None:
        failed_at = decision.progress_step
        beyond = f", beyond {failed_at}" if failed_at is not None else ""
        new.append(Outcome("resumed", now, step, f"at step {step}{beyond}"))
    if job.state == "COMPLETED" and not restarted_again:
        new.append(Outcome("finished", now, step, "the job has completed"))
    elif over or job.state in ("CANCELLED", "PREEMPTED"):
        new.append(Outcome("failed_again", now, step, f"the next attempt ended {job.state}"))
    return tuple(new)


def rerun_time(decision: Decision, jobs: Iterable[Job]) -> int:
    """Return when somebody else ran the job again (seconds since the epoch), 0 where nobody did.

    ``jobs`` is a full look at the scheduler. A person requeues the job, or submits it once more:
    the same owner's next job of the same name is taken for that.
    """
    attempt = decision.attempt
    if attempt is None:
        return 0
    decided = seconds_of(decision.time)
    starts = [
        job.start_time
        for job in jobs
        if job.uid == decision.uid
        and job.start_time > 0
        and (
            job.restarts > attempt.restart
            if job.id == attempt.job_id
            else job.name == decision.job_name and job.submit_time >= decided
        )
    ]
    return min((start for start in starts if start >= int(decided)), default=0)


def _step_beyond(decision: Decision, records: Iterable[FaultRecord]) -> int | None:
    """The highest step that the next attempt was seen at, if it is beyond the failed one's.

    What was written before the decision is the failed attempt's, whoever reads it later.
    """
    attempt = decision.attempt
    if attempt is None:
        return None
    steps = [
        finding.step
        for record in records
        if record.time > decision.time
        for finding in record.findings
        if finding.code in ("progress.seen", "checkpoint.seen")
        and finding.job_id == attempt.job_id
        and finding.step is not None
        and (record.job is None or record.job.restart > attempt.restart)
        and all(seen.time is None or seen.time > decision.time for seen in finding.evidence)
    ]
    highest = max(steps, default=None)
    floor = decision.progress_step if decision.progress_step is not None else -1
    return highest if highest is not None and highest > floor else None
