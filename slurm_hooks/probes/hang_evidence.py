"""The hang_evidence probe: what is asked of a node before a hung job is run again.

The controller leaves a request ``requests/<node>.evidence-<job>`` in the spool while it suspects
that a job hangs (``recovery/evidence_requests``), and each health check answers it: what every
process does, NCCL's own view (RAS), and PyTorch's flight recorder. Files of the job are read, and
its pipes written, as the job's user. No process is signalled: what it does then is its own.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import stat
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_hooks import as_user, catalog, running_jobs, task_environment
from slurm_hooks.config import Spool
from slurm_hooks.probes import Look, Probe, Seen, Skipped, job_tasks
from slurm_hooks.probes.job_tasks import Task
from slurm_hooks.record import Evidence, Finding
from slurm_hooks.running_jobs import RunningJob
from slurm_hooks.spool import SpoolError, read_regular

SCHEMA = "evidence-request/v1"

_REQUEST_BYTES = 4096
_REQUESTS_LIMIT = 64
_PROCESSES_TOLD = 10
_SUSPECTS_TOLD = 4
_RAS_TEXT_CHARACTERS = 8000
_PIECE_CHARACTERS = 2000
"""What fits into one piece of a finding's evidence (``bounds``)."""

_RAS_SECONDS = 4.0
_DUMP_SECONDS = 2.0
"""How long dumps that were just asked for are waited for."""

_RAS_CLIENTS = ("/usr/bin/ncclras", "/usr/local/bin/ncclras", "/opt/nccl/bin/ncclras")
"""Where NCCL's client is looked for (part of NCCL from 2.24 on): slurmd gives hooks no PATH."""


@dataclass(frozen=True)
class Request:
    """A request as it lies in the spool."""

    id: str
    job: int


def look(look: Look) -> Seen:
    """Answer the requests for jobs that run here.

    Raises:
        Skipped: this is no health check, no opted-in job runs here, or nothing is asked.
    """
    if look.context.hook != "health_check":
        raise Skipped("answers in health checks")
    node, place = look.context.node, look.config.spool
    jobs = running_jobs.active(place.jobs_of(node))
    if not jobs:
        raise Skipped("no job that opted in runs here")
    asked = [one for one in requests(place, node, time.time()) if one.job in jobs]
    if not asked:
        raise Skipped("nothing is asked")
    seconds = max(1.0, (look.config.probes.hang_evidence.deadline - 1.0) / len(asked))
    tasks = job_tasks.of_jobs([jobs[one.job] for one in asked], node, {})
    return Seen(
        tuple(
            finding
            for one in asked
            for finding in _answer(one, jobs[one.job], tasks[one.job], seconds)
        )
    )


def requests(place: Spool, node: str, now: float) -> list[Request]:
    """Return the requests that lie in the spool for ``node``, of trusted hands and not outlived."""
    pattern = re.compile(rf"{re.escape(node)}\.evidence-([0-9]{{1,10}})")
    folder = place.path / "requests"
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208 - thousands of nodes may be asked
    except OSError:
        return []
    found: list[Request] = []
    for name in names:
        match = pattern.fullmatch(name)
        if not match or len(found) >= _REQUESTS_LIMIT:
            continue
        try:
            owner = (folder / name).lstat().st_uid
            told = json.loads(read_regular(folder / name, _REQUEST_BYTES))
            wanted = Request(str(told["id"])[:64], int(match[1]))
            current = told["schema"] == SCHEMA and now < float(told["until"])
        except (OSError, SpoolError, ValueError, TypeError, KeyError, RecursionError):
            continue
        if current and owner in (*place.trusted_uids, os.geteuid()):
            found.append(wanted)
    return found


def _answer(
    asked: Request, job: RunningJob, tasks: Sequence[Task], seconds: float
) -> Iterable[Finding]:
    ranks = sorted({task.rank for task in tasks if task.rank is not None})
    first = [task for task in tasks if task.state in "TD"]
    others = [task for task in tasks if task not in first]
    told = (first + sorted(others, key=lambda task: task.rank is None))[:_PROCESSES_TOLD]
    evidence = [Evidence("ranks", ",".join(map(str, ranks))[:1500], key=asked.id)]
    evidence += [Evidence("processes", job_tasks.doing(task)) for task in told]
    # Before rights are dropped: the user may not be able to read where this package is installed.
    for module in ("slurm_hooks.joblog.flight_recorder", "heapq"):  # that one for Counter
        importlib.import_module(module)
    taken = as_user.look(job.uid, functools.partial(_as_them, job, ranks, seconds), seconds)
    found: list[Finding] = []
    if taken.status != "ok":
        why = taken.detail or taken.status
        evidence.append(Evidence("not_taken", f"the job's own files: {why}"))
    else:
        answer = json.loads(taken.output)
        evidence += [Evidence("not_taken", text) for text in answer["missing"]]
        found += _of_flight_recorder(job, answer["flight"])
        if answer["ras"]:
            text = answer["ras"]
            starts = range(0, len(text), _PIECE_CHARACTERS)
            seen = (Evidence("nccl_ras", text[at : at + _PIECE_CHARACTERS]) for at in starts)
            found.append(catalog.finding("hang.nccl_ras", evidence=tuple(seen), job_id=job.id))
    yield catalog.finding(
        "hang.evidence", evidence=tuple(evidence), job_id=job.id, count=max(1, len(tasks))
    )
    yield from found


