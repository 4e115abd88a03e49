#!/usr/bin/env python3
"""A training job that is honest about resuming: data-parallel, and small enough to read.

    srun python3 train.py --run /data/run1 --steps 200

Each rank computes the gradient of its own shard, rank 0 adds them up **in the order of the ranks**
and sends the mean back, so every rank holds the same weights and an interrupted run ends with the
same bits as an uninterrupted one. Ranks find each other through a file in the run's folder and
speak plain TCP. Each rank asks its GPU how it is, through NVML, at every step and dies of what NVML
answers, as a real one dies of its next CUDA call.

In the run's folder:

    ckpt/step-00000120.json   {"step", "weights", …, "sha256"}; replaced at one stroke, last 3 kept
    progress                  {"step": 123}, after every step
    rendezvous-<job>.<n>      where rank 0 of attempt n listens, while it runs
    final.json                the weights after the last step, and their sha256

``slurm-hooks verify-checkpoint /data/run1/ckpt`` says where a restart would begin. Needs nothing
but Python, and pynvml (the package nvidia-ml-py) unless ``--no-gpu-check`` is given.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import secrets
import socket
import struct
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

FEATURES = 16
SAMPLES = 8
"""What one rank sees in one step."""

RATE, MOMENTUM = 0.05, 0.9
KEPT_CHECKPOINTS = 3
PEER_SECONDS = 120.0
"""How long a rank waits for another; a collective library has such a limit as well."""

HELLO_SECONDS = 5.0
"""How long a stranger on the port may keep rank 0 waiting."""


class DeviceError(RuntimeError):
    """The GPU of this rank cannot be used any more."""


class CheckpointError(Exception):
    """A file does not count as a checkpoint; the text says why."""


@dataclass(frozen=True)
class Place:
    """Which of how many ranks this process is, and in which attempt of which job."""

    rank: int
    ranks: int
    local_rank: int
    node: str
    attempt: str

    @classmethod
    def from_slurm(cls) -> Place:
        """Read srun's variables; without srun this is the only rank."""
        job, restart = os.environ.get("SLURM_JOB_ID", "0"), os.environ.get("SLURM_RESTART_COUNT")
        return cls(
            rank=int(os.environ.get("SLURM_PROCID", "0")),
            ranks=int(os.environ.get("SLURM_NTASKS", "1")),
            local_rank=int(os.environ.get("SLURM_LOCALID", "0")),
            node=os.environ.get("SLURMD_NODENAME", socket.gethostname()),
            attempt=f"{job}.{restart or 0}",
        )


@dataclass
class State:
    """All that a step depends on: what a checkpoint must hold, and nothing else."""

    step: int
    weights: list[float]
    velocity: list[float]


# The model: linear regression by gradient descent with momentum.


def new_state(seed: int) -> State:
    """Return the state before the first step."""
    source = random.Random(f"weights {seed}")
    weights = [source.uniform(-1, 1) for _ in range(FEATURES)]
    return State(0, weights, [0.0] * FEATURES)


def gradient(state: State, rank: int, seed: int) -> list[float]:
    """Return this rank's gradient at this step, and behind it its loss.

    The samples depend on seed, step and rank alone: a repeated step sees the same ones.
    """
    truth = random.Random(f"truth {seed}")
    goal = [truth.uniform(-1, 1) for _ in range(FEATURES)]
    source = random.Random(f"samples {seed} {state.step} {rank}")
    total, loss = [0.0] * FEATURES, 0.0
    for _ in range(SAMPLES):
        sample = [source.uniform(-1, 1) for _ in range(FEATURES)]
        error = sum((w - g) * x for w, g, x in zip(state.weights, goal, sample, strict=True))
        total = [t + 2 * error * x / SAMPLES for t, x in zip(total, sample, strict=True)]
        loss += error * error / SAMPLES
    return [*total, loss]


def descend(state: State, mean: list[float]) -> None:
    """Take one step along the mean gradient."""
    pairs = zip(state.velocity, mean, strict=True)
    state.velocity = [MOMENTUM * velocity - RATE * slope for velocity, slope in pairs]
    state.weights = [w + v for w, v in zip(state.weights, state.velocity, strict=True)]
    state.step += 1


# The ranks among each other.


