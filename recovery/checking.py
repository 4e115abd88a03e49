"""Deep checks: who is asked, what became of it, and the verdict in the node's reason.

Owns the controller's side. A node is asked by a file in the spool (``slurm_hooks.check_request``)
because a person ran `recovery check`, because the reason it was drained with begins
``recovery: check``, or because it came back from a reboot. Its answer is a finding of a health
check's record. Nothing is remembered here: a request that stands, the records in the index and the
node's own reason say what is left to do, so that a crash repeats a reading and nothing else.

A verdict is written only into a reason that is ours, in act mode, under a grant in force for
``drain`` or ``return``. Who returns the node is ``returning``'s.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from recovery import guard, node_reasons
from recovery.slurm.base import CommandRefused, Node, Scheduler
from recovery.store import Store
from slurm_hooks import bounds, check_request
from slurm_hooks.check_request import Request, Unusable
from slurm_hooks.config import Config
from slurm_hooks.deadline import run_one
from slurm_hooks.record import FaultRecord, new_id, seconds_of, utc

log = logging.getLogger("recovery.checking")

STANDS_SECONDS = 86_400.0
"""How long a request waits for its node to be drained and idle before it is taken back."""

SPOOL_SECONDS = 2.0
REQUESTS_LIMIT = 10_000

ASKING = re.compile(rf"{guard.OUR_REASON} check\b[ :]*(.*)", re.DOTALL)
"""A reason that asks for a check, and the words that follow."""

REBOOTED = ("Node unexpectedly rebooted", node_reasons.COMPLETE)
"""Slurm's own words for a node that it keeps out after a reboot (slurmctld, node_mgr.c)."""

_REASON_LIMIT = 400
_ASKED = f"{guard.OUR_REASON} asked to check"
_SOURCE = "check"
_DAY_SECONDS = 86_400.0

Verdict = Literal["passed", "failed", "refused"]


@dataclass(frozen=True)
class Answer:
    """What a node answered to a request: ``refused`` means not yet, for the reason in ``why``."""

    node: str
    request: str
    verdict: Verdict
    why: str
    kind: str
    time: str
    boot_id: str
    record: str


def answers_of(record: FaultRecord) -> tuple[Answer, ...]:
    """Return the answers that a health check's record holds, mostly none."""
    verdicts: Mapping[str, Verdict] = {
        "check.passed": "passed",
        "check.failed": "failed",
        "check.refused": "refused",
    }
    found = []
    for finding in record.findings:
        verdict = verdicts.get(finding.code)
        told = [item for item in finding.evidence if item.source == _SOURCE and item.key]
        if verdict is None or not told:
            continue
        why = finding.summary.partition(": ")[2]
        kind, key = told[0].text.partition(":")[0], str(told[0].key)
        found.append(
            Answer(record.node, key, verdict, why, kind, record.time, record.boot_id, record.id)
        )
    return tuple(found)


def answers(store: Store, since: str, until: str, node: str | None = None) -> tuple[Answer, ...]:
    """Return all answers with since <= time < until, by time; of one node, or of all."""
    records = (
        store.hook_records("health_check", since, until)
        if node is None
        else store.records((node,), since, until)
    )
    return tuple(answer for record in records for answer in answers_of(record))


def latest(store: Store, node: str, since: str, until: str) -> Answer | None:
    """Return the last verdict on a node that came at ``since`` or later; None for none."""
    found = [a for a in answers(store, since, until, node) if a.verdict != "refused"]
    return found[-1] if found else None


def ask(spool: Path, nodes: Iterable[str], kind: str, by: str, why: str) -> tuple[Request, ...]:
    """Put a request for each of ``nodes`` into the spool and return them.

    Raises:
        ValueError: a name that no node can have.
        SpoolError: the spool takes none.
    """
    requests = tuple(
        Request(new_id(), node, kind, utc(), _short(by), _short(why)) for node in nodes
    )
    for request in requests:
        if bounds.node_name(request.node) != request.node:
            raise ValueError(f"{request.node!r} is no node's name")
    for request in requests:
        check_request.write(spool, request)
    return requests


def standing(spool: Path, trusted: Iterable[int]) -> tuple[Request, ...] | None:
    """Return the requests that lie in the spool; None where it does not answer."""
    uids = frozenset(trusted)

    def read() -> bytes:
        found = []
        names = sorted(path.name for path in (spool / check_request.FOLDER).iterdir())
        for name in [name for name in names if name[:1] != "."][:REQUESTS_LIMIT]:
            try:
                request = check_request.read(spool, name, uids)
            except Unusable as error:
                log.warning("%s", error)
                continue
            found += [asdict(request)] if request else []
        return json.dumps(found).encode()

    outcome = run_one(read, SPOOL_SECONDS)
    if outcome.status != "ok":
        return None
    return tuple(Request(**document) for document in json.loads(outcome.output))


