"""Whether enough nodes are left for a job once some are excluded: said before anything is sent.

Pure. Slurm takes such an exclusion without a word, and half a second later the job stands as
``BadConstraints`` with priority 0 (measured on 22.05), so whoever asks for it must count first.
Constraints that only Slurm knows (features, reservations) are not looked at here; where they leave
no node, ``actions`` puts the job's own list back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from recovery.slurm.base import Job, Node


def too_few(job: Job, excluded: Collection[str], nodes: Mapping[str, Node]) -> str:
    """Return why ``job`` could not be placed off ``excluded`` and its own list, empty if it could.

    ``nodes`` are all nodes; nodes that are down or drained count, since they may come back. A job
    in several partitions needs room in one of them.
    """
    off = {*job.excluded, *excluded}
    needed = max(job.node_count, len(job.nodes), 1)
    best, where = -1, ""
    for partition in job.partition.split(","):
        members = {node.name for node in nodes.values() if partition in node.partitions}
        if len(members) and len(members - off) > best:
            best, where = len(members - off), partition
    if not where or best >= needed:
        return ""
    return f"it needs {needed} nodes and partition {where} has {best} without {_listed(off)}"


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:8])
