r"""One line of a log, with what launchers put before it taken off.

    >>> line = parse(b"5: [rank5]: ValueError: bad \x1b[31mshape\x1b[0m")
    >>> line.rank, line.text
    (5, 'ValueError: bad shape')

Owns the prefixes: ``srun -l``, torchrun, mpirun, pods, Ray, NCCL, timestamps of every common form,
and ANSI colours. Says nothing about what a line means.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

TEXT_LIMIT = 4096
"""Longest part of one line that is read, in bytes; a minified dump can be a megabyte."""

_ANSI = re.compile(rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")

_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        # torch: the global rank of the process, since 2.2; NeMo and others write it alike
        r"\[rank:?\s?(?P<rank>\d{1,6})\]:?\s?",
        r"\[Rank (?P<rank>\d{1,6})\]:\s?",
        # torchrun --tee: role and local rank
        r"\[(?:default|trainer|worker)(?P<local>\d{1,4})\]:\s?",
        # srun --label: the task id, padded to one width
        r"\s{0,6}(?P<task>\d{1,6}): ",
        # mpirun --tag-output
        r"\[\d+,(?P<task>\d+)\]<std(?:err|out|diag)>:\s?",
        # Ray's actors
        r"\((?:\w+ )?pid=\d+(?:, ip=(?P<host>[0-9a-fA-F.:]+))?\)\s",
        # pods: kubectl --prefix, stern, compose
        r"\[pod/(?P<host>[\w.-]+)/[\w.-]+\]\s",
        r"(?P<host>[a-z0-9][\w.-]{0,80}) +[|\u203a] ",
        # pdsh, as DeepSpeed's launcher runs it
        r"(?!step|epoch|iter|stage|rank|cuda|gpu|layer|loss|v\d)"
        r"(?P<host>[a-z][a-z-]*\d[a-z0-9-]*(?:\.[a-z0-9-]+)*)(?<!\.py):\s(?=\S)",
        r"(?P<host>\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}):\s(?=\S)",
        # times: ISO, with brackets, with zone; glog; dmesg; syslog; clock alone
        r"\[?(?P<iso>\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?)"
        r"(?:Z| ?[+-]\d\d:?\d\d)?\]?:?\s+(?:- )?",
        r"\[\s*(?P<uptime>\d{1,9}\.\d{6})\]\s",
        r"\[?(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\]?:?\s*",
        r"std(?:err|out): ",
        # vLLM; torchx, as NeMo-Run uses it; loggers that put their level before each line
        r"(?:ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[\w./-]+:\d+\] ",
        r"[a-z][\w.]{0,40}/\d{1,3} (?=Traceback|  |[\w.]*(?:Error|Exception)\b)",
        r"\[(?:ERROR|CRITICAL)\]\s+(?=Traceback|File \"|[\w.]*(?:Error|Exception)\b)",
        r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?P<host>[\w.-]+) (?=[\w./-]+(?:\[\d+\])?:\s)",
        r"\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?\s+",
        r"(?P<host>[\w.-]+) kernel:\s",
        r"kernel:\s",
    )
)

_TORCHRUN_RANK = re.compile(r"\bRank (?P<rank>\d{1,6})\]")
_NCCL = re.compile(r"(?P<host>[A-Za-z0-9][\w.-]*)(?::\d+:\d+)? \[(?P<gpu>\d+)\] ")
_ROUNDS = 6
"""Most prefixes taken off one line: label, pod, time, level and rank together are five."""


@dataclass(frozen=True)
class Line:
    """One line: where it stands, who wrote it, and its text without prefixes.

    ``number`` counts from 1, None where the part before was not read; ``offset`` is the byte where
    the line starts. ``rank`` is a global rank, ``task`` a Slurm or MPI task id (the rank too,
    where each task is one process), ``local`` a rank within its node. ``gpu`` is the reporter's
    CUDA device. ``seconds`` is a time since the epoch taken as UTC, for ordering files only.
    ``writer`` tells the processes of interleaved output apart. ``text`` keeps its indentation.
    """

    offset: int
    raw: str
    text: str
    number: int | None = None
    rank: int | None = None
    task: int | None = None
    local: int | None = None
    host: str | None = None
    gpu: int | None = None
    seconds: float | None = None
    source: str = ""

    @property
    def writer(self) -> tuple[str, int | None, int | None, int | None, str | None]:
        """What tells this line's process from others that write to the same file."""
        return (self.source, self.rank, self.task, self.local, self.host)


def parse(data: bytes, offset: int = 0, number: int | None = None, source: str = "") -> Line:
    """Return the Line in ``data``: one line of any length and encoding, without its line end."""
    raw = clean(data[:TEXT_LIMIT])
    found: dict[str, str] = {}
    text = raw
    for _ in range(_ROUNDS):
        shorter = _without_one_prefix(text, found)
        if shorter is None:
            break
        text = shorter
    nccl = _NCCL.match(text)
    if nccl:
        found.setdefault("host", nccl["host"])
        found.setdefault("gpu", nccl["gpu"])
    said = _TORCHRUN_RANK.search(text)
    if said:
        found.setdefault("rank", said["rank"])
    return Line(
        offset=offset,
        raw=raw,
        text=text.rstrip(),
        number=number,
        rank=_number(found, "rank"),
        task=_number(found, "task"),
        local=_number(found, "local"),
        host=found.get("host"),
        gpu=_number(found, "gpu"),
        seconds=_seconds(found.get("iso")),
        source=source,
    )


def clean(data: bytes) -> str:
    """Return readable text: without colours and control characters; what is not UTF-8 shows."""
    text = _ANSI.sub(b"", data).decode("utf-8", "backslashreplace")
    return _CONTROL.sub("", text).rstrip()


def _without_one_prefix(text: str, found: dict[str, str]) -> str | None:
    for prefix in _PREFIXES:
        match = prefix.match(text)
        if match and match.end() <= len(text):
            for name, value in match.groupdict().items():
                if value is not None:
                    found.setdefault(name, value)
            return text[match.end() :]
    return None


def _number(found: dict[str, str], name: str) -> int | None:
    return int(found[name]) if name in found else None


def _seconds(iso: str | None) -> float | None:
    if iso is None:
        return None
    try:
        moment = datetime.strptime(
            iso[:19].replace("/", "-").replace("T", " "), "%Y-%m-%d %H:%M:%S"
        )
    except ValueError:
        return None
    return (moment - datetime(1970, 1, 1)).total_seconds()
