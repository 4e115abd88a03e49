"""`recovery explain` tells one story in time order, and first what a person must do.

On a controller where no Slurm answers: the story is in the journal and in the records of the nodes.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from recovery.decision import Action, Cause, Excerpt, JobAnswer, Outcome, Review
from slurm_hooks import spool
from slurm_hooks.record import Evidence, Finding, RecordJob, new_id, utc
from tests.records import beat, drop, record
from tests.test_recovery_commands import Controller

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus."
LOG = "RuntimeError: NCCL communicator was aborted on rank 5"


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    made = Controller(tmp_path)
    spool.create(made.spool)
    return made


class Story:
    """A job that lost a GPU, ran again, and may then have failed of its program and be held."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.start = time.time() - 3600
        self.first, self.second = "01KFIRST", "01KSECOND"
        self.attempt_one()

    def at(self, minutes: float) -> str:
        """A time so long after the job's start, which is an hour ago."""
        return utc(self.start + 60 * minutes)

    def saw(self, node: str, when: float, *findings: Finding, restart: int | None = 0) -> str:
        """A record of an epilog of the job, or of a health check where ``restart`` is None."""
        job = None if restart is None else RecordJob(12, restart, user="ann", uid=1001, exit="1:0")
        made = replace(
            record(node, time=self.at(when), findings=findings),
            id=new_id(self.start + 60 * when),
            hook="epilog" if job else "health_check",
            job=job,
        )
        drop(self.controller.spool, made)
        return made.id

    def attempt_one(self) -> None:
        kernel = Evidence("kernel_log", XID, self.at(19), "b:17")
        gone = Finding("gpu.fell_off_bus", "fatal", "GPU 3 is gone", gpu=3, evidence=(kernel,))
        verdict = {"class": "collective.peer_lost", "confidence": "probable", "cascade": 37}
        log = Finding(
            "log.collective_peer_lost", "warning", "a peer was lost", job_id=12, count=38,
            evidence=(Evidence("job_log", LOG), Evidence("log_verdict", json.dumps(verdict))),
        )  # fmt: skip
        note = Finding("checkpoint.seen", "info", "a whole checkpoint", job_id=12, step=1100)
        sick = self.saw("n3", 20.1, gone)
        head = self.saw("n1", 20.1, log, note)
        self.saw("n2", 20.1)
        self.controller.decided(
            self.first,
            job_name="pretrain",
            job_nodes=("n1", "n2", "n3", "n4"),
            gpus=32,
            started_time=self.at(0),
            ended="FAILED 1:0",
            ended_time=self.at(20),
            time=self.at(20.2),
            progress_step=1180,
            checkpoint_step=1100,
            job_target="12",
            limits=("restarts: this would be 1 of 3",),
            would_change=("the same failure again without progress would have held it",),
            evidence=(
                Excerpt(head, "n1", self.at(20.1), "log.collective.peer_lost", LOG),
                Excerpt(sick, "n3", self.at(20.1), "gpu.fell_off_bus", f"GPU 3 is gone | {XID}"),
                Excerpt(head, "n1", self.at(20.1), "checkpoint.seen", "a whole checkpoint"),
            ),
            actions=(
                Action("drain", "n3", "planned", self.at(20.2)),
                Action("requeue", "12", "planned", self.at(20.2)),
            ),
        )
        for when, action in (
            (20.21, Action("drain", "n3", "planned", self.at(20.2), "drain")),
            (20.22, Action("drain", "n3", "done", self.at(20.2), "drain")),
            (20.23, Action("drain", "n3", "verified", self.at(20.2), "drain", "recovery: gone")),
            (20.24, Action("requeue", "12", "planned", self.at(20.2), "requeue")),
            (20.26, Action("requeue", "12", "planned", self.at(20.2), "start")),
            (20.27, Action("requeue", "12", "done", self.at(20.2), "start")),
            (20.28, Action("requeue", "12", "verified", self.at(20.2), "start", "running on n1")),
        ):
            event = {"type": "action", "decision": self.first, "action": asdict(action)}
            self.controller.knows({**event, "time": self.at(when)})
        began = self.at(20.3)
        self.became(
            self.first, Outcome("restarted", self.at(20.4), detail="on n1,n2,n4", started=began)
        )
        self.became(
            self.first,
            Outcome("resumed", self.at(22), 1190, "at step 1190, beyond 1180", started=began),
        )
        self.controller.knows(
            {
                "type": "addendum",
                "decision": self.first,
                "time": self.at(23),
                "text": "evidence came late and says n4 was slow as well",
            }
        )

    def attempt_two(self) -> None:
        line = Excerpt("gone", "n1", self.at(40.1), "log.program.exception", "KeyError: 'mask'")
        self.controller.decided(
            self.second,
            restart=1,
            job_name="pretrain",
            job_nodes=("n1", "n2", "n4"),
            started_time=self.at(20.3),
            ended="FAILED 1:0",
            ended_time=self.at(40),
            time=self.at(40.2),
            cause=Cause("program.exception", "established", "the job's log says: KeyError: 'mask'"),
            job=JobAnswer("hold", "KeyError: 'mask': a restart would fail again"),
            job_target="12",
            nodes=(),
            evidence=(line,),
            actions=(Action("hold", "12", "verified", self.at(40.2), "hold", "SPECIAL_EXIT"),),
        )
        again = f"the next attempt ended FAILED, decision {self.second}"
        self.became(self.first, Outcome("failed_again", self.at(40.5), 1300, again))
        review = Review(new_id(), self.at(45), "ben", 7, "helpful", note="right")
        self.controller.knows({"type": "review", "decision": self.first, "review": asdict(review)})

    def became(self, decision: str, outcome: Outcome) -> None:
        self.controller.knows({"type": "outcome", "decision": decision, "outcome": asdict(outcome)})

    def told(self, name: str) -> str:
        """What explain says, in one line."""
        self.controller.run("once")
        out = self.controller.run("explain", name)[0]
        assert max(map(len, out.splitlines())) <= 80, out
        return " ".join(out.split())


