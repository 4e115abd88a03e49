"""The SQLite file of the index: opened, its tables made, its errors told apart.

Owns the connection and the layout; what the tables mean and who asks what is ``store``'s.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LAYOUT = 7
"""Version of the tables; an index of another one is built anew."""

LOCK_SECONDS = 10.0
"""Longest wait for another process that is writing; the aggregator's transactions are short."""

_TABLES = """
CREATE TABLE records (
    id TEXT PRIMARY KEY, node TEXT NOT NULL, time TEXT NOT NULL, received TEXT NOT NULL,
    hook TEXT NOT NULL, job_id INTEGER, restart INTEGER, array_task TEXT, document TEXT NOT NULL
);
CREATE INDEX records_node ON records (node, time);
CREATE INDEX records_job ON records (job_id, restart, time) WHERE job_id IS NOT NULL;
CREATE INDEX records_array ON records (array_task) WHERE array_task IS NOT NULL;
CREATE INDEX records_hook ON records (hook, time);
CREATE INDEX records_time ON records (time);
CREATE TABLE archived (day TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE heartbeats (
    node TEXT PRIMARY KEY, received TEXT NOT NULL, document TEXT NOT NULL, time TEXT NOT NULL,
    identity TEXT NOT NULL, passed INTEGER NOT NULL, passed_since TEXT NOT NULL
);
CREATE TABLE decisions (
    id TEXT PRIMARY KEY, time TEXT NOT NULL, open INTEGER NOT NULL, attempt TEXT, cluster TEXT,
    job_id INTEGER, uid INTEGER, owner TEXT NOT NULL, partition TEXT NOT NULL,
    fault_class TEXT NOT NULL, follows INTEGER NOT NULL, document TEXT NOT NULL
);
CREATE INDEX decisions_time ON decisions (time);
CREATE INDEX decisions_open ON decisions (time) WHERE open;
CREATE INDEX decisions_attempt ON decisions (attempt, time) WHERE attempt IS NOT NULL;
CREATE INDEX decisions_job ON decisions (job_id, time) WHERE job_id IS NOT NULL;
CREATE INDEX decisions_owner ON decisions (owner, time);
CREATE INDEX decisions_partition ON decisions (partition, time);
CREATE INDEX decisions_class ON decisions (fault_class, time);
CREATE TABLE decision_nodes (
    node TEXT NOT NULL, time TEXT NOT NULL, decision TEXT NOT NULL,
    PRIMARY KEY (node, time, decision)
) WITHOUT ROWID;
CREATE INDEX decision_nodes_decision ON decision_nodes (decision);
CREATE TABLE job_names (
    name TEXT NOT NULL, time TEXT NOT NULL, decision TEXT NOT NULL,
    PRIMARY KEY (name, time, decision)
) WITHOUT ROWID;
CREATE TABLE commands (
    kind TEXT NOT NULL, decision TEXT NOT NULL, target TEXT NOT NULL, time TEXT NOT NULL,
    state TEXT NOT NULL, job_id INTEGER, uid INTEGER, PRIMARY KEY (decision, kind, target)
) WITHOUT ROWID;
CREATE INDEX commands_time ON commands (kind, time);
CREATE TABLE marks (
    place INTEGER PRIMARY KEY AUTOINCREMENT, decision TEXT NOT NULL, node TEXT NOT NULL,
    kind TEXT NOT NULL, time TEXT NOT NULL, size INTEGER NOT NULL, uid INTEGER,
    UNIQUE (decision, node, kind)
);
CREATE TABLE breakers (
    kind TEXT PRIMARY KEY, tripped INTEGER NOT NULL, why TEXT NOT NULL, time TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE reviews (
    decision TEXT NOT NULL, uid INTEGER NOT NULL, PRIMARY KEY (decision, uid)
) WITHOUT ROWID;
CREATE TABLE cases (
    decision TEXT PRIMARY KEY, time TEXT NOT NULL, judged INTEGER NOT NULL, document TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX cases_time ON cases (time);
CREATE INDEX cases_judged ON cases (time) WHERE judged;
CREATE TABLE grants (
    key TEXT PRIMARY KEY, in_force INTEGER NOT NULL, why TEXT NOT NULL, time TEXT NOT NULL,
    scope TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE concerns (
    subject TEXT PRIMARY KEY, time TEXT NOT NULL, last TEXT NOT NULL, count INTEGER NOT NULL,
    who TEXT NOT NULL, what TEXT NOT NULL, decision TEXT NOT NULL, owner TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX concerns_unowned ON concerns (time) WHERE who = '';
CREATE INDEX concerns_last ON concerns (last);
CREATE INDEX concerns_decision ON concerns (decision);
CREATE TABLE pauses (
    scope TEXT NOT NULL, name TEXT NOT NULL, why TEXT NOT NULL, who TEXT NOT NULL,
    time TEXT NOT NULL, PRIMARY KEY (scope, name)
) WITHOUT ROWID;
CREATE TABLE timeline (
    subject TEXT NOT NULL, seq INTEGER NOT NULL, place INTEGER NOT NULL, time TEXT NOT NULL,
    kind TEXT NOT NULL, what TEXT NOT NULL, PRIMARY KEY (subject, seq, place)
) WITHOUT ROWID;
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""


class StoreError(Exception):
    """The index does not answer or take anything now: locked for long, or the disk is full."""


class StoreDamaged(StoreError):
    """The index cannot be used any more; ``open_store`` builds it anew, nothing is lost."""


class IndexFile:
    """An open index. Every method may raise StoreError or StoreDamaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"{path}: {error}") from error
        try:
            with self._guarded():
                self._write_ahead()
                # Derived data: a power cut may take the last transactions, never the consistency.
                self._connection.execute("PRAGMA synchronous = NORMAL")
                self._make_tables()
        except StoreError:
            self._connection.close()
            raise

    def _write_ahead(self) -> None:
        """Let readers read while somebody writes; for this one lock SQLite itself does not wait."""
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def rows(
        self, query: str, arguments: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[tuple[Any, ...]]:
        """Return what a query finds."""
        with self._guarded():
            return self._connection.execute(query, arguments).fetchall()

    def change(self, statement: str, arguments: Sequence[Any] = ()) -> int:
        """Run a statement that changes something, return how many rows it changed."""
        with self._guarded():
            return self._connection.execute(statement, arguments).rowcount

    def change_many(self, statement: str, rows: Iterable[Sequence[Any] | Mapping[str, Any]]) -> int:
        """Run a statement for each of ``rows``, return how many rows were changed."""
        with self._guarded():
            before = self._connection.total_changes
            self._connection.executemany(statement, rows)
            return self._connection.total_changes - before

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make what is changed within true together, or not at all."""
        with self._guarded():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.rollback()
                raise
            self._connection.execute("COMMIT")

    def _make_tables(self) -> None:
        if self._layout() == LAYOUT:
            return
        with self.transaction():
            version = self._layout()
            if version == LAYOUT:
                return
            if version or self._connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                raise StoreDamaged(f"{self.path} has layout {version}, not {LAYOUT}")
            for statement in _TABLES.split(";"):
                self._connection.execute(statement)
            self._connection.execute(f"PRAGMA user_version = {LAYOUT}")

    def _layout(self) -> int:
        return int(self._connection.execute("PRAGMA user_version").fetchone()[0])

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise StoreError(f"{self.path}: {error}") from error
        except (sqlite3.ProgrammingError, sqlite3.InterfaceError, OverflowError) as error:
            # A value that SQLite has no type for; the file has nothing to do with it.
            raise ValueError(f"cannot be stored: {error}") from error
        except sqlite3.DatabaseError as error:
            # What is left of SQLite's classes: "malformed", "not a database".
            raise StoreDamaged(f"{self.path}: {error}") from error
