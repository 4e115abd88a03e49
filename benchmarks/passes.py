"""What one pass of the aggregator costs, idle and busy, as the cluster and the archive grow.

    .venv/bin/python benchmarks/passes.py [RECORDS]

For 100, 1,000 and 10,000 nodes, each in a process of its own: an index of RECORDS (100,000) old
records, then passes with nothing new, then passes that each take in a fault of one idle node and
decide on it, in monitor mode. Slurm is made up here: nothing of its own time is in the figures,
only what it is asked for. Prints milliseconds a pass (median of twenty), the ratio to the first
line, scheduler calls a pass, and the process's memory. Then, in the smallest of them, seconds from
a record's arrival in the spool to the first scheduler command that follows from it, in act mode:
that of a drain.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from recovery.aggregator import Aggregator
from recovery.slurm.base import Job, Node
from recovery.store import Store
from slurm_hooks.config import Config, Controller, Fleet, Grant, Guard, Spool
from slurm_hooks.record import Evidence, FaultRecord, Finding, new_id, utc
from slurm_hooks.spool import create

BOOT_ID = "01234567-89ab-cdef-0123-456789abcdef"

SIZES = (100, 1_000, 10_000)
ROUNDS = 20


class MadeUp:
    """A Scheduler of idle nodes, without a job, that counts what it is asked."""

    def __init__(self, count: int) -> None:
        names = [f"n{number}" for number in range(count)]
        self._nodes = {name: Node(name, "IDLE", partitions=("train",)) for name in names}
        self.asked: Counter[str] = Counter()
        self.drained: dict[str, float] = {}

    def cluster(self) -> str:
        return "c1"

    def jobs(self, ids: Collection[int] | None = None) -> Mapping[int, Job]:
        self.asked["all jobs" if ids is None else "jobs by name"] += 1
        return {}

    def nodes(self, names: Collection[str] | None = None) -> Mapping[str, Node]:
        self.asked["all nodes" if names is None else "nodes by name"] += 1
        wanted = self._nodes if names is None else names
        return {name: self._nodes[name] for name in wanted if name in self._nodes}

    def drain(self, nodes: Collection[str], reason: str) -> None:
        for name in nodes:
            self.drained[name] = time.monotonic()
            drained = frozenset({"DRAIN"})
            self._nodes[name] = replace(self._nodes[name], flags=drained, reason=reason)

    def __getattr__(self, name: str) -> Callable[..., None]:
        raise AssertionError(f"no pass here asks for {name}")


@dataclass(frozen=True)
class Cost:
    """Medians of seconds a pass, scheduler calls of one busy pass, and memory in MiB."""

    idle: float
    busy: float
    calls: dict[str, int]
    memory: float


def record(node: str, faulty: bool) -> FaultRecord:
    """What a health check reports."""
    evidence = Evidence("kernel_log", "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, fell off", utc())
    lost = Finding("gpu.fell_off_bus", "fatal", "GPU 3 is gone", gpu=3, evidence=(evidence,))
    checked = Finding("host.uptime", "info", "up for a day")
    findings = (lost,) if faulty else (checked,)
    return FaultRecord(new_id(), "c1", node, BOOT_ID, utc(), "health_check", None, findings)


def drop(spool: Path, one: FaultRecord) -> None:
    """Put a record into the spool, as a node does."""
    path = spool / "incoming" / f".{one.id}"
    path.write_text(json.dumps(one.to_dict()))
    path.chmod(0o644)
    path.rename(spool / "incoming" / f"{one.id}.json")


def configuration(folder: Path, mode: str) -> Config:
    """One with a spool and a state folder below ``folder``."""
    create(folder / "spool")
    (folder / "state").mkdir(exist_ok=True)
    grant = Grant(("drain",), accept_untested="a benchmark")
    return Config(
        mode=mode,  # type: ignore[arg-type]
        spool=Spool(path=folder / "spool", trusted_uids=(os.geteuid(),)),
        controller=Controller(state=folder / "state", snapshot=3600),
        guard=Guard(max_drained_nodes=10_000, max_drained_share=1.0, max_drained_per_hour=10_000),
        # Each fault is to be decided on by itself, however many come within minutes.
        fleet=Fleet(nodes=10_000, jobs=10_000),
        grant=(grant,),
    )


def fill(state: Path, count: int, nodes: int) -> None:
    """An index of ``count`` records of the last days, none of the last hours."""
    store, now = Store(state / "index.sqlite"), time.time()
    for start in range(0, count, 1000):
        made = [
            replace(record(f"n{number % nodes}", False), time=utc(now - 86_400 - number))
            for number in range(start, min(start + 1000, count))
        ]
        store.add_records(made)
    store.close()


def seconds(work: Callable[[], object]) -> float:
    """Wall time of ``work``."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def costs(nodes: int, count: int) -> Cost:
    """Measure in this process."""
    with tempfile.TemporaryDirectory() as name:
        config = configuration(Path(name), "monitor")
        fill(config.controller.state, count, nodes)
        slurm = MadeUp(nodes)
        aggregator = Aggregator(config, slurm)  # type: ignore[arg-type]
        aggregator.pass_once(10.0)
        aggregator.pass_once(10.0)
        idle = [seconds(lambda: aggregator.pass_once(10.0)) for _ in range(ROUNDS)]
        busy = []
        for number in range(ROUNDS):
            drop(config.spool.path, record(f"n{number}", True))
            slurm.asked.clear()
            busy.append(seconds(functools.partial(decides, aggregator, f"n{number}")))
        aggregator.close()
        used = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
        medians = statistics.median(idle), statistics.median(busy)
        return Cost(*medians, dict(slurm.asked), int(used) / 1024)