def in_order(text: str, *parts: str) -> None:
    """Every part stands in the text, behind the one before it."""
    place = 0
    for part in parts:
        found = text.find(part, place)
        assert found >= 0, f"{part!r} is not in {text[place:]!r}"
        place = found + len(part)


def test_a_job_is_told_from_its_first_attempt_to_what_a_person_must_do_now(
    controller: Controller,
) -> None:
    story = Story(controller)
    story.attempt_two()
    told = story.told("12")
    assert told.startswith("NEEDS YOU job 12 of ann, for 20 min: mend it, then scontrol release 12")
    in_order(
        told,
        "NEEDS YOU node n3",
        "job 12 'pretrain' of ann, partition train: 2 attempts, 2 decisions",
        "Attempt 1",
        "began on n[1-4], 32 GPUs",
        "n3 saw gpu.fell_off_bus (fatal): GPU 3 is gone",
        "ended FAILED 1:0 after 20 min",
        "work had reached step 1180; the newest whole checkpoint is at step 1100",
        f"the job's log, log.collective.peer_lost: {LOG}; 37 further lines follow from it",
        "noted besides, 1 in all: checkpoint.seen",
        "n2 looked and saw no fault",
        "n4 has not reported",
        "Decided 01KFIRST",
        "cause: hardware.gpu, established: gone",
        "job: requeue: its GPU fell off the bus",
        "n3: drain: GPU 3 fell off the bus",
        "rule hardware.gpu established",
        "limit: restarts: this would be 1 of 3",
        "would have changed it: the same failure again",
        "drain n3: sends drain",
        "drain n3: verified, Slurm shows: recovery: gone",
        "requeue 12: sends requeue",
        "requeue 12: sends start",
        "requeue 12: verified",
        "Attempt 2",
        "began on n[1-2,4]",
        "outcome restarted: on n1,n2,n4",
        "outcome resumed: at step 1190, beyond 1180",
        "later: evidence came late and says n4 was slow as well",
        "ended FAILED 1:0",
        "the job's log, log.program.exception: KeyError",
        "Decided 01KSECOND",
        "job: hold: KeyError",
        "hold 12: verified, Slurm shows: SPECIAL_EXIT",
        "failed_again: the next attempt ended FAILED, decision 01KSECOND",
        "review by ben: helpful: right",
    )


def test_where_nobody_has_to_do_anything_the_first_line_says_so_and_why(
    controller: Controller,
) -> None:
    story = Story(controller)
    controller.run("ack", "n3", "--owner", "bob")
    told = story.told("12")
    assert told.startswith(
        "TO DO nothing: resumed, at step 1190, beyond 1180"
        " seen to node n3, for 40 min (bob looks after it): repair it"
    )
    in_order(told, "Attempt 2", "began on n1,n2,n4", "outcome resumed", "bob looks after node n3")
    (job,) = controller.json("status")["jobs"]
    assert (job["job"], job["attempt"], job["attempts_allowed"]) == (12, 2, 4)
    assert (job["where"], job["state"]) == ("on n1,n2,n4", "resumed")
    status = " ".join(controller.run("status")[0].split())
    assert "recovering job 12 of ann, attempt 2 of 4 on n1,n2,n4: resumed at step 1190" in status


