"""From watching to a trial on a real Slurm: what the guides say, typed as they say it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recovery.demo.cluster import Cluster
from tests import failing_job
from tests.failing_job import MONITOR, SLURM_CONF, WAIT_SECONDS
from tests.records import drop, record

pytestmark = pytest.mark.slurm

DOCS = Path(__file__).parents[1] / "docs"
REVIEW = f'\n[review]\nreviewers = ["{os.geteuid()}"]\n'
AT_ONCE = "\n[fleet]\ngather = 0\n"
GRANT = '[[grant]]\nactions = ["requeue"]\nneeds = {reviews = 1, agreement = 0.1}\n'


def config(mode: str = "monitor") -> str:
    return MONITOR.split("[[grant]]")[0].replace("monitor", mode, 1) + REVIEW + AT_ONCE + GRANT


@pytest.fixture(scope="module")
def history() -> Iterator[tuple[Cluster, dict[str, Any], dict[str, Any]]]:
    """A cluster in monitor mode on which one job has lost a GPU and another one is wrong."""
    # A health check would see the fault before the job fails of it.
    with Cluster(
        2, 8, config=config(), slurm_conf_extra=SLURM_CONF, health_check_seconds=0
    ) as cluster:
        with cluster.aggregator():
            lost = failing_job.submit(cluster)
            cluster.run("slurm-hook-health-check", env={"SLURMD_NODENAME": lost.node}, check=False)
            bad = lost.lose_gpu()
            first = lost.decision()
            wrong = failing_job.submit(
                # By its name it would be taken for the first one, run again by its owner.
                cluster,
                f"--exclude={bad}",
                "--job-name=another",
                comment="recovery=hold",
            )
            wrong.fail("exit 3")
            second = wrong.decision()
        yield cluster, first, second


def shell_lines(page: str) -> list[str]:
    """The commands of a page's ``sh`` blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return [
        line for block in blocks for line in block.splitlines() if line and not line.startswith("#")
    ]


def typed(cluster: Cluster, line: str, **variables: str) -> str:
    """What a shell says to a line of a guide, which must succeed."""
    found = cluster.run("bash", "-o", "pipefail", "-c", line, env=variables)
    return found.stdout


