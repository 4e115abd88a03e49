"""Builders of fault records, decisions and spools for tests."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from recovery.decision import (
    Attempt,
    Cause,
    Decision,
    Implicated,
    JobAnswer,
    NodeAnswer,
)
from slurm_hooks.config import Spool
from slurm_hooks.record import (
    Evidence,
    FaultRecord,
    Finding,
    ProbeResult,
    RecordJob,
    new_id,
    utc,
)

BOOT_ID = "01234567-89ab-cdef-0123-456789abcdef"

SETTINGS = Spool(trusted_uids=(os.geteuid(),))
"""Whoever runs the tests is who writes records."""


def record(node: str = "n3", job: int | None = 12, restart: int = 0, **changes: Any) -> FaultRecord:
    """An epilog's record of a GPU that fell off the bus."""
    evidence = Evidence("kernel_log", "NVRM: Xid (PCI:0000:3b:00): 79, ü", utc(), "b:17")
    made = FaultRecord(
        id=new_id(),
        cluster="c1",
        node=node,
        boot_id=BOOT_ID,
        time=utc(),
        hook="epilog",
        job=None if job is None else RecordJob(job, restart, user="ann", uid=1001, exit="9:0"),
        findings=(
            Finding("gpu.fell_off_bus", "fatal", "GPU 3 is gone", gpu=3, evidence=(evidence,)),
        ),
        probes=(ProbeResult("nvml", "findings", 0.03), ProbeResult("nccl", "hang", 8.0)),
    )
    return replace(made, **changes)


def decision(
    name: str = "d1", job_id: int | None = 12, restart: int = 0, **changes: Any
) -> Decision:
    """A decision to requeue ann's job off n3, and to drain n3."""
    made = Decision(
        id=name,
        time=utc(),
        incident=f"incident of {name}",
        attempt=None if job_id is None else Attempt("c1", job_id, restart, submit_time=1796189498),
        cause=Cause("hardware.gpu", "established", "gone", (Implicated("n3", "Xid 79", "nvml"),)),
        job=JobAnswer("requeue", "its GPU fell off the bus", excluded=("n3",)),
        nodes=(NodeAnswer("n3", "drain", "GPU 3 fell off the bus"),),
        rule="hardware.gpu established",
        mode="act",
        owner="ann",
        uid=1001,
        partition="train",
    )
    return replace(made, **changes)


def make_spool(folder: Path) -> Path:
    """An empty spool in ``folder``."""
    for name in ("incoming", "heartbeat"):
        (folder / name).mkdir(parents=True)
    return folder


def drop(spool: Path, *records: FaultRecord) -> None:
    """Put records into ``incoming``."""
    for item in records:
        put(spool, f"{item.id}.json", json.dumps(item.to_dict()).encode())


def put(spool: Path, name: str, content: bytes) -> Path:
    """Put a file into ``incoming``."""
    path = spool / "incoming" / name
    path.write_bytes(content)
    path.chmod(0o644)
    return path


def archived(spool: Path) -> list[str]:
    """The ids of all archived records, in order."""
    files = sorted(spool.glob("archive/*/records.jsonl"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [json.loads(line)["record"]["id"] for line in lines]


def waiting(spool: Path) -> list[str]:
    """Names of what is yet to be taken in."""
    return sorted(path.name for path in (spool / "incoming").iterdir())


def beat(spool: Path, node: str, **changes: Any) -> None:
    """Leave a node's heartbeat in the spool."""
    document = {
        "schema": "heartbeat/v1", "node": node, "boot_id": BOOT_ID, "time": utc(),
        "verdict": "ok", "probes": [],
    }  # fmt: skip
    hidden = spool / "heartbeat" / f".{node}"
    hidden.write_text(json.dumps({**document, **changes}))
    hidden.chmod(0o644)
    hidden.rename(spool / "heartbeat" / f"{node}.json")
