"""What slurmd's own hooks see, and that nothing they meet delays or stops a job.

Real slurmctld and slurmd with two nodes of eight fake GPUs; each test finds them idle and healthy.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest

from recovery.demo.cluster import Cluster
from slurm_hooks import spool

pytestmark = pytest.mark.slurm

SCHEMA = Path(__file__).parents[1] / "slurm_hooks/schemas/fault-record-v1.json"

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus."

BUDGET_SECONDS = 2.0
BUDGET = f"[hooks]\nbudget = {{prolog = {BUDGET_SECONDS}, epilog = {BUDGET_SECONDS}}}\n"

SLURM_SECONDS = 4.0
"""What Slurm and a busy machine may take for starting a job, or for starting its epilogs."""

WAIT_SECONDS = 40.0

NOBODY = 65534

Record = dict[str, Any]
Validate = Callable[[object], object]


@pytest.fixture(scope="module")
def validate() -> Validate:
    checked: Validate = fastjsonschema.compile(json.loads(SCHEMA.read_text()))
    return checked


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    # A health check would take a line of the kernel log from the prolog that is to see it.
    with Cluster(nodes=2, gpus=8, health_check_seconds=0) as cluster:
        spool.create(cluster.spool)
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """Two idle, healthy nodes, an empty spool and the configuration that the cluster has itself."""
    yield shared
    shared.configure("")
    shared.run("scancel", "--user", "root" if os.geteuid() == 0 else str(os.geteuid()))
    shared.wait(lambda: not shared.run("squeue", "--noheader").stdout, WAIT_SECONDS, "no jobs")
    for node in shared.node_names:
        shared.mend_gpus(node)
    for path in (shared.spool / "incoming").iterdir():
        path.unlink()


@pytest.fixture
def theirs(cluster: Cluster) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Give the job's user a folder; return it with the options that submit a job as that user.

    A job of root has none of its files read, so root submits as somebody else.
    """
    folder = cluster.folder / "theirs"
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
        yield folder, (f"--uid={NOBODY}", f"--chdir={folder}")
    else:
        yield folder, (f"--chdir={folder}",)
    shutil.rmtree(folder)


def records(cluster: Cluster, **fields: object) -> list[Record]:
    """Return the spool's records whose fields, or whose job's, are these."""
    found = []
    for path in sorted((cluster.spool / "incoming").glob("*.json")):
        record = json.loads(path.read_bytes())
        known = {**record, "job_id": (record["job"] or {}).get("id")}
        known["restart"] = (record["job"] or {}).get("restart")
        if all(known[name] == value for name, value in fields.items()):
            found.append(record)
    return found


def record(cluster: Cluster, **fields: object) -> Record:
    """Wait for a record with these fields and return it."""
    told = cluster.wait(lambda: records(cluster, **fields), WAIT_SECONDS, f"a record of {fields}")
    return told[0]


def codes(told: Record) -> dict[str, Record]:
    """Return a record's findings by code."""
    return {finding["code"]: finding for finding in told["findings"]}


def told(cluster: Cluster) -> dict[str, Record]:
    """Return the findings of all records by code."""
    return {code: found for one in records(cluster) for code, found in codes(one).items()}


def status(told: Record, probe: str) -> str:
    """Return how a probe ended."""
    return next(str(one["status"]) for one in told["probes"] if one["name"] == probe)


def wait_for_end(cluster: Cluster, job: int) -> str:
    """Wait until a job is over, epilogs included, and return its state."""
    over = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
    cluster.wait(lambda: cluster.job(job)["JobState"] in over, WAIT_SECONDS, f"job {job} ends")
    return cluster.job(job)["JobState"]


def seconds_until_first_line(cluster: Cluster, *options: str) -> float:
    """Submit a job, wait for its end, and return how long its first line took to come."""
    began = cluster.work / "began"
    began.unlink(missing_ok=True)
    submitted = time.time()
    job = cluster.submit(*options, "--wrap", f"date +%s.%N > {began}")
    assert wait_for_end(cluster, job) == "COMPLETED"
    return float(began.read_text()) - submitted


