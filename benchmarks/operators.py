"""How long an operator waits for each command, on an index of a million records.

    ./scripts/bench operators [RECORDS]

Prints the fastest of three runs of each command, as a whole process, and how much of that it was
on a core: the rest it waited, for others on a busy machine. Builds the index in a temporary folder
first, one decision for fifty records.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from recovery.decision import Action, Cause, Excerpt, Review
from recovery.journal import Journal
from recovery.offenders import SCORES
from recovery.store_opening import open_store
from slurm_hooks.record import utc
from tests.records import decision, record

NODES = 1000
BATCH = 20_000
GONE = ("hardware.gpu", "established", "GPU 3 is gone")
OPEN_JOBS = 100
"""How many jobs are under recovery, as after a switch has failed."""

COMMANDS = (
    ["status"], ["incidents"], ["decisions"], ["decisions", "--node", "n3"], ["nodes"],
    ["decisions", "--class", "storage"], ["nodes", "n3"], ["nodes", "--user", "ann"],
    ["explain", "1003"], ["explain", "500"], ["decisions", "--job", "1003"],
    ["explain", "d00000003"], ["explain", "n3"], ["grants"], ["trial"],
)  # fmt: skip
CONFIG = """
mode = "act"
[spool]
path = "{root}/spool"
[controller]
state = "{root}/state"
[[grant]]
actions = ["requeue"]
"""


def main() -> None:
    """Build, then time."""
    records = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "recovery.toml").write_text(CONFIG.format(root=root))
        build(root, records)
        for command in COMMANDS:
            seconds, busy = min(timed(root, command) for _ in range(3))
            print(f"{' '.join(command):<28} {seconds:6.3f} s  {busy:6.3f} s busy", flush=True)


def build(root: Path, records: int) -> None:
    """Fill an index with ``records`` of 1000 nodes over 90 days, and their decisions."""
    journal = Journal(root / "state" / "journal")
    store = open_store(root / "state" / "index.sqlite", journal)
    first, span = time.time() - 90 * 86_400, 90 * 86_400
    template = json.dumps(record(node="NODE", id="IDENTITY", time="WHEN").to_dict())
    for start in range(0, records, BATCH):
        rows = []
        for number in range(start, min(records, start + BATCH)):
            when, node = utc(first + span * number / records), f"n{number % NODES}"
            text = template.replace("IDENTITY", f"{number:026d}").replace("NODE", node)
            text = text.replace("WHEN", when)
            ids = (f"{number:026d}", node, when, when, "epilog", number // 50, 0)
            rows.append((*ids, None, text))
        with store.file.transaction():
            store.file.change_many("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
    events = []
    for number in range(records // 50):
        when = utc(first + span * number * 50 / records)
        requeue = Action("requeue", str(1000 + number), "recorded", when)
        if number >= records // 50 - OPEN_JOBS:
            requeue = replace(requeue, state="verified")
        verdict = ("helpful", "helpful", "helpful", "ambiguous")[number % 4]
        known = ("storage", "unknown", "a dead mount") if number == 0 else GONE
        made = decision(
            f"d{number:08d}",
            cause=Cause(*known),  # type: ignore[arg-type]
            job_id=1000 + number,
            time=when,
            ended_time=when,
            gpus=8,
            evidence=tuple(
                Excerpt(f"{50 * number + at:026d}", "n3", when, "gpu.fell_off_bus", "GPU 3 is gone")
                for at in range(16)
            ),
            actions=(requeue,),
            reviews=(Review(f"r{number}", when, "ann", 7, verdict),) if number % 3 else (),  # type: ignore[arg-type]
        )
        text = json.dumps(made.to_dict()).replace('"n3"', f'"n{number % NODES}"')
        events.append(
            {"seq": number + 1, "type": "decision", "decision": json.loads(text), "time": when}
        )
    store.apply_all(events)
    beat = {"verdict": "ok", "boot_id": "b1", "time": utc(), "probes": []}
    store.put_heartbeats({f"n{number}": beat for number in range(NODES)})
    store.put_meta("last_pass", utc())
    history = "4 faults of its own since 2026-11-02, where chance makes 0.3"
    score = {"evidence": 8.0, "times_chance": 13.0, "history": history}
    scored = {f"n{number}": score for number in range(200)}
    bars = {"avoided_above": 9.9, "drained_above": 13.8}
    store.put_meta(SCORES, json.dumps({**bars, "nodes": scored}))
    store.close()
    # Commands read the journal's end alone where the index is level with it.
    last = json.dumps({"seq": len(events), "type": "note", "time": utc()})
    folder = root / "state" / "journal"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{1:012d}.{utc()[:10]}.jsonl").write_text(last + "\n")


def timed(root: Path, command: list[str]) -> tuple[float, float]:
    """Seconds that a command takes from start to end, and of them on a core."""
    environment = {**os.environ, "SLURM_RECOVERY_CONFIG": str(root / "recovery.toml")}
    program = Path(sys.executable).parent / "recovery"
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [program, *command], env=environment, check=True, stdout=subprocess.DEVNULL, timeout=120
    )
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, busy


if __name__ == "__main__":
    main()
