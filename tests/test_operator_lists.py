"""Lists show what was asked for, gravest or newest first; silence is shown as silence."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from recovery.decision import Action, Cause, Implicated, JobAnswer, NodeAnswer
from recovery.offenders import SCORES
from recovery.store_opening import open_store
from slurm_hooks import spool
from slurm_hooks.record import Finding, utc
from tests.records import beat, drop, record
from tests.test_recovery_commands import Controller

OLD, NEW = utc(time.time() - 3 * 86_400), utc(time.time() - 60)


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    """Three decisions: on a job of ann, on one of bob, and on a node outside any job."""
    made = Controller(tmp_path)
    spool.create(made.spool)
    made.decided("d1", job_id=12, time=OLD)
    made.decided(
        "d2",
        job_id=13,
        time=NEW,
        owner="bob",
        partition="debug",
        cause=Cause("program.exception", "established", "KeyError"),
        job=JobAnswer("hold", "KeyError: a restart would fail again"),
        nodes=(NodeAnswer("n7", "watch", "its rank was the first"),),
    )
    card = "its card has failed"
    made.decided(
        "d3",
        job_id=None,
        time=NEW,
        partition="train,trial",
        owner="",
        uid=None,
        incident="node/n8",
        cause=Cause("network.fabric", "established", card, (Implicated("n8", card, "fabric"),)),
        job=JobAnswer("leave", "no job has failed of it"),
        nodes=(NodeAnswer("n8", "drain", card),),
        actions=(Action("drain", "n8", "verified", NEW),),
    )
    return made


FILTERS: tuple[tuple[list[str], list[str], list[str]], ...] = (
    (["--job=12"], ["d1"], ["n3"]),
    (["--user=bob"], ["d2"], ["n7"]),
    (["--partition=train"], ["d3", "d1"], ["n3", "n8"]),
    (["--partition=trial"], ["d3"], ["n8"]),
    (["--class=hardware"], ["d1"], ["n3"]),
    (["--class=program.exception"], ["d2"], ["n7"]),
    (["--class=prog"], [], []),
    (["--since=1d"], ["d3", "d2"], ["n7", "n8"]),
    (["--until=1d", "--user=ann"], ["d1"], ["n3"]),
)


@pytest.mark.parametrize(("options", "decisions", "nodes"), FILTERS, ids=lambda one: str(one))
def test_each_filter_keeps_what_it_names(
    controller: Controller, options: list[str], decisions: list[str], nodes: list[str]
) -> None:
    found = controller.json("decisions", *options)["decisions"]
    assert [one["id"] for one in found] == decisions
    known = controller.json("incidents", *options)["incidents"]
    assert sorted(name for one in known for name in one["decisions"]) == sorted(decisions)
    assert sorted(one["node"] for one in controller.json("nodes", *options)["nodes"]) == nodes


def test_nodes_tell_silence_faults_drains_and_last_findings_and_the_gravest_come_first(
    controller: Controller,
) -> None:
    hot = Finding("gpu.too_hot", "warning", "GPU 3 at 95 C", gpu=3)
    note = Finding("checkpoint.seen", "info", "a whole checkpoint")
    drop(controller.spool, record("n3", job=None, hook="health_check", findings=(note, hot)))
    beat(controller.spool, "n3", verdict="warning")
    beat(controller.spool, "n5")
    controller.run("once")
    found = controller.json("nodes")
    assert [one["node"] for one in found["nodes"]] == ["n7", "n8", "n3", "n5"]
    nodes = {one["node"]: one for one in found["nodes"]}
    assert [name for name, one in nodes.items() if one["silent"]] == ["n7", "n8"]
    assert nodes["n8"]["drained"] == {"decision": "d3", "time": NEW}
    assert [one["summary"] for one in nodes["n3"]["findings"]] == ["GPU 3 at 95 C"]
    assert nodes["n5"]["findings"] == []
    assert [one["node"] for one in controller.json("nodes", "--silent")["nodes"]] == ["n7", "n8"]
    short = controller.json("nodes", "--limit=1")
    assert ([one["node"] for one in short["nodes"]], short["left_out"]) == (["n7"], 3)
    named = " ".join(controller.run("nodes", "n[5,8]")[0].split())
    assert "n8 SILENT never heard of, named by 1 decision" in named
    assert "drained by d3" in named
    assert "n5 ok heard" in named
    assert controller.run("nodes", "n[1-", status=2)[1].count("\n") == 1


def test_a_score_tells_how_much_oftener_than_chance_and_what_it_takes_to_act(
    controller: Controller,
) -> None:
    assert "its score is not known: no pass has made one yet" in controller.run("nodes", "n3")[0]
    # As the aggregator keeps it at a full look at Slurm, which does not answer here.
    history = "3 faults of its own since 2026-11-29, where chance makes 0.2"
    score = {"evidence": 11.5, "times_chance": 15.0, "history": history}
    document = {"avoided_above": 9.25, "drained_above": 13.8, "nodes": {"n3": score}}
    store = open_store(controller.state / "index.sqlite", controller.journal)
    store.put_meta(SCORES, json.dumps(document))
    store.close()
    said = " ".join(controller.run("nodes", "n3")[0].split())
    told = "score 11.5 (avoided above 9.2, drained above 13.8): 15 times what chance brings"
    assert f"{told}; {history}" in said
    assert "15 times chance" in controller.run("nodes")[0]
    assert "score 0: nothing against it beyond chance" in controller.run("nodes", "n7")[0]


def test_a_pause_of_many_nodes_and_many_open_decisions_leave_room_on_the_screen(
    controller: Controller,
) -> None:
    controller.run("pause", "--node", "n[20-99]", "--why", "new risers")
    for number in range(40):
        planned = Action("requeue", str(200 + number), "planned", utc())
        controller.decided(f"g{number}", job_id=200 + number, actions=(planned,), nodes=())
    said = controller.run("status")[0]
    assert said.count("PAUSED") == 1
    assert "(node n[20-99]): new risers" in " ".join(said.split())
    assert said.count("open        g") == 12
    assert "open        and 28 more: recovery incidents" in said
    assert len(controller.json("status")["open"]) == 40


def test_where_the_clock_was_set_back_nothing_has_a_negative_age(controller: Controller) -> None:
    ahead = utc(time.time() + 86_400)
    controller.decided("d9", job_id=99, time=ahead, job=JobAnswer("hold", "wrong"), nodes=())
    controller.run("once")
    store = open_store(controller.state / "index.sqlite", controller.journal)
    store.put_meta("last_pass", ahead)
    store.close()
    said = controller.run("status")[0]
    assert "job 99 of ann, for 0 s: mend it" in said
    assert "yet to come by this clock" in " ".join(said.split())
    assert "for 0 s: mend it" in controller.run("explain", "99")[0]


def test_nodes_that_need_the_same_are_one_line_of_status(controller: Controller) -> None:
    why = "the fabric manager is down"
    for number in range(20, 100):
        controller.decided(
            f"e{number}",
            job_id=None,
            incident=f"node/n{number}",
            nodes=(NodeAnswer(f"n{number}", "drain", why),),
            job=JobAnswer("leave", "no job has failed of it"),
        )
    for number in range(40):
        hold = JobAnswer("hold", f"ValueError {number}: a restart would fail again")
        controller.decided(f"f{number}", job_id=100 + number, job=hold, nodes=())
    said = controller.run("status")[0]
    assert "80 nodes, n[20-99], for" in said
    assert said.count("NEEDS YOU") == 13
    assert "more: recovery status --json" in said
    assert max(map(len, said.splitlines())) <= 80
