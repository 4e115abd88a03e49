"""A node is asked for a deep check and answers, on a real Slurm with the aggregator beside it."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from recovery.demo.cluster import Cluster
from slurm_hooks.record import utc
from tests.failing_job import ACT, MONITOR, WAIT_SECONDS, decisions, wait_for_a_full_look

pytestmark = pytest.mark.slurm

NODE = "REQUEST_UPDATE_NODE"


REBOOTED = ("n1", "n2", "n3", "n4")
UNWORDED = "n5"
"""Bears no reason: 24.11 clears none, and then puts no words of its own in place of an old one."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    # slurmd runs that program and lives on: who stops and starts it is the test.
    reboots = "RebootProgram=/bin/true\nResumeTimeout=60"
    with Cluster(5, 8, config=ACT, slurm_conf_extra=reboots, health_check_seconds=2) as running:
        yield running


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """Idle nodes and an aggregator that may drain."""
    shared.configure(ACT)
    with shared.aggregator():
        yield shared
    shared.run("scancel", "--user", "root")
    for node in shared.node_names:
        shared.mend_gpus(node)
        (shared.spool / "requests" / node).unlink(missing_ok=True)
        if set(shared.node(node)["State"].split("+")) & {"DRAIN", "DOWN"}:
            shared.run("scontrol", "update", f"nodename={node}", "state=resume")
    shared.wait(
        lambda: shared.run("sinfo", "--noheader", "--format=%T").stdout.split() == ["idle"],
        WAIT_SECONDS,
        "all nodes are idle again",
    )


def drain(cluster: Cluster, node: str, reason: str) -> None:
    cluster.run("scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}")


def shown(cluster: Cluster) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(cluster.run("recovery", "check", "--json").stdout)
    return document


def answer(cluster: Cluster, node: str, verdict: str, after: str) -> dict[str, Any]:
    """Wait for a node's answer of that verdict that came ``after`` a time."""

    def find() -> dict[str, Any] | None:
        found = [
            item
            for item in shown(cluster)["answers"]
            if (item["node"], item["verdict"]) == (node, verdict) and item["time"] > after
        ]
        return found[-1] if found else None

    return cluster.wait(find, WAIT_SECONDS, f"{node} answers {verdict}")


def is_free(cluster: Cluster, node: str) -> bool:
    return not (cluster.spool / "requests" / node).exists()


def boot(cluster: Cluster, *nodes: str) -> None:
    """Let slurmd end on each, and come back as after a boot, with another boot id for root."""
    for node in nodes:
        cluster.stop_node(node)
    # Slurm notes in whole seconds when it heard of a node, up to one later: a boot in the same
    # second is none to it.
    stopped = int(time.time())
    cluster.wait(lambda: time.time() >= stopped + 2, WAIT_SECONDS, "a later second")
    for node in nodes:
        boot_id = str(uuid.uuid4()) if os.geteuid() == 0 else ""
        cluster.start_node(node, "-b", boot_id=boot_id)


def reasons(cluster: Cluster, node: str) -> str:
    return cluster.node(node)["Reason"]


