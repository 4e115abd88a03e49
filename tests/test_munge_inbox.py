"""A record that is sealed with MUNGE is believed for who sealed it, wherever its file lies."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from recovery.inbox import Inbox
from recovery.store import Store
from slurm_hooks.record import FaultRecord, new_id
from tests.records import SETTINGS, archived, beat, drop, make_spool, put, record, waiting

MUNGED = shutil.which("munged", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")

WAIT_SECONDS = 20.0


@pytest.fixture(scope="module")
def munge() -> Iterator[Path]:
    """The socket of a munged of its own."""
    assert MUNGED, "munge is not installed; run scripts/setup"
    folder = Path(tempfile.mkdtemp(prefix="munge-inbox-"))  # short: a socket's path has its limit
    folder.chmod(0o755)
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    argv = [MUNGED, "--foreground", f"--socket={folder}/socket"]
    argv += [f"--{name}-file={folder}/{name}" for name in ("key", "pid", "log", "seed")]
    running = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    until = time.monotonic() + WAIT_SECONDS
    while not (folder / "socket").exists():
        assert running.poll() is None and time.monotonic() < until, "munged does not start"
        time.sleep(0.02)
    yield folder / "socket"
    running.terminate()
    running.wait()
    shutil.rmtree(folder)


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    return make_spool(tmp_path / "spool")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "index.sqlite")
    yield made
    made.close()


@pytest.fixture
def inbox(spool: Path, munge: Path) -> Inbox:
    return Inbox(spool, replace(SETTINGS, authenticate="munge", munge_socket=str(munge)))


def seal(munge: Path, content: bytes, *options: str, as_uid: int | None = None) -> bytes:
    command = ["munge", f"--socket={munge}", *options]
    done = subprocess.run(command, input=content, capture_output=True, check=True, user=as_uid)
    return done.stdout.strip()


def sealed(munge: Path, item: FaultRecord, *options: str, as_uid: int | None = None) -> bytes:
    return seal(munge, json.dumps(item.to_dict()).encode(), *options, as_uid=as_uid)


def test_a_sealed_record_is_believed_whoever_owns_the_file(
    spool: Path, store: Store, inbox: Inbox, munge: Path
) -> None:
    item = record()
    put(spool, f"{item.id}.json", sealed(munge, item)).chmod(0o666)
    (spool / "incoming").chmod(0o777)
    assert inbox.ingest(store).accepted == (item,)
    assert archived(spool) == [item.id]


def test_an_expired_credential_counts_once(
    spool: Path, store: Store, inbox: Inbox, munge: Path
) -> None:
    item = record()
    content = sealed(munge, item, "--ttl=1")
    ask = ["unmunge", f"--socket={munge}"]
    until = time.monotonic() + WAIT_SECONDS
    while subprocess.run(ask, input=content, capture_output=True).returncode != 15:
        assert time.monotonic() < until, "the credential does not expire"
        time.sleep(0.1)
    put(spool, f"{item.id}.json", content)
    assert inbox.ingest(store).accepted == (item,)
    put(spool, f"{item.id}.json", content)
    assert inbox.ingest(store).accepted == ()
    assert (archived(spool), waiting(spool)) == ([item.id], [])


def test_what_is_not_sealed_or_was_changed_is_not_believed(
    spool: Path, store: Store, inbox: Inbox, munge: Path
) -> None:
    plain, tampered, renamed = record(), record(), record()
    drop(spool, plain)
    content = sealed(munge, tampered)
    put(spool, f"{tampered.id}.json", content[:-20] + b"A" * 10 + content[-10:])
    put(spool, f"{new_id()}.json", sealed(munge, renamed))
    ingested = inbox.ingest(store)
    assert ingested.accepted == ()
    reasons = " ".join(sorted(item.reason for item in ingested.rejected))
    assert "no MUNGE credential" in reasons
    assert "not authentic" in reasons
    assert "its name says" in reasons


@pytest.mark.skipif(os.geteuid() != 0, reason="seals as another user, needs root")
def test_what_a_user_sealed_is_not_believed(
    spool: Path, store: Store, inbox: Inbox, munge: Path
) -> None:
    item = record()
    put(spool, f"{item.id}.json", sealed(munge, item, as_uid=1001))
    (rejected,) = inbox.ingest(store).rejected
    assert "uid 1001 sealed it" in rejected.reason


def test_heartbeats_are_sealed_too(spool: Path, store: Store, inbox: Inbox, munge: Path) -> None:
    beat(spool, "n1")
    path = spool / "heartbeat" / "n1.json"
    path.write_bytes(seal(munge, path.read_bytes()))
    inbox.ingest(store)
    assert list(store.heartbeats()) == ["n1"]
