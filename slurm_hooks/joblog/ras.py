"""NCCL's own report on a job's communicators (RAS, from NCCL 2.24): whom it could not reach.

``ncclras`` prints it as text or, from 2.28.7, as JSON; a job's script or this toolkit may have put
it into a log or a file. Format: NVIDIA/nccl src/ras/client_support.cc and the user guide's page on
RAS. Ranks in it are ranks of a communicator, not of the job: hosts and processes are what counts.
Differing counts of operations are no fault by themselves; a report is one moment of a running job.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurm_hooks.joblog.lines import parse

_LINES_LIMIT = 4_000
_REPORT_BYTES = 1 << 20
_TAIL_BYTES = 4 << 20
"""How much of a log's end is searched: a report that still counts stands near it."""

_MARKS = (b"Missing communicator data from", b"(unreachable via the RAS network)", b" MISMATCH")
_START = b"Job summary"

_PROCESS = re.compile(
    r"Process (?P<pid>\d+) on node (?P<host>\S+) managing GPUs? (?P<gpus>\d+(?:,\d+)*)"
)
_TOTALS = re.compile(r"\s*(\d+)\s+[\d-]+\s+[\d-]+\s+(?P<processes>\d+)\s+\d+$")
_COMMUNICATOR = re.compile(r"#\d+-\d+ \((?P<hash>[0-9a-f]{1,16})\) (?P<error>[A-Z|]+)")
_COUNTS = re.compile(r"Communicator ranks have different (?P<what>.*(?:counts|status))")


@dataclass(frozen=True)
class Missing:
    """A process that did not answer. ``how`` says it in words: ``cannot reach`` or ``gave up``."""

    host: str
    pid: int
    gpu: int | None
    how: str


@dataclass(frozen=True)
class RasReport:
    """One report: who is missing, and communicators (by hash) whose ranks differ in something.

    ``processes`` is the job's number of them, None where the report does not say.
    """

    missing: tuple[Missing, ...] = ()
    mismatched: tuple[tuple[str, str], ...] = ()
    processes: int | None = None


def find(data: bytes) -> RasReport | None:
    """Return the last report near the end of a log or a file, None where there is none."""
    if data.lstrip()[:1] == b"{" and b'"communicators"' in data[:_REPORT_BYTES]:
        return _of_json(data)
    data = data[-_TAIL_BYTES:]
    at = max(data.rfind(mark) for mark in _MARKS)
    if at < 0:
        return None
    start = max(data.rfind(_START, 0, at), at - _REPORT_BYTES, 0)
    start = data.rfind(b"\n", 0, start) + 1
    report = _of_text(data[start : start + _REPORT_BYTES])
    return report if report.missing or report.mismatched else None


def _of_text(data: bytes) -> RasReport:
    missing: dict[tuple[str, int], Missing] = {}
    mismatched: list[tuple[str, str]] = []
    how, processes, communicator = "", None, ""
    for raw in data.split(b"\n")[:_LINES_LIMIT]:
        text = parse(raw).text.strip()
        if text == "INCOMPLETE":
            how = "cannot reach"
        elif text == "DEAD":
            how = "gave up on"
        elif text == "Warnings":
            how = ""
        totals = _TOTALS.match(text)
        if totals and processes is None:
            processes = int(totals["processes"])
        section = _COMMUNICATOR.match(text)
        if section:
            communicator, how = section["hash"], ""
        differing = _COUNTS.match(text)
        if differing and communicator:
            mismatched.append((communicator, differing["what"]))
        found = _PROCESS.match(text)
        if found and how:
            gpus = found["gpus"].split(",")
            gpu = int(gpus[0]) if len(gpus) == 1 else None
            key = (found["host"], int(found["pid"]))
            missing[key] = Missing(*key, gpu, how)
    return RasReport(tuple(missing.values()), tuple(mismatched), processes)


def _of_json(data: bytes) -> RasReport | None:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError, MemoryError):
        return None
    listed = document.get("communicators") if isinstance(document, dict) else None
    missing: dict[tuple[str, int], Missing] = {}
    known: set[tuple[str, int]] = set()
    mismatched = []
    for communicator in listed if isinstance(listed, list) else []:
        if not isinstance(communicator, dict):
            continue
        ranks = [one for one in _list(communicator, "ranks") if isinstance(one, dict)]
        known.update(key for key in map(_process, ranks) if key)
        counts = [one["collective_counts"] for one in ranks if "collective_counts" in one]
        if any(count != counts[0] for count in counts):
            mismatched.append((str(communicator.get("hash"))[:20], "operation counts"))
        for one in _list(communicator, "missing_ranks"):
            status = one.get("status") if isinstance(one, dict) else None
            key = _process(one) if isinstance(one, dict) else None
            if (
                key is None
                or not isinstance(status, dict)
                or status.get("unresponsive") is not True
            ):
                continue
            gpu = one.get("cuda_dev")
            how = "gave up on" if status.get("considered_dead") is True else "cannot reach"
            missing[key] = Missing(*key, gpu if type(gpu) is int else None, how)
    if not missing and not mismatched:
        return None
    return RasReport(tuple(missing.values()), tuple(mismatched), len(known | missing.keys()))


def _list(table: Mapping[str, Any], name: str) -> list[Any]:
    found = table.get(name)
    return found[:_LINES_LIMIT] if isinstance(found, list) else []


def _process(rank: Mapping[str, Any]) -> tuple[str, int] | None:
    host, pid = rank.get("host"), rank.get("pid")
    return (host, pid) if isinstance(host, str) and type(pid) is int else None
