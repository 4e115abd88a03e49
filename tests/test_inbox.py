"""Each record is taken in once, or is set aside with its reason; the spool may do what it likes."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from recovery.inbox import Inbox
from recovery.inbox_child import ChildInbox
from recovery.journal import Journal
from recovery.store import Store
from recovery.store_opening import open_store, rebuild
from slurm_hooks.config import Spool
from slurm_hooks.record import FaultRecord, new_id, utc
from tests.records import SETTINGS, archived, beat, drop, make_spool, put, record, waiting

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files away, needs root")


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return make_spool(tmp_path / "spool")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "index.sqlite")
    yield made
    made.close()


@pytest.fixture
def inbox(spool: Path) -> Inbox:
    return Inbox(spool, SETTINGS)


def everything(store: Store) -> list[FaultRecord]:
    return store.records(None, "", "9")


def test_a_record_goes_to_archive_and_index_and_leaves_incoming(
    spool: Path, store: Store, inbox: Inbox
) -> None:
    first, second = record("n1"), record("n2", None, hook="health_check")
    drop(spool, second, first)
    ingested = inbox.ingest(store)
    assert set(ingested.accepted) == {first, second}
    assert (ingested.rejected, ingested.problems, ingested.more) == ((), (), False)
    assert set(everything(store)) == {first, second}
    assert waiting(spool) == []
    (file,) = spool.glob(f"archive/{utc()[:10]}/*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["record"]["id"] for line in lines] == sorted([first.id, second.id])
    assert first.to_dict() in [line["record"] for line in lines]
    assert inbox.ingest(store).accepted == ()


def changed(**fields: Any) -> Callable[[FaultRecord], bytes]:
    return lambda item: json.dumps({**item.to_dict(), **fields}).encode()


def with_text(old: str, new: str) -> Callable[[FaultRecord], bytes]:
    return lambda item: json.dumps(item.to_dict()).replace(old, new).encode()


BAD: dict[str, tuple[Callable[[FaultRecord], bytes], str]] = {
    "empty": (lambda item: b"", "it is empty"),
    "truncated": (lambda item: json.dumps(item.to_dict()).encode()[:200], "not JSON"),
    "binary": (lambda item: bytes(range(256)) * 10, "not JSON"),
    "too_large": (lambda item: b" " * 300_000, "262144 is the limit"),
    "nan": (with_text("0.03", "NaN"), "NaN is no JSON number"),
    "infinite": (with_text("0.03", "1e999"), "schema"),
    "key_twice": (with_text('"hook"', '"node"'), "a key is there twice"),
    "too_deep": (lambda item: b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
    "huge_number": (with_text("0.03", "9" * 10_000), "not JSON"),
    "half_surrogate": (with_text("GPU 3 is gone", "\\ud800"), "surrogate"),
    "another_schema": (changed(schema="fault-record/v2"), "schema"),
    "no_object": (lambda item: b"[1, 2]", "schema"),
    "unknown_field": (changed(note="x"), "schema"),
    "anothers_id": (changed(id=new_id()), "its name says"),
    "path_as_node": (changed(node="../../etc/passwd"), "schema"),
    "impossible_time": (changed(time="2026-13-41T25:61:61.000000Z"), "is no time"),
    "verdict_that_is_not_its_findings": (changed(verdict="ok"), "its findings say fatal"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_record_that_is_none_is_set_aside_with_the_reason_and_the_pass_goes_on(
    spool: Path, store: Store, inbox: Inbox, kind: str
) -> None:
    make, reason = BAD[kind]
    bad, good = record(), record()
    content = make(bad)
    put(spool, f"{bad.id}.json", content)
    drop(spool, good)
    ingested = inbox.ingest(store)
    assert ingested.accepted == (good,)
    assert [item.name for item in ingested.rejected] == [f"{bad.id}.json"]
    assert reason in ingested.rejected[0].reason
    assert len(ingested.rejected[0].reason) < 600
    assert (spool / "rejected" / f"{bad.id}.json").read_bytes() == content
    why = (spool / "rejected" / f"{bad.id}.json.why").read_text()
    assert reason in why and why.count("\n") == 1
    assert waiting(spool) == []


def test_what_is_no_file_is_moved_aside_without_being_opened(
    spool: Path, store: Store, inbox: Inbox, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    names = [f"{new_id()}.json" for _ in range(5)]
    incoming = spool / "incoming"
    (incoming / names[0]).symlink_to(secret)
    (incoming / names[1]).symlink_to("/nowhere")
    os.mkfifo(incoming / names[2])
    (incoming / names[3]).mkdir()
    os.mknod(incoming / names[4], stat.S_IFSOCK | 0o644)
    ingested = inbox.ingest(store)
    assert {item.name for item in ingested.rejected} == set(names)
    assert {item.reason for item in ingested.rejected} == {"it is not a regular file"}
    assert waiting(spool) == []
    assert (spool / "rejected" / names[0]).is_symlink()
    assert secret.read_text() == "{}"


@pytest.mark.parametrize(
    "name", [b"README", b"\xff\xfe\n.json", b"x" * 255, b"01K.json", b"a b;rm -rf.json", b"x.why"]
)
def test_a_stray_file_is_moved_aside_under_a_plain_name(
    spool: Path, store: Store, inbox: Inbox, name: bytes
) -> None:
    Path(os.fsdecode(os.fsencode(spool / "incoming") + b"/" + name)).write_bytes(b"x")
    (rejected,) = inbox.ingest(store).rejected
    assert rejected.reason == "its name is not <record id>.json"
    assert rejected.name.isprintable()
    kept = sorted(path.name for path in (spool / "rejected").iterdir())
    assert len(kept) == 2 and all(item.isascii() and item.isprintable() for item in kept)
    assert waiting(spool) == []


def test_nothing_that_was_rejected_is_replaced_by_what_is_rejected_later(
    spool: Path, store: Store, inbox: Inbox
) -> None:
    for content in (b"first", b"second"):
        put(spool, "README", content)
        inbox.ingest(store)
    put(spool, "README.why", b"third")
    inbox.ingest(store)
    kept = [path.read_bytes() for path in (spool / "rejected").iterdir()]
    files = sorted(content for content in kept if b"incoming/" not in content)
    assert files == [b"first", b"second", b"third"]
    assert len(kept) == 6


def test_a_file_that_is_being_written_is_left_alone_until_its_writer_is_surely_gone(
    spool: Path, store: Store, inbox: Inbox
) -> None:
    hidden = put(spool, ".01K.json.abc", b"{")
    assert inbox.ingest(store).rejected == ()
    assert hidden.exists()
    os.utime(hidden, (time.time() - 2 * 86_400,) * 2)
    assert "has died" in inbox.ingest(store).rejected[0].reason


@as_root
def test_a_file_of_an_untrusted_user_is_not_believed(
    spool: Path, store: Store, inbox: Inbox
) -> None:
    forged = record()
    drop(spool, forged)
    os.chown(spool / "incoming" / f"{forged.id}.json", 1001, 1001)
    ingested = inbox.ingest(store)
    assert ingested.accepted == ()
    assert "uid 1001, which is not among trusted_uids" in ingested.rejected[0].reason


def test_a_file_that_others_could_have_written_is_not_believed(
    spool: Path, store: Store, inbox: Inbox
) -> None:
    item = record()
    drop(spool, item)
    (spool / "incoming" / f"{item.id}.json").chmod(0o664)
    assert "others could have written it (mode 0664)" in inbox.ingest(store).rejected[0].reason


@pytest.mark.parametrize("folder", [".", "incoming"])
def test_in_a_folder_that_others_can_write_nothing_is_believed_and_nothing_lost(
    spool: Path, store: Store, inbox: Inbox, folder: str
) -> None:
    item = record()
    drop(spool, item)
    (spool / folder).chmod(0o777)
    ingested = inbox.ingest(store)
    assert (ingested.accepted, ingested.rejected) == ((), ())
    assert "can be written by others" in ingested.problems[0]
    (spool / folder).chmod(0o755)
    assert inbox.ingest(store).accepted == (item,)


def test_a_spool_that_is_away_is_said_and_taken_up_again(
    spool: Path, store: Store, inbox: Inbox
) -> None:
    item = record()
    drop(spool, item)
    spool.rename(spool.with_name("away"))
    (problem,) = inbox.ingest(store).problems[:1]
    assert str(spool) in problem and "mounted" in problem
    spool.with_name("away").rename(spool)
    assert inbox.ingest(store).accepted == (item,)


def test_a_flood_is_taken_in_piece_by_piece_the_oldest_first(
    spool: Path, store: Store, inbox: Inbox
) -> None:
    items = [record(id=new_id(1_796_000_000 + number)) for number in range(7)]
    drop(spool, *reversed(items))
    passes = [inbox.ingest(store, limit=3) for _ in range(3)]
    assert [item for done in passes for item in done.accepted] == items
    assert [done.more for done in passes] == [True, True, False]


def test_a_record_that_comes_again_is_taken_away_without_counting_twice(
    spool: Path, store: Store, inbox: Inbox
) -> None:
    item = record()
    for _ in range(2):
        drop(spool, item)
        last = inbox.ingest(store)
    assert last.accepted == ()
    assert (archived(spool), waiting(spool)) == ([item.id], [])


def test_a_wrong_clock_is_said_and_the_record_dated_by_its_arrival(
    spool: Path, store: Store, inbox: Inbox
) -> None:
    item = record("n7", time=utc(time.time() + 86_400))
    drop(spool, item)
    before = utc()
    ingested = inbox.ingest(store)
    assert "clocks are wrong on n7" in ingested.problems[0]
    assert before <= ingested.accepted[0].time <= utc()
    assert everything(store) == list(ingested.accepted)
    (file,) = spool.glob("archive/*/*")
    assert json.loads(file.read_text())["record"]["time"] == item.time


CRASHING = """
import os, pathlib, sys
from recovery.inbox import Passes
from recovery.spool_reader import SpoolReader
from recovery.store import Store
from tests.records import SETTINGS
folder, stop = pathlib.Path(sys.argv[1]), int(sys.argv[2])
store, reader = Store(folder / "index.sqlite"), SpoolReader(folder / "spool", SETTINGS)
steps, points = Passes(90).steps(store, 10), 0
def point():
    global points
    points += 1
    if points == stop:
        os._exit(9)
