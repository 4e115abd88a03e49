"""What the watchdogs of many ranks say together: who is behind, who is missing, who disagrees.

Source of the rules: torch ProcessGroupNCCL's sequence numbers count the collectives of one process
group; a rank whose last enqueued work is below the one that the others wait for never got there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_hooks.joblog.layout import Layout
from slurm_hooks.joblog.scan import Event

_REPORTERS_MIN = 2
"""Ranks that must wait at the same collective before one that is not there is suspected."""

_NO_CHANCE_NUMBER = 1_000
"""Collectives from which on one number in two process groups is no mere coincidence."""

_DEFAULT_GROUPS = frozenset({"0", None})


@dataclass(frozen=True)
class Picture:
    """``suspects`` are ranks, with the reason; ``mismatch`` says that programs are out of step."""

    suspects: tuple[int, ...] = ()
    why: str = ""
    mismatch: bool = False


def picture(events: Sequence[Event], layout: Layout) -> Picture:
    """Return what the watchdogs' lines among ``events`` say."""
    behind = _behind(events)
    if behind.suspects:
        return behind
    if _mismatch(events):
        return Picture(mismatch=True, why="ranks wait in different collectives of one group")
    return _silent(events, layout)


def _behind(events: Sequence[Event]) -> Picture:
    groups: dict[str, dict[int, tuple[int, int]]] = {}
    for event in events:
        if event.signature.id == "torch.watchdog_status":
            found = event.captures
            group = groups.setdefault(found.get("guid") or found["pg"], {})
            group.setdefault(int(found["rank"]), (int(found["seq"]), int(found["enqueued"])))
    for group in groups.values():
        waiting = Counter(seq for seq, _ in group.values()).most_common(1)[0]
        late = [rank for rank, (seq, last) in group.items() if max(seq, last) < waiting[0]]
        level = [rank for rank, (seq, _) in group.items() if seq == waiting[0]]
        if len(late) == 1 and len(level) >= _REPORTERS_MIN and len(late) + len(level) == len(group):
            why = f"never reached collective {waiting[0]} that {len(level)} ranks wait in"
            return Picture(tuple(late), why)
    return Picture()


def _mismatch(events: Sequence[Event]) -> bool:
    """One sequence number, different operations, and no process group but the default one.

    Before 2.3 torch names no group; a large number is then not the same in two by chance.
    """
    groups = {e.captures["pg"] for e in events if e.signature.id == "torch.watchdog_status"}
    if len(groups) > 1 or not groups <= _DEFAULT_GROUPS:
        return False
    least = 0 if groups else _NO_CHANCE_NUMBER
    operations: dict[str, set[str]] = {}
    for event in _timeouts(events):
        if "seq" in event.captures and int(event.captures["seq"]) >= least:
            operations.setdefault(event.captures["seq"], set()).add(event.captures["op"])
    return any(len(names) > 1 for names in operations.values())


def _silent(events: Sequence[Event], layout: Layout) -> Picture:
    """All ranks but those of one node wait in one collective: that node's never came."""
    groups = {e.captures["pg"] for e in events if e.signature.id == "torch.watchdog_status"}
    waits = {
        (event.captures.get("seq"), event.captures["op"])
        for event in _timeouts(events)
        if "op" in event.captures
    }
    ranks = {int(e.captures["rank"]) for e in _timeouts(events) if "rank" in e.captures}
    if not layout.per_node or not groups <= _DEFAULT_GROUPS or len(waits) != 1:
        return Picture()
    everyone = set(range(len(layout.nodes) * layout.per_node))
    missing = sorted(everyone - ranks)
    nodes = {layout.node_of_rank(rank) for rank in missing}
    if len(nodes) != 1 or len(ranks) <= len(missing) or len(ranks) < _REPORTERS_MIN:
        return Picture()
    if len(layout.nodes) < _SILENT_NODES_MIN:
        return Picture()
    return Picture(tuple(missing), f"silent while {len(ranks)} ranks wait in one collective")


_SILENT_NODES_MIN = 3
"""With two nodes, silence may as well be a launcher that killed its ranks before they could say."""


def _timeouts(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.signature.id == "torch.watchdog_timeout"]
