"""What taking in a record costs, against the least that could be done with it, in the same run.

    .venv/bin/python benchmarks/ingest.py [RECORDS]

The floor reads the file, parses its JSON, inserts it into one SQLite table (one transaction for
all) and unlinks it: nothing is checked, archived or made durable. The inbox does all of that.
Prints seconds per record and the ratio; aim: within 5 times. Then, on an index that holds
RECORDS times ten records, what a lookup costs, so that a growing index shows.
"""

from __future__ import annotations

import json
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from recovery.inbox import Inbox
from recovery.inbox_child import ChildInbox
from recovery.store import Store
from slurm_hooks.config import Spool
from slurm_hooks.record import (
    Evidence,
    FaultRecord,
    Finding,
    ProbeResult,
    RecordJob,
    new_id,
    utc,
)

ROUNDS = 5
SETTINGS = Spool(trusted_uids=(os.geteuid(),))


def record(number: int) -> FaultRecord:
    """A record as an epilog writes it: one fault, two probes, about a kilobyte."""
    evidence = Evidence("kernel_log", "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, fell off", utc())
    return FaultRecord(
        id=new_id(),
        cluster="c1",
        node=f"n{number % 500}",
        boot_id="01234567-89ab-cdef-0123-456789abcdef",
        time=utc(),
        hook="epilog",
        job=RecordJob(number, 0, "ann", 1001, "train", "n[1-4]", tuple(range(8)), exit="9:0"),
        findings=(
            Finding("gpu.fell_off_bus", "fatal", "GPU 3 is gone", gpu=3, evidence=(evidence,)),
        ),
        probes=(ProbeResult("nvml", "findings", 0.03), ProbeResult("kernel_log", "ok", 0.01)),
    )


def make_spool(folder: Path) -> Path:
    """An empty spool in ``folder``."""
    for name in ("incoming", "heartbeat"):
        (folder / name).mkdir(parents=True)
    return folder


def fill(folder: Path, count: int) -> None:
    """Write ``count`` records into ``folder``."""
    for number in range(count):
        made = record(number)
        path = folder / f"{made.id}.json"
        path.write_text(json.dumps(made.to_dict()))
        path.chmod(0o644)


def floor(folder: Path, database: Path) -> None:
    """Read, parse, insert, unlink."""
    connection = sqlite3.connect(database)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE records (id TEXT PRIMARY KEY, document TEXT)")
    # Plain calls: a slow floor would flatter the inbox.
    for name in sorted(os.listdir(folder)):  # noqa: PTH208
        path = f"{folder}/{name}"
        with open(path, encoding="utf-8") as source:  # noqa: PTH123
            content = source.read()
        document = json.loads(content)
        connection.execute("INSERT INTO records VALUES (?, ?)", (document["id"], content))
        os.unlink(path)  # noqa: PTH108
    connection.commit()
    connection.close()


def drain(ingest: Callable[[], bool]) -> None:
    """Run passes until one finds no more."""
    while ingest():
        pass


def seconds(work: Callable[[], object]) -> float:
    """Wall time of ``work``."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def one_round(folder: Path, count: int) -> tuple[float, float, float]:
    """Seconds of the floor, of the inbox in this process, and of the one with a child."""
    bare = folder / "bare"
    bare.mkdir(parents=True)
    fill(bare, count)
    least = seconds(lambda: floor(bare, folder / "floor.sqlite"))

    spool, store = make_spool(folder / "spool"), Store(folder / "index.sqlite")
    inbox = Inbox(spool, SETTINGS)
    inbox.ingest(store)
    fill(spool / "incoming", count)
    here = seconds(lambda: drain(lambda: inbox.ingest(store).more))
    assert len(store.records(None, "", "9")) == count
    store.close()

    spool, store = make_spool(folder / "spool2"), Store(folder / "index2.sqlite")
    child = ChildInbox(spool, SETTINGS)
    child.ingest(store, timeout=20)
    fill(spool / "incoming", count)
    apart = seconds(lambda: drain(lambda: child.ingest(store, timeout=20).more))
    child.close()
    assert len(store.records(None, "", "9")) == count
    store.close()
    return least, here, apart


def lookups(folder: Path, count: int) -> dict[str, float]:
    """Seconds of lookups in an index of ``count`` records."""
    store = Store(folder / "large.sqlite")
    now = time.time()
    for start in range(0, count, 1000):
        store.add_records([record(number) for number in range(start, start + 1000)])
    last_minute = utc(now - 60), utc(now + 3600)
    timings = {
        "known id": seconds(lambda: [store.known(new_id()) for _ in range(100)]) / 100,
        "records of a job": seconds(lambda: store.job_records(17)),
        "newest of a node": seconds(lambda: store.records(["n17"], *last_minute)),
        "open decisions": seconds(lambda: store.open_decisions()),
        "open the index": seconds(lambda: Store(folder / "large.sqlite").close()),
    }
    store.close()
    return timings


def main() -> None:
    """Run and print."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one_round(folder / "warm", 50)
        rounds = [one_round(folder / str(number), count) for number in range(ROUNDS)]
        least, here, apart = (
            statistics.median(times) / count for times in zip(*rounds, strict=True)
        )
        print(f"{count} records, median of {ROUNDS} rounds")
        print(f"  read + json.loads + insert + unlink  {least * 1e6:7.1f} µs a record")
        print(f"  inbox, in this process               {here * 1e6:7.1f} µs  {here / least:.2f} x")
        print(
            f"  inbox, with its child                {apart * 1e6:7.1f} µs  {apart / least:.2f} x"
        )
        print(f"lookups in an index of {count * 10} records")
        for what, took in lookups(folder, count * 10).items():
            print(f"  {what:20}  {took * 1e3:8.3f} ms")


if __name__ == "__main__":
    main()
