"""Records and heartbeats as rows of the index, and back: and whose time is believed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from recovery.returning import clean
from slurm_hooks.record import FaultRecord, seconds_of, utc

AHEAD_SECONDS = 300.0
BEHIND_SECONDS = 30 * 86_400.0
"""A record's own time is believed unless it lies this far after or before its arrival. Nodes
buffer records for days while the spool is away, but no node lives in the future."""

_NAMES_IN_ONE_QUERY = 500

PUT_HEARTBEAT = """
INSERT INTO heartbeats VALUES (:node, :received, :document, :time, :identity, :clean,
                               CASE WHEN :clean THEN :time ELSE '' END)
ON CONFLICT (node) DO UPDATE SET
    passed = CASE WHEN NOT :clean THEN 0 WHEN :identity != identity OR passed = 0 THEN 1
                  WHEN :time > time THEN passed + 1 ELSE passed END,
    passed_since = CASE WHEN NOT :clean THEN '' WHEN :identity != identity OR passed = 0 THEN :time
                        ELSE passed_since END,
    received = :received, document = :document, time = :time, identity = :identity
"""
"""One that is read again, or older than the last one, is counted once: only a later time counts."""


def dated(record: FaultRecord, received: str) -> FaultRecord:
    """Return the record with its time, or when it was received where its own cannot be right."""
    earliest, latest = _believable(received)
    return record if earliest <= record.time <= latest else replace(record, time=received)


@lru_cache(maxsize=16)
def _believable(received: str) -> tuple[str, str]:
    """The earliest and the latest time of a record that arrived then; such texts sort by time."""
    seconds = seconds_of(received)
    return utc(seconds - BEHIND_SECONDS), utc(seconds + AHEAD_SECONDS)


def record_row(record: FaultRecord, received: str, document: str) -> tuple[Any, ...]:
    """Return a record's row of the table ``records``; ``document`` is its JSON."""
    job = record.job
    return (
        record.id, record.node, dated(record, received).time, received, record.hook,
        job.id if job else None, job.restart if job else None, job.array if job else None, document,
    )  # fmt: skip


def heartbeat_row(node: str, received: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of PUT_HEARTBEAT; another boot or another GPU is another identity."""
    identity = to_json({"boot": document["boot_id"], "gpus": document.get("gpus")})
    return {
        "node": node, "received": received, "document": to_json(document),
        "time": document["time"], "identity": identity, "clean": int(clean(document)),
    }  # fmt: skip


def by_time(rows: Iterable[tuple[str, str]]) -> list[FaultRecord]:
    """Return the records of rows of time and document, in the order of the believed time."""
    records = []
    for time, text in rows:
        record = FaultRecord.from_dict(json.loads(text))
        records.append(record if record.time == time else replace(record, time=time))
    return sorted(records, key=lambda record: (record.time, record.id))


def chunks(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield ``names`` in parts that one query can name."""
    for start in range(0, len(names), _NAMES_IN_ONE_QUERY):
        yield names[start : start + _NAMES_IN_ONE_QUERY]


def to_json(document: Mapping[str, Any]) -> str:
    """Return the JSON text that is kept of a document."""
    return json.dumps(document, separators=(",", ":"))
