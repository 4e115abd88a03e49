"""Act as a job's user, for good: what a job names is read with its owner's rights and no others.

    >>> look(1001, lambda: read_start("/data/run1/step", 64), deadline_seconds=2)   # doctest: +SKIP
    ChildOutcome(status='ok', seconds=0.004, output=b'1200\\n', detail=None)

Owns how a process gives up root, and how a file that a user could have replaced by anything is
opened. A path in a job's comment may lead to /etc/shadow, to a FIFO or to a disk of a terabyte:
the child that opens it holds no right that the user lacks, no way back to one, and little memory;
``deadline`` ends it in time.
"""

from __future__ import annotations

import contextlib
import io
import os
import pwd
import resource
import stat
from collections.abc import Callable
from pathlib import Path

from slurm_hooks.deadline import ChildOutcome, run_one

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38  # linux/prctl.h

_MEMORY_BYTES = 1 << 30
"""Most address space of a reading child; parsing the largest metadata we accept takes a third."""

_OPEN_FILES = 256


class NotAllowed(Exception):
    """This process must not or cannot act for that user; the text says why."""


class NotRegular(OSError):
    """The path leads to no regular file: a FIFO, a device, a socket, a folder."""


def look(uid: int, task: Callable[[], bytes], deadline_seconds: float) -> ChildOutcome:
    """Run ``task`` as the user ``uid`` in a child of its own; its answer comes back as bytes.

    What it raises, and a refusal to act for that user, is an outcome of status ``error``.
    """

    def as_them() -> bytes:
        become(uid)
        return task()

    return run_one(as_them, deadline_seconds)


def become(uid: int) -> None:
    """Turn this process into the user's: ids, groups, limits. There is no way back.

    Raises:
        NotAllowed: the user is root or unknown, or this process is neither root nor that user.
    """
    if uid == 0:
        raise NotAllowed("files of a job of root are not read")
    # Here, since most probes find no job to look at, and before the user's rights, which may not
    # reach Python's own files.
    import ctypes

    _limit_resources()
    if os.geteuid() != uid:
        if os.geteuid() != 0:
            raise NotAllowed(f"only root can act as uid {uid}")
        try:
            user = pwd.getpwuid(uid)
        except KeyError:
            raise NotAllowed(f"this node knows no user with uid {uid}") from None
        os.setgroups(os.getgrouplist(user.pw_name, user.pw_gid))
        os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
        os.setresuid(uid, uid, uid)
    # No set-uid program gives rights back, and the user cannot attach to a process that was root's.
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_PR_SET_NO_NEW_PRIVS, 1), (_PR_SET_DUMPABLE, 0)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise NotAllowed(f"prctl {option}: {os.strerror(ctypes.get_errno())}")
    if 0 in os.getresuid() or 0 in os.getgroups():
        raise NotAllowed(f"still with rights of root as uid {uid}")
    os.chdir("/")


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Return the regular file ``path``, unbuffered, to read from; never wait for it.

    Symlinks are followed: the caller has no more rights than whoever made them.

    Raises:
        NotRegular: it is something else; a FIFO or a device is not even opened, since opening one
            can wake its writer or wind a tape.
        OSError: there is no such file, or it may not be read.
    """
    _refuse_special(path, Path(path).stat().st_mode)
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    file = io.FileIO(os.open(path, flags))
    try:
        # Between the two looks it may have been replaced.
        _refuse_special(path, os.fstat(file.fileno()).st_mode)
    except NotRegular:
        file.close()
        raise
    return file


def read_start(path: str | os.PathLike[str], limit_bytes: int) -> bytes:
    """Return the first bytes of a regular file, ``limit_bytes`` at most.

    Raises:
        OSError: as ``open_regular``.
    """
    with open_regular(path) as file:
        content = b""
        while len(content) < limit_bytes:
            more = file.read(limit_bytes - len(content))
            if not more:
                break
            content += more
        return content


def _refuse_special(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        kinds = (
            (stat.S_ISDIR, "a folder"),
            (stat.S_ISFIFO, "a FIFO"),
            (stat.S_ISSOCK, "a socket"),
        )
        kind = next((name for test, name in kinds if test(mode)), "a device")
        raise NotRegular(f"{os.fspath(path)!r} is {kind}, not a regular file")


def _limit_resources() -> None:
    limits = (
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    )
    for kind, wanted in limits:
        hard = resource.getrlimit(kind)[1]
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError):  # above what this process may still set: keep it
            resource.setrlimit(kind, (limit, limit))
