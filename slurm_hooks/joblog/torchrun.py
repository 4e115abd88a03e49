"""torchrun's closing block: which rank failed first on its node, and how.

Each agent prints the failures of its node and, under "Root Cause (first observed failure)", the one
with the earliest time. Source: torch/distributed/elastic/multiprocessing/errors/__init__.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from slurm_hooks.joblog.lines import Line, parse

SIGNATURE = "torchrun.root_cause"

_LINES_LIMIT = 60
_LINE_BYTES = 2_048
_FIELDS = (
    ("host", re.compile(r"\s*host\s+: (\S+)")),
    ("rank", re.compile(r"\s*rank\s+: (\d{1,6}) \(local_rank: \d+\)")),
    ("code", re.compile(r"\s*exitcode\s+: (-?\d{1,5})\b")),
    ("number", re.compile(r"\s*traceback : Signal (\d{1,3}) \(")),
)
_LAST = "traceback"


def first_failure(data: bytes, position: int, heading: Line) -> Mapping[str, str]:
    """Return host, rank, exit code and signal number that follow the ``heading`` at ``position``.

    Lines of other processes between them are passed over.
    """
    found: dict[str, str] = {}
    for _ in range(_LINES_LIMIT):
        start = data.find(b"\n", position) + 1
        if start <= 0 or start >= len(data):
            break
        end = data.find(b"\n", start)
        end = len(data) if end < 0 else end
        line = parse(data[start : min(end, start + _LINE_BYTES)], source=heading.source)
        position = start
        if line.writer != heading.writer:
            continue
        for name, pattern in _FIELDS:
            match = pattern.match(line.text)
            if match:
                found.setdefault(name, match[1])
        if line.text.strip().startswith((_LAST, "====")):
            break
    return found
