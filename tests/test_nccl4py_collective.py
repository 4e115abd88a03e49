"""The all-reduce through nccl4py: told like nccl-tests', judged like theirs, in a deep check only.

There is no GPU here. nccl4py and cuda.core are stand-ins with the functions that those packages
document (nccl4py 0.6.0, cuda-core 1.0): in a Python of the test's own, they add up numbers in this
machine's memory, or hang, crash, or add them up wrongly. Hooks, programs and judgement are real.
"""

from __future__ import annotations

import json
import site
import subprocess
import time
import venv
from pathlib import Path
from typing import Any

import pytest

from slurm_hooks.probes.nccl_tests_output import parse
from tests.node import Node
from tests.test_nccl_probe import LIBRARY

REPOSITORY = Path(__file__).parent.parent
GPUS = 4

CUDA_CORE = '''
"""Device, Stream and Buffer of cuda-core 1.0, as far as the collective uses them."""
import ctypes, json, pathlib

MOOD = json.loads((pathlib.Path(__file__).parent / "mood.json").read_text())

class Stream:
    def sync(self):
        if MOOD.get("hang") == "sync":
            import signal
            signal.pause()

class Buffer:
    def __init__(self, size):
        self._memory = ctypes.create_string_buffer(size)
        self.size, self.handle = size, ctypes.addressof(self._memory)

    def copy_from(self, src, *, stream):
        assert src.size == self.size and isinstance(stream, Stream)
        ctypes.memmove(self.handle, src.handle, self.size)

    def copy_to(self, dst, *, stream):
        dst.copy_from(self, stream=stream)

    def close(self):
        self.handle = 0

class LegacyPinnedMemoryResource:
    def allocate(self, size, *, stream=None):
        return Buffer(size)

class Device:
    current = None

    def __init__(self, number):
        if number >= MOOD.get("devices", 64):
            raise ValueError(f"device_id must be < {MOOD['devices']}, got {number}")
        self.device_id, self.name = number, "NVIDIA H200"
        self.pci_bus_id = f"0000:{number:02X}:00.0"

    def set_current(self):
        Device.current = self

    def create_stream(self):
        assert Device.current is self, "a stream belongs to the current device"
        return Stream()
'''

NCCL_CORE = '''
"""Communicator, group and memory of nccl4py 0.6.0, as far as the collective uses them."""
import contextlib, ctypes, os, signal
from cuda.core import MOOD, Buffer, Stream

SUM = 0
_waiting = None

class NCCLError(Exception):
    pass

class Communicator:
    def __init__(self, rank):
        self.rank = rank

    @classmethod
    def init_all(cls, devices=None):
        if MOOD.get("hang") == "init":
            signal.pause()
        if MOOD.get("fail") == "init":
            raise NCCLError("ncclUnhandledCudaError: unhandled cuda error")
        return [cls(rank) for rank in range(devices)]

    def allreduce(self, sendbuf, recvbuf, op, *, stream=None, config=None):
        assert op == SUM and isinstance(stream, Stream) and _waiting is not None
        both = sendbuf.__cuda_array_interface__, recvbuf.__cuda_array_interface__
        assert all(shown["typestr"] == "<f4" and shown["version"] == 3 for shown in both)
        _waiting.append((self.rank, *both))

@contextlib.contextmanager
def group():
    global _waiting
    _waiting = []
    yield
    _add_up(_waiting)
    _waiting = None

def mem_alloc(size, device=None):
    assert isinstance(device, int)
    return Buffer(size)

def mem_free(buf):
    buf.close()

def _add_up(calls):
    if MOOD.get("crash"):
        os.kill(os.getpid(), signal.SIGSEGV)
    (count,) = calls[0][1]["shape"]
    numbers = ctypes.c_float * count
    sends = [numbers.from_address(send["data"][0]) for _, send, _ in calls]
    if calls[0][1]["data"] == calls[0][2]["data"]:
        return  # in place: only its time is of interest
    sums = [sum(values) for values in zip(*sends)]
    for rank, _, receive in calls:
        got = numbers.from_address(receive["data"][0])
        got[:] = sums
        if rank == MOOD.get("wrong"):
            got[count // 2] += 1
        if rank == MOOD.get("misplaced"):
            half = count // 2
            got[:] = sums[half:] + sums[:half]
'''


