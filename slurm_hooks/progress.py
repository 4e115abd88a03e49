"""How far a job has come: from its progress file, its newest checkpoint, or lines of its log.

    >>> in_text("step=1200 loss=2.31").step
    1200

Owns what counts as a step and the order of trust. The caller reads the files, as the job's user.
Nothing found is ``None``, which means *not known*: never that there is no progress.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

FILE_BYTES = 64 * 1024
"""Most that is read of a progress file; its last line counts, so this much of its end."""

LOG_BYTES = 256 * 1024
"""Most that is read of a log's end."""

STEP_LIMIT = 10**15

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_NUMBER = r"(\d{1,15})(?![\d.])"
_RATE = r"([0-9]{1,9}(?:\.[0-9]{1,9})?)"

_STEP_LINES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("Megatron-LM", re.compile(rf"\biteration\s+{_NUMBER}\s*/\s*\d+\s*\|")),
    ("NeMo", re.compile(rf"\bglobal_step:\s*{_NUMBER}")),
    ("DeepSpeed", re.compile(rf"\[Rank \d+\] step={_NUMBER},")),
    ("DeepSpeed", re.compile(rf"^\W*steps: {_NUMBER} loss:")),
    ("a step line", re.compile(rf"(?i)\b(?:global[_ ]?)?step['\"]?\s*[=:]\s*{_NUMBER}")),
    ("a step line", re.compile(rf"(?i)\b(?:iteration|iter)['\"]?\s*[=:]\s*{_NUMBER}")),
    ("a step line", re.compile(rf"(?i)^\W*(?:\S+ ){{0,4}}(?:step|iter(?:ation)?)\s+{_NUMBER}")),
)
"""Lines that tell the trainer's global step, the most particular first. Sources: the loggers of
Megatron-LM (training.py), NeMo/Lightning (MegatronProgressBar), DeepSpeed (timer.py, engine.py)."""

_BARS = re.compile(rf"^\s*\d{{1,3}}%\|[^|]*\|\s*{_NUMBER}/\d+ \[")
"""tqdm's bar as Hugging Face Trainer shows it: without a description, unlike an epoch's or a
download's. Believed only where no other line tells a step, since an evaluation has the same."""

_RATES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("TFLOP/s/GPU", re.compile(rf"(?i)throughput per GPU \(TFLOP/s/GPU\):\s*{_RATE}")),
    (
        "samples/s",
        re.compile(rf"(?i)(?:samples/s(?:ec)?|samples_per_sec(?:ond)?)['\"]?\s*[=:]\s*{_RATE}"),
    ),
    (
        "tokens/s",
        re.compile(rf"(?i)(?:tokens/s(?:ec)?|tokens_per_sec(?:ond)?|tok/s)['\"]?\s*[=:]\s*{_RATE}"),
    ),
    ("samples/s", re.compile(rf"(?i){_RATE} samples/s")),
    ("tokens/s", re.compile(rf"(?i){_RATE} (?:tokens|tok)/s")),
    ("it/s", re.compile(rf"{_RATE} ?it/s")),
    ("ms/step", re.compile(rf"(?i)elapsed time per iteration \(ms\):\s*{_RATE}")),
    ("s/step", re.compile(rf"(?i)train_step_timing in s:\s*{_RATE}")),
)


@dataclass(frozen=True)
class Progress:
    """A job's step, where it was read, and when that was written (seconds since the epoch).

    ``rate`` is a throughput in ``unit`` where the same line has one.
    """

    step: int
    source: Literal["file", "checkpoint", "log"]
    time: float | None = None
    rate: float | None = None
    unit: str | None = None


def choose(found: Iterable[Progress | None]) -> Progress | None:
    """Return the most trusted: the progress file's, else the checkpoint's, else the log's.

    A file that stands still while the same job's checkpoint has gone past it is no longer
    written, and the checkpoint is believed.
    """
    by_source = {item.source: item for item in found if item}
    file, checkpoint = by_source.get("file"), by_source.get("checkpoint")
    if file and checkpoint and checkpoint.step > file.step:
        return checkpoint
    return file or checkpoint or by_source.get("log")


def in_file(content: bytes, modified: float | None = None) -> Progress | None:
    """Return the step in a progress file's content.

    The forms: a number; lines of which the last counts; ``step=1200``; a JSON object with ``step``.
    """
    text = content.decode("utf-8", "replace").strip("\0 \t\r\n")
    if text.startswith("{"):
        found = _in_json(text)
        if found is not None:
            step, rate, unit = found
            return Progress(step, "file", modified, rate, unit)
    for line in reversed(text.splitlines()[-50:]):
        words = line.strip("\0 \t\r,;")
        if re.fullmatch(r"\d{1,15}", words):
            return Progress(int(words), "file", modified)
        found = _in_json(words) if words.startswith("{") else None
        if found is not None:
            return Progress(found[0], "file", modified, found[1], found[2])
        told = in_text(words)
        if told:
            return Progress(told.step, "file", modified, told.rate, told.unit)
    return None


def in_text(text: str, modified: float | None = None) -> Progress | None:
    """Return the last step that a log's end tells, None where no line tells one."""
    bar: Progress | None = None
    for line in reversed(re.split(r"[\r\n]+", _ANSI.sub("", text))):
        shortened = line[:2000]
        for _trainer, pattern in _STEP_LINES:
            match = pattern.search(shortened)
            if match:
                return Progress(int(match[1]), "log", modified, *_rate(shortened))
        match = _BARS.search(shortened) if bar is None else None
        if match:
            bar = Progress(int(match[1]), "log", modified, *_rate(shortened))
    return bar


def _in_json(text: str) -> tuple[int, float | None, str | None] | None:
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    for key in ("step", "global_step", "iteration"):
        step = document.get(key)
        if type(step) is int and 0 <= step < STEP_LIMIT:
            for name, unit in (
                ("samples_per_second", "samples/s"),
                ("tokens_per_second", "tokens/s"),
            ):
                rate = document.get(name)
                if isinstance(rate, (int, float)) and 0 <= rate < 1e12:
                    return step, float(rate), unit
            return step, None, None
    return None


def _rate(line: str) -> tuple[float | None, str | None]:
    for unit, pattern in _RATES:
        match = pattern.search(line)
        if match:
            return float(match[1]), unit
    return None, None
