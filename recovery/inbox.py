"""The inbox: from the spool's ``incoming`` to archive and index, or to ``rejected`` with a reason.

    inbox = Inbox(config.spool.path, config.spool)
    ingested = inbox.ingest(store)
    ingested.accepted, ingested.rejected, ingested.problems

Owns the order of things. A record goes to the archive (on disk), then into the index together
with what the index now covers of the archive (one transaction), and only then out of
``incoming``: a crash between any two neither loses it nor counts it twice.

A pass consists of steps, which touch only the spool (``spool_reader``), and of what is done to
the index in between, which touches only the controller's own disk. ``Inbox`` does both in this
process and waits for the spool; ``inbox_child`` has the steps done by a child, and goes on
without it when it does not answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from recovery import review
from recovery.decision import Review
from recovery.spool_reader import Reply, SpoolReader
from recovery.store import Store
from recovery.store_rows import dated
from slurm_hooks.config import Spool
from slurm_hooks.record import FaultRecord, utc

PASS_LIMIT = 500
"""Most records of one pass, so that deciding gets its turn in a flood."""

RESTORE_LIMIT = 2000
"""Most records of one pass that come back from the archive."""

HEARTBEAT_SECONDS = 10.0
"""Heartbeats change every few minutes on each node; looking costs one stat for each node."""

REVIEWS_SECONDS = 1.0
"""How often the reviews are looked at."""

Steps = Generator[tuple[str, Sequence[Any]], Reply, "Ingested"]


@dataclass(frozen=True)
class Rejected:
    """A file that was moved to ``rejected``, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Ingested:
    """What one pass brought.

    ``accepted`` are records that the index did not have; ``restored`` counts those that came back
    from the archive. ``reviews`` are new ones, each with its decision's id; they stay in the spool
    until the index knows them. ``problems`` are sentences about what is wrong now. ``more`` says
    that another pass would find something at once; ``finished`` that this one has come to its end.
    """

    accepted: tuple[FaultRecord, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    reviews: tuple[tuple[str, Review], ...] = ()
    problems: tuple[str, ...] = ()
    restored: int = 0
    more: bool = False
    finished: bool = True


class Passes:
    """What is due when; ``steps`` is one pass, whoever runs its steps."""

    def __init__(self, index_days: int, reviewers: Sequence[int] = ()) -> None:
        self.index_days = index_days
        self.reviewers = tuple(reviewers)
        self._reviews_due = 0.0
        self._level = False
        self._heartbeats_due = 0.0

    def steps(self, store: Store, limit: int) -> Steps:
        """One pass: yields a step's name and arguments, is sent its reply.

        The first pass, and the one after a pass that failed, begins with the archive.
        """
        caught = Ingested()
        if not self._level:
            caught = yield from self._catching_up(store)
            if not self._level:
                return caught
        self._level = False
        ingested = yield from _taking_in(store, limit)
        problems = ingested.problems
        if time.monotonic() >= self._heartbeats_due:
            problems += yield from self._taking_heartbeats(store)
        reviews: tuple[tuple[str, Review], ...] = ()
        if self.reviewers and time.monotonic() >= self._reviews_due:
            reviews, told = yield from self._taking_reviews(store)
            problems += told
        self._level = True
        return replace(
            ingested,
            reviews=reviews,
            accepted=caught.accepted + ingested.accepted,
            problems=caught.problems + problems,
            restored=caught.restored,
        )

    def _catching_up(self, store: Store) -> Steps:
        """Take in what the archive holds and the index does not.

        A crash between archive and index leaves a little, a lost index everything. Records of a
        lost index are only counted: what they called for has been decided, the journal knows.
        """
        oldest = (datetime.now(timezone.utc) - timedelta(days=self.index_days)).strftime("%Y-%m-%d")
        tail = yield "replay", (store.archived(oldest), oldest, RESTORE_LIMIT)
        restoring = store.meta("restoring") is not None
        restored: list[FaultRecord] = []
        for received, documents in _by_arrival(tail.get("records", ())):
            fresh = store.unknown([_record(document) for document in documents])
            store.add_records(fresh, received)
            restored += [dated(record, received) for record in fresh]
        if tail.get("covered"):
            store.add_records((), archived=tail["covered"])
        more, away = tail.get("more", False), tail.get("away", False)
        self._level = not more and not away
        if restoring and self._level:
            store.forget_meta("restoring")
        accepted = () if restoring else tuple(restored)
        problems = tuple(tail.get("problems", ()))
        return Ingested(accepted, problems=problems, restored=len(restored), more=more)

    def _taking_heartbeats(
        self, store: Store
    ) -> Generator[tuple[str, Sequence[Any]], Reply, tuple[str, ...]]:
        reply = yield "heartbeats", ()
        store.put_heartbeats(reply.get("heartbeats", {}))
        if not reply.get("more"):
            self._heartbeats_due = time.monotonic() + HEARTBEAT_SECONDS
        return tuple(reply.get("problems", ()))

    def _taking_reviews(
        self, store: Store
    ) -> Generator[
        tuple[str, Sequence[Any]], Reply, tuple[tuple[tuple[str, Review], ...], tuple[str, ...]]
    ]:
        """New reviews; those that are known, and those that do not count, leave the spool."""
        reply = yield "reviews", (self.reviewers,)
        new: list[tuple[str, Review]] = []
        done: list[str] = []
        refused: list[tuple[str, str]] = []
        for item in reply.get("reviews", ()):
            made, decision = _review(item), store.decision(item["decision"])
            why = review.refusal(decision, made.uid)
            if why:
                refused.append((item["name"], why))
            elif decision and any(known.id == made.id for known in decision.reviews):
                done.append(item["name"])
            else:
                new.append((item["decision"], made))
        problems = tuple(reply.get("problems", ()))
        if done or refused:
            problems += tuple((yield "dismiss", (done, refused)).get("problems", ()))
        self._reviews_due = time.monotonic() + REVIEWS_SECONDS
        return tuple(new), problems


def _review(item: dict[str, Any]) -> Review:
    uid, time_written = item["uid"], min(item["time"], utc())
    return Review(
        item["name"].removesuffix(".json"),
        time_written,
        review.name_of(uid),
        uid,
        item["verdict"],
        item["would_have"],
        item["note"],
    )


def _taking_in(store: Store, limit: int) -> Steps:
    batch = yield "read", (limit,)
    problems = list(batch.get("problems", ()))
    found: dict[str, str] = dict(batch.get("found", ()))
    records = [_record(document) for document in found.values()]
    fresh = {f"{record.id}.json": record for record in store.unknown(records)}
    done = [name for name in found if name not in fresh]
    accepted: tuple[FaultRecord, ...] = ()
    if fresh:
        received = utc()
        kept = yield "archive", (list(fresh), received)
        problems += kept.get("problems", ())
        if kept.get("covered"):
            documents = [found[name] for name in fresh]
            store.add_records(list(fresh.values()), received, kept["covered"], documents)
            accepted = tuple(dated(record, received) for record in fresh.values())
            problems += _wrong_clocks(fresh.values(), received)
            done += fresh
    if done:
        problems += (yield "remove", (done,)).get("problems", ())
    rejected = tuple(Rejected(name, reason) for name, reason in batch.get("rejected", ()))
    # Where nothing moves, looking again at once would find the same.
    more = batch.get("more", False) and bool(done or rejected)
    return Ingested(accepted, rejected, problems=tuple(problems), more=more)


def _wrong_clocks(records: Iterable[FaultRecord], received: str) -> list[str]:
    nodes = sorted({r.node for r in records if dated(r, received).time != r.time})
    if not nodes:
        return []
    named = ", ".join(nodes[:5]) + (f" and {len(nodes) - 5} more" if len(nodes) > 5 else "")
    return [f"clocks are wrong on {named}: their records are dated by when they arrived"]


class Inbox:
    """The inbox in this process, for one pass by hand, a replay, a test."""

    def __init__(
        self, spool: Path, settings: Spool, index_days: int = 90, reviewers: Sequence[int] = ()
    ) -> None:
        self._reader = SpoolReader(spool, settings)
        self._passes = Passes(index_days, reviewers)

    def ingest(self, store: Store, limit: int = PASS_LIMIT) -> Ingested:
        """Make one pass, and wait for the spool as long as it takes.

        Raises:
            StoreError: the index does not take records; they stay where they are.
        """
        steps = self._passes.steps(store, limit)
        try:
            request = next(steps)
            while True:
                request = steps.send(self._reader.step(*request))
        except StopIteration as end:
            ingested: Ingested = end.value
            return ingested


def _record(document: str) -> FaultRecord:
    return FaultRecord.from_dict(json.loads(document))


def _by_arrival(records: Sequence[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    batches: dict[str, list[str]] = {}
    for received, document in records:
        batches.setdefault(received, []).append(document)
    yield from batches.items()
