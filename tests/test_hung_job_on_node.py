"""What a node's health check tells of a running job, and answers where it is suspected to hang."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.node import Node, job

USER = 65534 if os.geteuid() == 0 else os.geteuid()  # files of a job of root are not read

DUMPS = Path(__file__).parent / "data" / "flight_recorder"

JOB = 4_100_000_000 + os.getpid()
"""A number that no other job on this machine has."""

PROBES = '[probes.checkpoint]\nhooks = ["prolog", "health_check"]\n[probes.activity]\n'
PROBES += "[probes.hang_evidence]\n"


class Ranks:
    """The job's processes on this node, and the titles by which its steps are known."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.all: list[subprocess.Popen[bytes]] = []
        for step in ("batch", "0"):
            title = f"slurmstepd: [{JOB}.{step}]"
            self._start(["bash", "-c", f'exec -a "{title}" sleep 300'], os.environ.copy())
            while b"slurmstepd" not in Path(f"/proc/{self.all[-1].pid}/cmdline").read_bytes():
                time.sleep(0.01)

    def start(self, rank: int, node: str = "n1") -> subprocess.Popen[bytes]:
        told = {"SLURM_JOB_ID": f"{JOB}", "SLURM_PROCID": f"{rank}", "SLURM_STEP_ID": "0"}
        own = {"user": USER} if os.geteuid() == 0 else {}
        return self._start(["/bin/sleep", "300"], {**told, "SLURMD_NODENAME": node}, **own)

    def _start(
        self, argv: list[str], environ: dict[str, str], **own: Any
    ) -> subprocess.Popen[bytes]:
        self.all.append(subprocess.Popen(argv, env=environ, cwd="/", **own))
        return self.all[-1]


@pytest.fixture
def ranks(home: Path) -> Iterator[Ranks]:
    made = Ranks(home)
    yield made
    for process in made.all:
        process.kill()
        process.wait()


@pytest.fixture
def node(tmp_path: Path, home: Path, ranks: Ranks) -> Node:
    """A node on which the opted-in job has begun."""
    made = Node(tmp_path)
    made.configure(f'[hooks]\nrun = "{tmp_path}/run"\nrepeat = 0\n{PROBES}')
    told = {
        **job(JOB, comment="recovery=requeue"),
        "SLURM_JOB_UID": str(USER),
        "SLURM_JOB_RESTART_COUNT": "0",
        "SLURM_JOB_WORK_DIR": str(home),
        "SLURM_JOB_GPUS": "",
    }
    assert made.run("prolog", **told).status == 0
    made.finds({"code": "site.x", "severity": "info", "summary": "so that each look is told"})
    return made


def seen(node: Node) -> dict[str, dict[str, Any]]:
    """Run a health check; return its findings about the job, by code."""
    assert node.run("health_check").status == 0
    findings = node.records()[-1]["findings"]
    return {one["code"]: one for one in findings if one.get("job_id") == JOB}


def test_a_stopped_rank_is_told_with_its_number_and_a_running_one_is_not(
    node: Node, ranks: Ranks
) -> None:
    ranks.start(2)
    stopped = ranks.start(3)
    assert "activity.process_stopped" not in seen(node)
    stopped.send_signal(signal.SIGSTOP)
    told = seen(node)["activity.process_stopped"]
    assert (told["rank"], told["pid"], told["count"]) == (3, stopped.pid, 1)
    assert f"rank 3, sleep (pid {stopped.pid}) is stopped" in told["summary"]
    stopped.send_signal(signal.SIGCONT)
    assert "activity.process_stopped" not in seen(node)


def test_a_rank_that_is_gone_is_told_for_as_long_as_its_step_runs_on(
    node: Node, ranks: Ranks
) -> None:
    ranks.start(2)
    gone = ranks.start(3)
    assert "activity.process_gone" not in seen(node)
    gone.kill()
    gone.wait()
    for _ in range(2):
        assert seen(node)["activity.process_gone"]["rank"] == 3
    step = ranks.all[1]
    step.kill()
    step.wait()
    assert "activity.process_gone" not in seen(node)


def test_processes_that_compute_nothing_are_told_and_those_of_another_node_are_none(
    node: Node, ranks: Ranks
) -> None:
    ranks.start(2)
    ranks.start(5, node="n2").send_signal(signal.SIGSTOP)
    seen(node)
    told = seen(node)
    assert told["activity.processes_idle"]["count"] == 1
    assert "activity.process_stopped" not in told


