"""What NVIDIA's nccl-tests print, in every form they have had, as numbers.

    >>> parse("# Out of bounds values : 0 OK\\n# Avg bus bandwidth    : 479.123\\n").average
    479.123

The table's columns are found by the names in its header: ``res`` and ``error`` (NCCL 1 to 2.11),
``#wrong`` (since), with or without ``redop`` and ``root``, with ``cputime``, timestamps, columns of
each iteration, and what AMD's rccl-tests add. The JSON that ``-J`` writes is read as well. Source
of the forms: NVIDIA/nccl-tests, src/common.cu and src/util.cu, and outputs in its public issues.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NOT_TAKEN = "N/A"
"""What stands for a count of wrong values or a bandwidth that was not taken."""

_ERRORS_LIMIT = 16
_LINE_CHARACTERS = 300

_TAG = re.compile(r"^(?:\[\d+(?:,\d+)?\](?:<std(?:out|err)>:?)?\s?|\d+: )")
"""What mpirun --tag-output and srun -l put before each line."""

_INNER_TAG = re.compile(r"\[\d+\](?=\s)")
"""A launcher that tags each write does so within a row, too."""

_DEVICE = re.compile(r"#?\s*Rank +\d+ .*\bdevice +\d+ \[[0-9a-fA-Fx:.]+\] (.+)")
_FOOTER = re.compile(r"#?\s*(Out of bounds values|Avg bus bandwidth)\s*: *(\S+)")
_ERROR = re.compile(
    r"NCCL failure|CUDA failure|NCCL WARN|Test failure|Test timeout|# error: \S|"
    r"Invalid number of GPUs|error while loading shared libraries"
)


@dataclass(frozen=True)
class Row:
    """One size: bytes, bus bandwidths in GB/s and counts of wrong values, of both placements.

    ``wrong`` is None where the values were not checked or the column holds something else.
    """

    size: int
    busbw: tuple[float, ...]
    wrong: int | None


@dataclass(frozen=True)
class Output:
    """One run of one test.

    ``out_of_bounds`` and ``average`` (GB/s) are of the footer: without it the test did not reach
    its end. ``devices`` are the GPUs' names, by rank. ``started`` tells that the table was begun.
    """

    rows: tuple[Row, ...] = ()
    devices: tuple[str, ...] = ()
    out_of_bounds: int | None = None
    average: float | None = None
    errors: tuple[str, ...] = ()
    started: bool = False

    @property
    def finished(self) -> bool:
        """Whether the test reached its end."""
        return self.average is not None or self.out_of_bounds is not None

    @property
    def wrong(self) -> int:
        """How many values, or sizes where only the footer tells, were wrong."""
        return sum(row.wrong or 0 for row in self.rows) or self.out_of_bounds or 0

    @property
    def checked(self) -> bool:
        """Whether any result was compared with what it should be."""
        return self.out_of_bounds is not None or any(row.wrong is not None for row in self.rows)

    @property
    def busbw(self) -> float | None:
        """GB/s of the largest size: the printed average is dragged down by small ones."""
        known = [row for row in self.rows if row.busbw]
        if not known:
            return self.average
        largest = max(known, key=lambda row: row.size).busbw
        return sum(largest) / len(largest)

    @property
    def largest(self) -> int:
        """Bytes of the largest size measured; 0 for none."""
        return max((row.size for row in self.rows), default=0)


def parse(text: str) -> Output:
    """Return what ``text``, printed or written by a test, says; whatever it is, it is read."""
    if text.lstrip()[:1] == "{":
        try:
            return _of_json(json.loads(text))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return Output(errors=("its JSON is cut short or of an unknown form",))
    return _of_text(text)


def _of_text(text: str) -> Output:
    rows: list[Row] = []
    devices: list[str] = []
    errors: list[str] = []
    footer: dict[str, float] = {}
    columns: Sequence[str] = ()
    started = False
    for raw in text.splitlines():
        line = _TAG.sub("", raw.strip())
        words = line.lstrip("# ").split()
        if _ERROR.search(line):
            errors.append(line[:_LINE_CHARACTERS])
        elif words[:1] in (["size"], ["bytes"]) and "busbw" in words:
            columns, started = words, True
        elif device := _DEVICE.match(line):
            devices.append(device[1].strip())
        elif end := _FOOTER.match(line):
            number = _float(end[2])
            footer |= {} if number is None else {end[1]: number}
        elif columns and (row := _row(columns, _INNER_TAG.sub(" ", line).split())):
            rows.append(row)
    bounds = footer.get("Out of bounds values")
    return Output(
        rows=tuple(rows),
        devices=tuple(devices),
        out_of_bounds=None if bounds is None else int(bounds),
        average=footer.get("Avg bus bandwidth"),
        errors=tuple(errors[:_ERRORS_LIMIT]),
        started=started,
    )


def _row(columns: Sequence[str], words: Sequence[str]) -> Row | None:
    """A line of the table; None for one that another process has printed into."""
    if len(words) < len(columns) or not words[0].isdigit():
        return None
    cells = list(zip(columns, words, strict=False))
    bandwidths = [_float(word) for name, word in cells if name == "busbw" and word != _NOT_TAKEN]
    if None in bandwidths:
        return None
    wrong = [_float(word) for name, word in cells if name in ("#wrong", "wrong")]
    counted = [int(number) for number in wrong if number is not None]
    return Row(
        size=int(words[0]),
        busbw=tuple(number for number in bandwidths if number is not None),
        wrong=sum(counted) if counted else None,
    )


def _of_json(document: Mapping[str, Any]) -> Output:
    rows = []
    for result in document.get("results") or ():
        places = [result[name] for name in ("out_of_place", "in_place") if result.get(name)]
        bandwidths = [_float(place.get("bus_bw")) for place in places]
        wrong = [_float(place.get("nwrong")) for place in places]
        counted = [int(number) for number in wrong if number is not None]
        rows.append(
            Row(
                size=int(result["size"]),
                busbw=tuple(number for number in bandwidths if number is not None),
                wrong=sum(counted) if counted else None,
            )
        )
    bounds = _float((document.get("out_of_bounds") or {}).get("count"))
    average = _float((document.get("average_bus_bandwidth") or {}).get("bandwidth"))
    devices = (document.get("config") or {}).get("devices") or ()
    told = [str(error)[:_LINE_CHARACTERS] for error in document.get("errors") or () if error]
    return Output(
        rows=tuple(rows),
        devices=tuple(str(device.get("device_info", "")) for device in devices),
        out_of_bounds=None if bounds is None else int(bounds),
        average=average,
        errors=tuple(told[:_ERRORS_LIMIT]),
        started="results" in document,
    )


def _float(text: object) -> float | None:
    """A finite number; None for ``N/A``, ``nan`` and what is none."""
    try:
        number = float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