class Peers:
    """Sums vectors over all ranks: everybody sends to rank 0, which answers everybody.

    Rank 0 adds in the order of the ranks, never in the order of arrival: floating-point addition
    is not associative, and timing must not show in the weights.
    """

    def __init__(self, place: Place, folder: Path) -> None:
        self._place = place
        meeting = folder / f"rendezvous-{place.attempt}"
        self._sockets: dict[int, socket.socket] = {}
        if place.rank == 0:
            self._gather(meeting)
        else:
            self._sockets[0] = self._join(meeting)

    def mean(self, vector: list[float]) -> list[float]:
        """Return the mean of all ranks' vectors, the same bits for each rank."""
        if self._place.rank:
            self._send(0, vector)
            return self._receive(0, len(vector))
        total = list(vector)
        for rank in range(1, self._place.ranks):
            received = self._receive(rank, len(vector))
            total = [t + r for t, r in zip(total, received, strict=True)]
        return self.from_first([t / self._place.ranks for t in total])

    def from_first(self, vector: list[float]) -> list[float]:
        """Return rank 0's vector; the others' own only says how long it is."""
        if self._place.rank:
            return self._receive(0, len(vector))
        for rank in range(1, self._place.ranks):
            self._send(rank, vector)
        return vector

    def _gather(self, meeting: Path) -> None:
        secret = secrets.token_bytes(16)
        deadline = time.monotonic() + PEER_SECONDS
        with socket.create_server(("", 0), backlog=self._place.ranks) as server:
            told = {"host": _own_host(), "port": server.getsockname()[1], "secret": secret.hex()}
            write_whole(meeting, json.dumps(told))
            while len(self._sockets) < self._place.ranks - 1:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                peer, _ = server.accept()
                peer.settimeout(HELLO_SECONDS)
                # Whoever does not know the secret is nobody of ours: a port scan, another attempt.
                with contextlib.suppress(OSError):
                    hello = _exactly(peer, len(secret) + 4)
                    rank = int.from_bytes(hello[len(secret) :], "big")
                    if secrets.compare_digest(hello[: len(secret)], secret):
                        peer.settimeout(PEER_SECONDS)
                        self._sockets[rank] = peer
                        continue
                peer.close()
        meeting.unlink()

    def _join(self, meeting: Path) -> socket.socket:
        deadline = time.monotonic() + PEER_SECONDS
        while not meeting.exists():
            if time.monotonic() > deadline:
                raise ConnectionRefusedError(f"rank 0 has not been at {meeting} in time")
            time.sleep(0.02)
        told = json.loads(meeting.read_text(encoding="ascii"))
        peer = socket.create_connection((told["host"], told["port"]), timeout=PEER_SECONDS)
        peer.sendall(bytes.fromhex(told["secret"]) + self._place.rank.to_bytes(4, "big"))
        return peer

    def _send(self, rank: int, vector: list[float]) -> None:
        self._sockets[rank].sendall(struct.pack(f"!{len(vector)}d", *vector))

    def _receive(self, rank: int, count: int) -> list[float]:
        try:
            return list(struct.unpack(f"!{count}d", _exactly(self._sockets[rank], 8 * count)))
        except TimeoutError:
            raise TimeoutError(f"rank {rank} has sent nothing for {PEER_SECONDS:g} s") from None
        except ConnectionError:
            raise ConnectionResetError(f"connection closed by peer: rank {rank}") from None


