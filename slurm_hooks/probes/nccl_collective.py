"""A program: an all-reduce over this node's GPUs through nccl4py, told as nccl-tests tell theirs.

    python -I -m slurm_hooks.probes.nccl_collective 8 8589934592

Owns the collective alone. Two sizes are run by one process: of a small one every value on every
GPU is compared with what it must be, of the one asked for the time is taken. What is printed has
nccl-tests' form, line by line as it gets there, so that ``nccl`` judges both alike and can say
where a run stopped. Source of the interface: NVIDIA's NCCL user guide, "nccl4py" and its package
0.6.0 (``nccl.core``: Communicator.init_all, allreduce, group, mem_alloc), cuda-core 1.0
(``cuda.core``: Device, Stream, Buffer, LegacyPinnedMemoryResource).
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WARM_UPS, ITERATIONS = 5, 20
"""As all_reduce_perf -w 5 -n 20."""

CHECKED_BYTES = 256 << 20
"""Most bytes whose values are compared; a host reads them back in well under a second for each
GPU, and the algorithms NCCL chooses for large messages are in use long before."""

_FLOAT_BYTES = 4
_BLOCK_FLOATS = 1 << 16
_SHIFT_FLOATS = 7919
"""How far each block's values are turned against those of the one before: a prime, so that data
that arrive in the wrong place are wrong."""

_LARGEST_VALUE = 1000
"""Sums of small whole numbers are exact in single precision, in whatever order they are added."""

_HEADER = """\
#       size         count      type   redop    root     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)"""


