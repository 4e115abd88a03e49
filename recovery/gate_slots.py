"""The slots in ``control/gate`` that gated nodes hold: freed once their node is back in service.

A slot is taken by a node (``slurm_hooks.gate``) and only freed here, so that as many nodes as there
are slots can stand gated at once. The spool is read and written in a child under a deadline.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from recovery.slurm.base import Node
from slurm_hooks import spool
from slurm_hooks.deadline import run_one

DEADLINE_SECONDS = 1.0

SETTLE_SECONDS = 60.0
"""A slot is taken before its node is drained: a younger one is not judged yet."""

_SLOT = re.compile(r"slot-\d{1,4}")
_SLOT_BYTES = 4096


def free(path: Path, nodes: Mapping[str, Node]) -> list[str]:
    """Free the slots of the spool ``path`` whose node is in service; return those nodes.

    ``nodes`` is a fresh look at all of them. A slot that cannot be read stays taken: too few gates
    are safe, too many are not.
    """
    folder = path / "control" / "gate"
    outcome = run_one(lambda: json.dumps(_settled(folder)).encode(), DEADLINE_SECONDS)
    if outcome.status != "ok":
        return []
    held: dict[str, str] = json.loads(outcome.output)
    back = {
        slot: node
        for slot, node in held.items()
        if node in nodes and not nodes[node].drained and nodes[node].state != "DOWN"
    }
    if back:
        run_one(lambda: _remove(folder, back), DEADLINE_SECONDS)
    return sorted(back.values())


def _settled(folder: Path) -> dict[str, str]:
    """Slot and node of those taken long enough ago."""
    held = {}
    for slot in folder.iterdir():
        if not _SLOT.fullmatch(slot.name):
            continue
        try:
            old = time.time() - slot.lstat().st_mtime > SETTLE_SECONDS
            node = json.loads(spool.read_regular(slot, _SLOT_BYTES))["node"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if old and isinstance(node, str):
            held[slot.name] = node
    return held


def _remove(folder: Path, slots: Collection[str]) -> bytes:
    for slot in slots:
        (folder / slot).unlink(missing_ok=True)
    return b""
