"""Each action goes one command at a time, and gives way to whoever has been there meanwhile.

On a real Slurm; a person's commands come between two steps. Where no command may be sent at all,
the scheduler is one that nobody answers, so that any command would be seen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from recovery import actions, slurm_texts
from recovery.actions import GIVE_UP_SECONDS, RESTART_GAP_SECONDS
from recovery.budgets import History
from recovery.decision import Action, Attempt, Decision
from recovery.demo.cluster import Cluster
from recovery.incident import of_attempt
from recovery.policy import decide
from recovery.slurm.base import Job, SchedulerUnavailable
from recovery.slurm.cli import CliScheduler
from recovery.view import View
from slurm_hooks.record import Finding, seconds_of, utc
from tests import incidents
from tests.failing_job import SLURM_CONF, WAIT_SECONDS, FailingJob, submit, tidy
from tests.incidents import NOW, POLICY, decided, failed, finding, log

GPU = finding("gpu.lost", gpu=3)
CRASH = log("program.exception", "ValueError: bad batch size")


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with Cluster(2, 8, hooks=False, slurm_conf_extra=SLURM_CONF) as running:
        yield running


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    tidy(shared)


@dataclass
class Case:
    """A decision on a real failed job, and the one action of it that is being taken."""

    cluster: Cluster
    job: FailingJob
    decision: Decision
    action: Action

    def step(self, now: float | None = None) -> Action:
        """Take a fresh look and go one step, as the aggregator does; return where it stands."""
        scheduler = self.cluster.scheduler()
        view = View(scheduler.jobs([self.job.id]).get(self.job.id), scheduler.nodes())
        now = time.time() if now is None else now
        self.action = actions.advance(self.action, self.decision, view, scheduler, now)
        return self.action

    def until(self, **wanted: str) -> Action:
        """Go on until the action stands like that."""
        self.cluster.wait(
            lambda: all(getattr(self.step(), name) == value for name, value in wanted.items()),
            WAIT_SECONDS,
            f"{self.action.name} becomes {wanted}",
        )
        return self.action


def case(
    cluster: Cluster, kind: str, seen: Finding = GPU, *options: str, **pretended: object
) -> Case:
    """A job that has failed, and a decision's action of that ``kind``.

    ``pretended`` is what the policy is told of the job instead of what is so.
    """
    job = submit(cluster, *options)
    job.fail("exit 1")
    job.wait_for("FAILED")
    shown: Job = replace(cluster.scheduler().jobs([job.id])[job.id], **pretended)  # type: ignore[arg-type]
    attempt = Attempt("private", job.id, shown.restarts, shown.submit_time)
    epilog = incidents.epilog(shown.nodes[0], [replace(seen, job_id=None)], shown)
    told = [replace(epilog, time=utc())]
    incident = of_attempt(attempt, shown, shown.nodes, told, float(shown.end_time), [], utc())
    decision = decide(incident, History(), POLICY, time.time(), "act")
    planned = actions.intents(decision, utc())
    return Case(cluster, job, decision, next(one for one in planned if one.kind == kind))


# -- one command at a time


@pytest.mark.slurm
def test_a_drain_is_intended_sent_once_and_then_seen(cluster: Cluster) -> None:
    drain = case(cluster, "drain")
    start = cluster.mutations()
    first = drain.step()
    assert (first.state, first.step) == ("planned", "drain")
    assert cluster.mutations() == start, "the intent is durable before anything is sent"
    second = drain.step()
    assert second.state == "done"
    third = drain.step()
    assert third.state == "verified"
    assert cluster.mutations() - start == {"REQUEST_UPDATE_NODE": 1}
    reason = cluster.node(drain.action.target)["Reason"]
    assert reason.startswith(slurm_texts.drain_reason(drain.decision, drain.action.target))


@pytest.mark.slurm
def test_a_requeue_is_intended_sent_once_started_once_and_then_seen(cluster: Cluster) -> None:
    requeue = case(cluster, "requeue")
    start = cluster.mutations()
    assert (requeue.step().step, cluster.mutations() - start) == ("requeue", {})
    ended = requeue.job.shown()
    too_early = seconds_of(requeue.decision.ended_time) + RESTART_GAP_SECONDS / 2
    cluster.wait(
        lambda: requeue.step(too_early) and requeue.job.shown()["JobState"] == "PENDING",
        WAIT_SECONDS,
        f"{ended['JobId']} is pending",
    )
    assert requeue.step(too_early).step == "requeue", "not within a second of its predecessor's end"
    assert RESTART_GAP_SECONDS >= 1
    assert requeue.until(state="verified").step == "start"
    assert cluster.mutations() - start == {"REQUEST_JOB_REQUEUE": 1, "REQUEST_UPDATE_JOB": 1}
    cluster.wait(requeue.job.finished, WAIT_SECONDS, "it finishes")
    assert requeue.job.shown()["ExcNodeList"] == requeue.decision.job.excluded[0]


@pytest.mark.slurm
def test_a_hold_is_intended_sent_once_explained_once_and_then_seen(cluster: Cluster) -> None:
    hold = case(cluster, "hold", CRASH)
    start = cluster.mutations()
    assert (hold.step().step, cluster.mutations() - start) == ("requeue_hold", {})
    assert hold.until(state="verified").step == "comment"
    assert cluster.mutations() - start == {"REQUEST_JOB_REQUEUE": 1, "REQUEST_UPDATE_JOB": 1}
    assert hold.job.state == "SPECIAL_EXIT"
    assert hold.job.shown()["AdminComment"] == slurm_texts.hold_comment(hold.decision)


# -- a person was there meanwhile


@pytest.mark.slurm
@pytest.mark.parametrize(("kind", "seen"), [("requeue", GPU), ("hold", CRASH)])
def test_a_job_that_somebody_requeued_before_us_is_theirs(
    cluster: Cluster, kind: str, seen: Finding
) -> None:
    one = case(cluster, kind, seen)
    cluster.run("scontrol", "requeue", str(one.job.id))
    start = cluster.mutations()
    after = one.step()
    assert (after.state, after.detail[:10]) == ("abandoned", "superseded")
    assert cluster.mutations() == start


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("command", "said"),
    [("scancel", "cancelled by somebody since"), ("scontrol hold", "held by somebody since")],
)
def test_a_job_that_somebody_cancels_or_holds_after_our_requeue_is_left_to_them(
    cluster: Cluster, command: str, said: str
) -> None:
    requeue = case(cluster, "requeue")
    requeue.step()
    cluster.wait(
        lambda: requeue.step(now=0.0) and requeue.job.state == "PENDING", WAIT_SECONDS, "pending"
    )
    cluster.run(*command.split(), str(requeue.job.id))
    start = cluster.mutations()
    after = requeue.step()
    assert after.state == "abandoned"
    assert said in after.detail
    assert cluster.mutations() == start


@pytest.mark.slurm
def test_a_node_that_somebody_drains_between_our_intent_and_our_command_keeps_their_reason(
    cluster: Cluster,
) -> None:
    drain = case(cluster, "drain")
    drain.step()
    node = drain.action.target
    cluster.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=ann: new fans")
    start = cluster.mutations()
    assert drain.step().state == "abandoned"
    assert "by 'ann: new fans" in drain.action.detail
    assert cluster.mutations() == start


@pytest.mark.slurm
def test_a_drain_that_somebody_undid_is_not_repeated(cluster: Cluster) -> None:
    drain = case(cluster, "drain")
    drain.until(state="done")
    cluster.run("scontrol", "update", f"nodename={drain.action.target}", "state=resume")
    start = cluster.mutations()
    assert drain.step().state == "abandoned"
    assert "undone by somebody" in drain.action.detail
    assert cluster.mutations() == start


# -- Slurm says no


@pytest.mark.slurm
def test_what_slurm_refuses_has_failed_and_its_own_words_are_kept(cluster: Cluster) -> None:
    requeue = case(cluster, "requeue", GPU, "--no-requeue", requeue=True)
    requeue.step()
    after = requeue.step()
    assert after.state == "failed"
    assert after.detail.startswith("Slurm refused requeue: ")
    assert requeue.job.state == "FAILED"


# -- nothing may be sent at all: a command to this scheduler would raise


NOBODY_ANSWERS = CliScheduler({"SLURM_CONF": "/nonexistent", "PATH": "/nonexistent"})

DECISION = decided(failed(n3=[GPU]))
DRAIN, REQUEUE = actions.intents(DECISION, utc(NOW))


def offline(action: Action, view: View, now: float = NOW) -> Action:
    """One step in which nothing may be sent."""
    return actions.advance(action, DECISION, view, NOBODY_ANSWERS, now)


def test_drains_come_before_the_requeue_so_that_nothing_restarts_there() -> None:
    both = decided(failed(n2=[GPU], n4=[GPU]))
    planned = actions.intents(both, utc(NOW))
    assert [one.name for one in planned] == ["drain n2", "drain n4", "requeue 12"]
    assert actions.intents(decided(failed(incidents.job(comment=""))), utc(NOW)) == ()


@pytest.mark.parametrize("action", [DRAIN, REQUEUE], ids=["drain", "requeue"])
def test_what_slurm_does_not_know_is_left(action: Action) -> None:
    after = offline(action, View(None, {}))
    assert after.state == "abandoned"
    assert "Slurm" in after.detail


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "DOWN"},
        {"flags": frozenset({"DRAIN"})},
        {"flags": frozenset({"FAIL"})},
        {"flags": frozenset({"REBOOT_REQUESTED"})},
    ],
    ids=str,
)
def test_a_node_that_somebody_keeps_out_of_service_stays_as_they_left_it(
    changes: dict[str, object],
) -> None:
    for step in ("", "drain"):
        node = incidents.node("n3", reason="NHC: load is high", **changes)
        after = offline(replace(DRAIN, step=step), View(None, {"n3": node}))
        assert after.state == "abandoned"
        assert "somebody else's already, by 'NHC: load is high'" in after.detail


@pytest.mark.slurm
def test_words_on_a_node_in_service_keep_nobody_off_and_stay_when_it_is_drained(
    cluster: Cluster,
) -> None:
    """24.11 has such words, after a resume too; other releases clear them at once."""
    worded = incidents.node("n3", reason="ann: a new fan")
    with pytest.raises(SchedulerUnavailable):  # it is sent
        offline(replace(DRAIN, step="drain"), View(None, {"n3": worded}))
    drain = case(cluster, "drain")
    node = drain.action.target
    cluster.run("scontrol", "update", f"nodename={node}", "reason=ann: a new fan")
    stands = "ann" in cluster.node(node).get("Reason", "")
    drain.until(state="verified")
    reason = cluster.node(node)["Reason"]
    assert reason.startswith(slurm_texts.drain_reason(drain.decision, node))
    assert ("(before: ann: a new fan)" in reason) == stands


def test_what_another_decision_of_ours_has_drained_is_drained() -> None:
    node = incidents.node("n3", flags=frozenset({"DRAIN"}), reason="recovery: 01K: a fan")
    after = offline(DRAIN, View(None, {"n3": node}))
    assert (after.state, after.detail) == ("verified", "drained already: recovery: 01K: a fan")


@pytest.mark.parametrize(
    "changes",
    [
        {"uid": 4711},
        {"state": "RUNNING", "restarts": 1},
        {"state": "PENDING", "restarts": 1},
        {"state": "COMPLETED"},
        {"state": "CANCELLED"},
        {"end_time": 7},
        {"restarts": 2},
    ],
    ids=str,
)
def test_a_job_that_is_no_longer_the_attempt_decided_on_is_not_touched(
    changes: dict[str, object],
) -> None:
    job = replace(incidents.job(), **changes)  # type: ignore[arg-type]
    after = offline(REQUEUE, View(job, {}))
    assert (after.state, after.detail[:10]) == ("abandoned", "superseded")


def test_a_job_that_finds_no_node_any_more_is_told_of_and_not_tried_again() -> None:
    lost = incidents.job(state="PENDING", restarts=1, priority=1, reason="BadConstraints")
    after = offline(replace(REQUEUE, step="start", state="done"), View(lost, {}))
    assert after.state == "failed"
    assert "do not satisfy the job's own constraints" in after.detail


def test_what_does_not_come_to_its_end_is_handed_to_a_person() -> None:
    stuck = replace(REQUEUE, step="start", state="done")
    waiting = incidents.job(state="PENDING", restarts=1, priority=1, eligible_time=int(NOW) + 999)
    after = offline(stuck, View(waiting, {}), NOW + GIVE_UP_SECONDS + 1)
    assert after.state == "failed"
    assert after.detail.endswith("a person has to look")


@pytest.mark.parametrize("state", ["FAILED", "RUNNING", "COMPLETED", "TIMEOUT"])
def test_a_next_attempt_that_has_begun_is_a_restart_however_it_ends(state: str) -> None:
    begun = incidents.job(state=state, restarts=1, nodes=("n1",))
    after = offline(replace(REQUEUE, step="start", state="done"), View(begun, {}))
    assert after.state == "verified"


def test_a_held_job_is_told_why_and_how_to_go_on() -> None:
    held = decided(failed(n1=[CRASH]))
    text = slurm_texts.hold_comment(held)
    assert text.startswith(f"recovery: {held.id}: ")
    assert "bad batch size" in text
    assert text.endswith("Mend it, then: scontrol release 12")
