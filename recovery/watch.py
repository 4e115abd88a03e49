"""Attempts that may have failed, watched until their nodes have spoken or have had their time.

Keeps the waiting and nothing else: no file, no scheduler. A crash loses nothing, since the records
and the scheduler's own memory tell of the same attempts again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from recovery import incident
from recovery.slurm.base import Job
from recovery.slurm.hostlist import HostlistError, expand
from slurm_hooks.config import Policy
from slurm_hooks.record import FaultRecord, RecordJob, seconds_of

LATE_SECONDS = 900.0
"""How long an attempt that has been decided on is kept in mind for evidence that comes late."""

_NODES_LIMIT = 10_000
"""Most nodes of one attempt that a record's hostlist is expanded to."""


@dataclass(frozen=True)
class Ready:
    """An attempt that can be decided on, as the scheduler shows it now.

    ``restart`` is the attempt's own restart count. It is one less than the job's where Slurm has
    requeued the job by itself: after its gate had closed, or for a node that it lost.
    """

    job: Job
    nodes: tuple[str, ...]
    restart: int

    @property
    def requeued(self) -> bool:
        """Whether the job is in the queue again, not by our doing."""
        return self.restart < self.job.restarts


@dataclass
class _Attempt:
    """What is known of one watched attempt.

    ``seen`` is in seconds since the epoch, the looks at it are on the clock that nobody sets.
    """

    job_id: int
    restart: int
    uid: int | None
    nodes: tuple[str, ...]
    seen: float
    reported: set[str] = field(default_factory=set)
    first_look: float = math.inf
    ended_look: float = math.inf
    gated: bool = False
    parts: tuple[int, ...] = ()
    told: RecordJob | None = None


@dataclass
class _Settled:
    """An attempt that has been decided on at ``since``; ``late``: something has been heard then."""

    ready: Ready
    nodes: frozenset[str]
    since: float
    late: bool = False


