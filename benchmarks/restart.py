"""From a job's failure to its next attempt: `recovery run` in act mode, and a requeue by hand.

    ./scripts/bench restart --runs 5
    ./scripts/bench restart --runs 3 --queue 6
    ./scripts/bench restart --runs 5 --expedite

Each run submits a job that loses a GPU, on a private cluster: once beside an aggregator that may
act, once with a plain ``scontrol requeue`` as soon as slurmctld shows FAILED, which is the fastest
that a person could be. For the first, seconds run from the end of the failed batch script to the
first line of the next attempt, both written by the job itself. The second is made to wait by Slurm
(Reason=BeginTime); that time is read from scontrol (EligibleTime - EndTime) and not waited for, so
its figure lacks the start of the job.

With ``--queue N``, N jobs of others, of QUEUED_SECONDS each, wait for the same nodes, which are all
busy: the restart, in seconds as above, with ``controller.restart_nice`` at 0 and at RESTART_NICE.
Theirs is the higher priority, as age gives it to them and a requeue takes it from the failed job.

With ``--expedite`` (Slurm 25.11 and later), in turns: a job of ``--requeue``, which the aggregator
requeues, and one of ``--requeue=expedite``, which Slurm has requeued and holds. Seconds as above.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from recovery.demo.cluster import Cluster
from recovery.demo.scenes import ACT, XID_79

LIMIT_SECONDS = 120.0

QUEUED_SECONDS = 10
AGE_PRIORITY = 1000
EXPEDITE = "SlurmctldParameters=enable_expedited_requeue\n"
RESTART_NICE = 10_000
"""More than the others have earned by their age."""

SCRIPT = """#!/bin/bash
# The first attempt waits for its fault and fails of it, the next one says that it has begun.
if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then
    touch "$RUN/up"
    until [ -e "$RUN/fault" ]; do sleep 0.05; done
    date +%s.%N >"$RUN/failed"
    exit 1
fi
date +%s.%N >"$RUN/again"
"""


@dataclass(frozen=True)
class Measured:
    """Seconds from failure to the next attempt, one for each run."""

    aggregator: list[float]
    by_hand: list[float]

    @property
    def ratio(self) -> float:
        """How many times longer the requeue by hand takes."""
        return statistics.median(self.by_hand) / statistics.median(self.aggregator)


def main() -> int:
    """Measure, print, and exit 1 if the aggregator is not the faster one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="runs of each kind")
    parser.add_argument("--queue", type=int, default=0, help="jobs of others that wait")
    parser.add_argument("--expedite", action="store_true", help="against --requeue=expedite")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    if arguments.queue:
        return into_a_full_queue(arguments.runs, arguments.queue, arguments.json)
    if arguments.expedite:
        return expedited(arguments.runs, arguments.json)
    with Cluster(nodes=4, gpus=8, config=ACT) as cluster:
        measured = measure(cluster, arguments.runs)
    if arguments.json:
        document = {"schema": "bench-restart/v1", **vars(measured), "ratio": measured.ratio}
        print(json.dumps(document, indent=2))
    else:
        for name, seconds in vars(measured).items():
            each = " ".join(f"{one:.2f}" for one in seconds)
            print(f"{name:<12} median {statistics.median(seconds):7.2f} s   ({each})")
        print(f"{'ratio':<12} {measured.ratio:14.1f}")
    return 0 if measured.ratio > 1 else 1


def expedited(runs: int, as_json: bool) -> int:
    """Measure both kinds of submission in turns, and print."""
    seconds: dict[str, list[float]] = {"--requeue": [], "--requeue=expedite": []}
    with Cluster(nodes=4, gpus=8, config=ACT, slurm_conf_extra=EXPEDITE) as cluster:
        for number in range(runs):
            for option, found in seconds.items():
                with cluster.aggregator():
                    found.append(beside_the_aggregator(cluster, f"{number}{option}", option))
            print(f"run {number + 1} of {runs}", file=sys.stderr)
    plain, held = (statistics.median(found) for found in seconds.values())
    if as_json:
        document = {"schema": "bench-restart-expedite/v1", "seconds": seconds}
        print(json.dumps({**document, "ratio": plain / held}, indent=2))
    else:
        for option, found in seconds.items():
            each = " ".join(f"{one:.2f}" for one in found)
            print(f"{option:<18} median {statistics.median(found):6.2f} s   ({each})")
        print(f"{'ratio':<18} {plain / held:13.2f}")
    return 0


def into_a_full_queue(runs: int, queue: int, as_json: bool) -> int:
    """Measure with and without restart_nice, print, and exit 1 if it does not help."""
    seconds: dict[int, list[float]] = {0: [], RESTART_NICE: []}
    for nice, found in seconds.items():
        config = f"{ACT}\n[controller]\nrestart_nice = {nice}\n"
        with Cluster(nodes=3, gpus=8, config=config) as cluster:
            for number in range(runs):
                with cluster.aggregator():
                    found.append(behind_others(cluster, f"nice-{nice}-{number}", queue))
                print(f"nice {nice}: run {number + 1} of {runs}", file=sys.stderr)
    medians = {nice: statistics.median(found) for nice, found in seconds.items()}
    if as_json:
        document = {"schema": "bench-restart-queue/v1", "queue": queue, "seconds": seconds}
        print(json.dumps(document, indent=2))
    else:
        print(f"behind {queue} jobs of {QUEUED_SECONDS} s each, two nodes left")
        for nice, found in seconds.items():
            each = " ".join(f"{one:.2f}" for one in found)
            print(f"restart_nice {nice:<6} median {medians[nice]:7.2f} s   ({each})")
    return 0 if medians[RESTART_NICE] < medians[0] else 1


