"""Records arrive whole or wait on the node, and always fit the schema."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import fastjsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_hooks import bounds
from slurm_hooks.config import Spool
from slurm_hooks.record import Evidence, FaultRecord, Finding, ProbeResult, RecordJob, new_id, utc
from slurm_hooks.spool import FOLDERS, Buffer, SpoolError, create, drop, read_regular, seal, write

SCHEMA = Path(__file__).parents[1] / "slurm_hooks/schemas/fault-record-v1.json"
validate: Callable[[object], object] = fastjsonschema.compile(json.loads(SCHEMA.read_text()))

BOOT = "2816e5f8-810f-49fa-b683-ff9f5966c0b5"

# Large inputs are small ones repeated: hypothesis then spends its effort on their kinds.
texts = st.builds(
    lambda text, times: text * times,
    st.text(max_size=6) | st.text(alphabet="a\x01\udcff😀", min_size=1, max_size=6),
    st.sampled_from([1, 1, 300, 2000]),
)
some = st.none() | texts
numbers = st.none() | st.integers(-(2**70), 2**70)
evidence = st.builds(Evidence, source=texts, text=texts, time=some, key=some)
findings = st.builds(
    Finding,
    code=texts | st.just("gpu.fell_off_bus"),
    severity=st.sampled_from(["info", "warning", "fault", "fatal", "wrong"]),
    summary=texts,
    gpu=numbers,
    uuid=some,
    pci=some,
    link=numbers,
    port=some,
    rank=numbers,
    file=some,
    pid=numbers,
    job_id=numbers,
    count=st.integers(-5, 2**70),
    resolution=some,
    evidence=st.lists(evidence, max_size=2).map(lambda some: tuple(some) * 9),
)
jobs = st.builds(
    RecordJob,
    id=st.integers(-1, 2**40),
    restart=st.integers(-1, 2**40),
    user=some,
    uid=numbers,
    partition=some,
    nodes=some,
    gpus=st.lists(st.integers(-1, 2**20), max_size=3).map(lambda some: tuple(some) * 400),
    array=some | st.just("6_2"),
    sluid=some,
    exit=some | st.just("9:0"),
    comment=some,
)
results = st.builds(
    ProbeResult,
    name=texts,
    status=st.sampled_from(["ok", "hang", "strange"]),
    seconds=st.floats(-1, 1e9),
    detail=some,
)
records = st.builds(
    FaultRecord,
    id=st.builds(new_id, st.floats(0, 2**33)),
    cluster=some,
    node=texts,
    boot_id=st.just(BOOT),
    time=st.builds(utc, st.floats(0, 2**33)),
    hook=st.sampled_from(["prolog", "epilog", "health_check"]),
    job=st.none() | jobs,
    findings=st.builds(
        lambda some, times: tuple(some) * times,
        st.lists(findings, max_size=2),
        st.sampled_from([1, 150]),
    ),
    probes=st.lists(results, max_size=2).map(lambda some: tuple(some) * 40),
)


@settings(max_examples=40, deadline=None)
@given(records)
def test_whatever_a_hook_saw_its_record_passes_the_schema(record: FaultRecord) -> None:
    content = bounds.encode(record, 64 * 1024)
    assert len(content) <= 64 * 1024
    document = json.loads(content)
    validate(document)
    assert bounds.encode(FaultRecord.from_dict(document), 64 * 1024) == content


def test_surplus_findings_are_counted_and_the_gravest_are_kept() -> None:
    many = [Finding("site.many", "info", str(number)) for number in range(1000)]
    many[700] = Finding("site.grave", "fatal", "the one that counts")
    kept = bounds.fit_findings(many)
    assert len(kept) == bounds.FINDINGS_LIMIT
    assert [finding.code for finding in kept if finding.severity == "fatal"] == ["site.grave"]
    assert kept[-1].count == 1000 - 255
    again = bounds.fit_findings(kept, 10)
    assert again[-1].count == 1000 - 9


def test_a_spool_has_its_folders_and_modes_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        create(tmp_path / "spool")
    finally:
        os.umask(before)
    create(tmp_path / "spool")
    modes = {name: (tmp_path / "spool" / name).stat().st_mode & 0o7777 for name in FOLDERS}
    assert modes == FOLDERS
    assert modes["reviews"] == 0o1777 and modes["incoming"] == 0o755


def test_a_record_is_seen_whole_or_not_at_all(tmp_path: Path) -> None:
    create(tmp_path)
    record_id = new_id()
    path = drop(tmp_path, record_id, b"first")
    assert drop(tmp_path, record_id, b"again") == path
    assert path.read_bytes() == b"again"
    assert path.stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in (tmp_path / "incoming").iterdir()] == [f"{record_id}.json"]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "incoming").symlink_to(target)
    with pytest.raises(SpoolError, match="incoming"):
        drop(tmp_path, new_id(), b"{}")
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (target / "name").symlink_to(victim)
    write(target, "name", b"new")
    assert victim.read_text() == "untouched"
    assert (target / "name").read_bytes() == b"new"


@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "large", "missing"])
def test_only_a_regular_file_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.write_bytes(b"x" * 11)
    with pytest.raises(SpoolError):
        read_regular(path, 10)


def test_a_full_buffer_gives_up_the_oldest_of_the_mildest_and_counts_them(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path / "buffer", limit=4)
    verdicts = ["fatal", "ok", "warning", "ok", "fault", "ok"]
    ids = [new_id(1000 + number) for number in range(len(verdicts))]
    for record_id, verdict in zip(ids, verdicts, strict=True):
        buffer.keep(record_id, verdict, b"{}")
    left = [name.split(".")[1] for name in buffer.waiting()]
    assert left == ["fatal", "warning", "fault", "ok"]
    assert buffer.read(buffer.waiting()[-1]) == (ids[-1], b"{}")
    assert buffer.dropped() == 2
    buffer.dropping_reported()
    assert buffer.dropped() == 0


def test_a_buffer_that_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "buffer"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(SpoolError, match="written by others"):
        Buffer(folder).keep(new_id(), "ok", b"{}")


def test_a_record_without_munge_is_not_sent_unsealed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seal(b"x", Spool()) == b"x"
    monkeypatch.setattr("slurm_hooks.spool.MUNGE_COMMANDS", ("/nonexistent/munge",))
    with pytest.raises(SpoolError, match="no munge command"):
        seal(b"x", Spool(authenticate="munge"))
