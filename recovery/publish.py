"""What the controller puts into the spool: the readable decisions, and mode and grants in force.

Both are derived; the journal is what counts. They are written by a child under a deadline, so that
a hung spool delays one pass by a second and is then left alone for a while.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from recovery.decision import Decision
from slurm_hooks import spool
from slurm_hooks.deadline import run_one

DEADLINE_SECONDS = 1.0
AFTER_FAILURE_SECONDS = 30.0

RENEW_SECONDS = 15.0
"""Nodes believe control/effective.json for 60 s: three renewals may be lost."""


class Publisher:
    """Writes into the spool ``path``; one for the life of an aggregator."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[bytes] = []
        self._next_renewal = 0.0
        self._in_force: dict[str, object] = {}
        self._not_before = 0.0

    def add(self, decision: Decision) -> None:
        """Queue the decision as it stands now for the readable record of its day."""
        self._waiting.append(json.dumps(decision.to_dict()).encode() + b"\n")

    def publish(self, effective: Mapping[str, object], today: str) -> str:
        """Write what is due; return what went wrong in one sentence, empty where nothing did.

        What is in force is due when it changes, and in time before it expires.

        ``today`` is ``YYYY-MM-DD``. What could not be written is kept for the next time.
        """
        now = time.monotonic()
        in_force = {key: value for key, value in effective.items() if key != "time"}
        renewal_due = now >= self._next_renewal or in_force != self._in_force
        if now < self._not_before or not (self._waiting or renewal_due):
            return ""
        lines = list(self._waiting)

        def write() -> bytes:
            if renewal_due:
                content = json.dumps(effective).encode() + b"\n"
                spool.write(self._path / "control", "effective.json", content)
            if lines:
                _append(self._path / "decisions" / f"{today}.jsonl", lines)
            return b""

        outcome = run_one(write, DEADLINE_SECONDS)
        if outcome.status != "ok":
            self._not_before = now + AFTER_FAILURE_SECONDS
            said = outcome.detail or outcome.status
            return f"the spool {self._path} cannot be written ({outcome.status}): {said}"
        del self._waiting[: len(lines)]
        if renewal_due:
            self._next_renewal = now + RENEW_SECONDS
            self._in_force = in_force
        return ""

    @property
    def level(self) -> bool:
        """Whether everything that was added has been written."""
        return not self._waiting


def _append(path: Path, lines: Sequence[bytes]) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o644)
    try:
        content = memoryview(b"".join(lines))
        while content:
            content = content[os.write(descriptor, content) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