@pytest.mark.skipif(os.geteuid() != 0, reason="another boot id takes a mount namespace")
def test_after_scontrol_reboot_a_node_returns_where_nobody_else_keeps_it_and_it_has_passed(
    shared: Cluster,
) -> None:
    """Left down by it, or drained by us before: Slurm has added its own words to each reason."""
    once = "settle = 2\nchecks_before_return = 1"
    shared.configure(ACT.replace('"drain"]', '"drain", "return"]').replace("settle = 2", once))
    with shared.aggregator():
        shared.break_gpu("n4", 3, "lost")
        shared.wait(lambda: "DRAIN" in shared.node("n4")["State"], WAIT_SECONDS, "it is drained")
        shared.mend_gpus("n4")
        start = utc()
        for node, options in {
            "n1": ("ASAP", "nextstate=down"),
            "n2": ("nextstate=down", "reason=ann: waits for its riser"),
            "n3": ("nextstate=down", "reason=recovery: check the riser"),
            "n4": (),
        }.items():
            shared.run("scontrol", "reboot", *options, node)
        for node in REBOOTED:
            shared.wait(
                lambda node=node: "REBOOT_ISSUED" in shared.node(node)["State"],  # type: ignore[misc]
                WAIT_SECONDS,
                f"{node} is told to reboot",
            )
        shared.break_gpu("n3", 3, "recovery_action", 1)
        boot(shared, *REBOOTED)
        for node in ("n1", "n4"):
            shared.wait(
                lambda node=node: shared.node(node)["State"] == "IDLE",  # type: ignore[misc]
                WAIT_SECONDS,
                f"{node} has passed",
            )
        told = answer(shared, "n2", "passed", start)
        shared.wait(lambda: "; checked" in reasons(shared, "n3"), WAIT_SECONDS, "n3 is checked")

        def returned() -> dict[str, dict[str, Any]] | None:
            known = [one for one in decisions(shared) if one["time"] > start]
            back = {
                n["node"]: one for one in known for n in one["nodes"] if n["verdict"] == "return"
            }
            return back if len(back) > 1 else None

        made = shared.wait(returned, WAIT_SECONDS, "the decisions on both are there")
        wait_for_a_full_look(shared)
        kept = {node: shared.node(node) for node in ("n2", "n3")}
    assert made is not None and set(made) == {"n1", "n4"}
    assert made["n1"]["rule"] == "return: a person asked to check it, and it passed"
    assert made["n4"]["rule"] == "return: mended, and clean since"
    stood = {node: one["nodes"][0]["stands"] for node, one in made.items()}
    assert stood["n1"].startswith("recovery: asked to check Reboot ASAP : "), "Slurm's words stay"
    assert "reboot complete; checked 20" in stood["n1"] and stood["n1"].endswith(": passed")
    assert " : reboot issued" in stood["n4"]
    assert answer(shared, "n4", "passed", start)["kind"] == told["kind"] == "reboot"
    assert [one["State"].split("+")[0] for one in kept.values()] == ["DOWN", "DOWN"]
    assert kept["n2"]["Reason"].startswith("ann: waits for its riser : "), "her words stay"
    assert kept["n3"]["Reason"].startswith("recovery: asked to check the riser : reboot issued : ")
    assert ": failed, GPU 3" in kept["n3"]["Reason"]
    shared.mend_gpus("n3")
    shared.run("scontrol", "update", "nodename=n[2-3]", "state=resume")


def test_a_node_in_service_waits_until_it_is_drained_and_then_answers(cluster: Cluster) -> None:
    start = utc()
    said = cluster.run("recovery", "check", "n1", "--why", "slow since Monday").stdout
    assert said == "n1: asked; it is in service, and waits for a day to be drained and idle\n"
    refused = answer(cluster, "n1", "refused", start)
    assert "in service" in refused["why"]
    assert "n1  waits: the node is in service" in cluster.run("recovery", "check").stdout
    drain(cluster, "n1", "maintenance")
    passed = answer(cluster, "n1", "passed", refused["time"])
    assert passed["request"] == refused["request"] and passed["kind"] == "asked"
    cluster.wait(lambda: is_free(cluster, "n1"), WAIT_SECONDS, "the request is freed")
    assert cluster.node("n1")["Reason"].startswith("maintenance ["), "an admin's words stay"


def test_a_reason_asks_and_gets_its_verdict_in_one_update(cluster: Cluster) -> None:
    start = utc()
    drain(cluster, "n1", "recovery: check new PSU")
    before = cluster.mutations()
    cluster.wait(
        lambda: "; checked" in cluster.node("n1")["Reason"], WAIT_SECONDS, "the reason tells"
    )
    reason = cluster.node("n1")["Reason"]
    assert reason.startswith("recovery: asked to check new PSU; checked 20")
    assert ": passed" in reason
    answered = answer(cluster, "n1", "passed", start)
    assert answered["kind"] == "reason"
    # Its own words are no new request.
    cluster.wait(lambda: is_free(cluster, "n1"), WAIT_SECONDS, "the request is freed")
    cluster.run("recovery", "check", "n2")
    answer(cluster, "n2", "refused", start)
    assert is_free(cluster, "n1")
    assert cluster.mutations() - before == {NODE: 1}
    assert "DRAIN" in cluster.node("n1")["State"], "a check returns no node"


