"""When a restart is not worth trying, whose fault it is, and what a decision says for itself.

A table for each: what is so, and the answer. ``test_deciding`` has the classes and the budgets.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from recovery.decision import Decision
from recovery.incident import Incident
from slurm_hooks.config import ClassRule, Policy
from slurm_hooks.record import Finding
from tests.incidents import (
    NOW,
    POLICY,
    attempts,
    checkpoint,
    decided,
    failed,
    finding,
    job,
    log,
    offender,
    progress,
    sick,
)

GPU = finding("gpu.lost", gpu=3)
CRASH = log("program.exception", "ValueError: bad batch size")
BROKEN = finding("checkpoint.all_broken", job_id=12, file="/data/ckpt")

HOUR = 3600


def answers(decision: Decision) -> dict[str, str]:
    """The verdict on each node that was judged."""
    return {answer.node: answer.verdict for answer in decision.nodes}


# -- stop conditions: of a job with a lost GPU, which would be restarted otherwise


STOPS: list[tuple[str, dict[str, Any], tuple[Finding, ...], dict[str, Any], str, str]] = [
    # name, the job's changes, what n1 shows besides, the history, the answer, what is said
    ("cancelled by a person", {"state": "CANCELLED"}, (), {}, "leave", "was cancelled"),
    ("exit 93", {"exit_code": 93}, (), {}, "leave", "asks not to be run again"),
    ("no opt-in", {"comment": ""}, (), {}, "leave", "did not opt in"),
    ("no batch job", {"batch": False}, (), {}, "leave", "is no batch job"),
    ("--no-requeue", {"requeue": False}, (), {}, "leave", "--no-requeue"),
    ("of a federation", {"federated": True}, (), {}, "leave", "its federation's to say"),
    ("past its deadline", {"deadline": NOW - 1}, (), {}, "leave", "before its deadline"),
    (
        "too little time to its deadline",
        {"deadline": NOW + HOUR - 1, "time_limit_seconds": HOUR},
        (),
        {},
        "leave",
        "it cannot end before its deadline",
    ),
    (
        "less than its --time-min to its deadline",
        {"deadline": NOW + HOUR, "time_limit_seconds": 2 * HOUR, "time_min_seconds": HOUR + 1},
        (),
        {},
        "leave",
        "a restart is pointless",
    ),
    (
        "what it depends on has failed",
        {"dependency": "afterok:11(failed),afterok:10(unfulfilled)"},
        (),
        {},
        "leave",
        "what it depends on has failed (afterok:11(failed)",
    ),
    ("its owner wants to be asked", {"comment": "recovery=hold"}, (), {}, "hold", "to be asked"),
    ("no checkpoint is whole", {}, (BROKEN,), {}, "hold", "none of its checkpoints is whole"),
    ("its budget is spent", {"restarts": 3}, (), {}, "hold", "restarts: all 3 used"),
    ("its user's hour", {}, (), {"requeues_of_user_hour": 10}, "hold", "of this user in an hour"),
    ("the fleet's hour", {}, (), {"requeues_hour": 30}, "hold", "of all in an hour"),
    ("it asks for the node", {"required": ("n3",)}, (), {}, "hold", "asks for n3 by name"),
]


@pytest.mark.parametrize(
    ("of", "seen", "history", "answer", "said"),
    [stop[1:] for stop in STOPS],
    ids=[stop[0] for stop in STOPS],
)
def test_each_stop_condition_alone_stops_a_restart(
    of: dict[str, Any], seen: tuple[Finding, ...], history: dict[str, Any], answer: str, said: str
) -> None:
    assert decided(failed(n3=[GPU])).job.verdict == "requeue", "but for that it would be"
    decision = decided(failed(job(**of), n1=[*seen], n3=[GPU]), **history)
    assert decision.job.verdict == answer
    assert said in decision.job.reason


@pytest.mark.parametrize(
    ("first", "second"),
    list(itertools.combinations(range(len(STOPS)), 2)),
)
def test_two_stop_conditions_give_the_answer_of_the_stronger(first: int, second: int) -> None:
    """What somebody wanted, or what Slurm cannot do, comes before what only this policy minds."""
    one, other = STOPS[first], STOPS[second]
    if "state" in one[1] and "exit_code" in other[1]:
        return  # a cancelled job has no exit code of its own
    of = {**other[1], **one[1]}
    if "comment" in one[1] and "comment" in other[1]:
        return  # a job has one comment
    decision = decided(
        failed(job(**of), n1=[*one[2], *other[2]], n3=[GPU]), **{**one[3], **other[3]}
    )
    assert decision.job.verdict == ("leave" if "leave" in (one[4], other[4]) else "hold")


@pytest.mark.parametrize(
    "harmless",
    [
        {"deadline": NOW + HOUR + 60, "time_limit_seconds": HOUR},
        {"deadline": NOW + HOUR + 60, "time_limit_seconds": 9 * HOUR, "time_min_seconds": HOUR},
        {"dependency": "afterok:11(failed)?afterok:10(unfulfilled)"},
        {"dependency": "afterany:10(unfulfilled)"},
        {"restarts": 2},
        {"required": ("n1", "n2")},
    ],
)
def test_what_only_looks_like_a_stop_condition_stops_nothing(harmless: dict[str, Any]) -> None:
    assert decided(failed(job(**harmless), n3=[GPU])).job.verdict == "requeue"


def test_every_stop_condition_holds_for_every_class_that_would_be_restarted() -> None:
    restarted = [GPU, log("collective.timeout", "Watchdog"), finding("storage.error", file="/d")]
    for seen, (name, of, besides, history, answer, _) in itertools.product(restarted, STOPS):
        if name == "it asks for the node" and seen.code == "log.collective_timeout":
            continue  # nothing is excluded then
        decision = decided(failed(job(**of), n1=[*besides], n3=[seen]), **history)
        assert decision.job.verdict == answer, (name, seen.code)


def test_the_same_failure_twice_and_three_of_any_kind_without_progress_are_the_end() -> None:
    peer = log("collective.peer_lost", "connection closed by peer")
    first = failed(n3=[peer, progress(500)])
    again = failed(job(restarts=1), n3=[peer, progress(500)])
    another = failed(job(restarts=1), n3=[GPU, progress(500)])
    third = failed(job(restarts=2), n2=[GPU, progress(500)])
    assert attempts(first, again)[-1].job.verdict == "hold"
    assert attempts(first, another)[-1].job.verdict == "requeue"
    assert attempts(first, another, third)[-1].job.verdict == "hold"


def test_a_requeue_that_renews_the_sluid_leaves_the_attempts_those_of_one_job() -> None:
    # 26.05 gives each attempt a SLUID of its own.
    first, again, third = (
        failed(job(restarts=n, sluid=f"s{n}EM8VS71NY00"), n3=[GPU, progress(500)]) for n in range(3)
    )
    assert attempts(first, again, third)[-1].job.verdict == "hold"


# -- whose fault: an application's Xid


APPLICATION = finding("gpu.application_fault", "NVRM: Xid 31", gpu=3, uuid="GPU-3")


def of_users(*uids: int) -> dict[str, Any]:
    """The programs of these users have failed of n3's GPU 3 within a week."""
    return {"gpu_users": {("n3", "GPU 3"): frozenset(uids)}}


