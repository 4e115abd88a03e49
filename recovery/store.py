"""The index: what the journal and the archive hold, where a question finds it at once.

    >>> import tempfile, pathlib
    >>> store = Store(pathlib.Path(tempfile.mkdtemp()) / "index.sqlite")
    >>> store.last_seq(), store.open_decisions()
    (0, [])

Owns a SQLite file that may be lost at any time: ``open_store`` brings it level with the journal
or builds it anew, and the inbox adds what the archive holds beyond it. Every lookup goes through
an SQL index, so that it costs by what it returns and not by what is stored.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from recovery import concerns, judged
from recovery.decision import Action, Decision, Outcome, Review
from recovery.index_file import IndexFile, StoreDamaged, StoreError
from recovery.journal import Journal
from slurm_hooks.record import FaultRecord, seconds_of, utc

__all__ = ["Breaker", "Requeue", "Store", "StoreDamaged", "StoreError", "open_store", "rebuild"]

log = logging.getLogger(__name__)

AHEAD_SECONDS = 300.0
BEHIND_SECONDS = 30 * 86_400.0
"""A record's own time is believed unless it lies this far after or before its arrival. Nodes
buffer records for days while the spool is away, but no node lives in the future."""

_NAMES_IN_ONE_QUERY = 500


@dataclass(frozen=True)
class Requeue:
    """One restart of a job that this toolkit ordered; ``state`` is its action's."""

    decision: str
    target: str
    time: str
    state: str
    job_id: int | None
    uid: int | None


@dataclass(frozen=True)
class Breaker:
    """The circuit breaker of one kind of action, and why it stands as it does."""

    kind: str
    tripped: bool
    why: str
    time: str


def open_store(path: Path, journal: Journal) -> Store:
    """Return the index at ``path``, level with the journal; what it takes to get there is logged.

    Raises:
        StoreError: the file can neither be used now nor replaced.
    """
    try:
        store = Store(path)
        behind = journal.last_seq() - store.last_seq()
        if behind < 0:
            store.close()
            raise StoreDamaged(f"{path} knows events that the journal does not have")
        if behind:
            store.follow(journal)
        return store
    except StoreDamaged as error:
        return rebuild(path, journal, str(error))


def rebuild(path: Path, journal: Journal, why: str) -> Store:
    """Move the index at ``path`` aside and return a new one made from the journal.

    Records come back from the archive with the inbox's next passes, since the archive may be on
    a file system that does not answer now.

    Raises:
        StoreError: the new file cannot be made either.
    """
    aside = path.with_name(f"{path.name}.aside")
    log.warning("the index is built anew from the journal and the archive: %s", why)
    try:
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                path.with_name(path.name + suffix).replace(aside.with_name(aside.name + suffix))
    except OSError as error:
        raise StoreError(f"{path}: cannot be moved aside: {error.strerror}") from error
    store = Store(path)
    store.put_meta("restoring", "yes")
    store.follow(journal)
    return store


