"""A long-running command beside a private cluster, such as its aggregator."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from recovery.demo.processes import alive
from recovery.demo.programs import ClusterError

_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Service:
    """A process that the cluster's keeper started; ``log`` takes what it says on either stream."""

    name: str
    pid: int
    log: Path

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return alive(self.pid)

    def said(self) -> str:
        """Return its log so far."""
        return self.log.read_text(encoding="utf-8", errors="backslashreplace")

    def stop(self, timeout_seconds: float = 30.0) -> None:
        """Ask it to end (SIGTERM) and wait; safe to repeat.

        Raises:
            ClusterError: it has not ended in time; it is killed then.
        """
        self._signal(signal.SIGTERM)
        if not self._wait(timeout_seconds):
            self.kill()
            raise ClusterError(f"{self.name} did not end within {timeout_seconds:g} s of SIGTERM")

    def kill(self) -> None:
        """End it without a warning (SIGKILL) and wait until it is gone."""
        self._signal(signal.SIGKILL)
        if not self._wait(10.0):
            raise ClusterError(f"{self.name} cannot be killed: it is stuck in the kernel")

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while alive(self.pid) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return not alive(self.pid)
