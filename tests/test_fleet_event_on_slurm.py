"""On a real Slurm: storage goes away under all jobs at once, and one decision speaks for them all.

Among them one node loses a GPU of its own at the same moment: that is its own fault, and it goes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from recovery.demo.cluster import Cluster
from tests.failing_job import (
    ACT,
    SLURM_CONF,
    WAIT_SECONDS,
    FailingJob,
    actions,
    decisions,
    submit,
    wait_for_a_full_look,
)

pytestmark = pytest.mark.slurm

NODES = 7
NODE = "REQUEST_UPDATE_NODE"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(
        NODES, 8, config=ACT, slurm_conf_extra=SLURM_CONF, health_check_seconds=0
    ) as running:
        yield running


def notices(cluster: Cluster) -> list[dict[str, Any]]:
    path = cluster.folder / "told"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def telling(cluster: Cluster) -> str:
    """Configuration of a program that keeps the notices that it is given.

    A busy machine's epilogs may report many seconds apart; once enough have, nobody waits on.
    """
    program = cluster.folder / "tell"
    program.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"open({str(cluster.folder / 'told')!r}, 'a').write(sys.stdin.read() + '\\n')\n"
    )
    program.chmod(0o755)
    return f'[notify]\ncommand = ["{program}"]\n[fleet]\ngather = 60\n'


def event(cluster: Cluster) -> dict[str, Any] | None:
    found = [one for one in decisions(cluster) if one["members"]]
    assert len(found) <= 1, "one cause, one event"
    return found[0] if found else None


def test_storage_that_goes_away_is_one_decision_with_members_no_drain_and_one_notice(
    cluster: Cluster,
) -> None:
    config = ACT + telling(cluster)
    cluster.configure(config)
    with cluster.aggregator():
        jobs = [submit(cluster, wait=False) for _ in range(NODES)]
        for job in jobs:
            job.wait_for("RUNNING")
        broken, hit = jobs[0], jobs[1:]
        # From now on every epilog looks for a mount that is gone.
        cluster.configure(f'{config}[probes.storage]\nmounts = ["{cluster.folder}/gone"]\n')
        before = cluster.mutations()
        bad = broken.lose_gpu()
        for job in hit:
            job.fail("exit 1")
        for job in hit:
            job.wait_for("SPECIAL_EXIT")
        cluster.wait(broken.finished, WAIT_SECONDS, "what one broken GPU hit runs again elsewhere")
        cluster.wait(lambda: notices(cluster), WAIT_SECONDS, "somebody is told")
        followers = [job.decision() for job in hit]
        alone = broken.decision()
        wait_for_a_full_look(cluster)
        changed = cluster.mutations() - before
        made = event(cluster)
        told = " ".join(cluster.run("recovery", "explain", str(made and made["id"])).stdout.split())
        status = cluster.run("recovery", "status").stdout
        listed = json.loads(cluster.run("recovery", "decisions", "--json").stdout)["decisions"]
    assert made is not None
    assert made["incident"] == "fleet/storage"
    assert {one["fleet"] for one in followers} == {made["id"]}
    assert {one["job"]["verdict"] for one in followers} == {"hold"}
    members = {one["subject"] for one in made["members"]}
    assert {f"job {job.id}" for job in hit} <= members
    assert f"job {broken.id}" not in members
    assert {one["subject"] for one in made["members"] if one["decision"]} == {
        f"job {job.id}" for job in hit
    }
    assert changed[NODE] == 1, "the node of the broken GPU, and no other"
    drained = {node for node in cluster.node_names if "DRAIN" in cluster.node(node)["State"]}
    assert drained == {bad}
    assert actions(alone) == {f"drain {bad}": "verified", f"requeue {broken.id}": "verified"}
    about_it = [one for one in notices(cluster) if one["decision"] == made["id"]]
    assert len(about_it) == 1
    assert not [n for n in notices(cluster) if n["decision"] in {one["id"] for one in followers}]
    assert f"recovery explain {made['id']} names the jobs to release" in about_it[0]["what"]
    assert f"members: {len(hit)} jobs" in told
    assert "NEEDS YOU   fleet event storage of" in status
    assert [one["id"] for one in listed if one["cause"]["fault_class"] == "storage"] == [made["id"]]
    comment = hit[0].shown()["AdminComment"]
    assert made["id"] in comment
    assert "to be run again once it is mended" in comment


def test_once_it_is_mended_one_command_releases_them_all(cluster: Cluster) -> None:
    made = event(cluster)
    assert made is not None
    cluster.configure(ACT)
    jobs = [one["subject"].split()[1] for one in made["members"] if one["verdict"] == "hold"]
    told = " ".join(cluster.run("recovery", "explain", made["id"]).stdout.split())
    command = f"scontrol release {','.join(jobs)}"
    assert command in told
    cluster.run(*command.split())
    for number in jobs:
        job = FailingJob(cluster, int(number), cluster.folder)
        cluster.wait(job.finished, WAIT_SECONDS, "it runs again, and finishes")
