"""A recorded piece of a cluster's life: fault records, jobs and nodes, in one JSON document.

    python -m recovery.demo.recording >recovery/demo/recorded/gpu-and-bug.json

makes the one that `recovery demo` replays where there is no Slurm: on a private cluster, from a
job that loses a GPU and one that raises an exception, both in monitor mode.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from recovery.demo import promises, scenes
from recovery.demo.cluster import Cluster
from recovery.demo.promises import Ledger
from recovery.demo.scenes import Stage
from recovery.demo.teller import Teller
from recovery.demo.training import Training
from recovery.journal import Journal
from recovery.slurm.base import CommandRefused, Job, Node
from recovery.store_opening import open_store
from slurm_hooks.record import FaultRecord, new_id, seconds_of, utc

SCHEMA = "recording/v1"

T = TypeVar("T", Job, Node)

_END_OF_TIME = "9999-12-31T00:00:00.000000Z"
_NEUTRAL_FOLDER = "/shared/demo"
"""Stands for the recorded cluster's own folder, whose name means nothing elsewhere."""

_JOB_TIMES = ("submit_time", "eligible_time", "start_time", "end_time")


@dataclass(frozen=True)
class Recording:
    """What hooks reported, and what the scheduler showed after it; ``time`` is of that look.

    ``time`` is in seconds since the epoch.
    """

    time: float
    records: tuple[FaultRecord, ...]
    jobs: tuple[Job, ...]
    nodes: tuple[Node, ...]

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read what ``dump`` wrote."""
        document = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            document["time"],
            tuple(FaultRecord.from_dict(one) for one in document["records"]),
            tuple(_thawed(Job, one) for one in document["jobs"]),
            tuple(_thawed(Node, one) for one in document["nodes"]),
        )

    def dump(self) -> str:
        """Return the document."""
        document = {
            "schema": SCHEMA,
            "time": self.time,
            "records": [record.to_dict() for record in self.records],
            "jobs": [_frozen(job) for job in self.jobs],
            "nodes": [_frozen(node) for node in self.nodes],
        }
        return json.dumps(document, indent=1)

    def moved_to(self, now: float) -> Recording:
        """Return the same events as if they were ending ``now``: old ones are left alone."""
        # Whole seconds: Slurm's times have no parts of one, and their order must stay.
        shift = int(now - self.time)
        return Recording(
            self.time + shift,
            tuple(_moved_record(record, shift) for record in self.records),
            tuple(_moved_job(job, shift) for job in self.jobs),
            self.nodes,
        )


class RecordedScheduler:
    """A Scheduler that shows what was recorded, and counts and refuses what would change it."""

    def __init__(self, recording: Recording) -> None:
        self._jobs = {job.id: job for job in recording.jobs}
        self._nodes = {node.name: node for node in recording.nodes}
        self.refused: Counter[str] = Counter()

    def jobs(self, ids: Collection[int] | None = None) -> Mapping[int, Job]:
        """Return the recorded jobs."""
        return {id: job for id, job in self._jobs.items() if ids is None or id in ids}

    def cluster(self) -> str:
        """Return the name of the cluster that was recorded."""
        return "private"

    def nodes(self, names: Collection[str] | None = None) -> Mapping[str, Node]:
        """Return the recorded nodes."""
        return {name: n for name, n in self._nodes.items() if names is None or name in names}

    def reservations(self) -> Mapping[str, Collection[str]]:
        """Return none: a recording keeps no reservations."""
        return {}

    def requeue(self, job: str) -> None:
        """Refuse."""
        self._refuse("requeue")

    def requeue_hold(self, job: str) -> None:
        """Refuse."""
        self._refuse("requeuehold")

    def start_now(self, job: str, excluded: Collection[str]) -> None:
        """Refuse."""
        self._refuse("update of the job")

    def hold(self, job: str) -> None:
        """Refuse."""
        self._refuse("hold")

    def release(self, job: str) -> None:
        """Refuse."""
        self._refuse("release")

    def explain_hold(self, job: str, text: str, excluded: Collection[str] | None = None) -> None:
        """Refuse."""
        self._refuse("update of the job")

    def drain(self, nodes: Collection[str], reason: str) -> None:
        """Refuse."""
        self._refuse("drain")

    def set_reason(self, node: str, reason: str) -> None:
        """Refuse."""
        self._refuse("update of the node")

    def undrain(self, nodes: Collection[str]) -> None:
        """Refuse."""
        self._refuse("resume")

    def _refuse(self, what: str) -> NoReturn:
        self.refused[what] += 1
        raise CommandRefused(f"a recording takes no {what}")


def _frozen(thing: Job | Node) -> dict[str, Any]:
    document = asdict(thing)
    return {k: sorted(v) if isinstance(v, frozenset) else v for k, v in document.items()}


def _thawed(kind: type[T], document: Mapping[str, Any]) -> T:
    values = {one.name: document[one.name] for one in fields(kind) if one.name in document}
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return kind(**{**values, "flags": frozenset(values.get("flags", ()))})


def _moved_record(record: FaultRecord, shift: int) -> FaultRecord:
    findings = tuple(
        replace(
            finding,
            evidence=tuple(
                replace(item, time=_moved(item.time, shift)) for item in finding.evidence
            ),
        )
        for finding in record.findings
    )
    time_now = utc(seconds_of(record.time) + shift)
    return replace(record, id=new_id(seconds_of(time_now)), time=time_now, findings=findings)


def _moved(text: str | None, shift: int) -> str | None:
    if text is None:
        return None
    try:
        return utc(seconds_of(text) + shift)
    except ValueError:  # a log's own way to write a time
        return text


def _moved_job(job: Job, shift: int) -> Job:
    moved: dict[str, Any] = {name: getattr(job, name) for name in _JOB_TIMES}
    return replace(job, **{name: value + shift for name, value in moved.items() if value})


def _taken_from(stage: Stage) -> Recording:
    state = stage.cluster.folder / "state"
    store = open_store(state / "index.sqlite", Journal(state / "journal"))
    try:
        records = store.records(None, "", _END_OF_TIME)
    finally:
        store.close()
    jobs = stage.cluster.scheduler().jobs(stage.jobs)
    return Recording(
        time.time(), tuple(records), tuple(jobs.values()), tuple(stage.nodes().values())
    )


def main() -> None:
    """Play both faults in monitor mode, and print the recording."""
    ledger, teller = Ledger(promises.REPLAY), Teller(sys.stderr)
    with Cluster(nodes=4, gpus=8, health_check_seconds=3) as cluster:
        aggregator = cluster.start_aggregator()
        stage = Stage(cluster, Training(cluster), teller, ledger, aggregator)
        scenes.monitored(stage)
        buggy = stage.submit("buggy", f"--raise-at={scenes.FAULT_STEP}")
        stage.decided(buggy)
        print(_taken_from(stage).dump().replace(str(cluster.folder), _NEUTRAL_FOLDER))


if __name__ == "__main__":
    main()