def _of_flight_recorder(job: RunningJob, told: Mapping[str, Any] | None) -> Iterable[Finding]:
    if not told:
        return
    evidence = (Evidence("flight_recorder", str(told["text"])),)
    yield catalog.finding(
        "hang.flight_recorder", evidence=evidence, details={"told": told["text"]}, job_id=job.id
    )
    for suspect in told["suspects"][:_SUSPECTS_TOLD]:
        yield catalog.finding(
            "hang.suspect_rank",
            evidence=(Evidence("flight_recorder", str(suspect["why"])),),
            details={"why": suspect["why"]},
            rank=suspect["rank"],
            job_id=job.id,
        )


def _as_them(job: RunningJob, ranks: Sequence[int], seconds: float) -> bytes:
    """Run in the child, as the user: ask for dumps, ask NCCL, read the dumps."""
    ends = time.monotonic() + seconds - 0.5
    folder = Path(job.absolute(task_environment.dump_folder(job.id, job.restart)))
    missing: list[str] = []
    asked = _ask_for_dumps(folder, ranks)
    ras = None
    flight = None
    if job.batch_host:
        ras, why = _nccl_ras(min(_RAS_SECONDS, ends - time.monotonic()))
        missing += [f"NCCL RAS: {why}"] if why else []
        if asked:
            time.sleep(max(0.0, min(_DUMP_SECONDS, ends - time.monotonic() - 2.0)))
        flight = _flight(folder, job.since, max(0.5, ends - time.monotonic()))
        if flight is None:
            missing.append(f"flight recorder: no dump in {folder.name}")
    return json.dumps({"missing": missing, "ras": ras, "flight": flight}).encode()


def _ask_for_dumps(folder: Path, ranks: Iterable[int]) -> int:
    """Write to the pipe by which each of this node's ranks dumps; return how many took it.

    PyTorch reads ``<prefix><rank>.pipe`` and dumps at whatever is written
    (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, DumpPipe). Opened without waiting: one that
    nobody reads, as on another node, refuses to be opened for writing (fifo(7)).
    """
    asked = 0
    for rank in ranks:
        pipe = folder / f"{task_environment.DUMP_NAME}{rank}.pipe"
        try:
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.write(descriptor, b"1\n")
                asked += 1
        except OSError:
            continue
        finally:
            os.close(descriptor)
    return asked


def _nccl_ras(seconds: float) -> tuple[str | None, str | None]:
    """What NCCL's RAS says, or why it says nothing (``ncclras -v -t SECONDS``, NCCL 2.24)."""
    client = next((path for path in _RAS_CLIENTS if os.access(path, os.X_OK)), None)
    if client is None:
        return None, "ncclras is not installed"
    try:
        done = subprocess.run(
            [client, "-v", "-t", str(max(1, int(seconds) - 1))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=max(1.0, seconds),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return None, f"{client}: {type(problem).__name__}"
    text = done.stdout.decode("utf-8", "replace")[:_RAS_TEXT_CHARACTERS]
    if done.returncode:
        return None, f"{client}: status {done.returncode}: {text.strip()[:200]}"
    return text, None


def _flight(folder: Path, since: float, seconds: float) -> dict[str, Any] | None:
    """What the dumps say together; None where there is none."""
    from slurm_hooks.joblog import flight_recorder

    try:
        paths = sorted(folder.glob(f"{task_environment.DUMP_NAME}*"))
    except OSError:
        return None
    verdict = flight_recorder.read(paths, since, seconds)
    if not verdict.ranks:
        return None
    text = f"dumps of {flight_recorder.ranked(verdict.ranks)}"
    if verdict.operation:
        waiting = flight_recorder.ranked(verdict.waiting)
        text += f"; {waiting} in {verdict.operation} #{verdict.sequence}"
    if verdict.silent:
        text += f"; no dump of {flight_recorder.ranked(verdict.silent)}"
    if verdict.mismatch:
        text += f"; {verdict.mismatch}"
    suspects = [{"rank": one.rank, "why": one.why} for one in verdict.suspects]
    return {"text": text[:1500], "suspects": suspects}


PROBE = Probe(
    name="hang_evidence",
    look=look,
    needs="a request of the controller, which suspects that a job on this node hangs",
    cost="one look into the spool where an opted-in job runs; some seconds where evidence is asked",
    codes=("hang.evidence", "hang.flight_recorder", "hang.nccl_ras", "hang.suspect_rank"),
)
