"""How long a person's drain could be overwritten by ours: from our last look to our command's end.

    ./scripts/bench window --runs 20

Slurm offers no compare-and-set for a node's reason. On a private cluster each run lets an idle node
report a broken GPU to an aggregator that may drain. Seconds run from the last look at the nodes to
the end of the command: from the look's beginning, the first moment at which slurmctld can have
answered, and from its end, the last one. What happens between is not seen; a person's drain before
it survives (tests/test_drained_by_two_on_slurm.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from recovery.aggregator import Aggregator
from recovery.demo.cluster import Cluster
from recovery.demo.scenes import XID_79
from recovery.slurm.base import Node
from recovery.slurm.cli import CliScheduler
from slurm_hooks.config import load
from slurm_hooks.record import Evidence, FaultRecord, Finding, new_id, utc
from slurm_hooks.spool import drop

CONFIG = """
mode = "act"
[guard]
max_drained_per_hour = 1000
max_drained_share = 1.0
[controller]
snapshot = 3600
[fleet]
nodes = 1000
[[grant]]
actions = ["drain"]
accept_untested = "a benchmark"
"""

CODES = (
    "gpu.fell_off_bus",
    "gpu.lost",
    "gpu.ecc_uncontained",
    "gpu.ecc_double_bit",
    "gpu.gsp_timeout",
)
"""A fault of a node is told once a day: each run needs another."""

NODES = 4
LIMIT_SECONDS = 60.0


class Timed(CliScheduler):
    """Slurm's commands, with the times of the last look at all nodes and of the last drain."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(environment=environment, timeout_seconds=20)
        self.asked = self.answered = self.done = 0.0

    def nodes(self, names: Collection[str] | None = None) -> Mapping[str, Node]:
        began = time.monotonic()
        found = super().nodes(names)
        if names is None and not self.done:
            self.asked, self.answered = began, time.monotonic()
        return found

    def drain(self, nodes: Collection[str], reason: str) -> None:
        super().drain(nodes, reason)
        self.done = time.monotonic()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20, help="how many drains, at most 20")
    runs = min(parser.parse_args().runs, NODES * len(CODES))
    longest: list[float] = []
    shortest: list[float] = []
    with Cluster(nodes=NODES, gpus=8, config=CONFIG, health_check_seconds=0) as cluster:
        slurm = Timed(cluster.environment)
        aggregator = Aggregator(load(cluster.config_path), slurm)
        aggregator.pass_once()
        for number in range(runs):
            node = cluster.node_names[number % len(cluster.node_names)]
            slurm.done = 0.0
            report(cluster.spool, node, CODES[number // NODES])
            deadline = time.monotonic() + LIMIT_SECONDS
            while not slurm.done:
                aggregator.pass_once()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{node} was not drained within {LIMIT_SECONDS:g} s")
            longest.append(slurm.done - slurm.asked)
            shortest.append(slurm.done - slurm.answered)
            aggregator.pass_once()
            cluster.run("scontrol", "update", f"nodename={node}", "state=resume")
        aggregator.close()
    for name, seconds in (("from the look's beginning", longest), ("from its end", shortest)):
        median, most = statistics.median(seconds) * 1e3, max(seconds) * 1e3
        print(f"{name:<26} median {median:6.0f} ms, longest of {len(seconds)} {most:6.0f} ms")
    return 0


def report(spool: Path, node: str, code: str) -> None:
    """Leave a record of the idle ``node`` in the spool that tells of a broken GPU."""
    evidence = Evidence("kernel_log", XID_79, utc(), new_id())
    lost = Finding(code, "fatal", "GPU 0 is gone", gpu=0, evidence=(evidence,))
    boot = "01234567-89ab-cdef-0123-456789abcdef"
    record = FaultRecord(new_id(), "private", node, boot, utc(), "health_check", None, (lost,))
    drop(spool, record.id, json.dumps(record.to_dict()).encode())


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
