"""A noncritical job is interrupted on a real Slurm, and whether it resumed is told truly."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recovery.demo.cluster import Cluster
from recovery.demo.training import Training
from tests.failing_job import ACT, NOBODY, SLURM_CONF, WAIT_SECONDS, tidy

pytestmark = pytest.mark.slurm

_SCRIPT = """#!/bin/sh
step=$(cat step 2>/dev/null || echo 0)
[ -e forgetful ] && [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && sleep 600
while [ "$step" -lt "$1" ]; do
    step=$((step + 1))
    echo "$step" > step.new && mv step.new step
    sleep 0.1
done
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with Cluster(4, 4, config=ACT, slurm_conf_extra=SLURM_CONF, health_check_seconds=0) as running:
        yield running


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    with shared.aggregator():
        yield shared
    tidy(shared)


def submit(cluster: Cluster, steps: int, extra: str = ",noncritical=yes") -> tuple[int, Path]:
    """A job that counts to ``steps`` and goes on where it was."""
    folder = Path(tempfile.mkdtemp(dir=cluster.folder, prefix="counts-"))
    script = folder / "job.sh"
    script.write_text(_SCRIPT)
    for path in (folder, script):
        path.chmod(0o755)
    given = [f"--chdir={folder}", f"--comment=recovery=requeue,progress=step{extra}"]
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
        given = [f"--uid={NOBODY}", *given]
    job = cluster.submit(*given, script, str(steps))
    counts = folder / "step"
    cluster.wait(counts.exists, WAIT_SECONDS, "it counts")
    return job, folder


def drill(cluster: Cluster, job: int, *options: str, status: int = 0) -> dict[str, Any]:
    done = cluster.run(
        "recovery", "drill", str(job), "--json", "--timeout=120", *options,
        check=False, timeout_seconds=300,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def test_a_killed_job_is_noticed_restarted_resumed_and_its_output_checked(
    cluster: Cluster,
) -> None:
    job, folder = submit(cluster, 100)
    told = drill(cluster, job, f"--check=grep -qx 100 {folder}/step")
    names = [step["name"] for step in told["steps"]]
    assert names == ["interrupted", "noticed", "restarted", "resumed", "ended", "output"]
    assert told["kept"] is True
    assert cluster.job(job)["Restarts"] == "1"


def test_a_job_put_elsewhere_runs_off_its_first_node(cluster: Cluster) -> None:
    job, _ = submit(cluster, 100)
    first = cluster.job(job)["BatchHost"]
    assert drill(cluster, job, "--kind=exclude")["kept"] is True
    assert cluster.job(job)["BatchHost"] != first


def test_a_job_that_does_not_resume_and_output_that_is_not_usable_are_told(
    cluster: Cluster,
) -> None:
    job, folder = submit(cluster, 10_000)
    (folder / "forgetful").touch()
    told = drill(cluster, job, "--kind=requeue", "--timeout=12", status=1)
    assert [(one["name"], one["kept"]) for one in told["steps"]][-1] == ("resumed", False)
    job, folder = submit(cluster, 60)
    reference = cluster.folder / "reference"
    reference.write_text("61\n")
    told = drill(
        cluster, job, "--kind=requeue", f"--check=grep -qx 7 {folder}/step",
        f"--reference={reference}", "--output=step", status=1,
    )  # fmt: skip
    steps = [(one["name"], one["kept"]) for one in told["steps"]]
    assert steps[-2:] == [("output", False), ("weights", False)]
    assert told["steps"][-1]["detail"].startswith("reference differs, sha256 ")


@pytest.mark.skipif(os.geteuid() != 0, reason="whoever is not root reads its own files alone")
def test_a_reference_that_the_owner_may_not_read_is_read_by_nobody(cluster: Cluster) -> None:
    job, _ = submit(cluster, 10_000)
    secret = cluster.folder / "secret"
    secret.write_text("60\n")
    secret.chmod(0o600)
    before = cluster.mutations()
    alone = cluster.run("recovery", "drill", str(job), f"--reference={secret}", check=False)
    assert alone.returncode == 2
    assert "--reference and --output belong together" in alone.stderr
    both = (f"--reference={secret}", "--output=step")
    done = cluster.run("recovery", "drill", str(job), *both, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "nothing to compare with" in done.stderr
    assert "Permission denied" in done.stderr
    assert not cluster.mutations() - before, "it is not interrupted"


def test_a_job_whose_owner_did_not_allow_it_is_not_touched(cluster: Cluster) -> None:
    job, _ = submit(cluster, 10_000, extra="")
    before = cluster.mutations()
    done = cluster.run("recovery", "drill", str(job), check=False)
    assert done.returncode == 1
    assert "noncritical=yes" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not cluster.mutations() - before
    assert cluster.job(job)["JobState"] == "RUNNING"


def test_a_resumed_training_ends_with_the_weights_of_one_that_nothing_interrupted(
    cluster: Cluster,
) -> None:
    training = Training(cluster)
    # GPUs are shown by a task prolog, which this cluster is without.
    steps = ("--steps=70", "--save-every=5", "--no-gpu-check")
    healthy = training.submit("healthy", *steps, "--step-seconds=0.01")
    cluster.wait(lambda: healthy.weights, WAIT_SECONDS, "the reference is there")
    drilled = training.submit("drilled", *steps, "--step-seconds=0.2")
    comment = f"recovery=requeue,noncritical=yes,progress={drilled.folder}/progress"
    cluster.run("scontrol", "update", f"job={drilled.job_id}", f"comment={comment}")
    cluster.wait(lambda: drilled.step, WAIT_SECONDS, "it trains")
    reference = healthy.folder / "final.json"
    compared = (f"--reference={reference}", f"--output={drilled.folder}")
    told = drill(cluster, drilled.job_id, *compared)
    names = [step["name"] for step in told["steps"]]
    assert names == ["interrupted", "noticed", "restarted", "resumed", "ended", "weights"]
    assert told["steps"][-1]["detail"].startswith("final.json as in the reference, sha256 ")
    assert drilled.attempts == 2
