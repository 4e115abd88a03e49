"""People are told what they must do, once, by every way, and a dead way delays nobody."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from recovery.decision import JobAnswer
from recovery.notify import LOOK_SECONDS
from slurm_hooks import spool
from slurm_hooks.record import utc
from tests.test_recovery_commands import Controller, wait

HOLD = JobAnswer("hold", "ValueError: bad shape <x>: a restart would fail again")


class Receiver:
    """A web server that keeps what is posted to it, after refusing the first ``refuse``."""

    def __init__(self, refuse: int = 0) -> None:
        self.posts: list[tuple[str, Any]] = []
        self.refuse = refuse
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                content = json.loads(self.rfile.read(size))
                status = 500 if receiver.refuse > 0 else 200
                receiver.refuse -= 1
                if status == 200:
                    receiver.posts.append((self.path, content))
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Stay quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    made = Controller(tmp_path)
    spool.create(made.spool)
    return made


def program(controller: Controller, name: str, body: str) -> Path:
    path = controller.root / name
    path.write_text(f"#!{sys.executable}\nimport sys, json, time, pathlib\n{body}\n")
    path.chmod(0o755)
    return path


def test_every_way_tells_once_what_a_person_must_do(
    controller: Controller, receiver: Receiver
) -> None:
    told, mailed = controller.root / "told", controller.root / "mailed"
    tell = program(controller, "tell", f"open({str(told)!r}, 'a').write(sys.stdin.read() + '\\n')")
    mail = program(
        controller, "mail",
        f"open({str(mailed)!r}, 'a').write(json.dumps([sys.argv[1:], sys.stdin.read()]) + '\\n')",
    )  # fmt: skip
    controller.configure(
        f'[notify]\ncommand = ["{tell}"]\nwebhook = "{receiver.url}/hook"\n'
        f'slack = "{receiver.url}/slack"\nmail = ["oncall@site"]\nmail_owner = true\n'
        f'mail_program = "{mail}"\n'
    )
    controller.decided("d1", job=HOLD, job_target="12", nodes=())
    service = controller.start("run")
    try:
        wait(lambda: len(receiver.posts) == 2 and mailed.exists(), "it is told")
        wait(lambda: len(mailed.read_text().splitlines()) == 2, "both are mailed")
        controller.decided("d2", job=HOLD, job_target="12", restart=1, nodes=())
        began = utc(time.time() + 2 * LOOK_SECONDS)
        wait(lambda: controller.json("status")["last_pass"] > began, "it has looked again")
    finally:
        service.terminate()
        service.communicate(timeout=20)
    (notice,) = [json.loads(line) for line in told.read_text().splitlines()]
    assert notice["schema"] == "notice/v1"
    assert (notice["subject"], notice["job_owner"]) == ("job 12", "ann")
    assert notice["what"].startswith("mend it, then scontrol release 12: ValueError")
    posts = dict(receiver.posts)
    assert posts["/hook"] == notice
    assert posts["/slack"]["text"].startswith("job 12 of ann: mend it, then scontrol release 12:")
    assert "bad shape &lt;x&gt;" in posts["/slack"]["text"]
    letters = [json.loads(line) for line in mailed.read_text().splitlines()]
    assert [arguments[-1] for arguments, _ in letters] == ["oncall@site", "ann"]
    assert letters[0][0][0] == "-s"
    assert letters[0][1].startswith("job 12 of ann: mend it")


def test_a_way_that_hangs_delays_no_pass_and_one_that_fails_is_tried_again(
    controller: Controller, receiver: Receiver
) -> None:
    receiver.refuse = 1
    hang = program(controller, "hang", "time.sleep(600)")
    controller.configure(
        f'[notify]\ncommand = ["{hang}"]\nwebhook = "{receiver.url}/hook"\ntimeout = 1\n'
    )
    controller.decided("d1", job=HOLD, job_target="12", nodes=())
    service = controller.start("run")
    try:
        wait(lambda: controller.json("status")["last_pass"], "it passes")
        first = controller.json("status")["last_pass"]
        wait(lambda: controller.json("status")["last_pass"] > first, "and again")
        wait(lambda: receiver.posts, "the webhook is tried again")
    finally:
        service.terminate()
        _, said = service.communicate(timeout=20)
    assert "not told (try 1)" in said
    assert len(receiver.posts) == 1, "what it has taken is not sent again"


def test_at_most_so_many_are_sent_in_an_hour_and_status_says_so(
    controller: Controller, receiver: Receiver
) -> None:
    controller.configure(f'[notify]\nwebhook = "{receiver.url}/hook"\nper_hour = 2\n')
    for number in range(4):
        job = 20 + number
        controller.decided(f"d{number}", job_id=job, job=HOLD, job_target=str(job), nodes=())
    service = controller.start("run")
    try:
        said = "more than 2 notices in an hour: the rest waits"
        wait(lambda: said in controller.json("status")["problems"], "the limit is told")
    finally:
        service.terminate()
        service.communicate(timeout=20)
    assert len(receiver.posts) == 2
    assert len(controller.json("status")["needs_a_person"]) == 4


def test_a_circuit_breaker_that_opens_is_told_with_how_to_close_it(
    controller: Controller, receiver: Receiver
) -> None:
    controller.configure(f'[notify]\nwebhook = "{receiver.url}/hook"\n')
    why = "8 nodes are drained already, max_drained_nodes allows no more"
    controller.knows({"type": "breaker", "kind": "drain", "tripped": True, "why": why})
    service = controller.start("run")
    try:
        wait(lambda: receiver.posts, "it is told")
    finally:
        service.terminate()
        service.communicate(timeout=20)
    ((_, notice),) = receiver.posts
    assert notice["subject"] == "circuit breaker drain"
    assert notice["what"] == f"find out why, then recovery resume --why …: {why}"
    assert "BREAKER     drain: 8 nodes are drained" in controller.run("status")[0]


def test_a_grant_that_fell_back_and_an_open_breaker_are_told(
    controller: Controller, receiver: Receiver
) -> None:
    controller.configure(f'[notify]\nwebhook = "{receiver.url}/hook"\n')
    now, why = utc(), "22 of 20 reviews, agreement ≥ 0.71, needs 0.80"
    breaker = {"type": "breaker", "kind": "drain", "tripped": True, "why": "8 nodes", "time": now}
    for event in (
        {
            "type": "grant",
            "key": "k1",
            "in_force": False,
            "why": why,
            "time": now,
            "scope": "requeue, drain (partitions trial)",
        },
        breaker,
    ):
        controller.knows(event)
    service = controller.start("run")
    try:
        wait(lambda: len(receiver.posts) == 2, "both are told")
    finally:
        service.terminate()
        service.communicate(timeout=20)
    said = {content["subject"]: content["what"] for _, content in receiver.posts}
    assert said["grant for requeue, drain (partitions trial)"] == (
        "suspended: do by hand what it did, recovery status lists it;"
        f" recovery trial tells what speaks against it: {why}"
    )
    assert said["circuit breaker drain"].startswith("find out why, then recovery resume --why")