def test_a_lost_gpu_is_seen_by_prolog_and_epilog_of_each_attempt(
    cluster: Cluster, validate: Validate
) -> None:
    cluster.break_gpu("n1", 3, "lost")
    cluster.log_kernel("n1", XID)
    went_on = cluster.work / "go"
    wait = f"while [ ! -e {went_on} ]; do sleep 0.05; done; exit 9"
    job = cluster.submit("-w", "n1", "--gpus-per-node=8", "--wrap", wait)
    seen = record(cluster, hook="prolog", job_id=job)
    cluster.log_kernel("n1", XID.replace("4711", "4712"))
    went_on.touch()
    told = [seen, record(cluster, hook="epilog", job_id=job)]
    assert wait_for_end(cluster, job) == "FAILED"
    cluster.run("scontrol", "requeue", str(job))
    cluster.wait(lambda: cluster.job(job)["JobState"] == "PENDING", WAIT_SECONDS, "it is pending")
    # In the second of its predecessor's end slurmd may refuse the attempt (measured on 22.05).
    cluster.run("scontrol", "update", f"job={job}", "StartTime=now+2")
    again = record(cluster, hook="prolog", job_id=job, restart=1)
    for one in (*told, again):
        validate(one)
        assert (one["node"], one["verdict"]) == ("n1", "fatal")
        assert one["cluster"] == "private"
        assert one["job"]["gpus"] == list(range(8))
        assert codes(one)["gpu.lost"]["gpu"] == 3
    assert [one["job"]["restart"] for one in (*told, again)] == [0, 0, 1]
    assert told[1]["job"]["exit"] == "9:0"
    for one in told:
        fell = codes(one)["gpu.fell_off_bus"]
        assert XID[:35] in fell["evidence"][0]["text"]
    assert "gpu.fell_off_bus" not in codes(again), "no line is told twice"
    assert "IDLE" in cluster.node("n2")["State"], "in monitor mode no node is drained"
    assert "DRAIN" not in cluster.node("n1")["State"]


def test_a_lost_gpu_is_seen_by_the_health_check_of_an_idle_node(validate: Validate) -> None:
    with Cluster(nodes=1, gpus=8, health_check_seconds=1) as cluster:
        spool.create(cluster.spool)
        beat = cluster.spool / "heartbeat" / "n1.json"
        cluster.wait(beat.exists, WAIT_SECONDS, "a healthy node's heartbeat")
        assert records(cluster) == []
        cluster.break_gpu("n1", 3, "lost")
        cluster.log_kernel("n1", XID)
        lost = record(cluster, hook="health_check", verdict="fatal")
        validate(lost)
        assert (lost["node"], lost["job"]) == ("n1", None)
        everything = cluster.wait(
            lambda: (
                {"gpu.lost", "gpu.fell_off_bus"}
                <= (found := {code for one in records(cluster) for code in codes(one)})
                and found
            ),
            WAIT_SECONDS,
            "both the device and its Xid are told",
        )
        assert everything
        assert codes(lost).get("gpu.lost", {"gpu": 3})["gpu"] == 3


@pytest.mark.parametrize(
    ("gpus", "ended"),
    [({"hang_seconds": 60}, "hang"), ({"crash": True}, "crash")],
)
def test_nvml_that_hangs_or_crashes_delays_no_job_beyond_the_budget(
    cluster: Cluster, validate: Validate, gpus: Record, ended: str
) -> None:
    cluster.configure(BUDGET)
    cluster.set_gpus("n1", {"count": 8, **gpus})
    assert seconds_until_first_line(cluster, "-w", "n1") < BUDGET_SECONDS + SLURM_SECONDS
    told = record(cluster, hook="prolog", node="n1")
    validate(told)
    assert status(told, "nvml") == ended
    assert status(told, "kernel_log") == "ok", "one probe's trouble is not another's"
    assert told["verdict"] == "ok", "a probe that does not answer is not yet a fault"


def test_a_broken_configuration_is_told_and_the_job_runs(
    cluster: Cluster, validate: Validate
) -> None:
    cluster.configure('[probes.nvml]\nexpct_gpus = "gres"\n')
    number = 1 + cluster.config_path.read_text().splitlines().index('expct_gpus = "gres"')
    job = cluster.submit("-w", "n1", "--wrap", "true")
    assert wait_for_end(cluster, job) == "COMPLETED"
    told = record(cluster, hook="prolog", job_id=job)
    validate(told)
    summary = codes(told)["hook.config_error"]["summary"]
    assert f"{cluster.config_path}:{number}: unknown key 'probes.nvml.expct_gpus'" in summary
    assert "did you mean 'expect_gpus'?" in summary
    assert "DRAIN" not in cluster.node("n1")["State"]


