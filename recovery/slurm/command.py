"""Run one command under a deadline, with bounded output and no shell.

Owns processes and pipes; what the command means is its caller's business.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CHUNK_BYTES = 1 << 16
REAP_SECONDS = 1.0
"""How long a killed command is waited for; one in D state is left to init after that."""


class CommandTimeout(Exception):
    """The command was still running at its deadline and has been killed."""


class OutputTooLarge(Exception):
    """The command wrote more than its limit and has been killed."""


@dataclass(frozen=True)
class Completed:
    """What a command left: exit status (negative: the signal that ended it), and its texts."""

    status: int
    stdout: str
    stderr: str
    seconds: float


def run(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    timeout_seconds: float,
    output_limit_bytes: int,
) -> Completed:
    """Run ``arguments`` and return what it wrote, decoded as UTF-8 with U+FFFD for bad bytes.

    Raises OSError where it cannot be started, CommandTimeout and OutputTooLarge; in the last two
    cases its whole process group has been killed.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        start_new_session=True,
    )
    try:
        stdout, stderr = _read(process, began + timeout_seconds, output_limit_bytes)
        status = process.wait(max(0.0, began + timeout_seconds - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        raise CommandTimeout from error
    finally:
        _end(process)
    return Completed(
        status,
        stdout.decode("utf-8", "replace"),
        stderr.decode("utf-8", "replace"),
        time.monotonic() - began,
    )


def _read(
    process: subprocess.Popen[bytes], deadline: float, limit_bytes: int
) -> tuple[bytearray, bytearray]:
    assert process.stdout and process.stderr
    texts = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as selector:
        for descriptor in texts:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            remaining = deadline - time.monotonic()
            ready = selector.select(remaining) if remaining > 0 else []
            if not ready:
                raise CommandTimeout
            for key, _ in ready:
                chunk = os.read(key.fd, CHUNK_BYTES)
                if not chunk:
                    selector.unregister(key.fd)
                texts[key.fd] += chunk
                if len(texts[key.fd]) > limit_bytes:
                    raise OutputTooLarge
    return texts[process.stdout.fileno()], texts[process.stderr.fileno()]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what still runs, with its children, and close the pipes."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        # In D state it outlives this; Popen then reaps it at a later start of another process.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REAP_SECONDS)
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()
