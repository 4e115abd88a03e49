"""Where the GPU time of restarted jobs went, and how well they come back.

Pure: everything is computed from decisions and their outcomes (``of_jobs``), so that it can be
computed again for any time past. What each figure means, and where its definition comes from, is
told in docs/metrics.md; what nobody has seen is ``None`` here, and never a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from recovery.decision import Decision, Outcome
from slurm_hooks.record import seconds_of

SCHEMA = "metrics/v1"

RESTARTED = ("restarted", "resumed", "finished", "failed_again")
"""Outcomes that tell of a next attempt."""


@dataclass(frozen=True)
class AttemptEffort:
    """GPU-seconds of one attempt; ``restart`` numbers it, ``ended`` is what ended it.

    ``productive + replay == allocated`` where the progress is known. ``downtime`` is from this
    attempt's end to the next one's start, 0 for the last one.
    """

    restart: int
    ended: str
    seconds: float
    gpus: int
    allocated: float
    productive: float | None
    replay: float | None
    downtime: float


@dataclass(frozen=True)
class JobEffort:
    """One job's attempts. ``ratio`` is its effective training time ratio, at most."""

    job_id: int
    owner: str
    attempts: tuple[AttemptEffort, ...]
    failures: int
    recovery_seconds: tuple[float, ...]
    outcome: str

    @property
    def allocated(self) -> float:
        """GPU-seconds of all attempts that have ended."""
        return sum(one.allocated for one in self.attempts)

    @property
    def downtime(self) -> float:
        """GPU-seconds between attempts."""
        return sum(one.downtime for one in self.attempts)

    @property
    def replay(self) -> float | None:
        """GPU-seconds of work done again, None where any attempt's is unknown."""
        parts = [one.replay for one in self.attempts]
        return None if None in parts else sum(part for part in parts if part is not None)

    @property
    def ratio(self) -> float | None:
        """Return productive over allocated and downtime, None where it is not known."""
        return _ratio(self.allocated, self.replay, self.downtime)


