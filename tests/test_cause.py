"""Which of several voices names the cause: the table of precedence, strongest first."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from recovery import cause
from recovery.incident import Incident
from tests.incidents import failed, finding, health_check, job, log, sick

# Each voice alone names its class; together with any that stands below it, it still does.
VOICES: list[tuple[str, dict[str, Any]]] = [
    ("scheduler.cancelled", {"state": "CANCELLED"}),
    ("hardware.gpu", {"n2": [finding("gpu.lost", gpu=3)]}),
    ("hardware.gpu.contained", {"n2": [finding("gpu.ecc_contained")]}),
    ("network.fabric", {"n3": [finding("fabric.nic_failed")]}),
    ("node.software", {"n3": [finding("gpu.driver_mismatch")]}),
    ("storage", {"n3": [finding("storage.error", file="/data")]}),
    ("program.exception", {"n1": [log("program.exception", "ValueError: x")]}),
    ("program.gpu_fault", {"n4": [finding("gpu.application_fault", gpu=1)]}),
    ("unknown", {"n4": [finding("gpu.engine_error", gpu=1)]}),
]


def incident(*voices: dict[str, Any]) -> Incident:
    """The incident in which all these speak."""
    changes: dict[str, Any] = {}
    seen: dict[str, list[Any]] = {}
    for voice in voices:
        for name, value in voice.items():
            if name == "state":
                changes[name] = value
            else:
                seen.setdefault(name, []).extend(value)
    return failed(job(**changes), **seen)


@pytest.mark.parametrize(
    ("stronger", "weaker"),
    list(itertools.combinations(VOICES, 2)),
    ids=[f"{one[0]}-{other[0]}" for one, other in itertools.combinations(VOICES, 2)],
)
def test_the_stronger_voice_names_the_cause_whoever_else_speaks(
    stronger: tuple[str, dict[str, Any]], weaker: tuple[str, dict[str, Any]]
) -> None:
    assert cause.of(incident(weaker[1])).fault_class == weaker[0]
    assert cause.of(incident(stronger[1])).fault_class == stronger[0]
    assert cause.of(incident(stronger[1], weaker[1])).fault_class == stronger[0]
    assert cause.of(incident(weaker[1], stronger[1])).fault_class == stronger[0]


def test_a_lost_node_explains_what_the_others_log_of_it() -> None:
    state = job(state="NODE_FAIL")
    peer, link = [log("collective.peer_lost", "n3 has gone")], [finding("fabric.nic_failed")]
    lost = failed(state, silent=["n3"], lost=["n3"], n1=peer, n2=link)
    assert cause.of(lost).fault_class == "node.lost"
    assert [item.node for item in cause.of(lost).implicated] == ["n3"]


def test_hardware_that_another_node_shows_explains_a_lost_one() -> None:
    seen = [finding("gpu.lost", gpu=1)]
    lost = failed(job(state="NODE_FAIL"), silent=["n3"], lost=["n3"], n2=seen)
    assert [item.node for item in cause.of(lost).implicated] == ["n2"]


def test_the_gravest_of_one_class_is_told_first_and_all_its_nodes_are_implicated() -> None:
    mild, grave = finding("gpu.thermal_slowdown", gpu=1), finding("gpu.lost", gpu=2)
    found = cause.of(failed(n2=[mild], n4=[grave]))
    assert found.summary.startswith("n4: ")
    assert {item.node for item in found.implicated} == {"n2", "n4"}
    assert found.fingerprint == "hardware.gpu/gpu.lost"


def test_one_kernel_line_read_by_two_hooks_is_one_fact() -> None:
    line = finding("gpu.lost", gpu=3)
    found = cause.of(failed(n3=[line], extra=[health_check("n3", [line], 2)]))
    assert len(found.implicated) == 1


@pytest.mark.parametrize("code", ["gpu.nvlink_nonfatal", "storage.server_silent", "host.hung_task"])
def test_a_warning_is_no_cause_and_implicates_nobody(code: str) -> None:
    found = cause.of(failed(n3=[finding(code)]))
    assert (found.fault_class, found.implicated) == ("unknown", ())


def test_nobody_is_implicated_by_the_programs_own_mistakes() -> None:
    for seen in (finding("job.out_of_memory", job_id=12), log("program.gpu_oom", "out of memory")):
        assert cause.of(failed(n3=[seen])).implicated == ()


def test_slurms_out_of_memory_is_the_programs() -> None:
    found = cause.of(failed(job(state="OUT_OF_MEMORY")))
    assert (found.fault_class, found.confidence) == ("program.host_oom", "established")


def test_a_victims_line_is_never_the_cause() -> None:
    alone = cause.of(failed(n1=[log("cascade", "Connection closed by peer")]))
    assert (alone.fault_class, alone.implicated) == ("unknown", ())
    beside = failed(n1=[log("cascade", "Connection closed by peer")], n3=[VOICES[1][1]["n2"][0]])
    assert [item.node for item in cause.of(beside).implicated] == ["n3"]


@pytest.mark.parametrize(
    "text", ["not JSON", "[]", '"x"', "{}", '{"class": "hardware.gpu"}', '{"class": 7, "x": 1}']
)
def test_a_log_verdict_that_does_not_read_says_nothing(text: str) -> None:
    told = log("hardware.gpu", "Xid 79")
    broken = finding("log.hardware_gpu", text, job_id=12)
    changed = [
        type(one)("log_verdict", one.text) if one.source == "kernel_log" else one
        for one in broken.evidence
    ]
    document = {**broken.to_dict(), "evidence": [one.to_dict() for one in changed]}
    assert cause.of(failed(n1=[type(told).from_dict(document)])).fault_class == "unknown"


def test_what_nobody_can_explain_says_how_it_ended_and_who_was_heard() -> None:
    found = cause.of(failed(job(exit_code=1, signal=9), silent=["n4"]))
    assert (found.fault_class, found.confidence) == ("unknown", "unknown")
    assert found.summary == "exit 1:9; 3 of 4 nodes reported, none saw a fault"


def test_an_idle_node_that_shows_nothing_grave_has_no_cause() -> None:
    found = cause.of(sick("n3", finding("host.hung_task")))
    assert (found.fault_class, found.summary) == ("unknown", "no fault that names a resource")
