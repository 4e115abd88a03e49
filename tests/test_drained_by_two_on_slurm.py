"""A person drains a node just as this toolkit is about to: theirs survives, as long as it is read.

The scheduler of this test lets the person come right before a look at the nodes: the one before
the drain is planned, or the last one before the command, after which Slurm offers nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import pytest

from recovery.demo.cluster import Cluster
from recovery.slurm.base import Node
from recovery.slurm.cli import CliScheduler
from tests.failing_job import (
    ACT,
    SLURM_CONF,
    actions,
    aggregator_here,
    pass_until_finished,
    submit,
    tidy,
)

pytestmark = pytest.mark.slurm

THEIRS = "ann: new risers"
NODE = "REQUEST_UPDATE_NODE"


class WithAnn(CliScheduler):
    """Ann drains ``node`` just before the look number ``wanted`` at all nodes, from then on."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(environment=cluster.environment, timeout_seconds=20)
        self._cluster = cluster
        self.node, self.wanted = "", 0
        self.looks = 0

    def nodes(self, names: Collection[str] | None = None) -> Mapping[str, Node]:
        if names is None and self.node:
            self.looks += 1
            if self.looks == self.wanted:
                self._cluster.run(
                    *("scontrol", "update", f"nodename={self.node}"),
                    *("state=drain", f"reason={THEIRS}"),
                )
        return super().nodes(names)


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    # One full look at the start, and none after it: every other one is the acting's own.
    config = ACT.replace("snapshot = 2", "snapshot = 3600")
    with Cluster(
        2, 8, config=config, slurm_conf_extra=SLURM_CONF, health_check_seconds=0
    ) as running:
        yield running


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    tidy(shared)


@pytest.mark.parametrize("wanted", [1, 2], ids=["before it is planned", "before the command"])
def test_a_person_who_drains_the_node_right_before_our_look_keeps_their_reason(
    cluster: Cluster, wanted: int
) -> None:
    job = submit(cluster)
    ann = WithAnn(cluster)
    with aggregator_here(cluster, ann) as aggregator:
        aggregator.pass_once()
        before = cluster.mutations()
        ann.node, ann.wanted = job.node, wanted
        bad = job.lose_gpu()
        pass_until_finished(cluster, job, aggregator)
    decision = job.decision()
    assert ann.looks >= wanted, "she came"
    assert cluster.node(bad)["Reason"].startswith(THEIRS)
    assert (cluster.mutations() - before)[NODE] == 1, "hers alone"
    assert actions(decision) == {f"drain {bad}": "abandoned", f"requeue {job.id}": "verified"}
    assert f"somebody else's already, by '{THEIRS}" in decision["actions"][0]["detail"]
