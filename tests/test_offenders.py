"""Repeat offenders are found, and nobody is blamed for the company they keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from benchmarks.offenders import by_evidence, measure, simulate
from recovery.incident import Incident
from recovery.offenders import Mark, Suspicion, Tally, marks_of, threshold
from slurm_hooks.record import utc
from tests.incidents import decided, failed, finding, job, log, offender, sick

START = 1.8e9
DAY = 86400.0
NODES = tuple(f"n{number}" for number in range(1, 65))

GPU = finding("gpu.lost", gpu=3)


def fleet(marks: Iterable[Mark], days: float = 30.0, busy: Iterable[str] = NODES) -> Tally:
    """A fleet after so many days, its nodes in jobs all the time."""
    tally = Tally(30 * DAY)
    for day in range(int(days)):
        tally.ran(dict.fromkeys(busy, DAY), START + (day + 1) * DAY)
    for mark in marks:
        tally.add(mark)
    return tally


def failures(
    nodes: Iterable[str], count: int, uid: Callable[[int], int] = lambda number: number
) -> list[Mark]:
    """Failed attempts on these nodes, evenly over 30 days."""
    names = tuple(nodes)
    return [
        Mark(node, "failed", utc(START + number * 30 * DAY / count), len(names), uid(number))
        for number in range(count)
        for node in names
    ]


def blamed(tally: Tally, chance: float = 0.01) -> list[Suspicion]:
    return tally.suspicions(START + 30 * DAY, threshold(len(NODES), chance))


def test_a_node_is_never_blamed_for_merely_being_in_a_large_job_that_failed() -> None:
    assert blamed(fleet(failures(NODES, 200))) == []
    assert blamed(fleet(failures(NODES[:48], 100))) == []


def test_the_one_node_that_failing_small_jobs_share_is_blamed_and_its_neighbours_are_not() -> None:
    marks = [
        mark for number in range(20) for mark in failures(("n1", f"n{number + 2}"), 1, lambda _: 7)
    ]
    spread = [
        Mark(m.node, m.kind, utc(START + n // 2 * 1.4 * DAY), m.size, n // 2)
        for n, m in enumerate(marks)
    ]
    (one,) = blamed(fleet([*spread, *failures(NODES, 10)]))
    assert (one.node, one.own) == ("n1", False)
    assert one.history.startswith("in 29 failures that nobody explains, of 20 ")
    assert "where chance makes" in one.history


def test_one_user_whose_script_fails_in_a_loop_blames_no_node() -> None:
    loop = [Mark("n1", "failed", utc(START + 60 * number), 1, 1001) for number in range(500)]
    others = failures(NODES, 10)
    (told,) = [one for one in fleet([*loop, *others]).suspicions(START + DAY) if one.node == "n1"]
    assert told.evidence < threshold(len(NODES), 0.05)


def test_a_busy_node_may_fail_more_often_than_an_idle_one() -> None:
    def with_hours(share: float) -> float:
        tally = fleet(failures(["n1"], 6), busy=NODES[1:])
        tally.ran({"n1": share * 30 * DAY}, START + 30 * DAY)
        found = tally.suspicions(START + 30 * DAY, -100)
        return next(one.evidence for one in found if one.node == "n1")

    assert with_hours(1.0) < with_hours(0.1)


def test_a_nodes_own_faults_on_several_days_make_it_a_suspect_and_fade_with_time() -> None:
    marks = [Mark("n1", "named", utc(START + day * DAY), 1, None) for day in (20, 23, 26, 29)]
    tally = fleet(marks)
    (one,) = blamed(tally)
    assert (one.node, one.own) == ("n1", True)
    assert "4 faults of its own since" in one.history
    later = START + 150 * DAY
    tally.ran(dict.fromkeys(NODES, DAY), later)
    assert tally.suspicions(later, threshold(len(NODES), 0.01)) == []


def test_the_same_fault_told_by_many_checks_of_a_day_counts_once() -> None:
    hourly = [Mark("n1", "named", utc(START + hour * 3600), 1, None) for hour in range(24)]
    assert blamed(fleet(hourly)) == []


def test_what_a_decision_says_against_nodes_is_what_nobody_explains_and_what_they_say() -> None:
    def said(one: Incident) -> list[tuple[str, str, int]]:
        return [(mark.node, mark.kind, mark.size) for mark in marks_of(decided(one))]

    assert said(failed(n3=[GPU])) == [("n3", "named", 1)]
    assert said(sick("n3", GPU)) == [("n3", "named", 1)]
    everyone = [(node, "failed", 4) for node in ("n1", "n2", "n3", "n4")]
    assert said(failed()) == everyone
    assert said(failed(n1=[log("collective.timeout", "Watchdog")])) == everyone
    assert said(failed(n1=[log("program.exception", "ValueError")])) == []
    assert said(failed(job(state="CANCELLED"), n3=[GPU])) == []
    accused = [{"node": "n3", "why": "Xid 79"}]
    assert said(failed(n1=[log("hardware.gpu", "Xid 79", implicated=accused)])) == []
    assert said(offender("n3")) == [], "a history is not evidence for itself"


@pytest.mark.parametrize("seed", [1, 2])
def test_on_a_fleet_whose_bad_nodes_are_known_they_are_found_and_a_count_finds_fewer(
    seed: int,
) -> None:
    scores = measure(seed, nodes=128, days=60, bad=4)
    assert scores["evidence"].precision == 1.0
    assert scores["evidence"].recall >= 0.5
    assert scores["evidence"].recall >= scores["count"].recall
    same = scores["count, to the same recall"]
    assert scores["evidence"].precision >= same.precision


def test_on_a_fleet_without_bad_nodes_nobody_is_blamed() -> None:
    jobs, _ = simulate(3, 128, 60, 0)
    assert by_evidence(jobs, 128) == set()
