"""How far a job has come is read as its user, from the most trusted place, and never invented."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest

from slurm_hooks import as_user, progress
from tests.node import Node, job

NOBODY = 65534
SAMPLES = Path(__file__).parent / "data/checkpoints"
RECORD_SCHEMA = json.loads(
    (Path(progress.__file__).parent / "schemas/fault-record-v1.json").read_text()
)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.mark.parametrize(
    ("content", "step"),
    [
        ("1200", 1200),
        ("1200\n", 1200),
        ("100\n200\n300\n", 300),
        ("step=1200 loss=2.1", 1200),
        ('{"step": 1200}', 1200),
        ('{\n  "global_step": 7,\n  "loss": 1.0\n}\n', 7),
        ('{"step": 1}\n{"step": 2}\n', 2),
        ("\0\0\0" + "5", 5),
        ("", None),
        ("soon", None),
        ("-5", None),
        ("1200.5", None),
        ("9" * 40, None),
        ('{"step": "1200"}', None),
        ('{"step": true}', None),
        ("\xff\xfe\x00binary\x01", None),
        ("[" * 60_000, None),
    ],
)
def test_a_progress_file_tells_its_step_or_nothing(content: str, step: int | None) -> None:
    found = progress.in_file(content.encode("latin-1"))
    assert (found.step if found else None) == step


MEGATRON = (
    " [2026-12-02 05:31:37] iteration      100/  500000 | consumed samples:  25600 | "
    "elapsed time per iteration (ms): 5123.4 | throughput per GPU (TFLOP/s/GPU): 412.3 | "
    "learning rate: 1.5E-04 |"
)


@pytest.mark.parametrize(
    ("line", "step", "rate", "unit"),
    [
        (MEGATRON, 100, 412.3, "TFLOP/s/GPU"),
        ("[2026-12-02 05:31:37,123] [INFO] [Rank 0] step=100, skipped=0, "
         "lr=[0.0001], mom=[(0.9, 0.999)]", 100, None, None),
        ("steps: 100 loss: 2.3 iter time (s): 0.5 samples/sec: 125.01", 100, 125.01, "samples/s"),
        ("Training epoch 0, iteration 99/999 | lr: 0.0001 | global_step: 99 | "
         "train_step_timing in s: 1.25", 99, 1.25, "s/step"),
        (" 10%|█         | 100/1000 [00:10<01:30, 10.0it/s]", 100, 10.0, "it/s"),
        ("rank 0 step 42 loss 2.3", 42, None, None),
        ("step=42 loss=2.3 tokens/s=81000", 42, 81000.0, "tokens/s"),
        ("iter: 42, loss: 0.3", 42, None, None),
        ("{'loss': 0.3, 'global_step': 42}", 42, None, None),
        ("\x1b[32mINFO\x1b[0m step: 42", 42, None, None),
        ("[default0]:step=42", 42, None, None),
        ("0: step=42", 42, None, None),
    ],
)  # fmt: skip
def test_the_step_lines_of_common_trainers_are_known(
    line: str, step: int, rate: float | None, unit: str | None
) -> None:
    found = progress.in_text(f"starting\n{line}\nsaved a file\n")
    assert found is not None
    assert (found.step, found.rate, found.unit) == (step, rate, unit)


@pytest.mark.parametrize(
    "line",
    [
        "Epoch 3: 45%|████      | 45/100 [00:10<00:12, 4.5it/s, v_num=0]",
        "Downloading: 10%|█  | 100/1000 [00:10<01:30, 10.0it/s]",
        "warmup_steps=2000",
        "num_train_steps: 500000",
        "max_steps: 500",
        "save_step=100.5",
        "the next step is yours",
        "loss 0.3",
    ],
)
def test_other_numbers_are_not_taken_for_progress(line: str) -> None:
    assert progress.in_text(line) is None


def test_the_last_line_counts_and_carriage_returns_end_lines() -> None:
    assert progress.in_text("step=1\rstep=2\rstep=3\rloading")
    found = progress.in_text("step=1\rstep=2\rstep=3\rloading")
    assert found is not None
    assert found.step == 3


def test_the_file_is_trusted_before_the_checkpoint_and_that_before_the_log() -> None:
    file, checkpoint, log = (
        progress.Progress(step, source)  # type: ignore[arg-type]
        for step, source in ((30, "file"), (20, "checkpoint"), (90, "log"))
    )
    assert progress.choose([log, checkpoint, file]) == file
    assert progress.choose([log, checkpoint]) == checkpoint
    assert progress.choose([None, log]) == log
    assert progress.choose([None]) is None
    beyond = progress.Progress(40, "checkpoint")
    assert progress.choose([file, beyond]) == beyond


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return watching(Node(tmp_path))


def watching(node: Node) -> Node:
    """Let the checkpoint probe run in all hooks, and nothing else."""
    node.configure("[probes.checkpoint]\n")
    return node


def epilog(node: Node, comment: str, *, uid: int = NOBODY, **environ: str) -> dict[str, Any]:
    """Run an epilog for a failed job with this comment; return its record."""
    told = {**job(exit_code="1:0", comment=comment), "SLURM_JOB_UID": str(uid), **environ}
    run = node.run("epilog", **told)
    assert run.status == 0
    record = node.records()[-1]
    fastjsonschema.validate(RECORD_SCHEMA, record)
    return record


def codes(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["code"]: finding for finding in record["findings"]}


@as_root
def test_an_epilog_tells_the_newest_complete_checkpoint_and_the_progress(
    node: Node, home: Path
) -> None:
    shutil.copyfile(SAMPLES / "zip.pt", home / "step_100.pt")
    shutil.copyfile(SAMPLES / "zip.pt", home / "step_200.pt")
    os.truncate(home / "step_200.pt", 900)
    (home / "progress").write_text("237\n")
    found = codes(epilog(node, f"recovery=requeue,checkpoint={home},progress={home}/progress"))
    assert found["checkpoint.seen"]["step"] == 100
    assert found["checkpoint.seen"]["job_id"] == 7
    assert found["checkpoint.passed_over"]["step"] == 200
    assert "cut off" in found["checkpoint.passed_over"]["summary"]
    assert found["progress.seen"]["step"] == 237


@as_root
def test_checkpoints_that_are_all_broken_are_told_and_none_yet_is_another_thing(
    node: Node, home: Path
) -> None:
    comment = f"recovery=requeue,checkpoint={home}"
    assert "checkpoint.none" in codes(epilog(node, comment))
    shutil.copyfile(SAMPLES / "zip.pt", home / "step_100.pt")
    os.truncate(home / "step_100.pt", 900)
    assert codes(epilog(node, comment))["checkpoint.all_broken"]["severity"] == "warning"


@as_root
@pytest.mark.parametrize(
    ("told", "name"),
    [
        ({"SLURM_JOB_STDOUT": "run.out"}, "run.out"),
        ({"SLURM_JOB_STDOUT": "%x-%6j.out"}, "a name-000007.out"),
        ({"SLURM_JOB_STDOUT": "/dev/null", "SLURM_JOB_STDERR": "%j.err"}, "7.err"),
        ({}, "slurm-7.out"),
    ],
    ids=["plain", "pattern", "error", "default"],
)
def test_the_log_tells_the_progress_where_nothing_better_does(
    node: Node, home: Path, told: dict[str, str], name: str
) -> None:
    (home / name).write_text("step=41 loss=2\nstep=42 loss=2\nTraceback\n")
    told = {**told, "SLURM_JOB_WORK_DIR": str(home)}
    record = epilog(node, "recovery=requeue", uid=NOBODY, **told)
    assert codes(record)["progress.seen"]["step"] == 42


@as_root
def test_a_link_to_a_file_that_only_root_can_read_gives_nothing_away(
    node: Node, home: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("step=987654\n")
    (home / "step").symlink_to(secret)
    (home / "run.log").symlink_to(secret)
    (home / "ckpt").symlink_to(tmp_path)
    record = epilog(
        node,
        f"recovery=requeue,progress={home}/step,logs={home}/*.log,checkpoint={home}/ckpt",
    )
    assert "987654" not in json.dumps(record)
    assert "progress.seen" not in codes(record)


@as_root
def test_a_fifo_in_the_place_of_a_file_neither_hangs_nor_wakes_its_writer(
    node: Node, home: Path
) -> None:
    os.mkfifo(home / "step", 0o666)
    os.mkfifo(home / "run.log", 0o666)
    writer = subprocess.Popen(["sh", "-c", f"echo step=5 > {home}/step"])
    try:
        record = epilog(node, f"recovery=requeue,progress={home}/step,logs={home}/*.log")
        assert "progress.seen" not in codes(record)
        assert "checkpoint.unseen" not in codes(record)
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()


@as_root
def test_the_child_that_reads_has_no_right_of_root_left(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    secret.chmod(0o600)

    def look() -> bytes:
        told: dict[str, Any] = {"ids": [*os.getresuid(), *os.getresgid(), *os.getgroups()]}
        for name, attempt in (
            ("read", lambda: secret.read_text()),
            ("setuid", lambda: os.setuid(0)),
            ("setgroups", lambda: os.setgroups([0])),
            ("write", lambda: Path(f"/tmp/written-by-{os.getpid()}").write_text("x")),
        ):
            try:
                attempt()
                told[name] = "done"
            except OSError as error:
                told[name] = type(error).__name__
        status = Path("/proc/thread-self/status")
        try:
            told["privileges"] = "NoNewPrivs:\t1" in status.read_text()
        except OSError:
            told["privileges"] = True  # not dumpable: even its own /proc is closed to it
        return json.dumps(told).encode()

    outcome = as_user.look(NOBODY, look, 10)
    assert outcome.status == "ok", outcome
    told = json.loads(outcome.output)
    assert 0 not in told.pop("ids")
    assert told == {
        "read": "PermissionError",
        "setuid": "PermissionError",
        "setgroups": "PermissionError",
        "write": "OSError",
        "privileges": True,
    }
    assert os.geteuid() == 0


def test_files_of_roots_jobs_and_of_unknown_users_are_not_read() -> None:
    for uid in (0, 3_999_999_998):
        outcome = as_user.look(uid, lambda: b"read", 10)
        assert outcome.status == "error"
        assert "NotAllowed" in (outcome.detail or "")


@as_root
def test_a_user_who_cannot_be_acted_for_is_told_and_not_taken_for_a_broken_checkpoint(
    node: Node, home: Path
) -> None:
    record = epilog(node, f"recovery=requeue,checkpoint={home}", uid=3_999_999_998)
    found = codes(record)
    assert "no user" in found["checkpoint.unseen"]["summary"]
    assert "checkpoint.all_broken" not in found


def test_a_job_that_did_not_opt_in_has_none_of_its_files_read(node: Node, home: Path) -> None:
    (home / "run.out").write_text("step=42\n")
    record = epilog(node, f"checkpoint={home}", SLURM_JOB_STDOUT=f"{home}/run.out")
    assert record["findings"] == []


def test_a_mistake_in_a_comment_is_in_the_record_for_its_owner(node: Node) -> None:
    found = codes(epilog(node, "recovery=requeue,max_restart=1"))
    assert "did you mean 'max_restarts'?" in found["optin.problem"]["summary"]


@as_root
def test_only_the_batch_host_reads_a_jobs_files(tmp_path: Path, home: Path) -> None:
    shutil.copyfile(SAMPLES / "zip.pt", home / "step_100.pt")
    other = watching(Node(tmp_path, name="n2"))
    comment = f"recovery=requeue,checkpoint={home}"
    assert codes(epilog(other, comment)) == {}
    other.run("prolog", **{**job(comment=comment), "SLURM_JOB_UID": str(NOBODY)})
    kept = other.buffer.rglob("checkpoint.json")
    assert [json.loads(path.read_text())["jobs"] for path in kept] in ([], [[]])


@as_root
def test_a_health_check_reports_running_jobs_that_a_prolog_has_seen(node: Node, home: Path) -> None:
    (home / "step").write_text("10\n")
    comment = f"recovery=requeue,progress={home}/step"
    told = {**job(job_id=4_000_001, comment=comment), "SLURM_JOB_UID": str(NOBODY)}
    node.run("prolog", **told)
    node.run("health_check")
    assert node.records() == []  # its batch step does not run here
    # slurmstepd's title of a batch step, as ps shows it (22.05 to 26.05)
    title = "slurmstepd: [4000001.batch]"
    step = subprocess.Popen(["bash", "-c", f"exec -a '{title}' sleep 60"])
    try:
        for number in (10, 20):
            (home / "step").write_text(f"{number}\n")
            assert node.run("health_check").status == 0
            finding = codes(node.records()[-1])["progress.seen"]
            assert (finding["step"], finding["job_id"]) == (number, 4_000_001)
    finally:
        step.kill()
        step.wait()