def test_a_decision_is_told_with_what_followed_and_leads_to_the_whole_job(
    controller: Controller,
) -> None:
    story = Story(controller)
    story.attempt_two()
    told = story.told(story.first)
    in_order(
        told, "decision 01KFIRST on job 12", "the whole job, 2 decisions: recovery explain 12",
        "Attempt 1", "Decided 01KFIRST", "What followed", "outcome failed_again",
    )  # fmt: skip
    assert "KeyError" not in told, "that is the other attempt's"
    document = controller.json("explain", story.first)
    assert document["schema"] == "story/v1"
    assert [one["subject"] for one in document["to_do"]] == ["node n3"]
    times = [event["time"] for event in document["events"]]
    assert times == sorted(times)
    assert [one["id"] for one in document["decisions"]] == [story.first]


def test_a_node_is_told_with_faults_checks_boots_drains_and_how_it_reports(
    controller: Controller,
) -> None:
    story = Story(controller)
    for minutes in (15, 17, 19):
        warm = Finding("gpu.too_hot", "warning", f"GPU 3 at {80 + minutes} C", gpu=3)
        story.saw("n3", minutes, warm, restart=None)
    passed = Finding("check.passed", "info", "deep check: 12 probes, 40 s")
    rebooted = replace(
        record("n3", job=None, findings=(passed,), time=story.at(30)),
        hook="health_check", boot_id="11111111-89ab-cdef-0123-456789abcdef",
    )  # fmt: skip
    drop(controller.spool, rebooted)
    beat(controller.spool, "n3")
    told = story.told("n3")
    in_order(
        told,
        "NEEDS YOU node n3, for 40 min: repair it, it is drained",
        "node n3: 1 decision named it",
        "its health check says ok, heard",
        "drained by 01KFIRST",
        "health_check saw gpu.too_hot (warning): GPU 3 at 95 C; told 3 times until",
        "epilog saw gpu.fell_off_bus (fatal): GPU 3 is gone",
        "decided 01KFIRST, job 12: requeue without n3",
        "n3: drain: GPU 3 fell off the bus",
        "drain n3: verified, Slurm shows: recovery: gone",
        "it has booted since it was last heard of",
        "deep check passed: 12 probes, 40 s",
    )
    document = controller.json("explain", "n3")
    assert (document["schema"], document["node"]["silent"]) == ("story/v1", False)


def test_a_number_that_slurm_has_given_again_is_another_job(controller: Controller) -> None:
    long_ago = utc(time.time() - 40 * 86_400)
    controller.decided("01KOLD", job_id=12, restart=2, time=long_ago, owner="bob", uid=1002)
    controller.decided("01KNEW", job_id=12, job_nodes=("n1",))
    told = controller.json("explain", "12")
    assert [one["id"] for one in told["decisions"]] == ["01KNEW"]
    assert told["facts"] == ["an earlier job had this number: recovery explain 01KOLD"]


def test_a_task_of_an_array_is_found_by_the_name_that_squeue_shows(
    controller: Controller,
) -> None:
    held = Action("hold", "6_2", "verified", utc(), "hold", "SPECIAL_EXIT")
    controller.decided("d1", job_id=8, job_target="6_2", actions=(held,))
    assert "job 8 (6_2) of ann" in controller.run("explain", "6_2")[0]
    assert controller.run("explain", "6_3", status=1)[1].count("\n") == 1
    assert controller.run("explain", "9" * 40, status=1)[1].count("\n") == 1


def test_what_a_user_wrote_moves_no_cursor_and_fills_no_screen(controller: Controller) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07" + "A" * 100_000
    controller.decided(
        "d1",
        job_name="\x1b[31mjob\n",
        job_nodes=("n1",),
        ended="FAILED 1:0",
        evidence=(Excerpt("r1", "n1", utc(), "log.program.exception", evil),),
        cause=Cause("program.exception", "established", evil),
        job=JobAnswer("hold", evil),
    )
    told = controller.run("explain", "12")[0]
    assert all(one.isprintable() or one == "\n" for one in told)
    assert max(map(len, told.splitlines())) <= 80
    assert len(told.splitlines()) < 60
    for command in (["status"], ["decisions"], ["incidents"]):
        said = controller.run(*command)[0]
        assert all(one.isprintable() or one == "\n" for one in said)
        assert len(said.splitlines()) < 30