class Store:
    """The index in the file ``path``, made where it is missing. One thread uses one Store."""

    def __init__(self, path: Path) -> None:
        """Open or make the file.

        Raises:
            StoreDamaged: it is no index, or one of another layout.
            StoreError: it cannot be opened.
        """
        self.path = path
        self._file = IndexFile(path)

    @property
    def file(self) -> IndexFile:
        """The open file, for the modules that own tables of their own."""
        return self._file

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    # -- events ---------------------------------------------------------------------------

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take in one event of the journal; one that was taken in before changes nothing."""
        self.apply_all((event,))

    def apply_all(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take in events in one transaction."""
        with self._file.transaction():
            last = self.last_seq()
            for event in events:
                if event["seq"] <= last:
                    continue
                last = event["seq"]
                try:
                    self._take_in(event)
                except (KeyError, TypeError, AttributeError, ValueError) as error:
                    log.error("journal event %d does not read as %r: %s: %s",
                              last, event.get("type"), type(error).__name__, error)  # fmt: skip
            self._put_meta("last_seq", str(last))

    def follow(self, journal: Journal) -> None:
        """Take in what the journal holds beyond the last event taken in."""
        events = journal.events(after=self.last_seq())
        while batch := list(islice(events, 1000)):
            self.apply_all(batch)

    def last_seq(self) -> int:
        """Return the ``seq`` of the last event taken in."""
        return int(self.meta("last_seq") or 0)

    def _take_in(self, event: Mapping[str, Any]) -> None:
        kind = event.get("type")
        if kind == "decision":
            self._put_decision(Decision.from_dict(event["decision"]))
        elif kind == "breaker":
            row = (event["kind"], bool(event["tripped"]), str(event["why"]), event["time"])
            self._file.change("INSERT OR REPLACE INTO breakers VALUES (?, ?, ?, ?)", row)
        elif kind == "grant":
            judged.put_grant(self._file, event)
        elif kind == "ack":
            concerns.put_ack(self._file, event)
        elif kind in ("action", "outcome", "addendum", "review", "rerun"):
            decision = self.decision(event["decision"])
            if decision is None:
                raise KeyError(f"no decision {event['decision']}")
            if kind == "action":
                decision = decision.with_action(Action(**event["action"]))
            elif kind == "outcome":
                decision = decision.with_outcome(Outcome(**event["outcome"]))
            elif kind == "review":
                decision = decision.with_review(Review(**event["review"]))
            elif kind == "rerun":
                decision = replace(decision, rerun=str(event["rerun"]))
            else:
                decision = replace(decision, addenda=(*decision.addenda, str(event["text"])))
            self._put_decision(decision)

    def _put_decision(self, decision: Decision) -> None:
        attempt, run = decision.attempt, self._file.change
        job_id = attempt.job_id if attempt else None
        row = (
            decision.id, decision.time, decision.open, attempt and attempt.key,
            attempt and attempt.cluster, job_id, decision.uid, decision.owner,
            decision.partition, decision.cause.fault_class, _json(decision.to_dict()),
        )  # fmt: skip
        run("INSERT OR REPLACE INTO decisions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        run("DELETE FROM decision_nodes WHERE decision = ?", (decision.id,))
        judged.put(self._file, decision)
        run("DELETE FROM requeues WHERE decision = ?", (decision.id,))
        nodes = {answer.node for answer in decision.nodes} | set(decision.job.excluded)
        nodes |= {implicated.node for implicated in decision.cause.implicated}
        for node in nodes:
            run("INSERT INTO decision_nodes VALUES (?, ?, ?)", (node, decision.time, decision.id))
        for action in decision.actions:
            if action.kind == "requeue":
                run(
                    "INSERT OR REPLACE INTO requeues VALUES (?, ?, ?, ?, ?, ?)",
                    (action.time, decision.id, action.target, action.state, job_id, decision.uid),
                )
        concerns.put(self._file, decision)

    # -- records --------------------------------------------------------------------------

    def add_records(
        self,
        records: Sequence[FaultRecord],
        received: str | None = None,
        archived: Mapping[str, int] | None = None,
        documents: Sequence[str] | None = None,
    ) -> int:
        """Add records, return how many were new; one whose id is known is ignored.

        ``received`` is when they arrived (now). ``archived`` says how many bytes of which day's
        archive the index then covers, and becomes true together with the records.
        ``documents`` are the records' JSON, where that is at hand.
        """
        received = received or utc()
        documents = documents or [_json(record.to_dict()) for record in records]
        pairs = zip(records, documents, strict=True)
        rows = [_record_row(record, received, document) for record, document in pairs]
        with self._file.transaction():
            added = self._file.change_many(
                "INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows
            )
            self._file.change_many(
                "INSERT OR REPLACE INTO archived VALUES (?, ?)", (archived or {}).items()
            )
        return added

    def known(self, record_id: str) -> bool:
        """Whether a record of that id is in the index."""
        return bool(self._file.rows("SELECT 1 FROM records WHERE id = ?", (record_id,)))

    def unknown(self, records: Sequence[FaultRecord]) -> list[FaultRecord]:
        """Return those of ``records`` whose id is not in the index."""
        known: set[str] = set()
        for ids in _chunks([record.id for record in records]):
            marks = ",".join("?" * len(ids))
            rows = self._file.rows(f"SELECT id FROM records WHERE id IN ({marks})", ids)
            known.update(row[0] for row in rows)
        return [record for record in records if record.id not in known]

    def records(self, nodes: Collection[str] | None, since: str, until: str) -> list[FaultRecord]:
        """Return the records of ``nodes`` (None: of all) with since <= time < until, by time."""
        if nodes is None:
            found = self._file.rows(
                "SELECT time, document FROM records WHERE time >= ? AND time < ?", (since, until)
            )
        else:
            found = []
            for names in _chunks(sorted(nodes)):
                marks = ",".join("?" * len(names))
                found += self._file.rows(
                    f"SELECT time, document FROM records WHERE node IN ({marks})"
                    " AND time >= ? AND time < ?",
                    (*names, since, until),
                )
        return _by_time(found)

    def job_records(
        self, job_id: int, restart: int | None = None, since: str = ""
    ) -> list[FaultRecord]:
        """Return a job's records (of one restart, or of all) from ``since`` on, by time."""
        query, arguments = "job_id = ? AND time >= ?", [job_id, since]
        if restart is not None:
            query, arguments = f"{query} AND restart = ?", [*arguments, restart]
        return _by_time(
            self._file.rows(f"SELECT time, document FROM records WHERE {query}", arguments)
        )

    def hook_records(self, hook: str, since: str, until: str) -> list[FaultRecord]:
        """Return the records that ``hook`` wrote with since <= time < until, by time."""
        query = "SELECT time, document FROM records WHERE hook = ? AND time >= ? AND time < ?"
        return _by_time(self._file.rows(query, (hook, since, until)))

    def forget_records(self, before: str, limit: int = 1000) -> int:
        """Drop up to ``limit`` records older than ``before``, return how many; archives stay."""
        with self._file.transaction():
            return self._file.change(
                "DELETE FROM records WHERE id IN"
                " (SELECT id FROM records WHERE time < ? ORDER BY time LIMIT ?)",
                (before, limit),
            )

    def archived(self, since_day: str = "") -> dict[str, int]:
        """Return how many bytes of each day's archive the index covers, from ``since_day`` on."""
        return dict(self._file.rows("SELECT day, bytes FROM archived WHERE day >= ?", (since_day,)))

    def put_heartbeats(self, documents: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep the last heartbeat of each node, in one transaction."""
        received = utc()
        rows = [(node, received, _json(document)) for node, document in documents.items()]
        with self._file.transaction():
            self._file.change_many("INSERT OR REPLACE INTO heartbeats VALUES (?, ?, ?)", rows)

    def heartbeats(self) -> dict[str, dict[str, Any]]:
        """Return the last heartbeat of each node, with ``received`` (when it was seen) added."""
        rows = self._file.rows("SELECT node, received, document FROM heartbeats ORDER BY node")
        return {node: {**json.loads(text), "received": when} for node, when, text in rows}

    # -- decisions ------------------------------------------------------------------------

    def decision(self, decision_id: str) -> Decision | None:
        """Return a decision by its id."""
        return _first(self._decisions("WHERE id = ?", (decision_id,)))

    def open_decisions(self) -> list[Decision]:
        """Return the decisions with something to be done or seen, oldest first."""
        return self._decisions("WHERE open ORDER BY time, id")

    def attempt_decision(self, attempt_key: str) -> Decision | None:
        """Return the newest decision on an attempt (``Attempt.key``)."""
        query = "WHERE attempt = ? ORDER BY time DESC, id DESC LIMIT 1"
        return _first(self._decisions(query, (attempt_key,)))

    def job_decisions(self, cluster: str, job_id: int, uid: int | None) -> list[Decision]:
        """Return the decisions on a job of that owner (None: of any), newest last.

        The uid tells apart two jobs that were given one number, where their owners differ.
        """
        query, arguments = "WHERE job_id = ? AND cluster = ?", [job_id, cluster]
        if uid is not None:
            query, arguments = f"{query} AND uid = ?", [*arguments, uid]
        return self._decisions(f"{query} ORDER BY time, id", arguments)

    def decisions(
        self,
        node: str | None = None,
        job: int | None = None,
        user: str | None = None,
        partition: str | None = None,
        fault_class: str | None = None,
        since: str | None = None,
        until: str | None = None,
        limit: int = 100,
    ) -> list[Decision]:
        """Return at most ``limit`` decisions to which all that is given applies, newest first.

        ``node`` finds those that implicate, judge or exclude it; since <= time < until.
        """
        conditions = {
            "n.node = ?": node, "d.job_id = ?": job, "d.owner = ?": user,
            "d.partition = ?": partition, "d.fault_class = ?": fault_class,
            "t.time >= ?": since, "t.time < ?": until,
        }  # fmt: skip
        given = {text: value for text, value in conditions.items() if value is not None}
        where = " AND ".join(given) or "1"
        # The order of the tables is the order of the lookup: by node first, where one is given.
        table = "decisions d"
        if node is not None:
            table = "decision_nodes n CROSS JOIN decisions d ON d.id = n.decision"
        time = "n" if node is not None else "d"
        rows = self._file.rows(
            f"SELECT d.document FROM {table} WHERE {where.replace('t.time', f'{time}.time')}"
            f" ORDER BY {time}.time DESC, d.id DESC LIMIT ?",
            (*given.values(), limit),
        )
        return [Decision.from_dict(json.loads(text)) for (text,) in rows]

    def requeues_since(self, time: str) -> list[Requeue]:
        """Return the requeues ordered from ``time`` on that ran or may have run, oldest first."""
        rows = self._file.rows(
            "SELECT decision, target, time, state, job_id, uid FROM requeues WHERE time >= ?"
            " AND state IN ('planned', 'done', 'verified') ORDER BY time",
            (time,),
        )
        return [Requeue(*row) for row in rows]

    def breakers(self) -> dict[str, Breaker]:
        """Return the circuit breakers by their kind."""
        rows = self._file.rows("SELECT kind, tripped, why, time FROM breakers ORDER BY kind")
        return {kind: Breaker(kind, bool(tripped), why, time) for kind, tripped, why, time in rows}

    # -- small values ---------------------------------------------------------------------

    def meta(self, key: str) -> str | None:
        """Return a small value, None where there is none; it does not survive a rebuild."""
        rows = self._file.rows("SELECT value FROM meta WHERE key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def put_meta(self, key: str, value: str) -> None:
        """Keep a small value that can be lost."""
        with self._file.transaction():
            self._put_meta(key, value)

    def forget_meta(self, key: str) -> None:
        """Drop a small value."""
        with self._file.transaction():
            self._file.change("DELETE FROM meta WHERE key = ?", (key,))

    def _put_meta(self, key: str, value: str) -> None:
        self._file.change("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    # -- SQLite ---------------------------------------------------------------------------

    def _decisions(self, query: str, arguments: Sequence[Any] = ()) -> list[Decision]:
        rows = self._file.rows(f"SELECT document FROM decisions {query}", arguments)
        return [Decision.from_dict(json.loads(text)) for (text,) in rows]


def dated(record: FaultRecord, received: str) -> FaultRecord:
    """Return the record with its time, or when it was received where its own cannot be right."""
    earliest, latest = _believable(received)
    return record if earliest <= record.time <= latest else replace(record, time=received)


@lru_cache(maxsize=16)
def _believable(received: str) -> tuple[str, str]:
    """The earliest and the latest time of a record that arrived then; such texts sort by time."""
    seconds = seconds_of(received)
    return utc(seconds - BEHIND_SECONDS), utc(seconds + AHEAD_SECONDS)


def _record_row(record: FaultRecord, received: str, document: str) -> tuple[Any, ...]:
    job = record.job
    return (
        record.id, record.node, dated(record, received).time, received, record.hook,
        job.id if job else None, job.restart if job else None, document,
    )  # fmt: skip


def _by_time(rows: Iterable[tuple[str, str]]) -> list[FaultRecord]:
    records = []
    for time, text in rows:
        record = FaultRecord.from_dict(json.loads(text))
        records.append(record if record.time == time else replace(record, time=time))
    return sorted(records, key=lambda record: (record.time, record.id))


def _first(decisions: Sequence[Decision]) -> Decision | None:
    return decisions[0] if decisions else None


def _chunks(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), _NAMES_IN_ONE_QUERY):
        yield names[start : start + _NAMES_IN_ONE_QUERY]


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"))
