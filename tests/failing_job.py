"""A real job that runs until it is told how to fail, and runs through the next time.

    job = failing_job.submit(cluster)
    job.fail("exit 1")
    cluster.wait(job.finished, 30, "its second attempt ends well")

A job of root has none of its files read, so root submits as somebody else.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recovery.aggregator import Aggregator
from recovery.demo.cluster import Cluster
from recovery.slurm.base import Scheduler
from slurm_hooks.config import load
from slurm_hooks.record import utc

NOBODY = 65534

OPTED_IN = "recovery=requeue"

WAIT_SECONDS = 60.0
"""A busy machine takes its time; an idle one needs about three seconds for a whole recovery."""

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus."

_SCRIPT = """#!/bin/sh
touch "started-${SLURM_RESTART_COUNT:-0}"
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ ! -e always ]; then exit 0; fi
while [ ! -e fail ]; do sleep 0.05; done
. ./fail
"""

ACT = """
mode = "act"
[policy]
settle = 2
max_restarts_per_user_hour = 1000
max_restarts_per_hour = 1000
[guard]
max_drained_share = 1.0
max_drained_per_hour = 1000
max_requeues_per_hour = 1000
[controller]
poll = 0.1
snapshot = 2
[[grant]]
actions = ["requeue", "hold", "drain"]
accept_untested = "a test"
"""

SLURM_CONF = "TaskProlog=/bin/true"
"""The task prolog would run as the job's user, who may not get into a developer's checkout."""

MONITOR = ACT.replace('"act"', '"monitor"', 1)


@dataclass(frozen=True)
class FailingJob:
    """One job, and the folder in which it runs."""

    cluster: Cluster
    id: int
    folder: Path

    def shown(self) -> dict[str, str]:
        """What ``scontrol show job`` says."""
        return self.cluster.job(self.id)

    @property
    def state(self) -> str:
        """Its state in Slurm's words."""
        return self.shown()["JobState"]

    @property
    def node(self) -> str:
        """Its first node."""
        return self.shown()["BatchHost"]

    def fail(self, how: str = "exit 1", always: bool = False) -> None:
        """Let it run the shell text ``how``, in this attempt only or in all that follow."""
        if always:
            (self.folder / "always").touch()
        new = self.folder / "fail.new"
        new.write_text(how + "\n")
        new.rename(self.folder / "fail")

    def lose_gpu(self, node: str = "") -> str:
        """Let a GPU of its node fall off the bus, and it die of that; return the node."""
        node = node or self.node
        self.cluster.break_gpu(node, 3, "lost")
        self.cluster.log_kernel(node, XID)
        self.fail("exit 1")
        return node

    def finished(self) -> bool:
        """Whether it has run through in the end."""
        return self.state == "COMPLETED"

    def attempts(self) -> int:
        """How many attempts have started."""
        return len(list(self.folder.glob("started-*")))

    def wait_for(self, *states: str, seconds: float = WAIT_SECONDS) -> str:
        """Wait until it is in one of the states, and return it."""
        over = f"job {self.id} becomes {' or '.join(states)}"
        return self.cluster.wait(
            lambda: state if (state := self.state) in states else "", seconds, over
        )

    def decision(self, attempt: int = 0, seconds: float = WAIT_SECONDS) -> dict[str, Any]:
        """Wait until the decision on an attempt is there and acted upon, and return it."""

        def settled() -> dict[str, Any] | None:
            for one in decisions(self.cluster):
                about = one["attempt"] or {}
                if (about.get("job_id"), about.get("restart")) == (self.id, attempt):
                    waits = any(a["state"] in ("planned", "done") for a in one["actions"])
                    return None if waits else one
            return None

        what = f"a decision on attempt {attempt} of job {self.id}, acted upon"
        found = self.cluster.wait(settled, seconds, what)
        assert found is not None
        return found


def submit(
    cluster: Cluster, *options: str, comment: str = OPTED_IN, wait: bool = True
) -> FailingJob:
    """Submit a job and wait until its first attempt runs."""
    folder = Path(tempfile.mkdtemp(dir=cluster.folder, prefix="job-"))
    script = folder / "job.sh"
    script.write_text(_SCRIPT)
    for path in (folder, script):
        path.chmod(0o755)
    given = [f"--chdir={folder}", f"--comment={comment}", "--gpus-per-node=8", *options]
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
        given = [f"--uid={NOBODY}", *given]
    job = FailingJob(cluster, cluster.submit(*given, script), folder)
    if wait:
        started = folder / "started-0"
        cluster.wait(started.exists, WAIT_SECONDS, f"job {job.id} starts")
    return job


@contextmanager
def aggregator_here(
    cluster: Cluster, scheduler: Scheduler, clock: Callable[[], float] = time.time
) -> Iterator[Aggregator]:
    """An aggregator of the cluster's within this process, which passes when it is told to."""
    aggregator = Aggregator(load(cluster.config_path), scheduler, clock)
    try:
        yield aggregator
    finally:
        aggregator.close()


def pass_until_finished(cluster: Cluster, job: FailingJob, aggregator: Aggregator) -> None:
    """Let an aggregator of this process work until the job's second attempt has ended well."""

    def over() -> bool:
        aggregator.pass_once()
        return job.finished()

    cluster.wait(over, WAIT_SECONDS, "its second attempt ends well")


def wait_for_a_full_look(cluster: Cluster) -> None:
    """Wait until the aggregator has asked Slurm for everything, from now on."""
    asked = utc()

    def looked() -> bool:
        status = json.loads(cluster.run("recovery", "status", "--json").stdout)
        return str(status["last_snapshot"] or "") > asked

    cluster.wait(looked, WAIT_SECONDS, "a full look of the aggregator")


def decisions(cluster: Cluster) -> list[dict[str, Any]]:
    """The readable record: every decision as it stood last, in the order they were made."""
    known: dict[str, dict[str, Any]] = {}
    for path in sorted((cluster.spool / "decisions").glob("*.jsonl")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                one = json.loads(line)
                known[one["id"]] = one
    return list(known.values())


def actions(decision: dict[str, Any]) -> dict[str, str]:
    """The state of each action of a decision: ``{"drain n3": "verified"}``."""
    return {f"{one['kind']} {one['target']}": one["state"] for one in decision["actions"]}


def tidy(cluster: Cluster) -> None:
    """Bring all nodes back to idle and healthy, and end every job."""
    jobs = cluster.run("squeue", "--noheader", "--format=%i").stdout.split()
    for job in jobs:
        cluster.run("scancel", job, check=False)
    cluster.wait(
        lambda: not cluster.run("squeue", "--noheader").stdout, WAIT_SECONDS, "no job is left"
    )
    for node in cluster.node_names:
        cluster.mend_gpus(node)
        shown = cluster.node(node)
        if "DRAIN" in shown["State"]:
            cluster.run("scontrol", "update", f"nodename={node}", "state=resume")
        elif shown.get("Reason"):
            cluster.run("scontrol", "update", f"nodename={node}", "reason=")
