"""The checkpoint probe: how far has an opted-in job come, and where would a restart begin?

Looks on the job's batch host, with the rights of the job's user. A prolog only remembers what the
owner asked for, since a health check is told of no job; a health check looks at the remembered
jobs whose batch step runs here; an epilog looks once more and forgets.
"""

from __future__ import annotations

import functools
import glob
import importlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurm_hooks import as_user, catalog, optin, progress
from slurm_hooks.joblog import paths
from slurm_hooks.probes import Look, Probe, Seen, Skipped
from slurm_hooks.record import Evidence, Finding, utc

JOBS_LIMIT = 64
"""Most jobs remembered on one node."""

_STARTING_SECONDS = 900
"""A remembered job without a batch step is forgotten after this; before, it may be starting."""

_LOGS_LIMIT = 32
_PASSED_OVER_TOLD = 4
_ANSWER_SECONDS = 1.0
"""Kept back from the deadline for answering."""


@dataclass(frozen=True)
class _Job:
    """What is remembered of a job: whose it is, and what its owner asked for.

    ``outputs`` are shell patterns of its standard output and error.
    """

    id: int
    uid: int
    comment: str
    work_dir: str | None
    outputs: Sequence[str]
    since: float


def look(look: Look) -> Seen:
    """Return what the hook's job, or each job that runs here, has reached.

    Raises:
        Skipped: there is no job that opted in.
    """
    remembered = _remembered(look.state)
    if look.context.hook == "health_check":
        running = _batch_steps()
        kept = {
            job.id: job
            for job in remembered.values()
            if job.id in running or time.time() - job.since < _STARTING_SECONDS
        }
        findings: list[Finding] = []
        share = _seconds(look) / max(1, len(running & kept.keys()))
        for job in kept.values():
            if job.id in running:
                findings += _look_at(job, share)
        if not kept and not remembered:
            raise Skipped("no job that opted in is known here")
        return Seen(tuple(findings), _state(kept.values()))
    if not _is_batch_host(look):
        raise Skipped("the job's batch host looks")
    hooks_job, problems = _job_of(look)
    if look.context.hook == "prolog":
        if hooks_job is None:
            return Seen(problems)
        kept = {**remembered, hooks_job.id: hooks_job}
        return Seen(problems, _state(list(kept.values())[-JOBS_LIMIT:]))
    left = [job for job in remembered.values() if hooks_job is None or job.id != hooks_job.id]
    state = _state(left) if len(left) < len(remembered) else None
    if hooks_job is None:
        return Seen(problems, state)
    return Seen((*problems, *_look_at(hooks_job, _seconds(look))), state)


def _job_of(look: Look) -> tuple[_Job | None, tuple[Finding, ...]]:
    """The hook's job if it opted in, and what its owner has to mend if that cannot be told."""
    told = look.context.job
    wishes = optin.parse(told.comment if told else None)
    if told is None:
        raise Skipped("no job")
    problems = tuple(
        catalog.finding("optin.problem", details={"why": problem}, job_id=told.id)
        for problem in wishes.problems
    )
    if not wishes.opted_in or told.uid is None:
        if not problems:
            raise Skipped("the job has not opted in")
        return None, problems
    context = look.context
    known = paths.letters(context)
    patterns = [
        paths.to_glob(pattern, known, context.work_dir)
        for pattern in (context.output, context.stderr)
        if pattern
    ]
    outputs = tuple(dict.fromkeys(pattern for pattern in patterns if pattern))
    job = _Job(told.id, told.uid, told.comment or "", context.work_dir, outputs, time.time())
    return job, problems


def _look_at(job: _Job, seconds: float) -> list[Finding]:
    # Loaded only for who opted in (20 ms), and before rights are dropped: the user may not be able
    # to read where this package is installed.
    importlib.import_module("slurm_hooks.checkpoints")
    outcome = as_user.look(job.uid, functools.partial(_read_all, job, seconds), seconds)
    if outcome.status != "ok":
        why = outcome.detail or outcome.status
        return [catalog.finding("checkpoint.unseen", details={"why": why}, job_id=job.id)]
    answer = json.loads(outcome.output)
    findings = _of_verdict(answer["verdict"], job.id) if answer["verdict"] else []
    if answer["progress"]:
        findings.append(_of_progress(progress.Progress(**answer["progress"]), job.id))
    return findings


def _read_all(job: _Job, seconds: float) -> bytes:
    """Run in the child, as the user: judge the checkpoint, read the progress."""
    from slurm_hooks.checkpoints import Limits, find

    wishes = optin.parse(job.comment)
    found: list[progress.Progress | None] = []
    if wishes.progress:
        found.append(_progress_file(_absolute(job, wishes.progress)))
    verdict = None
    if wishes.checkpoint:
        limits = Limits(seconds=max(0.2, seconds - _ANSWER_SECONDS))
        verdict = find(_absolute(job, wishes.checkpoint), limits=limits)
        newest = verdict.newest
        if newest and newest.step is not None:
            found.append(progress.Progress(newest.step, "checkpoint", newest.modified))
    if not any(found):
        found.append(_progress_in_logs(job, wishes))
    chosen = progress.choose(found)
    answer = {
        "verdict": verdict.to_dict() if verdict else None,
        "progress": asdict(chosen) if chosen else None,
    }
    return json.dumps(answer).encode()


