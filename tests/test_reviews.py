"""What people think of decisions reaches the journal, and only what the right people think.

Through the commands and the files of the spool, with a real aggregator; there is no Slurm where it
looks, since nothing here depends on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from recovery.commands.judging import review
from recovery.decision import Action, JobAnswer
from recovery.publish import Publisher
from slurm_hooks import spool
from slurm_hooks.record import new_id, utc
from tests.failing_job import NOBODY
from tests.node import PROGRAMS
from tests.records import decision
from tests.test_recovery_commands import Controller

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="files of other people need root")

ME = str(os.geteuid())
OTHER = 4321
REVIEWERS = f'[review]\nreviewers = ["{ME}", "{OTHER}"]\n'


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    made = Controller(tmp_path)
    spool.create(made.spool)
    made.configure(REVIEWERS)
    return made


def put(controller: Controller, document: Any, uid: int | None = None, name: str = "") -> Path:
    """A file in ``reviews``, as whoever has shell access could write it."""
    path = controller.spool / "reviews" / (name or f"{new_id()}.json")
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    path.write_bytes(content)
    path.chmod(0o644)
    if uid is not None:
        os.chown(path, uid, uid)
    return path


def review_of(name: str, verdict: str = "helpful", **more: str) -> dict[str, str]:
    return {"schema": "review/v1", "decision": name, "verdict": verdict, **more}


def take_in(controller: Controller) -> None:
    """Make passes until no file of a reviewer is left; a busy machine needs several."""

    def waiting() -> list[str]:
        with os.scandir(controller.spool / "reviews") as entries:
            return [
                one.name
                for one in entries
                if one.is_file(follow_symlinks=False) and one.stat().st_uid in (int(ME), OTHER)
            ]

    controller.run("once")
    for _ in range(30):
        if not waiting():
            return
        controller.run("once")
    raise AssertionError(f"still there: {waiting()}")


def reviews(controller: Controller, name: str = "d1") -> list[dict[str, Any]]:
    """The reviews that the journal has of a decision, after a pass."""
    take_in(controller)
    found: list[dict[str, Any]] = controller.json("explain", name)["decisions"][0]["reviews"]
    return found


def test_a_review_is_the_writers_own_word_and_stays_in_the_journal(controller: Controller) -> None:
    controller.decided("d1")
    before = utc()
    said = controller.run(
        "review", "d1", "disruptive", "--would-have", "hold", "--note", "it was mid-save"
    )[0]
    assert said.startswith("d1: disruptive, says ")
    (path,) = (controller.spool / "reviews").iterdir()
    assert path.stat().st_uid == os.geteuid()
    (one,) = reviews(controller)
    assert (one["uid"], one["verdict"], one["would_have"]) == (int(ME), "disruptive", "hold")
    assert (one["note"], one["id"]) == ("it was mid-save", path.stem)
    assert before[:16] <= one["time"][:16] <= utc()[:16]
    controller.run("review", "d1", "helpful")
    assert [one["verdict"] for one in reviews(controller)] == ["disruptive", "helpful"]
    assert list((controller.spool / "reviews").iterdir()) == [], "taken in, they leave the spool"
    events = [event for event in controller.journal.events() if event["type"] == "review"]
    assert len(events) == 2
    (controller.state / "index.sqlite").unlink()
    again = controller.json("explain", "d1")["decisions"][0]["reviews"]
    assert [one["verdict"] for one in again] == ["disruptive", "helpful"]


def test_the_readable_record_shows_reviews(controller: Controller) -> None:
    controller.decided("d1")
    controller.run("review", "d1", "ambiguous", "--note", "odd")
    take_in(controller)
    lines = "".join(path.read_text() for path in (controller.spool / "decisions").iterdir())
    assert json.loads(lines.splitlines()[-1])["reviews"][0]["note"] == "odd"


def test_who_is_no_reviewer_is_told_so_and_writes_nothing(controller: Controller) -> None:
    controller.decided("d1")
    controller.configure('[review]\nreviewers = ["4321"]\n')
    err = controller.run("review", "d1", "helpful", status=1)[1]
    assert "is no reviewer; [review] reviewers in" in err
    assert err.count("\n") == 1
    assert list((controller.spool / "reviews").iterdir()) == []


def test_the_owner_of_the_job_does_not_count(controller: Controller) -> None:
    controller.decided("d1", uid=int(ME))
    assert "owns the job" in controller.run("review", "d1", "helpful", status=1)[1]
    path = put(controller, review_of("d1"))
    assert reviews(controller) == []
    assert not path.exists()
    assert "owns the job" in (controller.spool / "rejected" / f"{path.name}.why").read_text()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "limit"),
        (b'{"schema": "review/v1", "decision": "d1", "verdict": "fine"}', "verdict"),
        (b'{"schema": "review/v1", "decision": "nothing", "verdict": "helpful"}', "no such"),
        (b'{"schema": "review/v1", "decision": "d1", "verdict": "helpful", "who": "x"}', "'who'"),
        (b'{"schema": "review/v1", "decision": ["d1"], "verdict": "helpful"}', "no text"),
        (b" " * 2_000_000, "limit"),
    ],
    ids=["half", "deep", "verdict", "unknown", "forged", "type", "huge"],
)
def test_a_reviewers_file_that_is_no_review_is_moved_aside_with_the_reason(
    controller: Controller, content: bytes, why: str
) -> None:
    controller.decided("d1")
    path = put(controller, content)
    assert reviews(controller) == []
    assert why in (controller.spool / "rejected" / f"{path.name}.why").read_text()
    assert not path.exists()


def test_links_fifos_and_folders_stay_where_they_are_and_hang_nothing(
    controller: Controller,
) -> None:
    controller.decided("d1")
    elsewhere = controller.root / "elsewhere.json"
    elsewhere.write_text(json.dumps(review_of("d1")))
    folder = controller.spool / "reviews"
    (folder / "link.json").symlink_to(elsewhere)
    os.mkfifo(folder / "fifo.json")
    (folder / "folder.json").mkdir()
    (folder / "second.json").hardlink_to(elsewhere)
    put(controller, review_of("d1", "ambiguous"))
    assert [one["verdict"] for one in reviews(controller)] == ["ambiguous"]
    left = {path.name for path in folder.iterdir()}
    assert {"link.json", "fifo.json", "folder.json"} <= left
    assert "second name" in (controller.spool / "rejected" / "second.json.why").read_text()


@needs_root
def test_a_file_of_somebody_else_counts_for_nobody(controller: Controller) -> None:
    controller.decided("d1")
    forged = put(controller, review_of("d1", note="signed: root"), uid=NOBODY)
    writable = put(controller, review_of("d1"), uid=OTHER)
    writable.chmod(0o666)
    put(controller, review_of("d1", "ambiguous"), uid=OTHER)
    found = reviews(controller)
    assert [(one["uid"], one["verdict"]) for one in found] == [(OTHER, "ambiguous")]
    assert forged.exists(), "what is not a reviewer's is theirs, and stays"


@needs_root
def test_a_reviewer_needs_nothing_but_the_spool(controller: Controller) -> None:
    with tempfile.TemporaryDirectory() as folder:  # which others may enter, unlike pytest's
        Path(folder).chmod(0o755)
        made = Controller(Path(folder))
        spool.create(made.spool)
        made.configure(f'[review]\nreviewers = ["{NOBODY}"]\n')
        made.decided("d1")
        made.state.chmod(0o750)
        publisher = Publisher(made.spool)
        publisher.add(decision("d1"))
        assert publisher.publish({}, utc()[:10]) == ""
        # A fork, since others may not get into a developer's checkout to start a program.
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.environ["SLURM_RECOVERY_CONFIG"] = str(made.config)
            try:
                review.main(["d1", "helpful"])
            finally:
                os._exit(1)
        os.waitpid(child, 0)
        (one,) = reviews(made)
    assert (one["uid"], one["verdict"]) == (NOBODY, "helpful")


@needs_root
def test_a_flood_of_strangers_files_keeps_no_review_from_counting(controller: Controller) -> None:
    controller.decided("d1")
    for number in range(300):
        put(controller, b"{", uid=NOBODY, name=f"0{number}.json")
    put(controller, review_of("d1"))
    assert len(reviews(controller)) == 1
    assert list((controller.spool / "rejected").iterdir()) == []


def test_next_walks_through_what_this_person_has_not_reviewed(controller: Controller) -> None:
    controller.decided("d1", time="2026-12-01T05:00:00.000000Z")
    controller.decided("d2", time="2026-12-01T06:00:00.000000Z")
    controller.decided("mine", time="2026-12-01T07:00:00.000000Z", uid=int(ME))
    controller.run("review", "d2", "helpful")
    take_in(controller)
    assert controller.run("review", "--next", status=2)[1].startswith("--next asks on a terminal")
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        [PROGRAMS / "recovery", "review", "--next"],
        env={"SLURM_RECOVERY_CONFIG": str(controller.config), "TERM": "dumb"},
        stdin=terminal, stdout=terminal, stderr=terminal,
    )  # fmt: skip
    os.close(terminal)
    told = b""
    for question, answer in ((b"[q]uit", b"d\n"), (b"would have", b"hold\n"), (b"why", b"odd\n")):
        while question not in told:
            told += os.read(main, 65536)
        os.write(main, answer)
    with contextlib.suppress(OSError):  # how Linux tells that the other end has gone
        while chunk := os.read(main, 65536):
            told += chunk
    assert process.wait(30) == 0, told
    assert b"1 of 1" in told, "d2 is reviewed, and mine is mine"
    (one,) = reviews(controller)
    assert (one["verdict"], one["would_have"], one["note"]) == (
        "disruptive", "hold", "odd",
    )  # fmt: skip


def test_a_trial_counts_each_decision_once_and_ambiguous_is_no_agreement(
    controller: Controller,
) -> None:
    recorded = Action("requeue", "12", "recorded", utc())
    for number in range(4):
        controller.decided(f"d{number}", job_id=20 + number, actions=(recorded,))
    for name, verdict in (("d0", "helpful"), ("d1", "helpful"), ("d2", "ambiguous")):
        controller.run("review", name, verdict, "--note", "<b>see</b>")
    controller.run("review", "d0", "helpful")
    take_in(controller)
    everything, row = controller.json("trial")["rows"]
    assert (row["fault_class"], row["action"]) == ("hardware.gpu", "requeue")
    assert (row["decisions"], row["reviewed"], row["helpful"], row["ambiguous"]) == (4, 3, 2, 1)
    assert row["agreement"] == pytest.approx(2 / 3, abs=1e-3)
    # The score interval of 2 in 3 (Wilson 1927), worked out by hand.
    assert row["interval"] == pytest.approx([0.2077, 0.9385], abs=1e-4)
    assert everything["decisions"] == 4
    said = controller.run("trial")[0]
    assert "0.67 (0.21-0.94)" in said
    assert "to decision" in said
    assert max(map(len, said.splitlines())) <= 80
    page = controller.root / "trial.html"
    controller.run("trial", "--html", str(page))
    text = page.read_text()
    assert "&lt;b&gt;see&lt;/b&gt;" in text
    assert "<b>see</b>" not in text
    for outside in ("http://", "https://", "<script", "url(", "@import", "<link", "<img"):
        assert outside not in text
    assert text.count("<svg") >= 3


GRANT = """
[[grant]]
partitions = ["train"]
actions = ["requeue"]
needs = {reviews = 5, agreement = 0.50}
"""


def test_a_grant_waits_comes_into_force_and_falls_back_by_itself(controller: Controller) -> None:
    controller.configure(REVIEWERS + GRANT, mode="act")

    def standing() -> tuple[str, str]:
        take_in(controller)
        (one,) = controller.json("grants")["grants"]
        effective = json.loads((controller.spool / "control" / "effective.json").read_text())
        assert bool(effective["grants"]) is one["in_force"]
        return one["state"], one["why"]

    recorded = (Action("requeue", "12", "recorded", utc()),)
    for number in range(9):
        controller.decided(f"d{number}", job_id=20 + number, actions=recorded)
    controller.decided("elsewhere", partition="other", actions=recorded)
    assert standing() == ("waiting", "0 of 5 reviews, agreement ≥ 0.00, needs 0.50")
    controller.run("review", "elsewhere", "helpful")
    for number in range(4):
        controller.run("review", f"d{number}", "helpful")
    assert standing() == ("waiting", "4 of 5 reviews, agreement ≥ 0.51, needs 0.50")
    controller.run("review", "d4", "helpful")
    assert standing() == ("in force", "5 of 5 reviews, agreement ≥ 0.57, needs 0.50")
    for number in (5, 6):
        controller.run("review", f"d{number}", "disruptive", "--note", "mid-save")
    state, why = standing()
    assert (state, why) == ("suspended", "7 of 5 reviews, agreement ≥ 0.36, needs 0.50")
    events = [event for event in controller.journal.events() if event["type"] == "grant"]
    assert [event["in_force"] for event in events] == [True, False]
    assert events[-1]["scope"] == "requeue (partitions train)"
    assert events[-1]["why"].endswith("needs 0.50; against it: 2 of hardware.gpu")
    assert "suspended" in controller.run("status")[0]


def test_an_action_that_ended_badly_counts_against_its_grant_without_a_review(
    controller: Controller,
) -> None:
    controller.configure(REVIEWERS + GRANT, mode="act")
    recorded = (Action("requeue", "12", "recorded", utc()),)
    for number in range(5):
        controller.decided(f"d{number}", job_id=20 + number, actions=recorded)
        controller.run("review", f"d{number}", "helpful")
    take_in(controller)
    assert controller.json("grants")["grants"][0]["in_force"]
    failed = (Action("requeue", "12", "failed", utc(), detail="Slurm refused"),)
    for number in range(2):
        controller.decided(f"bad{number}", job_id=40 + number, actions=failed)
    controller.run("once")
    (one,) = controller.json("grants")["grants"]
    assert one["state"] == "suspended"
    assert "2 ended badly" in one["why"]


def test_what_needs_a_person_stays_first_in_status_until_somebody_looks_after_it(
    controller: Controller,
) -> None:
    hold = JobAnswer("hold", "ValueError: bad shape: a restart would fail again")
    long_ago = utc(time.time() - 7200)
    controller.decided("d1", job_id=12, time=long_ago, job=hold, job_target="12", nodes=())
    drained = (Action("drain", "n3", "verified", utc()),)
    controller.decided("d2", job_id=13, actions=drained)
    told = " ".join(controller.run("status")[0].split())
    assert told.startswith("NEEDS YOU job 12 of ann, for 2 h: mend it, then scontrol release 12:")
    assert "node n3" in told
    assert "repair it, it is drained" in told
    assert controller.run("ack", "n3", "--owner", "bob")[0] == "node n3: bob looks after it\n"
    assert controller.run("ack", "n9", "--owner", "bob", status=1)[1].startswith("nothing called")
    subjects = [one["subject"] for one in controller.json("status")["needs_a_person"]]
    assert "node n3" not in subjects
    assert "job 12" in subjects
    controller.run("ack", "12", "--owner", "ann")
    assert "job 12" not in controller.run("status")[0]
    (controller.state / "index.sqlite").unlink()
    assert "node n3" not in controller.run("status")[0], "an ack outlives the index"


def test_lists_are_filtered_by_time_and_a_silent_node_is_shown_as_silent(
    controller: Controller,
) -> None:
    old, new = utc(time.time() - 3 * 86_400), utc()
    controller.decided("d1", job_id=12, time=old)
    controller.decided("d2", job_id=12, time=new, restart=1)
    controller.decided("d3", job_id=13, time=new, owner="bob")
    found = controller.json("decisions", "--since", "1d")["decisions"]
    assert [one["id"] for one in found] == ["d3", "d2"]
    assert controller.json("decisions", "--until", "1d")["decisions"][0]["id"] == "d1"
    controller.run("decisions", "--since", "soon", status=2)
    first, second = controller.json("incidents")["incidents"]
    assert (first["subject"], second["subject"]) == ("job 13", "job 12")
    assert second["decisions"] == ["d1", "d2"]
    assert [
        one["subject"] for one in controller.json("incidents", "--user", "bob")["incidents"]
    ] == ["job 13"]
    assert "job 12 of ann, 2 times" in controller.run("incidents")[0]
    (node,) = controller.json("nodes", "n3")["nodes"]
    assert (node["silent"], node["verdict"], node["decisions"]) == (True, None, 3)
    said = controller.run("nodes")[0]
    assert said.startswith("n3               SILENT   never heard of, named by 3 decisions")
    assert max(map(len, said.splitlines())) <= 80


@needs_root
def test_where_reviewers_differ_the_most_critical_stands_and_the_latest_of_each(
    controller: Controller,
) -> None:
    controller.decided("d1", actions=(Action("requeue", "12", "recorded", utc()),))
    put(controller, review_of("d1", "disruptive", note="mid-save"), uid=OTHER)
    controller.run("review", "d1", "helpful")
    take_in(controller)
    assert controller.json("trial")["rows"][0]["disruptive"] == 1
    assert controller.json("trial")["objections"][0]["why"] == "mid-save"
    put(controller, review_of("d1", "helpful"), uid=OTHER)
    take_in(controller)
    (row, _) = controller.json("trial")["rows"]
    assert (row["reviewed"], row["helpful"], row["disruptive"]) == (1, 1, 0)