def behind_others(cluster: Cluster, name: str, queue: int) -> float:
    """Return seconds from failure to the next attempt, which others wait for a node with."""
    run = submit(cluster, name)
    others = [
        cluster.submit(
            "--gpus-per-node=8", f"--nice=-{AGE_PRIORITY}", "--wrap", f"sleep {QUEUED_SECONDS}"
        )
        for _ in range(queue + len(cluster.node_names) - 1)
    ]
    again = lose_gpu(cluster, *run) / "again"
    cluster.wait(lambda: again.exists() and again.read_text(), LIMIT_SECONDS, "it runs again")
    taken = float(again.read_text()) - float((run[1] / "failed").read_text())
    for other in others:
        cluster.run("scancel", str(other))
    cluster.wait(lambda: not cluster.run("squeue", "-h").stdout, LIMIT_SECONDS, "all is over")
    mend(cluster)
    return taken


def measure(cluster: Cluster, runs: int) -> Measured:
    """Take turns, so that a machine that grows busy slows both."""
    measured = Measured([], [])
    for number in range(runs):
        with cluster.aggregator():
            measured.aggregator.append(beside_the_aggregator(cluster, f"aggregator-{number}"))
        measured.by_hand.append(requeued_by_hand(cluster, number))
        print(f"run {number + 1} of {runs}", file=sys.stderr)
    return measured


def beside_the_aggregator(cluster: Cluster, name: str, option: str = "--requeue") -> float:
    """Return seconds from the end of the failed attempt to the first line of the next."""
    job, run = fail(cluster, name, option)
    again = run / "again"
    cluster.wait(lambda: again.exists() and again.read_text(), LIMIT_SECONDS, "it runs again")
    cluster.wait(
        lambda: cluster.job(job)["JobState"] == "COMPLETED", LIMIT_SECONDS, "the job completes"
    )
    mend(cluster)
    return float(again.read_text()) - float((run / "failed").read_text())


def requeued_by_hand(cluster: Cluster, number: int) -> float:
    """Return seconds from the end of the failed attempt until Slurm would start the next."""
    job, _ = fail(cluster, f"by-hand-{number}")
    cluster.wait(lambda: cluster.job(job)["JobState"] == "FAILED", LIMIT_SECONDS, "it has failed")
    ended = seconds_of(cluster.job(job)["EndTime"])
    cluster.run("scontrol", "requeue", str(job))
    cluster.wait(lambda: cluster.job(job)["JobState"] == "PENDING", LIMIT_SECONDS, "it is pending")
    starts = seconds_of(cluster.job(job)["EligibleTime"])
    cluster.run("scancel", str(job))
    mend(cluster)
    return starts - ended


def fail(cluster: Cluster, name: str, option: str = "--requeue") -> tuple[int, Path]:
    """Run a job until it has failed of a lost GPU; return it and its folder."""
    job, run = submit(cluster, name, option)
    lose_gpu(cluster, job, run)
    return job, run


def submit(cluster: Cluster, name: str, option: str = "--requeue") -> tuple[int, Path]:
    """Run a job until it waits for its fault; return it and its folder."""
    run = cluster.work / name
    run.mkdir()
    script = run / "job.sh"
    script.write_text(SCRIPT, encoding="utf-8")
    job = cluster.submit(
        f"--export=ALL,RUN={run}",
        option,
        "--gpus-per-node=1",
        f"--output={run}/log",
        "--open-mode=append",
        "--comment=recovery=requeue",
        script,
    )
    cluster.wait((run / "up").exists, LIMIT_SECONDS, "the job runs")
    return job, run


def lose_gpu(cluster: Cluster, job: int, run: Path) -> Path:
    """Let the job's node lose a GPU, and the job fail of it; return the job's folder."""
    node = cluster.job(job)["NodeList"]
    cluster.break_gpu(node, 0, "lost")
    cluster.log_kernel(node, XID_79)
    (run / "fault").touch()
    return run


def mend(cluster: Cluster) -> None:
    """Bring every node back, as an admin does after a repair."""
    for node in cluster.node_names:
        cluster.mend_gpus(node)
        if "DRAIN" in cluster.node(node)["State"]:
            cluster.run("scontrol", "update", f"nodename={node}", "state=resume")


def seconds_of(shown: str) -> float:
    """Return a time as scontrol prints it, in seconds since the epoch."""
    return time.mktime(time.strptime(shown, "%Y-%m-%dT%H:%M:%S"))


if __name__ == "__main__":
    sys.exit(main())