@dataclass(frozen=True)
class Fleet:
    """All jobs together; times in seconds, ``None`` where there is nothing to divide by."""

    jobs: tuple[JobEffort, ...]

    @property
    def failures(self) -> int:
        """Attempts that failed."""
        return sum(one.failures for one in self.jobs)

    @property
    def mean_time_to_failure(self) -> float | None:
        """Seconds that attempts ran, for each that failed."""
        ran = sum(attempt.seconds for one in self.jobs for attempt in one.attempts)
        return ran / self.failures if self.failures else None

    @property
    def mean_time_to_recovery(self) -> float | None:
        """Mean seconds from an attempt's end to the next one's start, where there was one."""
        times = [seconds for one in self.jobs for seconds in one.recovery_seconds]
        return sum(times) / len(times) if times else None

    @property
    def ratio(self) -> float | None:
        """Effective training time ratio of the jobs of which it is known, by GPU-seconds."""
        known = [one for one in self.jobs if one.replay is not None and one.attempts]
        return _ratio(
            sum(one.allocated for one in known),
            sum(one.replay for one in known if one.replay is not None),
            sum(one.downtime for one in known),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document ``metrics/v1``."""
        outcomes: dict[str, int] = {}
        for one in self.jobs:
            outcomes[one.outcome] = outcomes.get(one.outcome, 0) + 1
        return {
            "schema": SCHEMA,
            "fleet": {
                "jobs": len(self.jobs),
                "failures": self.failures,
                "gpu_seconds_allocated": sum(one.allocated for one in self.jobs),
                "gpu_seconds_replay": sum(one.replay or 0.0 for one in self.jobs),
                "gpu_seconds_downtime": sum(one.downtime for one in self.jobs),
                "effective_training_time_ratio": self.ratio,
                "mean_seconds_to_failure": self.mean_time_to_failure,
                "mean_seconds_to_recovery": self.mean_time_to_recovery,
                "outcomes": outcomes,
            },
            "jobs": [
                {
                    "job": one.job_id,
                    "owner": one.owner,
                    "failures": one.failures,
                    "outcome": one.outcome,
                    "effective_training_time_ratio": one.ratio,
                    "attempts": [asdict(attempt) for attempt in one.attempts],
                }
                for one in self.jobs
            ],
        }


def of_jobs(decisions: Iterable[Decision]) -> Fleet:
    """Return the effort of all jobs that ``decisions`` speak of, in the order of their first."""
    jobs: list[list[Decision]] = []
    latest: dict[tuple[str, int, int | None], list[Decision]] = {}
    for decision in sorted(decisions, key=lambda one: (one.time, one.id)):
        attempt = decision.attempt
        if attempt is None:
            continue
        key = (attempt.cluster, attempt.job_id, decision.uid)
        known = latest.get(key)
        # Restarts count up: a lower count is another job under that number.
        if known and _restart(known[-1]) < attempt.restart:
            known.append(decision)
            continue
        latest[key] = [decision]
        jobs.append(latest[key])
    return Fleet(tuple(_of_job(one) for one in jobs))


def _of_job(decisions: Sequence[Decision]) -> JobEffort:
    attempts: list[AttemptEffort] = []
    recoveries: list[float] = []
    resumed_from = 0
    for number, decision in enumerate(decisions):
        following = decisions[number + 1] if number + 1 < len(decisions) else None
        started = _next_start(decision, following)
        down = 0.0
        if started and decision.ended_time:
            down = max(0.0, seconds_of(started) - seconds_of(decision.ended_time))
            recoveries.append(down)
        seconds = _between(decision.started_time, decision.ended_time)
        if seconds is not None:
            share = _replayed_share(decision, resumed_from)
            attempts.append(_attempt(decision, seconds, share, down))
        resumed_from = decision.checkpoint_step or 0
    last = decisions[-1]
    end = last.outcome
    if end and end.state == "finished" and (seconds := _between(end.started, end.ended)):
        allocated = seconds * last.gpus
        attempts.append(
            AttemptEffort(
                _restart(last) + 1, "finished", seconds, last.gpus, allocated, allocated, 0.0, 0.0
            )
        )
    return JobEffort(
        job_id=last.attempt.job_id if last.attempt else 0,
        owner=last.owner,
        attempts=tuple(attempts),
        failures=len(decisions),
        recovery_seconds=tuple(recoveries),
        outcome=end.state if end else last.job.verdict,
    )


def _attempt(decision: Decision, seconds: float, share: float | None, down: float) -> AttemptEffort:
    allocated = seconds * decision.gpus
    replay = None if share is None else allocated * share
    return AttemptEffort(
        restart=_restart(decision),
        ended=decision.cause.fault_class,
        seconds=seconds,
        gpus=decision.gpus,
        allocated=allocated,
        productive=None if replay is None else allocated - replay,
        replay=replay,
        downtime=down * decision.gpus,
    )


def _replayed_share(decision: Decision, resumed_from: int) -> float | None:
    """Which share of an attempt's steps its successor has to do again, at an even pace.

    The steps since its newest checkpoint. Where nobody saw one or the other, nobody knows.
    """
    reached = decision.progress_step
    if reached is None or decision.checkpoint_step is None:
        return None
    done = reached - resumed_from
    kept = min(max(decision.checkpoint_step, resumed_from), reached)
    return (reached - kept) / done if done > 0 else 1.0


def _next_start(decision: Decision, following: Decision | None) -> str:
    starts = [one.started for one in decision.outcomes if _tells_of_next(one)]
    known = next((start for start in starts if start), "")
    if known or following is None:
        return known
    return following.started_time if _restart(following) == _restart(decision) + 1 else ""


def _tells_of_next(outcome: Outcome) -> bool:
    return outcome.state in RESTARTED


def _between(started: str, ended: str) -> float | None:
    if not started or not ended:
        return None
    return max(0.0, seconds_of(ended) - seconds_of(started))


def _restart(decision: Decision) -> int:
    return decision.attempt.restart if decision.attempt else 0


def _ratio(allocated: float, replay: float | None, downtime: float) -> float | None:
    whole = allocated + downtime
    return None if replay is None or not whole else (allocated - replay) / whole
