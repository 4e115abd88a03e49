"""Read the kernel's ring buffer through /dev/kmsg, from where the last look ended.

A record is ``priority,sequence,microseconds,flags;text``, one for each read(2); sequence numbers
never repeat within a boot (Documentation/ABI/testing/dev-kmsg of the kernel). The device cannot be
positioned at a number, so a look reads the ring from its oldest record and passes over what it
has seen; a ring is some megabytes at most.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from slurm_hooks.catalog.kernel_line import KernelLine
from slurm_hooks.frozen import frozen

KMSG_DEVICE = os.makedev(1, 11)
"""/dev/kmsg (Documentation/admin-guide/devices.txt)."""

_RECORD_BYTES = 8192
"""Longest record that the kernel formats (PRINTKRB_RECORD_MAX, CONSOLE_EXT_LOG_MAX: 8 KiB)."""

_USER_FACILITIES = 8
"""Priorities of the kernel's own facility are below this. The kernel gives another one to each
line that a program writes into /dev/kmsg, so that nobody can forge a line of the driver's."""

_ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")


@frozen
class Ring:
    """What one look at the ring found.

    ``next_sequence`` is where the next look starts. ``lost`` counts records that were overwritten
    before they were read, ``skipped`` those beyond the byte limit.
    """

    lines: tuple[KernelLine, ...]
    next_sequence: int
    lost: int = 0
    skipped: int = 0


def read_ring(
    read: Callable[[int], bytes],
    *,
    boot: str,
    start: int | None,
    max_bytes: int,
    boot_seconds: float,
) -> Ring:
    """Return the kernel's records from sequence number ``start`` (None: the oldest) to the end.

    ``read`` is a non-blocking read of one record of at most so many bytes. ``boot_seconds`` is
    when the kernel's clock began, in seconds since the epoch. Reading ends with the last record
    that was there when it began to be answered with none: a writer that is faster than this
    reader is left behind at ``max_bytes`` of text; what follows is passed over and counted.
    """
    lines: list[KernelLine] = []
    expected, lost, skipped, used = start, 0, 0, 0
    while skipped <= max_bytes:  # each skipped record is a byte or more: an end for a fast writer
        try:
            record = read(_RECORD_BYTES)
        except BlockingIOError:
            break
        except BrokenPipeError:
            continue  # the next read is the oldest record that is left; its number tells the loss
        if not record:
            break
        prefix, _, text = record.partition(b";")
        fields = prefix.split(b",")
        if len(fields) < 3 or not (fields[0].isdigit() and fields[1].isdigit()):
            continue
        sequence = int(fields[1])
        if start is not None and sequence < start:
            continue
        if expected is not None and sequence > expected:
            lost += sequence - expected
        expected = sequence + 1
        if int(fields[0]) >= _USER_FACILITIES:
            continue
        used += len(record)
        if used > max_bytes:
            skipped += 1
            continue
        seconds = boot_seconds + int(fields[2]) / 1e6 if fields[2].isdigit() else None
        lines.append(KernelLine(_text(text), f"{boot}:{sequence}", seconds))
    return Ring(tuple(lines), expected or 0, lost, skipped)


def reader(descriptor: int) -> Callable[[int], bytes]:
    """Return ``read`` for an open, non-blocking /dev/kmsg."""
    return lambda size: os.read(descriptor, size)


def _text(raw: bytes) -> str:
    r"""The message without its dictionary; the kernel writes other than printable ASCII as \xNN."""
    message = raw.split(b"\n", 1)[0]
    plain = _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), message)
    return plain.decode("utf-8", "replace")
