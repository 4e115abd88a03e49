"""All ranks' flight-recorder dumps name the one that did not come, and nothing in them is run.

The dumps in ``data/flight_recorder`` are torch's own (gloo on the CPU). Those composed here have
what torch writes of NCCL and not of gloo: device states, members of groups.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from slurm_hooks.joblog import flight_recorder
from slurm_hooks.joblog.flight_recorder import FlightVerdict

REAL = Path(__file__).parent / "data" / "flight_recorder"

WORLD = tuple(range(8))


def collective(
    sequence: int, name: str = "all_reduce", state: str = "completed", group: str = "0", **more: Any
) -> dict[str, Any]:
    """One entry as torch writes it."""
    return {
        "process_group": (group, "default_pg" if group == "0" else "undefined"),
        "pg_id": int(group),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "profiling_name": f"nccl:{name}",
        "input_sizes": [[1024]],
        "state": state,
        "retired": state == "completed",
        "is_p2p": False,
        **more,
    }


def dumps(
    folder: Path,
    of_rank: Mapping[int, Sequence[dict[str, Any]]],
    groups: Callable[[int], Mapping[str, Sequence[int]]] = lambda rank: {"0": WORLD},
    form: str = "pickle",
) -> list[Path]:
    """Write each rank's dump and return the files."""
    files = []
    for rank, entries in of_rank.items():
        content = {
            "version": "2.10",
            "pg_config": {
                name: {"name": name, "desc": "", "ranks": str(list(members))}
                for name, members in groups(rank).items()
            },
            "pg_status": {},
            "entries": list(entries),
        }
        path = folder / f"nccl_trace_rank_{rank}"
        data = pickle.dumps(content, 2) if form == "pickle" else json.dumps(content).encode()
        path.write_bytes(data)
        files.append(path)
    return files


def said(verdict: FlightVerdict) -> list[tuple[int, str]]:
    return [(one.rank, one.why) for one in verdict.suspects]


@pytest.mark.parametrize("pattern", ["nccl_trace_rank_*", "rank_*.json"])
def test_the_rank_that_torchs_own_dumps_show_absent_is_named(pattern: str) -> None:
    verdict = flight_recorder.read(REAL.glob(pattern))
    assert said(verdict) == [(2, "has not entered all_reduce #6 that ranks 0-1,3-5 wait in")]
    assert (verdict.ranks, verdict.unreadable) == (tuple(range(6)), {})


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_a_rank_that_never_entered_is_named_with_the_collective(tmp_path: Path, form: str) -> None:
    waiting = [collective(1233), collective(1234, state="started")]
    files = dumps(tmp_path, {r: waiting[: 1 if r == 5 else 2] for r in WORLD}, form=form)
    verdict = flight_recorder.read(files)
    assert said(verdict) == [(5, "has not entered all_reduce #1234 that ranks 0-4,6-7 wait in")]


def test_who_waits_in_another_group_is_a_victim_and_the_one_it_waits_for_is_named(
    tmp_path: Path,
) -> None:
    # Ranks 2 and 3 are a pair of their own; 3 does not come, so 2 waits there, and all others in 0.
    pair = {r: {"0": WORLD, "1": (2, 3)} if r in (2, 3) else {"0": WORLD} for r in WORLD}
    of_rank: dict[int, list[dict[str, Any]]] = {
        r: [collective(9), collective(10, state="started")] for r in WORLD
    }
    of_rank[2] = [collective(9), collective(4, state="started", group="1")]
    of_rank[3] = [collective(9), collective(3, group="1")]
    verdict = flight_recorder.read(dumps(tmp_path, of_rank, pair.__getitem__))
    assert said(verdict) == [(3, "has not entered all_reduce #10 that ranks 0-1,4-7 wait in")]


def test_a_rank_whose_device_did_not_begin_is_named(tmp_path: Path) -> None:
    of_rank = {
        r: [collective(6), collective(7, state="scheduled" if r == 1 else "started")] for r in WORLD
    }
    verdict = flight_recorder.read(dumps(tmp_path, of_rank))
    why = "has queued but not begun all_reduce #7 that ranks 0,2-7 are in"
    assert said(verdict) == [(1, why)]


