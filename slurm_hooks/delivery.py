"""Bring a record to safety: to the spool, else to the node's own disk, within the hook's time.

Owns the order of things: first the record, then what the probes want to remember of it, then the
heartbeat and the records that wait from earlier. Each part runs in a child that can be abandoned.
How files are written is ``spool``'s.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from slurm_hooks import bounds, looking
from slurm_hooks.context import HookContext
from slurm_hooks.deadline import Task, run_all, run_one
from slurm_hooks.frozen import frozen
from slurm_hooks.node_config import Spool
from slurm_hooks.record import FaultRecord, new_id, utc
from slurm_hooks.spool import Buffer, SpoolError, beat, drop, seal

HEARTBEAT_SCHEMA = "heartbeat/v1"

FORWARD_LIMIT = 50
"""Most waiting records forwarded by one run: a node that comes back must not flood the spool."""


@frozen
class Delivery:
    """What is to be delivered: a record or none, a heartbeat or none, and states to keep after."""

    record: FaultRecord | None
    heartbeat: bytes | None = None
    states: Mapping[str, Any] = field(default_factory=dict)


def heartbeat(record: FaultRecord, nvml: Mapping[str, Any] | None = None) -> bytes:
    """Return a node's heartbeat: who, when, and how a health check ended, without its findings.

    ``nvml`` is what its probe keeps: the GPUs' uuids by their minor numbers tell whether one has
    been replaced.
    """
    document: dict[str, Any] = {
        "schema": HEARTBEAT_SCHEMA,
        "node": record.node,
        "boot_id": record.boot_id,
        "time": record.time,
        "verdict": record.verdict,
        "probes": [probe.to_dict() for probe in record.probes],
    }
    devices = (nvml or {}).get("devices", ())
    known = {str(one["minor"]): one["uuid"] for one in devices if one["uuid"]}
    if known:
        document["gpus"] = known
    return json.dumps(document, separators=(",", ":")).encode()


def buffer_of(spool: Spool, node: str) -> Buffer:
    """Return the node's local buffer."""
    return Buffer(spool.buffer_of(node), spool.buffer_records)


def deliver(
    delivery: Delivery, spool: Spool, node: str, spool_until: float, buffer_until: float
) -> str | None:
    """Deliver, and return why the record is lost, or None.

    ``spool_until`` and ``buffer_until`` are moments of ``time.monotonic()``: until the first the
    spool may take, until the second the local disk.
    """
    states = looking.states_of(spool, node)
    record, content = delivery.record, b""
    tasks: dict[str, Task] = {}
    if record:
        content = bounds.encode(record, spool.max_record_bytes)
        tasks["record"] = lambda: _drop(record.id, content, spool, states, delivery.states)
    alone = {} if record else delivery.states
    if delivery.heartbeat or alone:
        tasks["heartbeat"] = lambda: _beat(delivery.heartbeat, spool, node, states, alone)
    outcomes = run_all(tasks, max(0.05, spool_until - time.monotonic()))
    if not record or outcomes["record"].status == "ok":
        return None
    buffer = buffer_of(spool, node)
    outcome = run_one(
        lambda: _buffer(record, content, buffer, states, delivery.states),
        max(0.05, buffer_until - time.monotonic()),
    )
    return None if outcome.status == "ok" else f"{outcomes['record'].detail}; {outcome.detail}"


def forward(spool: Spool, context: HookContext, boot_id: str, until: float) -> int:
    """Run in a child: bring waiting records to the spool, oldest first; return how many.

    ``until`` is a moment of ``time.monotonic()``. Stops at the first that does not arrive.
    """
    buffer = buffer_of(spool, context.node)
    forwarded = 0
    for name in buffer.waiting()[:FORWARD_LIMIT]:
        if time.monotonic() > until:
            break
        try:
            record_id, content = buffer.read(name)
        except SpoolError:
            buffer.forget(name)
            continue
        drop(spool.path, record_id, seal(content, spool))
        buffer.forget(name)
        forwarded += 1
    dropped = buffer.dropped()
    if forwarded and dropped:
        record = _dropped_record(context, boot_id, dropped)
        content = bounds.encode(record, spool.max_record_bytes)
        drop(spool.path, record.id, seal(content, spool))
        buffer.dropping_reported()
    return forwarded


def _dropped_record(context: HookContext, boot_id: str, dropped: int) -> FaultRecord:
    from slurm_hooks import catalog

    found = catalog.finding("hook.records_dropped", details={"dropped": dropped})
    return FaultRecord(
        id=new_id(),
        cluster=context.cluster,
        node=context.node,
        boot_id=boot_id,
        time=utc(),
        hook=context.hook,
        findings=(found,),
    )


def _drop(
    record_id: str, content: bytes, spool: Spool, folder: Path, states: Mapping[str, Any]
) -> bytes:
    drop(spool.path, record_id, seal(content, spool))
    # The record is safe. A local disk that keeps no state costs a second report, not this one.
    with contextlib.suppress(SpoolError):
        looking.keep(folder, states)
    return b""


def _buffer(
    record: FaultRecord, content: bytes, buffer: Buffer, folder: Path, states: Mapping[str, Any]
) -> bytes:
    buffer.keep(record.id, record.verdict, content)
    looking.keep(folder, states)
    return b""


def _beat(
    content: bytes | None, spool: Spool, node: str, folder: Path, states: Mapping[str, Any]
) -> bytes:
    if states:
        looking.keep(folder, states)
    if content:
        beat(spool.path, node, seal(content, spool))
    return b""
