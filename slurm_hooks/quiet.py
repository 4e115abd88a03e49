"""A prolog that has nothing to do ends before it loads what it would have needed.

Owns the note by which a hook tells the next prologs that there is nothing to do, and the only door
through which a prolog leaves without having looked. Loading what reads a configuration and runs
probes takes 50 ms, five times Python's own start; a prolog whose probes are off, or that a health
check has just spared them (``freshness``), needs none of it.

The note holds what was true when it was made, and is believed only while all of it still is: the
bytes of recovery.toml, the package that read them, the boot, the pass of the health check. Bytes
are compared, never understood. Whatever is odd, late or missing leads to the ordinary prolog, which
says what is wrong. So does a job with a comment, which may ask for recovery: what a user writes can
make a prolog do more, never less. Epilogs and health checks have always something to do: a failed
job to report on, a heartbeat to refresh.
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
    from pathlib import Path
    from typing import NoReturn

NOTES_VARIABLE = "SLURM_RECOVERY_NOTES"
"""Environment variable that names another folder for notes; a wrapper script may set it."""

DEFAULT_NOTES = "/run/slurm-recovery/.quiet"
"""In memory, gone with the boot. No node's name begins with a dot, so none's folder is this."""

_SECONDS = 0.25
"""Time for the look at the note; it takes a millisecond, so what is late is a hung file system."""

_SCHEMA = b"quiet-prolog/v1"
_LIMIT_BYTES = config_file.SIZE_LIMIT_BYTES + 16 * 1024
_FOR_EVER = float("inf")


def prolog() -> NoReturn:
    """Before a job starts on this node: end at once if there is nothing to do, else ``hooks``."""
    started = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # until hooks has its own way
        signal.signal(number, lambda _number, _frame: os._exit(0))
    if _has_nothing_to_do():
        os._exit(0)
    from slurm_hooks import hooks

    hooks.prolog(started)


def leave_note(raw: bytes, states: Path, boot_id: str, freshness_seconds: float | None) -> bytes:
    """Run in a child: note that prologs have nothing to do under the configuration ``raw``.

    ``freshness_seconds`` is None where that holds as long as the configuration does, else how long
    the health check's pass among ``states`` spares them; without a pass there is no note.

    Raises:
        SpoolError: the folder for notes does not take it.
    """
    from pathlib import Path

    from slurm_hooks import freshness, spool

    place = _place()
    if place is None:
        return b""
    until: float | None = _FOR_EVER
    passed = b""
    if freshness_seconds is not None:
        passed = freshness.content(states)
        until = freshness.spared_until(passed, boot_id, freshness_seconds)
        if until is None:
            return b""
    where = (os.fsencode(states.parent), os.fsencode(freshness.file(states)))
    head = (_SCHEMA, _package(), boot_id.encode(), str(until).encode(), *where, passed)
    if any(b"\n" in line for line in head):
        return b""
    folder = Path(place).parent
    folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    spool.make_private(folder)
    content = b"\n".join(head) + b"\n" + raw
    spool.write(folder, Path(place).name, content, durable=False, mode=0o600)
    return b""


def _has_nothing_to_do() -> bool:
    """Ask a child, which may be left behind in a file system that hangs."""
    try:
        place = _place()
        if place is None or os.environ.get("SLURM_JOB_COMMENT"):
            return False
        import select

        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _be_the_child(place, null, writing)
        os.close(null)
        os.close(writing)
        answered = select.select([reading], [], [], _SECONDS)[0]
        answer = os.read(reading, 1) if answered else b""
        os.close(reading)
        if answer != b"=":
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, os.WNOHANG)
        return answer == b"="
    except BaseException:  # the ordinary prolog meets what is wrong here too, and records it
        return False


def _be_the_child(place: str, null: int, pipe: int) -> NoReturn:
    """Answer ``=`` if the note holds, and never return.

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
        if _holds(_read(place, own=True)):
            os.write(pipe, b"=")
    finally:
        os._exit(0)


def _holds(note: bytes) -> bool:
    """Whether all that the note says is still so.

    Raises:
        OSError, ValueError: something is not as it was.
    """
    schema, package, boot, until, buffer, pass_file, passed, raw = note.split(b"\n", 7)
    return (
        schema == _SCHEMA
        and package == _package()
        and boot == _read("/proc/sys/kernel/random/boot_id").strip()
        and time.clock_gettime(time.CLOCK_BOOTTIME) < float(until)
        and (not passed or passed == _read(pass_file))
        and not _records_wait(buffer)
        and raw == _read(config_file.name())
    )


def _records_wait(buffer: bytes) -> bool:
    """Whether records wait on the node for a prolog to bring them to the spool."""
    try:
        return any(name.endswith(b".json") for name in os.listdir(buffer))
    except FileNotFoundError:
        return False


def _place() -> str | None:
    """Return the note's path for this node and configuration; None where they have no such name."""
    node = os.environ.get("SLURMD_NODENAME", "")
    name = f"{node}:{config_file.name()}".replace("%", "%25").replace("/", "%2F")
    if not node or len(name) > 200 or not name.isprintable():
        return None
    return f"{os.environ.get(NOTES_VARIABLE) or DEFAULT_NOTES}/{name}"


def _package() -> bytes:
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
