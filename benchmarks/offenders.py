"""Are bad nodes found, and good ones left alone? A fleet in which it is known which are bad.

    ./scripts/bench offenders [--seed N] [--nodes N] [--days N]

Simulates jobs of very different sizes on nodes of which a few are bad: they break the jobs that run
on them many times as often, and report nothing. Users' programs fail as well, some in a loop. No
failure says whose fault it was. Then compares who is blamed: by ``recovery.offenders``, and by a
plain count of the failed jobs of each node, above the mean by three standard deviations or down to
where it has found as many.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from recovery.offenders import TYPICAL_RATE, Mark, Tally, threshold
from slurm_hooks.record import utc

START = 1.8e9
HOUR = 3600.0
DAY = 24 * HOUR

HALF_LIFE = 30 * DAY
CHANCE = 0.01

POOLS = ((0.75, (1, 1, 1, 1, 2, 2, 4, 8)), (0.25, (16, 32, 64)))
"""Partitions as shares of the fleet, and their jobs' sizes: some nodes only know large ones."""
BAD_RATIO = 100.0
"""A bad node breaks a job every 37 hours."""

USERS = 40
BUGGY_SHARE = 0.02
"""Of jobs that fail by themselves without saying why; most say it, and do not count."""


@dataclass(frozen=True)
class Job:
    """One simulated job; ``end`` in seconds after the start, ``failed`` for whatever reason."""

    uid: int
    nodes: tuple[str, ...]
    begin: float
    end: float
    failed: bool


@dataclass(frozen=True)
class Score:
    """Who was blamed, against who is bad."""

    precision: float
    recall: float
    blamed: int


def simulate(seed: int, node_count: int, days: int, bad_count: int) -> tuple[list[Job], set[str]]:
    """Return the jobs of a fleet in the order of their ends, and the nodes that are bad."""
    rng = random.Random(seed)
    names = [f"n{number}" for number in range(node_count)]
    bad = set(rng.sample(names, bad_count))
    jobs: list[Job] = []
    for share, sizes in POOLS:
        count = round(share * node_count)
        pool, names = names[:count], names[count:]
        jobs += _jobs(rng, pool, sizes, bad, days * DAY)
    return sorted(jobs, key=lambda job: job.end), bad


def _jobs(
    rng: random.Random, names: list[str], sizes: Sequence[int], bad: Set[str], until: float
) -> Iterator[Job]:
    """Fill a partition job after job."""
    free_at = dict.fromkeys(names, 0.0)
    # Some partitions are busier than others: a node's hours in jobs differ.
    idle = {name: rng.expovariate(1 / (rng.choice((0.5, 2.0, 8.0)) * HOUR)) for name in names}
    while True:
        size = min(rng.choice(sizes), len(names))
        earliest = sorted(names, key=lambda name: free_at[name] + idle[name] * rng.random())[:size]
        begin = max(free_at[name] for name in earliest)
        if begin > until:
            return
        uid, end = rng.randrange(USERS), begin + rng.uniform(0.2, 24) * HOUR
        buggy = rng.random() < BUGGY_SHARE
        rate = sum(TYPICAL_RATE * (BAD_RATIO if name in bad else 1) for name in earliest)
        broken = begin + rng.expovariate(rate) * HOUR
        # A program's own mistake shows soon, and some users try again and again on one node.
        loops = rng.randrange(1, 12) if buggy and size == 1 else 1
        for _ in range(loops):
            own = begin + rng.uniform(0.01, 0.5) * HOUR if buggy else end
            stop = min(end, broken, own)
            yield Job(uid, tuple(earliest), begin, stop, stop < end)
            begin = stop + 60
        for name in earliest:
            free_at[name] = stop + 60


def by_evidence(jobs: list[Job], node_count: int) -> set[str]:
    """Return the nodes that are ever blamed, judged after each failure as the aggregator does."""
    tally, blamed = Tally(HALF_LIFE), set[str]()
    limit = threshold(node_count, CHANCE)
    for job in jobs:
        now = START + job.end
        tally.ran(dict.fromkeys(job.nodes, job.end - job.begin), now)
        if not job.failed:
            continue
        for node in job.nodes:
            tally.add(Mark(node, "failed", utc(now), len(job.nodes), job.uid))
        blamed |= {one.node for one in tally.suspicions(now, limit)}
    return blamed


def by_count(jobs: list[Job]) -> set[str]:
    """Return the nodes with more failed jobs than the mean by three standard deviations."""
    failures = Counter(node for job in jobs if job.failed for node in job.nodes)
    everyone = Counter(node for job in jobs for node in job.nodes)
    counts = [failures[node] for node in everyone]
    limit = statistics.mean(counts) + 3 * statistics.pstdev(counts)
    return {node for node in everyone if failures[node] > limit}


def by_count_until(jobs: list[Job], bad: Set[str], recall: float) -> set[str]:
    """Return the nodes with most failed jobs, as many as it takes to find that share of the bad."""
    failures = Counter(node for job in jobs if job.failed for node in job.nodes)
    blamed: set[str] = set()
    for node, _ in failures.most_common():
        if len(blamed & bad) >= recall * len(bad):
            break
        blamed.add(node)
    return blamed


def score(blamed: Set[str], bad: Set[str]) -> Score:
    """Return precision and recall, each 1 where there is nobody to get wrong."""
    right = len(blamed & bad)
    return Score(
        right / len(blamed) if blamed else 1.0, right / len(bad) if bad else 1.0, len(blamed)
    )


def measure(seed: int, nodes: int, days: int, bad: int) -> dict[str, Score]:
    """Return the scores of each way on one fleet."""
    jobs, truly = simulate(seed, nodes, days, bad)
    evidence = score(by_evidence(jobs, nodes), truly)
    return {
        "evidence": evidence,
        "count": score(by_count(jobs), truly),
        "count, to the same recall": score(by_count_until(jobs, truly, evidence.recall), truly),
    }


def main() -> None:
    """Print precision and recall of both ways, over several fleets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fleets", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=256)
    parser.add_argument("--days", type=int, default=60)
    parser.add_argument("--bad", type=int, default=5)
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.fleets)
    runs = [measure(seed, given.nodes, given.days, given.bad) for seed in seeds]
    for way in runs[0]:
        precision = statistics.mean(run[way].precision for run in runs)
        recall = statistics.mean(run[way].recall for run in runs)
        line = {"way": way, "precision": round(precision, 3), "recall": round(recall, 3)}
        print(json.dumps({**line, "blamed": sum(run[way].blamed for run in runs)}))


if __name__ == "__main__":
    main()
