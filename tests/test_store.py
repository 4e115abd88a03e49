"""The index answers at once, and can be lost at any time without losing anything."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from recovery.controls import Breaker
from recovery.decision import Action, Attempt, Cause, Decision, JobAnswer, Outcome
from recovery.journal import Journal
from recovery.store import Store, StoreDamaged, StoreError
from recovery.store_opening import open_store, rebuild
from slurm_hooks.record import utc
from tests.records import decision, record

YEAR = 365 * 86_400.0


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "index.sqlite")
    yield made
    made.close()


def decided(item: Decision) -> dict[str, Any]:
    return {"type": "decision", "time": item.time, "decision": item.to_dict()}


def acted(name: str, kind: Any, target: str, state: Any, when: str = "") -> dict[str, Any]:
    action = Action(kind, target, state, when or utc())
    return {"type": "action", "time": utc(), "decision": name, "action": asdict(action)}


def ended(name: str, state: Any) -> dict[str, Any]:
    outcome = asdict(Outcome(state, utc(), step=140))
    return {"type": "outcome", "time": utc(), "decision": name, "outcome": outcome}


def numbered(*events: dict[str, Any], first: int = 1) -> list[dict[str, Any]]:
    return [{"seq": seq, **event} for seq, event in enumerate(events, first)]


def test_a_decision_grows_with_what_becomes_of_it(store: Store) -> None:
    decided_on = decision()
    store.apply_all(numbered(decided(decided_on), acted("d1", "requeue", "12", "planned")))
    assert [item.id for item in store.open_decisions()] == ["d1"]
    store.apply_all(numbered(acted("d1", "requeue", "12", "verified"), first=3))
    found = store.decision("d1")
    assert found and found.awaits_outcome
    assert [(action.name, action.state) for action in found.actions] == [("requeue 12", "verified")]
    late = {"type": "addendum", "time": utc(), "decision": "d1", "text": "n4 was slow as well"}
    store.apply_all(numbered(late, ended("d1", "finished"), first=4))
    found = store.decision("d1")
    assert found and found.outcome and found.outcome.step == 140
    assert found.addenda == ("n4 was slow as well",)
    assert replace(found, actions=(), outcomes=(), addenda=()) == decided_on
    assert store.open_decisions() == []


def test_an_event_taken_in_twice_changes_nothing(store: Store) -> None:
    late = {"type": "addendum", "time": utc(), "decision": "d1", "text": "late"}
    for event in [*numbered(decided(decision()), late)] * 2:
        store.apply(event)
    found = store.decision("d1")
    assert found and found.addenda == ("late",)
    assert store.last_seq() == 2


def test_a_revised_decision_replaces_the_former_one(store: Store) -> None:
    revised = decision("d1", nodes=(), job=JobAnswer("hold", "no progress"))
    store.apply_all(numbered(decided(decision()), decided(revised)))
    assert store.decision("d1") == revised
    assert len(store.decisions(node="n3")) == 1  # implicated still


def test_events_of_a_newer_version_are_passed_over(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = {"type": "attempt", "time": utc(), "key": "c1/12/1/0"}
    broken = {"type": "decision", "time": utc(), "decision": {"id": "d9"}}
    orphan = ended("d8", "lost")
    odd = decided(decision("d7", owner={}, uid=1 << 70))
    store.apply_all(numbered(attempt, broken, orphan, odd, decided(decision())))
    assert store.last_seq() == 5
    assert store.decision("d1") and not store.decision("d9")
    assert "journal event 2 does not read" in caplog.text
    assert "journal event 3 does not read" in caplog.text
    assert "journal event 4 does not read" in caplog.text
    assert "journal event 1" not in caplog.text


def test_a_job_number_used_again_does_not_mix_two_jobs(store: Store) -> None:
    first, second = decision("d1"), decision("d2", uid=1002, owner="bob")
    other_cluster = decision("d3", attempt=Attempt("c2", 12, 0))
    again = decision("d4", restart=1)
    store.apply_all(numbered(*map(decided, (first, second, other_cluster, again))))
    assert [item.id for item in store.job_decisions("c1", 12, 1001)] == ["d1", "d4"]
    assert [item.id for item in store.job_decisions("c1", 12, None)] == ["d1", "d2", "d4"]
    assert store.attempt_decision("c1/12/1796189498/1") == again
    assert store.attempt_decision("c1/12/1796189499/1") is None


def test_decisions_are_found_by_what_an_admin_asks(store: Store) -> None:
    times = [utc(1_796_000_000 + 60 * minute) for minute in range(6)]
    sick_node = decision("d4", job_id=None, owner="", uid=None, partition="", time=times[4])
    store.apply_all(
        numbered(
            *(decided(decision(f"d{i}", job_id=12 + i, time=times[i])) for i in range(3)),
            decided(
                decision(
                    "d3",
                    owner="bob",
                    partition="debug",
                    time=times[3],
                    cause=Cause("program.exception", "established", "ValueError"),
                    job=JobAnswer("hold", "mend it"),
                    nodes=(),
                )
            ),
            decided(sick_node),
        )
    )

    def ids(**filters: Any) -> list[str]:
        return [item.id for item in store.decisions(**filters)]

    assert ids() == ["d4", "d3", "d2", "d1", "d0"]
    assert ids(limit=2) == ["d4", "d3"]
    assert ids(node="n3") == ["d4", "d2", "d1", "d0"]
    assert ids(node="n3", user="ann", limit=1) == ["d2"]
    assert ids(job=13) == ["d1"]
    assert ids(user="bob") == ids(partition="debug") == ids(fault_class="program.exception")
    assert ids(user="bob") == ["d3"]
    assert ids(since=times[1], until=times[3]) == ["d2", "d1"]
    assert ids(node="n3", since=times[1], until=times[3]) == ["d2", "d1"]
    assert ids(node="n9") == []


def test_requeues_that_ran_or_may_have_run_are_counted(store: Store) -> None:
    store.apply_all(
        numbered(
            *(decided(decision(f"d{i}", job_id=i)) for i in range(5)),
            acted("d0", "requeue", "0", "verified", utc(1_796_000_000)),
            acted("d1", "requeue", "1", "planned", utc(1_796_003_000)),
            acted("d2", "requeue", "2", "recorded", utc(1_796_003_000)),
            acted("d3", "drain", "n3", "verified", utc(1_796_003_000)),
            acted("d4", "requeue", "4", "done", utc(1_796_003_001)),
        )
    )
    found = store.commands_since("requeue", utc(1_796_002_000))
    assert [(item.job_id, item.uid, item.state) for item in found] == [
        (1, 1001, "planned"),
        (4, 1001, "done"),
    ]
    store.apply({"seq": 11, **acted("d1", "requeue", "1", "abandoned")})
    assert [item.decision for item in store.commands_since("requeue", utc(1_796_002_000))] == ["d4"]


def test_a_breaker_stands_as_it_was_set_last(store: Store) -> None:
    trip = {"type": "breaker", "kind": "drain", "tripped": True, "why": "9 nodes", "time": "t1"}
    reset = {**trip, "tripped": False, "why": "fixed", "time": "t2"}
    store.apply_all(numbered(trip))
    assert store.breakers() == {"drain": Breaker("drain", True, "9 nodes", "t1")}
    store.apply_all(numbered(reset, first=2))
    assert not store.breakers()["drain"].tripped


def test_an_index_that_is_behind_catches_up(tmp_path: Path, journal: Journal) -> None:
    path = tmp_path / "index.sqlite"
    journal.append(decided(decision("d1")))
    open_store(path, journal).close()
    journal.append(decided(decision("d2")))
    journal.append(acted("d1", "drain", "n3", "planned"))
    found = open_store(path, journal)
    assert found.last_seq() == 3
    assert [item.id for item in found.open_decisions()] == ["d1"]
    assert found.decision("d2")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:2000])


def garbage(path: Path) -> None:
    path.write_bytes(b"not a database " * 1000)


def other_layout(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def foreign(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE photos (x)")
    connection.close()


def missing(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [truncated, garbage, other_layout, foreign, missing])
def test_a_lost_index_is_built_anew_from_the_journal(
    tmp_path: Path, journal: Journal, caplog: pytest.LogCaptureFixture, damage: Any
) -> None:
    path = tmp_path / "index.sqlite"
    journal.append(decided(decision("d1")))
    journal.append(acted("d1", "requeue", "12", "planned"))
    before = open_store(path, journal)
    expected = before.decision("d1")
    before.close()
    damage(path)
    found = open_store(path, journal)
    assert found.decision("d1") == expected
    assert [item.id for item in found.open_decisions()] == ["d1"]
    if damage is not missing:
        assert "built anew" in caplog.text
        assert (tmp_path / "index.sqlite.aside").exists()


def test_an_index_that_knows_more_than_the_journal_is_not_believed(
    tmp_path: Path, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "index.sqlite"
    store = Store(path)
    store.apply_all(numbered(decided(decision("d1")), decided(decision("d2"))))
    store.close()
    journal.append(decided(decision("d3")))
    found = open_store(path, journal)
    assert not found.decision("d1") and found.decision("d3")
    assert "does not have" in caplog.text


def test_damage_that_shows_later_is_told_from_a_busy_index(
    tmp_path: Path, journal: Journal
) -> None:
    path = tmp_path / "index.sqlite"
    store = Store(path)
    store.add_records([record() for _ in range(500)])
    store.close()
    content = bytearray(path.read_bytes())
    half = len(content) // 2
    content[half:] = b"\xff" * (len(content) - half)
    path.write_bytes(bytes(content))
    damaged = Store(path)
    with pytest.raises(StoreDamaged):
        damaged.records(None, "", "9")
    damaged.close()
    assert rebuild(path, journal, "damaged").records(None, "", "9") == []


def test_a_full_disk_is_no_reason_to_throw_the_index_away(tmp_path: Path, journal: Journal) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "index.sqlite").mkdir()  # cannot be opened, whatever the reason
    with pytest.raises(StoreError) as raised:
        open_store(folder / "index.sqlite", journal)
    assert not isinstance(raised.value, StoreDamaged)
    assert (folder / "index.sqlite").is_dir()


def test_several_commands_may_make_the_index_at_once(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from recovery.store import Store; Store(pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "index.sqlite")]
    children = [subprocess.Popen(command) for _ in range(4)]
    assert [child.wait(60) for child in children] == [0] * 4


def test_records_are_found_by_node_job_and_hook(store: Store) -> None:
    now = time.time()
    at = [utc(now + second) for second in range(5)]
    mine = record("n1", 12, 0, time=at[0])
    other_job = record("n1", 13, time=at[1])
    restarted = record("n2", 12, 1, time=at[2])
    check = record("n2", None, hook="health_check", time=at[3])
    everything = [mine, other_job, restarted, check]
    assert store.add_records(everything) == 4
    assert store.records(None, at[0], at[4]) == everything
    assert store.records(None, at[1], at[3]) == [other_job, restarted]
    assert store.records(["n1", "n7"], at[0], at[4]) == [mine, other_job]
    assert store.records([], at[0], at[4]) == []
    assert store.records([f"n{i}" for i in range(2000)], at[0], at[4]) == everything
    assert store.job_records(12) == [mine, restarted]
    assert store.job_records(12, 1) == [restarted]
    assert store.job_records(12, since=at[1]) == [restarted]
    assert store.hook_records("health_check", at[0], at[4]) == [check]
    assert store.known(mine.id) and not store.known(record().id)


def test_a_record_that_comes_twice_counts_once(store: Store) -> None:
    item = record()
    assert store.add_records([item, item, record()]) == 2
    assert store.add_records([item]) == 0
    assert len(store.records(None, "", "9")) == 2


@pytest.mark.parametrize(("off", "believed"), [(0, True), (-20 * 86_400, True), (-YEAR, False)])
def test_a_record_is_dated_by_its_arrival_where_its_clock_was_wrong(
    store: Store, off: float, believed: bool
) -> None:
    now = time.time()
    item = record(time=utc(now + off))
    store.add_records([item], received=utc(now))
    (found,) = store.job_records(12)
    assert found == (item if believed else replace(item, time=utc(now)))


def test_old_records_leave_the_index_a_few_at_a_time(store: Store) -> None:
    store.add_records([record(time=utc(time.time() - 86_400)) for _ in range(5)])
    store.add_records([record()])
    limit = utc(time.time() - 3600)
    assert [store.forget_records(limit, limit=3) for _ in range(3)] == [3, 2, 0]
    assert len(store.records(None, "", "9")) == 1


def test_the_last_heartbeat_of_each_node_is_kept(store: Store) -> None:
    store.put_heartbeats({"n1": beat("n1", 1)})
    store.put_heartbeats({"n1": beat("n1", 2, verdict="fault"), "n2": beat("n2", 2)})
    beats = store.heartbeats()
    assert list(beats) == ["n1", "n2"]
    assert beats["n1"]["verdict"] == "fault" and beats["n1"]["received"]
    assert list(store.heartbeats(["n2", "n9"])) == ["n2"]


def beat(node: str, minute: int, verdict: str = "ok", **changes: Any) -> dict[str, Any]:
    """A heartbeat of that minute."""
    made = {"node": node, "boot_id": "b1", "time": f"2026-12-02T05:{minute:02}:00.000000Z"}
    return {**made, "verdict": verdict, **changes}


HANGS = [{"name": "nvml", "status": "hang", "seconds": 8.0}]


def test_clean_checks_in_a_row_are_counted_within_one_boot_and_on_the_same_gpus(
    store: Store,
) -> None:
    told: list[tuple[dict[str, Any], int]] = [
        (beat("n1", 1), 1),
        (beat("n1", 1), 1),  # read again
        (beat("n1", 2), 2),
        (beat("n1", 3, verdict="warning"), 0),
        (beat("n1", 4), 1),
        (beat("n1", 5, probes=HANGS), 0),
        (beat("n1", 6), 1),
        (beat("n1", 7), 2),
        (beat("n1", 8, boot_id="b2"), 1),
        (beat("n1", 9, boot_id="b2"), 2),
        (beat("n1", 10, boot_id="b2", gpus={"0": "GPU-1"}), 1),
    ]
    for document, passed in told:
        store.put_heartbeats({"n1": document})
        known = store.heartbeats()["n1"]
        assert known["passed"] == passed, document
    assert known["passed_since"] == told[-1][0]["time"]


def test_small_values_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "index.sqlite")
    assert store.meta("x") is None
    store.put_meta("x", "1")
    store.put_meta("x", "2")
    store.close()
    again = Store(tmp_path / "index.sqlite")
    assert again.meta("x") == "2"
    again.forget_meta("x")
    assert again.meta("x") is None


def test_no_lookup_reads_more_than_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries: list[str] = []

    class Watched(sqlite3.Connection):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.set_trace_callback(queries.append)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **o: connect(*a, factory=Watched, **o))
    store = Store(tmp_path / "index.sqlite")
    store.apply_all(numbered(decided(decision()), acted("d1", "requeue", "12", "planned")))
    item = record()
    store.add_records([item])
    store.records(None, "2026", "2027")
    store.records(["n1", "n2"], "2026", "2027")
    store.job_records(12)
    store.job_records(12, 0, "2026")
    store.hook_records("epilog", "2026", "2027")
    store.unknown([item])
    store.forget_records("2026")
    store.open_decisions()
    store.attempt_decision("c1/12/1/0")
    store.job_decisions("c1", 12, 1001)
    store.commands_since("requeue", "2026")
    store.meta("x")
    asked: tuple[dict[str, Any], ...] = (
        {}, {"node": "n1"}, {"job": "12"}, {"job": "6_2", "node": "n1"}, {"user": "ann"},
        {"partition": "p"}, {"fault_class": "x"}, {"since": "2026", "until": "2027"},
        {"node": "n1", "user": "ann", "since": "2026"},
    )  # fmt: skip
    for filters in asked:
        store.decisions(**filters)
    plain = connect(tmp_path / "index.sqlite")
    looked_up = [query for query in queries if query.startswith(("SELECT", "DELETE"))]
    assert len(looked_up) > 20
    for query in looked_up:
        if "sqlite_master" in query:
            continue
        for row in plain.execute(f"EXPLAIN QUERY PLAN {query}").fetchall():
            step = row[3]
            # A scan of decisions is one along an index, newest first, that LIMIT ends.
            allowed = "SCAN d USING INDEX decisions_time" in step or step.startswith("LIST")
            assert allowed or not step.startswith("SCAN") or "decisions_open" in step, (query, step)
            # Only what has one node, job, … is sorted, never all there is.
            assert "TEMP B-TREE FOR ORDER BY" not in step, (query, step)
    plain.close()
