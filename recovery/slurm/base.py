"""What the controller knows of Slurm: Job, Node, and the Scheduler protocol.

Everything Slurm-specific stays behind ``Scheduler``; ``cli`` (scontrol, squeue) and ``rest``
(slurmrestd) implement it. Nothing here runs a command.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

EXCLUDE_LIMIT = 10_000
"""Most nodes a hostlist expression is expanded to; more is a broken expression."""


class SchedulerError(Exception):
    """Base of what a scheduler command can end with."""


class SchedulerUnavailable(SchedulerError):
    """Slurm did not answer, in time or at all: nothing is known, nothing may be concluded."""


class CommandRefused(SchedulerError):
    """Slurm answered, and said no; the text is Slurm's own."""


@dataclass(frozen=True)
class Job:
    """One job as the scheduler shows it at one moment.

    ``state`` is the base state in Slurm's words (``RUNNING``, ``FAILED``, ``SPECIAL_EXIT``, …)
    and ``flags`` the rest (``COMPLETING``, ``REQUEUED``, …). Times are seconds since the epoch, 0
    where Slurm says none. ``exit_code`` and ``signal`` are the batch script's. ``array`` is
    ``6_2``, ``None`` for what is no array task. ``nodes``, ``excluded`` and ``required`` are
    expanded names. ``dependency`` is what is left of the job's own, in Slurm's words
    (``afterok:11(failed)``). ``reservation`` is the one it asked for, or several of which one will
    do (``a,b``). A time limit is 0 where there is none. ``het_parts`` are the ids of all parts of
    a heterogeneous job, the leader's first. ``gpus`` is how many it has or asks for on all its
    nodes. ``federated``: several clusters may run it, and its cluster of origin decides which
    does. ``held_by_expedite``: Slurm has requeued it and holds it itself, since its batch script
    failed and it was submitted with ``--requeue=expedite``. ``known`` is False where slurmctld has
    forgotten the job and its records alone tell of it.
    """

    id: int
    name: str
    user: str
    uid: int
    account: str
    partition: str
    qos: str
    state: str
    flags: frozenset[str] = frozenset()
    reason: str = ""
    nodes: tuple[str, ...] = ()
    batch_host: str = ""
    node_count: int = 0
    excluded: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    restarts: int = 0
    batch: bool = True
    requeue: bool = True
    submit_time: int = 0
    eligible_time: int = 0
    start_time: int = 0
    end_time: int = 0
    exit_code: int = 0
    signal: int = 0
    priority: int = 0
    reservation: str = ""
    deadline: int = 0
    time_limit_seconds: int = 0
    time_min_seconds: int = 0
    dependency: str = ""
    array: str | None = None
    het_job_id: int | None = None
    het_parts: tuple[int, ...] = ()
    gpus: int = 0
    federated: bool = False
    held_by_expedite: bool = False
    known: bool = True
    sluid: str | None = None
    comment: str = ""
    admin_comment: str = ""
    stdout: str = ""
    work_dir: str = ""

    @property
    def name_for_commands(self) -> str:
        """What scontrol calls this job: ``6_2`` for an array task, else a number.

        For each part of a heterogeneous job that is the number of its leader: Slurm requeues,
        holds and updates it whole ("Job not heterogeneous job leader", it says of a part).
        """
        return self.array or str(self.het_job_id or self.id)

    @property
    def pending(self) -> bool:
        """Waiting in the queue, and the previous attempt's processes are gone."""
        return self.state == "PENDING" and "COMPLETING" not in self.flags

    @property
    def held(self) -> bool:
        """Priority 0: it starts only after a release (``man scontrol``)."""
        return self.state in ("PENDING", "SPECIAL_EXIT") and self.priority == 0

    @property
    def held_by_slurm(self) -> bool:
        """Held by Slurm and by nobody else: it could not be launched (measured words), or above."""
        return self.held and (self.held_by_expedite or "launch" in self.reason.lower())


@dataclass(frozen=True)
class Node:
    """One node as the scheduler shows it at one moment.

    ``state`` is the base state (``IDLE``, ``ALLOCATED``, ``MIXED``, ``DOWN``, ``UNKNOWN``, …),
    ``flags`` the rest (``DRAIN``, ``NOT_RESPONDING``, ``COMPLETING``, …). ``gpus`` is the count
    Slurm was configured with. ``boot_time`` is seconds since the epoch, 0 before registration.
    """

    name: str
    state: str
    flags: frozenset[str] = frozenset()
    reason: str = ""
    reason_uid: int | None = None
    reason_time: int = 0
    boot_time: int = 0
    partitions: tuple[str, ...] = ()
    gpus: int = 0

    @property
    def drained(self) -> bool:
        """No new job will be placed here, by whoever's wish."""
        return "DRAIN" in self.flags


class Scheduler(Protocol):
    """The few things that the controller asks of Slurm.

    Every method may raise SchedulerUnavailable (no conclusion allowed) and, where it changes
    something, CommandRefused. Reading many is one command, not many.
    """

    def cluster(self) -> str:
        """Return the cluster's name (slurm.conf: ClusterName)."""

    def jobs(self, ids: Collection[int] | None = None) -> Mapping[int, Job]:
        """Return the jobs that the controller still remembers, ended ones too; None asks for all.

        An id that is missing in the answer is purged or never was.
        """

    def nodes(self, names: Collection[str] | None = None) -> Mapping[str, Node]:
        """Return nodes by name; None asks for all. An unknown name is missing in the answer."""

    def reservations(self) -> Mapping[str, Collection[str]]:
        """Return the nodes of each reservation whose jobs stay within it, by its name.

        One with the flag FLEX is missing: its jobs may use any node besides.
        """

    def requeue(self, job: str) -> None:
        """Put a batch job back into the queue; a running attempt is ended."""

    def requeue_hold(self, job: str) -> None:
        """Put an ended batch job back as SPECIAL_EXIT and held, for its owner to mend."""

    def start_now(self, job: str, excluded: Collection[str]) -> None:
        """Make a pending job eligible at once, off the nodes ``excluded`` (replaces its list)."""

    def hold(self, job: str) -> None:
        """Hold a pending job; its owner may release it."""

    def release(self, job: str) -> None:
        """Release a held job."""

    def explain_hold(self, job: str, text: str, excluded: Collection[str] | None = None) -> None:
        """Say in a held job's AdminComment why it is held; released, it may start at once.

        ``excluded`` replaces its list of excluded nodes where it is given.
        """

    def drain(self, nodes: Collection[str], reason: str) -> None:
        """Drain nodes; this overwrites a standing reason, so read before."""

    def set_reason(self, node: str, reason: str) -> None:
        """Replace the reason of a node that is drained or down, and nothing else of it."""

    def undrain(self, nodes: Collection[str]) -> None:
        """Return drained nodes to service (scontrol's ``state=resume``)."""
