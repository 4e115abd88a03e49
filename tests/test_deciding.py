"""What is decided, read as the policy's specification: each class, each wish, each limit.

``decide()`` is pure, so these are tables: what four nodes saw of a failed job, and the answer.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest

from recovery.decision import Action, Decision, Implicated
from recovery.incident import Incident
from recovery.policy import TABLE, rule_for
from recovery.stalls import Hang, Slowdown, Stall
from slurm_hooks import catalog
from slurm_hooks.config import ClassRule, Policy
from slurm_hooks.record import Finding
from tests.incidents import (
    NOW,
    POLICY,
    attempts,
    checkpoint,
    decided,
    epilog,
    failed,
    finding,
    health_check,
    job,
    log,
    offender,
    progress,
    running,
    sick,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GPU = finding("gpu.lost", gpu=3)
CRASH = log("program.exception", "ValueError: bad batch size")

STALL = Stall(80, NOW - 1000, 1000.0, 900.0, "its own cadence allows 15 min")
STOPPED = Implicated("n3", "rank 5 is stopped", "processes", "activity.process_stopped", rank=5)
HANG = Hang(STALL, "n3: rank 5 is stopped", (STOPPED,), ("n4: no answer within 180 s",))
SLOW = Slowdown(80, 0.5, 1.0, NOW - 1800)


def answers(decision: Decision) -> dict[str, str]:
    """The verdict on each node that was judged."""
    return {answer.node: answer.verdict for answer in decision.nodes}


def verdict(incident: Incident, policy: Policy = POLICY, **history: Any) -> str:
    """The verdict on the job."""
    return decided(incident, policy, **history).job.verdict


# -- the table: what n3, or the job's log, shows; the job's answer, the nodes left out, n3's answer


SEEN = [
    # by the node itself
    ("hardware.gpu", GPU, "requeue", ("n3",), "drain"),
    ("hardware.gpu", finding("gpu.ecc_uncontained"), "requeue", ("n3",), "drain"),
    ("hardware.gpu", finding("gpu.remap_failed", gpu=1), "requeue", ("n3",), "drain"),
    ("hardware.gpu", finding("gpu.recovery_action", gpu=1), "requeue", ("n3",), "drain"),
    ("hardware.gpu.contained", finding("gpu.ecc_contained"), "requeue", (), "watch"),
    ("hardware.gpu.contained", finding("gpu.remap_pending", gpu=1), "requeue", (), "watch"),
    ("hardware.link", finding("gpu.nvlink_down", gpu=1, link=2), "requeue", ("n3",), "drain"),
    ("hardware.host", finding("host.machine_check"), "requeue", ("n3",), "drain"),
    ("node.software", finding("gpu.driver_mismatch"), "requeue", ("n3",), "watch"),
    ("network.fabric", finding("fabric.nic_failed"), "requeue", ("n3",), "watch"),
    ("storage", finding("storage.error", file="/data"), "requeue", ("n3",), "watch"),
    ("storage.full", finding("storage.full", file="/data"), "hold", (), None),
    ("program.gpu_fault", finding("gpu.application_fault", gpu=3), "hold", (), None),
    ("program.host_oom", finding("job.out_of_memory", job_id=12), "hold", (), None),
    # by the job's own log
    ("network.port_in_use", log("network.port_in_use", "in use"), "requeue", (), None),
    ("collective.timeout", log("collective.timeout", "Watchdog"), "requeue", (), None),
    ("rendezvous", log("rendezvous", "RendezvousTimeoutError"), "requeue", (), None),
    ("remote_service", log("remote_service", "503"), "requeue", (), None),
    ("storage.full", log("storage.full", "No space left"), "hold", (), None),
    ("program.exception", CRASH, "hold", (), None),
    ("program.gpu_oom", log("program.gpu_oom", "CUDA out of memory"), "hold", (), None),
    ("program.nan_loss", log("program.nan_loss", "loss is nan"), "hold", (), None),
    ("program.checkpoint", log("program.checkpoint", "corrupt"), "hold", (), None),
    ("program.config", log("program.config", "unrecognized arguments"), "hold", (), None),
    ("program.stop_requested", log("program.stop_requested", "bye"), "leave", (), None),
    ("scheduler.time_limit", log("scheduler.time_limit", "DUE TO TIME LIMIT"), "leave", (), None),
    # by nobody
    ("unknown", log("unknown"), "requeue", (), None),
    ("unknown", log("cascade", "Connection closed by peer"), "requeue", (), None),
    ("unknown", finding("gpu.nvlink_nonfatal", gpu=1), "requeue", (), None),
]


@pytest.mark.parametrize(
    ("fault_class", "seen", "answer", "excluded", "node"),
    SEEN,
    ids=[f"{fault_class}-{seen.code}" for fault_class, seen, *_ in SEEN],
)
def test_what_one_node_shows_gets_its_rows_answer(
    fault_class: str, seen: Finding, answer: str, excluded: tuple[str, ...], node: str | None
) -> None:
    decision = decided(failed(n3=[seen]))
    assert decision.cause.fault_class == fault_class
    assert decision.job.verdict == answer
    assert decision.job.excluded == excluded
    assert answers(decision) == ({"n3": node} if node else {})


ENDS: list[tuple[str, dict[str, Any]]] = [
    ("scheduler.cancelled", {"state": "CANCELLED"}),
    ("scheduler.preempted", {"state": "PREEMPTED"}),
    ("scheduler.time_limit", {"state": "TIMEOUT"}),
    ("scheduler.deadline", {"state": "DEADLINE"}),
    ("program.stop_requested", {"exit_code": 93}),
]


@pytest.mark.parametrize(("fault_class", "end"), ENDS, ids=[name for name, _ in ENDS])
def test_what_somebody_wanted_is_left_as_it_is_whatever_a_node_shows(
    fault_class: str, end: dict[str, Any]
) -> None:
    decision = decided(failed(job(**end), n3=[GPU, CRASH]))
    assert decision.cause.fault_class == fault_class
    assert decision.job.verdict == "leave"


def test_every_row_of_the_table_is_reached_by_what_can_be_seen() -> None:
    reached = {decided(failed(n3=[seen])).rule.partition(":")[0] for _, seen, *_ in SEEN}
    reached |= {decided(failed(job(**end))).rule.partition(":")[0] for _, end in ENDS}
    lost = failed(job(state="NODE_FAIL"), silent=["n3"], lost=["n3"])
    reached.add(decided(lost).rule.partition(":")[0])
    severe = finding("gpu.nvlink_nonfatal", gpu=1, severity="fault")
    reached.add(decided(failed(n3=[severe])).rule.partition(":")[0])
    reached.add(decided(offender()).rule.partition(":")[0])
    reached.add(decided(running(hang=HANG)).rule.partition(":")[0])
    reached.add(decided(running(slowdown=SLOW)).rule.partition(":")[0])
    assert reached == set(tomllib.loads(TABLE.read_text()))


def test_every_class_of_the_catalogue_has_a_row_or_explains_nothing() -> None:
    table = set(tomllib.loads(TABLE.read_text()))
    explains_nothing = {"none", "cascade"}
    classes = {known.fault_class for known in catalog.entries().values()} - explains_nothing
    assert {one for one in classes if not table & {one, *_above(one)}} == set()


def _above(fault_class: str) -> set[str]:
    parts = fault_class.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts))}


def test_a_class_without_a_row_takes_the_one_above_it_and_a_foreign_one_is_unknown() -> None:
    assert rule_for("hardware.gpu.never_heard_of", {}) == rule_for("hardware.gpu", {})
    assert rule_for("weather", {}) == rule_for("unknown", {})


def test_a_site_overrides_a_row() -> None:
    held = Policy(classes={"hardware.gpu": ClassRule("hold", "watch")})
    decision = decided(failed(n3=[GPU]), held)
    assert (decision.job.verdict, answers(decision)) == ("hold", {"n3": "watch"})
    assert decision.rule == "hardware.gpu: job hold, node watch"


# -- what the owner wishes


@pytest.mark.parametrize(
    ("comment", "answer", "said"),
    [
        ("", "leave", "its owner did not opt in (--comment recovery=requeue)"),
        ("project=7", "leave", "did not opt in"),
        ("recovery=off", "leave", "did not opt in"),
        ("recovery=requeu", "leave", "its comment is not understood: recovery='requeu' is not"),
        ("recovery=requeue,max_restart=9", "leave", "did you mean 'max_restarts'?"),
        ("recovery=hold", "hold", "its owner asked to be asked"),
        ("recovery=requeue", "requeue", "run it again without n3"),
        ('{"recovery": {"mode": "requeue"}}', "requeue", "run it again without n3"),
        ('{"APS": {"auto_resume_mode": "requeue"}}', "requeue", "run it again without n3"),
    ],
)
def test_only_what_the_owner_asked_for_in_plain_words_is_done_and_the_node_is_judged_alike(
    comment: str, answer: str, said: str
) -> None:
    decision = decided(failed(job(comment=comment), n3=[GPU]))
    assert decision.job.verdict == answer
    assert said in decision.job.reason
    assert answers(decision) == {"n3": "drain"}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ({"requeue": False}, "was submitted with --no-requeue: its owner must submit it again"),
        ({"batch": False}, "is no batch job: its owner must submit it again"),
    ],
)
@pytest.mark.parametrize("seen", [GPU, CRASH], ids=["gpu", "crash"])
def test_a_job_that_slurm_cannot_requeue_is_left_and_the_decision_says_why(
    kind: dict[str, Any], said: str, seen: Finding
) -> None:
    decision = decided(failed(job(**kind), n3=[seen]))
    assert decision.job.verdict == "leave"
    assert said in decision.job.reason


def test_a_job_that_asks_for_the_bad_node_by_name_is_held_before_slurm_refuses() -> None:
    decision = decided(failed(job(required=("n2", "n3")), n3=[GPU]))
    assert decision.job.verdict == "hold"
    assert "it asks for n3 by name (--nodelist)" in decision.job.reason
    assert verdict(failed(job(required=("n2",)), n3=[GPU])) == "requeue"


# -- limits


def test_a_jobs_budget_is_the_sites_and_its_owners_smaller_one() -> None:
    site = Policy(max_restarts=2)
    assert verdict(failed(job(restarts=1), n3=[GPU]), site) == "requeue"
    spent = decided(failed(job(restarts=2), n3=[GPU]), site)
    assert (spent.job.verdict, spent.limits[0]) == ("hold", "restarts: all 2 used")
    assert spent.job.reason.endswith("restarts: all 2 used")
    modest = job(restarts=1, comment="recovery=requeue,max_restarts=1")
    assert verdict(failed(modest, n3=[GPU]), site) == "hold"
    greedy = job(restarts=2, comment="recovery=requeue,max_restarts=9")
    assert verdict(failed(greedy, n3=[GPU]), site) == "hold"


def test_a_job_without_a_budget_is_not_restarted_at_all() -> None:
    none = job(comment="recovery=requeue,max_restarts=0")
    assert verdict(failed(none, n3=[GPU])) == "hold"


@pytest.mark.parametrize(
    ("used", "said"),
    [
        ({"requeues_of_user_hour": 10}, "restarts of this user in an hour: all 10 used"),
        ({"requeues_hour": 30}, "restarts of all in an hour: all 30 used"),
    ],
)
def test_a_users_and_the_fleets_hour_have_their_budgets(used: dict[str, Any], said: str) -> None:
    decision = decided(failed(n3=[GPU]), **used)
    assert (decision.job.verdict, said in decision.limits) == ("hold", True)
    one_less = {name: number - 1 for name, number in used.items()}
    assert verdict(failed(n3=[GPU]), **one_less) == "requeue"


def test_the_unknown_is_tried_once_more_and_then_held() -> None:
    first, second = attempts(failed(), failed(job(restarts=1)))
    assert (first.job.verdict, second.job.verdict) == ("requeue", "hold")
    assert "restarts after unknown: all 1 used" in second.job.reason


def test_a_class_budget_counts_attempts_in_a_row() -> None:
    *_, last = attempts(failed(), failed(job(restarts=1), n3=[GPU]), failed(job(restarts=2)))
    assert last.job.verdict == "requeue", "something else ended the attempt between"


# -- progress


def steps(*reached: int | None, seen: tuple[Finding, ...] = ()) -> tuple[Decision, ...]:
    """The decisions on attempts that got to these steps, None where nobody could see."""
    return attempts(
        *(
            failed(job(restarts=number), n3=[*seen, *([] if at is None else [progress(at)])])
            for number, at in enumerate(reached)
        )
    )


PEER = (log("collective.peer_lost", "connection closed by peer"),)
OTHER = log("collective.timeout", "Watchdog caught collective operation timeout")


def test_the_same_failure_twice_without_progress_is_not_tried_a_third_time() -> None:
    *_, last = steps(500, 500, seen=PEER)
    assert last.job.verdict == "hold"
    assert "the same failure twice with no progress between (step 500)" in last.job.reason


def test_with_progress_between_the_same_failure_is_tried_again() -> None:
    assert [one.job.verdict for one in steps(500, 501, seen=PEER)] == ["requeue", "requeue"]


@pytest.mark.parametrize("reached", [(None, None), (500, None), (None, 500)])
def test_progress_that_nobody_saw_is_not_no_progress(reached: tuple[int | None, ...]) -> None:
    assert steps(*reached, seen=PEER)[-1].job.verdict == "requeue"


def test_another_failure_at_the_same_step_is_tried_again() -> None:
    second = failed(job(restarts=1), n3=[OTHER, progress(500)])
    *_, last = attempts(failed(n3=[*PEER, progress(500)]), second)
    assert last.job.verdict == "requeue"


def test_what_differs_between_two_runs_does_not_make_another_failure_of_it() -> None:
    texts = ("rank 3: peer 10.0.0.7 closed /tmp/a1", "rank 5: peer 10.0.0.9 closed /tmp/b2")
    first, second = (
        failed(job(restarts=n), n3=[log("collective.peer_lost", text), progress(500)])
        for n, text in enumerate(texts)
    )
    assert attempts(first, second)[-1].job.verdict == "hold"


def test_broken_hardware_on_another_node_is_bad_luck_and_on_the_same_node_is_not() -> None:
    first = failed(n3=[GPU, progress(500)])
    elsewhere = failed(job(restarts=1), n4=[GPU, progress(500)])
    again = failed(job(restarts=1), n3=[GPU, progress(500)])
    assert attempts(first, elsewhere)[-1].job.verdict == "requeue"
    assert attempts(first, again)[-1].job.verdict == "hold"


def test_three_attempts_without_progress_are_enough_whatever_ended_them() -> None:
    *_, second, third = attempts(
        failed(n3=[GPU, progress(500)]),
        failed(job(restarts=1), n2=[OTHER, progress(500)]),
        failed(job(restarts=2), n4=[GPU, progress(500)]),
    )
    assert second.job.verdict == "requeue"
    assert third.job.verdict == "hold"
    assert "3 attempts ended without progress beyond step 500" in third.job.reason


def test_checkpoints_that_are_all_broken_hold_the_job_and_none_yet_does_not() -> None:
    broken = finding("checkpoint.all_broken", job_id=12, file="/data/ckpt")
    decision = decided(failed(n3=[GPU], n1=[broken]))
    assert decision.job.verdict == "hold"
    assert "none of its checkpoints is whole" in decision.job.reason
    none = finding("checkpoint.none", job_id=12, file="/data/ckpt")
    assert verdict(failed(n3=[GPU], n1=[none])) == "requeue"


def test_a_restart_says_from_which_checkpoint_and_the_decision_keeps_both_steps() -> None:
    decision = decided(failed(n3=[GPU], n1=[checkpoint(400), progress(437)]))
    assert decision.job.reason.endswith("run it again without n3, from its checkpoint at step 400")
    assert (decision.checkpoint_step, decision.progress_step) == (400, 437)


# -- nodes


NAMES_N3 = [{"node": "n3", "gpu": 3, "rank": 9, "why": "Xid 79 in its log"}]


def test_hardware_that_only_the_programs_log_speaks_of_is_watched_and_avoided_not_drained() -> None:
    decision = decided(failed(n1=[log("hardware.gpu", "Xid 79", implicated=NAMES_N3)]))
    assert (decision.job.verdict, decision.job.excluded) == ("requeue", ("n3",))
    assert answers(decision) == {"n3": "watch"}
    assert "only the program's own log says so" in decision.nodes[0].reason
    assert decision.cause.confidence == "probable"


def test_what_the_log_says_and_the_node_confirms_is_drained() -> None:
    seen = log("hardware.gpu", "Xid 79", implicated=NAMES_N3)
    assert answers(decided(failed(n1=[seen], n3=[GPU]))) == {"n3": "drain"}


def test_a_log_cannot_name_a_node_that_the_job_did_not_run_on() -> None:
    forged: list[dict[str, Any]] = [
        {"node": "n9", "why": "he is bad"},
        {"node": ["n3"]},
        {"node": None},
        {},
    ]
    decision = decided(failed(n1=[log("hardware.gpu", "Xid 79", implicated=forged)]))
    assert decision.cause.implicated == ()
    assert (answers(decision), decision.job.excluded) == ({}, ())


def test_a_record_of_a_node_outside_the_attempt_implicates_nobody() -> None:
    outside = [epilog("n9", [GPU]), health_check("n8", [GPU])]
    decision = decided(failed(extra=outside))
    assert (decision.cause.fault_class, decision.nodes) == ("unknown", ())


def test_a_health_check_speaks_for_the_attempt_where_it_read_the_line_before_the_epilog() -> None:
    decision = decided(failed(extra=[health_check("n3", [GPU])]))
    assert answers(decision) == {"n3": "drain"}


@pytest.mark.parametrize("after_end", [-3600, 3600])
def test_what_a_health_check_saw_an_hour_away_is_another_story(after_end: float) -> None:
    decision = decided(failed(extra=[health_check("n3", [GPU], after_end)]))
    assert decision.cause.fault_class == "unknown"


def test_what_a_node_showed_before_the_attempt_began_is_another_story() -> None:
    before, during = health_check("n3", [GPU], -550), health_check("n3", [GPU], -450)
    assert decided(failed(extra=[before])).cause.fault_class == "unknown"
    assert decided(failed(extra=[during])).cause.fault_class == "hardware.gpu"


def test_another_jobs_gpu_on_a_shared_node_is_not_this_jobs_affair() -> None:
    foreign = finding("gpu.application_fault", gpu=7, job_id=99)
    assert decided(failed(n3=[foreign])).cause.fault_class == "unknown"


def test_a_silent_node_is_never_blamed() -> None:
    for silent in (["n4"], ["n2", "n4"]):
        decision = decided(failed(silent=silent))
        assert (decision.cause.implicated, decision.nodes) == ((), ())
        told = f"no report from {', '.join(silent)}: silence blames nobody"
        assert told in decision.considered


def test_a_node_that_slurm_lost_is_avoided_and_drained_the_second_time_in_a_day() -> None:
    lost = failed(job(state="NODE_FAIL"), silent=["n3"], lost=["n3"])
    first = decided(lost)
    assert (first.cause.fault_class, first.cause.confidence) == ("node.lost", "established")
    assert (first.job.verdict, first.job.excluded) == ("requeue", ("n3",))
    assert answers(first) == {"n3": "watch"}
    assert "1 of 2 times in a day" in first.nodes[0].reason
    assert answers(decided(lost, named_today={"n3": 1})) == {"n3": "drain"}


def test_a_node_that_only_did_not_report_when_slurm_lost_one_is_avoided_but_never_drained() -> None:
    back = failed(job(state="NODE_FAIL"), silent=["n3"])
    decision = decided(back, named_today={"n3": 5})
    assert (decision.cause.confidence, decision.job.excluded) == ("probable", ("n3",))
    assert answers(decision) == {"n3": "watch"}
    two = decided(failed(job(state="NODE_FAIL"), silent=["n2", "n3"]))
    assert (two.job.excluded, answers(two)) == ((), {})


@pytest.mark.parametrize("code", ["gpu.driver_mismatch", "fabric.nic_failed"])
def test_software_and_fabric_of_a_node_are_drained_the_second_time_in_a_day(code: str) -> None:
    seen = failed(n3=[finding(code)])
    assert answers(decided(seen)) == {"n3": "watch"}
    assert answers(decided(seen, named_today={"n3": 1})) == {"n3": "drain"}
    assert answers(decided(seen, named_today={"n2": 7})) == {"n3": "watch"}


def test_two_sick_nodes_of_one_job_are_both_left_out_and_drained() -> None:
    decision = decided(failed(n2=[GPU], n4=[GPU]))
    assert decision.job.excluded == ("n2", "n4")
    assert answers(decision) == {"n2": "drain", "n4": "drain"}
    assert "and 1 more nodes" in decision.cause.summary


def test_a_sick_idle_node_is_judged_without_a_job() -> None:
    decision = decided(sick("n3", GPU))
    assert (decision.attempt, decision.job.verdict) == (None, "leave")
    assert (answers(decision), decision.partition) == ({"n3": "drain"}, "train")
    assert decision.limits == ()


# -- what the record shows


def test_a_decision_tells_its_rule_its_limits_and_what_else_was_considered() -> None:
    decision = decided(failed(n3=[GPU], n1=[CRASH], silent=["n4"]))
    assert decision.rule == "hardware.gpu: job requeue, node drain"
    assert decision.limits == (
        "restarts: this would be 1 of 3",
        "restarts of this user in an hour: this would be 1 of 10",
        "restarts of all in an hour: this would be 1 of 30",
    )
    assert decision.considered == (
        "the job's log speaks of program.exception: weaker evidence than the cause",
        "no report from n4: silence blames nobody",
    )
    unknown = decided(failed(n1=[log("cascade", "Connection closed by peer")]))
    assert "the job's log holds only victims' lines" in unknown.considered
    assert unknown.would_change[0] == (
        "a fault on one of its nodes, or a plain line in its log, would have named a cause"
    )


def test_what_every_health_check_repeats_does_not_crowd_out_what_was_said_once() -> None:
    checks = [
        health_check(f"n{node}", [finding("activity.gpus_working")], after_end=-second)
        for node in (1, 2, 3, 4)
        for second in range(60, 0, -2)
    ]
    broken = finding("checkpoint.passed_over", step=40, job_id=12)
    unread = finding("log.unreadable", job_id=12)
    decision = decided(failed(n1=[checkpoint(20), broken, unread], extra=checks))
    codes = [excerpt.code for excerpt in decision.evidence]
    assert {"checkpoint.passed_over", "checkpoint.seen", "log.unreadable"} <= set(codes)
    assert codes.count("activity.gpus_working") == 4, "the last word of each node"


def test_a_decision_keeps_bounded_excerpts_and_the_cause_is_first() -> None:
    many = [finding("gpu.ecc_contained", "x" * 5000, gpu=number) for number in range(40)]
    decision = decided(failed(n2=many, n3=[finding("gpu.fell_off_bus", "NVRM: Xid 79")]))
    assert len(decision.evidence) == 16
    assert (decision.evidence[0].node, decision.evidence[0].code) == ("n3", "gpu.fell_off_bus")
    assert "NVRM: Xid 79" in decision.evidence[0].text
    assert max(len(excerpt.text) for excerpt in decision.evidence) <= 600


@pytest.mark.parametrize("mode", ["monitor", "act"])
def test_the_same_arguments_give_the_same_bytes(mode: str) -> None:
    def text() -> str:
        incident = failed(n3=[GPU, checkpoint(400)], n1=[CRASH], silent=["n4"])
        made = decided(incident, mode=mode, named_today={"n3": 1, "n2": 2})
        return json.dumps(made.to_dict())

    assert text() == text()
    assert json.dumps(Decision.from_dict(json.loads(text())).to_dict()) == text()


def test_the_mode_changes_nothing_but_its_own_name() -> None:
    one, other = (decided(failed(n3=[GPU]), mode=mode).to_dict() for mode in ("monitor", "act"))
    assert (one.pop("mode"), other.pop("mode")) == ("monitor", "act")
    assert one == other


def test_a_decision_on_another_attempt_or_node_has_another_id() -> None:
    ids = {decided(one).id for one in (failed(), failed(job(restarts=1)), sick("n3", GPU))}
    assert len(ids) == 3


def test_no_node_of_a_large_job_is_blamed_for_being_in_it() -> None:
    names = tuple(f"n{number}" for number in range(1, 513))
    decision = decided(failed(job(nodes=names), n3=[GPU]))
    accused = Implicated(
        "n3", GPU.summary, "nvml", "gpu.lost", gpu=3, resolution="reset_node", boot_id="boot"
    )
    assert decision.cause.implicated == (accused,)
    assert answers(decision) == {"n3": "drain"}


# -- a job that runs, and hangs or is slow


def test_a_hung_job_is_run_again_where_it_was_and_the_named_node_is_watched() -> None:
    decision = decided(running(hang=HANG, n1=[checkpoint(80)]))
    assert decision.running
    assert (decision.job.verdict, decision.job.excluded) == ("requeue", ())
    assert answers(decision) == {"n3": "watch"}
    assert (decision.cause.fault_class, decision.cause.confidence) == ("hang", "established")
    assert "no progress beyond step 80 for 17 min" in decision.cause.summary
    assert "evidence not taken: n4: no answer within 180 s" in decision.considered
    assert not any("no report from" in text for text in decision.considered)
    assert decision.ended_time == "", "Slurm shows the time limit as the end of a job that runs"


def test_hardware_explains_a_hang() -> None:
    decision = decided(running(hang=HANG, n3=[GPU]))
    assert decision.cause.fault_class == "hardware.gpu"
    assert (decision.job.excluded, answers(decision)) == (("n3",), {"n3": "drain"})


@pytest.mark.parametrize(
    "changes", [{"restarts": 3}, {"comment": "recovery=hold"}, {"required": ("n3",)}]
)
def test_a_hung_job_that_may_not_be_run_again_is_left_running(changes: dict[str, Any]) -> None:
    hung = job(state="RUNNING", **changes)
    decision = decided(running(hung, hang=HANG, n3=[GPU]))
    assert decision.job.verdict == "leave"
    assert decision.job.reason.endswith("it runs, and is left to its owner")


def test_a_time_limit_after_stalled_progress_is_a_hang() -> None:
    assert verdict(failed(job(state="TIMEOUT"))) == "leave"
    decision = decided(replace(failed(job(state="TIMEOUT")), hang=HANG))
    assert (decision.cause.fault_class, decision.job.verdict) == ("hang", "requeue")
    assert not decision.running


def test_a_slow_job_is_told_of_with_the_node_that_differs_and_nothing_is_done() -> None:
    hot = finding("gpu.thermal_slowdown", gpu=3)
    narrow = [finding("gpu.pcie_width", gpu=n) for n in range(2)]
    decision = decided(running(slowdown=SLOW, n1=narrow, n2=narrow, n3=[*narrow, hot], n4=narrow))
    assert decision.job.verdict == "leave"
    assert answers(decision) == {"n3": "watch"}
    assert "slower by 50%" in decision.cause.summary
    assert "n3 differs from its peers" in decision.cause.summary
    assert [one.code for one in decision.cause.implicated] == ["gpu.thermal_slowdown"]


def test_a_slow_job_is_never_ended_whatever_else_its_nodes_show() -> None:
    decision = decided(running(slowdown=SLOW, n3=[GPU]))
    assert (decision.cause.fault_class, decision.job.verdict) == ("slowdown", "leave")


def test_what_was_only_recommended_of_a_running_attempt_does_not_settle_its_end() -> None:
    recommended = decided(running(slowdown=SLOW))
    assert not recommended.settles
    recorded = decided(running(hang=HANG)).with_action(Action("requeue", "12", "recorded", ""))
    assert not recorded.settles
    assert recorded.with_action(Action("requeue", "12", "planned", "")).settles