class Watch:
    """The attempts under watch, with the waiting times of ``policy``.

    ``down_since`` is when an aggregator last looked before this one began: what was over and
    forgotten by Slurm before that has been dealt with. In seconds since the epoch.
    """

    def __init__(self, policy: Policy, down_since: float) -> None:
        self._policy, self._down_since = policy, down_since
        self._attempts: dict[tuple[int, int], _Attempt] = {}
        self._running: dict[int, Job] = {}
        self._settled: dict[tuple[int, int], _Settled] = {}

    def __bool__(self) -> bool:
        return bool(self._attempts)

    @property
    def job_ids(self) -> set[int]:
        """The jobs to ask the scheduler about."""
        attempts = self._attempts.values()
        return {job for attempt in attempts for job in (attempt.job_id, *attempt.parts)}

    def names(self, node: str) -> bool:
        """Whether a watched attempt ran on ``node``."""
        return any(node in attempt.nodes for attempt in self._attempts.values())

    def note(self, record: FaultRecord) -> None:
        """Take notice of an epilog whose job did not end well, or a prolog that sent it back."""
        self._note_late(record)
        job, gated = record.job, incident.closed_gate(record)
        failed = job is not None and record.hook == "epilog" and job.exit not in (None, "0:0")
        if job is None or not (failed or gated):
            return
        seen = seconds_of(record.time)
        attempt = self._attempts.setdefault(
            (job.id, job.restart), _Attempt(job.id, job.restart, job.uid, _nodes_of(record), seen)
        )
        attempt.told = attempt.told or job
        attempt.reported.add(record.node)
        attempt.gated |= gated

    def note_snapshot(self, jobs: Mapping[int, Job], now: float) -> None:
        """Take notice of attempts that ended and that no record names: their nodes may be gone.

        Those are the failed jobs of a full look at the scheduler, and those that ran at the look
        before and have been restarted since.
        """
        ended = [job for job in jobs.values() if job.state in incident.FAILED_STATES]
        ended += [
            before
            for before in self._running.values()
            if before.id in jobs and jobs[before.id].restarts > before.restarts
        ]
        for job in ended:
            seen = float(job.end_time) if job.state in incident.FAILED_STATES else now
            self._attempts.setdefault(
                (job.id, job.restarts),
                _Attempt(job.id, job.restarts, job.uid, job.nodes, seen or now),
            )
        self._running = {job.id: job for job in jobs.values() if job.state == "RUNNING"}

    def ready(
        self,
        jobs: Mapping[int, Job],
        decided: Callable[[Job, int], bool],
        now: float,
        steady: float,
        heard: float,
    ) -> list[Ready]:
        """Return what can be decided on now, and stop watching what needs no decision.

        ``jobs`` is a fresh look at ``job_ids``; ``decided`` tells whether a job's attempt with that
        restart count has its decision already. ``steady`` is the time, in seconds, on a clock that
        nobody sets. Until ``heard``, on that clock, everything in the spool has been read: what a
        slow one still holds is waited for, and is no silence of a node's.
        """
        asked = self.job_ids
        self._join_parts(jobs)
        ready: list[Ready] = []
        for key, attempt in sorted(self._attempts.items()):
            job = jobs.get(attempt.job_id) or self._forgotten(attempt)
            if attempt.job_id not in asked or not asked.issuperset(attempt.parts):
                continue  # known to be of one job only since this look: the next one asks for all
            if (
                job is None
                or not self._is(attempt, job)
                or self._stuck(attempt, job, steady)
                or decided(job, attempt.restart)
                or job.state in incident.OTHER_ENDS
                or "REVOKED" in job.flags  # another cluster of the federation runs it
            ):
                del self._attempts[key]
                lies_there = job is not None and job.state in incident.FAILED_STATES
                if job and lies_there and self._is(attempt, job) and decided(job, attempt.restart):
                    self._settle_again(attempt, job, now)
            elif self._can_be_decided(attempt, job, steady, heard):
                nodes = attempt.nodes if job.restarts > attempt.restart else job.nodes
                if job.het_job_id:
                    nodes = tuple(dict.fromkeys((*nodes, *attempt.nodes)))
                ready.append(Ready(job, nodes or attempt.nodes, attempt.restart))
        return ready

    def settle(self, ready: Ready, now: float) -> None:
        """Stop watching an attempt that has been decided on, but for evidence that comes late."""
        self.forget(ready)
        key = (ready.job.id, ready.restart)
        self._settled[key] = _Settled(ready, frozenset(ready.nodes), now)

    def _settle_again(self, attempt: _Attempt, job: Job, now: float) -> None:
        """Keep an attempt in mind that was decided on before this aggregator began.

        A full look shows it again and again; what has been heard of it meanwhile must stand.
        """
        ready = Ready(job, job.nodes or attempt.nodes, attempt.restart)
        if (job.id, attempt.restart) not in self._settled and now - job.end_time < LATE_SECONDS:
            self.settle(ready, now)

    def late(self, now: float) -> list[Ready]:
        """Return the decided attempts of which something new has been heard since the last call."""
        for key, settled in list(self._settled.items()):
            if now - settled.since > LATE_SECONDS:
                del self._settled[key]
        told = [settled for settled in self._settled.values() if settled.late]
        for settled in told:
            settled.late = False
        return [settled.ready for settled in told]

    def _note_late(self, record: FaultRecord) -> None:
        """A record with findings speaks of its node's decided attempts, unless it is another's."""
        if not record.findings:
            return
        for (job_id, restart), settled in self._settled.items():
            job = record.job
            another = job is not None and (job.id, job.restart) != (job_id, restart)
            if record.node in settled.nodes and not another:
                settled.late = True

    def _forgotten(self, attempt: _Attempt) -> Job | None:
        """What its records tell of a job that slurmctld has forgotten (MinJobAge) since."""
        told = attempt.told
        if told is None or told.uid is None or attempt.gated or attempt.seen < self._down_since:
            return None
        code, _, number = (told.exit or "0:0").partition(":")
        return Job(
            id=told.id,
            name="",
            user=told.user or "",
            uid=told.uid,
            account="",
            partition=told.partition or "",
            qos="",
            state="FAILED",
            nodes=attempt.nodes,
            restarts=attempt.restart,
            end_time=int(attempt.seen),
            exit_code=int(code) if code.isdigit() else 0,
            signal=int(number) if number.isdigit() else 0,
            comment=told.comment or "",
            array=told.array,
            known=False,
        )

    def _join_parts(self, jobs: Mapping[int, Job]) -> None:
        """Make one attempt of the parts of a heterogeneous job: Slurm restarts them together.

        A part that no record has named is found by the look after this one, since its leader's
        job tells its id.
        """
        for (job_id, restart), attempt in sorted(self._attempts.items()):
            job = jobs.get(job_id)
            if job is None or not job.het_job_id:
                continue
            if job_id == job.het_job_id:
                attempt.parts = job.het_parts
                others = [jobs[part] for part in job.het_parts if part in jobs]
                nodes = [node for other in others for node in other.nodes]
                attempt.nodes = tuple(dict.fromkeys((*attempt.nodes, *nodes)))
                continue
            del self._attempts[job_id, restart]
            leader = self._attempts.setdefault(
                (job.het_job_id, restart),
                _Attempt(job.het_job_id, restart, attempt.uid, attempt.nodes, attempt.seen),
            )
            leader.nodes = tuple(dict.fromkeys((*leader.nodes, *attempt.nodes)))
            leader.reported |= attempt.reported

    def forget(self, ready: Ready) -> None:
        """Stop watching an attempt: it has been dealt with."""
        self._attempts.pop((ready.job.id, ready.restart), None)

    def _can_be_decided(self, attempt: _Attempt, job: Job, steady: float, heard: float) -> bool:
        if attempt.gated:
            return job.held_by_slurm and job.pending
        if job.restarts > attempt.restart:
            return self._gathered(attempt, job, steady, heard)
        return job.state in incident.FAILED_STATES and self._gathered(attempt, job, steady, heard)

    def _is(self, attempt: _Attempt, job: Job) -> bool:
        """Whether ``job`` is that attempt or its restart, and no new job under its number."""
        if attempt.uid is not None and job.uid != attempt.uid:
            return False
        if job.restarts == attempt.restart + 1:  # a requeue renews the submit time
            return True
        return job.restarts == attempt.restart and job.submit_time <= attempt.seen

    def _stuck(self, attempt: _Attempt, job: Job, steady: float) -> bool:
        """Whether the job runs on although an epilog saw it fail; a stuck COMPLETING still ends."""
        attempt.first_look = min(attempt.first_look, steady)
        live = job.state in ("RUNNING", "PENDING", "CONFIGURING", "SUSPENDED")
        return (
            live
            and job.restarts == attempt.restart
            and steady - attempt.first_look > self._policy.gather_max
        )

    def _gathered(self, attempt: _Attempt, job: Job, steady: float, heard: float) -> bool:
        attempt.ended_look = min(attempt.ended_look, steady)
        all_spoke = set(attempt.nodes) <= attempt.reported
        waited = heard - attempt.ended_look >= self._policy.settle
        bounded = steady - attempt.first_look >= self._policy.gather_max
        completing = "COMPLETING" in job.flags
        return (all_spoke or waited or bounded) and (not completing or bounded)


def _nodes_of(record: FaultRecord) -> tuple[str, ...]:
    try:
        names = expand(record.job.nodes, _NODES_LIMIT) if record.job and record.job.nodes else ()
    except HostlistError:
        names = ()
    return tuple(names) if record.node in names else (record.node,)
