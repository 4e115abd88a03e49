"""On a real Slurm: who was hit before anybody could see that many are, is one of the many as well.

Each test has an event of its own cause: one stays open as long as others are hit within a window.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from recovery import fleet, policy
from recovery.decision import Action, Attempt, Cause, JobAnswer
from recovery.demo.cluster import Cluster
from recovery.fleet import Extent, Hit
from recovery.journal import Journal
from slurm_hooks.config import Fleet
from slurm_hooks.record import utc
from tests import records
from tests.failing_job import (
    ACT,
    MONITOR,
    SLURM_CONF,
    WAIT_SECONDS,
    FailingJob,
    actions,
    decisions,
    submit,
    wait_for_a_full_look,
)

pytestmark = pytest.mark.slurm

AT_ONCE = "[fleet]\ngather = 0\njobs = 2\nnodes = 2\n"
GONE = f'{AT_ONCE}[probes.storage]\nmounts = ["/nothing/is/mounted/here"]\n'
CHECKED = "mce: [Hardware Error]: CPU 3: Machine Check Exception: 4 Bank 5: be00000000800400"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(
        2, 8, config=MONITOR, slurm_conf_extra=SLURM_CONF, health_check_seconds=0
    ) as running:
        yield running


def failed(cluster: Cluster, *options: str) -> FailingJob:
    """A job that has failed; whether its node shows a cause is its epilog's to say."""
    job = submit(cluster, *options)
    job.fail("exit 1")
    return job


def machine_checked(cluster: Cluster) -> FailingJob:
    """A job that has failed while its node's kernel logged a machine check."""
    job = submit(cluster)
    cluster.log_kernel(job.node, CHECKED)
    job.fail("exit 1")
    return job


def event(cluster: Cluster, key: str) -> dict[str, Any]:
    """Wait for the one event of a key that both jobs follow, and return it."""

    def found() -> dict[str, Any] | None:
        made = [one for one in decisions(cluster) if one["incident"] == f"fleet/{key}"]
        assert len(made) <= 1, "one cause, one event"
        jobs = [one for one in made[0]["members"] if one["subject"][:4] == "job "] if made else []
        return made[0] if len(jobs) > 1 and all(one["decision"] for one in jobs) else None

    known = cluster.wait(found, WAIT_SECONDS, f"an event of {key}, with all its members")
    assert known is not None
    return known


def explained(cluster: Cluster, name: str) -> str:
    return cluster.run("recovery", "explain", name).stdout


def test_what_was_only_recorded_is_revised_and_one_command_runs_them_all_again(
    cluster: Cluster,
) -> None:
    cluster.configure(MONITOR + GONE)
    with cluster.aggregator():
        first = failed(cluster)
        alone = first.decision()
        assert (alone["job"]["verdict"], alone["fleet"]) == ("requeue", "")
        second = failed(cluster, "--nodelist=" + other(cluster, first))
        made = event(cluster, "storage")
        (again,) = [one for one in decisions(cluster) if one["revises"] == alone["id"]]
        assert (again["fleet"], again["job"]["verdict"]) == (made["id"], "hold")
        assert {one["verdict"] for one in made["members"] if one["decision"]} == {"hold"}
        told = explained(cluster, made["id"])
        assert told.startswith("NEEDS YOU   fleet event storage of "), told
        command = f"scontrol requeue {first.id},{second.id}"
        assert f"nobody has held them; once it is mended: {command}" in " ".join(told.split())
        words = " ".join(explained(cluster, str(first.id)).split())
        assert f"in the place of {alone['id']}, for what was learnt since" in words
        assert f"revised by {again['id']}: it is one of many ({made['id']})" in words
        needed = json.loads(cluster.run("recovery", "status", "--json").stdout)["needs_a_person"]
        assert not [one for one in needed if one["subject"].startswith("job ")], needed
        cluster.run(*command.split())
        for job in (first, second):
            cluster.run("scontrol", "update", f"job={job.id}", "StartTime=now")
            cluster.wait(job.finished, WAIT_SECONDS, "it runs again, and finishes")
        cluster.wait(
            lambda: "scontrol requeue" not in explained(cluster, made["id"]),
            WAIT_SECONDS,
            "nobody is told to run again what has been run again",
        )


def other(cluster: Cluster, job: FailingJob) -> str:
    """The node that the job was not on."""
    (node,) = {*cluster.node_names} - {job.node}
    return node


def test_an_array_task_that_is_held_as_one_of_many_is_released_by_the_command_that_is_told(
    cluster: Cluster,
) -> None:
    cluster.configure(ACT + GONE)
    with cluster.aggregator():
        made = event(cluster, "storage")
        task = failed(cluster, "--array=4")
        task.wait_for("SPECIAL_EXIT")
        assert task.decision()["fleet"] == made["id"]
        command = f"scontrol release {task.id}_4"
        cluster.wait(
            lambda: command in " ".join(explained(cluster, made["id"]).split()),
            WAIT_SECONDS,
            "the event's story has the command",
        )
        cluster.run(*command.split())
        cluster.wait(task.finished, WAIT_SECONDS, "it runs again, and finishes")


