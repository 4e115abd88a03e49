"""A keeper of processes: what it starts, and what those start, ends with its owner.

    >>> keeper = Keeper(Path("/tmp/run"), remove_folder=False)
    >>> pid = keeper.start(["/bin/sleep", "60"], {}, Path("/tmp/run/sleep.log"))
    >>> keeper.close()          # the sleep is gone, and so would be a daemon it had forked

Slurm's slurmstepd puts itself into a session of its own and outlives its slurmd, so ending the
daemons is not enough. The keeper is a small process of its own that the kernel names as parent of
every orphan below it (PR_SET_CHILD_SUBREAPER, prctl(2)). It ends all its descendants, and removes
the folder, when its owner asks, when it is told to (SIGTERM), or when its owner is gone for
whatever reason, SIGKILL included (the pipe between them closes, pidfd_open(2) reports the end).

Both sides live here: ``Keeper`` is the owner's, ``main`` the keeper's. They exchange one line of
JSON each way at a time. This file runs on its own: it imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

_PR_SET_CHILD_SUBREAPER = 36
"""linux/prctl.h."""

_ENDING_SECONDS = 10.0
"""How long the keeper tries to end its descendants; only one stuck in the kernel takes long."""

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Keeper:
    """The owner's handle on a keeper process.

    ``folder`` is removed with everything in it at the end where ``remove_folder`` is set. ``pid``
    is the keeper's own: SIGTERM to it ends everything.
    """

    def __init__(self, folder: Path, *, remove_folder: bool) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                str(Path(__file__).resolve()),
                str(os.getpid()),
                str(folder),
                "remove" if remove_folder else "leave",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        )
        self.pid = self._process.pid

    def start(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Run ``argv`` in its own session, output appended to ``log``; return its process id.

        Raises:
            OSError: the program could not be started, or the keeper is gone.
        """
        request = {"argv": list(argv), "environment": dict(environment), "log": str(log)}
        answer = self._ask({"start": request})
        if "error" in answer:
            raise OSError(f"{argv[0]}: {answer['error']}")
        return int(answer["pid"])

    def detach(self) -> None:
        """Let everything live on after the owner; from now on only SIGTERM to ``pid`` ends it."""
        self._ask({"detach": True})
        self._close_pipes()

    def close(self) -> None:
        """End every process that was started and all that those started; safe to repeat."""
        if self._process.poll() is None and self._process.stdin and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()
        self._close_pipes()

    def _ask(self, request: Mapping[str, object]) -> dict[str, str]:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None or stdin.closed:
            raise OSError("the keeper of this cluster's processes has been let go")
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise OSError("the keeper of this cluster's processes is gone") from None
        line = stdout.readline()
        if not line:
            raise OSError("the keeper of this cluster's processes is gone")
        answer: dict[str, str] = json.loads(line)
        return answer

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def alive(pid: int) -> bool:
    """Whether a process that the keeper started still runs; the keeper reaps the ended at once."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main(arguments: Sequence[str]) -> None:
    """Serve the owner until it is gone or a signal comes, then end everything.

    ``arguments``: the owner's process id, the folder, and ``remove`` or ``leave``.
    """
    owner, folder, afterwards = int(arguments[0]), Path(arguments[1]), arguments[2]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        _serve(owner)
    finally:
        _end_descendants()
        if afterwards == "remove":
            shutil.rmtree(folder, ignore_errors=True)


def _serve(owner: int) -> None:
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    for number in (*_STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(number, _only_wake)
    with selectors.DefaultSelector() as selector:
        selector.register(wake_read, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        # A child that the owner forked may hold the pipe open: watch the owner itself as well.
        try:
            watch = os.pidfd_open(owner)
        except ProcessLookupError:
            return
        if os.getppid() != owner:  # the number may be another's by now
            return
        selector.register(watch, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if wake_read in ready:
                signals = os.read(wake_read, 4096)
                _reap()
                if any(number in signals for number in _STOP_SIGNALS):
                    return
            if 0 in ready:
                line = sys.stdin.buffer.readline()
                if not line:
                    return
                request = json.loads(line)
                answer = _start(request["start"]) if "start" in request else {}
                sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
                sys.stdout.buffer.flush()
                if "detach" in request:
                    selector.unregister(0)
                    selector.unregister(watch)
                    continue
            if watch in ready:
                return


def _only_wake(number: int, frame: object) -> None:
    """A handler that does nothing: the number arrives through the wakeup descriptor."""


def _start(request: Mapping[str, Any]) -> dict[str, str]:
    argv = request["argv"]
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        pid = os.posix_spawn(
            argv[0],
            argv,
            request["environment"],
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, request["log"], append, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {"pid": str(pid)}


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end_descendants() -> None:
    """SIGKILL every descendant until none is left: one may fork while another is being ended."""
    deadline = time.monotonic() + _ENDING_SECONDS
    myself = psutil.Process()
    while time.monotonic() < deadline:
        _reap()
        descendants = myself.children(recursive=True)
        if not descendants:
            return
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1:])
