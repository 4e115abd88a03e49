"""An epilog reads a failed job's log as the job's user, whatever the log is, and in time."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_hooks import probes
from slurm_hooks.joblog import signatures
from slurm_hooks.joblog.paths import to_glob
from slurm_hooks.probes.joblog_reading import code_of
from tests.node import Node, job

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a job's user")

NOBODY = pwd.getpwnam("nobody")

REAL_DUMPS = Path(__file__).parent / "data" / "flight_recorder"

FAILURE = (
    b"iteration 12 | lm loss 2.1\n"
    b"3: Traceback (most recent call last):\n"
    b'3:   File "/home/u/train.py", line 9, in step\n'
    b"3:     batch = next(self.blend)\n"
    b"3: KeyError: 'shard-0007'\n"
    b"srun: error: n1: task 3: Exited with exit code 1\n"
)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    (tmp_path / "out").mkdir(mode=0o755)
    made = Node(tmp_path)
    made.configure('[probes.joblog]\nhooks = ["epilog"]\n')
    return made


def log_of(node: Node, content: bytes, name: str = "slurm-7.out") -> Path:
    """Write the output file of job 7, owned by its user."""
    path = node.root / "out" / name
    path.write_bytes(content)
    os.chown(path, NOBODY.pw_uid, NOBODY.pw_gid)
    return path


def findings(node: Node, stdout: str = "slurm-%j.out", **environ: str) -> list[dict[str, Any]]:
    """Run the epilog of job 7, which failed, and return what its job-log probe found."""
    told = {
        **job(exit_code="1:0"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_UID": str(NOBODY.pw_uid),
        "SLURM_JOB_USER": "nobody",
        "SLURM_NODELIST": "n[1-2]",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_WORK_DIR": str(node.root / "out"),
        "SLURM_JOB_STDOUT": stdout,
        **environ,
    }
    assert node.run("epilog", **told).status == 0
    (record,) = node.records()
    return [one for one in record["findings"] if one["code"].startswith("log.")]


def document(finding: dict[str, Any]) -> dict[str, Any]:
    """The verdict that a finding carries."""
    (text,) = [one["text"] for one in finding["evidence"] if one["source"] == "log_verdict"]
    answer: dict[str, Any] = json.loads(text)
    return answer


def test_the_first_failing_line_comes_back_with_its_meaning(node: Node) -> None:
    log = log_of(node, FAILURE)
    (found,) = findings(node)
    assert found["code"] == "log.program_exception"
    assert found["evidence"][0] == {"source": "job_log", "text": "KeyError: 'shard-0007'"}
    assert found["file"] == str(log)
    verdict = document(found)
    assert (verdict["job_verdict"], verdict["confidence"]) == ("hold", "established")
    assert verdict["cause"]["number"] == 5


def test_what_the_owner_names_is_read_beside_slurms_own_file(node: Node) -> None:
    log_of(node, b"all well\n")
    log_of(node, FAILURE, "rank3.log")
    comment = "recovery=requeue,logs=rank*.log"
    (found,) = findings(node, SLURM_JOB_COMMENT=comment)
    assert found["code"] == "log.program_exception"


def test_a_log_that_is_a_link_to_a_file_of_root_shows_nothing_of_it(node: Node) -> None:
    secret = node.root / "secret"
    secret.write_bytes(b"RuntimeError: the-secret\n" * 3)
    secret.chmod(0o600)
    link = node.root / "out" / "slurm-7.out"
    link.symlink_to(secret)
    (found,) = findings(node)
    assert found["code"] == "log.unreadable"
    assert all("the-secret" not in path.read_text() for path in node.spool.rglob("*.json"))


@pytest.mark.parametrize("kind", ["fifo", "null", "zero", "folder", "missing"])
def test_what_is_no_regular_file_delays_nothing(node: Node, kind: str) -> None:
    path = node.root / "out" / "slurm-7.out"
    stdout = "slurm-%j.out"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind != "missing":
        stdout = f"/dev/{kind}"
    (found,) = findings(node, stdout)
    assert found["code"] == "log.unreadable"


def test_a_huge_sparse_log_costs_no_more_than_a_small_one(node: Node) -> None:
    path = log_of(node, b"starting\n")
    with path.open("rb+") as log:
        log.seek(50 << 30)
        log.write(b"\n" + FAILURE)
    (found,) = findings(node)
    assert found["code"] == "log.program_exception"
    assert document(found)["cause"]["number"] is None


def test_binary_text_colours_and_progress_bars_do_not_hide_the_failure(node: Node) -> None:
    bars = b"\r".join(
        b"Epoch 1:  %d%%|##| %d/90 [00:%02d<09:01, 2.1it/s]" % (n, n, n) for n in range(60)
    )
    noise = bytes(range(256)) * 400
    coloured = FAILURE.replace(b"3: KeyError", b"3: \x1b[1;31mKeyError\x1b[0m")
    log_of(node, noise + b"\n" + bars + b"\n\xff\xfe\n" + coloured + b"x" * 3_000_000)
    (found,) = findings(node)
    assert found["evidence"][0]["text"] == "KeyError: 'shard-0007'"


def test_a_node_that_is_not_the_batch_host_leaves_the_log_alone(node: Node) -> None:
    log_of(node, FAILURE)
    assert findings(node, SLURM_JOB_NODELIST="n[0-2]") == []


def test_the_next_node_reads_where_the_batch_host_says_nothing(node: Node) -> None:
    log_of(node, FAILURE)
    # After NODE_FAIL the other nodes are told 0:0, as after success.
    told = {
        "SLURM_JOB_NODELIST": "n[0-2]",
        "SLURM_JOB_COMMENT": "recovery=requeue",
        "SLURM_JOB_EXIT_CODE": "0",
        "SLURM_JOB_EXIT_CODE2": "0:0",
    }
    (found,) = findings(node, **told)
    assert found["code"] == "log.program_exception"
    (claim,) = (node.spool / "claims").iterdir()
    assert claim.read_text() == "n1"


def test_the_next_node_leaves_a_log_alone_that_the_batch_host_has_claimed(node: Node) -> None:
    log_of(node, FAILURE)
    comment = "recovery=requeue"
    assert len(findings(node, SLURM_JOB_COMMENT=comment)) == 1
    for record in (node.spool / "incoming").iterdir():
        record.unlink()
    node.name = "n2"
    assert findings(node, SLURM_JOB_COMMENT=comment) == []


def test_a_file_that_the_jobs_processes_write_to_is_read_though_nobody_named_it(
    node: Node,
) -> None:
    node.configure('[probes.joblog]\nhooks = ["epilog", "health_check"]\n')
    log_of(node, b"all well\n")
    hidden = log_of(node, FAILURE, "unnamed.txt")
    secret = node.root / "secret"
    secret.write_bytes(b"RuntimeError: the-secret\n")
    secret.chmod(0o600)
    told = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_UID": str(NOBODY.pw_uid),
        "SLURM_JOB_USER": "nobody",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_NODELIST": "n1",
        "SLURM_JOB_WORK_DIR": str(node.root / "out"),
        "SLURM_JOB_COMMENT": "recovery=requeue",
    }
    assert node.run("prolog", **{**job(), **told}).status == 0
    # What slurmd starts for a job: a slurmstepd with its title, and a task with the job's id.
    step = subprocess.Popen(
        ["slurmstepd: [7.batch]", "-c", "import time; time.sleep(600)"], executable=sys.executable
    )
    task = subprocess.Popen(
        ["sleep", "600"],
        stdout=hidden.open("ab"),
        stderr=secret.open("ab"),
        env={"SLURM_JOB_ID": "7"},
        user=NOBODY.pw_uid,
        group=NOBODY.pw_gid,
        extra_groups=[],
    )
    try:
        assert node.run("health_check").status == 0
    finally:
        for process in (step, task):
            process.kill()
            process.wait()
    (note,) = (node.buffer / "open-files").iterdir()
    assert json.loads(note.read_text())["files"] == [str(hidden)]
    (found,) = findings(node, **told)
    assert (found["code"], found["file"]) == ("log.program_exception", str(hidden))


def test_a_rank_that_its_peers_dumps_show_absent_is_in_the_record(node: Node) -> None:
    log_of(node, b"step 12 loss 2.1\n")
    dumps = node.root / "out" / ".recovery" / "7.1"
    dumps.mkdir(parents=True)
    for dump in REAL_DUMPS.glob("nccl_trace_rank_*"):
        shutil.copy(dump, dumps)
        (dumps / dump.name).chmod(0o644)
    for folder in (dumps, dumps.parent):
        os.chown(folder, NOBODY.pw_uid, NOBODY.pw_gid)
    (found,) = findings(
        node,
        SLURM_JOB_COMMENT="recovery=requeue",
        SLURM_JOB_GPUS="0,1,2",
    )
    assert found["code"] == "log.collective_timeout"
    (named,) = document(found)["implicated"]
    assert (named["node"], named["rank"]) == ("n1", 2)
    assert "all_reduce #6" in named["why"]


def test_a_job_that_ended_well_has_its_log_left_alone(node: Node) -> None:
    log_of(node, FAILURE)
    assert (
        findings(
            node,
            SLURM_JOB_EXIT_CODE="0",
            SLURM_JOB_EXIT_CODE2="0:0",
            SLURM_JOB_COMMENT="recovery=requeue",
        )
        == []
    )


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("slurm-%j.out", "/w/slurm-12.out"),
        ("/d/%u/%A_%3a.log", "/d/ann/12_4294967294.log"),
        ("%6j-%%j", "/w/000012-%j"),
        ("%x-%j.out", "/w/*-12.out"),
        ("%x.out", None),
        ("a\\%j", "/w/a%j"),
        ("[1].out", "/w/[[]1].out"),
    ],
)
def test_file_names_are_expanded_as_slurm_does(pattern: str, expected: str | None) -> None:
    names = {"j": "12", "A": "12", "a": "4294967294", "u": "ann"}
    assert to_glob(pattern, names, "/w") == expected


def test_every_class_of_log_has_its_code() -> None:
    classes = {code_of(name) for name in signatures.class_names()}
    assert {*classes, "log.unreadable"} == set(probes.load("joblog").codes)