@dataclass(frozen=True)
class Floats:
    """Single-precision numbers in a GPU's memory, as the CUDA array interface (v3) shows them.

    A ``cuda.core`` buffer alone would be taken for bytes, for which NCCL has other algorithms.
    """

    address: int
    count: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Return shape, type and address."""
        return {
            "shape": (self.count,),
            "typestr": "<f4",
            "data": (self.address, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }


@dataclass(frozen=True)
class Rank:
    """One GPU: its number, communicator, device and stream, as the two packages have them."""

    number: int
    communicator: Any
    device: Any
    stream: Any


def main(arguments: Sequence[str]) -> int:
    """Run over ``arguments[0]`` GPUs with ``arguments[1]`` bytes; return the exit status."""
    gpus, size = int(arguments[0]), int(arguments[1])
    try:
        wrong, busbw = _all_reduce(gpus, size)
    except Exception as error:  # a program's last words are what its reader has
        _say(f"# error: {type(error).__name__}: {' '.join(str(error).split())}")
        return 1
    _say(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    _say(f"# Avg bus bandwidth    : {busbw:.3f}")
    return 1 if wrong else 0


def _all_reduce(gpus: int, size: int) -> tuple[int, float]:
    """Return how many values were wrong, and the bus bandwidth in GB/s."""
    import nccl.core as nccl
    from cuda.core import Device

    devices = [Device(number) for number in range(gpus)]
    _say("# Using devices")
    for number, device in enumerate(devices):
        where = f"Pid {os.getpid()} on {os.uname().nodename} device {number:2}"
        _say(f"#  Rank {number:2} Group  0 {where} [{device.pci_bus_id}] {device.name}")
    communicators = nccl.Communicator.init_all(gpus)
    ranks = []
    for number, device in enumerate(devices):
        device.set_current()
        ranks.append(Rank(number, communicators[number], device, device.create_stream()))
    _say(_HEADER)
    checked = min(size, CHECKED_BYTES) // _FLOAT_BYTES
    wrong = _wrong_values(nccl, ranks, checked)
    _say(_row(checked * _FLOAT_BYTES, "N/A", "N/A", "N/A", str(wrong)))
    seconds = _seconds(nccl, ranks, size // _FLOAT_BYTES)
    algbw = size / seconds / 1e9
    busbw = algbw * 2 * (gpus - 1) / gpus
    _say(_row(size, f"{seconds * 1e6:.1f}", f"{algbw:.2f}", f"{busbw:.2f}", "N/A"))
    return wrong, busbw  # nothing is destroyed: the end of this process does it


def _wrong_values(nccl: Any, ranks: Sequence[Rank], count: int) -> int:
    """All-reduce ``count`` known numbers out of place; return how many came out wrong."""
    from cuda.core import LegacyPinnedMemoryResource

    size = count * _FLOAT_BYTES
    host = LegacyPinnedMemoryResource().allocate(size)
    address = int(host.handle)
    base = random.Random(1).choices(range(_LARGEST_VALUE), k=_BLOCK_FLOATS)
    sends, receives = [], []
    for rank in ranks:
        rank.device.set_current()
        sends.append(nccl.mem_alloc(size, device=rank.number))
        receives.append(nccl.mem_alloc(size, device=rank.number))
        for offset, block in _blocks([value + rank.number for value in base], size):
            ctypes.memmove(address + offset, block, len(block))
        sends[-1].copy_from(host, stream=rank.stream)
        rank.stream.sync()
    pairs = list(zip(sends, receives, strict=True))
    _once(nccl, ranks, [(_floats(send, count), _floats(got, count)) for send, got in pairs])
    _sync(ranks)
    of_ranks = sum(rank.number for rank in ranks)
    expected = [len(ranks) * value + of_ranks for value in base]
    wrong = 0
    for rank, received in zip(ranks, receives, strict=True):
        rank.device.set_current()
        received.copy_to(host, stream=rank.stream)
        rank.stream.sync()
        for offset, block in _blocks(expected, size):
            found = ctypes.string_at(address + offset, len(block))
            if found != block:
                wrong += sum(
                    a != b for a, b in zip(array("f", found), array("f", block), strict=True)
                )
    for buffer in (*sends, *receives):
        nccl.mem_free(buffer)
    return wrong


def _seconds(nccl: Any, ranks: Sequence[Rank], count: int) -> float:
    """Return the seconds that one all-reduce of ``count`` numbers takes, in place."""
    buffers = []
    for rank in ranks:
        rank.device.set_current()
        buffers.append(nccl.mem_alloc(count * _FLOAT_BYTES, device=rank.number))
    both = [(_floats(buffer, count), _floats(buffer, count)) for buffer in buffers]
    for _ in range(WARM_UPS):
        _once(nccl, ranks, both)
    _sync(ranks)
    started = time.perf_counter()
    for _ in range(ITERATIONS):
        _once(nccl, ranks, both)
    _sync(ranks)
    return (time.perf_counter() - started) / ITERATIONS


def _once(nccl: Any, ranks: Sequence[Rank], buffers: Sequence[tuple[Floats, Floats]]) -> None:
    """Start one all-reduce on every GPU; one thread that has them all must do so in a group."""
    with nccl.group():
        for rank, (send, receive) in zip(ranks, buffers, strict=True):
            rank.communicator.allreduce(send, receive, nccl.SUM, stream=rank.stream)


def _sync(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.device.set_current()
        rank.stream.sync()


def _floats(buffer: Any, count: int) -> Floats:
    return Floats(int(buffer.handle), count)


def _blocks(values: Sequence[int], size: int) -> list[tuple[int, bytes]]:
    """Offsets and content of ``size`` bytes made of ``values``, turned further in each block."""
    twice = array("f", values).tobytes() * 2
    length, blocks = len(twice) // 2, []
    for number, offset in enumerate(range(0, size, length)):
        start = number * _SHIFT_FLOATS % _BLOCK_FLOATS * _FLOAT_BYTES
        blocks.append((offset, twice[start : start + min(length, size - offset)]))
    return blocks


def _row(size: int, microseconds: str, algbw: str, busbw: str, wrong: str) -> str:
    count = size // _FLOAT_BYTES
    sizes = f"{size:12} {count:13} {'float':>9} {'sum':>7} {-1:7}"
    return f"{sizes} {microseconds:>8} {algbw:>7} {busbw:>7} {wrong:>6}"


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