def decides(aggregator: Aggregator, node: str) -> None:
    """Make one pass, which must take in the record of ``node`` and decide on it.

    Raises:
        RuntimeError: it did not, and so a figure of it would mean nothing.
    """
    done = aggregator.pass_once(10.0)
    named = [answer.node for one in done.decided for answer in one.nodes]
    if (done.accepted, done.rejected, named) != (1, 0, [node]):
        raise RuntimeError(f"a busy pass on {node} did {done}: see rejected/*.why in its spool")


def to_command(count: int) -> list[float]:
    """Seconds from a record in the spool to the drain of its node, one after the other."""
    with tempfile.TemporaryDirectory() as name:
        config = configuration(Path(name), "act")
        slurm = MadeUp(100)
        aggregator = Aggregator(config, slurm)  # type: ignore[arg-type]
        aggregator.pass_once(10.0)
        taken = []
        for number in range(count):
            node = f"n{number}"
            arrived = time.monotonic()
            drop(config.spool.path, record(node, True))
            # It may arrive at any moment of a pause of the service: a new phase each time.
            time.sleep(config.controller.poll * (number % 10) / 10)
            while node not in slurm.drained:
                if aggregator.pass_once().rejected:
                    raise RuntimeError(f"the record of {node} was rejected")
            taken.append(slurm.drained[node] - arrived)
        aggregator.close()
        return sorted(taken)


def main() -> None:
    """Run and print."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    print(f"{count} archived records; milliseconds a pass, median of {ROUNDS}")
    print("  nodes      idle            busy          memory   asked in a busy pass")
    first: Cost | None = None
    for size in SIZES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            cost = pool.apply(costs, (size, count))
        first = first or cost
        asked = ", ".join(f"{number} {what}" for what, number in cost.calls.items())
        print(
            f"  {size:6}  {cost.idle * 1e3:6.2f} {cost.idle / first.idle:5.2f} x"
            f"  {cost.busy * 1e3:6.2f} {cost.busy / first.busy:5.2f} x"
            f"  {cost.memory:5.0f} MiB   {asked}"
        )
    taken = to_command(50)
    p50, p99 = taken[len(taken) // 2], taken[int(len(taken) * 0.99)]
    print(f"from a record's arrival to the drain: p50 {p50:.3f} s, p99 {p99:.3f} s")


if __name__ == "__main__":
    main()
