"""Files of single ranks side by side in one folder: ``step100_rank0.pt``, ``step100_rank1.pt``, …

Many training loops that save by hand write one file for each rank. They are one checkpoint: all
ranks must be there, as many as any other step has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_RANK = re.compile(r"(?<![a-z])(?:rank|shard|proc|process)[-_=.]?(?P<rank>\d{1,6})", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")


@dataclass
class Group:
    """One checkpoint in several files: ``names`` by rank, and how many ranks there must be."""

    names: dict[int, str] = field(default_factory=dict)
    count: int = 0


def groups(names: Iterable[str]) -> Mapping[str, Group]:
    """Return the groups of files that differ in their rank alone, by their common name.

    >>> sorted(groups(["s1_rank0.pt", "s1_rank1.pt", "s2_rank0.pt", "x.pt"]))
    ['s1_rank*.pt', 's2_rank*.pt']
    """
    found: dict[str, Group] = {}
    for name in names:
        match = _RANK.search(name)
        if match:
            start, end = match.span("rank")
            common = f"{name[:start]}*{name[end:]}"
            found.setdefault(common, Group()).names[int(match["rank"])] = name
    most: dict[str, int] = {}
    for common, group in found.items():
        family = _NUMBER.sub("#", common)
        most[family] = max(most.get(family, 0), max(group.names) + 1)
    for common, group in found.items():
        group.count = most[_NUMBER.sub("#", common)]
    return {common: group for common, group in found.items() if group.count > 1}
