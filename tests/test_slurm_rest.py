"""Slurm is asked and told through slurmrestd; what an API cannot do is said, and by what it is."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from recovery.demo.cluster import Cluster
from recovery.slurm.base import CommandRefused, Scheduler, SchedulerUnavailable
from recovery.slurm.rest import RestScheduler
from slurm_hooks.config import Slurm
from tests import restd
from tests import test_slurm_commands as commands
from tests.restd import Restd

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(os.getuid() != 0, reason="slurmrestd runs as another user"),
]

CHANGES_NODES = restd.RELEASE >= (23, 11)
REQUEUES = restd.RELEASE >= (26, 5)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if restd.SLURMRESTD is None:
        pytest.fail("no slurmrestd on this machine; ./scripts/setup installs it")
    lines = restd.jwt_lines(tmp_path_factory.mktemp("jwt") / "key")
    with Cluster(nodes=3, hooks=False, slurm_conf_extra=lines) as running:
        yield running


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[Restd]:
    with restd.running(cluster) as running:
        yield running


@pytest.fixture
def scheduler(cluster: Cluster, server: Restd) -> Scheduler:
    return RestScheduler(server.settings, cluster.environment)


@pytest.mark.parametrize(
    ("promise", "possible"),
    [
        (commands.test_an_ended_job_is_still_seen_and_an_unknown_one_is_absent, True),
        (commands.test_reservations_that_keep_their_jobs_within_are_read_with_their_nodes, True),
        (commands.test_a_pending_job_is_held_and_released, CHANGES_NODES),
        (commands.test_an_array_task_is_found_by_its_own_id, REQUEUES),
        (commands.test_a_failed_job_restarts_at_once_off_the_excluded_nodes, REQUEUES),
        (commands.test_a_job_is_put_back_held_for_its_owner_and_says_why, REQUEUES),
    ],
)
def test_what_the_commands_promise_slurmrestd_promises(
    cluster: Cluster,
    scheduler: Scheduler,
    promise: Callable[[Cluster, Scheduler], None],
    possible: bool,
) -> None:
    if not possible:
        pytest.skip("this release's API has no request for it")
    promise(cluster, scheduler)


def test_over_tcp_the_token_alone_says_who_asks(cluster: Cluster, server: Restd) -> None:
    job = cluster.submit("--begin=now+1hour", "--wrap", "true")
    asked = RestScheduler(server.tcp, cluster.environment)
    assert asked.nodes() == cluster.scheduler().nodes()
    asked.hold(str(job))
    assert asked.jobs([job])[job].held
    asked.release(str(job))
    assert not cluster.scheduler().jobs([job])[job].held
    # Whoever is somebody else by the token is refused, although the same account connects.
    with pytest.raises(CommandRefused):
        RestScheduler(replace(server.tcp, user="nobody"), cluster.environment).hold(str(job))
    nobody = RestScheduler(replace(server.tcp, token="/dev/null"), cluster.environment)
    with pytest.raises(SchedulerUnavailable):
        nobody.hold(str(job))
    assert not cluster.scheduler().jobs([job])[job].held


def test_both_ways_show_the_same(cluster: Cluster, scheduler: Scheduler) -> None:
    job = cluster.submit("--hold", "--exclude=n2", "--comment=recovery=requeue", "--wrap", "true")
    theirs = cluster.scheduler()
    assert scheduler.jobs([job]) == theirs.jobs([job])
    assert scheduler.jobs() == theirs.jobs()
    assert scheduler.nodes() == theirs.nodes()
    assert set(scheduler.nodes(["n1", "n99"])) == {"n1"}


def test_a_job_is_held_and_released(cluster: Cluster, scheduler: Scheduler) -> None:
    job = cluster.submit("--begin=now+1hour", "--wrap", "true")
    scheduler.hold(str(job))
    assert cluster.scheduler().jobs([job])[job].held
    scheduler.release(str(job))
    assert not cluster.scheduler().jobs([job])[job].held


@pytest.mark.skipif(not CHANGES_NODES, reason="its API changes no node")
def test_nodes_are_drained_in_one_request_and_returned(
    cluster: Cluster, scheduler: Scheduler
) -> None:
    scheduler.drain(["n2", "n1"], '"GPU 3"\nhas fallen off the bus')
    nodes = cluster.scheduler().nodes()
    assert {name for name, node in nodes.items() if node.drained} == {"n1", "n2"}
    assert nodes["n1"].reason == "'GPU 3' has fallen off the bus"
    scheduler.undrain(["n1", "n2"])
    assert not any(node.drained for node in scheduler.nodes().values())
    with pytest.raises(CommandRefused):
        scheduler.drain(["n99"], "no such node")


@pytest.mark.skipif(not CHANGES_NODES, reason="its API changes no node list of a job")
def test_a_job_is_told_where_to_run_and_why(cluster: Cluster, scheduler: Scheduler) -> None:
    job = cluster.submit("--hold", "--output=/dev/null", "--wrap", "true")
    scheduler.explain_hold(str(job), "recovery: d1: run again")
    scheduler.start_now(str(job), ["n1", "n2"])
    scheduler.release(str(job))
    cluster.wait(lambda: cluster.job(job)["JobState"] == "COMPLETED", 60, "it has run")
    shown = cluster.job(job)
    assert (shown["NodeList"], shown["AdminComment"]) == ("n3", "recovery: d1: run again")


@pytest.mark.skipif(REQUEUES, reason="its API requeues")
def test_what_the_api_lacks_is_refused_with_what_has_it(
    cluster: Cluster, scheduler: Scheduler
) -> None:
    before = cluster.mutations()
    with pytest.raises(CommandRefused, match=r"scontrol requeue.*26\.05.*backend = .cli"):
        scheduler.requeue("1")
    with pytest.raises(CommandRefused, match="scontrol requeuehold"):
        scheduler.requeue_hold("1")
    if not CHANGES_NODES:
        with pytest.raises(CommandRefused, match=r"v0\.0\.38.*update node.*23\.11"):
            scheduler.drain(["n1"], "x")
        with pytest.raises(CommandRefused, match="update job"):
            scheduler.start_now("1", ["n1"])
    assert cluster.mutations() == before


def test_what_is_no_job_and_no_node_is_never_sent(scheduler: Scheduler) -> None:
    for job in ("1/../2", "1?x=y", "--help", ""):
        with pytest.raises(CommandRefused, match="not a job id"):
            scheduler.hold(job)
    with pytest.raises(CommandRefused, match="not a node name"):
        scheduler.drain(["n[1-3]"], "x")
    with pytest.raises(CommandRefused):
        scheduler.hold("999999")


def test_a_token_comes_from_a_file_and_is_read_anew(
    cluster: Cluster, server: Restd, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    asked = RestScheduler(replace(server.settings, token=str(token)), cluster.environment)
    with pytest.raises(SchedulerUnavailable, match="cannot be read"):
        asked.nodes()
    token.write_text("no.token.at-all\n", "utf-8")
    with pytest.raises(SchedulerUnavailable):
        asked.nodes()
    token.write_text(cluster.run("scontrol", "token", "username=root").stdout, "utf-8")
    assert set(asked.nodes()) == {"n1", "n2", "n3"}


def test_a_frozen_or_absent_slurmrestd_is_unavailable_and_never_an_empty_cluster(
    cluster: Cluster, server: Restd
) -> None:
    asked = RestScheduler(server.settings, cluster.environment, timeout_seconds=2)
    assert asked.jobs() is not None
    server.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(SchedulerUnavailable, match="within 2 s"):
            asked.jobs()
    finally:
        server.process.send_signal(signal.SIGCONT)
    lost = Slurm(backend="rest", url=f"unix:{server.socket}.lost", token="none")
    with pytest.raises(SchedulerUnavailable, match="lost"):
        RestScheduler(lost).nodes()


def test_a_stopped_slurmctld_is_unavailable_and_never_an_empty_cluster(
    cluster: Cluster, scheduler: Scheduler
) -> None:
    assert scheduler.nodes()
    cluster.run("scontrol", "shutdown", "slurmctld")
    try:
        cluster.wait(
            lambda: cluster.run("scontrol", "ping", check=False).returncode != 0, 60, "it ends"
        )
        for call in (scheduler.jobs, scheduler.nodes, lambda: scheduler.hold("1")):
            with pytest.raises(SchedulerUnavailable):
                call()
    finally:
        cluster.restart_controller()


def test_the_aggregator_watches_through_slurmrestd(cluster: Cluster, server: Restd) -> None:
    cluster.configure(
        f'[slurm]\nbackend = "rest"\nurl = "unix:{server.socket}"\nuser = "root"\n'
        '[controller]\ncluster = "private"\n'
    )
    # The requests reach slurmctld, and no command of Slurm's but the one for the token is run.
    done = cluster.run("recovery", "once", "--json")
    assert '"schema": "pass/v1"' in done.stdout
    assert '"problems": []' in done.stdout, done.stdout
