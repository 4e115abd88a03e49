"""Whether a job would find room off the nodes excluded is counted before anything is sent."""

from __future__ import annotations

import pytest

from recovery.room import too_few
from tests import incidents

NODES = {
    name: incidents.node(name, partitions=partitions)
    for name, partitions in {
        "n1": ("train",),
        "n2": ("train", "pair"),
        "n3": ("train", "pair"),
        "n4": ("train",),
    }.items()
}
RESERVED = {"ours": ("n2", "n3"), "theirs": ("n1", "n2", "n4")}


@pytest.mark.parametrize(
    ("asked", "excluded", "why"),
    [
        ({}, {"n3"}, ""),
        ({"node_count": 4}, {"n3"}, "it needs 4 nodes and partition train has 3 without n3"),
        ({"partition": "pair"}, {"n3"}, "it needs 2 nodes and partition pair has 1 without n3"),
        ({"partition": "pair,train"}, {"n3"}, ""),
        ({"partition": "gone"}, {"n3"}, ""),
        ({"excluded": ("n1", "n4")}, {"n3"}, "partition train has 1 without n1, n3, n4"),
        ({"reservation": "ours"}, {"n1"}, ""),
        ({"reservation": "ours"}, {"n3"}, "it needs 2 nodes and reservation ours has 1 without n3"),
        ({"reservation": "ours,theirs"}, {"n3"}, ""),
        ({"reservation": "ours,theirs"}, {"n2", "n3"}, ""),
        ({"reservation": "ours,theirs"}, {"n2", "n1"}, "has 1 without n1, n2"),
        ({"reservation": "theirs", "partition": "pair"}, {"n4"}, "reservation theirs has 1"),
        ({"reservation": "unknown"}, {"n3"}, ""),
        ({"reservation": "ours,unknown"}, {"n3"}, ""),
    ],
    ids=lambda one: str(sorted(one) if isinstance(one, set) else one),  # alike in all workers
)
def test_too_few_nodes_are_told_and_where(
    asked: dict[str, object], excluded: set[str], why: str
) -> None:
    job = incidents.job(**{"nodes": ("n1", "n2"), **asked})
    said = too_few(job, excluded, NODES, RESERVED)
    assert bool(said) == bool(why)
    assert why in said