def document(cluster: Cluster, *command: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(cluster.run("recovery", *command, "--json").stdout)
    return made


def test_the_questions_to_a_spool_are_answered_by_jq_alone(
    history: tuple[Cluster, dict[str, Any], dict[str, Any]],
) -> None:
    cluster, first, _ = history
    lines = shell_lines("spool.md")
    assert len(lines) == 11
    waiting, *lines = lines
    assert typed(cluster, waiting, SPOOL=str(cluster.spool)) == ""
    sent = record("n9", job=None)
    drop(cluster.spool, sent)
    path = cluster.spool / "incoming" / f"{sent.id}.json"
    listed = typed(cluster, waiting, SPOOL=str(cluster.spool))
    path.unlink()
    assert listed == f"{sent.time[:19]} n9 epilog fatal {path}\n"
    node = first["nodes"][0]["node"]
    job = first["attempt"]["job_id"]
    told = [
        typed(cluster, line, SPOOL=str(cluster.spool), JOB=str(job), NODE=node) for line in lines
    ]
    assert first["job"]["reason"] in told[0]
    assert f"requeue {job} recorded" in told[1]
    assert json.loads(told[2])["cause"] == first["cause"]["summary"]
    assert f"{node} drain" in told[3]
    assert re.search(r"\d gpu\.", told[6])
    assert "epilog" in told[7]
    assert told[8] == "nothing\n"
    assert told[9].startswith("monitor, ")


def test_the_guide_to_a_trial_works_as_it_is_typed(
    history: tuple[Cluster, dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    cluster, first, second = history
    policy = tmp_path / "other.toml"
    policy.write_text('[policy.classes."hardware.gpu"]\njob = "hold"\nnode = "watch"\n')
    for line in shell_lines("trial.md"):
        if line.endswith("--next"):
            continue  # asks on a terminal
        said = typed(cluster, line, ID=first["id"], SPOOL=str(cluster.spool), POLICY=str(policy))
        assert "--json" in line or max(map(len, said.splitlines())) <= 80, said
    cluster.run("recovery", "review", first["id"], "helpful")
    cluster.run("recovery", "review", second["id"], "ambiguous", "--note", "who knows")
    with cluster.aggregator():
        cluster.wait(
            lambda: document(cluster, "trial")["rows"][0]["reviewed"] == 2,
            WAIT_SECONDS,
            "both count",
        )
        (grant,) = document(cluster, "grants")["grants"]
        assert (grant["state"], grant["in_force"]) == ("ready", False)
    everything = document(cluster, "trial")["rows"][0]
    assert (everything["helpful"], everything["ambiguous"]) == (1, 1)
    assert 0 < everything["delay"][0] < WAIT_SECONDS
    story = cluster.run("recovery", "explain", str(first["attempt"]["job_id"])).stdout
    story = " ".join(story.split())
    order = [
        "NEEDS YOU", "Attempt 1", "began on", "ended FAILED 1:0", "Decided", "cause: hardware.gpu",
        "rule hardware.gpu", "would have changed it", "What followed",
        f"requeue {first['attempt']['job_id']}: recorded", "would have: hold",
    ]  # fmt: skip
    places = [story.find(part) for part in order]
    assert places == sorted(places), story
    assert places[0] == 0, story
    # Slurm cuts an end to the second: what the node saw in that second stands before or after it.
    assert "saw gpu.fell_off_bus (fatal)" in story[: story.index("Decided")]


def test_a_replay_tells_what_another_policy_would_have_done_the_same_way_each_time(
    history: tuple[Cluster, dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    cluster, first, _ = history
    policy = tmp_path / "other.toml"
    policy.write_text('[policy.classes."hardware.gpu"]\njob = "hold"\nnode = "watch"\n')
    command = ("recovery", "replay", cluster.spool, "--policy", policy)
    told = cluster.run(*command).stdout
    assert told == cluster.run(*command).stdout
    node = first["nodes"][0]["node"]
    assert f"- requeue without {node}, drain {node}" in told
    assert f"+ hold, watch {node}" in told
    assert "do not replay as they were recorded" not in told
    made = json.loads(cluster.run(*command, "--json").stdout)
    assert [one["decision"] for one in made["changes"]] == [first["id"]]
    same = cluster.run(
        "recovery", "replay", cluster.spool, "--policy", cluster.layout.recovery_toml
    )
    # A third, on what the check by hand has seen, where a pass lay between it and the job's end.
    recorded = len(failing_job.decisions(cluster))
    assert recorded in (2, 3)
    assert same.stdout.startswith(f"0 of {recorded} decisions")


def test_the_operators_guide_works_as_it_is_typed(
    history: tuple[Cluster, dict[str, Any], dict[str, Any]],
) -> None:
    cluster, first, _ = history
    variables = {
        "JOB": str(first["attempt"]["job_id"]),
        "NODE": first["nodes"][0]["node"],
        "PARTITION": first["partition"],
    }
    for line in shell_lines("operators.md"):
        assert typed(cluster, line, **variables)
    (needed,) = [
        one["subject"]
        for one in document(cluster, "status")["needs_a_person"]
        if one["subject"].startswith("node")
    ]
    assert needed == f"node {variables['NODE']}"
    # No health check has ever run on the others.
    never = [name for name in cluster.node_names if name != variables["NODE"]]
    assert set(never) <= set(document(cluster, "status")["nodes"]["silent"])


def test_what_a_person_ran_again_counts_as_time_that_acting_would_have_saved(
    history: tuple[Cluster, dict[str, Any], dict[str, Any]],
) -> None:
    cluster, first, _ = history
    job, node = first["attempt"]["job_id"], first["nodes"][0]["node"]
    assert document(cluster, "trial")["rows"][0]["estimated"] == 0
    cluster.mend_gpus(node)
    with cluster.aggregator():
        cluster.run("scontrol", "requeue", str(job))
        cluster.wait(
            lambda: cluster.job(job)["JobState"] == "PENDING", WAIT_SECONDS, "it is pending"
        )
        cluster.run("scontrol", "update", f"job={job}", "StartTime=now")
        cluster.wait(
            lambda: document(cluster, "explain", first["id"])["decisions"][0]["rerun"],
            WAIT_SECONDS,
            "it is noted when the job ran again",
        )
    everything = document(cluster, "trial")["rows"][0]
    assert everything["estimated"] == 1
    assert everything["saved_gpu_hours"] > 0
    assert "somebody else ran the job again" in cluster.run("recovery", "explain", str(job)).stdout