class Python:
    """A Python of its own in which the hooks are installed, and nccl4py beside them."""

    def __init__(self, folder: Path) -> None:
        self.node = Node(folder)
        venv.create(folder / "python", with_pip=False, symlinks=True)
        self.program = folder / "python" / "bin" / "python"
        (packages,) = (folder / "python" / "lib").glob("python*/site-packages")
        paths = [str(REPOSITORY), *site.getsitepackages()]
        (packages / "paths.pth").write_text("\n".join(paths), encoding="utf-8")
        self.cuda, self.nccl = packages / "cuda" / "core", packages / "nccl" / "core"
        for package, text in ((self.cuda, CUDA_CORE), (self.nccl, NCCL_CORE)):
            package.mkdir(parents=True)
            (package / "__init__.py").write_text(text, encoding="utf-8")
        self.mood()
        source, self.library = folder / "nccl.c", folder / "libnccl.so.2"
        source.write_text(LIBRARY, encoding="ascii")
        build = ["cc", "-shared", "-fPIC", "-o", str(self.library), str(source)]
        subprocess.run(build, check=True)
        self.scontrol = folder / "scontrol"
        self.says("IDLE+DRAIN")
        self.configure()

    def mood(self, **changes: object) -> None:
        (self.cuda / "mood.json").write_text(json.dumps(changes), encoding="utf-8")

    def says(self, state: str) -> None:
        """Let Slurm say that the node is in ``state``."""
        line = f"NodeName=n1 CPUAlloc=0 State={state} Partitions=train"
        self.scontrol.write_text(f"#!/bin/sh\necho '{line}'\n", encoding="utf-8")
        self.scontrol.chmod(0o755)

    def configure(self, **settings: object) -> None:
        chosen = {"library": str(self.library), "size": "64K", "floor": 0.0, **settings}
        lines = [f"{key} = {json.dumps(value)}" for key, value in chosen.items()]
        text = "\n".join(["[probes.nccl]", *lines, "[probes.nvml]", "hooks = []"])
        self.node.configure(f'{text}\nexpect_gpus = {GPUS}\n[hooks]\nscontrol = "{self.scontrol}"')

    def run_collective(self, size: int, gpus: int = GPUS) -> subprocess.CompletedProcess[str]:
        argv = ["-I", "-m", "slurm_hooks.probes.nccl_collective", str(gpus), str(size)]
        return subprocess.run(
            [str(self.program), *argv], capture_output=True, text=True, timeout=60, check=False
        )

    def deep_check(self) -> dict[str, Any]:
        """Ask for a deep check, run the node's next health check, and return its record."""
        from slurm_hooks import check_request
        from slurm_hooks.record import new_id, utc

        asked = check_request.Request(new_id(), self.node.name, "asked", utc(), "root")
        check_request.write(self.node.spool, asked)
        before = len(self.node.records())
        environ = {
            "SLURMD_NODENAME": self.node.name,
            "SLURM_RECOVERY_CONFIG": str(self.node.config),
        }
        run = [str(self.program), "-c", "from slurm_hooks import hooks; hooks.health_check()"]
        done = subprocess.run(run, env=environ, timeout=90, check=False)
        assert done.returncode == 0
        (record,) = self.node.records()[before:]
        return record


@pytest.fixture
def python(tmp_path: Path) -> Python:
    return Python(tmp_path)


def codes(record: dict[str, Any]) -> list[str]:
    return [finding["code"] for finding in record["findings"]]


def test_a_healthy_node_passes_with_its_values_compared(python: Python) -> None:
    record = python.deep_check()
    assert codes(record) == ["check.passed"], record
    (nccl,) = [probe for probe in record["probes"] if probe["name"] == "nccl"]
    assert nccl["status"] == "ok"


def test_its_output_is_of_nccl_tests_form(python: Python) -> None:
    done = python.run_collective(1 << 20)
    told = parse(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert told.finished and told.checked and not told.wrong
    assert told.devices == ("NVIDIA H200",) * GPUS
    assert told.busbw and told.busbw > 0
    assert [row.size for row in told.rows] == [1 << 20, 1 << 20]


@pytest.mark.parametrize(("mood", "wrong"), [("wrong", 1), ("misplaced", 1000)])
def test_wrong_results_on_one_gpu_are_fatal(python: Python, mood: str, wrong: int) -> None:
    """One wrong number is found, and so are right ones that arrived in the wrong place."""
    python.configure(size="1M")
    python.mood(**{mood: 2})
    record = python.deep_check()
    assert codes(record) == ["nccl.wrong_values", "check.failed"]
    found = record["findings"][0]
    assert found["severity"] == "fatal"
    assert int(found["summary"].split(": ")[1].split()[0]) >= wrong


def test_bandwidth_is_held_against_the_floor(python: Python) -> None:
    python.configure(floor=99_999.0)
    record = python.deep_check()
    assert codes(record) == ["nccl.slow", "check.failed"]
    assert "the floor is 99999" in record["findings"][0]["summary"]


@pytest.mark.parametrize(
    ("where", "told"),
    [("init", "while NCCL connected the GPUs"), ("sync", "in the first collective")],
)
def test_a_hang_is_told_with_where_it_hung_and_leaves_nothing_behind(
    python: Python, where: str, told: str
) -> None:
    python.configure(deadline=12.0)
    python.mood(hang=where)
    started = time.monotonic()
    record = python.deep_check()
    assert time.monotonic() - started < 40
    assert codes(record) == ["nccl.hang", "check.failed"]
    assert told in record["findings"][0]["summary"]
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(python.program) not in lines


@pytest.mark.parametrize(
    ("mood", "told"),
    [
        ({"crash": True}, "signal 11, in the first collective"),
        ({"fail": "init"}, "unhandled cuda error"),
        ({"devices": 2}, "device_id must be < 2, got 2"),
    ],
)
def test_a_crash_or_an_error_is_told_with_its_last_words(
    python: Python, mood: dict[str, Any], told: str
) -> None:
    python.mood(**mood)
    record = python.deep_check()
    assert codes(record) == ["nccl.failed", "check.failed"]
    assert told in record["findings"][0]["summary"]


def test_root_runs_no_nccl4py_that_others_can_change(python: Python) -> None:
    (python.nccl / "__init__.py").chmod(0o666)
    record = python.deep_check()
    assert "nccl.not_run" in codes(record)
    assert "can be changed by others" in record["findings"][0]["summary"]


def test_on_a_node_in_service_no_collective_is_run(python: Python) -> None:
    python.says("IDLE")
    python.mood(crash=True)
    assert codes(python.deep_check()) == ["check.refused"]
