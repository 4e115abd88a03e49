"""What became of a decision: did work resume?

Pure. A restart is ``restarted``; only a step beyond the failed attempt's is ``resumed``. Both end
in ``finished``, ``failed_again`` or ``lost``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from recovery.decision import Decision, Outcome
from recovery.incident import FAILED_STATES
from recovery.slurm.base import Job
from slurm_hooks.record import FaultRecord, seconds_of, utc

LINK_SECONDS = 150.0
"""How long after its end the decision on an attempt that failed again is waited for, to be named:
a stuck COMPLETING is gathered for two minutes (config: policy.gather_max)."""

_STARTED = frozenset(("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED"))


def outcomes(
    decision: Decision,
    job: Job | None,
    records: Iterable[FaultRecord],
    now: float,
    following: str = "",
) -> tuple[Outcome, ...]:
    """Return the outcomes that are new, in order; none while nothing has changed.

    ``job`` is a fresh look (None: Slurm no longer knows it), ``records`` are its own and those of
    its nodes since the decision, ``now`` is in seconds since the epoch. ``following`` is the id of
    the decision on the next attempt, where there is one.
    """
    attempt, known = decision.attempt, decision.outcome
    if attempt is None:
        return ()
    records, time = list(records), utc(now)
    step = _step_beyond(decision, records)
    if job is None or job.uid != decision.uid or job.restarts <= attempt.restart:
        return (_as_epilogs_tell(decision, records, step, time, following),)
    state = known.state if known else ""
    restarted_again = job.restarts > attempt.restart + 1
    seen = Outcome("restarted", time)
    if not restarted_again:
        seen = replace(seen, started=_utc(job.start_time), ended=_utc(job.end_time))
    new: list[Outcome] = []
    if not state and (job.state in _STARTED or job.state == "COMPLETED"):
        new.append(replace(seen, ended="", detail=f"on {','.join(job.nodes)}"))
    if state != "resumed" and step is not None:
        failed_at = decision.progress_step
        beyond = f", beyond {failed_at}" if failed_at is not None else ""
        detail = f"at step {step}{beyond}"
        new.append(replace(seen, state="resumed", step=step, ended="", detail=detail))
    if job.state == "COMPLETED" and not restarted_again:
        new.append(replace(seen, state="finished", step=step, detail="the job has completed"))
    elif restarted_again or job.state in FAILED_STATES:
        fresh = job.state in FAILED_STATES and 0 <= now - job.end_time < LINK_SECONDS
        if following or restarted_again or not fresh:
            ended = "ended and was requeued" if restarted_again else f"ended {job.state}"
            linked = f", decision {following}" if following else ""
            detail = f"the next attempt {ended}{linked}"
            new.append(
                replace(seen, state="failed_again", step=step, detail=detail, decision=following)
            )
    elif job.state in ("CANCELLED", "PREEMPTED"):
        detail = f"the next attempt ended {job.state}"
        new.append(replace(seen, state="failed_again", step=step, detail=detail))
    return tuple(new)


_WAITING = ("PENDING", "SPECIAL_EXIT")


def rerun_time(decision: Decision, jobs: Iterable[Job]) -> int:
    """Return when somebody else ran the job again (seconds since the epoch), 0 where nobody did.

    ``jobs`` is a full look at the scheduler. A person requeues or releases the job, or submits it
    once more: of one that was not to be held, the same owner's next job of that name is taken for
    that.
    """
    attempt = decision.attempt
    if attempt is None:
        return 0
    decided = seconds_of(decision.time)
    by_name = decision.job.verdict != "hold"
    starts = [
        job.start_time
        for job in jobs
        if job.uid == decision.uid
        and job.start_time > 0
        and job.state not in _WAITING  # Slurm shows when it expects to start it
        and (
            job.restarts > attempt.restart
            if job.id == attempt.job_id
            else by_name and job.name == decision.job_name and job.submit_time >= decided
        )
    ]
    return min((start for start in starts if start >= int(decided)), default=0)


def _as_epilogs_tell(
    decision: Decision,
    records: Iterable[FaultRecord],
    step: int | None,
    time: str,
    following: str,
) -> Outcome:
    """The end of a job that Slurm has forgotten: its epilogs may have seen it."""
    attempt = decision.attempt
    exits = [
        (record.time, record.job.exit)
        for record in records
        if record.hook == "epilog"
        and record.time > decision.time
        and record.job is not None
        and attempt is not None
        and (record.job.id, record.job.uid) == (attempt.job_id, decision.uid)
        and record.job.restart == attempt.restart + 1
        and record.job.exit is not None
    ]
    if not exits:
        return Outcome("lost", time, detail="Slurm no longer knows this job")
    ended = max(at for at, _ in exits)
    failed = next((code for _, code in exits if code != "0:0"), "")
    if failed or following:
        detail = f"the next attempt ended {failed or 'badly'}, as its epilog tells"
        return Outcome("failed_again", time, step, detail, ended=ended, decision=following)
    return Outcome("finished", time, step, "the job has completed, as its epilog tells", "", ended)


def _utc(seconds: int) -> str:
    return utc(seconds) if seconds else ""


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