def reason_with(standing_reason: str, answer: Answer) -> str | None:
    """Return a node's reason with the verdict in it; None where the reason is somebody's.

    What stands before it stays: the decision that drained the node, what an admin asked for, or
    Slurm's own words on a reboot for which nobody has given a reason.
    """
    words = node_reasons.unchecked(standing_reason)
    if node_reasons.is_rebooted_by_nobody(words):
        words = f"{_ASKED} {words}"
    if not guard.is_ours(words):
        return None
    asking = ASKING.fullmatch(words)
    if asking:
        words = f"{_ASKED} {asking[1]}".rstrip()
    why = f", {answer.why}" if answer.verdict == "failed" else ""
    verdict = f"; checked {answer.time[:16]}Z: {answer.verdict}{why}"[: _REASON_LIMIT // 2]
    return words[: _REASON_LIMIT - len(verdict)] + verdict


class Checking:
    """Asks, waits and writes, for one aggregator."""

    def __init__(self, config: Config, scheduler: Scheduler, store: Store) -> None:
        self._config, self._scheduler, self._store = config, scheduler, store
        self.answered = True
        """Whether a record has come since the last look that may answer a request."""

    def note(self, record: FaultRecord) -> None:
        """Take notice of a new record."""
        self.answered = self.answered or bool(answers_of(record))

    def look(
        self, nodes: Mapping[str, Node], standings: Sequence[guard.Standing], now: float
    ) -> None:
        """Ask the nodes that are to be checked, and bring the answered requests to their end.

        ``nodes`` is a fresh look at all of them, ``standings`` say which grants are in force,
        ``now`` is in seconds since the epoch.

        Raises:
            SchedulerUnavailable: Slurm did not answer; the next call goes on from here.
        """
        spool = self._config.spool
        requests = standing(spool.path, {0, os.geteuid(), *spool.trusted_uids})
        if requests is None:
            return
        self.answered = False
        for request in requests:
            self._follow(request, standings, now)
        waiting = {request.node for request in requests}
        for node in nodes.values():
            kind = _why_ask(node)
            if not kind or node.name in waiting or self._is_checked(node, now):
                continue
            asking = ASKING.fullmatch(node.reason)
            why = asking[1] if asking else node.reason
            task = functools.partial(_asked, spool.path, node.name, kind, why)
            outcome = run_one(task, SPOOL_SECONDS)
            log.info("%s is asked for a deep check (%s): %s", node.name, kind, outcome.status)

    def _follow(self, request: Request, standings: Sequence[guard.Standing], now: float) -> None:
        """Write the verdict that a request has led to, and take the request out of the spool."""
        since, until = request.time, utc(now + _DAY_SECONDS)
        found = answers(self._store, since, until, request.node)
        mine = [a for a in found if a.request == request.id and a.verdict != "refused"]
        if mine:
            self._write(mine[-1], standings)
            log.info("%s: deep check %s: %s", request.node, mine[-1].verdict, mine[-1].why)
        elif now - seconds_of(request.time) > STANDS_SECONDS:
            why = found[-1].why if found else "no health check has answered"
            log.warning("%s: deep check taken back after a day: %s", request.node, why)
        else:
            return
        path = self._config.spool.path / check_request.FOLDER / request.node
        run_one(lambda: _remove(path, request), SPOOL_SECONDS)

    def _write(self, answer: Answer, standings: Sequence[guard.Standing]) -> None:
        """Put the verdict into the node's reason, where that is ours and it may be done."""
        node = self._scheduler.nodes((answer.node,)).get(answer.node)
        if node is None or not self._may_write(node, standings):
            return
        if node_reasons.is_rebooting(node) or answer.time <= utc(float(node.boot_time) + 1):
            return  # it is asked again once it is back
        reason = reason_with(node.reason, answer)
        if reason is None or reason == node.reason:
            return
        try:
            self._scheduler.set_reason(node.name, reason)
        except CommandRefused as refused:
            log.warning("%s: Slurm refused the verdict: %s", node.name, refused)

    def _may_write(self, node: Node, standings: Sequence[guard.Standing]) -> bool:
        if self._config.mode != "act" or not (node.drained or node.state == "DOWN"):
            return False
        return any(
            one.in_force
            and {"drain", "return"} & set(one.grant.actions)
            and (not one.grant.partitions or set(one.grant.partitions) & set(node.partitions))
            for one in standings
        )

    def _is_checked(self, node: Node, now: float) -> bool:
        """Whether a verdict has come since the node was taken out, and since it last booted.

        Slurm cuts its times to the second: what came within that second may have come before.
        """
        since = float(max(node.reason_time, node.boot_time)) + 1
        return latest(self._store, node.name, utc(since), utc(now + _DAY_SECONDS)) is not None


def _why_ask(node: Node) -> str:
    """The kind of request that a node's state calls for; empty for none."""
    if not node.drained and node.state != "DOWN":
        return ""
    if "NOT_RESPONDING" in node.flags or node_reasons.is_rebooting(node):
        return ""
    if ASKING.fullmatch(node.reason):
        return "reason"
    if guard.is_ours(node.reason):  # a verdict in it is younger than the boot that asked for it
        return "reboot" if node.boot_time > node.reason_time > 0 else ""
    return "reboot" if any(words in node.reason for words in REBOOTED) else ""


def _asked(spool: Path, node: str, kind: str, why: str) -> bytes:
    ask(spool, (node,), kind, "the aggregator", why)
    return b""


def _remove(path: Path, request: Request) -> bytes:
    """Remove a request, unless a newer one has taken its place."""
    content = json.loads(path.read_bytes())
    if content.get("id") == request.id:
        path.unlink()
    return b""


def _short(text: str) -> str:
    shown = "".join(one if one.isprintable() else " " for one in text)
    return " ".join(shown.split())[: check_request.TEXT_LIMIT]
