"""When a running job stands still, hangs or is slow: read as a specification, looks in, answer out.

One look a minute unless a row says otherwise; ``STEADY`` trains a step a minute.
"""

from __future__ import annotations

import pytest

from recovery.decision import Implicated
from recovery.stalls import Activity, Hang, Limits, Look, Stall, hang, intervals, slow, stalled

LIMITS = Limits()

STEADY = [float(n) for n in range(60)]


def looks(*steps: float, every: float = 60.0, began: float = 0.0) -> list[Look]:
    return [Look(began + every * number, int(step)) for number, step in enumerate(steps)]


def still(step: float, minutes: int) -> list[float]:
    return [step] * minutes


def stall(given: list[Look], began: float = 0.0) -> Stall:
    found = stalled(given, began, LIMITS)
    assert found is not None
    return found


PAUSES = [  # what was seen, and whether that is suspicious
    ("it goes on", STEADY, False),
    ("a pause shorter than the minimum", [*STEADY, *still(59, 14)], False),
    ("longer than the minimum, and it steps each minute", [*STEADY, *still(59, 16)], True),
    (
        "as long as an evaluation that it came back from",
        [*STEADY, *still(59, 20), *range(60, 90), *still(89, 20)],
        False,
    ),
    (
        "longer than such an evaluation by far",
        [*STEADY, *still(59, 20), *range(60, 90), *still(89, 33)],
        True,
    ),
    ("it starts up", still(0, 100), False),
    ("it has been starting for longer than anything may take", still(0, 122), True),
    ("its cadence is not known yet", [0, 1, *still(2, 100)], False),
    ("a step takes ten minutes", [n // 10 for n in range(200)] + still(19, 40), False),
    (
        "a step takes ten minutes, and now an hour",
        [n // 10 for n in range(200)] + still(19, 62),
        True,
    ),
]


@pytest.mark.parametrize(
    ("steps", "suspected"), [row[1:] for row in PAUSES], ids=[row[0] for row in PAUSES]
)
def test_a_job_is_judged_by_its_own_cadence(steps: list[float], suspected: bool) -> None:
    assert stall(looks(*steps)).suspected is suspected


def test_nothing_is_said_of_a_job_that_nobody_has_looked_at() -> None:
    assert stalled([], 0.0, LIMITS) is None
    assert stalled(looks(*STEADY), 1e9, LIMITS) is None, "and all looks are an earlier attempt's"


def test_the_silence_of_the_monitor_is_no_time_in_which_a_job_stood_still() -> None:
    seen = looks(*STEADY)
    assert stall(seen).seconds == 0, "however long ago that was"
    resumed = [*seen, *looks(60, 61, 62, began=20_000.0)]
    assert max(intervals(resumed)) == 60, "and it teaches no cadence"


def test_a_restart_teaches_no_cadence_and_earlier_attempts_do() -> None:
    second = looks(40, 41, 42, *still(42, 30), began=10_000.0)
    seen = [*looks(*STEADY), *second]
    assert max(intervals(seen)) == 60
    assert stall(seen, began=10_000.0).suspected
    assert not stall(second, began=10_000.0).suspected, "alone it would have had to learn it"


SPINNING, IDLE, WORKING = ("activity.gpus_spinning", "activity.gpus_idle", "activity.gpus_working")
MOVING, QUIET = "activity.moving_data", "activity.processes_idle"

STALL = Stall(59, 0.0, 1000.0, 900.0, "its own cadence allows 15 min")

SHOWN = [  # what n1 and n2 show, and whether a hang follows
    ((SPINNING,), (SPINNING,), True),
    ((IDLE,), (SPINNING,), True),
    ((IDLE,), (IDLE,), True),
    ((SPINNING,), (WORKING,), False),
    ((IDLE,), (IDLE, MOVING), False),
    ((), (), False),
    ((QUIET,), (QUIET,), True),
    ((QUIET,), (), False),
]


@pytest.mark.parametrize(("first", "second", "hung"), SHOWN)
def test_gpus_and_processes_must_show_it_too(
    first: tuple[str, ...], second: tuple[str, ...], hung: bool
) -> None:
    shown = {
        "n1": Activity("n1", 0.0, frozenset(first)),
        "n2": Activity("n2", 0.0, frozenset(second)),
    }
    assert isinstance(hang(STALL, shown, ("n1", "n2")), Hang) is hung


def test_a_stopped_process_and_a_rank_that_the_flight_recorder_misses_are_named() -> None:
    stopped = Implicated("n2", "rank 3 is stopped", "processes", "activity.process_stopped")
    shown = {
        "n1": Activity("n1", 0.0, frozenset(), suspects=((3, "has not come"), (9, "neither"))),
        "n2": Activity("n2", 0.0, frozenset(), (stopped,), ranks=frozenset({2, 3})),
        "n9": Activity("n9", 0.0, frozenset({WORKING})),
    }
    found = hang(STALL, shown, ("n1", "n2"), ["n3: no answer"])
    assert isinstance(found, Hang)
    assert [(one.node, one.rank, one.source) for one in found.implicated] == [
        ("n2", None, "processes"),
        ("n2", 3, "log"),
    ], "rank 9 runs on no node that has spoken, and n9 is none of the job's"
    assert found.missing == ("n3: no answer",)


RATES = [  # steps a minute, hour by hour; the loss that is told
    ("steady", [60, 60, 60, 60], None),
    ("a fifth slower", [60, 60, 60, 48], None),
    ("half as fast", [60, 60, 60, 30], 0.5),
    ("slow from its start on", [30, 30, 30, 30], None),
    ("slow once and fast again", [60, 30, 60, 60], None),
    ("standing still", [60, 60, 60, 0], None),
]


@pytest.mark.parametrize(
    ("hours", "loss"), [row[1:] for row in RATES], ids=[row[0] for row in RATES]
)
def test_a_job_is_slow_against_its_own_best(hours: list[int], loss: float | None) -> None:
    steps, step = [], 0
    for rate in hours:
        for _ in range(60):
            steps.append(step)
            step += rate
    found = slow(looks(*steps), 0.0, LIMITS)
    assert (found and round(1 - found.rate / found.best, 1)) == loss