def test_a_node_that_was_drained_to_be_checked_returns_where_a_grant_allows_it(
    shared: Cluster,
) -> None:
    shared.configure(ACT.replace('"drain"]', '"drain", "return"]'))
    shared.break_gpu("n2", 3, "recovery_action", 1)
    start = utc()
    with shared.aggregator():
        drain(shared, "n1", "recovery: check new PSU")
        drain(shared, "n2", "recovery: check")
        shared.wait(
            lambda: "DRAIN" not in shared.node("n1")["State"], WAIT_SECONDS, "n1 has passed"
        )
        shared.wait(
            lambda: "; checked" in shared.node("n2")["Reason"], WAIT_SECONDS, "n2 is checked"
        )
        made = shared.wait(
            lambda: [
                one
                for one in decisions(shared)
                if one["time"] > start and one["nodes"][0]["verdict"] == "return"
            ],
            WAIT_SECONDS,
            "the decision on it is there",
        )
        wait_for_a_full_look(shared)
        shown = shared.node("n2")
    assert ": failed, GPU 3" in shown["Reason"] and "DRAIN" in shown["State"]
    assert [(one["rule"], one["nodes"][0]["node"]) for one in made] == [
        ("return: a person asked to check it, and it passed", "n1")
    ]
    shared.mend_gpus("n2")
    shared.run("scontrol", "update", "nodename=n2", "state=resume")


def test_what_is_found_stands_in_the_reason(cluster: Cluster) -> None:
    cluster.break_gpu("n1", 3, "recovery_action", 1)
    drain(cluster, "n1", "recovery: check")
    cluster.wait(
        lambda: "; checked" in cluster.node("n1")["Reason"], WAIT_SECONDS, "the reason tells"
    )
    reason = cluster.node("n1")["Reason"]
    assert reason.startswith("recovery: asked to check; checked 20")
    assert ": failed, GPU 3" in reason


def test_in_monitor_mode_the_verdict_is_told_and_no_reason_is_written(shared: Cluster) -> None:
    start = utc()
    shared.configure(MONITOR)
    drain(shared, "n1", "recovery: check")
    before = shared.mutations()
    with shared.aggregator():
        told = answer(shared, "n1", "passed", start)
        shared.wait(lambda: is_free(shared, "n1"), WAIT_SECONDS, "the request is freed")
    assert told["kind"] == "reason"
    assert shared.node("n1")["Reason"].startswith("recovery: check [")
    assert not shared.mutations() - before
    shared.run("scontrol", "update", "nodename=n1", "state=resume")


def test_a_draining_node_is_checked_when_its_job_has_ended(cluster: Cluster) -> None:
    start = utc()
    job = cluster.submit("--nodelist=n1", "--gpus-per-node=8", "--wrap", "sleep 600")
    cluster.wait(lambda: cluster.job(job)["JobState"] == "RUNNING", WAIT_SECONDS, "it runs")
    drain(cluster, "n1", "recovery: check")
    refused = answer(cluster, "n1", "refused", start)
    assert "a job is still on the node" in refused["why"]
    cluster.run("scancel", str(job))
    answer(cluster, "n1", "passed", refused["time"])


def test_a_node_that_comes_back_from_a_reboot_is_checked(cluster: Cluster) -> None:
    start = utc()

    def rebooted() -> bool:
        started = cluster.node(UNWORDED)["SlurmdStartTime"]
        boot(cluster, UNWORDED)
        cluster.wait(
            lambda: cluster.node(UNWORDED)["SlurmdStartTime"] != started, WAIT_SECONDS, "it is back"
        )
        # One that answers in the second of its boot, before it registers, is not seen to boot.
        return "unexpectedly rebooted" in cluster.node(UNWORDED).get("Reason", "")

    cluster.wait(rebooted, WAIT_SECONDS, "Slurm has seen the reboot")
    told = answer(cluster, UNWORDED, "passed", start)
    assert told["kind"] == "reboot"
    assert cluster.node(UNWORDED)["Reason"].startswith("Node unexpectedly rebooted"), (
        "Slurm's words"
    )


def test_only_nodes_that_slurm_knows_are_asked(cluster: Cluster) -> None:
    done = cluster.run("recovery", "check", "n[1-6]", check=False)
    assert done.returncode == 1
    assert done.stderr == "Slurm knows no node n6; nobody was asked\n"
    assert is_free(cluster, "n1")
    assert cluster.run("recovery", "check", "n[1-", check=False).returncode == 2
