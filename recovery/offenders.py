"""Repeat offenders: nodes that sit in failures more often than chance puts them there. Pure.

    >>> from slurm_hooks.record import utc
    >>> tally = Tally(half_life_seconds=14 * 86400)
    >>> for day in range(4):
    ...     tally.add(Mark("n3", "named", utc(1.8e9 + day * 86400), 1, None))
    >>> tally.ran({f"n{number}": 96 * 3600 for number in range(64)}, 1.8e9 + 4 * 86400)
    >>> [suspicion.node for suspicion in tally.suspicions(1.8e9 + 4 * 86400)]
    ['n3']

A failed attempt that nobody can explain may be the fault of any of its nodes. Take a node's own
faults to come at k times the fleet's rate per node-hour, r. An attempt on m nodes then fails at
(m - 1 + k) r where mr was to be expected, so that the likelihood ratio of "k times as faulty"
against "like all others" is

    sum over its failures of ln(1 + (k - 1) / m)  -  (k - 1) * r * (the node's hours in jobs)

A failure of a job on 512 nodes says next to nothing of each of them, and a node that is merely in
many large jobs is in as many hours of them: its ratio falls. What names the node itself (its own
kernel log, its gate) is a failure with m = 1, at a rate of its own kind. The ratio is averaged over
RATIOS and _HYPOTHESES. Were r known, its mean for a node like all others would be 1 at any time,
and it would ever exceed x with a chance of at most 1/x (Ville 1939): with N nodes ln(N / chance) is
the threshold at which any healthy one is blamed with that chance. The fleet's r, which bad nodes
raise, and the ageing of failures and hours, by half in ``half_life_seconds``, make it harder to
exceed. ``benchmarks/offenders.py`` shows on a known fleet what comes of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from recovery.decision import Decision
from slurm_hooks.record import seconds_of

RATIOS = (3.0, 10.0, 30.0, 100.0)
"""How much faultier than others a bad node may be; nobody knows, so each counts alike."""

ASSUMED_HOURS = 24.0
"""Hours in jobs that every node is taken to have had without a fault, lest the first fault of a new
fleet be a sensation."""

TYPICAL_RATE = 6.5e-3 / 24
"""Faults per node-hour that a fleet is taken to have until it has shown its own: 6.5 in a thousand
node-days (Kokolis et al. 2024, one cluster of 16,000 A100 GPUs; another had 2.3)."""

TYPICAL_HOURS = 2000.0
"""How many node-hours of a fleet's own weigh as much: of 100 nodes a day's, of three a month's."""

ONE_STORY_SECONDS = 86400.0
"""One user's failures on a node within a day are one story (a broken script in a loop), and so is
one kind of fault that a node reports itself."""

FORGET_HALF_LIVES = 6.0
"""After so many a mark weighs under 2 %, and is dropped."""

SCORES = "node_scores"
"""The small value of the index that keeps what speaks against which node (``upkeep``)."""

UNEXPLAINED = ("unknown", "collective", "rendezvous")
"""Classes whose failures may be any of the attempt's nodes' fault."""

_GROUPS = ("failed", "own")
_HYPOTHESES = (("failed",), ("own",), ("failed", "own"))
"""In what a bad node is worse: it may break jobs and never report a fault of its own."""

_OWN_CLASSES = ("hardware", "node", "network.fabric")
_HOUR_SECONDS = 3600.0


@dataclass(frozen=True)
class Mark:
    """One thing that speaks against a node.

    ``kind``: ``failed``, an attempt on ``size`` nodes of a job of ``uid`` failed and nobody knows
    why; ``named``, the node itself reported the fault that a decision blames; ``gated``, its prolog
    sent a job back. ``time`` as ``record.utc`` writes it.
    """

    node: str
    kind: str
    time: str
    size: int
    uid: int | None


@dataclass(frozen=True)
class Suspicion:
    """How strongly a node's history speaks against it.

    ``evidence`` is the logarithm of the likelihood ratio. ``own`` says that it has reported faults
    itself; ``users`` how many users' jobs failed on it. ``times`` is how much more speaks against
    it than chance would have brought.
    """

    node: str
    evidence: float
    own: bool
    users: int
    history: str
    times: float


def marks_of(decision: Decision) -> tuple[Mark, ...]:
    """Return what a decision says against nodes; of a program's own text, nothing.

    What has hit many at once speaks against none of them, but where a broken part is named.
    """
    time, cause = decision.time, decision.cause
    top = cause.fault_class
    if decision.gated:
        return tuple(Mark(node, "gated", time, 1, None) for node in decision.gated)
    if top.startswith(_OWN_CLASSES):
        named = {item.node for item in cause.implicated if item.source not in ("log", "history")}
        if decision.fleet:
            named &= {answer.node for answer in decision.nodes if answer.verdict == "drain"}
        return tuple(Mark(node, "named", time, 1, None) for node in sorted(named))
    if decision.fleet or decision.attempt is None or top.partition(".")[0] not in UNEXPLAINED:
        return ()
    nodes = decision.job_nodes
    return tuple(Mark(node, "failed", time, len(nodes), decision.uid) for node in nodes)


