"""The inbox whose looks into the spool are made by a child, so that a hung spool hangs nobody else.

    inbox = ChildInbox(config.spool.path, config.spool)
    ingested = inbox.ingest(store, timeout=0.5)

Owns the child and the pipe to it. A thread would not do: one that waits in D state keeps its
whole process from ending, and with it the locks that the next aggregator needs. The child is a
program of its own and inherits no lock, no index and no journal; killed or not, it ends when this
process has gone.

A pass that the child has not finished in time goes on with the next call, where it was. Nothing
is repeated for it, and nothing is begun beside it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from recovery.inbox import PASS_LIMIT, Ingested, Passes, Steps
from recovery.spool_reader import Reply, settings_line
from recovery.store import Store
from slurm_hooks.config import Spool

SLOW_SECONDS = 5.0
"""A spool that has not answered for so long is worth a sentence."""

RESTART_SECONDS = 5.0
"""Shortest time between two restarts of a child that keeps dying."""

_CHUNK_BYTES = 1 << 20


class ChildDied(Exception):
    """The child has ended; the text says how."""


class ChildInbox:
    """The aggregator's inbox. One thread uses it, always with the same index."""

    def __init__(
        self, spool: Path, settings: Spool, index_days: int = 90, reviewers: Sequence[int] = ()
    ) -> None:
        self.spool = spool
        self.settings = settings
        self._passes = Passes(index_days, reviewers)
        self._steps: Steps | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._restarted = float("-inf")
        self._has_died = False
        self._asked = self._began = 0.0
        self._read_from = float("-inf")
        self._received = bytearray()

    @property
    def waiting_seconds(self) -> float:
        """How long the spool has owed an answer, 0 where none is awaited."""
        return time.monotonic() - self._asked if self._steps else 0.0

    @property
    def unread_seconds(self) -> float:
        """How old a record can be that lies in the spool and has not been taken in.

        That is how long ago the last pass began that left nothing behind; infinite before one.
        """
        return time.monotonic() - self._read_from

    def ingest(self, store: Store, timeout: float, limit: int = PASS_LIMIT) -> Ingested:
        """Begin a pass, or go on with the one that was not finished.

        Returns after at most about ``timeout`` seconds (and the index's own work); ``finished``
        is False where the spool has not answered until then.

        Raises:
            StoreError: the index does not take records; they stay where they are.
        """
        until = time.monotonic() + timeout
        try:
            if self._steps is None:
                self._start_child()
                self._began = time.monotonic()
                self._steps = self._passes.steps(store, limit)
                self._ask(next(self._steps))
            while (reply := self._answer(until)) is not None:
                self._ask(self._steps.send(reply))
        except StopIteration as end:
            self._steps = None
            ingested: Ingested = end.value
            if not ingested.more:
                self._read_from = self._began
            return ingested
        except ChildDied as error:
            self._has_died = True
            self.close()
            return Ingested(problems=(str(error),))
        except BaseException:
            self.close()
            raise
        slow = self.waiting_seconds
        problem = f"{self.spool} has not answered for {slow:.0f} s; records wait where they are"
        return Ingested(problems=(problem,) if slow > SLOW_SECONDS else (), finished=False)

    def close(self) -> None:
        """End the child, without waiting for one that cannot be ended."""
        self._steps = None
        self._received.clear()
        if self._child is None:
            return
        child, self._child = self._child, None
        for pipe in (child.stdin, child.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]  # both were asked for
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.wait(0.5)

    def _start_child(self) -> None:
        if self._child:
            return
        if self._has_died:
            if time.monotonic() - self._restarted < RESTART_SECONDS:
                raise ChildDied("the spool's reader keeps ending; it is started again in a moment")
            self._restarted = time.monotonic()
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "recovery.spool_reader"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",
                start_new_session=True,  # a Ctrl-C is for the aggregator to answer
                bufsize=0,
            )
        except OSError as error:
            raise ChildDied(f"the spool's reader cannot be started: {error.strerror}") from error
        self._write(settings_line(self.spool, self.settings))

    def _ask(self, request: tuple[str, object]) -> None:
        self._asked = time.monotonic()
        self._write(json.dumps(request) + "\n")

    def _write(self, line: str) -> None:
        """Write a line that the child, which waits for one, reads at once."""
        assert self._child and self._child.stdin
        view = memoryview(line.encode())
        try:
            while view:
                view = view[self._child.stdin.write(view) :]
        except OSError as error:
            raise ChildDied(self._how_it_ended()) from error

    def _answer(self, until: float) -> Reply | None:
        """Return the child's answer, None where there is none by then."""
        assert self._child and self._child.stdout
        pipe = self._child.stdout.fileno()
        while True:
            wait = max(0.0, until - time.monotonic())
            if not select.select([pipe], [], [], wait)[0]:
                return None
            chunk = os.read(pipe, _CHUNK_BYTES)
            if not chunk:
                raise ChildDied(self._how_it_ended())
            self._received += chunk
            if chunk.endswith(b"\n"):
                reply: Reply = json.loads(self._received)
                self._received.clear()
                return reply

    def _how_it_ended(self) -> str:
        assert self._child
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(1.0)
        status = self._child.returncode
        how = f"signal {-status}" if status and status < 0 else f"status {status}"
        return f"the spool's reader ended with {how}; it is started again, records wait meanwhile"
