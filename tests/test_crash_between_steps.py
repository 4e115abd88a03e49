"""The aggregator is killed after every step that leaves something behind, and starts again.

Which steps there are is not listed here. A step is a call of what makes something durable (an
event of the journal, its entry in the index, records taken in) or of any method by which the
Scheduler protocol changes something. A run is killed after its first step, the next after its
second, and so on, until a run comes to its end without having been killed. Whatever the step, the
end is that of a run that nobody disturbs.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from recovery.aggregator import Aggregator, run
from recovery.decision import Decision
from recovery.demo.cluster import Cluster
from recovery.inbox_child import ChildInbox
from recovery.journal import Journal
from recovery.slurm.base import Scheduler
from recovery.slurm.cli import CliScheduler
from recovery.store import Store
from recovery.store_opening import open_store
from slurm_hooks.config import load
from tests.failing_job import ACT, SLURM_CONF, WAIT_SECONDS, FailingJob, submit, tidy

pytestmark = pytest.mark.slurm

QUIET = f"{SLURM_CONF}\nProlog=/bin/true"
"""What a prolog sees plays no part here, and eighty jobs start."""

CONFIG = ACT.replace("poll = 0.1", "poll = 0.05").replace("snapshot = 2", "snapshot = 1")

MOST_STEPS = 80
"""More than this and the story no longer ends."""

NEVER = 0

fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class End:
    """What a story has come to: all that a repeated or a lost step would change."""

    state: str
    attempts: int
    restarts: str
    requeues: int
    node_updates: int
    drained: bool
    reason_is_the_decisions: bool
    elsewhere: bool
    decisions: int
    actions: tuple[tuple[str, str], ...]
    outcome: str


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2, 8, config=CONFIG, slurm_conf_extra=QUIET, health_check_seconds=0) as running:
        yield running


def changes_of_the_scheduler() -> list[str]:
    """The names of the methods that change something: those that return nothing."""
    public = {name: one for name, one in vars(Scheduler).items() if name[0] != "_"}
    hints = {name: get_type_hints(one)["return"] for name, one in public.items() if callable(one)}
    return [name for name, returned in hints.items() if returned is type(None)]


def killed_after(number: int, told: Path) -> None:
    """Let this process be killed once it has done its step ``number``; ``told`` names the steps."""
    count = itertools.count(1)

    def watch(owner: type[Any], name: str, is_step: Callable[[Any], bool]) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def step(*arguments: Any, **named: Any) -> Any:
            result = original(*arguments, **named)
            if is_step(result):
                with told.open("a") as file:
                    file.write(f"{owner.__name__}.{name}\n")
                if next(count) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, step)

    watch(Journal, "append", lambda _: True)
    watch(Store, "apply", lambda _: True)
    watch(ChildInbox, "ingest", lambda got: bool(got.accepted))
    for name in changes_of_the_scheduler():
        watch(CliScheduler, name, lambda _: True)


def aggregate(cluster: Cluster, kill_after: int, told: Path) -> None:
    """Be the aggregator, in a process of its own; what it logs is shown where a test fails."""
    logging.basicConfig(level=logging.INFO, force=True)
    killed_after(kill_after, told)
    config = load(cluster.config_path)
    scheduler = CliScheduler(environment=cluster.environment, timeout_seconds=20)
    run(Aggregator(config, scheduler), config.controller.poll, lambda: False)


@contextmanager
def aggregator(cluster: Cluster, kill_after: int, told: Path) -> Iterator[BaseProcess]:
    """Run an aggregator that is killed after its step ``kill_after``."""
    process = fork.Process(target=aggregate, args=(cluster, kill_after, told), daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def journaled(cluster: Cluster, job: FailingJob, scratch: Path) -> list[Decision]:
    """The decisions on a job as the journal alone tells them."""
    store = open_store(scratch / "index.sqlite", Journal(cluster.folder / "state" / "journal"))
    try:
        return store.decisions(job=str(job.id))
    finally:
        store.close()


def story(cluster: Cluster, kill_after: int, scratch: Path) -> tuple[End, bool, list[str]]:
    """Tell one story to its end; return it, whether the aggregator was killed, and its steps."""
    told = scratch / f"steps-{kill_after}"
    told.touch()
    job = submit(cluster)
    before = cluster.mutations()

    def is_told() -> bool:
        return any(
            one.outcome and one.outcome.state == "finished"
            for one in journaled(cluster, job, scratch)
        )

    with aggregator(cluster, kill_after, told) as first:
        bad = job.lose_gpu()
        cluster.wait(
            lambda: not first.is_alive() or is_told(),
            WAIT_SECONDS,
            f"the story's end, or the crash after step {kill_after}",
        )
        first.join(0.5)  # the step after the last event is its entry in the index
        killed = first.exitcode is not None
        assert not killed or first.exitcode == -signal.SIGKILL, "nothing else may end it"
    if killed:
        with aggregator(cluster, NEVER, scratch / "steps-after"):
            cluster.wait(is_told, WAIT_SECONDS, f"the end after a crash at step {kill_after}")
    # Later releases call a job ended while its epilogs still run, and so does its outcome.
    cluster.wait(lambda: job.shown()["JobState"] != "COMPLETING", WAIT_SECONDS, "its epilogs end")
    made = journaled(cluster, job, scratch)
    changed = cluster.mutations() - before
    node, shown = cluster.node(bad), job.shown()
    last = made[0]
    end = End(
        state=shown["JobState"],
        attempts=job.attempts(),
        restarts=shown["Restarts"],
        requeues=changed["REQUEST_JOB_REQUEUE"],
        node_updates=changed["REQUEST_UPDATE_NODE"],
        drained="DRAIN" in node["State"],
        reason_is_the_decisions=node.get("Reason", "").startswith(f"recovery: {last.id}: "),
        elsewhere=job.node != bad,
        decisions=len(made),
        actions=tuple((action.kind, action.state) for action in last.actions),
        outcome=last.outcome.state if last.outcome else "",
    )
    tidy(cluster)
    return end, killed, told.read_text().splitlines()


def test_killed_after_any_step_it_repeats_nothing_and_loses_nothing(
    cluster: Cluster, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    undisturbed, _, steps = story(cluster, NEVER, tmp_path)
    assert undisturbed == End(
        state="COMPLETED",
        attempts=2,
        restarts="1",
        requeues=1,
        node_updates=1,
        drained=True,
        reason_is_the_decisions=True,
        elsewhere=True,
        decisions=1,
        actions=(("drain", "verified"), ("requeue", "verified")),
        outcome="finished",
    )
    for command in ("drain", "requeue", "start_now"):
        assert f"CliScheduler.{command}" in steps
    for number in range(1, MOST_STEPS):
        end, killed, steps = story(cluster, number, tmp_path)
        assert end == undisturbed, f"killed after step {number}, {steps[-1]}"
        if not killed:
            record_property("steps", number - 1)
            return
    pytest.fail(f"still killed after {MOST_STEPS} steps")


def test_killed_after_each_of_its_steps_in_turn_a_job_is_held_once(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Every aggregator is killed after the first step it takes; the next goes on from there."""
    told = tmp_path / "steps"
    told.touch()
    job = submit(cluster)
    before = cluster.mutations()

    def is_held() -> bool:
        made = journaled(cluster, job, tmp_path)
        return any(action.state == "verified" for one in made for action in one.actions)

    job.fail("/usr/bin/python3 -c 'raise ValueError(7)'")
    for _ in range(MOST_STEPS):
        with aggregator(cluster, 1, told) as process:
            process.join(WAIT_SECONDS)
            assert process.exitcode == -signal.SIGKILL, "it takes a step, and is killed for it"
        if is_held():
            break
    (decision,) = journaled(cluster, job, tmp_path)
    assert [(one.kind, one.state) for one in decision.actions] == [("hold", "verified")]
    assert (job.state, job.attempts()) == ("SPECIAL_EXIT", 1)
    assert job.shown()["AdminComment"].startswith(f"recovery: {decision.id}: ")
    changed = cluster.mutations() - before
    assert (changed["REQUEST_JOB_REQUEUE"], changed["REQUEST_UPDATE_NODE"]) == (1, 0)
    steps = told.read_text().splitlines()
    assert {"CliScheduler.requeue_hold", "CliScheduler.explain_hold"} <= set(steps)
    tidy(cluster)
