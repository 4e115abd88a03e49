"""A node that Slurm loses: the restart that Slurm makes by itself is adopted, not repeated."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from recovery.demo.cluster import Cluster
from tests.failing_job import (
    ACT,
    OPTED_IN,
    SLURM_CONF,
    WAIT_SECONDS,
    submit,
    tidy,
    wait_for_a_full_look,
)

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3, 8, config=ACT, slurm_conf_extra=SLURM_CONF, health_check_seconds=0) as running:
        yield running


def test_a_job_whose_node_is_lost_runs_again_without_it_and_without_a_requeue_of_ours(
    cluster: Cluster,
) -> None:
    with cluster.aggregator() as service:
        job = submit(cluster)
        cluster.wait(lambda: job.state == "RUNNING", WAIT_SECONDS, "it runs")
        lost = job.node
        passes = service.said().count("decided")
        # What a full look has seen running is known to have been lost when it runs no longer.
        wait_for_a_full_look(cluster)
        before = cluster.mutations()
        cluster.run("scontrol", "update", f"nodename={lost}", "state=down", "reason=power")
        cluster.wait(job.finished, WAIT_SECONDS, "it finishes elsewhere")
        decision = job.decision()
        changed = cluster.mutations() - before
        assert service.said().count("decided") == passes + 1
    assert job.node != lost
    assert decision["cause"]["fault_class"] == "node.lost"
    assert decision["requeued"]
    assert decision["job"]["excluded"] == [lost]
    assert [(node["node"], node["verdict"]) for node in decision["nodes"]] == [(lost, "watch")]
    assert changed["REQUEST_JOB_REQUEUE"] == 0, "Slurm has requeued it already"
    assert cluster.node(lost)["Reason"].startswith("power"), "the person's reason stands"
    tidy(cluster)


def test_a_job_that_a_person_requeues_is_left_to_them(cluster: Cluster) -> None:
    with cluster.aggregator() as service:
        job = submit(cluster)
        cluster.wait(lambda: job.state == "RUNNING", WAIT_SECONDS, "it runs")
        wait_for_a_full_look(cluster)
        cluster.run("scontrol", "requeue", str(job.id))
        cluster.wait(lambda: job.shown()["Restarts"] == "1", WAIT_SECONDS, "it is requeued")
        before = cluster.mutations()
        wait_for_a_full_look(cluster)
        assert not cluster.mutations() - before
        assert f"job {job.id}" not in service.said()
    cluster.run("scancel", str(job.id))
    tidy(cluster)


def test_the_log_of_a_job_whose_batch_host_died_is_read_by_its_next_node(cluster: Cluster) -> None:
    for node in cluster.node_names:
        if cluster.node(node)["State"].startswith("DOWN"):
            cluster.run("scontrol", "update", f"nodename={node}", "state=resume")
    folder = cluster.folder / "batch-host-dies"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    script = folder / "job.sh"
    script.write_text(
        "#!/bin/sh\n"
        'echo "Traceback (most recent call last):"\n'
        "echo \"KeyError: 'shard-0007'\"\n"
        "touch ready\n"
        "srun sleep 600\n"
    )
    job_id = cluster.submit(
        *("--nodes=3", "--no-requeue", f"--comment={OPTED_IN}", f"--chdir={folder}"),
        script,
        user="nobody",
    )
    cluster.wait((folder / "ready").exists, WAIT_SECONDS, "it runs")
    lost = cluster.job(job_id)["BatchHost"]
    cluster.stop_node(lost, signal.SIGKILL)
    for process in psutil.process_iter(["cwd"]):
        # By the job's folder: another cluster on this machine may have a job of the same number.
        parent = process.parent() if process.info["cwd"] == str(folder) else None
        if parent and parent.cmdline() == [f"slurmstepd: [{job_id}.batch]"]:
            parent.kill()
            break
    cluster.run("scontrol", "update", f"nodename={lost}", "state=down", "reason=power")

    def taken_over() -> dict[str, Any] | None:
        for path in (cluster.spool / "incoming").glob("*.json"):
            record = json.loads(path.read_bytes())
            if record["hook"] == "epilog" and (record["job"] or {}).get("id") == job_id:
                for finding in record["findings"]:
                    if finding["code"].startswith("log."):
                        return {"node": record["node"], **finding}
        return None

    found = cluster.wait(taken_over, WAIT_SECONDS, "another node's epilog reads the log")
    assert found["node"] != lost
    # srun has written into the same log which node was lost: that comes before all else.
    assert found["code"] in ("log.node_lost", "log.program_exception")
    cluster.start_node(lost)
    cluster.run("scontrol", "update", f"nodename={lost}", "state=resume")
    tidy(cluster)