def test_a_node_that_was_judged_alone_is_listed_with_the_others(cluster: Cluster) -> None:
    cluster.configure(MONITOR + AT_ONCE)

    def health_check(node: str) -> None:
        cluster.log_kernel(node, "mlx5_core 0000:5e:00.0: mlx5_pcie_print: Fatal error detected")
        cluster.run("slurm-hook-health-check", env={"SLURMD_NODENAME": node}, check=False)

    def about_n1() -> list[dict[str, Any]]:
        known = (one for one in decisions(cluster) if one["incident"] == "node/n1")
        return [one for one in known if one["cause"]["fault_class"] == "network.fabric"]

    with cluster.aggregator():
        health_check("n1")
        cluster.wait(about_n1, WAIT_SECONDS, "n1 is decided on alone")
        health_check("n2")
        cluster.wait(lambda: len(about_n1()) > 1, WAIT_SECONDS, "n1 is decided on as one of two")
        alone, again = about_n1()
        cluster.wait(lambda: about_n1()[0]["revised_by"], WAIT_SECONDS, "the record tells of it")

        def event_with_both() -> dict[str, Any] | None:
            known = [one for one in decisions(cluster) if one["incident"] == "fleet/network.fabric"]
            assert len(known) == 1, "one cause, one event"
            return known[0] if any(one["decision"] for one in known[0]["members"]) else None

        made = cluster.wait(event_with_both, WAIT_SECONDS, "the event lists what n1 got")
        assert made is not None
        listed = json.loads(cluster.run("recovery", "decisions", "--json").stdout)["decisions"]
    assert (again["revises"], again["fleet"]) == (alone["id"], made["id"])
    assert again["nodes"][0]["reason"].endswith("one of 2 nodes, no drain")
    assert again["evidence"] == alone["evidence"] != []
    assert again["id"] not in {one["id"] for one in listed}
    members = {one["subject"]: one["decision"] for one in made["members"]}
    assert members == {"node n1": again["id"], "node n2": ""}


def test_one_that_was_acted_on_stands_and_gets_an_addendum(cluster: Cluster) -> None:
    cluster.configure(ACT + AT_ONCE)
    with cluster.aggregator():
        first = machine_checked(cluster)
        alone = first.decision()
        assert set(actions(alone).values()) == {"verified"}
        cluster.wait(first.finished, WAIT_SECONDS, "it has run elsewhere")
        second = machine_checked(cluster)
        made = event(cluster, "hardware.host")
        follower = second.decision()
        stands = next(one for one in decisions(cluster) if one["id"] == alone["id"])
        told = " ".join(explained(cluster, made["id"]).split())
    assert follower["fleet"] == made["id"]
    assert follower["nodes"][0]["verdict"] == "watch", "many show it: no drain"
    (text,) = stands["addenda"]
    assert text.startswith(f"the first of many ({made['id']}), decided before the others were hit")
    assert actions(stands) == actions(alone)
    assert f"job {first.id}: requeue, {alone['id']}" in told


def test_a_replay_of_all_this_sees_the_same_events_and_other_thresholds_see_none(
    cluster: Cluster,
) -> None:
    def replayed(text: str) -> dict[str, Any]:
        other = cluster.folder / "other.toml"
        other.write_text(text)
        command = ("recovery", "replay", cluster.spool, "--policy", other)
        told = [cluster.run(*command, "--json").stdout for _ in range(2)]
        assert told[0] == told[1]
        found: dict[str, Any] = json.loads(told[0])
        return found

    same = replayed(cluster.config_path.read_text())
    assert (same["changes"], same["differently"], same["not_replayed"]) == ([], 0, 0)
    apart = replayed(AT_ONCE.replace("2", "50"))["changes"]
    events = {f"fleet event of {key}" for key in ("storage", "network.fabric", "hardware.host")}
    assert events <= {one["subject"] for one in apart}
    jobs = [one for one in apart if one["subject"].startswith("job ")]
    assert jobs and all(one["before"].startswith("hold") for one in jobs if "storage" in str(one))


def test_a_crash_between_the_event_and_its_first_hits_leaves_none_of_them_out(
    cluster: Cluster,
) -> None:
    """What the journal holds then; the member here is a job that hangs, and still runs."""
    cluster.configure(MONITOR + AT_ONCE)
    job = submit(cluster)
    shown = cluster.scheduler().jobs([job.id])[job.id]
    now = time.time()
    alone = replace(
        records.decision("01KALONE", job.id, mode="monitor", owner=shown.user, uid=shown.uid),
        attempt=Attempt("private", job.id, 0, shown.submit_time),
        cause=Cause("hang", "probable", "no progress for 15 min", fingerprint="hang"),
        job=JobAnswer("requeue", "run it again"),
        nodes=(),
        job_nodes=shown.nodes,
        running=True,
        actions=(Action("requeue", str(job.id), "recorded", utc(now)),),
    )
    hits = [Hit(f"job {number}", now) for number in (job.id, job.id + 1000)]
    row, limits = policy.rule_for("hang", {}), Fleet(jobs=2)
    made = fleet.decision("hang", hits, Extent(0, 2), row, limits, now, "monitor")
    journal = Journal(cluster.folder / "state" / "journal")
    for one in (alone, made):
        journal.append({"time": utc(now), "type": "decision", "decision": one.to_dict()})

    def again() -> list[dict[str, Any]]:
        return [one for one in decisions(cluster) if one["revises"] == alone.id]

    with cluster.aggregator():
        (revised,) = cluster.wait(again, WAIT_SECONDS, "it is decided on as one of two")
        wait_for_a_full_look(cluster)
    assert len(again()) == 1, "once"
    assert (revised["fleet"], revised["job"]["verdict"]) == (made.id, "leave")
    assert "it runs" in revised["job"]["reason"], "left running: what it waits for may answer"
    job.fail("exit 0")
    cluster.wait(job.finished, WAIT_SECONDS, "it ends")
