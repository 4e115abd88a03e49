"""Running jobs under watch: whose progress stands still, or has become slow.

Keeps what health checks saw of each job's step, GPUs and processes, and asks their nodes for
evidence while a hang is suspected. What that amounts to is ``stalls``' to say, what to do about it
the policy's. A crash loses nothing but a suspicion: the records tell of the same looks again.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from recovery import evidence_requests, stalls
from recovery.decision import Implicated
from recovery.slurm.base import Job
from recovery.stalls import Activity, Hang, Limits, Look, Slowdown
from slurm_hooks import optin
from slurm_hooks.config import Policy
from slurm_hooks.record import FaultRecord, Finding, new_id, seconds_of

log = logging.getLogger("recovery.hangs")

JOBS_LIMIT = 20_000
"""Most jobs remembered; those unseen for longest make room."""

LOOK_AGAIN_SECONDS = 5.0
"""How often the scheduler is asked about a suspected job that nothing new is known of."""

REQUEST_SECONDS = 600.0
"""For how long a request counts; it is renewed while the suspicion stands."""

MONITOR_SILENT_SECONDS = 300.0
"""A job whose last look was so long before its time limit was not seen to stand still."""

_ROUNDS = 2
"""Looks in a row at which GPUs and processes must show the hang: one may fall into a pause."""

_NAMING = ("activity.process_stopped", "activity.process_blocked", "activity.process_gone")


@dataclass(frozen=True)
class Found:
    """A running job that hangs, or is slow, as the scheduler shows it now."""

    job: Job
    hang: Hang | None = None
    slowdown: Slowdown | None = None


@dataclass
class _Suspicion:
    """What is under way about one job; times are seconds since the epoch."""

    restart: int
    request: str
    asked: float
    renewed: float
    nodes: tuple[str, ...]
    rounds: int = 0
    counted: float = 0.0
    said: str = ""


class Hangs:
    """The running jobs of one cluster, with the limits of ``policy``; ``spool`` takes requests."""

    def __init__(self, policy: Policy, spool: Path) -> None:
        self._limits = Limits(
            policy.hang_minimum,
            policy.hang_maximum,
            policy.hang_factor,
            policy.slow_loss,
            policy.slow_window,
        )
        self._wait, self._spool = policy.hang_evidence, spool
        self._looks: dict[int, list[Look]] = {}
        self._shown: dict[int, dict[str, Activity]] = {}
        self._suspected: dict[int, _Suspicion] = {}
        self._not_before: dict[int, float] = {}
        self._settled: dict[int, set[tuple[int, str]]] = {}
        self._fresh: set[int] = set()
        self._asked_slurm = 0.0

    def note(self, record: FaultRecord) -> None:
        """Take notice of what a health check saw of running jobs."""
        if record.hook != "health_check":
            return
        time = seconds_of(record.time)
        by_job: dict[int, list[Finding]] = {}
        for finding in record.findings:
            if finding.job_id is not None:
                by_job.setdefault(finding.job_id, []).append(finding)
        for job_id, findings in by_job.items():
            self._shown.setdefault(job_id, {})[record.node] = _activity(record.node, time, findings)
            steps = [f.step for f in findings if f.code == "progress.seen" and f.step is not None]
            if steps:
                looks = self._looks.setdefault(job_id, [])
                bisect.insort(looks, Look(time, steps[-1], record.node), key=lambda one: one.time)
                del looks[: -stalls.LOOKS_LIMIT]
                self._fresh.add(job_id)
        while len(self._looks) > JOBS_LIMIT:
            oldest = min(self._looks, key=lambda job_id: self._looks[job_id][-1].time)
            self.forget(oldest)

    def note_snapshot(self, jobs: Mapping[int, Job]) -> None:
        """Forget the jobs that the scheduler no longer knows."""
        for job_id in [*self._shown.keys() - jobs.keys()]:
            self.forget(job_id)

    def forget(self, job_id: int) -> None:
        """Forget a job, and ask its nodes no longer."""
        self._withdraw(job_id)
        for memory in (self._looks, self._shown, self._not_before, self._settled):
            memory.pop(job_id, None)
        self._fresh.discard(job_id)

    def settle(self, found: Found) -> None:
        """Take notice that it has been decided on: nothing more is to be said of that attempt."""
        self._withdraw(found.job.id)
        known = self._settled.setdefault(found.job.id, set())
        known.add((found.job.restarts, "hang" if found.hang else "slowdown"))

    @property
    def suspected(self) -> Mapping[int, str]:
        """The jobs that are suspected to hang, and what keeps it from being decided."""
        return {job_id: one.said for job_id, one in self._suspected.items()}

    def due(self, now: float) -> set[int]:
        """Return the jobs to be judged: those that may stand still or be slow, by what is new."""
        wanted = {job_id for job_id in self._fresh if self._may_be(job_id)}
        self._fresh.clear()
        if self._suspected and now - self._asked_slurm >= LOOK_AGAIN_SECONDS:
            wanted |= self._suspected.keys()
        if wanted:
            self._asked_slurm = now
        return wanted

    def judge(self, wanted: Iterable[int], jobs: Mapping[int, Job], now: float) -> list[Found]:
        """Return those of the jobs ``wanted`` that hang or are slow; ``jobs`` is a fresh look."""
        found: list[Found] = []
        for job_id in sorted(wanted):
            job = jobs.get(job_id)
            if job is None or job.state != "RUNNING" or not optin.parse(job.comment).opted_in:
                self._withdraw(job_id)
                if job is not None and job.state == "SUSPENDED":
                    self._not_before[job_id] = now  # it stands still by somebody's wish
                continue
            one = self._judge(job, now)
            if one:
                found.append(one)
        return found

    def at_end(self, job: Job, ended: float) -> Hang | None:
        """Return the hang that the job's time limit has ended, None where it was not seen to hang.

        Its processes are gone; what its nodes showed last counts against it, and nothing else.
        """
        looks = self._looks_of(job)
        stall = stalls.stalled(looks, self._began(job), self._limits)
        if job.state != "TIMEOUT" or stall is None or not stall.suspected:
            return None
        if ended - looks[-1].time > MONITOR_SILENT_SECONDS:
            return None
        shown = self._shown.get(job.id, {})
        if stalls.contradicted(one for one in shown.values() if one.node in job.nodes):
            return None
        hang = stalls.hang(stall, shown, job.nodes)
        if isinstance(hang, Hang):
            return hang
        return Hang(stall, "then it reached its time limit")

    def _may_be(self, job_id: int) -> bool:
        """Whether the job is worth a question to the scheduler."""
        if job_id in self._suspected:
            return True
        looks = self._looks.get(job_id, [])
        stall = stalls.stalled(looks, 0.0, self._limits)
        if stall is not None and stall.seconds >= self._limits.minimum:
            return True
        return stalls.slow(looks, 0.0, self._limits) is not None

    def _judge(self, job: Job, now: float) -> Found | None:
        looks, began = self._looks_of(job), self._began(job)
        stall = stalls.stalled(looks, began, self._limits)
        settled = self._settled.get(job.id, set())
        if stall is None or not stall.suspected:
            self._withdraw(job.id)
            if (job.restarts, "slowdown") in settled:
                return None
            slowdown = stalls.slow(looks, began, self._limits)
            return Found(job, slowdown=slowdown) if slowdown else None
        if (job.restarts, "hang") in settled:
            return None
        suspicion = self._suspicion(job, stall, now)
        shown = {
            node: one
            for node, one in self._shown.get(job.id, {}).items()
            if one.asked == suspicion.request
        }
        first = shown.get(job.batch_host)
        if first is None or first.time != looks[-1].time:
            suspicion.said = f"{job.batch_host} has not answered yet"
            return None
        silent = [node for node in job.nodes if node not in shown]
        if silent and now - suspicion.asked < self._wait:
            suspicion.said = f"{', '.join(silent)} not answered yet"
            return None
        waited = f"no answer within {self._wait:g} s"
        hang = stalls.hang(stall, shown, job.nodes, [f"{node}: {waited}" for node in silent])
        if isinstance(hang, str):
            suspicion.rounds, suspicion.said = 0, hang
            return None
        if first.time != suspicion.counted:
            suspicion.counted = first.time
            suspicion.rounds += 1
        if suspicion.rounds < _ROUNDS:
            suspicion.said = "seen once, looked at again"
            return None
        return Found(job, hang=hang)

    def _suspicion(self, job: Job, stall: stalls.Stall, now: float) -> _Suspicion:
        """The suspicion about a job, new or standing, with its nodes asked."""
        known = self._suspected.get(job.id)
        if known is None or known.restart != job.restarts:
            known = _Suspicion(job.restarts, new_id(now), now, 0.0, job.nodes)
            self._suspected[job.id] = known
            still = f"at step {stall.step} for {stall.seconds:.0f} s, {stall.told}"
            log.warning("job %s is suspected to hang: %s", job.id, still)
        if now - known.renewed >= REQUEST_SECONDS / 2:
            until = now + REQUEST_SECONDS
            failed = evidence_requests.ask(self._spool, job.nodes, job.id, known.request, until)
            if failed:
                log.warning("evidence of job %s cannot be asked for: %s", job.id, failed)
            else:
                known.renewed = now
        return known

    def _withdraw(self, job_id: int) -> None:
        known = self._suspected.pop(job_id, None)
        if known is not None:
            evidence_requests.withdraw(self._spool, known.nodes, job_id)

    def _began(self, job: Job) -> float:
        return max(float(job.start_time), self._not_before.get(job.id, 0.0))

    def _looks_of(self, job: Job) -> list[Look]:
        """The looks of this attempt's batch host; earlier attempts may have run elsewhere."""
        return [
            look
            for look in self._looks.get(job.id, ())
            if look.node == job.batch_host or look.time < job.start_time
        ]


def _activity(node: str, time: float, findings: Iterable[Finding]) -> Activity:
    """What one record of a node shows of one job."""
    codes: set[str] = set()
    named: list[Implicated] = []
    suspects: list[tuple[int, str]] = []
    ranks: set[int] = set()
    missing: list[str] = []
    asked = ""
    for finding in findings:
        codes.add(finding.code)
        if finding.code in _NAMING:
            why = finding.summary.partition(": ")[2] or finding.summary
            named.append(Implicated(node, why, "processes", finding.code, rank=finding.rank))
        if finding.code == "hang.suspect_rank" and finding.rank is not None:
            suspects.append((finding.rank, finding.summary.partition(f"rank {finding.rank} ")[2]))
        if finding.code == "hang.evidence":
            for item in finding.evidence:
                if item.source == "ranks":
                    asked = item.key or ""
                    ranks = {int(text) for text in item.text.split(",") if text.isdigit()}
                elif item.source == "not_taken":
                    missing.append(item.text)
    return Activity(
        node,
        time,
        frozenset(codes),
        tuple(named),
        tuple(suspects),
        frozenset(ranks),
        tuple(missing),
        asked,
    )
