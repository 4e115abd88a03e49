"""Requests for evidence of a job that is suspected to hang, as files in the spool.

``requests/<node>.evidence-<job>`` asks the node's next health checks (``hang_evidence`` probe) for
as long as it lies there; each names until when it counts, so that one that a crash left behind asks
nothing for ever. The spool is written in a child under a deadline.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from pathlib import Path

from slurm_hooks import spool
from slurm_hooks.deadline import run_one

SCHEMA = "evidence-request/v1"

DEADLINE_SECONDS = 1.0


def ask(path: Path, nodes: Collection[str], job_id: int, request: str, until: float) -> str:
    """Ask ``nodes`` in the spool ``path``; return what went wrong, empty where nothing did.

    ``until`` is in seconds since the epoch. Asking again replaces the request.
    """
    told = {"schema": SCHEMA, "id": request, "job": job_id, "until": until}

    def write() -> bytes:
        for node in nodes:
            name = f"{node}.evidence-{job_id}"
            spool.write(path / "requests", name, json.dumps(told).encode(), durable=False)
        return b""

    outcome = run_one(write, DEADLINE_SECONDS)
    return "" if outcome.status == "ok" else outcome.detail or outcome.status


def withdraw(path: Path, nodes: Collection[str], job_id: int) -> None:
    """Take the requests back; those that stay are outlived in time."""

    def remove() -> bytes:
        for node in nodes:
            with contextlib.suppress(OSError):
                (path / "requests" / f"{node}.evidence-{job_id}").unlink()
        return b""

    run_one(remove, DEADLINE_SECONDS)
