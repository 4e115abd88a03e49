"""What was recorded stays recorded, in order, whatever happens to the process or the disk."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from recovery.journal import Journal, JournalError
from slurm_hooks.record import utc


def event(text: str = "x") -> dict[str, Any]:
    return {"type": "addendum", "time": utc(), "decision": "d1", "text": text}


def texts(journal: Journal) -> list[str]:
    return [item["text"] for item in journal.events()]


def parts(journal: Journal) -> list[Path]:
    return sorted(journal.folder.glob("*.jsonl"))


def test_events_come_back_in_order_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "journal"
    assert [Journal(folder).append(event(text)) for text in "abc"] == [1, 2, 3]
    assert texts(Journal(folder)) == ["a", "b", "c"]
    assert [item["seq"] for item in Journal(folder).events(after=1)] == [2, 3]
    assert Journal(folder).last_seq() == 3


def test_a_journal_that_was_never_written_is_empty(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    assert (list(journal.events()), journal.last_seq()) == ([], 0)
    assert not journal.folder.exists()


def test_only_the_controllers_user_and_group_read_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append(event())
    assert parts(journal)[0].stat().st_mode & 0o777 == 0o640 & ~_umask()
    assert journal.folder.stat().st_mode & 0o007 == 0


def test_a_line_cut_short_by_a_crash_is_moved_aside_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append(event("a"))
    with parts(journal)[0].open("a") as part:
        part.write('{"seq":2,"type":"addendum","te')
    assert texts(journal) == ["a"]
    assert journal.append(event("b")) == 2
    assert texts(Journal(journal.folder)) == ["a", "b"]
    torn = list(journal.folder.glob("*.torn-*"))
    assert [file.read_text() for file in torn] == ['{"seq":2,"type":"addendum","te']
    assert "cut short" in caplog.text and torn[0].name in caplog.text


def test_a_line_that_is_being_written_is_left_to_its_writer(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append(event("a"))
    with parts(journal)[0].open("a") as part:
        part.write('{"seq":2,')
    before = parts(journal)[0].read_bytes()
    assert texts(Journal(journal.folder)) == ["a"]
    assert Journal(journal.folder).last_seq() == 1
    assert parts(journal)[0].read_bytes() == before


def test_a_damaged_line_is_said_and_costs_only_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path / "journal")
    for text in "abc":
        journal.append(event(text))
    lines = parts(journal)[0].read_bytes().split(b"\n")
    lines[1] = b"\x00" * len(lines[1])
    parts(journal)[0].write_bytes(b"\n".join(lines))
    assert texts(journal) == ["a", "c"]
    assert "line 2 cannot be read" in caplog.text


@pytest.mark.parametrize("damaged", [1, 3])
def test_the_number_of_a_damaged_event_is_not_given_again(tmp_path: Path, damaged: int) -> None:
    journal = Journal(tmp_path / "journal")
    for text in "abc":
        journal.append(event(text))
    lines = parts(journal)[0].read_bytes().splitlines(keepends=True)
    lines[-damaged:] = [b"#" * 70_000 + b"\n"] * damaged
    parts(journal)[0].write_bytes(b"".join(lines))
    assert Journal(journal.folder).append(event("d")) == 4


def test_a_full_disk_is_said_and_leaves_the_journal_usable(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append(event("a"))
    size = parts(journal)[0].stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit on file sizes takes the write short and then refuses the rest, as a full disk does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
    try:
        with pytest.raises(JournalError, match=r"not recorded.*make room") as raised:
            journal.append(event("b"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(raised.value)
    assert parts(journal)[0].stat().st_size == size
    assert journal.append(event("c")) == 2
    assert texts(journal) == ["a", "c"]


def test_every_event_acknowledged_before_a_kill_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    script = (
        "import sys, pathlib; from recovery.journal import Journal\n"
        "journal = Journal(pathlib.Path(sys.argv[1]))\n"
        "while True: print(journal.append({'type': 'x', 'text': 'y' * 3000}), flush=True)\n"
    )
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout
        acknowledged = [int(child.stdout.readline()) for _ in range(20)]
        child.kill()
        acknowledged += [int(line) for line in child.stdout.read().split()]
        child.wait()
        child.stdout.close()
        there = [item["seq"] for item in Journal(folder).events()]
        assert there == list(range(1, len(there) + 1))
        assert len(there) >= acknowledged[-1]


def test_two_processes_that_append_at_once_give_no_number_twice(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    script = (
        "import sys, pathlib; from recovery.journal import Journal\n"
        "journal = Journal(pathlib.Path(sys.argv[1]))\n"
        "for text in range(100): journal.append({'type': 'x', 'text': text})\n"
    )
    command = [sys.executable, "-c", script, str(folder)]
    children = [subprocess.Popen(command) for _ in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    found = list(Journal(folder).events())
    assert [item["seq"] for item in found] == list(range(1, 301))
    assert sorted(item["text"] for item in found) == sorted([*range(100)] * 3)


def test_a_new_day_begins_a_new_part(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for text in "ab":
        journal.append(event(text))
    parts(journal)[0].rename(journal.folder / "000000000001.2026-01-01.jsonl")
    journal.append(event("c"))
    today = f"000000000003.{utc()[:10]}.jsonl"
    assert [part.name for part in parts(journal)] == ["000000000001.2026-01-01.jsonl", today]
    assert texts(journal) == ["a", "b", "c"]
    assert [item["text"] for item in journal.events(after=2)] == ["c"]


def test_parts_stay_small_and_are_read_in_bounded_memory(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for number in range(36):
        journal.append(event(str(number) + "." + "x" * 1_000_000))
    assert len(parts(journal)) == 2
    tracemalloc.start()
    read = [text.split(".")[0] for text in (item["text"] for item in journal.events())]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read == [str(number) for number in range(36)]
    assert peak < 12_000_000


def test_any_text_of_a_user_can_be_recorded(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    nasty = 'line\nbreak \u2028 "quotes" \x00 half \udc80 ü'
    journal.append(event(nasty))
    assert texts(Journal(journal.folder)) == [nasty]
    assert len(parts(journal)[0].read_bytes().splitlines()) == 1


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(JournalError, match="written by others; chmod go-w"):
        Journal(folder).append(event())


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.folder.mkdir(mode=0o750)
    victim = tmp_path / "victim"
    victim.write_text("")
    (journal.folder / "000000000001.2026-01-01.jsonl").symlink_to(victim)
    with pytest.raises(JournalError):
        journal.append(event())
    assert victim.read_text() == ""


def test_an_event_too_large_to_be_read_again_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    with pytest.raises(JournalError, match="the limit is"):
        journal.append(event("x" * 5_000_000))
    assert journal.append(event()) == 1


def test_a_line_is_plain_json_with_its_number_first(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append({"type": "breaker", "time": "t", "kind": "drain", "tripped": True, "why": "y"})
    line = parts(journal)[0].read_text()
    assert line.startswith('{"seq":1,"type":"breaker"')
    assert json.loads(line)["why"] == "y"


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
