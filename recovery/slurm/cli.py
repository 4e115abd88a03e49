"""The Scheduler by Slurm's own commands: squeue, sinfo and scontrol.

    scheduler = CliScheduler()
    failed = scheduler.jobs([12])[12]
    scheduler.requeue("12")
    …                                   # until the job is pending
    scheduler.start_now("12", [*failed.excluded, "n3"])

Reads are one command each, however many jobs or nodes they name. What is read is JSON, by
``documents``; what changes is one ``scontrol`` each, logged once with its time and exit status.

Silence is never an answer. A command that did not run, did not end in time, ended by a signal,
printed no document or a document with an error raises SchedulerUnavailable; CommandRefused is for
what slurmctld itself said. For a change only the text tells the two apart: with slurmctld away,
``scontrol requeue`` of 22.05, 24.11 and 26.05 exits 1 with "Unexpected message received", just as
it exits 1 for an unknown job. A change that ends as SchedulerUnavailable may have been made or not.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from recovery.slurm import command, documents
from recovery.slurm.arguments import (
    ADMIN_COMMENT_LIMIT,
    AWAY,
    NODE,
    REASON_LIMIT,
    checked_job,
    checked_nodes,
    one_line,
    uid_of,
)
from recovery.slurm.base import CommandRefused, Job, Node, SchedulerUnavailable
from recovery.slurm.hostlist import HostlistError, compress, expand

OUTPUT_LIMIT_BYTES = 256 << 20
"""Most that is read of one answer: a job is about 6 kB of JSON, so forty thousand jobs."""

NAMES_LIMIT = 1000
"""More jobs or nodes are not named on the command line: all are asked for instead."""

_UNKNOWN_JOB = "Invalid job id specified"

# A variable of the administrator's shell must not narrow what is asked (SQUEUE_STATES), move it
# to another cluster (SLURM_CLUSTERS) or reshape it (SLURM_JSON, SINFO_FORMAT).
_STRIPPED = re.compile(
    r"(?:SQUEUE|SINFO|SCONTROL)_.*|SLURM_(?:CLUSTERS|JSON|YAML|TIME_FORMAT|BITSTR_LEN)"
)

_RESERVATION = re.compile(
    r"^ReservationName=(?P<name>\S+) StartTime=\S+ EndTime=\S+ Duration=\S+"
    r" Nodes=(?P<nodes>\S*) .*? Flags=(?P<flags>\S*)",
    re.MULTILINE,
)

_T = TypeVar("_T")

_log = logging.getLogger("recovery.slurm")


class CliScheduler:
    """Implements ``recovery.slurm.base.Scheduler``.

    ``environment`` replaces this process's own (``SLURM_CONF``, ``PATH``); each command ends
    within ``timeout_seconds``. ``restart_nice`` is what ``start_now`` takes off a job's nice value
    of 0; 0 leaves it alone.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        timeout_seconds: float = 20,
        restart_nice: int = 0,
    ) -> None:
        given = os.environ if environment is None else environment
        kept = {name: value for name, value in given.items() if not _STRIPPED.fullmatch(name)}
        # scontrol makes a local time of "now": an hour late where one is to repeat (measured).
        self._environment = {"PATH": os.defpath, **kept, "LC_ALL": "C", "TZ": "UTC0"}
        self._timeout_seconds = timeout_seconds
        self._nice = [f"Nice={-restart_nice}"] if restart_nice else []
        self._sinfo_lists_nodes: bool | None = None

    def cluster(self) -> str:
        """See ``Scheduler.cluster``; every release prints it as text alike."""
        result = self._run(["scontrol", "show", "config"])
        match = re.search(r"^ClusterName\s*= (\S+)$", result.stdout, re.MULTILINE)
        if result.status or not match:
            said = one_line(result.stderr, 300) or "nothing"
            raise SchedulerUnavailable(f"scontrol show config tells no ClusterName, but {said}")
        return match[1]

    def jobs(self, ids: Collection[int] | None = None) -> Mapping[int, Job]:
        """Return the jobs that slurmctld remembers; see ``Scheduler.jobs``.

        22.05's ``squeue --json`` prints every job, whatever is asked, hence the second filter.
        """
        if ids is not None and not ids:
            return {}
        asked = ["squeue", "--json", "--states=all"]
        if ids is not None and len(ids) <= NAMES_LIMIT:
            asked.append("--jobs=" + ",".join(str(int(one)) for one in sorted(ids)))
        result = self._run(asked)
        if result.status and _UNKNOWN_JOB in result.stderr:
            return {}
        jobs = _understood(asked, result, documents.read_jobs)
        return jobs if ids is None else {one: jobs[one] for one in ids if one in jobs}

    def nodes(self, names: Collection[str] | None = None) -> Mapping[str, Node]:
        """Return nodes by name; see ``Scheduler.nodes``.

        scontrol leaves out names that it does not know; sinfo prints all nodes, whatever is asked.
        """
        if names is not None and not names:
            return {}
        if self._sinfo_lists_nodes is None:
            self._sinfo_lists_nodes = self._is_older_than_23_02()
        asked = ["sinfo", "--json"] if self._sinfo_lists_nodes else _show_nodes(names)
        try:
            nodes = _understood(
                asked, self._run(asked), lambda text: documents.read_nodes(text, uid_of)
            )
        except SchedulerUnavailable:
            # Slurm may have been upgraded under a long-running aggregator.
            self._sinfo_lists_nodes = None
            raise
        return nodes if names is None else {one: nodes[one] for one in names if one in nodes}

    def reservations(self) -> Mapping[str, Collection[str]]:
        """See ``Scheduler.reservations``; text, since 22.05 has no JSON of them.

        Only administrators make reservations, and what they write freely (users, licenses) stands
        behind what is read here.
        """
        result = self._run(["scontrol", "--oneliner", "show", "reservation"])
        if result.status:
            said = one_line(result.stderr, 300) or "nothing"
            raise SchedulerUnavailable(f"scontrol show reservation says {said}")
        try:
            return {
                match["name"]: expand(match["nodes"])
                for match in _RESERVATION.finditer(result.stdout)
                if "FLEX" not in match["flags"].split(",")
            }
        except HostlistError as error:
            raise SchedulerUnavailable(f"scontrol show reservation: {error}") from error

    def requeue(self, job: str) -> None:
        self._change("requeue", checked_job(job))

    def requeue_hold(self, job: str) -> None:
        self._change("requeuehold", "State=SpecialExit", checked_job(job))

    def start_now(self, job: str, excluded: Collection[str]) -> None:
        names = checked_nodes(excluded) if excluded else ""
        listed = f"ExcNodeList={names}"
        self._change("update", f"job={checked_job(job)}", listed, "StartTime=now", *self._nice)

    def hold(self, job: str) -> None:
        # What root holds by "hold" only an administrator releases (man scontrol).
        self._change("uhold", checked_job(job))

    def release(self, job: str) -> None:
        self._change("release", checked_job(job))

    def explain_hold(self, job: str, text: str, excluded: Collection[str] | None = None) -> None:
        """See ``Scheduler.explain_hold``.

        A requeued job is eligible only two minutes later, and so it would wait although released
        (measured on 22.05). StartTime=now leaves it held, and a release then starts it at once.
        """
        comment = f"AdminComment={one_line(text, ADMIN_COMMENT_LIMIT)}"
        names = checked_nodes(excluded) if excluded else ""
        listed = [] if excluded is None else [f"ExcNodeList={names}"]
        self._change("update", f"job={checked_job(job)}", *listed, "StartTime=now", comment)

    def drain(self, nodes: Collection[str], reason: str) -> None:
        if not nodes:
            return
        reason = one_line(reason, REASON_LIMIT)
        if not reason:
            raise CommandRefused("a drain needs a reason; nothing was sent to Slurm")
        self._change(
            "update", f"nodename={checked_nodes(nodes)}", "state=drain", f"reason={reason}"
        )

    def set_reason(self, node: str, reason: str) -> None:
        words = one_line(reason, REASON_LIMIT)
        self._change("update", f"nodename={checked_nodes((node,))}", f"reason={words}")

    def undrain(self, nodes: Collection[str]) -> None:
        if nodes:
            self._change("update", f"nodename={checked_nodes(nodes)}", "state=resume")

    def _is_older_than_23_02(self) -> bool:
        """Return whether it is sinfo that prints a list of nodes, and scontrol has no JSON yet.

        Later releases' ``sinfo --json`` puts nodes that look alike into one entry.
        """
        text = self._run(["scontrol", "--version"]).stdout
        match = re.search(r"slurm\S* (\d+)\.(\d+)", text)
        if not match:
            raise SchedulerUnavailable(f"scontrol --version says {text[:100]!r}")
        return (int(match[1]), int(match[2])) < (23, 2)

    def _run(self, arguments: Sequence[str]) -> command.Completed:
        name = arguments[0]
        try:
            result = command.run(
                arguments, self._environment, self._timeout_seconds, OUTPUT_LIMIT_BYTES
            )
        except command.CommandTimeout as error:
            raise SchedulerUnavailable(
                f"{name} did not end within {self._timeout_seconds:g} s"
            ) from error
        except command.OutputTooLarge as error:
            raise SchedulerUnavailable(
                f"{name} printed more than {OUTPUT_LIMIT_BYTES >> 20} MiB"
            ) from error
        except OSError as error:
            raise SchedulerUnavailable(f"{name} cannot be run: {error.strerror}") from error
        if result.status < 0:
            raise SchedulerUnavailable(f"{name} was killed by signal {-result.status}")
        return result

    def _change(self, *arguments: str) -> None:
        """Run one scontrol that changes something, and log it."""
        began = time.monotonic()
        status: int | None = None
        try:
            result = self._run(["scontrol", *arguments])
            status = result.status
        finally:
            seconds = round(time.monotonic() - began, 3)
            _log.info(
                "scontrol %s",
                arguments[0],
                extra={"command": ["scontrol", *arguments], "seconds": seconds, "status": status},
            )
        if result.status:
            text = one_line(result.stderr or result.stdout, 500)
            if not text or AWAY.search(text):
                raise SchedulerUnavailable(text or f"scontrol exited {result.status} silently")
            raise CommandRefused(text)


def _understood(
    arguments: Sequence[str], result: command.Completed, read: Callable[[str], _T]
) -> _T:
    """Return what the document says, or raise SchedulerUnavailable where it is no answer."""
    if result.status:
        said = one_line(result.stderr, 300) or "nothing"
        raise SchedulerUnavailable(f"{arguments[0]} exited {result.status} and said: {said}")
    try:
        return read(result.stdout)
    except documents.AnswerError as error:
        said = one_line(result.stderr, 300)
        raise SchedulerUnavailable(f"{arguments[0]} reports: {said or error}") from error
    except documents.DocumentError as error:
        raise SchedulerUnavailable(
            f"{arguments[0]} printed no document that can be read: {error}"
        ) from error


def _show_nodes(names: Collection[str] | None) -> list[str]:
    command = ["scontrol", "--json", "show", "nodes"]
    if names is None or len(names) > NAMES_LIMIT:
        return command
    # No node has a name of another form, and a forged one could read as an option.
    known_form = [name for name in names if NODE.fullmatch(name)]
    return [*command, compress(known_form)] if known_form else command
