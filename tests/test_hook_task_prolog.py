"""Tasks of a job that opted in get what makes a failure explainable; others are left alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.node import Node, job


@pytest.fixture
def node(tmp_path: Path) -> Node:
    made = Node(tmp_path)
    made.configure(f'[hooks]\nrun = "{tmp_path}/run"\n')
    return made


def exported(node: Node, **environ: str) -> dict[str, str]:
    """Run the task prolog and return what slurmstepd would export."""
    run = node.run("task_prolog", **{"SLURM_JOB_ID": "7", **environ})
    assert (run.status, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    assert all(line.startswith("export ") for line in lines)
    return dict(line.removeprefix("export ").split("=", 1) for line in lines)


def test_a_job_that_did_not_opt_in_gets_nothing(node: Node) -> None:
    node.run("prolog", **job(comment="just a comment"))
    assert exported(node) == {}
    assert not (node.root / ".recovery").exists()


def test_a_job_that_opted_in_gets_recorder_progress_file_and_dump_folder(node: Node) -> None:
    node.run("prolog", **job(comment="recovery=requeue"))
    given = exported(node, SLURM_RESTART_COUNT="2")
    dumps = node.root / ".recovery" / "7.2"
    assert dumps.is_dir()
    assert given["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"].startswith(str(dumps))
    assert given["RECOVERY_PROGRESS_FILE"] == str(dumps / "progress")
    assert given["TORCH_FR_BUFFER_SIZE"] == given["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
    assert given["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


def test_what_the_user_has_set_stays(node: Node) -> None:
    node.run("prolog", **job(comment="recovery=requeue,progress=/data/step"))
    given = exported(node, TORCH_FR_BUFFER_SIZE="0", NCCL_DEBUG="INFO")
    assert not given.keys() & {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "NCCL_DEBUG"}
    assert given["RECOVERY_PROGRESS_FILE"] == "/data/step"


def test_the_note_is_the_users_alone_and_gone_after_the_job(node: Node) -> None:
    told = job(comment="recovery=requeue")
    if os.geteuid() == 0:
        told["SLURM_JOB_UID"] = "54321"
    node.run("prolog", **told)
    note = node.root / "run" / "n1" / "7"
    assert note.stat().st_mode & 0o777 == 0o400
    assert note.stat().st_uid == int(told["SLURM_JOB_UID"])
    node.run("epilog", **told, SLURM_JOB_EXIT_CODE2="0:0")
    assert not note.exists()
    assert exported(node) == {}


def test_a_comment_cannot_add_a_line(node: Node) -> None:
    node.run(
        "prolog", **job(comment="recovery=requeue,progress=/x\x0bexport\u2028LD_PRELOAD=/evil")
    )
    assert "LD_PRELOAD" not in exported(node)
