"""What the aggregator asks Slurm for: everything now and then, and between only what is named.

Every command that it runs passes through a folder that stands first on its PATH, which notes the
command line and then runs the real one.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

import pytest

from recovery.acting import OUTCOME_SECONDS
from recovery.demo.cluster import Cluster
from tests import records
from tests.failing_job import (
    ACT,
    SLURM_CONF,
    WAIT_SECONDS,
    submit,
    tidy,
)

pytestmark = pytest.mark.slurm

# One full look at the start, and none after it while a test runs.
CONFIG = ACT.replace("snapshot = 2", "snapshot = 3600")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2, 8, config=CONFIG, slurm_conf_extra=SLURM_CONF, health_check_seconds=0) as one:
        told = one.folder / "asked"
        programs = one.folder / "noting"
        programs.mkdir()
        for name in ("squeue", "sinfo", "scontrol"):
            real = shutil.which(name, path=one.environment["PATH"])
            program = programs / name
            program.write_text(f'#!/bin/sh\necho {name} "$@" >>{told}\nexec {real} "$@"\n')
            program.chmod(0o755)
        yield one


def asked(cluster: Cluster) -> list[str]:
    """The commands of the aggregator so far."""
    path = cluster.folder / "asked"
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def noted(cluster: Cluster) -> Iterator[Cluster]:
    """An aggregator whose commands are noted, after its first full look."""
    (cluster.folder / "asked").unlink(missing_ok=True)
    plain = cluster.environment
    cluster.environment = {**plain, "PATH": f"{cluster.folder}/noting:{plain['PATH']}"}
    with cluster.aggregator():
        cluster.environment = plain
        cluster.wait(
            # From 23.02 on scontrol tells of nodes.
            lambda: any("sinfo" in one or "show nodes" in one for one in asked(cluster)),
            WAIT_SECONDS,
            "its first full look, at jobs and nodes",
        )
        yield cluster
    tidy(cluster)


def taken_in(cluster: Cluster) -> None:
    """Wait until every record has been taken in, and one more pass has been made."""
    incoming = cluster.spool / "incoming"
    cluster.wait(lambda: not list(incoming.glob("*.json")), WAIT_SECONDS, "records are taken in")
    last = passes(cluster)
    cluster.wait(lambda: passes(cluster) != last, WAIT_SECONDS, "another pass")


def passes(cluster: Cluster) -> str:
    said = cluster.run("recovery", "status", "--json").stdout
    return said.partition('"last_pass": "')[2][:27]


def test_an_idle_aggregator_asks_nothing_between_its_full_looks(noted: Cluster) -> None:
    start = len(asked(noted))
    healthy = [records.record(node, job=None, findings=()) for node in noted.node_names * 50]
    records.drop(noted.spool, *healthy)
    taken_in(noted)
    assert asked(noted)[start:] == [], "a hundred records that name no trouble cost no command"
    assert sum("squeue" in one for one in asked(noted)) == 1, "and the full look was one"


def test_a_failed_job_costs_commands_that_name_it_and_no_full_look_at_all_jobs(
    noted: Cluster,
) -> None:
    job = submit(noted)
    start = len(asked(noted))
    job.lose_gpu()
    noted.wait(job.finished, WAIT_SECONDS, "it finishes elsewhere")
    job.decision()
    commands = asked(noted)[start:]
    looks = [one for one in commands if one.startswith("squeue")]
    assert looks, commands
    assert {one for one in looks if f"--jobs={job.id}" not in one} == set()
    changes = [
        one.split()[1]
        for one in commands
        if one.startswith(("scontrol update", "scontrol requeue"))
    ]
    assert sorted(changes) == ["requeue", "update", "update"], "drain, requeue, start"


def test_a_restarted_job_that_runs_on_is_not_asked_for_again_and_again(noted: Cluster) -> None:
    """It is followed by the full looks; by name only shortly after somebody has named it."""
    job = submit(noted)
    (job.folder / "always").touch()
    job.fail("rm fail; exit 1")
    noted.wait(lambda: job.attempts() == 2, WAIT_SECONDS, "it runs again")
    job.decision()
    start, began = len(asked(noted)), time.monotonic()
    for _ in range(10):
        taken_in(noted)
    looks = [one for one in asked(noted)[start:] if one.startswith("squeue")]
    most = (time.monotonic() - began) / OUTCOME_SECONDS + 2
    assert len(looks) <= most, "there were ten passes and more"
