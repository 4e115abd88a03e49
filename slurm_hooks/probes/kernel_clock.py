"""What the kernel knows of its own clock: adjtimex(2), asked and never set."""

from __future__ import annotations

import ctypes

from slurm_hooks.frozen import frozen

_UNSYNCHRONISED, _NANOSECONDS = 0x0040, 0x2000
"""STA_UNSYNC and STA_NANO of ``status``."""


class _Timex(ctypes.Structure):
    """The beginning of ``struct timex``, and room for what follows (208 bytes on 64-bit Linux)."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 40),
    )


@frozen
class KernelClock:
    """Whether something disciplines the clock, and by how many seconds it is known to be off."""

    synchronised: bool
    offset_seconds: float
    maximum_error_seconds: float


def read_clock() -> KernelClock | None:
    """Return how the clock is kept, or None where the kernel does not say (in a sandbox)."""
    timex = _Timex()
    if ctypes.CDLL(None).adjtimex(ctypes.byref(timex)) < 0:
        return None
    unit = 1e-9 if timex.status & _NANOSECONDS else 1e-6
    return KernelClock(
        synchronised=not timex.status & _UNSYNCHRONISED,
        offset_seconds=timex.offset * unit,
        maximum_error_seconds=timex.maxerror * 1e-6,
    )
