"""``recovery doctor`` on the controller says what would not work, and how to mend it."""

from __future__ import annotations

import json
import os
import pwd
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from recovery.demo.cluster import Cluster

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=2, gpus=0, health_check_seconds=3600) as running:
        running.wait(
            lambda: all(beat(running, node).exists() for node in running.node_names),
            60,
            "each slurmd has run its health check once",
        )
        yield running


def beat(cluster: Cluster, node: str) -> Path:
    return cluster.spool / "heartbeat" / f"{node}.json"


def doctor(cluster: Cluster) -> tuple[int, dict[str, dict[str, str]]]:
    """Return the exit status, and each check by its subject."""
    done = cluster.run("recovery", "doctor", "--json", check=False)
    document = json.loads(done.stdout)
    assert document["schema"] == "doctor/v1"
    checks = {check["subject"]: check for check in document["checks"]}
    assert all(check["mend"] for check in checks.values() if check["status"] != "ok")
    return done.returncode, checks


def test_a_cluster_that_works_is_said_to_work(cluster: Cluster) -> None:
    with cluster.aggregator():
        published = cluster.spool / "control" / "effective.json"
        cluster.wait(published.exists, 60, "the aggregator publishes")
        status, checks = doctor(cluster)
    assert status == 0
    assert {check["status"] for check in checks.values()} == {"ok"}, checks
    assert "2 in service" in checks["nodes"]["says"]
    lines = cluster.run("recovery", "doctor").stdout.splitlines()
    too_long = [line for line in lines if len(line) > 80]
    assert not [line for line in too_long if " " in line[28:].strip()], too_long


def test_a_silent_node_and_a_wrong_clock_are_named(cluster: Cluster) -> None:
    originals = {node: beat(cluster, node).read_bytes() for node in cluster.node_names}
    try:
        for node, told, written in (("n1", -14_400, -14_400), ("n2", 200, 0)):
            document = json.loads(originals[node])
            moment = datetime.now(timezone.utc) + timedelta(seconds=told)
            document["time"] = moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            beat(cluster, node).write_text(json.dumps(document), "utf-8")
            os.utime(beat(cluster, node), (time.time() + written,) * 2)
        status, checks = doctor(cluster)
    finally:
        for node, content in originals.items():
            beat(cluster, node).write_bytes(content)
    assert status == 1
    assert (checks["nodes"]["status"], checks["nodes"]["says"][-2:]) == ("broken", "n1")
    assert checks["clocks"]["status"] == "broken"
    assert checks["clocks"]["says"].startswith("n2: up to 200 s")


def test_a_node_with_another_munge_key_is_named(cluster: Cluster, tmp_path: Path) -> None:
    socket = cluster.layout.munge_socket
    cluster.configure(f'[spool]\nauthenticate = "munge"\nmunge_socket = "{socket}"\n')
    originals = {node: beat(cluster, node).read_bytes() for node in cluster.node_names}
    for node, content in originals.items():
        (tmp_path / "beat").write_bytes(content)
        sealed = cluster.run("munge", f"--socket={socket}", f"--input={tmp_path}/beat").stdout
        beat(cluster, node).write_text(sealed, "ascii")
    # What another key makes of it, as unmunge sees it: a credential whose MAC is wrong.
    spoiled = beat(cluster, "n1").read_text("ascii")
    beat(cluster, "n1").write_text(f"{spoiled[:40]}AAAA{spoiled[44:]}", "ascii")
    try:
        status, checks = doctor(cluster)
    finally:
        cluster.configure("")
        for node, content in originals.items():
            beat(cluster, node).write_bytes(content)
    assert (status, checks["heartbeats"]["status"]) == (1, "broken")
    assert "n1.json is ignored" in checks["heartbeats"]["says"]
    assert "munge.key" in checks["heartbeats"]["mend"]
    assert checks["nodes"]["says"].endswith(": n1")


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
def test_a_spool_that_others_could_write_is_not_authentic(cluster: Cluster) -> None:
    incoming = cluster.spool / "incoming"
    incoming.chmod(0o777)
    status, checks = doctor(cluster)
    incoming.chmod(0o755)
    assert (status, checks["spool"]["status"]) == (1, "broken")
    assert checks["spool"]["mend"] == f"chmod go-w {incoming}"
    os.chown(incoming, pwd.getpwnam("nobody").pw_uid, -1)
    status, checks = doctor(cluster)
    os.chown(incoming, 0, -1)
    assert (status, checks["spool"]["status"]) == (1, "broken")
    assert "not trusted" in checks["spool"]["says"]


def test_a_spool_that_is_away_is_no_empty_one(cluster: Cluster) -> None:
    away = cluster.spool.with_name("away")
    cluster.spool.rename(away)
    try:
        status, checks = doctor(cluster)
    finally:
        away.rename(cluster.spool)
    assert (status, checks["spool"]["status"]) == (1, "broken")
    assert "recovery init" in checks["spool"]["mend"]


def test_settings_with_which_nothing_would_be_recovered_are_found() -> None:
    wrong = "\n".join(
        ("MinJobAge=60", "JobRequeue=0", "PrologEpilogTimeout=4", "HealthCheckNodeState=IDLE")
    )
    config = '[controller]\ncluster = "other"\n'
    with Cluster(nodes=1, gpus=0, slurm_conf_extra=wrong, config=config) as broken:
        status, checks = doctor(broken)
    assert status == 1
    found = {name: check["status"] for name, check in checks.items() if check["status"] != "ok"}
    assert found == {
        "aggregator": "warning",
        "cluster": "broken",
        "time-outs": "broken",
        "health checks": "warning",
        "JobRequeue": "warning",
        "MinJobAge": "broken",
    }


def test_a_slurm_without_hooks_is_found(cluster: Cluster) -> None:
    with Cluster(nodes=1, gpus=0, hooks=False) as bare:
        status, checks = doctor(bare)
    assert (status, checks["Epilog"]["status"]) == (1, "broken")
    assert checks["nodes"]["status"] == "warning"


def test_a_controller_that_does_not_answer_is_said_so(cluster: Cluster) -> None:
    done = cluster.run(
        "recovery", "doctor", check=False, env={"SLURM_CONF": "/nonexistent/slurm.conf"}
    )
    assert done.returncode == 1
    assert "broken  Slurm" in done.stdout
    assert "systemctl status slurmctld" in done.stdout
