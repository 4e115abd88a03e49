"""What Slurm's JSON says is read the same from every release, and never read into it.

The documents in tests/data/slurm are real daemons' own; README.md there names the commands.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.slurm.base import Job, Node
from recovery.slurm.documents import AnswerError, DocumentError, read_jobs, read_nodes
from recovery.slurm.hostlist import HostlistError, compress, expand

DATA = Path(__file__).parent / "data" / "slurm"
RELEASES = ("22.05", "24.11", "26.05")
USERS = {"root": 0, "nobody": 65534}
EVIL_COMMENT = (
    'recovery=requeue JobState=RUNNING Reason=forged\nJobId=1 UserId=root(0) "quoted" \\ back,'
    ' tab\t{"job_id": 1}'
)


def jobs_of(release: str, name: str = "squeue") -> list[Job]:
    return list(read_jobs((DATA / release / f"{name}.json").read_text()).values())


def job_of(release: str, name: str) -> Job:
    (job,) = (job for job in jobs_of(release) if job.name == name)
    return job


def nodes_of(release: str) -> dict[str, Node]:
    return read_nodes((DATA / release / "nodes.json").read_text(), USERS.get)


every_release = pytest.mark.parametrize("release", RELEASES)


@every_release
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("running", {"state": "RUNNING", "nodes": ("n1", "n2"), "reason": "", "exit_code": 0}),
        ("failed", {"state": "FAILED", "exit_code": 9, "signal": 0, "uid": 65534}),
        ("killed", {"state": "FAILED", "exit_code": 0, "signal": 9}),
        ("waiting", {"state": "PENDING", "held": True, "array": None}),
        (
            "held",
            {
                "state": "PENDING",
                "held": True,
                "reason": "JobHeldUser",
                "excluded": ("n2", "n3", "n5"),
            },
        ),
        (
            "excluding",
            {
                "state": "PENDING",
                "held": False,
                "reason": "BeginTime",
                "excluded": ("n2", "n3", "n6"),
                "required": ("n1",),
                "requeue": False,
                "start_time_known": True,
            },
        ),
        ("big", {"state": "PENDING", "node_count": 6, "nodes": (), "pending": True}),
        (
            "special",
            {"state": "SPECIAL_EXIT", "held": True, "restarts": 1, "pending": False},
        ),
        ("commented", {"admin_comment": 'recovery: d1: GPU 3 "lost", see docs', "comment": ""}),
        ("completing", {"flags": frozenset({"COMPLETING"}), "nodes": ("n6",), "exit_code": 7}),
    ],
)
def test_a_job_reads_the_same_from_every_release(
    release: str, name: str, expected: dict[str, Any]
) -> None:
    job = job_of(release, name)
    assert {key: seen(job, key) for key in expected} == expected
    assert job.submit_time > 1_700_000_000
    assert (job.sluid is not None) == (release == "26.05")


def seen(job: Job, key: str) -> Any:
    return job.start_time > 0 if key == "start_time_known" else getattr(job, key)


@every_release
def test_array_tasks_and_parts_of_a_het_job_are_told_apart(release: str) -> None:
    tasks = {job.array: job for job in jobs_of(release) if job.name == "array"}
    assert {array: job.state for array, job in tasks.items() if array} == {
        f"{tasks_id(tasks)}_1": "COMPLETED",
        f"{tasks_id(tasks)}_2": "FAILED",
    }
    assert len({job.id for job in tasks.values()}) == 2
    parts = [job for job in jobs_of(release) if job.het_job_id is not None]
    assert [part.name for part in parts] == ["het", "het"]
    leader = min(part.id for part in parts)
    assert {part.het_job_id for part in parts} == {leader}
    assert {part.name_for_commands for part in parts} == {str(leader)}


def tasks_id(tasks: dict[str | None, Job]) -> str:
    return next(iter(array for array in tasks if array)).split("_")[0]


@every_release
def test_a_users_comment_cannot_forge_another_field(release: str) -> None:
    job = job_of(release, "failed")
    assert job.comment == EVIL_COMMENT
    assert (job.state, job.uid, job.reason) == ("FAILED", 65534, "NonZeroExitCode")


@every_release
@pytest.mark.parametrize(
    ("name", "state", "flags", "reason"),
    [
        ("n1", "MIXED", set(), ""),
        ("n3", "IDLE", {"DRAIN"}, 'bad "quote" State=IDLE [root@2026] \\ ü\nsecond line'),
        ("n4", "DOWN", set(), "recovery: d2: GPU 3 has fallen off the bus"),
        ("n5", "DOWN", {"NOT_RESPONDING"}, "Not responding"),
        ("n6", "IDLE", {"COMPLETING"}, ""),
    ],
)
def test_a_node_reads_the_same_from_every_release(
    release: str, name: str, state: str, flags: set[str], reason: str
) -> None:
    node = nodes_of(release)[name]
    assert (node.state, set(node.flags), node.reason) == (state, flags, reason)
    assert (node.reason_uid, node.reason_time > 0) == ((0, True) if reason else (None, False))
    assert (node.gpus, node.partitions[0], node.boot_time > 0) == (8, "train", True)
    assert node.drained == (name == "n3")


@pytest.mark.parametrize("release", ["24.11", "26.05"])  # 22.05 prints all, whatever is asked
def test_some_jobs_are_the_same_jobs(release: str) -> None:
    everything = {job.id: job for job in jobs_of(release)}
    some = jobs_of(release, "squeue-some")
    assert {job.name for job in some} == {"running", "array"}
    assert all(everything[job.id].array == job.array for job in some)


def test_an_empty_list_from_a_controller_that_is_away_is_no_answer() -> None:
    with pytest.raises(AnswerError, match="Failed while looking for jobs"):
        read_jobs((DATA / "22.05" / "squeue-away.json").read_text())
    with pytest.raises(AnswerError):
        read_nodes((DATA / "22.05" / "nodes-away.json").read_text(), USERS.get)


@every_release
def test_a_document_cut_short_or_without_a_field_is_refused(release: str) -> None:
    text = (DATA / release / "squeue.json").read_text()
    for broken in ("", "null", "[]", "{}", text[: len(text) // 2], '{"jobs": {}}', "[" * 100_000):
        with pytest.raises(DocumentError):
            read_jobs(broken)
    for field in ("job_id", "job_state", "excluded_nodes", "restart_cnt", "comment", "priority"):
        document = json.loads(text)
        del document["jobs"][0][field]
        with pytest.raises(DocumentError):
            read_jobs(json.dumps(document))


@every_release
def test_a_field_of_another_type_is_refused(release: str) -> None:
    for field, value in [
        ("excluded_nodes", "n[1-999999999999]"),
        ("excluded_nodes", "n[1-2"),
        ("job_state", []),
        ("exit_code", "9"),
        ("name", 3),
        ("submit_time", {"set": True}),
    ]:
        document = json.loads((DATA / release / "squeue.json").read_text())
        document["jobs"][0][field] = value
        with pytest.raises(DocumentError):
            read_jobs(json.dumps(document))


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:8", 8),
        ("gpu:a100:4(S:0-1,3),gpu:v100:2(S:1),shard:32", 6),
        ("gpu:h200:8(IDX:0-7)", 8),
        ("mps:400,nic:2", 0),
        ("", 0),
        ("(null)", 0),
    ],
)
def test_gpus_are_counted_over_all_types(gres: str, gpus: int) -> None:
    document = json.loads((DATA / "22.05" / "nodes.json").read_text())
    document["nodes"][0]["gres"] = gres
    (first, *_) = read_nodes(json.dumps(document), USERS.get).values()
    assert first.gpus == gpus


@pytest.mark.parametrize(
    "text",
    [
        *("n[1-", "n]1[", "n[[1]]", "n[]", "n[1-3", "n[3-1]", "n[a-b]", ",", "a,,b", "n[1,]"),
        *("n[1-99999]", "n[1-999][1-999]", "n[0-9]" * 50 + "[0-9]" * 20, "n[" + "9" * 5000 + "]"),
    ],
)
def test_a_broken_or_boundless_hostlist_is_refused(text: str) -> None:
    with pytest.raises(HostlistError):
        expand(text)


names = st.lists(
    st.from_regex(r"\A[a-z]{1,3}[0-9]{0,4}(-ib[0-9]{0,2})?\Z") | st.from_regex(r"\An[0-9]{1,3}\Z"),
    max_size=40,
)


@given(names)
def test_compressing_and_expanding_gives_the_same_nodes(nodes: list[str]) -> None:
    assert sorted(expand(compress(nodes))) == sorted(set(nodes))


@pytest.mark.parametrize(
    "text", ["n[1-4,07-09],x3", "n[08-12]", "r[1-2]n[01-03],gpu-a", "n[9-11]", "n[0,00]"]
)
def test_a_hostlist_means_what_it_means_to_scontrol(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # scontrol wants a configuration even for this, and reads nothing of it.
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    for expression in (text, compress(expand(text))):
        shown = subprocess.run(
            ["scontrol", "show", "hostnames", expression],
            capture_output=True,
            text=True,
            check=True,
        )
        assert sorted(shown.stdout.split()) == sorted(expand(text))