@pytest.mark.parametrize(
    ("history", "fault_class"),
    [
        ({}, "program.gpu_fault"),
        (of_users(1002), "program.gpu_fault"),
        (of_users(1001, 1002), "program.gpu_fault"),  # ann herself is one of them
        (of_users(1002, 1003), "hardware.gpu"),
        ({"gpu_users": {("n3", "GPU 4"): frozenset((1002, 1003))}}, "program.gpu_fault"),
        ({"gpu_users": {("n2", "GPU 3"): frozenset((1002, 1003))}}, "program.gpu_fault"),
    ],
)
def test_a_programs_xid_blames_the_program_and_of_three_users_on_one_gpu_the_gpu(
    history: dict[str, Any], fault_class: str
) -> None:
    decision = decided(failed(n3=[APPLICATION]), **history)
    assert decision.cause.fault_class == fault_class
    blamed = fault_class == "hardware.gpu"
    assert decision.job.verdict == ("requeue" if blamed else "hold")
    assert decision.job.excluded == (("n3",) if blamed else ())
    assert answers(decision) == ({"n3": "drain"} if blamed else {})
    if blamed:
        assert "as in jobs of 3 users: it is the GPU" in decision.cause.summary


def test_a_site_says_how_many_users_blame_a_gpu() -> None:
    cautious = Policy(users_that_blame_a_gpu=5)
    decision = decided(failed(n3=[APPLICATION]), cautious, **of_users(2, 3, 4))
    assert decision.cause.fault_class == "program.gpu_fault"


# -- repeat offenders


