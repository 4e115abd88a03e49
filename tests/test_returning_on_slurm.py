"""On a real Slurm: what we drained comes back when it is mended, what others keep out stays out.

Health checks that slurmd runs, GPUs of a fake driver, nodes that come back with another boot id.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from recovery.demo.cluster import Cluster
from recovery.journal import Journal
from recovery.store_opening import open_store
from slurm_hooks.record import utc
from tests.failing_job import ACT, SLURM_CONF, actions, decisions, wait_for_a_full_look

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(os.geteuid() != 0, reason="another boot id takes a mount namespace"),
]

WAIT_SECONDS = 120.0
"""Heartbeats are read every ten seconds, and two clean ones must follow the reboot."""

CHECKS = 2

CONFIG = ACT.replace('["requeue", "hold", "drain"]', '["drain", "return"]').replace(
    "settle = 2", f"settle = 2\nchecks_before_return = {CHECKS}"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(
        4, 8, config=CONFIG, slurm_conf_extra=SLURM_CONF, health_check_seconds=4
    ) as running:
        yield running


def is_drained(cluster: Cluster, node: str) -> bool:
    return "DRAIN" in cluster.node(node)["State"]


def about(cluster: Cluster, node: str, verdict: str) -> list[dict[str, Any]]:
    """The decisions that give a node that verdict."""
    wanted = {"node": node, "verdict": verdict}
    return [
        one
        for one in decisions(cluster)
        if any(wanted.items() <= answer.items() for answer in one["nodes"])
    ]


def test_what_we_drained_returns_once_mended_and_what_others_keep_out_does_not(
    cluster: Cluster,
) -> None:
    state = cluster.folder / "state"
    with cluster.aggregator():
        cluster.run("scontrol", "update", "nodename=n3", "state=drain", "reason=ann: new fans")
        for node in ("n1", "n2", "n3", "n4"):
            cluster.break_gpu(node, 3, "lost")
        for node in ("n1", "n2", "n4"):
            cluster.wait(partial(is_drained, cluster, node), WAIT_SECONDS, f"{node} is drained")
        cluster.run("scontrol", "update", "nodename=n2", "reason=ann: waits for its new riser")
        for node in cluster.node_names:
            cluster.mend_gpus(node)
        for node in ("n1", "n2", "n3"):  # n4 is mended, but has never booted
            cluster.reboot_node(node)
        cluster.wait(lambda: not is_drained(cluster, "n1"), WAIT_SECONDS, "n1 returns")

        def checked(names: set[str]) -> bool:
            store = open_store(state / "index.sqlite", Journal(state / "journal"))
            try:
                return all(store.heartbeats(names)[name]["passed"] >= CHECKS for name in names)
            finally:
                store.close()

        cluster.wait(lambda: checked({"n2", "n3", "n4"}), WAIT_SECONDS, "all others check clean")

        def looks() -> str:
            said = json.loads(cluster.run("recovery", "status", "--json").stdout)
            return str(said["last_snapshot"])

        seen = {looks()}

        def looked_twice_more() -> bool:
            seen.add(looks())
            return len(seen) > 2

        cluster.wait(looked_twice_more, WAIT_SECONDS, "they are looked at twice more")
        shown = {node: cluster.node(node) for node in ("n2", "n3", "n4")}
        cluster.break_gpu("n1", 3, "lost")
        cluster.wait(
            partial(is_drained, cluster, "n1"), WAIT_SECONDS, "the same fault drains it again"
        )
    assert shown["n2"]["Reason"].startswith("ann: waits for its new riser")
    assert shown["n3"]["Reason"].startswith("ann: new fans")
    assert shown["n4"]["Reason"].startswith("recovery: ")
    assert all("DRAIN" in one["State"] for one in shown.values())

    (back,) = about(cluster, "n1", "return")
    assert actions(back) == {"return n1": "verified"}
    assert "reset_node has been seen" in back["nodes"][0]["reason"]
    for node in shown:
        assert about(cluster, node, "return") == []
    told = cluster.run("recovery", "explain", back["id"]).stdout
    assert "return: mended, and clean since" in told
    assert "n1: return: n1 is mended" in " ".join(told.split())


def times_of_losses(cluster: Cluster, node: str) -> list[str]:
    """When a lost GPU of the node was recorded, as the archive has it."""
    lines = [
        json.loads(line)["record"]
        for file in cluster.spool.glob("archive/*/records.jsonl")
        for line in file.read_text().splitlines()
    ]
    return [
        one["time"]
        for one in lines
        if one["node"] == node and any(f["code"] == "gpu.lost" for f in one["findings"])
    ]


def test_a_node_that_a_person_returns_is_checked_before_it_is_believed(cluster: Cluster) -> None:
    """Its next health check has the last word: what still stands is drained for again."""
    cluster.configure(f"{CONFIG}[hooks]\nrepeat = 2\n")
    with cluster.aggregator():
        before = len(about(cluster, "n3", "drain"))
        cluster.run("scontrol", "update", "nodename=n3", "state=resume")
        cluster.break_gpu("n3", 3, "lost")
        cluster.wait(partial(is_drained, cluster, "n3"), WAIT_SECONDS, "n3 is drained")
        first = cluster.node("n3")["Reason"]
        cluster.run("scontrol", "update", "nodename=n3", "state=resume")
        cluster.wait(
            lambda: is_drained(cluster, "n3") and cluster.node("n3")["Reason"] != first,
            WAIT_SECONDS,
            "nothing was mended, and the next check says so",
        )
        cluster.wait(
            lambda: len(about(cluster, "n3", "drain")) == before + 2,
            WAIT_SECONDS,
            "each of them has its decision",
        )
        told = utc()
        cluster.wait(
            lambda: any(time > told for time in times_of_losses(cluster, "n3")),
            WAIT_SECONDS,
            "it is told once more, of a node that is out of service",
        )
        cluster.mend_gpus("n3")
        cluster.run("scontrol", "update", "nodename=n3", "state=resume")
        beat = json.loads((cluster.spool / "heartbeat" / "n3.json").read_text())["time"]

        def passed() -> bool:
            now = json.loads((cluster.spool / "heartbeat" / "n3.json").read_text())
            return bool(now["time"] > beat and now["verdict"] == "ok")

        cluster.wait(passed, WAIT_SECONDS, "it has passed a check")
        wait_for_a_full_look(cluster)
        assert not is_drained(cluster, "n3"), "mended, and so it stays"
    with cluster.aggregator():
        wait_for_a_full_look(cluster)
        assert not is_drained(cluster, "n3"), "a restart takes no old record for a new one"