try:
    request = next(steps)
    while True:
        point()
        reply = reader.step(*request)
        point()
        request = steps.send(reply)
except StopIteration:
    pass
"""


def test_a_crash_at_any_point_of_a_pass_neither_loses_nor_doubles(tmp_path: Path) -> None:
    for stop in range(1, 50):
        folder = tmp_path / str(stop)
        spool = make_spool(folder / "spool")
        items = [record(id=new_id(1_796_000_000 + number)) for number in range(3)]
        drop(spool, *items)
        command = [sys.executable, "-c", CRASHING, str(folder), str(stop)]
        status = subprocess.run(command, check=False, cwd=Path(__file__).parents[1]).returncode
        store = Store(folder / "index.sqlite")
        ingested = Inbox(spool, SETTINGS).ingest(store)
        assert (ingested.rejected, ingested.problems, waiting(spool)) == ((), (), [])
        assert {item.id for item in everything(store)} == {item.id for item in items}
        assert sorted(archived(spool)) == [item.id for item in items]
        store.close()
        if status == 0:
            assert stop > 8, "the pass has fewer points than steps"
            return
    pytest.fail("the pass never came to its end")


def test_a_line_that_a_crash_cut_short_in_the_archive_spoils_no_other(
    spool: Path, store: Store, inbox: Inbox
) -> None:
    first, second = record(), record()
    drop(spool, first)
    inbox.ingest(store)
    (file,) = spool.glob("archive/*/*")
    with file.open("a") as archive:
        archive.write('{"received":"2026-12-02T')
    drop(spool, second)
    assert inbox.ingest(store).accepted == (second,)
    again = Store(store.path.with_name("another.sqlite"))
    restored = Inbox(spool, SETTINGS).ingest(again)
    assert restored.restored == 2
    assert "cannot be read" in restored.problems[0]
    again.close()


def test_an_index_that_lost_its_last_records_gets_them_from_the_archive(
    tmp_path: Path, spool: Path, inbox: Inbox
) -> None:
    path = tmp_path / "index.sqlite"
    items = [record() for _ in range(4)]
    drop(spool, *items[:2])
    store = Store(path)
    inbox.ingest(store)
    store.close()
    shutil.copy(path, tmp_path / "as_it_was")
    store = Store(path)
    drop(spool, *items[2:])
    inbox.ingest(store)
    store.close()
    for file in tmp_path.glob("index.sqlite*"):
        file.unlink()
    shutil.copy(tmp_path / "as_it_was", path)
    store = Store(path)
    ingested = Inbox(spool, SETTINGS).ingest(store)
    assert {item.id for item in ingested.accepted} == {item.id for item in items[2:]}
    assert len(everything(store)) == 4
    store.close()


def test_a_lost_index_gets_all_records_back_and_nothing_is_decided_anew(
    tmp_path: Path, spool: Path, inbox: Inbox
) -> None:
    journal = Journal(tmp_path / "journal")
    store = open_store(tmp_path / "index.sqlite", journal)
    items = [record() for _ in range(20)]
    drop(spool, *items)
    inbox.ingest(store)
    store.close()
    store = rebuild(tmp_path / "index.sqlite", journal, "lost")
    new = record()
    drop(spool, new)
    again = Inbox(spool, SETTINGS)
    ingested = again.ingest(store)
    assert (ingested.accepted, ingested.restored) == ((new,), 20)
    assert sorted(everything(store), key=lambda item: item.id) == sorted(
        [*items, new], key=lambda item: item.id
    )
    store.close()


def test_an_archive_that_others_could_have_written_is_not_read_back(
    spool: Path, store: Store, inbox: Inbox
) -> None:
    drop(spool, record())
    inbox.ingest(store)
    (file,) = spool.glob("archive/*/*")
    file.chmod(0o666)
    again = Store(store.path.with_name("another.sqlite"))
    ingested = Inbox(spool, SETTINGS).ingest(again)
    assert ingested.restored == 0 and "written by others" in ingested.problems[0]
    again.close()


def test_a_full_archive_makes_records_wait_and_is_said(
    spool: Path, store: Store, inbox: Inbox
) -> None:
    drop(spool, record())
    inbox.ingest(store)
    (file,) = spool.glob("archive/*/*")
    size = file.stat().st_size
    item = record()
    drop(spool, item)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limits[1]))
    try:
        ingested = inbox.ingest(store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ingested.accepted == () and "the archive takes none" in ingested.problems[0]
    assert waiting(spool) == [f"{item.id}.json"]
    assert file.stat().st_size == size
    assert inbox.ingest(store).accepted == (item,)
    assert len(archived(spool)) == 2


def test_heartbeats_are_read_as_carefully_as_records(
    spool: Path, store: Store, inbox: Inbox
) -> None:
    beat(spool, "n1")
    shutil.copy(spool / "heartbeat" / "n1.json", spool / "heartbeat" / "n2.json")
    beat(spool, "n3", extra=1)
    os.mkfifo(spool / "heartbeat" / "n4.json")
    (spool / "heartbeat" / "n5.json").symlink_to(spool / "heartbeat" / "n1.json")
    problems = inbox.ingest(store).problems
    assert list(store.heartbeats()) == ["n1"]
    assert len(problems) == 2
    assert any("n2.json is ignored: its name says n2" in problem for problem in problems)


def test_a_changed_heartbeat_is_seen_by_the_next_controller_too(spool: Path, store: Store) -> None:
    beat(spool, "n1")
    Inbox(spool, SETTINGS).ingest(store)
    beat(spool, "n1", verdict="fault")
    Inbox(spool, SETTINGS).ingest(store)
    assert store.heartbeats()["n1"]["verdict"] == "fault"


@pytest.fixture
def child_inbox(spool: Path) -> Iterator[ChildInbox]:
    made = ChildInbox(spool, SETTINGS)
    yield made
    made.close()


def child_of_this_process() -> psutil.Process:
    (child,) = [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "recovery.spool_reader" in child.cmdline()
    ]
    return child


def test_the_child_takes_in_what_the_inbox_would(
    spool: Path, store: Store, child_inbox: ChildInbox
) -> None:
    item = record()
    drop(spool, item)
    put(spool, "README", b"x")
    beat(spool, "n1")
    ingested = child_inbox.ingest(store, timeout=20)
    assert ingested.finished
    assert ingested.accepted == (item,)
    assert [rejected.name for rejected in ingested.rejected] == ["README"]
    assert everything(store) == [item] and list(store.heartbeats()) == ["n1"]
    assert (archived(spool), waiting(spool)) == ([item.id], [])


def test_a_reader_that_hangs_delays_nobody_and_goes_on_later(
    spool: Path, store: Store, child_inbox: ChildInbox
) -> None:
    assert child_inbox.ingest(store, timeout=20).finished
    item = record()
    drop(spool, item)
    child = child_of_this_process()
    child.suspend()
    began = time.monotonic()
    assert not child_inbox.ingest(store, timeout=0.1).finished
    assert not child_inbox.ingest(store, timeout=0.0).finished
    assert time.monotonic() - began < 2
    assert child_inbox.waiting_seconds > 0.05, "from when it was asked, a moment after the call"
    assert child_inbox.unread_seconds > time.monotonic() - began, "the last look was before it"
    child.resume()
    assert child_inbox.ingest(store, timeout=20).accepted == (item,)
    assert child_inbox.waiting_seconds == 0
    assert child_inbox.ingest(store, timeout=20).finished and child_inbox.unread_seconds < 20


def test_a_reader_that_is_killed_is_said_and_started_again(
    spool: Path, store: Store, child_inbox: ChildInbox
) -> None:
    assert child_inbox.ingest(store, timeout=20).finished
    item = record()
    drop(spool, item)
    child_of_this_process().kill()
    (problem,) = child_inbox.ingest(store, timeout=20).problems
    assert "ended with signal 9" in problem
    assert child_inbox.ingest(store, timeout=20).accepted == (item,)
    assert archived(spool) == [item.id]


def test_no_child_outlives_the_controller(tmp_path: Path) -> None:
    script = (
        "import os, sys, pathlib, psutil\n"
        "from recovery.inbox_child import ChildInbox; from recovery.store import Store\n"
        "from tests.records import SETTINGS, make_spool\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "inbox = ChildInbox(make_spool(folder / 'spool'), SETTINGS)\n"
        "inbox.ingest(Store(folder / 'index.sqlite'), 20)\n"
        "print(psutil.Process().children()[0].pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, cwd=root)
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    until = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "the child is still there"
        time.sleep(0.01)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("bindfs"), reason="needs root and bindfs")
def test_a_spool_that_hangs_delays_nobody_and_loses_nothing(tmp_path: Path, store: Store) -> None:
    """A mount whose file system's process is stopped blocks in the kernel, like a dead server."""
    behind, spool = make_spool(tmp_path / "behind"), tmp_path / "spool"
    spool.mkdir()
    server = subprocess.Popen(["bindfs", "-f", str(behind), str(spool)])
    inbox = ChildInbox(spool, SETTINGS)
    try:
        until = time.monotonic() + 20
        while not spool.is_mount():
            assert time.monotonic() < until, "bindfs does not mount"
            time.sleep(0.01)
        assert inbox.ingest(store, timeout=20).finished
        item = record()
        drop(behind, item)
        os.kill(server.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert not inbox.ingest(store, timeout=0.2).finished
        assert time.monotonic() - began < 2
        os.kill(server.pid, signal.SIGCONT)
        assert inbox.ingest(store, timeout=20).accepted == (item,)
        os.kill(server.pid, signal.SIGSTOP)
        assert not inbox.ingest(store, timeout=0.1).finished
        began = time.monotonic()
        inbox.close()
        assert time.monotonic() - began < 2
    finally:
        os.kill(server.pid, signal.SIGCONT)
        inbox.close()
        subprocess.run(["umount", "-l", str(spool)], check=False)
        server.kill()
        server.wait()


def test_settings_reach_the_child_whole(spool: Path, store: Store) -> None:
    inbox = ChildInbox(spool, Spool(trusted_uids=(4711,)))
    drop(spool, record())
    try:
        ingested = inbox.ingest(store, timeout=20)
    finally:
        inbox.close()
    assert ingested.accepted == ()
    assert ingested.rejected or "trusted uid" in ingested.problems[0]
