"""Run what NCCL needs: its library in a child, and a test program to its end or its deadline.

Owns how both are started, bounded and ended; ``nccl`` judges what came of it. Runs inside the
probe's own child: its process group is killed with it, and the program is part of that group.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_hooks.deadline import ChildOutcome, run_one
from slurm_hooks.probes.process_table import waits_in

_UNIQUE_ID_BYTES = 128
"""ncclUniqueId (nccl.h). It begins with a magic of 8 bytes and then the root's socket address."""

_OUTPUT_BYTES = 1 << 20
"""Bytes kept of a program's output, of its start and of its end each."""


class UniqueId(ctypes.Structure):
    """ncclUniqueId of nccl.h."""

    _fields_ = (("internal", ctypes.c_char * _UNIQUE_ID_BYTES),)


@dataclass(frozen=True)
class Ran:
    """A program's end: its exit status (negative: a signal, None: it hung), output and place.

    ``where`` says what the kernel shows of a program that hung.
    """

    status: int | None
    output: str
    where: str = ""


def bootstrap(library: str, interface: str, seconds: float) -> ChildOutcome:
    """Load NCCL in a child and let it make a unique id, which opens its bootstrap socket.

    The answer is a JSON object: ``version`` (``2.18.5``), ``result`` (ncclResult_t), ``error``
    (NCCL's own words) and ``address`` (of the socket). A library that does not load is an outcome
    of status ``error`` whose detail starts with ``OSError``.
    """

    def ask() -> bytes:
        if interface:
            os.environ["NCCL_SOCKET_IFNAME"] = interface
        nccl = ctypes.CDLL(library)
        version, unique = ctypes.c_int(0), UniqueId()
        nccl.ncclGetVersion(ctypes.byref(version))
        result = int(nccl.ncclGetUniqueId(ctypes.byref(unique)))
        nccl.ncclGetErrorString.restype = ctypes.c_char_p
        words = nccl.ncclGetErrorString(result) if result else b""
        answer = {
            "version": _version(version.value),
            "result": result,
            "error": (words or b"").decode("utf-8", "replace")[:200],
            "address": _address(bytes(unique)[8:]),
        }
        return json.dumps(answer).encode()

    return run_one(ask, seconds)


def refusal(path: Path) -> str:
    """Why root must not run or load ``path``; empty if it may."""
    try:
        found = path.stat()
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not path.is_absolute() or not stat.S_ISREG(found.st_mode):
        return f"{path} is no absolute path of a file"
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        return f"{path} can be changed by others than root"
    return ""


def run(argv: Sequence[str], environment: Mapping[str, str], seconds: float) -> Ran:
    """Run a program for ``seconds`` at most; what hangs is left to die with this process group.

    Raises:
        OSError: it cannot be started.
    """
    until = time.monotonic() + seconds
    process = subprocess.Popen(
        argv,
        env=dict(environment),
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    os.set_blocking(pipe, False)
    head, tail, closed = bytearray(), bytearray(), False
    while (left := until - time.monotonic()) > 0:
        # A child of the program can hold the pipe open after it, so its end is looked for too.
        ready = select.select([] if closed else [pipe], [], [], min(left, 0.05))[0]
        chunk = os.read(pipe, 1 << 16) if ready else b""
        closed = closed or (bool(ready) and not chunk)
        room = _OUTPUT_BYTES - len(head)
        head += chunk[:room]
        tail += chunk[room:] if room < len(chunk) else b""
        del tail[:-_OUTPUT_BYTES]
        if not chunk and process.poll() is not None:
            return Ran(process.returncode, _text(head, tail))
    where = _where(process.pid)
    process.kill()
    return Ran(None, _text(head, tail), where)


def _text(head: bytearray, tail: bytearray) -> str:
    return (head + tail).decode("utf-8", "replace")


def _where(pid: int) -> str:
    """The state of a process's threads and the kernel functions they wait in, most first."""
    places: dict[str, int] = {}
    try:
        threads = [entry.name for entry in Path(f"/proc/{pid}/task").iterdir()][:256]
    except OSError:
        return ""
    for thread in threads:
        place = waits_in(int(thread)) or "user code"
        places[place] = places.get(place, 0) + 1
    by_count = sorted(places.items(), key=lambda entry: -entry[1])[:4]
    return "threads in " + ", ".join(f"{place} ({count})" for place, count in by_count)


def _version(code: int) -> str:
    """``2.18.5`` of 21805; before 2.9 the major number counted thousands (nccl.h)."""
    unit = 10_000 if code >= 10_000 else 1_000
    return f"{code // unit}.{code % unit // 100}.{code % 100}"


def _address(sockaddr: bytes) -> str:
    """The IP address in a sockaddr_in or sockaddr_in6, empty for anything else."""
    family = int.from_bytes(sockaddr[:2], "little")
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, sockaddr[4:8])
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, sockaddr[8:24])
    return ""
