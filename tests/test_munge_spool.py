"""Records that travel sealed: the site's own munged, hooks that slurmd runs, and the aggregator."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.demo.cluster import Cluster
from slurm_hooks.config import MUNGE_PAYLOAD_BYTES, ConfigError, load
from slurm_hooks.record import new_id
from tests.node import PROGRAMS, Node, job

WAIT_SECONDS = 60.0

NOBODY = 65534


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def seal_on(node: Node, munge_socket: Path) -> None:
    """Let the node's hooks seal what they send, through the munged behind ``munge_socket``."""
    settings = f'[spool]\nauthenticate = "munge"\nmunge_socket = "{munge_socket}"\n'
    node.config.write_text(node.config.read_text().replace("[spool]\n", settings))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=1, gpus=8, health_check_seconds=1) as running:
        settings = f'authenticate = "munge"\nmunge_socket = "{running.layout.munge_socket}"\n'
        running.configure(f"[spool]\n{settings}")
        # Where a credential proves who wrote a file, anybody may write files.
        (running.spool / "incoming").chmod(0o1777)
        yield running


def archived(cluster: Cluster) -> str:
    return "".join(path.read_text() for path in (cluster.spool / "archive").rglob("*.jsonl"))


@pytest.mark.slurm
def test_what_hooks_seal_with_the_sites_munged_the_aggregator_opens(cluster: Cluster) -> None:
    number = cluster.submit("--wrap", "exit 7")
    incoming = cluster.spool / "incoming"
    cluster.wait(lambda: list(incoming.glob("*.json")), WAIT_SECONDS, "the epilog's record")
    beat = cluster.spool / "heartbeat" / "n1.json"
    for path in incoming.glob("*.json"):
        assert path.read_bytes().startswith(b"MUNGE:"), path.name
    cluster.wait(
        # The check that slurmd makes as it starts may have come before the settings.
        lambda: beat.read_bytes().startswith(b"MUNGE:"),
        WAIT_SECONDS,
        "a sealed heartbeat",
    )
    with cluster.aggregator():
        cluster.wait(lambda: f'"id":{number},' in archived(cluster), WAIT_SECONDS, "it is taken in")
        asked = ("recovery", "explain", str(number))
        cluster.wait(
            lambda: cluster.run(*asked, check=False).returncode == 0, WAIT_SECONDS, "a decision"
        )
    assert list((cluster.spool / "rejected").iterdir()) == []
    assert list(incoming.iterdir()) == []


@pytest.mark.slurm
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can seal as somebody else")
def test_what_a_user_of_the_cluster_forges_is_set_aside_with_the_reason(cluster: Cluster) -> None:
    forged = {"schema": "fault-record/v1", "id": new_id(), "node": "n1"}
    content = json.dumps(forged).encode()
    munge = ["munge", f"--socket={cluster.layout.munge_socket}"]
    sealed = subprocess.run(munge, input=content, capture_output=True, check=True, user=NOBODY)
    long = b"MUNGE:" + bytes(65) * (2 * MUNGE_PAYLOAD_BYTES // 65)
    reasons = {"sealed": "uid 65534 sealed it", "plain": "no MUNGE credential", "long": "the limit"}
    names = {new_id(): reason for reason in reasons}
    for name, kind in names.items():
        path = cluster.spool / "incoming" / f"{name}.json"
        path.write_bytes({"sealed": sealed.stdout.strip(), "plain": content, "long": long}[kind])
    rejected = cluster.spool / "rejected"
    with cluster.aggregator():
        cluster.wait(
            lambda: len(list(rejected.glob("*.why"))) == len(names), WAIT_SECONDS, "all are judged"
        )
    for name, kind in names.items():
        assert reasons[kind] in (rejected / f"{name}.json.why").read_text()
        assert name not in archived(cluster)


def test_a_munged_that_does_not_answer_costs_no_more_than_the_budget_and_no_record(
    node: Node,
) -> None:
    path = node.root / "socket"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        seal_on(node, path)
        node.config.write_text(node.config.read_text() + "[hooks]\nbudget = {epilog = 2}\n")
        run = node.run("epilog", **job(exit_code="1:0"))
    assert (run.status, run.stderr) == (0, "")
    assert run.seconds < 3, "the budget, and the start of a process on a busy machine"
    assert node.records() == [] and len(node.waiting()) == 1


def test_doctor_names_the_socket_where_no_munged_listens(node: Node) -> None:
    seal_on(node, node.root / "nobody")
    done = subprocess.run(
        [PROGRAMS / "slurm-hooks", "doctor"],
        env={**os.environ, "SLURM_RECOVERY_CONFIG": str(node.config)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    said, mend = done.stdout.partition("broken   munge ")[2].splitlines()[:2]
    assert "munge" in said
    assert f"{node.root}/nobody" in mend and "spool.munge_socket" in mend


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ('authenticate = "munge"\nmax_record_bytes = 1000000', "can be at most 716800"),
        ('munge_socket = "run/munge/socket"', "must be an absolute path"),
    ],
)
def test_settings_with_which_no_record_could_be_opened_are_refused(
    tmp_path: Path, settings: str, said: str
) -> None:
    path = tmp_path / "recovery.toml"
    path.write_text(f"[spool]\n{settings}\n")
    with pytest.raises(ConfigError, match=said):
        load(path)