def _exactly(peer: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        piece = peer.recv(count - len(received))
        if not piece:
            raise ConnectionResetError("connection closed by peer")
        received += piece
    return received


def _own_host() -> str:
    """The name under which other nodes reach this one; a machine without one is alone."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "127.0.0.1"
    return name


# The GPU.


class Gpu:
    """This rank's GPU, as NVML knows it.

    Slurm numbers GPUs by their device file, that is by minor number; NVML's index is another.

    Raises:
        DeviceError: NVML does not give it out.
    """

    def __init__(self, place: Place) -> None:
        import pynvml

        self._nvml = pynvml
        given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        number = given[place.local_rank % len(given)]
        self._number = int(number) if number.isdigit() else place.local_rank
        self._name = f"GPU {self._number} of {place.node}"
        try:
            pynvml.nvmlInit()
            self._handle = self._find()
            self._errors = self._uncorrected_errors()
        except pynvml.NVMLError as error:
            raise DeviceError(f"{self._name}: NVML: {error}") from error

    def check(self) -> None:
        """Ask it how it is, in place of the work that a real rank gives it.

        Raises:
            DeviceError: NVML reports an error, or the GPU's memory has failed since the start.
        """
        try:
            errors = self._uncorrected_errors()
        except self._nvml.NVMLError as error:
            raise DeviceError(f"{self._name}: NVML: {error}") from error
        if errors > self._errors:
            raise DeviceError(f"{self._name}: uncorrectable ECC error encountered")

    def _find(self) -> Any:
        failure = self._nvml.NVMLError(self._nvml.NVML_ERROR_NOT_FOUND)
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                if self._nvml.nvmlDeviceGetMinorNumber(handle) == self._number:
                    return handle
            except self._nvml.NVMLError as error:  # a lost GPU does not even tell its number
                failure = error
        raise failure

    def _uncorrected_errors(self) -> int:
        nvml = self._nvml
        try:
            count = nvml.nvmlDeviceGetTotalEccErrors(
                self._handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        except nvml.NVMLError_NotSupported:
            return 0
        return int(count)


# Files. Rank 0 alone writes and reads them.


def write_whole(path: Path, text: str) -> None:
    """Replace ``path`` at one stroke; afterwards it is on disk, whatever happens to the node."""
    new = path.with_name(f".{path.name}.tmp")
    with new.open("w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def digest(document: dict[str, Any]) -> str:
    """Return the sha256 of a document without its ``sha256``, as verify-checkpoint expects it."""
    rest = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def signed(document: dict[str, Any]) -> str:
    """Return the document as JSON, its own sha256 in it."""
    return json.dumps({**document, "sha256": digest(document)}, sort_keys=True)


def save(folder: Path, state: State, run: dict[str, int]) -> None:
    """Write a checkpoint and drop the oldest; JSON keeps each bit of a Python float."""
    document = {**run, **vars(state)}
    write_whole(folder / f"step-{state.step:08}.json", signed(document))
    for old in sorted(folder.glob("step-*.json"))[:-KEPT_CHECKPOINTS]:
        old.unlink()


def load(path: Path, run: dict[str, int]) -> State:
    """Return the state in a checkpoint.

    Raises:
        CheckpointError: it is not whole, or of another run.
    """
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"it cannot be read ({error.strerror})") from None
    except ValueError:
        raise CheckpointError("it is cut off or no JSON") from None
    if not isinstance(document, dict) or document.get("sha256") != digest(document):
        raise CheckpointError("it does not match its own sha256")
    for key, value in run.items():
        if document.get(key) != value:
            raise CheckpointError(f"its {key} is {document.get(key)}, not {value}")
    return State(document["step"], document["weights"], document["velocity"])


def newest(folder: Path, run: dict[str, int]) -> State | None:
    """Return the state of the newest checkpoint that counts, and log why newer ones do not."""
    for path in sorted(folder.glob("step-*.json"), reverse=True):
        try:
            state = load(path, run)
        except CheckpointError as error:
            log(f"checkpoint {path.name} does not count: {error}")
        else:
            log(f"resuming from {path.name}")
            return state
    return None


def log(line: str) -> None:
    """Write one line at once, so that the lines of several ranks do not mix."""
    print(line + "\n", end="", flush=True)


# The loop.


def train(options: argparse.Namespace, place: Place) -> None:
    """Run this rank to the last step."""
    folder: Path = options.run
    checkpoints = folder / "ckpt"
    checkpoints.mkdir(parents=True, exist_ok=True)
    run = {"seed": options.seed, "ranks": place.ranks}
    first = place.rank == 0
    gpu = Gpu(place) if options.gpu_check else None
    peers = Peers(place, folder)
    state = (newest(checkpoints, run) if first else None) or new_state(options.seed)
    # All ranks begin where rank 0 does, also when a file system shows them different files.
    told = peers.from_first([float(state.step), *state.weights, *state.velocity])
    state = State(int(told[0]), told[1 : 1 + FEATURES], told[1 + FEATURES :])
    if first:
        log(f"attempt {place.attempt}: {place.ranks} ranks, starting at step={state.step}")
    while state.step < options.steps:
        began = time.monotonic()
        if gpu:
            gpu.check()
        if state.step + 1 == options.raise_at and place.rank == place.ranks - 1:
            raise ValueError(f"sample {state.step} of shard {place.rank} has a negative length")
        *mean, loss = peers.mean(gradient(state, place.rank, options.seed))
        descend(state, mean)
        if first:
            log(f"step={state.step} loss={loss:.4f}")
            if state.step % options.save_every == 0 or state.step == options.steps:
                save(checkpoints, state, run)
            write_whole(folder / "progress", json.dumps({"step": state.step}))
        time.sleep(max(0.0, options.step_seconds - (time.monotonic() - began)))
    if first:
        final = {"step": state.step, "weights": state.weights}
        write_whole(folder / "final.json", signed(final))
        log(f"finished at step={state.step} sha256={digest(final)}")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="A small data-parallel training job.")
    parser.add_argument("--run", type=Path, required=True, help="folder of this run, shared")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-seconds", type=float, default=0.05, help="how long a step lasts")
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--raise-at", type=int, metavar="STEP", help="fail there, as a bug would")
    parser.add_argument("--no-gpu-check", dest="gpu_check", action="store_false")
    return parser.parse_args()


def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write a traceback in one piece: ranks that fail together share one log."""
    sys.stderr.write("".join(traceback.format_exception(kind, error, trace)))


if __name__ == "__main__":
    sys.excepthook = tell
    train(arguments(), Place.from_slurm())