class Tally:
    """Marks and hours of a fleet, taken in one after the other.

    ``add`` and ``ran`` cost by what is added, ``suspicions`` by the nodes that have marks, however
    many of them. Sums are kept in the weights of the first mark's time: what is added later weighs
    more, and a look divides all alike.
    """

    def __init__(self, half_life_seconds: float) -> None:
        self._half_life = half_life_seconds
        self._since: float | None = None
        self._marks: dict[str, list[tuple[float, Mark]]] = {}
        self._logs: dict[str, dict[str, list[float]]] = {}
        self._shares = dict.fromkeys(_GROUPS, 0.0)
        self._hours: dict[str, float] = {}

    def add(self, mark: Mark) -> None:
        """Take in a mark, unless it tells a story that a mark of the node has told already."""
        at = seconds_of(mark.time)
        known = self._marks.setdefault(mark.node, [])
        told = any(
            abs(at - when) < ONE_STORY_SECONDS and (one.kind, one.uid) == (mark.kind, mark.uid)
            for when, one in known
        )
        if told:
            return
        oldest = at - FORGET_HALF_LIVES * self._half_life
        if known and known[0][0] < oldest:
            known[:] = [(when, one) for when, one in known if when >= oldest]
        known.append((at, mark))
        group, weight = _group(mark), self._weight(at)
        self._shares[group] += weight / mark.size
        sums = self._logs.setdefault(mark.node, {one: [0.0] * len(RATIOS) for one in _GROUPS})
        for number, ratio in enumerate(RATIOS):
            sums[group][number] += weight * math.log1p((ratio - 1) / mark.size)

    def ran(self, seconds: Mapping[str, float], now: float) -> None:
        """Take in how long nodes have been in jobs since the last call, ``now`` in seconds."""
        weight = self._weight(now) / _HOUR_SECONDS
        for node, busy in seconds.items():
            self._hours[node] = self._hours.get(node, 0.0) + busy * weight

    def hours(self, now: float) -> dict[str, float]:
        """Return each node's hours in jobs, older ones weighing less."""
        weight = self._weight(now)
        return {node: hours / weight for node, hours in self._hours.items()}

    def suspicions(self, now: float, above: float = 0.0) -> list[Suspicion]:
        """Return the nodes whose evidence lies ``above`` that, gravest first.

        ``now`` is in seconds since the epoch.
        """
        if not self._marks:
            return []
        weight = self._weight(now)
        names = self._hours.keys() | self._marks.keys()
        fleet = sum(self._hours.values()) / weight + ASSUMED_HOURS * len(names)
        rates = {
            group: (share / weight + TYPICAL_RATE * TYPICAL_HOURS) / (fleet + TYPICAL_HOURS)
            for group, share in self._shares.items()
        }
        found: list[Suspicion] = []
        for node, sums in self._logs.items():
            if sum(logs[-1] for logs in sums.values()) / weight <= above:
                continue  # not even without an hour in jobs
            hours = ASSUMED_HOURS + self._hours.get(node, 0.0) / weight
            evidence = _evidence(sums, weight, {name: rate * hours for name, rate in rates.items()})
            if evidence > above:
                expected = sum(rates.values()) * hours
                marks = [mark for _, mark in self._marks[node]]
                found.append(_suspicion(node, evidence, marks, expected))
        return sorted(found, key=lambda one: (-one.evidence, one.node))

    def _weight(self, at: float) -> float:
        if self._since is None:
            self._since = at
        return float(2.0 ** ((at - self._since) / self._half_life))


def _group(mark: Mark) -> str:
    return "failed" if mark.kind == "failed" else "own"


def _evidence(
    sums: Mapping[str, list[float]], weight: float, expected: Mapping[str, float]
) -> float:
    """The logarithm of the likelihood ratio, averaged over RATIOS and _HYPOTHESES."""
    logs = [
        sum(sums[group][number] / weight - (ratio - 1) * expected[group] for group in groups)
        for number, ratio in enumerate(RATIOS)
        for groups in _HYPOTHESES
    ]
    highest = max(logs)
    return highest + math.log(sum(math.exp(one - highest) for one in logs) / len(logs))


def _suspicion(node: str, evidence: float, marks: list[Mark], expected: float) -> Suspicion:
    own = any(mark.kind != "failed" for mark in marks)
    users = len({mark.uid for mark in marks if mark.kind == "failed"})
    times = sum(1 / mark.size for mark in marks) / expected
    return Suspicion(node, evidence, own, users, _history(marks, expected), times)


def threshold(nodes: int, chance: float) -> float:
    """Return the evidence that no healthy one of ``nodes`` exceeds, but with that ``chance``."""
    return math.log(max(1, nodes) / chance)


def _history(marks: Iterable[Mark], expected: float) -> str:
    """The history in words: ``2 unexplained failures (…) and 3 faults of its own since …``."""
    every = sorted(marks, key=lambda mark: mark.time)
    failed = [mark for mark in every if mark.kind == "failed"]
    parts = []
    if failed:
        share = sum(1 / mark.size for mark in failed)
        users = len({mark.uid for mark in failed})
        parts.append(
            f"in {len(failed)} failures that nobody explains, of {users} users,"
            f" its share {share:.2g}"
        )
    for kind, words in (("named", "{} faults of its own"), ("gated", "{} jobs sent back")):
        number = sum(mark.kind == kind for mark in every)
        if number:
            parts.append(words.format(number))
    since = every[0].time[:10]
    return f"{', '.join(parts)} since {since}, where chance makes {expected:.2g}"
