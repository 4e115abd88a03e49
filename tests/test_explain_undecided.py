"""What nodes have told and nothing was decided on is told as well, with what a decision waits for.

On a controller where no Slurm answers, unless a test says that everything is well.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recovery.journal import Journal
from recovery.store_opening import open_store
from slurm_hooks import spool
from slurm_hooks.record import Evidence, Finding, RecordJob, new_id, utc
from tests.records import drop, record
from tests.test_recovery_commands import Controller

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus."
GONE = Finding(
    "gpu.fell_off_bus", "fatal", "GPU 3 is gone", gpu=3,
    evidence=(Evidence("kernel_log", XID, None, "b:17"),),
)  # fmt: skip
LOG = Finding(
    "log.program_exception", "warning", "the program failed", job_id=12,
    evidence=(Evidence("job_log", "KeyError: 'mask'"),),
)  # fmt: skip


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    made = Controller(tmp_path)
    spool.create(made.spool)
    return made


def saw(controller: Controller, node: str, *findings: Finding, ago: float = 20, **job: Any) -> None:
    """A record of an epilog of job 12 on n[1-4], taken in."""
    known: dict[str, Any] = {"id": 12, "restart": 0, "exit": "1:0", **job}
    of = RecordJob(user="ann", uid=1001, partition="train", nodes="n[1-4]", **known)
    made = record(node, time=utc(time.time() - ago), findings=findings)
    drop(controller.spool, replace(made, id=new_id(time.time() - ago), job=of))
    controller.run("once")


def passes_well(controller: Controller) -> None:
    """As if Slurm had answered in the last pass."""
    store = open_store(controller.state / "index.sqlite", Journal(controller.state / "journal"))
    store.put_meta("problems", "")
    store.put_meta("last_pass", utc())
    store.close()


def told(controller: Controller, *name: str) -> str:
    """What explain says, in one line; no line is longer than a terminal."""
    out = controller.run("explain", *name)[0]
    assert max(map(len, out.splitlines())) <= 80, out
    return " ".join(out.split())


def test_a_job_without_a_decision_is_told_node_by_node_and_what_is_waited_for(
    controller: Controller,
) -> None:
    saw(controller, "n1", LOG)
    saw(controller, "n2")
    saw(controller, "n3", GONE, ago=15)
    passes_well(controller)
    said = told(controller, "12")
    assert said.startswith(
        "TO DO nothing: no decision yet: it waits for n4 to report, 5 s from when Slurm shows"
        " the job's end, 120 s at most"
    )
    assert "job 12 of ann, partition train: 1 attempt, no decision, records of 3 nodes" in said
    for part in (
        "Attempt 1",
        "the job's log, log.program_exception: KeyError: 'mask'",
        f"n3 saw gpu.fell_off_bus (fatal): GPU 3 is gone {XID}",
        "n2 looked and saw no fault",
        "n4 has not reported",
        "ended, its epilogs say: 1:0 on n[1-3]",
    ):
        assert part in said
    document = controller.json("explain", "12")
    assert (document["schema"], document["decisions"]) == ("story/v1", [])
    assert document["subject"] == "job 12"


def test_what_keeps_a_decision_from_being_taken_is_the_first_line(controller: Controller) -> None:
    saw(controller, "n1", GONE, ago=3600)
    said = told(controller, "12")
    assert said.startswith("NEEDS YOU job 12 of ann, for 60 min: see why Slurm does not answer")
    assert told(controller, "node", "n1").startswith("NEEDS YOU node n1, for 60 min: see why Slurm")
    store = open_store(controller.state / "index.sqlite", Journal(controller.state / "journal"))
    store.put_meta("last_pass", utc(time.time() - 7200))
    store.close()
    assert "start recovery run: its last pass was 2 h ago" in told(controller, "job", "12")
    assert "start recovery run: its last pass was 2 h ago" in told(controller, "n1")


def test_where_none_is_to_come_it_says_why(controller: Controller) -> None:
    saw(controller, "n1", GONE, ago=3600)
    passes_well(controller)
    assert "TO DO nothing: no decision, and none to come: Slurm showed no" in told(controller, "12")
    saw(controller, "n1", id=13, exit="0:0")
    passes_well(controller)
    assert "no decision, since it ended well (0:0)" in told(controller, "13")
    saw(controller, "n1", LOG, id=14, exit=None)
    passes_well(controller)
    said = told(controller, "14")
    assert "no node has told of an end: it runs, or its epilogs have yet to report" in said


def test_a_node_without_a_decision_is_told_with_the_line_that_its_kernel_wrote(
    controller: Controller,
) -> None:
    saw(controller, "n3", GONE)
    passes_well(controller)
    said = told(controller, "n3")
    assert said.startswith("TO DO nothing: no decision yet on what it told of fatal severity at")
    assert f"epilog saw gpu.fell_off_bus (fatal): GPU 3 is gone {XID}" in said
    saw(controller, "n2", LOG)
    assert "told of nothing graver than a warning" in told(controller, "n2")


def test_an_attempt_that_follows_a_decision_is_told_although_it_has_none_yet(
    controller: Controller,
) -> None:
    controller.decided("d1", job_id=12, time=utc(time.time() - 600), job_nodes=("n1",))
    saw(controller, "n1", LOG, restart=1)
    passes_well(controller)
    said = told(controller, "12")
    assert "2 attempts, 1 decision" in said
    assert "no decision yet: it waits for n[2-4] to report" in said
    assert said.index("Decided d1") < said.index("Attempt 2") < said.index("KeyError: 'mask'")


def test_a_task_of_an_array_is_found_in_the_records_by_the_name_that_squeue_shows(
    controller: Controller,
) -> None:
    saw(controller, "n1", LOG, id=8, array="6_2")
    passes_well(controller)
    for name in ("6_2", "8", "6"):
        assert "job 8 of ann" in told(controller, name)
    controller.run("explain", "6_3", status=1)
