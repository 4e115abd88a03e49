"""Which nodes Slurm has, and which of them are out of service, as the last full look showed them.

Owns that small value of the index, so that `recovery status` and `recovery nodes` show a node that
has never reported, and ask no scheduler. It is lost with the index, and made again a look later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from recovery.slurm.base import Node
from recovery.slurm.hostlist import compress, expand
from recovery.store import Store

_KEY = "inventory"
_NAMES_LIMIT = 100_000

_OUT = frozenset(("DRAIN", "NOT_RESPONDING", "FAIL", "MAINTENANCE"))


@dataclass(frozen=True)
class Inventory:
    """``names`` are all nodes; ``out`` those out of service, each with its state and reason."""

    names: frozenset[str] = frozenset()
    out: Mapping[str, str] = field(default_factory=dict)


def keep(store: Store, nodes: Mapping[str, Node]) -> None:
    """Keep what a full look has shown, where that is another picture than the last one."""
    out = {
        name: _state(node)
        for name, node in sorted(nodes.items())
        if node.state == "DOWN" or node.flags & _OUT
    }
    text = json.dumps({"names": compress(nodes), "out": out})
    if text != store.meta(_KEY):
        store.put_meta(_KEY, text)


def known(store: Store) -> Inventory:
    """Return what the last full look has shown; nothing before the first one."""
    document = json.loads(store.meta(_KEY) or "{}")
    if not document:
        return Inventory()
    return Inventory(frozenset(expand(document["names"], _NAMES_LIMIT)), document["out"])


def _state(node: Node) -> str:
    """A node's state in Slurm's words, and why: ``IDLE+DRAIN: ann: new fans``."""
    state = "+".join([node.state, *sorted(node.flags)])
    return f"{state}: {node.reason}" if node.reason else state
