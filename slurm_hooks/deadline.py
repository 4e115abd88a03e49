"""Run functions in forked children, side by side, under a deadline that always holds.

    >>> run_all({"two": lambda: b"2"}, deadline_seconds=5)["two"].output
    b'2'

Owns the only waiting that a hook does. A child may hang in an uninterruptible system call, crash
in a C library, print a gigabyte or leave a tree of processes: the caller has its answer at the
deadline. It never waits for a child to die, since a process in D state ignores even SIGKILL.
What the children look at belongs to ``hooks``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from slurm_hooks.frozen import frozen

Task = Callable[[], bytes]

_uncollected: set[int] = set()
"""Children that were not dead yet when they were left. The kernel's table of a process's dead
children is the process's, and so is this note of whom to collect from it."""

OUTPUT_LIMIT_BYTES = 1 << 20
"""Largest answer taken from a child; a probe's is a few kilobytes."""

DETAIL_LIMIT = 900
"""Longest ``detail``, in characters; a record allows 1000."""

_HEADER_BYTES = 9
"""An answer begins with one byte, ``+`` or ``!`` (an exception), and eight of its length."""

_POLL_SECONDS = 0.05
"""How often children are looked at whose pipe a forked grandchild may be holding open."""

_PROC_SECONDS = 0.25
"""Time for reading /proc/<pid>/: some of its files wait for locks that a stuck process holds."""


@frozen
class ChildOutcome:
    """How a child ended.

    ``status`` is ``ok`` (``output`` holds its answer), ``error`` (it raised, or answered too
    much), ``crash`` (it died without an answer) or ``hang`` (no answer in time). ``detail`` is a
    sentence on what went wrong; for a hang it says where the child was stuck.
    """

    status: Literal["ok", "error", "crash", "hang"]
    seconds: float
    output: bytes = b""
    detail: str | None = None


def run_all(
    tasks: Mapping[str, Task],
    deadline_seconds: float,
    own_deadlines: Mapping[str, float] | None = None,
) -> dict[str, ChildOutcome]:
    """Run every task in a child of its own and return how each ended, by name.

    ``own_deadlines`` may shorten the deadline of single tasks. Returns when all have ended, and
    at the latest ``deadline_seconds`` from now (plus a quarter of a second to ask the kernel
    where the hanging ones are).
    """
    with Children() as children:
        for name, task in tasks.items():
            limit = (own_deadlines or {}).get(name, deadline_seconds)
            children.start(name, task, min(limit, deadline_seconds))
        return children.wait()


def run_one(task: Task, deadline_seconds: float) -> ChildOutcome:
    """Run one task in a child and return how it ended."""
    return run_all({"task": task}, deadline_seconds)["task"]


@dataclass
class _Child:
    """A child that runs, its pipe, and what has come through that."""

    pid: int
    pipe: int
    started: float
    until: float
    received: bytearray = field(default_factory=bytearray)
    closed: bool = False


class Children:
    """Children that have been started and not yet waited for; leaving the context kills them."""

    def __init__(self) -> None:
        self._running: dict[str, _Child] = {}
        self._ended: dict[str, ChildOutcome] = {}

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_error: object) -> None:
        for child in self._running.values():
            _end(child)
        self._running.clear()

    def start(self, name: str, task: Task, deadline_seconds: float) -> None:
        """Fork a child that runs ``task``; its time counts from now."""
        _collect()
        started = time.monotonic()
        null = reading = writing = -1
        try:
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            reading, writing = os.pipe()
            pid = os.fork()
        except OSError as error:
            for descriptor in (null, reading, writing):
                if descriptor >= 0:
                    os.close(descriptor)
            self._ended[name] = ChildOutcome("error", 0.0, detail=f"cannot start: {error}")
            return
        if pid == 0:
            _be_the_child(task, null, writing)
        os.close(null)
        os.close(writing)
        os.set_blocking(reading, False)
        self._running[name] = _Child(pid, reading, started, started + deadline_seconds)

    def spare(self, name: str, answer: bytes) -> None:
        """Take ``answer`` for that of a child that need not be started."""
        self._ended[name] = ChildOutcome("ok", 0.0, answer)

    def wait(self) -> dict[str, ChildOutcome]:
        """Return how each child ended, in the order in which they were started, and kill the rest.

        Children's process groups are killed in any case: an answer is all that is wanted of them.
        """
        order = [*self._ended, *self._running]
        late: dict[str, _Child] = {}
        try:
            late = self._gather()
            places = _places({name: child.pid for name, child in late.items()})
            for name, child in late.items():
                limit, seconds = child.until - child.started, time.monotonic() - child.started
                detail = f"no answer within {limit:.1f} s{places[name]}"
                self._ended[name] = ChildOutcome("hang", seconds, detail=detail[:DETAIL_LIMIT])
        finally:
            for child in late.values():
                _end(child)
        return {name: self._ended[name] for name in order}

    def _gather(self) -> dict[str, _Child]:
        """Wait until every child has ended or is late; return the late ones, still alive."""
        late: dict[str, _Child] = {}
        while self._running:
            now = time.monotonic()
            for name, child in list(self._running.items()):
                outcome = _outcome(child)
                if outcome:
                    self._ended[name] = outcome
                    _end(child)
                elif now >= child.until:
                    late[name] = child
                else:
                    continue
                del self._running[name]
            if self._running:
                nearest = min(child.until for child in self._running.values())
                pipes = [child.pipe for child in self._running.values() if not child.closed]
                select.select(pipes, [], [], max(0.0, min(nearest - now, _POLL_SECONDS)))
        return late


