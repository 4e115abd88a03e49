"""Slurm's hostlist expressions: many node names in one short text.

>>> expand("n[1-3,07-08],gpu-a")
('n1', 'n2', 'n3', 'n07', 'n08', 'gpu-a')
>>> expand("rack[1-2]n[1-2]")
('rack1n1', 'rack1n2', 'rack2n1', 'rack2n2')
>>> compress(["n1", "n3", "n2", "n07", "n08", "gpu-a"])
'gpu-a,n[07-08],n[1-3]'
>>> expand("")
()

Pure, and bounded: an expression may come out of a record that somebody forged. The grammar is
that of ``man scontrol`` (hostlist) as slurmctld writes it; ``scontrol show hostnames`` agrees.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from recovery.slurm.base import EXCLUDE_LIMIT

TEXT_LIMIT_BYTES = 1_000_000
"""Longest expression looked at: ten thousand names written out in full are a tenth of it."""

DIGITS_LIMIT = 18
"""Longest number in a range; no cluster counts further, and int() stays cheap."""

_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_NUMBERED = re.compile(rf"(.*?)(\d{{1,{DIGITS_LIMIT}}})(\D*)", re.ASCII | re.DOTALL)


class HostlistError(ValueError):
    """The text is no hostlist expression, or stands for more names than the limit."""


def expand(text: str, limit: int = EXCLUDE_LIMIT) -> tuple[str, ...]:
    """Return the names that ``text`` stands for, in its order, each once.

    Raises HostlistError for malformed text and for more than ``limit`` names.
    """
    if len(text) > TEXT_LIMIT_BYTES:
        raise HostlistError(f"a hostlist of {len(text)} characters is too long")
    names: dict[str, None] = {}
    expanded = itertools.chain.from_iterable(_expand_term(term, limit) for term in _terms(text))
    for count, name in enumerate(expanded):
        # Counted before doubles are dropped, for it is the work that has to end.
        if count >= limit:
            raise HostlistError(f"a hostlist stands for more than {limit} nodes")
        names[name] = None
    return tuple(names)


def compress(names: Iterable[str]) -> str:
    """Return a sorted hostlist expression for ``names``; ``expand`` gives the same set back."""
    unique = sorted(set(names))
    parsed = [(name, _NUMBERED.fullmatch(name)) for name in unique]
    padded = {
        (match[1], match[3], len(match[2]))
        for _, match in parsed
        if match and match[2].startswith("0") and len(match[2]) > 1
    }
    plain: list[str] = []
    groups: dict[tuple[str, str, int], list[int]] = {}
    for name, match in parsed:
        if match is None:
            plain.append(name)
            continue
        prefix, digits, suffix = match.groups()
        # n10 beside n09 is one range of width two; beside n9 it needs no width at all.
        width = len(digits) if (prefix, suffix, len(digits)) in padded else 0
        groups.setdefault((prefix, suffix, width), []).append(int(digits))
    terms = plain + [_bracket(*key, numbers) for key, numbers in groups.items()]
    return ",".join(sorted(terms))


def _terms(text: str) -> Iterator[str]:
    """Split at the commas outside brackets."""
    depth = start = 0
    for position, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        if not 0 <= depth <= 1:
            raise HostlistError(f"brackets do not match in {_short(text)}")
        if character == "," and depth == 0:
            yield text[start:position]
            start = position + 1
    if depth:
        raise HostlistError(f"brackets do not match in {_short(text)}")
    if text:
        yield text[start:]


def _expand_term(term: str, limit: int) -> Iterator[str]:
    if not term:
        raise HostlistError("a hostlist has an empty name")
    if "[" not in term:
        return iter((term,))
    parts = [
        (literal,) if literal else tuple(_numbers(ranges, limit))
        for ranges, literal in _PART.findall(term)
    ]
    return ("".join(pieces) for pieces in itertools.product(*parts))


def _numbers(ranges: str, limit: int) -> Iterator[str]:
    """Yield the numbers of ``1-4,07-09``, padded as wide as the lower bound is written."""
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        if not match or len(item) > 2 * DIGITS_LIMIT + 1:
            raise HostlistError(f"not a range of numbers: {_short(item)}")
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low) or int(high) - int(low) >= limit:
            raise HostlistError(f"a range runs backwards or is longer than {limit}: {item}")
        for number in range(int(low), int(high) + 1):
            yield str(number).zfill(len(low))


def _bracket(prefix: str, suffix: str, width: int, numbers: list[int]) -> str:
    numbers = sorted(numbers)
    if len(numbers) == 1:
        return f"{prefix}{numbers[0]:0{width}d}{suffix}"
    # Numbers of one run keep the same distance from their place in the list.
    runs = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    texts = []
    for _, run in runs:
        members = [number for _, number in run]
        first, last = f"{members[0]:0{width}d}", f"{members[-1]:0{width}d}"
        texts.append(first if first == last else f"{first}-{last}")
    return f"{prefix}[{','.join(texts)}]{suffix}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")