def test_all_ranks_in_one_collective_together_name_nobody(tmp_path: Path) -> None:
    of_rank = {r: [collective(6), collective(7, state="started")] for r in WORLD}
    verdict = flight_recorder.read(dumps(tmp_path, of_rank))
    assert (verdict.stuck, said(verdict), verdict.mismatch) == (True, [], None)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (collective(7, "broadcast", "started"), "rank 3 in broadcast"),
        (collective(7, state="started", input_sizes=[[7]]), "rank 3 in all_reduce of (7,)"),
    ],
)
def test_ranks_in_different_collectives_are_the_programs_fault(
    tmp_path: Path, other: dict[str, Any], told: str
) -> None:
    of_rank = {r: [other if r == 3 else collective(7, state="started")] for r in WORLD}
    verdict = flight_recorder.read(dumps(tmp_path, of_rank))
    assert verdict.mismatch is not None
    assert told in verdict.mismatch
    assert said(verdict) == []


def test_a_rank_without_a_dump_is_silent_and_not_accused(tmp_path: Path) -> None:
    of_rank = {r: [collective(7, state="started")] for r in WORLD if r != 6}
    verdict = flight_recorder.read(dumps(tmp_path, of_rank))
    assert (verdict.silent, said(verdict)) == ((6,), [])


def test_groups_of_one_name_and_other_members_are_not_mixed(tmp_path: Path) -> None:
    of_rank = {r: [collective(50 if r < 4 else 3, state="started", group="1")] for r in WORLD}
    halves = {r: {"1": tuple(range(4)) if r < 4 else tuple(range(4, 8))} for r in WORLD}
    assert said(flight_recorder.read(dumps(tmp_path, of_rank, halves.__getitem__))) == []


def test_nothing_in_a_dump_is_ever_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.system, (f"touch {mark}",))

    for rank, content in enumerate((Trap(), {"version": "2", "entries": [Trap()]})):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content))
    verdict = flight_recorder.read(tmp_path.glob("nccl_trace_rank_*"))
    assert not mark.exists()
    assert len(verdict.unreadable) == 2
    assert "more than describe data" in verdict.unreadable["nccl_trace_rank_0"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_is_forged_or_broken_costs_little_and_raises_nothing(
    tmp_path: Path, protocol: int
) -> None:
    bomb: Any = []
    for _ in range(60):
        bomb = [bomb, bomb]
    loop: list[Any] = []
    loop.append(loop)
    whole = pickle.dumps(
        {"version": "2", "pg_config": {}, "entries": [collective(1, input_sizes=bomb)]}, protocol
    )
    contents = [
        whole,
        pickle.dumps({"version": loop, "pg_config": loop, "entries": [loop, bomb]}, protocol),
        b"",
        b"\x80",
        b"{" * 100_000,
        b"(" * 1_000_000,
        b"}" * 3_000_000,
        b"\x80\x02]q\x00" + b"h\x00" * 200_000,
        b"\x8a\xff" + b"1" * 300,
        *(whole[:cut] for cut in range(0, len(whole), 7)),
    ]
    for rank, content in enumerate(contents):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(content)
    os.mkfifo(tmp_path / "nccl_trace_rank_9999")
    began = time.process_time()
    verdict = flight_recorder.read(tmp_path.glob("nccl_trace_rank_*"))
    assert time.process_time() - began < 8
    assert said(verdict) == []
    assert "not a regular file" in verdict.unreadable["nccl_trace_rank_9999"]


def test_dumps_of_an_attempt_before_do_not_count(tmp_path: Path) -> None:
    waiting = [collective(1), collective(2, state="started")]
    files = dumps(tmp_path, {r: waiting[: 1 if r == 5 else 2] for r in WORLD})
    os.utime(files[5], (1, 1))
    verdict = flight_recorder.read(files, since=time.time() - 600)
    assert (said(verdict), verdict.silent) == ([], (5,))
