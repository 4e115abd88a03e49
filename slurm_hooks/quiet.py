"""What an earlier hook has noted for this one: what the configuration asks for, or that it is done.

Owns the note, its trust, and the only door through which a prolog leaves without having looked.
To read and understand a configuration takes 8 ms, almost what Python's own start takes. So a hook
that has understood one notes, in memory, its plan: the part that a node goes by, checked and in
JSON. A prolog whose probes are off, or that a health check has just spared them (``freshness``),
ends before it has loaded anything.

The note holds what was true when it was made, and is believed only while all of it still is: the
bytes of recovery.toml, the package that read them, the boot; and for a prolog that is spared, the
pass of the health check. Bytes are compared, never understood. Whatever is odd, late or missing
leads to the ordinary hook, which says what is wrong; so do records that wait to be forwarded. A job
with a comment, which may ask for recovery, gets the ordinary prolog: what a user writes can make a
prolog do more, never less. Epilogs and health checks have always something to do: a failed job to
report on, a heartbeat to refresh.
"""

# ruff: noqa: PTH116, PTH120, PTH208 - pathlib is among what a quiet prolog does not load

from __future__ import annotations

import os
import signal
import stat
import time

from slurm_hooks import config_file

TYPE_CHECKING = False  # see config_file; what is imported up here costs a quiet prolog nothing
if TYPE_CHECKING:
    from typing import NoReturn

NOTES_VARIABLE = "SLURM_RECOVERY_NOTES"
"""Environment variable that names another folder for notes; a wrapper script may set it."""

DEFAULT_NOTES = "/run/slurm-recovery/.quiet"
"""In memory, gone with the boot. No node's name begins with a dot, so none's folder is this."""

_SECONDS = 0.25
"""Time for the look at the note; it takes a millisecond, so what is late is a hung file system."""

SCHEMA = b"hook-note/v2"
PLAN_LIMIT_BYTES = 32 * 1024
"""Largest plan that is noted: half of what a pipe takes from a child that must not wait."""

_LIMIT_BYTES = config_file.SIZE_LIMIT_BYTES + PLAN_LIMIT_BYTES + 16 * 1024
FOR_EVER, NEVER = float("inf"), 0.0

_NOTHING_TO_DO = b"="
"""The answer where a prolog is spared; else it is the plan, or nothing."""


def prolog() -> NoReturn:
    """Before a job starts on this node: end at once if there is nothing to do, else ``hooks``."""
    started = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # until hooks has its own way
        signal.signal(number, lambda _number, _frame: os._exit(0))
    answer = None if os.environ.get("SLURM_JOB_COMMENT") else _ask(spares=True)
    if answer == _NOTHING_TO_DO:
        os._exit(0)
    from slurm_hooks import hooks

    hooks.prolog(started, answer)


def plan() -> bytes:
    """Return the plan that is noted for this node's hooks, in JSON; nothing where none holds."""
    return _ask(spares=False)


def _ask(*, spares: bool) -> bytes:
    """Ask a child, which may be left behind in a file system that hangs.

    With ``spares`` the answer may be that there is nothing to do.
    """
    try:
        place = note_path()
        if place is None:
            return b""
        import select

        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _be_the_child(place, spares, null, writing)
        os.close(null)
        os.close(writing)
        answer, until = b"", time.monotonic() + _SECONDS
        while (
            not answer.endswith(b"\n")
            and select.select([reading], [], [], max(0.0, until - time.monotonic()))[0]
        ):
            chunk = os.read(reading, 1 << 16)
            if not chunk:
                break
            answer += chunk
        os.close(reading)
        if not answer.endswith(b"\n"):
            answer = b""
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, os.WNOHANG)
        return answer[:-1]
    except Exception:  # the ordinary hook meets what is wrong here too, and records it
        return b""


def _be_the_child(place: str, spares: bool, null: int, pipe: int) -> NoReturn:
    """Answer in one line what the note says, if it holds, and never return.

    slurmd waits until nobody holds the prolog's standard output; this child may outlive it.
    """
    try:
        os.setsid()
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        for entry in os.listdir("/proc/self/fd"):
            if int(entry) > 2 and int(entry) != pipe:
                try:
                    os.close(int(entry))
                except OSError:  # the listing's own
                    continue
        os.write(pipe, _answer(_read(place, own=True), spares) + b"\n")
    finally:
        os._exit(0)


def _answer(note: bytes, spares: bool) -> bytes:
    """Return what the note says: nothing unless all of it is still so.

    Raises:
        OSError, ValueError: something is not as it was.
    """
    schema, package, boot, until, buffer, pass_file, passed, plan, told = note.split(b"\n", 8)
    if (
        schema != SCHEMA
        or package != package_mark()
        or boot != _read("/proc/sys/kernel/random/boot_id").strip()
        or _records_wait(buffer)
        or told != _configuration()
    ):
        return b""
    if time.clock_gettime(time.CLOCK_BOOTTIME) >= float(until):
        return plan
    if spares and (not passed or passed == _read(pass_file)):
        return _NOTHING_TO_DO
    return plan


def _configuration() -> bytes:
    """Return the configuration file's content after a ``+``, or ``-`` where there is none."""
    try:
        return b"+" + _read(config_file.name())
    except FileNotFoundError:
        return b"-"


def _records_wait(buffer: bytes) -> bool:
    """Whether records wait on the node for a prolog to bring them to the spool."""
    try:
        return any(name.endswith(b".json") for name in os.listdir(buffer))
    except FileNotFoundError:
        return False


def note_path() -> str | None:
    """Return the note's path for this node and configuration; None where they have no such name."""
    node = os.environ.get("SLURMD_NODENAME", "")
    name = f"{node}:{config_file.name()}".replace("%", "%25").replace("/", "%2F")
    if not node or len(name) > 200 or not name.isprintable():
        return None
    return f"{os.environ.get(NOTES_VARIABLE) or DEFAULT_NOTES}/{name}"


def package_mark() -> bytes:
    """Return what changes when this package is installed anew: another version may look at more."""
    folder = os.path.dirname(__file__)
    found = os.stat(folder)
    return os.fsencode(f"{found.st_mtime_ns} {found.st_ino} {folder}")


def _read(path: str | bytes, *, own: bool = False) -> bytes:
    """Return the content of a regular file; one of our ``own`` nobody else could have written.

    Raises:
        OSError: it is no such file.
        ValueError: it is too large, or somebody else's.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if own else 0)
    descriptor = os.open(path, flags)
    found = [os.fstat(descriptor)]
    if own:
        found.append(os.lstat(os.path.dirname(path)))
    if not stat.S_ISREG(found[0].st_mode):
        raise ValueError("not a regular file")
    if own and any(item.st_uid != os.geteuid() or item.st_mode & 0o022 for item in found):
        raise ValueError("others could have written it")
    content = b""
    while chunk := os.read(descriptor, _LIMIT_BYTES + 1 - len(content)):
        content += chunk
    if len(content) > _LIMIT_BYTES:
        raise ValueError("too large")
    return content
