"""Python tracebacks in interleaved output: where each ends, and what it was raised from.

Knows the form of a traceback alone; which exception explains a failure is ``attribute``'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slurm_hooks.joblog.lines import Line, parse
from slurm_hooks.joblog.read import Piece

HEADERS_LIMIT = 300
"""Most tracebacks of one piece that are followed: the first ones, from as many ranks."""

_LINES_LIMIT = 400
_LINE_BYTES = 2_048

_EXCEPTION = re.compile(
    r"^[A-Za-z_][\w.]*(?:\[[\w, ]+\])?(?: \(see above for traceback\))?(?::(?: |$)|$)"
)
_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line \d+')
_BOX = ("│", "╭", "╰", "|", "+-", "^", "~")
_TEARDOWN = re.compile(
    r"Exception ignored in|Error in atexit|Error in sys\.excepthook|Logging error"
)
_HANDLED = re.compile(
    r"(?i)(?=.*(?:error|exception|fail|could not|unable|couldn.t))"
    r".*(?:\bwarn(?:ing)?\b|retrying|will retry|skipping|ignoring|fall(?:ing)? ?back|non-fatal)"
)
_CAUSE = ("The above exception was the direct cause", "During handling of the above exception")
_LAUNCHERS = (
    *("/torch/distributed/run.py", "/torch/distributed/launch", "/torch/distributed/elastic/"),
    *("/torch/multiprocessing/spawn.py", "/accelerate/commands/", "/deepspeed/launcher/"),
)
_PIPES = "/multiprocessing/"
_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen")


@dataclass(frozen=True)
class Traceback:
    """One traceback: its header, its last line, and what stands around it.

    ``chained`` says that it was raised from the traceback before it by the same writer;
    ``teardown`` that the interpreter prints it while it throws it away, ``handled`` that the
    program says it goes on. ``last_file`` is the file of the last frame that was seen.
    """

    header: Line
    exception: Line | None
    chained: bool
    teardown: bool
    handled: bool
    last_file: str = ""

    @property
    def in_library(self) -> bool:
        """Whether it was raised in installed code, not in the job's own."""
        return any(part in self.last_file for part in _LIBRARY)

    @property
    def between_processes(self) -> bool:
        """Whether it was raised in the pipes of Python's multiprocessing."""
        return _PIPES in self.last_file

    @property
    def of_launcher(self) -> bool:
        """Whether it is a launcher's, which only tells that its processes failed."""
        return any(part in self.last_file for part in _LAUNCHERS)


def walk(piece: Piece, headers: Sequence[int], source: str) -> Iterator[Traceback]:
    """Yield the traceback that begins at each of ``headers`` (positions of header lines)."""
    for header in headers[:HEADERS_LIMIT]:
        yield _one(piece, header, source)


def _one(piece: Piece, header: int, source: str) -> Traceback:
    data = piece.data
    end = _line_end(data, header)
    # Behind a progress bar that did not end its line, the rank's own prefix stands in the middle.
    label = data.find(b"[rank", header, end)
    if label >= 0 and b"Traceback" in data[label:end]:
        header = label
    first = parse(
        data[header : min(end, header + _LINE_BYTES)], piece.offset + header, None, source
    )
    before = _before(data, header, source, first)
    exception, frame, bare = None, None, False
    position = end + 1
    for _ in range(_LINES_LIMIT):
        if position >= len(data):
            break
        end = _line_end(data, position)
        line = parse(
            data[position : min(end, position + _LINE_BYTES)], piece.offset + position, None, source
        )
        position = end + 1
        if line.writer != first.writer or not line.text.strip():
            continue
        if line.text.startswith((" ", "\t")) or line.text.startswith(_BOX):
            frame = _FRAME.match(line.text) or frame
            continue
        # Some loggers take the indentation off: a frame, then its source.
        if _FRAME.match(line.text):
            frame, bare = _FRAME.match(line.text), True
            continue
        if bare and not _EXCEPTION.match(line.text):
            bare = False
            continue
        if "Traceback (most recent call last)" in line.text:
            break
        if _EXCEPTION.match(line.text):
            exception = line
        break
    return Traceback(
        header=first,
        exception=exception,
        chained=any(text in before for text in _CAUSE),
        teardown=bool(_TEARDOWN.search(before)),
        handled=bool(_HANDLED.search(before) or _HANDLED.search(first.text)),
        last_file=frame["file"] if frame else "",
    )


def _before(data: bytes, header: int, source: str, first: Line) -> str:
    """The last text before the header by the same writer, blank lines aside."""
    end = header
    for _ in range(_LOOK_BACK):
        if end <= 0:
            return ""
        start = data.rfind(b"\n", max(0, end - 1 - _LINE_BYTES), end - 1) + 1
        line = parse(data[start : end - 1], start, None, source)
        end = start
        if line.writer == first.writer and line.text.strip():
            return line.text
    return ""


_LOOK_BACK = 24
"""Lines looked back over for the same writer's last text; other ranks write between."""


def _line_end(data: bytes, position: int) -> int:
    end = data.find(b"\n", position)
    return len(data) if end < 0 else end