def _be_the_child(task: Task, null: int, pipe: int) -> None:
    """Run ``task`` cut off from everything the hook holds, answer, and never return."""
    try:
        os.setsid()
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - pathlib would be built for it
            if int(entry) > 2 and int(entry) != pipe:
                with contextlib.suppress(OSError):
                    os.close(int(entry))
        # A core dump of a crash can take longer than the hook may. A limit of 1 also keeps the
        # kernel from starting a dump handler (man 5 core; kernel/coredump.c), 0 would not.
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (1 if hard else 0, hard))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        try:
            answer, kind = task(), b"+"
            if len(answer) > OUTPUT_LIMIT_BYTES:
                answer, kind = f"an answer of {len(answer)} bytes is too large".encode(), b"!"
        except BaseException as error:  # the parent records it; nothing may unwind past the fork
            text = f"{type(error).__name__}: {error}"[:DETAIL_LIMIT]
            answer, kind = text.encode("utf-8", "backslashreplace"), b"!"
        _write_all(pipe, kind + len(answer).to_bytes(8, "big") + answer)
    finally:
        os._exit(0)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _outcome(child: _Child) -> ChildOutcome | None:
    """Take what the child has written; its outcome once it is known."""
    try:
        while not child.closed and len(child.received) <= _HEADER_BYTES + OUTPUT_LIMIT_BYTES:
            chunk = os.read(child.pipe, 1 << 16)
            child.received += chunk
            child.closed = not chunk
    except BlockingIOError:
        pass
    seconds = time.monotonic() - child.started
    if len(child.received) >= _HEADER_BYTES:
        length = int.from_bytes(child.received[1:_HEADER_BYTES], "big")
        answer = bytes(child.received[_HEADER_BYTES:])
        if len(answer) > OUTPUT_LIMIT_BYTES or length > OUTPUT_LIMIT_BYTES:
            return ChildOutcome("error", seconds, detail="its answer is too large")
        if len(answer) >= length:
            if child.received[:1] == b"+":
                return ChildOutcome("ok", seconds, answer[:length])
            return ChildOutcome("error", seconds, detail=answer[:length].decode("utf-8", "replace"))
    ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    if not child.closed and select.select([child.pipe], [], [], 0)[0]:
        return None  # it wrote between our read and its end; the next round takes that
    if ended.si_code == os.CLD_EXITED:
        detail = f"ended with status {ended.si_status} and without an answer"
    else:
        detail = f"killed by {signal.Signals(ended.si_status).name}"
    return ChildOutcome("crash", seconds, detail=detail)


def _end(child: _Child) -> None:
    """Kill the child and its process group, reap it if it is dead, and wait for nothing.

    It is signalled before it is reaped: until then nobody else can have its number.
    """
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(child.pid, signal.SIGKILL)
    _uncollected.add(child.pid)
    _collect()
    os.close(child.pipe)


def _collect() -> None:
    """Take dead children out of the kernel's table: a controller starts some for months."""
    for pid in tuple(_uncollected):
        try:
            collected, _status = os.waitpid(pid, os.WNOHANG)
        except OSError:
            collected = pid  # somebody else's wait has taken it
        if collected:
            _uncollected.discard(pid)


def _places(pids: Mapping[str, int]) -> dict[str, str]:
    """Return, by name, ``; state D in nvidia_ioctl, …`` for processes that do not answer."""
    if not pids:
        return {}
    readers = Children()
    for name, pid in pids.items():
        readers.start(name, functools.partial(_place, pid), _PROC_SECONDS)
    for late in readers._gather().values():
        _end(late)
    texts = {name: outcome.output.decode() for name, outcome in readers._ended.items()}
    return {name: f"; {texts[name]}" if texts.get(name) else "" for name in pids}


def _place(pid: int) -> bytes:
    """Say where a process is, and its first children: state, kernel function, call, stack."""
    process = Path(f"/proc/{pid}")
    children = _read(process / f"task/{pid}/children").split()[:4]
    return " | ".join(filter(None, map(_one_place, [str(pid), *children]))).encode()


def _one_place(pid: str) -> str:
    process = Path("/proc") / pid
    # The name in stat is in parentheses and may hold anything (proc(5)).
    name, _, rest = _read(process / "stat").partition("(")[2].rpartition(")")
    if not rest:
        return ""
    words = [f"{name} in state {rest.split()[0]}"]
    waiting = _read(process / "wchan").strip()
    if waiting not in ("", "0"):
        words.append(f"in {waiting}")
    call = _read(process / "syscall").split()
    if call and call[0].isdigit():
        words.append(f"system call {call[0]}")
    stack = [line.split()[-1].partition("+")[0] for line in _read(process / "stack").splitlines()]
    if stack:
        words.append("stack " + " < ".join(stack[:8]))
    return ", ".join(words)


def _read(path: Path) -> str:
    """A file of /proc, or nothing where it is not readable (stack: root only)."""
    try:
        with path.open("rb", buffering=0) as source:
            return (source.read(8192) or b"").decode("utf-8", "replace")
    except OSError:
        return ""
