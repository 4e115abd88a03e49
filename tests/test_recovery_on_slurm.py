"""What becomes of a failed job and its nodes on a real Slurm, with the aggregator beside it.

Real slurmctld and slurmd, real hooks, four nodes of eight fake GPUs; one journal for the whole
file, as a controller has one for its life.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.demo.cluster import Cluster
from tests import failing_job, records
from tests.failing_job import ACT, MONITOR, NOBODY, SLURM_CONF, WAIT_SECONDS, actions, submit, tidy

pytestmark = pytest.mark.slurm

REQUEUE = "REQUEST_JOB_REQUEUE"
NODE = "REQUEST_UPDATE_NODE"
JOB = "REQUEST_UPDATE_JOB"


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    # A health check would see a fault while its job still runs, and drain the node by itself.
    with Cluster(4, 8, config=ACT, slurm_conf_extra=SLURM_CONF, health_check_seconds=0) as running:
        yield running


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """Four idle, healthy nodes, and an aggregator that may act."""
    yield shared
    tidy(shared)
    shared.configure(ACT)


@pytest.mark.smoke
def test_a_lost_gpu_costs_one_requeue_one_drain_and_the_job_finishes_elsewhere(
    cluster: Cluster,
) -> None:
    with cluster.aggregator():
        job = submit(cluster)
        before = cluster.mutations()
        bad = job.lose_gpu()
        cluster.wait(job.finished, WAIT_SECONDS, "it finishes")
        decision = job.decision()
        changed = cluster.mutations() - before
    assert job.attempts() == 2
    assert job.node != bad
    assert (changed[REQUEUE], changed[NODE]) == (1, 1)
    assert changed[JOB] == 1, "one update excludes the node and starts the job"
    node = cluster.node(bad)
    assert "DRAIN" in node["State"]
    assert node["Reason"].startswith(f"recovery: {decision['id']}: ")
    assert actions(decision) == {f"drain {bad}": "verified", f"requeue {job.id}": "verified"}
    assert decision["cause"]["fault_class"] == "hardware.gpu"
    assert job.shown()["Restarts"] == "1"


@pytest.mark.smoke
def test_in_monitor_mode_nothing_is_changed_and_the_same_look_fails_in_act_mode(
    cluster: Cluster,
) -> None:
    """One count judges both modes: it is empty in monitor mode and is not in act mode."""
    for mode, config in (("monitor", MONITOR), ("act", ACT)):
        cluster.configure(config)
        with cluster.aggregator():
            job = submit(cluster)
            bad = job.node
            before = cluster.mutations()
            job.lose_gpu(bad)
            decision = job.decision()
            # Slurm itself ends the job and its allocation: only what commands asked for counts.
            changed = cluster.mutations() - before
        assert decision["job"]["verdict"] == "requeue"
        assert (not changed) is (mode == "monitor"), changed
        if mode == "monitor":
            assert set(actions(decision).values()) == {"recorded"}
            assert any("monitor mode" in text for text in decision["limited_by"])
            assert job.state == "FAILED"
            assert "DRAIN" not in cluster.node(bad)["State"]
            tidy(cluster)


@pytest.mark.parametrize("reason", ["ann: new fans", "NHC: load is high"])
def test_a_node_that_somebody_else_drained_keeps_their_reason(
    cluster: Cluster, reason: str
) -> None:
    job = submit(cluster)
    bad = job.node
    cluster.run("scontrol", "update", f"nodename={bad}", "state=drain", f"reason={reason}")
    with cluster.aggregator():
        before = cluster.mutations()
        job.lose_gpu(bad)
        decision = job.decision()
        cluster.wait(job.finished, WAIT_SECONDS, "it finishes")
        changed = cluster.mutations() - before
        assert changed[NODE] == 0, (cluster.folder / "aggregator.log").read_text("utf-8")
    assert cluster.node(bad)["Reason"].startswith(reason)
    assert actions(decision)[f"drain {bad}"] == "abandoned"
    assert f"somebody else's already, by '{reason}" in decision["actions"][0]["detail"]


def test_the_users_own_excluded_nodes_stay_excluded(cluster: Cluster) -> None:
    with cluster.aggregator():
        job = submit(cluster, "--exclude=n1,n2")
        bad = job.lose_gpu()
        cluster.wait(job.finished, WAIT_SECONDS, "it finishes")
    assert bad == "n3"
    assert job.shown()["ExcNodeList"] == "n[1-3]"
    assert job.node == "n4"


def test_a_program_that_fails_by_itself_is_held_for_its_owner_and_no_node_is_touched(
    cluster: Cluster,
) -> None:
    with cluster.aggregator():
        job = submit(cluster)
        node, before = job.node, cluster.mutations()
        job.fail("/usr/bin/python3 -c 'raise ValueError(\"bad batch size -1\")'")
        decision = job.decision()
        changed = cluster.mutations() - before
    shown = job.shown()
    assert shown["JobState"] == "SPECIAL_EXIT"
    assert shown["Priority"] == "0"
    comment = shown["AdminComment"]
    assert comment.startswith(f"recovery: {decision['id']}: ")
    assert "bad batch size -1" in comment
    assert comment.endswith(f"Mend it, then: scontrol release {job.id}")
    assert job.attempts() == 1
    assert changed[NODE] == 0
    assert cluster.node(node).get("Reason") is None
    assert decision["cause"]["fault_class"] == "program.exception"
    assert actions(decision) == {f"hold {job.id}": "verified"}
    cluster.run("scontrol", "release", str(job.id))
    assert job.shown()["Priority"] != "0", "its owner has it back"


@pytest.mark.parametrize(
    ("comment", "said"),
    [("", "did not opt in"), ("recovery=requeu", "its comment is not understood")],
)
def test_a_job_that_did_not_opt_in_stays_as_it_ended_and_its_bad_node_is_drained(
    cluster: Cluster, comment: str, said: str
) -> None:
    with cluster.aggregator():
        job = submit(cluster, comment=comment)
        bad = job.lose_gpu()
        decision = job.decision()
    assert (job.state, job.attempts()) == ("FAILED", 1)
    assert decision["job"]["verdict"] == "leave"
    assert said in decision["job"]["reason"]
    assert actions(decision) == {f"drain {bad}": "verified"}
    assert cluster.node(bad)["Reason"].startswith(f"recovery: {decision['id']}: ")


def test_what_somebody_wanted_to_end_is_left_alone(cluster: Cluster) -> None:
    with cluster.aggregator():
        stopping, cancelled, late = submit(cluster), submit(cluster), submit(cluster)
        cluster.run("scontrol", "update", f"job={late.id}", "EndTime=now+1")
        before = cluster.mutations()
        stopping.fail("exit 93")
        cluster.run("scancel", str(cancelled.id))
        asked = stopping.decision()
        assert asked["cause"]["fault_class"] == "program.stop_requested"
        assert cancelled.wait_for("CANCELLED")
        late.wait_for("TIMEOUT", seconds=60)
        timed_out = late.decision()
        changed = cluster.mutations() - before
    assert timed_out["cause"]["fault_class"] == "scheduler.time_limit"
    assert [one["job"]["verdict"] for one in (asked, timed_out)] == ["leave", "leave"]
    assert [one["actions"] for one in (asked, timed_out)] == [[], []]
    assert (changed[REQUEUE], changed[NODE]) == (0, 0)
    assert [one.attempts() for one in (stopping, cancelled, late)] == [1, 1, 1]


@pytest.mark.smoke
def test_what_nobody_can_explain_is_tried_once_more_and_then_held(cluster: Cluster) -> None:
    with cluster.aggregator():
        job = submit(cluster)
        before = cluster.mutations()
        job.fail("exit 1", always=True)
        first, second = job.decision(0), job.decision(1)
        changed = cluster.mutations() - before
    assert [one["job"]["verdict"] for one in (first, second)] == ["requeue", "hold"]
    assert first["job"]["excluded"] == []
    assert job.attempts() == 2
    assert job.state == "SPECIAL_EXIT"
    assert "restarts after unknown: all 1 used" in job.shown()["AdminComment"]
    assert changed[NODE] == 0


def bad_records(spool: Path) -> dict[str, str]:
    """Drop records that nobody may believe; return what each name's refusal has to say."""
    good = records.record("n1", job=None)
    text = json.dumps(good.to_dict())
    dropped = {
        "01KBAD0000000000000000TRVN": (text[: len(text) // 2], "not JSON"),
        "01KBAD0000000000000000NJSN": ("this is no record", "not JSON"),
        "01KBAD0000000000000000SCHM": (text.replace("fault-record/v1", "poem/v9"), "schema"),
        "01KBAD0000000000000000XTRA": (text.replace('"hook"', '"hoook"'), "schema"),
        "01KBAD0000000000000000B1GG": (text + " " * (1 << 20), "262144 is the limit"),
    }
    for name, (content, _) in dropped.items():
        records.put(spool, f"{name}.json", content.encode())
    told = {name: why for name, (_, why) in dropped.items()}
    if os.geteuid() == 0:
        forged = records.put(spool, f"{good.id}.json", text.encode())
        os.chown(forged, NOBODY, NOBODY)
        told[good.id] = "uid"
    return told


def test_records_that_nobody_may_believe_stop_nothing_and_change_nothing(cluster: Cluster) -> None:
    with cluster.aggregator() as service:
        expected = bad_records(cluster.spool)
        rejected = cluster.spool / "rejected"
        cluster.wait(
            lambda: len(list(rejected.glob("*.why"))) >= len(expected),
            WAIT_SECONDS,
            f"{len(expected)} records are rejected",
        )
        job = submit(cluster)
        bad = job.lose_gpu()
        decision = job.decision()
        cluster.wait(job.finished, WAIT_SECONDS, "the pass goes on, and the job finishes")
        assert service.alive
    for name, why in expected.items():
        told = next(rejected.glob(f"*{name}*.why")).read_text()
        assert why in told, (name, told)
    assert actions(decision)[f"drain {bad}"] == "verified"
    for node in set(cluster.node_names) - {bad}:
        assert "DRAIN" not in cluster.node(node)["State"], "a forged record drains nobody"


def test_while_slurm_does_not_answer_records_are_taken_in_nothing_is_decided_and_it_is_said_once(
    cluster: Cluster,
) -> None:
    cluster.configure(ACT.replace("poll = 0.1", "poll = 0.1\ncommand_timeout = 3"))
    job = submit(cluster)
    bad = job.lose_gpu()
    job.wait_for("FAILED")
    waiting = cluster.spool / "incoming"
    cluster.wait(lambda: list(waiting.glob("*.json")), WAIT_SECONDS, "its epilog has reported")
    cluster.stop_node("slurmctld")
    with cluster.aggregator() as service:
        start = len(service.said())
        said = "Slurm does not answer, nothing is decided until it does"
        cluster.wait(lambda: said in service.said()[start:], WAIT_SECONDS, "it says so")
        cluster.wait(lambda: not list(waiting.glob("*.json")), WAIT_SECONDS, "it takes records in")
        records.drop(cluster.spool, records.record("n2", job=None, findings=(), cluster="private"))
        cluster.wait(lambda: not list(waiting.glob("*.json")), WAIT_SECONDS, "and goes on to")
        assert not any(
            (d["attempt"] or {}).get("job_id") == job.id for d in failing_job.decisions(cluster)
        )
        problems = json.loads(cluster.run("recovery", "status", "--json").stdout)["problems"]
        assert any(said in problem for problem in problems)
        assert service.said()[start:].count(said) == 1
        cluster.restart_controller()
        # A controller that was restarted may start no job for a minute (24.11).
        decision = job.decision(seconds=180)
        cluster.wait(job.finished, WAIT_SECONDS, "with Slurm back, the job is")
    assert actions(decision) == {f"drain {bad}": "verified", f"requeue {job.id}": "verified"}


def test_a_second_sick_node_trips_the_breaker_which_a_person_closes_with_a_reason(
    cluster: Cluster,
) -> None:
    cluster.configure(ACT.replace("max_drained_share = 1.0", "max_drained_share = 0.05"))
    with cluster.aggregator() as service:
        jobs = [submit(cluster), submit(cluster)]
        bad = [job.node for job in jobs]
        for job in jobs:
            job.lose_gpu()
        made = [job.decision() for job in jobs]
        states = [actions(one)[f"drain {node}"] for one, node in zip(made, bad, strict=True)]
        assert sorted(states) == ["abandoned", "verified"]
        drained = [node for node in bad if "DRAIN" in cluster.node(node)["State"]]
        assert drained == [bad[states.index("verified")]], "5% of four nodes is one"
        for job in jobs:
            cluster.wait(job.finished, WAIT_SECONDS, "jobs are restarted all the same")

        why = "1 of 4 nodes of partition train are drained already, max_drained_share allows 1"
        refused = made[states.index("abandoned")]
        assert why in json.dumps(refused["actions"])
        status = cluster.run("recovery", "status").stdout
        assert "BREAKER     drain: 1 of 4 nodes" in status
        assert service.said().count(f"circuit breaker: {why}") == 1

        missing = cluster.run("recovery", "resume", check=False)
        assert (missing.returncode, "--why" in missing.stderr) == (2, True)
        tidy(cluster)
        closed = cluster.run("recovery", "resume", "--why", "two bad risers, replaced")
        assert closed.stdout == "drain: closed\n"
        assert "BREAKER" not in cluster.run("recovery", "status").stdout
        job = submit(cluster)
        again = job.lose_gpu()
        assert actions(job.decision())[f"drain {again}"] == "verified"
    assert cluster.run("recovery", "resume", "--why", "x", check=False).returncode == 1


def test_one_decision_and_one_drain_for_a_node_on_which_two_jobs_fail_at_once(
    cluster: Cluster,
) -> None:
    with cluster.aggregator():
        jobs = [submit(cluster, "--gpus-per-node=4"), submit(cluster, "--gpus-per-node=4")]
        bad = jobs[0].node
        if jobs[1].node != bad:
            pytest.skip("Slurm has put them on two nodes")
        before = cluster.mutations()
        cluster.set_gpus(bad, {"count": 0})
        for job in jobs:
            job.fail("exit 1")
        for job in jobs:
            cluster.wait(job.finished, WAIT_SECONDS, "both finish elsewhere")
        made = [job.decision() for job in jobs]
        changed = cluster.mutations() - before
    assert [actions(one)[f"drain {bad}"] for one in made] == ["verified", "verified"]
    assert (changed[NODE], changed[REQUEUE]) == (1, 2)
    assert all(job.node != bad for job in jobs)


def test_a_second_aggregator_says_so_in_one_line_and_exits_1(cluster: Cluster) -> None:
    beat = cluster.spool / "control" / "effective.json"
    beat.unlink(missing_ok=True)
    with cluster.aggregator() as service:
        cluster.wait(beat.exists, WAIT_SECONDS, "the first has begun")
        for command in ("run", "once"):
            second = cluster.run("recovery", command, check=False)
            assert second.returncode == 1
            lock = cluster.folder / "state" / "aggregator.lock"
            assert second.stderr == f"another aggregator holds {lock}; stop it first\n"
        assert service.alive
