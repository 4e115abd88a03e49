"""What examples/lua checks at submission: an opt-in is understood before it is counted on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.demo.cluster import Cluster
from recovery.demo.programs import ClusterError
from slurm_hooks import optin
from tests.test_expedited_requeue import ENABLED, EXPEDITE, skip_where_none_is_expedited

pytestmark = pytest.mark.slurm

LUA = Path(__file__).parent.parent / "examples" / "lua"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A Slurm with both filters, in which nothing may be requeued unless its owner says so."""
    with Cluster(
        nodes=1,
        gpus=0,
        hooks=False,
        slurm_conf_extra="JobSubmitPlugins=lua\nCliFilterPlugins=lua\nJobRequeue=0\n" + ENABLED,
        slurm_files=sorted(LUA.glob("*.lua")),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def controller_alone() -> Iterator[Cluster]:
    """A Slurm whose users get around the commands' filter."""
    with Cluster(
        nodes=1,
        gpus=0,
        hooks=False,
        slurm_conf_extra="JobSubmitPlugins=lua\nJobRequeue=0\n" + ENABLED,
        slurm_files=[LUA / "job_submit.lua", LUA / "recovery_optin.lua"],
    ) as running:
        yield running


def held(cluster: Cluster, *options: str) -> dict[str, str]:
    """Submit a job that does not start, and return it as Slurm shows it."""
    return cluster.job(cluster.submit("--hold", *options, "--wrap", "true"))


COMMENTS = [
    "nightly run 5",
    "project=vision,owner=ann",
    '{"team": "vision"}',
    "{not json",
    "recovery=off",
    "recovery=requeue",
    "recovery=hold,project=vision,night run",
    "recovery=requeue,max_restarts=3,checkpoint=/data/ckpt,logs=/a/*.log,logs=/b,progress=/data/s",
    """recovery=requeue,logs="/a,b/*.log",logs='/c d.log',checkpoint="/x=y" """,
    "'recovery=requeue , max_restarts = 3'",
    '{"recovery": {"mode": "requeue", "max_restarts": 3, "logs": ["/a", "/b"]}, "n": [1, {}]}',
    '{"recovery": "hold"}',
    '{"recovery": {}}',
    '{"APS": {"auto_resume_mode": "requeue", "max_requeue_times": 3, "theirs": null}}',
    '{"r\\u0065covery": {"mode": "requeue"}}',
    "recovry=requeue",
    "Recovery=requeue",
    "recovery=reqeue",
    "recovery=requeue,max_restart=1",
    "recovery=requeue,max-restarts=1",
    "recovery=requeue,log=/a",
    "recovery=requeue,max_restarts=lots",
    "recovery=requeue,max_restarts=-1",
    "recovery=requeue,max_restarts=1001",
    "recovery=requeue,max_restarts=1,max_restarts=5",
    "recovery=requeue,checkpoint=",
    "recovery=requeue,checkpoint=/a\x1b[2Jb",
    "recovery=requeue,checkpoint=/" + "a" * 2000,
    "recovery=requeue,noncritical=maybe",
    "recovery=requeue,max_restarts",
    "recovery",
    'recovery=requeue,checkpoint="/a',
    "recovery=requeue," + ",".join(f"logs=/{number}" for number in range(17)),
    "recovery=requeue,note=" + "x" * 4096,
    '{"recovery": {"max_restart": 1}}',
    '{"recovery": {"max_restarts": true}}',
    '{"recovery": {"max_restarts": 1.0}}',
    '{"recovery": {"mode": "requeue", "mode": "hold"}}',
    '{"recovery": ["requeue"]}',
    '{"recovery": {"logs": [1]}}',
    '{"recovery": {"mode": "requeue"}',
    '{"recovery": {"mode": "requeue"}} and more',
    '{"recovry": {"mode": "requeue"}}',
    '{"APS": {"auto_resume_mod": "requeue"}}',
    '{"APS": {"auto_resume_mode": "singleton_dependency"}}',
    '{"APS": {}}',
    '{"APS": ' + "[" * 3000,
]
"""Comments of every form, in each way right and wrong; the hooks' own reader judges them."""


@pytest.mark.parametrize("filters", ["cluster", "controller_alone"])
def test_slurm_refuses_what_the_hooks_would_not_understand_and_nothing_else(
    filters: str, request: pytest.FixtureRequest
) -> None:
    slurm: Cluster = request.getfixturevalue(filters)
    for comment in COMMENTS:
        expected = optin.parse(comment)
        asked = ("sbatch", "--hold", f"--comment={comment}", "--wrap", "true")
        answer = slurm.run(*asked, check=False)
        assert (answer.returncode != 0) == bool(expected.problems), (comment, answer.stderr)
        for problem in expected.problems:
            if "did you mean" in problem:
                assert problem in answer.stderr, comment


def test_an_opted_in_job_may_be_requeued_and_keeps_its_log(cluster: Cluster) -> None:
    job = cluster.submit("--comment=recovery=requeue", "--output=%j.log", "--wrap", "echo attempt")
    cluster.wait(lambda: cluster.job(job)["JobState"] == "COMPLETED", 60, "the first attempt")
    cluster.run("scontrol", "requeue", str(job))
    cluster.wait(lambda: cluster.job(job)["JobState"] == "PENDING", 60, "it is pending again")
    # Started within the second of its end, an attempt may die at once ("already killed").
    cluster.run("scontrol", "update", f"job={job}", "StartTime=now+2")
    cluster.wait(lambda: cluster.job(job)["JobState"] == "COMPLETED", 60, "the second attempt")
    assert (cluster.work / f"{job}.log").read_text("utf-8") == "attempt\nattempt\n"


def test_an_owners_options_stay(cluster: Cluster) -> None:
    wish = "--comment=recovery=requeue"
    assert held(cluster, wish)["Requeue"] == "1"
    assert held(cluster, "--comment=recovery=hold")["Requeue"] == "0"
    assert held(cluster)["Requeue"] == "0"
    said = cluster.run("sbatch", "--hold", wish, "--no-requeue", "--wrap", "true")
    assert "--no-requeue wins" in said.stderr
    assert cluster.job(int(said.stdout.split()[-1]))["Requeue"] == "0"
    script = cluster.work / "job.sh"
    script.write_text(
        "#!/bin/sh\n#SBATCH --comment=recovery=requeue\n#SBATCH --open-mode=truncate\n"
        "#SBATCH --output=mine.log\necho attempt\n",
        "utf-8",
    )
    (cluster.work / "mine.log").write_text("of an earlier run\n", "utf-8")
    job = cluster.submit(script)
    cluster.wait(lambda: cluster.job(job)["JobState"] == "COMPLETED", 60, "the job has run")
    assert (cluster.work / "mine.log").read_text("utf-8") == "attempt\n"


def test_slurmctld_alone_lets_an_opted_in_job_be_requeued(controller_alone: Cluster) -> None:
    assert held(controller_alone, "--comment=recovery=requeue")["Requeue"] == "1"
    assert held(controller_alone, "--comment=nightly")["Requeue"] == "0"


def test_who_submits_no_batch_job_is_told_that_it_is_not_run_again(cluster: Cluster) -> None:
    said = cluster.run("salloc", "--nodes=1", "--comment=recovery=requeue", "true")
    assert "only batch jobs" in said.stderr


def test_a_comment_cannot_be_changed_into_one_with_a_mistake(cluster: Cluster) -> None:
    job = held(cluster, "--comment=recovery=requeue")["JobId"]
    with pytest.raises(ClusterError):
        cluster.run("scontrol", "update", f"job={job}", "comment=recovery=reqeue")
    right = json.dumps({"recovery": {"max_restarts": 1}})
    cluster.run("scontrol", "update", f"job={job}", f"comment={right}")
    cluster.run("scontrol", "update", f"job={job}", "admincomment=recovery: a note of ours")
    assert cluster.job(int(job))["Requeue"] == "1"


@pytest.mark.parametrize("filters", ["cluster", "controller_alone"])
def test_an_expedited_requeue_stays_one(filters: str, request: pytest.FixtureRequest) -> None:
    slurm: Cluster = request.getfixturevalue(filters)
    skip_where_none_is_expedited()
    job = slurm.submit("--hold", EXPEDITE, "--comment=recovery=requeue", "--wrap", "true")
    shown = json.loads(slurm.run("squeue", "--json", f"--jobs={job}").stdout)["jobs"][0]
    assert shown["requeue"] and "EXPEDITED_REQUEUE" in shown["flags"]
