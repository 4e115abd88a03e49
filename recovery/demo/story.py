"""The story that `recovery demo` tells: a real Slurm job loses a GPU and comes back.

    >>> tell(keep=False, as_json=True)                          # doctest: +SKIP
    {"schema": "demo/v1", "promises": [...], "seconds": 58.2}
    0

Owns the order of the scenes, the cluster they play on and what is printed at the end. Where this
machine has no Slurm, a recorded run is replayed through the same aggregator (``replayed``).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from subprocess import SubprocessError

from recovery.demo import promises, replayed, scenes
from recovery.demo.cluster import Cluster
from recovery.demo.programs import ClusterError, find_programs
from recovery.demo.promises import Ledger
from recovery.demo.scenes import Stage
from recovery.demo.teller import Teller
from recovery.demo.training import Training
from recovery.slurm.base import SchedulerError

NODES, GPUS_PER_NODE = 4, 8
HEALTH_CHECK_SECONDS = 3
"""A site has minutes here; a story has no time for that."""

SCENES: tuple[Callable[[Stage], None], ...] = (
    scenes.healthy,
    scenes.monitored,
    scenes.acted,
    scenes.raised,
)

_NEEDED_OUTSIDE = ("SLURM_CONF", "SLURM_RECOVERY_CONFIG")
"""What a command outside of the story needs to find this cluster."""

_INTERRUPTED = 130
"""What a shell reports of a program that was ended by Ctrl-C."""


def tell(keep: bool, as_json: bool) -> int:
    """Tell the story; return 0 if every promise was kept, 1 if not.

    With ``as_json`` standard output gets one ``demo/v1`` document and standard error the story.
    With ``keep`` the cluster outlives the story, and the reader is told how to look around in it.
    """
    teller = Teller(sys.stderr if as_json else sys.stdout)
    # The job runs as another account, which has to get into the cluster's folder.
    os.umask(0o022)
    try:
        find_programs()
    except ClusterError as missing:
        teller.say(f"{missing}. Replaying a recorded run instead.")
        ledger = replayed.tell(teller)
    else:
        ledger = Ledger(promises.STORY)
        try:
            _on_a_cluster(teller, ledger, keep)
        except KeyboardInterrupt:
            teller.say("interrupted; nothing of the cluster is left")
            return _INTERRUPTED
    table = ledger.table()
    if as_json:
        rows = [asdict(one) for one in table]
        seconds = round(teller.seconds, 1)
        print(json.dumps({"schema": "demo/v1", "promises": rows, "seconds": seconds}))
    else:
        teller.table(table)
    return 0 if all(one.kept for one in table) else 1


def _on_a_cluster(teller: Teller, ledger: Ledger, keep: bool) -> None:
    teller.title("A private Slurm: one slurmctld, four nodes with eight GPUs each")
    teller.say("real daemons on loopback; the GPUs are files behind a small NVML of ours")
    try:
        with Cluster(
            nodes=NODES, gpus=GPUS_PER_NODE, health_check_seconds=HEALTH_CHECK_SECONDS
        ) as cluster:
            teller.say(f"up, in {cluster.folder}")
            training = Training(cluster)
            aggregator = cluster.start_aggregator()
            stage = Stage(cluster, training, teller, ledger, aggregator)
            _play(stage)
            if keep:
                _leave(stage)
    except (ClusterError, OSError) as error:
        _stop(teller, ledger, error)


def _play(stage: Stage) -> None:
    try:
        for scene in SCENES:
            scene(stage)
    except (ClusterError, SchedulerError, SubprocessError, OSError) as error:
        _stop(stage.teller, stage.ledger, error)


def _stop(teller: Teller, ledger: Ledger, error: Exception) -> None:
    """A story that cannot go on says why, and keeps what it has seen."""
    # Behind the first line come the ends of all daemons' logs, which --keep lets one read whole.
    what = str(error).partition("\n")[0]
    teller.say(f"the story cannot go on: {what} (--keep leaves the cluster up to look into)")
    ledger.stop(what)


def _leave(stage: Stage) -> None:
    """Let the cluster live on, and say how to look around in it and how to end it."""
    cluster = stage.cluster
    environment = {name: cluster.environment[name] for name in _NEEDED_OUTSIDE}
    exports = [f"export {name}={value}" for name, value in environment.items()]
    exports.append(f"export PATH={Path(sys.executable).parent}:$PATH")
    looks = ["sinfo -R", "recovery status", "recovery decisions"]
    looks += [f"recovery explain {job}" for job in stage.jobs[-1:]]
    end = cluster.leave_running()
    stage.teller.title("The cluster and its aggregator run on. To look around:")
    stage.teller.lines([*exports, *looks])
    stage.teller.title("To end both and remove their folder:")
    stage.teller.lines([end])
