"""Whatever kind of job it is, it is restarted once where it can be, and else its owner is told how.

One real cluster, and one aggregator: jobs of every kind lose a GPU on one of their nodes at the
same time, first in monitor mode and then in act mode.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from recovery.demo.cluster import Cluster
from tests.failing_job import (
    ACT,
    MONITOR,
    NOBODY,
    OPTED_IN,
    SLURM_CONF,
    WAIT_SECONDS,
    FailingJob,
    actions,
    submit,
    tidy,
)

pytestmark = pytest.mark.slurm

NODES = 16
PAIR, RESERVED, NAMED = ("n13", "n14"), ("n11", "n12"), "n10"
ROOMY = ("n15", "n16")
EXTRA = f"""{SLURM_CONF}
PartitionName=second Nodes=n[1-9] State=UP
PartitionName=pair Nodes={",".join(PAIR)} State=UP
"""

ENOUGH = "[guard]\nmax_drained_nodes = 16"
"""The breaker is not the matter here: each kind of job loses a node."""

KINDS = {
    "array": ("--array=7",),
    "het": (":", "--gpus-per-node=8"),
    "no_requeue": ("--no-requeue",),
    "partitions": ("--partition=second,train",),
    "named": (f"--nodelist={NAMED}",),
    "reserved": ("--reservation=ours", "--nodes=2"),
    "within": ("--reservation=roomy",),
    "pair": ("--partition=pair", "--nodes=2"),
}
BROKEN_PART = {"het": 1}
"""Of these jobs it is not the first node that loses its GPU."""


@dataclass(frozen=True)
class Kind:
    """One job that has lost a GPU on the node ``bad``, and the decision on it."""

    job: FailingJob
    bad: str
    decision: dict[str, Any]

    @property
    def actions(self) -> dict[str, str]:
        return actions(self.decision)

    def detail(self, action: str) -> str:
        """What an action's last word was."""
        return next(str(a["detail"]) for a in self.decision["actions"] if a["kind"] == action)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(
        NODES,
        8,
        config=MONITOR.replace("[guard]", ENOUGH),
        slurm_conf_extra=EXTRA,
        health_check_seconds=0,
    ) as running:
        # Slurm fills the nodes that nobody asks for by name first.
        for node in (NAMED, *PAIR):
            running.run("scontrol", "update", f"nodename={node}", "weight=100")
        # By number: 26.05 knows no user by the name of nobody.
        user = NOBODY if os.geteuid() == 0 else os.geteuid()
        for name, nodes in (("ours", RESERVED), ("roomy", ROOMY)):
            running.run(
                "scontrol", "create", "reservation", f"reservationname={name}", f"users={user}",
                "starttime=now", "duration=1200", f"nodes={','.join(nodes)}",
            )  # fmt: skip
        yield running


@contextlib.contextmanager
def interactive(cluster: Cluster) -> Iterator[FailingJob]:
    """A job of srun alone, which Slurm cannot start again."""
    job = submit(cluster, wait=False)
    cluster.run("scancel", str(job.id))
    (job.folder / "started-0").unlink(missing_ok=True)
    asked = ["srun", "--gpus-per-node=8", f"--comment={OPTED_IN}", f"--chdir={job.folder}"]
    as_nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    owner: dict[str, Any] = as_nobody if os.geteuid() == 0 else {}
    process = subprocess.Popen(
        [*asked, "--job-name=interactive", "/bin/sh", str(job.folder / "job.sh")],
        env={**cluster.environment},
        cwd=cluster.work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        **owner,
    )
    try:
        cluster.wait((job.folder / "started-0").exists, WAIT_SECONDS, "srun's job starts")
        shown = cluster.run("squeue", "--noheader", "--name=interactive", "--format=%i").stdout
        yield replace(job, id=int(shown))
    finally:
        process.kill()
        process.wait()


def told(cluster: Cluster) -> dict[str, Kind]:
    """Let a job of each kind lose a GPU, and return them with their decisions."""
    jobs = {kind: submit(cluster, *options) for kind, options in KINDS.items()}
    with interactive(cluster) as foreground:
        jobs["interactive"] = foreground
        bad = {}
        for kind, job in jobs.items():
            part = job.id + BROKEN_PART.get(kind, 0)
            bad[kind] = cluster.scheduler().jobs([part])[part].nodes[0]
            job.lose_gpu(bad[kind])
        return {kind: Kind(job, bad[kind], job.decision()) for kind, job in jobs.items()}


@pytest.fixture(scope="module")
def watched(cluster: Cluster) -> tuple[dict[str, Kind], dict[str, int]]:
    """What monitor mode makes of them, and what it has changed."""
    with cluster.aggregator():
        before = cluster.mutations()
        kinds = told(cluster)
        states = {kind: one.job.state for kind, one in kinds.items()}
        changed = cluster.mutations() - before
    # Our own scancel of the job that made the interactive one's folder.
    changed.subtract({"REQUEST_KILL_JOB": 1})
    assert set(states.values()) == {"FAILED"}, states
    tidy(cluster)
    return kinds, {call: count for call, count in changed.items() if count}