@contextlib.contextmanager
def missing(folder: Path) -> Iterator[None]:
    """Take a folder away for a while."""
    away = folder.with_name("away")
    folder.rename(away)
    try:
        yield
    finally:
        away.rename(folder)


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """Let a small file system of its own cover a folder for a while."""
    mount = ["mount", "-t", "tmpfs", "-o", f"{options},mode=0755", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root, and leave to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """Let a folder's file system have no room left for a while."""
    with mounted(folder, "size=64k"):
        with contextlib.suppress(OSError):
            (folder / ".filling").write_bytes(bytes(1 << 20))
        yield


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let a folder's file system refuse writing for a while."""
    with mounted(folder, "ro"):
        yield


@pytest.mark.parametrize("trouble", [missing, full, read_only])
def test_a_spool_that_takes_nothing_costs_a_job_nothing_and_no_record_is_lost(
    cluster: Cluster,
    validate: Validate,
    trouble: Callable[[Path], contextlib.AbstractContextManager[None]],
) -> None:
    cluster.configure(BUDGET)
    cluster.break_gpu("n1", 3, "lost")
    with trouble(cluster.spool / "incoming"):
        job = cluster.submit("-w", "n1", "--wrap", "true")
        assert wait_for_end(cluster, job) == "COMPLETED"
    assert "DRAIN" not in cluster.node("n1")["State"]
    assert records(cluster) == []
    cluster.mend_gpus("n1")
    later = cluster.submit("-w", "n1", "--wrap", "true")
    assert wait_for_end(cluster, later) == "COMPLETED"
    for hook in ("prolog", "epilog"):
        told = record(cluster, hook=hook, job_id=job)
        validate(told)
        assert codes(told)["gpu.lost"]["gpu"] == 3


def test_every_node_of_a_failed_job_reports_within_seconds_healthy_or_not(
    cluster: Cluster, validate: Validate, record_property: Callable[[str, object], None]
) -> None:
    ended = cluster.work / "ended"
    fail = f"srun true; date +%s.%N > {ended}; exit 5"
    job = cluster.submit("--nodes=2", "--gpus-per-node=8", "--wrap", fail)
    assert wait_for_end(cluster, job) == "FAILED"
    told = [record(cluster, hook="epilog", job_id=job, node=node) for node in ("n1", "n2")]
    names = [cluster.spool / "incoming" / f"{one['id']}.json" for one in told]
    seconds = max(name.stat().st_mtime for name in names) - float(ended.read_text())
    record_property("seconds_from_job_end_to_last_record", round(seconds, 2))
    assert seconds < SLURM_SECONDS
    for one in told:
        validate(one)
        assert one["job"]["exit"] == "5:0"
        assert one["job"]["nodes"] == "n[1-2]"
        assert {"gpu.lost"}.isdisjoint(codes(one))
        assert status(one, "nvml") == "ok"


def test_the_batch_host_tells_what_the_jobs_log_says(
    cluster: Cluster, theirs: tuple[Path, tuple[str, ...]], validate: Validate
) -> None:
    folder, as_user = theirs
    crash = folder / "crash.py"
    crash.write_text("def load(size):\n    raise ValueError(f'bad batch size {size}')\nload(-1)\n")
    job = cluster.submit(*as_user, "--nodes=2", "--wrap", f"python3 {crash}")
    assert wait_for_end(cluster, job) == "FAILED"
    told = {node: record(cluster, hook="epilog", job_id=job, node=node) for node in ("n1", "n2")}
    for one in told.values():
        validate(one)
    found = codes(told["n1"])["log.program_exception"]
    assert "bad batch size -1" in found["evidence"][0]["text"]
    assert found["job_id"] == job
    assert codes(told["n2"]) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can read what the job's user cannot")
def test_a_log_that_links_to_a_file_its_user_may_not_read_gives_nothing_away(
    cluster: Cluster, theirs: tuple[Path, tuple[str, ...]], validate: Validate
) -> None:
    folder, as_user = theirs
    secret = cluster.folder / "secret"
    secret.write_text("Traceback (most recent call last):\nRuntimeError: hunter2\n" * 9)
    secret.chmod(0o600)
    log, named = folder / "job.log", folder / "named.log"
    link = " && ".join(f"ln -sf {shlex.quote(str(secret))} {path}" for path in (log, named))
    wishes = f"recovery=requeue,logs={named},progress={named},checkpoint={named}"
    job = cluster.submit(
        *(*as_user, "-w", "n1", f"--output={log}", f"--comment={wishes}"),
        *("--wrap", f"{link}; exit 1"),
    )
    assert wait_for_end(cluster, job) == "FAILED"
    told = record(cluster, hook="epilog", job_id=job, node="n1")
    validate(told)
    assert log.is_symlink() and named.is_symlink(), "the job has set its trap"
    assert told["job"]["uid"] == NOBODY
    assert "Permission denied" in codes(told)["log.unreadable"]["summary"]
    places = (cluster.spool, cluster.layout.node("n1") / "buffer")
    written = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert written
    assert all(b"hunter2" not in path.read_bytes() for path in written)