def _progress_file(path: str) -> progress.Progress | None:
    content, modified = _end_of(path, progress.FILE_BYTES)
    return progress.in_file(content, modified)


def _progress_in_logs(job: _Job, wishes: optin.OptIn) -> progress.Progress | None:
    """The step in the log written to last that tells one."""
    folder = Path(glob.escape(job.work_dir or "/"))
    files: dict[str, None] = {}
    for pattern in (*wishes.logs, *job.outputs):
        found = glob.iglob(str(folder / pattern))  # noqa: PTH207 - an absolute pattern
        files.update(dict.fromkeys(itertools.islice(found, _LOGS_LIMIT)))
    ends = [_end_of(file, progress.LOG_BYTES) for file in files]
    for content, modified in sorted(ends, key=lambda end: end[1] or 0.0, reverse=True):
        told = progress.in_text(content.decode("utf-8", "replace"), modified)
        if told:
            return told
    return None


def _end_of(path: str, limit_bytes: int) -> tuple[bytes, float | None]:
    """The last bytes of a regular file and when it was changed; nothing where there is none."""
    try:
        with as_user.open_regular(path) as file:
            status = os.fstat(file.fileno())
            file.seek(max(0, status.st_size - limit_bytes))
            return file.read(limit_bytes), status.st_mtime
    except OSError:
        return b"", None


def _absolute(job: _Job, path: str) -> str:
    return str(Path(job.work_dir or "/") / path)


def _of_verdict(verdict: Mapping[str, Any], job_id: int) -> list[Finding]:
    findings = [
        catalog.finding(
            "checkpoint.passed_over",
            details={"told": _told(item), "state": item["state"], "why": item["why"]},
            evidence=(_evidence(item),),
            step=item["step"],
            file=item["path"],
            job_id=job_id,
        )
        for item in verdict["passed_over"][:_PASSED_OVER_TOLD]
    ]
    status = verdict["status"]
    if status == "complete":
        newest = verdict["newest"]
        about = catalog.finding(
            "checkpoint.seen",
            details={"told": _told(newest), "format": newest["format"]},
            evidence=(_evidence(newest),),
            step=newest["step"],
            file=newest["path"],
            job_id=job_id,
        )
    else:
        reasons = [item["why"] for item in verdict["passed_over"]] + list(verdict["notes"])
        code = {"broken": "checkpoint.all_broken", "none": "checkpoint.none"}.get(
            status, "checkpoint.unverified"
        )
        why = reasons[0] if reasons else "a limit ended the search"
        about = catalog.finding(code, details={"why": why}, file=verdict["path"], job_id=job_id)
    return [about, *findings]


def _of_progress(found: progress.Progress, job_id: int) -> Finding:
    words = {"file": "progress file", "checkpoint": "newest checkpoint", "log": "log"}
    text = f"step {found.step}"
    if found.rate is not None:
        text += f", {found.rate:g} {found.unit}"
    written = utc(found.time) if found.time is not None else None
    return catalog.finding(
        "progress.seen",
        details={"told": words[found.source]},
        evidence=(Evidence(f"progress_{found.source}", text, time=written),),
        step=found.step,
        job_id=job_id,
    )


def _told(item: Mapping[str, Any]) -> str:
    return "step unknown" if item["step"] is None else f"step {item['step']}"


def _evidence(item: Mapping[str, Any]) -> Evidence:
    text = item["why"] or f"{item['bytes']} bytes, {item['checked']} checked"
    return Evidence("checkpoint", text, time=utc(item["modified"]))


def _is_batch_host(look: Look) -> bool:
    """The batch script runs on the first node of the job's list (man sbatch)."""
    nodes = look.context.job.nodes if look.context.job else None
    first = re.match(r"([^\[,]*)(?:\[(\d+))?", nodes or "")
    if not nodes or not first:
        return True
    return look.context.node == first[1] + (first[2] or "")


def _batch_steps() -> set[int]:
    """Numbers of the jobs whose batch step runs on this node, by slurmstepd's own title.

    (``slurmstepd: [12.batch]``, measured on 22.05; a heterogeneous job's has ``12+0``.)
    """
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                title = (folder / "cmdline").read_bytes()[:200]
            except OSError:
                continue
            match = re.match(rb"slurmstepd: \[(\d{1,10})(?:\+\d+)?\.batch\]", title)
            if match:
                found.add(int(match[1]))
    return found


def _remembered(state: Mapping[str, Any]) -> dict[int, _Job]:
    jobs = {}
    for item in state.get("jobs", ())[:JOBS_LIMIT]:
        try:
            job = _Job(**item)
        except TypeError:
            continue  # kept by another version
        jobs[job.id] = job
    return jobs


def _state(jobs: Iterable[_Job]) -> Mapping[str, Any]:
    return {"jobs": [asdict(job) for job in jobs]}


def _seconds(look: Look) -> float:
    return max(0.5, look.config.probes.checkpoint.deadline - _ANSWER_SECONDS)


PROBE = Probe(
    name="checkpoint",
    look=look,
    needs="a job that opted in with checkpoint=, progress= or logs=",
    cost="a listing of its checkpoints and a few reads, as its user",
    codes=(
        "checkpoint.seen",
        "checkpoint.passed_over",
        "checkpoint.all_broken",
        "checkpoint.none",
        "checkpoint.unverified",
        "checkpoint.unseen",
        "progress.seen",
        "optin.problem",
    ),
)
