"""Where a job's ranks are: ``n[1-4]:8`` is four nodes of eight ranks each.

    >>> layout = parse_layout("n[1-2]:4")
    >>> layout.node_of_rank(5), layout.node_named("N2.cluster.example")
    ('n2', 'n2')

Owns the hostlist forms that Slurm writes; block distribution is assumed, which is what torchrun
and ``srun`` without ``--distribution`` do.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

NODES_LIMIT = 10_000
"""Most nodes an expression is expanded to; more is a broken expression."""

_PART = re.compile(r"[^,\[\]]+|\[[^\[\]]*\]|,")


class LayoutError(Exception):
    """An expression that is no layout; its text says what one looks like."""


@dataclass(frozen=True)
class Layout:
    """The nodes of an attempt in Slurm's order; ``per_node`` ranks on each, None if unknown."""

    nodes: tuple[str, ...] = ()
    per_node: int | None = None

    def node_of_rank(self, rank: int) -> str | None:
        """Return the node of a global rank under block distribution."""
        if not self.per_node or not 0 <= rank < len(self.nodes) * self.per_node:
            return None
        return self.nodes[rank // self.per_node]

    def node_named(self, host: str) -> str | None:
        """Return the node that a program calls ``host``: the name itself, or a longer form."""
        short = host.partition(".")[0].lower()
        for node in self.nodes:
            if node.lower() == host.lower() or node.partition(".")[0].lower() == short:
                return node
        return None


def parse_layout(text: str) -> Layout:
    """Read ``n[1-4]:8``, or a hostlist alone.

    Raises:
        LayoutError: the text is neither.
    """
    nodes, colon, count = text.rpartition(":")
    if not colon:
        nodes, count = text, ""
    if colon and not re.fullmatch(r"[1-9]\d{0,4}", count):
        raise LayoutError(f"{text!r} is no layout: write nodes:ranks-per-node, such as n[1-4]:8")
    return Layout(expand(nodes), int(count) if count else None)


def expand(expression: str) -> tuple[str, ...]:
    """Return the names of a Slurm hostlist expression (``n[1-3,07],m1``) in its order.

    Raises:
        LayoutError: the expression is broken or names more than NODES_LIMIT nodes.
    """
    parts = _PART.findall(expression)
    if not parts or "".join(parts) != expression:
        raise LayoutError(f"{expression!r} is no list of nodes, such as n[1-4]")
    names: list[str] = []
    for separator, group in itertools.groupby(parts, key=lambda part: part == ","):
        if not separator:
            names += _expand_one(list(group), NODES_LIMIT - len(names))
    return tuple(names)


def _expand_one(parts: list[str], limit: int) -> list[str]:
    choices = [_numbers(part) if part.startswith("[") else [part] for part in parts]
    total = 1
    for choice in choices:
        total *= len(choice)
    if not 0 < total <= limit:
        raise LayoutError(f"{''.join(parts)!r} names no node or more than {NODES_LIMIT}")
    return ["".join(combination) for combination in itertools.product(*choices)]


def _numbers(brackets: str) -> list[str]:
    numbers: list[str] = []
    for item in brackets[1:-1].split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", item)
        if not match:
            raise LayoutError(f"{brackets!r} is no range of nodes, such as [1-4]")
        first, last, width = int(match[1]), int(match[2] or match[1]), len(match[1])
        if last - first >= NODES_LIMIT:
            raise LayoutError(f"{brackets!r} names more than {NODES_LIMIT} nodes")
        numbers += [f"{number:0{width}d}" for number in range(first, last + 1)]
    return numbers
