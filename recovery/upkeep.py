"""What follows from the fleet's history and not from one new record: returns, repeat offenders.

Keeps the tally of offenders, fed with what is new only; a look at the fleet costs by the nodes that
have something against them. What is judged is ``returning``'s and ``offenders``', both pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from recovery import checking, guard, inventory, offenders, returning
from recovery.decision import Cause, Decision, Implicated
from recovery.incident import Incident
from recovery.offenders import Suspicion
from recovery.slurm.base import Job, Node
from recovery.store import Store
from slurm_hooks.config import Config
from slurm_hooks.record import utc

OFFENDER_CLASS = "node.repeat_offender"

KEEP_SECONDS = 600.0
"""How often the nodes' hours are kept; what a crash or a lost index takes of them is little, and
without any all nodes are taken to have had as many."""

SCORES_SECONDS = 60.0
"""How often the nodes' scores are kept, for `recovery nodes`: a command counts no fleet's marks."""

_SCORES_LIMIT = 500

_DAY_SECONDS = 86400.0
_HOURS = "node_hours"
_DRAINS_LIMIT = 20


class Upkeep:
    """The slow part of deciding; ``clock`` returns seconds since the epoch."""

    def __init__(self, config: Config, store: Store, clock: Callable[[], float]) -> None:
        self._config, self._store, self._clock = config, store, clock
        self._limits = config.offenders
        self._tally = offenders.Tally(self._limits.half_life_days * _DAY_SECONDS)
        self._place = 0
        self._fleet = 1
        self._looked = 0.0
        self._scored = 0.0
        self._kept = clock()
        kept = json.loads(store.meta(_HOURS) or "{}")
        if kept:
            seconds = {node: hours * 3600 for node, hours in kept["hours"].items()}
            self._tally.ran(seconds, kept["time"])

    def note_jobs(self, jobs: Mapping[int, Job], now: float) -> None:
        """Take in which nodes have been in jobs since the last full look at the scheduler.

        After a longer silence nobody knows: nothing is taken in then.
        """
        passed, self._looked = now - self._looked, now
        running = {node for job in jobs.values() if job.state == "RUNNING" for node in job.nodes}
        self._fleet = max(self._fleet, len(running))
        if 0 < passed <= 3 * self._config.controller.snapshot + 60:
            self._tally.ran(dict.fromkeys(running, passed), now)
        if now - self._kept >= KEEP_SECONDS:
            self._kept = now
            hours = {node: round(one, 3) for node, one in self._tally.hours(now).items()}
            self._store.put_meta(_HOURS, json.dumps({"time": now, "hours": hours}))
        if not 0 <= now - self._scored < SCORES_SECONDS:
            self._scored = now
            self._store.put_meta(offenders.SCORES, json.dumps(self._scores(now)))

    def note_nodes(self, nodes: Mapping[str, Node]) -> None:
        """Take in which nodes there are: among many, chance blames one more easily."""
        self._fleet = max(self._fleet, len(nodes))
        inventory.keep(self._store, nodes)

    def suspects(self) -> dict[str, str]:
        """Return the nodes that restarted jobs avoid, each with its history, gravest first.

        One user's failures exclude no node, however many: it takes another's, or its own word.
        """
        limit = offenders.threshold(self._fleet, self._limits.exclude_chance)
        grave = [one for one in self._suspicions(limit) if one.own or one.users >= 2]
        return {one.node: one.history for one in grave[: self._limits.max_excluded]}

    def offenders(self, nodes: Mapping[str, Node]) -> list[Incident]:
        """Return an incident for each node in service that is to be drained for its history.

        It takes three users' failures, or a fault that the node has reported itself.
        """
        limit = offenders.threshold(self._fleet, self._limits.drain_chance)
        return [
            self._incident(one, nodes[one.node])
            for one in self._suspicions(limit)
            if (one.own or one.users >= 3)
            and one.node in nodes
            and not nodes[one.node].drained
            and not self._is_told(one.node)
        ]

    def due(self) -> bool:
        """Whether any node may have to be drained for its history: else nodes need no look."""
        limit = offenders.threshold(self._fleet, self._limits.drain_chance)
        return any(not self._is_told(one.node) for one in self._suspicions(limit))

    def returns(self, nodes: Mapping[str, Node], mode: str) -> list[Decision]:
        """Return a decision for each node that we drained and that is mended, or that passed."""
        ours = {
            name: node
            for name, node in nodes.items()
            if (node.drained or node.state == "DOWN") and guard.is_ours(node.reason)
        }
        if not ours:
            return []
        beats, now = self._store.heartbeats(ours), self._clock()
        made: list[Decision] = []
        for name, node in sorted(ours.items()):
            beat = beats.get(name)
            known = self._store.decisions(node=name, limit=_DRAINS_LIMIT)
            if returning.has_passed(node, beat) and not _has_returned(known, node):
                made.append(returning.asked(node, now, mode))
                continue
            drain = returning.drain_of(node, known)
            if drain is None or beat is None or _is_answered(known, drain):
                continue
            if self._awaits_check(node, now):
                continue
            drains = [one for one in known if one.time >= drain.time and _drains(one, name)]
            checks = self._config.policy.checks_before_return
            if not returning.obstacle(node, drains, beat, checks):
                made.append(returning.decision(node, drain, beat, now, mode))
        return made

    def _awaits_check(self, node: Node, now: float) -> bool:
        """Whether a node has booted since it was drained, and the check after it is to come."""
        if not 0 < node.reason_time < node.boot_time:
            return False
        since, until = utc(float(node.boot_time) + 1), utc(now + _DAY_SECONDS)
        return checking.latest(self._store, node.name, since, until) is None

    def _scores(self, now: float) -> dict[str, object]:
        """The nodes with anything against them, gravest first, and what it takes to act on it."""
        return {
            "time": utc(now),
            "avoided_above": offenders.threshold(self._fleet, self._limits.exclude_chance),
            "drained_above": offenders.threshold(self._fleet, self._limits.drain_chance),
            "nodes": {
                one.node: {
                    "evidence": round(one.evidence, 2),
                    "times_chance": round(one.times, 1),
                    "history": one.history,
                }
                for one in self._suspicions(0.0)[:_SCORES_LIMIT]
            },
        }

    def _suspicions(self, above: float) -> list[Suspicion]:
        now = self._clock()
        since = utc(now - offenders.FORGET_HALF_LIVES * self._limits.half_life_days * _DAY_SECONDS)
        for place, mark in self._store.marks(self._place, since):
            self._place = place
            self._tally.add(mark)
        return self._tally.suspicions(now, above)

    def _is_told(self, node: str) -> bool:
        """Whether this history has led to a decision already: it is told once in a half-life."""
        since = utc(self._clock() - self._limits.half_life_days * _DAY_SECONDS)
        known = self._store.decisions(node=node, since=since, fault_class=OFFENDER_CLASS, limit=1)
        return bool(known)

    def _incident(self, suspicion: Suspicion, node: Node) -> Incident:
        why = f"a repeat offender: {suspicion.history}"
        item = Implicated(node.name, why, "history", OFFENDER_CLASS, resolution="check_node")
        cause = Cause(OFFENDER_CLASS, "established", f"{node.name} is {why}", (item,),
                      OFFENDER_CLASS)  # fmt: skip
        return Incident(
            key=f"node/{node.name}",
            time=utc(self._clock()),
            nodes=(node.name,),
            partitions=node.partitions,
            known_cause=cause,
        )


def _drains(decision: Decision, node: str) -> bool:
    return any(answer.node == node and answer.verdict == "drain" for answer in decision.nodes)


def _has_returned(known: list[Decision], node: Node) -> bool:
    """Whether the check that this reason tells of has led to a decision already."""
    return any(
        one.rule == returning.RULE_ASKED and one.nodes[0].stands == node.reason for one in known
    )


def _is_answered(known: list[Decision], drain: Decision) -> bool:
    """Whether this drain has led to a decision to return the node already."""
    return any(one.rule == returning.RULE and one.time > drain.time for one in known)
