"""Make what a hook saw fit the record's schema, whatever text and numbers it is made of.

    >>> fit_text("a" * 600, 500)[-1]
    '…'

Owns the limits of ``schemas/fault-record-v1.json`` on the writer's side: texts are shortened,
impossible values left out, surplus findings folded into a count, mildest first. A record that has
been through here always passes the schema and is never larger than the spool takes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from slurm_hooks.record import (
    PROBE_STATUSES,
    SEVERITIES,
    Evidence,
    FaultRecord,
    Finding,
    ProbeResult,
    RecordJob,
)

FINDINGS_LIMIT = 256
PROBES_LIMIT = 64
EVIDENCE_LIMIT = 16
GPUS_LIMIT = 1024
SHORT, LONG, SUMMARY, EVIDENCE_TEXT, DETAIL = 256, 4096, 500, 2048, 1000
NUMBER, INDEX, RANK, STEP = 9_999_999_999, 65_535, 16_777_215, 999_999_999_999_999

_CODE = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z")

FOLDED = "hook.findings_folded"
"""Code of the finding that counts those for which there was no room."""

UNNAMED = "hook.malformed_code"
"""Code that replaces one that no catalogue could hold."""


def encode(record: FaultRecord, max_bytes: int) -> bytes:
    """Return the record's JSON, fitted to the schema and to ``max_bytes`` (at least 64 KiB)."""
    record = fit(record)
    content = _json(record)
    for evidence, text in ((EVIDENCE_LIMIT, 512), (1, 512), (1, 128)):
        if len(content) <= max_bytes:
            return content
        record = replace(
            record, findings=tuple(_less(item, evidence, text) for item in record.findings)
        )
        content = _json(record)
    if len(content) > max_bytes:
        job = record.job and replace(
            record.job, comment=fit_text(record.job.comment or "", SHORT) or None
        )
        probes = tuple(
            replace(probe, detail=probe.detail and fit_text(probe.detail, 128))
            for probe in record.probes
        )
        record = replace(record, job=job, probes=probes)
        content = _json(record)
    limit = len(record.findings)
    while len(content) > max_bytes and limit > 1:
        limit //= 2
        record = replace(record, findings=fit_findings(record.findings, limit))
        content = _json(record)
    return content


def fit(record: FaultRecord) -> FaultRecord:
    """Return the record with every value inside the schema's limits."""
    return replace(
        record,
        cluster=_short(record.cluster),
        node=node_name(record.node),
        job=_fit_job(record.job) if record.job else None,
        findings=fit_findings(record.findings),
        probes=tuple(_fit_probe(probe) for probe in record.probes[:PROBES_LIMIT]),
    )


def fit_findings(findings: Sequence[Finding], limit: int = FINDINGS_LIMIT) -> tuple[Finding, ...]:
    """Return at most ``limit`` findings, the gravest, in their order; the last counts the rest."""
    fitted = [_fit_finding(finding) for finding in findings]
    if len(fitted) <= limit:
        return tuple(fitted)
    ranks = [SEVERITIES.index(finding.severity) for finding in fitted]
    by_gravity = sorted(range(len(fitted)), key=lambda place: (-ranks[place], place))
    kept = sorted(by_gravity[: max(0, limit - 1)])
    left_out = [fitted[place] for place in by_gravity[max(0, limit - 1) :]]
    # Folding twice must not forget what the first time counted.
    count = sum(item.count if item.code == FOLDED else 1 for item in left_out)
    gravest = max(left_out, key=lambda item: SEVERITIES.index(item.severity))
    summary = f"{count} more findings did not fit into the record, the gravest: {gravest.code}"
    folded = Finding(FOLDED, gravest.severity, fit_text(summary, SUMMARY), count=count)
    return (*(fitted[place] for place in kept), folded)


def fit_text(text: str, limit: int) -> str:
    """Return the text with at most ``limit`` characters, and without what UTF-8 cannot hold."""
    shown = text[: limit + 1].encode("utf-8", "backslashreplace").decode("utf-8")
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def node_name(text: str) -> str:
    """Return a name that is safe as a part of a file's name; Slurm's own names stay as they are."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", text[:255]).lstrip(".-") or "unknown"


def _fit_finding(finding: Finding) -> Finding:
    code, summary = finding.code, finding.summary
    if len(code) > 80 or not _CODE.fullmatch(code):
        code, summary = UNNAMED, f"{code[:100]}: {summary}"
    resolution = re.sub(r"[^a-z0-9_]+", "_", (finding.resolution or "").lower())[:64] or None
    return Finding(
        code=code,
        severity=finding.severity if finding.severity in SEVERITIES else "warning",
        summary=fit_text(summary, SUMMARY),
        gpu=_number(finding.gpu, INDEX),
        uuid=_short(finding.uuid),
        pci=_short(finding.pci),
        link=_number(finding.link, INDEX),
        port=_short(finding.port),
        rank=_number(finding.rank, RANK),
        step=_number(finding.step, STEP),
        file=None if finding.file is None else fit_text(finding.file, LONG),
        pid=_number(finding.pid, NUMBER),
        job_id=_number(finding.job_id, NUMBER),
        count=max(1, min(finding.count, NUMBER)),
        resolution=resolution,
        evidence=tuple(_fit_evidence(item) for item in finding.evidence[:EVIDENCE_LIMIT]),
    )


def _fit_evidence(evidence: Evidence) -> Evidence:
    known_time = evidence.time if evidence.time and _TIME.fullmatch(evidence.time) else None
    return Evidence(
        source=_short(evidence.source) or "unknown",
        text=fit_text(evidence.text, EVIDENCE_TEXT),
        time=known_time,
        key=_short(evidence.key),
    )


def _fit_probe(probe: ProbeResult) -> ProbeResult:
    name = probe.name[:80] if _NAME.fullmatch(probe.name) else node_name(probe.name)[:80]
    return ProbeResult(
        name=name,
        status=probe.status if probe.status in PROBE_STATUSES else "error",
        seconds=round(min(max(probe.seconds, 0.0), 86_400.0), 6),
        detail=None if probe.detail is None else fit_text(probe.detail, DETAIL),
    )


def _fit_job(job: RecordJob) -> RecordJob:
    return RecordJob(
        id=min(max(job.id, 0), NUMBER),
        restart=min(max(job.restart, 0), NUMBER),
        user=_short(job.user),
        uid=_number(job.uid, NUMBER),
        partition=_short(job.partition),
        nodes=None if job.nodes is None else fit_text(job.nodes, LONG),
        gpus=tuple(gpu for gpu in job.gpus if 0 <= gpu <= INDEX)[:GPUS_LIMIT],
        array=job.array if re.fullmatch(r"[0-9]{1,10}_[0-9]{1,10}", job.array or "") else None,
        sluid=_short(job.sluid),
        exit=job.exit if re.fullmatch(r"[0-9]{1,5}:[0-9]{1,5}", job.exit or "") else None,
        comment=None if job.comment is None else fit_text(job.comment, LONG),
    )


def _less(finding: Finding, evidence: int, text: int) -> Finding:
    shortened = (replace(e, text=fit_text(e.text, text)) for e in finding.evidence[:evidence])
    file = finding.file and fit_text(finding.file, text)
    return replace(finding, evidence=tuple(shortened), file=file)


def _short(text: str | None) -> str | None:
    return fit_text(text, SHORT) if text else None


def _number(value: int | None, largest: int) -> int | None:
    return value if value is not None and 0 <= value <= largest else None


def _json(record: FaultRecord) -> bytes:
    return json.dumps(record.to_dict(), ensure_ascii=False, separators=(",", ":")).encode("utf-8")
