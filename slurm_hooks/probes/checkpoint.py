"""The checkpoint probe: how far has an opted-in job come, and where would a restart begin?

Looks on the job's batch host, with the rights of the job's user. A prolog only says what its owner
has to mend in what they asked for; a health check, which is told of no job, looks at the jobs that
prologs have noted (``running_jobs``); an epilog looks once more.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from slurm_hooks import as_user, catalog, optin, progress, running_jobs, task_environment
from slurm_hooks.context import HookContext
from slurm_hooks.probes import Look, Probe, Seen, Skipped
from slurm_hooks.record import Evidence, Finding, utc
from slurm_hooks.running_jobs import RunningJob

_PASSED_OVER_TOLD = 4
_ANSWER_SECONDS = 1.0
"""Kept back from the deadline for answering."""


def look(look: Look) -> Seen:
    """Return what the hook's job, or each job that runs here, has reached.

    Raises:
        Skipped: there is no job that opted in.
    """
    noted = look.config.spool.jobs_of(look.context.node)
    if look.context.hook == "health_check":
        jobs = running_jobs.running(noted)
        if not jobs:
            raise Skipped("no job that opted in runs here")
        share = _seconds(look) / len(jobs)
        return Seen(tuple(found for job in jobs.values() for found in _look_at(job, share)))
    if not running_jobs.is_batch_host(look.context):
        raise Skipped("the job's batch host looks")
    problems = _problems(look.context)
    job = running_jobs.of(look.context)
    if job is None and not problems:
        raise Skipped("the job has not opted in")
    if job is None or look.context.hook == "prolog":
        return Seen(problems)
    as_noted = running_jobs.known(noted).get(job.id)
    if as_noted and as_noted.restart == job.restart:
        job = as_noted
    return Seen((*problems, *_look_at(job, _seconds(look))))


def _problems(context: HookContext) -> tuple[Finding, ...]:
    """What the job's owner has to mend in what they asked for."""
    told = context.job
    if told is None:
        return ()
    return tuple(
        catalog.finding("optin.problem", details={"why": problem}, job_id=told.id)
        for problem in optin.parse(told.comment).problems
    )


def _look_at(job: RunningJob, seconds: float) -> list[Finding]:
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


def _read_all(job: RunningJob, seconds: float) -> bytes:
    """Run in the child, as the user: judge the checkpoint, read the progress."""
    from slurm_hooks.checkpoints import Limits, find

    wishes = optin.parse(job.comment)
    found: list[progress.Progress | None] = []
    own = wishes.progress or task_environment.progress_file(job.id, job.restart)
    found.append(_progress_file(job.absolute(own)))
    verdict = None
    if wishes.checkpoint:
        limits = Limits(seconds=max(0.2, seconds - _ANSWER_SECONDS))
        verdict = find(job.absolute(wishes.checkpoint), limits=limits)
        newest = verdict.newest
        if newest and newest.step is not None:
            found.append(progress.Progress(newest.step, "checkpoint", newest.modified))
    if not any(found):
        found.append(_progress_in_logs(job))
    chosen = progress.choose(found)
    answer = {
        "verdict": verdict.to_dict() if verdict else None,
        "progress": asdict(chosen) if chosen else None,
    }
    return json.dumps(answer).encode()


def _progress_file(path: str) -> progress.Progress | None:
    content, modified = _end_of(path, progress.FILE_BYTES)
    return progress.in_file(content, modified)


def _progress_in_logs(job: RunningJob) -> progress.Progress | None:
    """The step in the log written to last that tells one, of what this attempt has written."""
    ends = [
        _end_of(file, progress.LOG_BYTES, since_bytes=job.log_bytes.get(file, 0))
        for file in job.logs()
    ]
    for content, modified in sorted(ends, key=lambda end: end[1] or 0.0, reverse=True):
        told = progress.in_text(content.decode("utf-8", "replace"), modified)
        if told:
            return told
    return None


def _end_of(path: str, limit_bytes: int, since_bytes: int = 0) -> tuple[bytes, float | None]:
    """The last bytes of a regular file and when it was changed; nothing where there is none.

    What lies before ``since_bytes`` is left out, unless the file was begun anew.
    """
    try:
        with as_user.open_regular(path) as file:
            status = os.fstat(file.fileno())
            start = since_bytes if status.st_size >= since_bytes else 0
            file.seek(max(start, status.st_size - limit_bytes))
            return file.read(limit_bytes), status.st_mtime
    except OSError:
        return b"", None


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
