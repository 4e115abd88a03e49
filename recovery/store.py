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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from recovery import asked, concerns, controls, fleet, judged, late, naming, timeline
from recovery.asked import Asked
from recovery.controls import Breaker, Pause
from recovery.decision import Decision
from recovery.index_file import IndexFile, StoreDamaged, StoreError
from recovery.journal import Journal
from recovery.offenders import Mark, marks_of
from recovery.store_rows import PUT_HEARTBEAT, by_time, chunks, heartbeat_row, record_row, to_json
from slurm_hooks.record import FaultRecord, utc

__all__ = ["Command", "Store", "StoreDamaged", "StoreError"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Command:
    """One action that this toolkit ordered and that ran or may have run; ``state`` is its own."""

    kind: str
    decision: str
    target: str
    time: str
    state: str
    job_id: int | None
    uid: int | None


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
            decided = Decision.from_dict(event["decision"])
            former = self.decision(decided.revises) if decided.revises else None
            if former is not None:
                self._put_decision(late.revised(former, decided))
                self._file.change("DELETE FROM marks WHERE decision = ?", (former.id,))
            self._put_decision(decided)
            self._file.change_many(
                # A mark keeps the place it was given first: a reader asks for what came after it.
                "INSERT OR IGNORE INTO marks VALUES (NULL, ?, ?, ?, ?, ?, ?)",
                [(decided.id, m.node, m.kind, m.time, m.size, m.uid) for m in marks_of(decided)],
            )
            event_of = self.decision(decided.fleet) if decided.fleet else None
            if event_of is not None:
                self._put_decision(event_of.with_members([fleet.member_of(decided)]))
        elif kind in controls.EVENTS:
            controls.take_in(self._file, event)
        elif kind == "grant":
            judged.put_grant(self._file, event)
        elif kind == "ack":
            concerns.put_ack(self._file, event)
        elif kind in ("action", "outcome", "addendum", "review", "rerun", "joined"):
            decision = self.decision(event["decision"])
            if decision is None:
                raise KeyError(f"no decision {event['decision']}")
            self._put_decision(decision.changed(event))
        if kind in timeline.EVENTS:
            timeline.put(self._file, event)

    def _put_decision(self, decision: Decision) -> None:
        attempt, run = decision.attempt, self._file.change
        job_id = attempt.job_id if attempt else None
        row = (
            decision.id, decision.time, decision.open, attempt and attempt.key,
            attempt and attempt.cluster, job_id, decision.uid, decision.owner,
            decision.partition, decision.cause.fault_class, bool(decision.fleet),
            to_json(decision.to_dict()),
        )  # fmt: skip
        run("INSERT OR REPLACE INTO decisions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        run("DELETE FROM decision_nodes WHERE decision = ?", (decision.id,))
        judged.put(self._file, decision)
        naming.put(self._file, decision)
        nodes = {answer.node for answer in decision.nodes} | set(decision.job.excluded)
        nodes |= {implicated.node for implicated in decision.cause.implicated}
        nodes |= {node for member in decision.members for node in member.nodes}
        for node in nodes:
            run("INSERT INTO decision_nodes VALUES (?, ?, ?)", (node, decision.time, decision.id))
        for action in decision.actions:
            run(
                "INSERT OR REPLACE INTO commands VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    action.kind, decision.id, action.target, action.time, action.state,
                    job_id, decision.uid,
                ),
            )  # fmt: skip
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
        documents = documents or [to_json(record.to_dict()) for record in records]
        pairs = zip(records, documents, strict=True)
        rows = [record_row(record, received, document) for record, document in pairs]
        with self._file.transaction():
            added = self._file.change_many(
                "INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows
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
        for ids in chunks([record.id for record in records]):
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
            for names in chunks(sorted(nodes)):
                marks = ",".join("?" * len(names))
                found += self._file.rows(
                    f"SELECT time, document FROM records WHERE node IN ({marks})"
                    " AND time >= ? AND time < ?",
                    (*names, since, until),
                )
        return by_time(found)

    def job_records(
        self, job_id: int, restart: int | None = None, since: str = ""
    ) -> list[FaultRecord]:
        """Return a job's records (of one restart, or of all) from ``since`` on, by time."""
        query, arguments = "job_id = ? AND time >= ?", [job_id, since]
        if restart is not None:
            query, arguments = f"{query} AND restart = ?", [*arguments, restart]
        return by_time(
            self._file.rows(f"SELECT time, document FROM records WHERE {query}", arguments)
        )

    def hook_records(self, hook: str, since: str, until: str) -> list[FaultRecord]:
        """Return the records that ``hook`` wrote with since <= time < until, by time."""
        query = "SELECT time, document FROM records WHERE hook = ? AND time >= ? AND time < ?"
        return by_time(self._file.rows(query, (hook, since, until)))

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
        """Keep the last heartbeat of each node, in one transaction.

        Beside it stands how many clean ones in a row there have been on unchanged hardware within
        one boot, and since when (``returning.clean``).
        """
        received = utc()
        with self._file.transaction():
            rows = [(node, received, document) for node, document in documents.items()]
            self._file.change_many(PUT_HEARTBEAT, (heartbeat_row(*row) for row in rows))

    def heartbeats(self, nodes: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
        """Return the last heartbeat of each node (of all, or of ``nodes``), with what is kept.

        Added are ``received``, when it was seen, and ``passed``, how many clean ones in a row have
        come since ``passed_since``.
        """
        query = "SELECT node, received, document, passed, passed_since FROM heartbeats"
        rows: list[tuple[Any, ...]] = []
        if nodes is None:
            rows = self._file.rows(f"{query} ORDER BY node")
        for names in chunks(sorted(nodes or ())):
            marks = ",".join("?" * len(names))
            rows += self._file.rows(f"{query} WHERE node IN ({marks})", names)
        return {
            node: {**json.loads(text), "received": when, "passed": passed, "passed_since": since}
            for node, when, text, passed, since in rows
        }

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
        job: str | None = None,
        user: str | None = None,
        partition: str | None = None,
        fault_class: str | None = None,
        since: str | None = None,
        until: str | None = None,
        limit: int = 100,
        followers: bool = True,
    ) -> list[Decision]:
        """Return at most ``limit`` decisions to which all that is given applies, newest first.

        Without ``followers``, those that follow the decision on a fleet event are left out.
        """
        wanted = Asked(node, job, user, partition, fault_class, since, until)
        return asked.decisions(self._file, wanted, limit, followers)

    def commands_since(self, kind: str, time: str) -> list[Command]:
        """Return the actions of a kind ordered from ``time`` on that ran or may have, in order."""
        rows = self._file.rows(
            "SELECT kind, decision, target, time, state, job_id, uid FROM commands"
            " WHERE kind = ? AND time >= ? AND state IN ('planned', 'done', 'verified')"
            " ORDER BY time",
            (kind, time),
        )
        return [Command(*row) for row in rows]

    def marks(self, after: int, since: str) -> list[tuple[int, Mark]]:
        """Return the marks that came after the place ``after``, each with its own place."""
        rows = self._file.rows(
            "SELECT place, node, kind, time, size, uid FROM marks WHERE place > ? AND time >= ?"
            " ORDER BY place",
            (after, since),
        )
        return [(place, Mark(*fields)) for place, *fields in rows]

    def breakers(self) -> dict[str, Breaker]:
        """Return the circuit breakers by their kind."""
        return controls.breakers(self._file)

    def pauses(self) -> list[Pause]:
        """Return the pauses that hold now, oldest first."""
        return controls.pauses(self._file)

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


def _first(decisions: Sequence[Decision]) -> Decision | None:
    return decisions[0] if decisions else None
