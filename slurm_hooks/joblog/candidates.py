"""Find the lines of a log that hold one of a few strings, at the speed of memory.

    >>> data = b"step 1 loss 2.5\\nstep 2 loss 2.4\\nKeyError: 'tokens'\\n"
    >>> [data[start:end] for start, end in find(data, (b"rror", b"exit"))]
    [b"KeyError: 'tokens'"]

An ordinary log says the same thing for gigabytes, with other numbers in it. So each piece of it is
taken without its digits, its lines are reduced to those that differ, and the strings are searched
in what is left, a hundredth of it; only a piece in which one was found is searched itself. Where
lines do differ, the pieces are searched directly, one pass for each string.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_hooks.joblog.lines import TEXT_LIMIT

_PIECE_BYTES = 256 << 10
"""Measured best of 256 KiB to 4 MiB: it and its lines stay in the processor's cache."""

_SAME_SHARE = 0.5
"""Above this share of lines that differ, reducing a piece costs more than it saves."""

_PIECES_DIRECT = 16
"""Pieces searched directly after one whose lines differed, before it is tried again."""

_DIGITS = b"0123456789"
_LINE_ENDS = bytes.maketrans(b"\r", b"\n")


def find(data: bytes, strings: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return where the lines that hold one of ``strings`` start and end, in order, each once.

    A line is at most TEXT_LIMIT long, around the string; progress bars end in ``\\r``.
    """
    lines: set[tuple[int, int]] = set()
    plain = [string for string in strings if not any(digit in string for digit in _DIGITS)]
    others = [string for string in strings if string not in plain]
    overlap = max(map(len, strings), default=0)
    direct = start = 0
    while start < len(data):
        end = _piece_end(data, start)
        wanted = plain
        if direct:
            direct -= 1
        else:
            wanted, differ = _in_differing_lines(data[start : end + overlap], plain)
            direct = _PIECES_DIRECT if differ > _SAME_SHARE else 0
        for string in (*wanted, *others):
            _find_one(data, string, start, min(len(data), end + overlap), lines)
        start = end
    return sorted(lines)


def line_around(data: bytes, at: int) -> tuple[int, int]:
    """Return start and end of the line that holds ``at``, at most TEXT_LIMIT long."""
    floor = max(0, at - TEXT_LIMIT // 2)
    start = max(data.rfind(b"\n", floor, at), data.rfind(b"\r", floor, at)) + 1
    start = max(start, floor)
    ceiling = min(len(data), at + TEXT_LIMIT)
    end = data.find(b"\n", at, ceiling)
    end = ceiling if end < 0 else end
    turn = data.find(b"\r", at, end)
    return start, end if turn < 0 else turn


def _piece_end(data: bytes, start: int) -> int:
    end = start + _PIECE_BYTES
    if end >= len(data):
        return len(data)
    cut = data.rfind(b"\n", start, end) + 1
    return cut if cut > start else end


def _in_differing_lines(piece: bytes, strings: Sequence[bytes]) -> tuple[list[bytes], float]:
    """Which of ``strings`` the piece may hold, and the share of it that is not repetition."""
    without = piece.translate(_LINE_ENDS, _DIGITS)
    differing = b"\n".join(set(without.split(b"\n")))
    found = [string for string in strings if string in differing]
    return found, len(differing) / (len(without) + 1)


def _find_one(
    data: bytes, string: bytes, start: int, end: int, lines: set[tuple[int, int]]
) -> None:
    at = data.find(string, start, end)
    while at >= 0:
        span = line_around(data, at)
        lines.add(span)
        at = data.find(string, max(span[1], at + 1), end)