@pytest.fixture(scope="module")
def kinds(cluster: Cluster, watched: object) -> Iterator[dict[str, Kind]]:
    """What act mode makes of them; the aggregator runs on."""
    cluster.configure(ACT.replace("[guard]", ENOUGH))
    with cluster.aggregator():
        yield told(cluster)


def test_monitor_mode_judges_them_all_and_changes_nothing(
    watched: tuple[dict[str, Kind], dict[str, int]], kinds: dict[str, Kind]
) -> None:
    seen, changed = watched
    assert changed == {}
    assert {state for one in seen.values() for state in one.actions.values()} == {"recorded"}
    for kind, one in seen.items():
        acted = kinds[kind].decision
        assert one.decision["job"]["verdict"] == acted["job"]["verdict"], kind


def test_every_bad_node_is_drained_whatever_kind_of_job_it_failed(kinds: dict[str, Kind]) -> None:
    drained = {kind: one.actions[f"drain {one.bad}"] for kind, one in kinds.items()}
    assert set(drained.values()) == {"verified"}, drained


@pytest.mark.parametrize("kind", ["array", "partitions"])
def test_an_array_task_and_a_job_of_several_partitions_run_again_elsewhere(
    cluster: Cluster, kinds: dict[str, Kind], kind: str
) -> None:
    one = kinds[kind]
    cluster.wait(one.job.finished, WAIT_SECONDS, f"the {kind} job finishes")
    target = f"{one.job.id}_7" if kind == "array" else str(one.job.id)
    assert one.actions[f"requeue {target}"] == "verified"
    assert one.decision["id"] in cluster.run("recovery", "decisions", "--job", target).stdout
    assert (one.job.node != one.bad, one.job.attempts()) == (True, 2)


def test_a_heterogeneous_job_runs_again_as_a_whole_off_the_node_of_any_of_its_parts(
    cluster: Cluster, kinds: dict[str, Kind]
) -> None:
    one = kinds["het"]
    cluster.wait(one.job.finished, WAIT_SECONDS, "it finishes")
    leader, part = (cluster.scheduler().jobs([one.job.id + n])[one.job.id + n] for n in (0, 1))
    assert one.decision["job"]["excluded"] == [one.bad]
    assert (leader.restarts, part.restarts) == (1, 1), "one requeue for both"
    assert one.bad not in leader.nodes + part.nodes
    assert one.bad in part.excluded
    for name in (f"{leader.id}+1", str(part.id)):
        (found,) = json.loads(cluster.run("recovery", "decisions", "--job", name, "--json").stdout)[
            "decisions"
        ]
        assert found["id"] == one.decision["id"], name
    told = cluster.run("recovery", "explain", f"{leader.id}+1").stdout
    assert "has not reported" not in told, "the epilogs of all its parts are of one attempt"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("no_requeue", "was submitted with --no-requeue: its owner must submit it again"),
        ("interactive", "is no batch job: its owner must submit it again"),
    ],
)
def test_a_job_that_slurm_cannot_restart_stays_as_it_ended_and_the_decision_says_what_to_do(
    kinds: dict[str, Kind], kind: str, said: str
) -> None:
    one = kinds[kind]
    assert one.decision["job"]["verdict"] == "leave"
    assert said in one.decision["job"]["reason"]
    assert list(one.actions) == [f"drain {one.bad}"]
    assert one.job.attempts() == 1


def test_a_job_that_asks_for_the_bad_node_by_name_is_held_before_slurm_is_asked_in_vain(
    kinds: dict[str, Kind],
) -> None:
    one = kinds["named"]
    assert one.bad == NAMED
    assert one.job.state == "SPECIAL_EXIT"
    assert f"it asks for {NAMED} by name" in one.job.shown()["AdminComment"]


@pytest.mark.parametrize(
    ("kind", "where"), [("pair", "partition pair"), ("reserved", "reservation ours")]
)
def test_where_all_nodes_are_needed_the_drain_keeps_the_job_off_and_it_waits_for_the_repair(
    cluster: Cluster, kinds: dict[str, Kind], kind: str, where: str
) -> None:
    one = kinds[kind]
    assert one.actions[f"requeue {one.job.id}"] == "verified"
    assert f"it needs 2 nodes and {where} has 1 without {one.bad}" in one.detail("requeue")
    shown = one.job.shown()
    assert (shown["JobState"], shown["ExcNodeList"]) == ("PENDING", "(null)")
    assert shown["Reason"] != "BadConstraints", "it has its priority yet"
    cluster.mend_gpus(one.bad)
    cluster.run("scontrol", "update", f"nodename={one.bad}", "state=resume")
    cluster.wait(one.job.finished, WAIT_SECONDS, "it finishes once the node is back")


def test_a_job_in_a_reservation_runs_again_within_it(
    cluster: Cluster, kinds: dict[str, Kind]
) -> None:
    one = kinds["within"]
    cluster.wait(one.job.finished, WAIT_SECONDS, "it finishes")
    assert one.actions[f"requeue {one.job.id}"] == "verified"
    assert {one.bad, one.job.node} == set(ROOMY), "on the other of its nodes, and nobody else's"
    assert "DRAIN" in cluster.node(one.bad)["State"], "a reserved node is drained as any other"
