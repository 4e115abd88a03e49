"""Whether enough nodes are left for a job once some are excluded: said before anything is sent.

Pure. Slurm takes such an exclusion without a word. Half a second later the job stands as
``BadConstraints`` with priority 0 (measured on 22.05); where its reservation is what has too few,
24.11 and 26.05 let it wait for ``Resources`` instead, as if nodes were busy, and it would wait for
ever. So whoever asks for an exclusion must count first. Constraints that only Slurm knows
(features) are not looked at here; where they leave no node, ``actions`` puts the job's own list
back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from recovery.slurm.base import Job, Node


def too_few(
    job: Job,
    excluded: Collection[str],
    nodes: Mapping[str, Node],
    reserved: Mapping[str, Collection[str]],
) -> str:
    """Return why ``job`` could not be placed off ``excluded`` and its own list, empty if it could.

    ``nodes`` are all nodes, ``reserved`` those of each reservation that keeps its jobs within it.
    Nodes that are down or drained count, since they may come back. A job in several partitions or
    reservations needs room in one of them.
    """
    off = {*job.excluded, *excluded}
    needed = max(job.node_count, len(job.nodes), 1)
    rooms = [(len(members - off), where) for where, members in _rooms(job, nodes, reserved)]
    best, where = max(rooms, default=(needed, ""), key=lambda room: room[0])
    if best >= needed:
        return ""
    return f"it needs {needed} nodes and {where} has {best} without {_listed(off)}"


def _rooms(
    job: Job, nodes: Mapping[str, Node], reserved: Mapping[str, Collection[str]]
) -> Iterator[tuple[str, set[str]]]:
    """Yield each place that would do, with the names of its nodes.

    A reservation that is not among ``reserved`` bounds nothing: its partition does.
    """
    asked = job.reservation.split(",") if job.reservation else []
    bounded = bool(asked) and all(name in reserved for name in asked)
    for partition in job.partition.split(","):
        members = {node.name for node in nodes.values() if partition in node.partitions}
        if members and bounded:
            for name in asked:
                yield f"reservation {name}", members.intersection(reserved[name])
        elif members:
            yield f"partition {partition}", members


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:8])
