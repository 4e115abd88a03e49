"""Fault records and findings: what one run of one hook reports.

    >>> finding = Finding("gpu.fell_off_bus", "fatal", "GPU 3 has fallen off the bus", gpu=3)
    >>> Finding.from_dict(finding.to_dict()) == finding
    True

Owns the data and its JSON form (``schemas/fault-record-v1.json`` is the contract). How a record
travels belongs to ``spool``, what a code means to ``catalog``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from datetime import datetime, timezone
from typing import Any

from slurm_hooks.frozen import frozen

SCHEMA = "fault-record/v1"

SEVERITIES = ("info", "warning", "fault", "fatal")
"""Findings' severities, mildest first. Only ``fatal`` may ever stop a job from starting."""

PROBE_STATUSES = ("ok", "findings", "hang", "crash", "error", "skipped")

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def new_id(now_seconds: float | None = None, rest: bytes | None = None) -> str:
    """Return a ULID: 26 characters that sort by time (to the millisecond), then at random.

    ``rest`` takes the place of the 10 random bytes where one thing must always get one id. Source
    of the format: the ULID specification (48 bits of Unix milliseconds, 80 random bits, Crockford
    base 32).
    """
    milliseconds = int((time.time() if now_seconds is None else now_seconds) * 1000)
    number = (milliseconds << 80) | int.from_bytes(rest or os.urandom(10), "big")
    return "".join(_CROCKFORD[(number >> shift) & 31] for shift in range(125, -1, -5))


def utc(seconds: float | None = None) -> str:
    """Return a time as ``2026-12-02T05:31:37.123456Z``; ``seconds`` since the epoch, else now."""
    moment = datetime.fromtimestamp(time.time() if seconds is None else seconds, timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds_of(text: str) -> float:
    """Return a record's time as seconds since the epoch.

    Raises:
        ValueError: the text is not in the form that ``utc`` writes.
    """
    moment = datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ")
    return moment.replace(tzinfo=timezone.utc).timestamp()


def worst(severities: Sequence[str]) -> str:
    """Return the gravest of ``severities``, or ``ok`` where there is none."""
    return max(severities, key=SEVERITIES.index, default="ok")


@frozen
class Evidence:
    """What was seen: ``source`` (``nvml``, ``kernel_log``, …), the text, and when if known.

    ``key`` identifies the observation on its node (for a kernel line, boot id and sequence
    number), so that two hooks that both saw it do not make two facts of it.
    """

    source: str
    text: str
    time: str | None = None
    key: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object, without the fields that are not set."""
        return _set_fields(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Evidence:
        """Read what ``to_dict`` wrote."""
        return cls(document["source"], document["text"], document.get("time"), document.get("key"))


@frozen
class Finding:
    """One fact with a stable ``code``, the thing it is about, and its evidence.

    ``gpu`` is the device's minor number (the N of /dev/nvidiaN, which is what Slurm counts), not
    an NVML index. ``job_id`` is set where the fact belongs to one job of a shared node. ``count``
    is how many times it was seen in this run. ``step`` is a trainer's step, of a checkpoint or of a
    job's progress.
    """

    code: str
    severity: str
    summary: str
    gpu: int | None = None
    uuid: str | None = None
    pci: str | None = None
    link: int | None = None
    port: str | None = None
    rank: int | None = None
    step: int | None = None
    file: str | None = None
    pid: int | None = None
    job_id: int | None = None
    count: int = 1
    resolution: str | None = None
    evidence: tuple[Evidence, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object, without the fields that are not set."""
        document = _set_fields(self)
        document["evidence"] = [item.to_dict() for item in self.evidence]
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Finding:
        """Read what ``to_dict`` wrote."""
        known = {f.name: document[f.name] for f in fields(cls) if f.name in document}
        known["evidence"] = tuple(Evidence.from_dict(item) for item in document.get("evidence", ()))
        return cls(**known)


@frozen
class ProbeResult:
    """How one probe ended: a ``status`` of PROBE_STATUSES, its wall time, and why if not well.

    ``detail`` is one sentence; for a hang it says where the probe was stuck if that was readable.
    """

    name: str
    status: str
    seconds: float
    detail: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object, without the fields that are not set."""
        return _set_fields(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> ProbeResult:
        """Read what ``to_dict`` wrote."""
        return cls(
            document["name"], document["status"], document["seconds"], document.get("detail")
        )


@frozen
class RecordJob:
    """The job a hook ran for, as Slurm told the hook.

    ``nodes`` is a Slurm hostlist expression (``n[1-4]``). ``exit`` is ``code:signal`` as Slurm
    prints it, known to an epilog only. ``comment`` is the user's own text, never to be trusted.
    """

    id: int
    restart: int
    user: str | None = None
    uid: int | None = None
    partition: str | None = None
    nodes: str | None = None
    gpus: tuple[int, ...] = ()
    array: str | None = None
    sluid: str | None = None
    exit: str | None = None
    comment: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object; fields without a value are null."""
        document = {f.name: getattr(self, f.name) for f in fields(self)}
        document["gpus"] = list(self.gpus)
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> RecordJob:
        """Read what ``to_dict`` wrote."""
        known = {f.name: document[f.name] for f in fields(cls) if f.name in document}
        known["gpus"] = tuple(document.get("gpus") or ())
        return cls(**known)


@frozen
class FaultRecord:
    """What one run of one hook reports: context, findings, how each probe ended."""

    id: str
    cluster: str | None
    node: str
    boot_id: str
    time: str
    hook: str
    job: RecordJob | None = None
    findings: tuple[Finding, ...] = ()
    probes: tuple[ProbeResult, ...] = field(default=())

    @property
    def verdict(self) -> str:
        """The gravest severity among the findings, or ``ok``."""
        return worst([finding.severity for finding in self.findings])

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of ``fault-record/v1``."""
        return {
            "schema": SCHEMA,
            "id": self.id,
            "cluster": self.cluster,
            "node": self.node,
            "boot_id": self.boot_id,
            "time": self.time,
            "hook": self.hook,
            "verdict": self.verdict,
            "job": self.job.to_dict() if self.job else None,
            "findings": [finding.to_dict() for finding in self.findings],
            "probes": [probe.to_dict() for probe in self.probes],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> FaultRecord:
        """Read a document that has passed the schema."""
        return cls(
            id=document["id"],
            cluster=document["cluster"],
            node=document["node"],
            boot_id=document["boot_id"],
            time=document["time"],
            hook=document["hook"],
            job=RecordJob.from_dict(document["job"]) if document["job"] else None,
            findings=tuple(Finding.from_dict(item) for item in document["findings"]),
            probes=tuple(ProbeResult.from_dict(item) for item in document["probes"]),
        )


def _set_fields(item: Evidence | Finding | ProbeResult) -> dict[str, Any]:
    values = {f.name: getattr(item, f.name) for f in fields(item)}
    return {name: value for name, value in values.items() if value is not None}
