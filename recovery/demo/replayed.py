"""The story where there is no Slurm: a recorded run, through the same aggregator.

Everything but the scheduler is real: the records travel through a spool, are validated, archived
and correlated, and the decisions are made and journaled as on a cluster. Nothing can be restarted
here, so it is told as a deployment begins: in monitor mode.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from recovery.aggregator import Aggregator
from recovery.decision import Decision
from recovery.demo import promises
from recovery.demo.promises import Ledger
from recovery.demo.recording import RecordedScheduler, Recording
from recovery.demo.scenes import GPU, sections
from recovery.demo.teller import Teller
from recovery.report import telling
from slurm_hooks import spool
from slurm_hooks.config import Config

RECORDED = Path(__file__).parent / "recorded" / "gpu-and-bug.json"

LIMIT_SECONDS = 30.0
"""The decisions take about a second."""

_PASS_SECONDS = 0.1


def tell(teller: Teller, recorded: Path = RECORDED, limit_seconds: float = LIMIT_SECONDS) -> Ledger:
    """Replay ``recorded``, tell what is decided on it, and return what was kept.

    A decision that has not come within ``limit_seconds`` is none.
    """
    ledger = Ledger(promises.REPLAY)
    recording = Recording.load(recorded).moved_to(time.time())
    lost, buggy = sorted(recording.jobs, key=lambda job: job.id)
    scheduler = RecordedScheduler(recording)
    with tempfile.TemporaryDirectory(prefix="slurm-recovery-") as folder:
        teller.title("A recorded run: a GPU falls off the bus, then a program has a bug")
        teller.say(f"{len(recording.records)} fault records of {len(recording.nodes)} nodes")
        decided = _decisions(recording, scheduler, Path(folder), limit_seconds)
    for job in (lost, buggy):
        decision = decided.get(job.id)
        if decision is None:
            teller.say(f"job {job.id}: no decision within {limit_seconds:g} s")
            continue
        teller.say(f"job {job.id} ({job.name}): {decision.job.verdict}")
        said = telling.decision(decision).splitlines()
        wanted = ("Attempt", "Decided", "What followed")
        teller.quote(f"recovery explain {decision.id}", sections(said, wanted))
    drained = [node.name for node in recording.nodes if node.drained]
    ledger.add(
        promises.recognised(decided.get(lost.id), lost.nodes[1], GPU),
        promises.recommended(decided.get(lost.id), lost.nodes[1]),
        promises.untouched(scheduler.refused, lost.state, drained),
        promises.recommended_hold(decided.get(buggy.id)),
        promises.innocent(decided.get(buggy.id), scheduler.refused),
    )
    return ledger


def _decisions(
    recording: Recording, scheduler: RecordedScheduler, folder: Path, limit_seconds: float
) -> dict[int, Decision]:
    """Run the aggregator over the recording until each job has its decision."""
    config = Config()
    config = replace(
        config,
        spool=replace(config.spool, path=folder / "spool", trusted_uids=(os.getuid(),)),
        controller=replace(config.controller, state=folder / "state"),
    )
    spool.create(config.spool.path)
    for record in recording.records:
        spool.drop(config.spool.path, record.id, json.dumps(record.to_dict()).encode())
    decided: dict[int, Decision] = {}
    wanted = {job.id for job in recording.jobs}
    aggregator = Aggregator(config, scheduler)
    try:
        deadline = time.monotonic() + limit_seconds
        while set(decided) != wanted and time.monotonic() < deadline:
            for decision in aggregator.pass_once().decided:
                if decision.attempt:
                    decided[decision.attempt.job_id] = decision
            time.sleep(_PASS_SECONDS)
    finally:
        aggregator.close()
    return decided