def ask(node: Node, owner: int | None = None, until: float | None = None) -> Path:
    request = node.spool / "requests" / f"n1.evidence-{JOB}"
    until = time.time() + 60 if until is None else until
    told = {"schema": "evidence-request/v1", "id": "asked-1", "job": JOB, "until": until}
    request.write_text(json.dumps(told))
    if owner is not None:
        os.chown(request, owner, -1)
    return request


def test_what_its_processes_do_is_answered_at_each_look_for_as_long_as_it_is_asked(
    node: Node, ranks: Ranks
) -> None:
    stopped = ranks.start(3)
    stopped.send_signal(signal.SIGSTOP)
    assert "hang.evidence" not in seen(node)
    request = ask(node)
    for _ in range(2):
        told = [e for e in seen(node)["hang.evidence"]["evidence"] if e["source"] != "history"]
        assert (told[0]["text"], told[0]["key"]) == ("3", "asked-1")
        assert told[1]["text"].startswith(f"rank 3, sleep (pid {stopped.pid}): state T")
        missing = [one["text"] for one in told if one["source"] == "not_taken"]
        assert [text.partition(":")[0] for text in missing] == ["NCCL RAS", "flight recorder"]
    request.unlink()
    assert "hang.evidence" not in seen(node)


@pytest.mark.parametrize("how", ["outlived", "somebody else's", "no request"])
def test_a_request_that_does_not_count_is_not_answered(node: Node, ranks: Ranks, how: str) -> None:
    ranks.start(3)
    if how == "somebody else's" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    request = ask(
        node,
        owner=USER if how == "somebody else's" else None,
        until=time.time() - 1 if how == "outlived" else None,
    )
    if how == "no request":
        request.write_text("[" * 4000)
    assert "hang.evidence" not in seen(node)


def dump_folder(home: Path) -> Path:
    folder = home / ".recovery" / f"{JOB}.0"
    folder.mkdir(parents=True)
    return folder


def test_a_rank_that_takes_requests_for_its_dump_is_asked_for_it(
    node: Node, ranks: Ranks, home: Path
) -> None:
    ranks.start(3)
    folder = dump_folder(home)
    pipes = [folder / f"nccl_trace_rank_{rank}.pipe" for rank in (3, 4)]
    for pipe in pipes:
        os.mkfifo(pipe)
        os.chown(pipe, USER, -1)
    reading = [os.open(pipe, os.O_RDONLY | os.O_NONBLOCK) for pipe in pipes]
    ask(node)
    seen(node)
    assert os.read(reading[0], 10) == b"1\n"
    assert os.read(reading[1], 10) == b"", "rank 4 is on another node, whose own hook asks it"
    for descriptor in reading:
        os.close(descriptor)


@pytest.mark.parametrize("what", ["a link to a file", "a file", "nobody reads it"])
def test_a_pipe_that_is_none_hangs_nothing_and_nothing_is_written(
    node: Node, ranks: Ranks, home: Path, what: str
) -> None:
    ranks.start(3)
    folder = dump_folder(home)
    victim, pipe = home / "victim", folder / "nccl_trace_rank_3.pipe"
    victim.write_text("")
    os.chown(victim, USER, -1)
    if what == "a file":
        pipe.touch()
        os.chown(pipe, USER, -1)
    elif what == "a link to a file":
        pipe.symlink_to(victim)
    else:
        os.mkfifo(pipe)
    ask(node)
    assert "hang.evidence" in seen(node)
    assert victim.read_text() == ""
    assert not pipe.is_file() or pipe.read_text() == ""


def test_what_the_flight_recorder_shows_is_answered_and_the_rank_that_did_not_come(
    node: Node, ranks: Ranks, home: Path
) -> None:
    ranks.start(0)
    folder = dump_folder(home)
    for dump in DUMPS.glob("nccl_trace_rank_*"):
        shutil.copyfile(dump, folder / dump.name)
        os.chown(folder / dump.name, USER, -1)
    ask(node)
    told = seen(node)
    assert "dumps of ranks 0-5" in told["hang.flight_recorder"]["summary"]
    assert told["hang.suspect_rank"]["rank"] == 2
    why = "rank 2 has not entered all_reduce #6 that ranks 0-1,3-5 wait in"
    assert why in told["hang.suspect_rank"]["summary"]