def test_a_restarted_job_avoids_suspects_which_are_neither_blamed_nor_judged_for_it() -> None:
    suspects = {"n2": "5 faults of its own", "n7": "3 jobs sent back"}
    decision = decided(failed(n3=[GPU]), suspects=suspects)
    assert decision.job.excluded == ("n2", "n3", "n7")
    assert answers(decision) == {"n3": "drain"}
    assert {item.node for item in decision.cause.implicated} == {"n3"}
    assert "n2 is a repeat offender and is avoided: 5 faults of its own" in decision.considered
    asked = decided(failed(job(required=("n2",)), n3=[GPU]), suspects=suspects)
    assert asked.job.verdict == "requeue", "its owner asks for n2: a suspicion does not hold it"
    assert asked.job.excluded == ("n3", "n7")


def test_an_offender_is_drained_with_its_history_as_the_reason() -> None:
    decision = decided(offender("n3"))
    assert (decision.job.verdict, answers(decision)) == ("leave", {"n3": "drain"})
    assert decision.nodes[0].reason == "a repeat offender: 5 faults of its own"
    assert decision.rule == "node.repeat_offender: job leave, node drain"


# -- what would have changed it


CHANGES: list[tuple[Incident, str]] = [
    (failed(), "a fault on one of its nodes, or a plain line in its log, would have named a cause"),
    (failed(n3=[GPU]), "the same failure again without progress would have held it"),
    (failed(n3=[GPU]), "had only the program's own text accused n3, it would be watched"),
    (failed(n3=[CRASH]), "would have explained it before program.exception"),
    (failed(job(comment=""), n3=[GPU]), "--comment recovery=requeue would have let it"),
    (failed(job(requeue=False), n3=[GPU]), "submitted with --requeue could have been restarted"),
    (failed(job(comment="recovery=hold"), n3=[GPU]), "would have restarted it without asking"),
    (failed(n1=[BROKEN], n3=[GPU]), "one whole checkpoint would have let it be restarted"),
    (failed(job(required=("n3",)), n3=[GPU]), "without the node in its --nodelist"),
    (failed(job(restarts=3), n3=[GPU]), "a restart left in that budget would have been used"),
    (failed(job(state="CANCELLED")), "another end than the one that Slurm was asked for"),
    (failed(n3=[finding("gpu.driver_mismatch")]), "another such fault of n3 within a day"),
    (failed(n3=[finding("gpu.ecc_contained")]), "of a class that drains, would have drained n3"),
    (failed(job(state="NODE_FAIL"), silent=["n3"]), "word that it is n3 would have drained it"),
    (
        failed(n1=[log("hardware.gpu", "Xid 79", implicated=[{"node": "n3", "why": "Xid 79"}])]),
        "n3's own kernel log, NVML or another probe saying so would have drained it",
    ),
    (sick("n3", GPU), "had only the program's own text accused n3"),
]


@pytest.mark.parametrize(("incident", "said"), CHANGES, ids=[said for _, said in CHANGES])
def test_a_decision_says_what_would_have_changed_it(incident: Incident, said: str) -> None:
    assert said in " | ".join(decided(incident).would_change)


def test_a_job_that_stands_still_is_told_which_step_it_has_to_pass() -> None:
    stuck = [failed(job(restarts=n), n3=[CRASH_OF_PEER, progress(500)]) for n in range(2)]
    *_, last = attempts(*stuck)
    assert "work beyond step 500 would have let it be restarted" in last.would_change


CRASH_OF_PEER = log("collective.peer_lost", "connection closed by peer")


def test_every_decision_names_its_rule_and_what_would_have_changed_it() -> None:
    seen = [GPU, CRASH, APPLICATION, checkpoint(4), finding("storage.full", file="/data")]
    jobs: list[dict[str, Any]] = [{}, {"comment": ""}, {"restarts": 3}]
    for one, of in itertools.product(seen, jobs):
        decision = decided(failed(job(**of), n3=[one]))
        assert decision.rule and decision.would_change, (one.code, of)
        assert decision.limits


def test_a_site_may_hold_what_others_restart_and_the_rule_says_so() -> None:
    site = Policy(classes={"hardware.gpu": ClassRule("hold", "watch")})
    decision = decided(failed(n3=[GPU]), site)
    assert (decision.job.verdict, answers(decision)) == ("hold", {"n3": "watch"})
    assert decision.rule == "hardware.gpu: job hold, node watch"
    assert decided(failed(n3=[GPU]), POLICY).job.verdict == "requeue"
