"""The aggregator runs as SlurmUser, who is not root: it acts as root's does, and says its limits.

A real Slurm whose slurmctld runs as an account of its own; slurmd and its hooks run as root.
"""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterator
from typing import Any

import pytest

from recovery.demo.cluster import Cluster
from tests.failing_job import ACT, SLURM_CONF, WAIT_SECONDS, actions, decisions, submit

USER = "daemon"
UID = pwd.getpwnam(USER).pw_uid

STRANGER = "bin"

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.smoke,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root starts what runs as somebody else"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(
        2, 8, config=ACT, slurm_conf_extra=SLURM_CONF, slurm_user=USER, health_check_seconds=0
    ) as running:
        try:
            running.run("recovery", "--help", user=USER)
        except PermissionError:
            pytest.skip(f"{USER} may not enter the folders that this checkout lies in")
        yield running


def one_pass(cluster: Cluster, user: str = USER) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        cluster.run("recovery", "once", "--json", user=user).stdout
    )
    return document


def test_it_drains_requeues_and_holds_as_root_does(cluster: Cluster) -> None:
    settings = cluster.run("scontrol", "show", "config").stdout
    assert f"{USER}({UID})" in settings, "this is about another SlurmUser than root"

    sick, wrong = submit(cluster), submit(cluster)
    bad = sick.lose_gpu()
    wrong.fail("/usr/bin/python3 -c 'raise ValueError(\"bad batch size -1\")'")

    def settled() -> bool:
        assert one_pass(cluster)["problems"] == []
        made = [one["actions"] for one in decisions(cluster)]
        return len(made) == 2 and all(
            action["state"] == "verified" for each in made for action in each
        )

    cluster.wait(settled, WAIT_SECONDS, "both are decided and acted on")
    done = {name: state for one in decisions(cluster) for name, state in actions(one).items()}
    assert done == {
        f"drain {bad}": "verified",
        f"requeue {sick.id}": "verified",
        f"hold {wrong.id}": "verified",
    }
    assert cluster.node(bad)["Reason"].startswith("recovery: ")
    assert f"[{USER}@" in cluster.node(bad)["Reason"], "Slurm names who drained it"
    assert wrong.shown()["AdminComment"].startswith("recovery: ")
    # What root's hooks wrote has been taken in and archived by an account that is not root.
    cluster.wait(sick.finished, WAIT_SECONDS, "it finishes elsewhere")

    def taken_in() -> bool:
        one_pass(cluster)
        return not list((cluster.spool / "incoming").glob("*.json"))

    cluster.wait(taken_in, WAIT_SECONDS, "the last epilog's record is taken in as well")
    assert {path.owner() for path in (cluster.spool / "archive").rglob("*.jsonl")} == {USER}


def test_the_doctor_knows_what_the_account_may_do(cluster: Cluster) -> None:
    def account(user: str) -> tuple[str, str]:
        told = cluster.run("recovery", "doctor", "--json", check=False, user=user)
        checks = json.loads(told.stdout)["checks"]
        (one,) = [check for check in checks if check["subject"] == "account"]
        return one["status"], one["says"]

    assert account(USER) == ("ok", f"{USER}: may drain, hold and requeue")
    status, says = account(STRANGER)
    assert status == "warning"
    assert f"{STRANGER} is neither root nor SlurmUser ({USER})" in says


def test_a_folder_that_root_keeps_from_it_is_named_and_nothing_is_lost(cluster: Cluster) -> None:
    incoming = cluster.spool / "incoming"
    (incoming / "left").write_text("x")
    incoming.chmod(0o700)
    os.chown(incoming, 0, 0)
    try:
        problems = one_pass(cluster)["problems"]
    finally:
        os.chown(incoming, UID, -1)
        incoming.chmod(0o755)
    assert any(str(incoming) in text and "Permission denied" in text for text in problems), problems
    assert (incoming / "left").exists()
