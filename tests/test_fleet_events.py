"""One cause that hits many at once is one incident: what makes it one, and what its members get.

A table for each; ``test_fleet_event_on_slurm`` shows it on a cluster.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from recovery import fleet, offenders, policy
from recovery.decision import Action, Cause, Implicated, JobAnswer, Member
from recovery.fleet import Hit, Membership
from recovery.stalls import Hang, Stall
from slurm_hooks import spool
from slurm_hooks.config import Fleet
from slurm_hooks.record import Finding, utc
from tests.incidents import decided, failed, finding, job, log, running, sick
from tests.test_recovery_commands import Controller

NOW = 1.8e9
LIMITS = Fleet()
HANG = Hang(Stall(80, NOW - 1200, 1200, 900, "its own cadence"), "all its GPUs are idle")
EVENT = Membership("01KEVENT", "9 nodes and 6 jobs", ("n7", "n8"))

GONE = finding("storage.not_mounted", file="/data")
GPU = finding("gpu.lost", gpu=3)
MEMORY = finding("host.memory_missing")
DRIVER = finding("gpu.driver_mismatch")
PORT = finding("fabric.port_down")


# -- what belongs together


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("storage", "storage.hang"), ("storage", "storage.client_evicted"), True),
        (("storage", "storage.hang"), ("storage.full", "storage.full"), False),
        (("network.fabric", "fabric.port_down"), ("network.fabric", "fabric.link_down"), True),
        (("hardware.gpu", "gpu.lost"), ("hardware.gpu", "gpu.fell_off_bus"), True),
        (("hardware.gpu", "gpu.lost"), ("hardware.host", "host.memory_missing"), False),
        (
            ("node.software", "gpu.driver_mismatch"),
            ("node.software", "gpu.driver_mismatch"),
            True,
        ),
        (("node.software", "gpu.driver_mismatch"), ("node.software", "host.space_low"), False),
    ],
)
def test_several_codes_of_one_thing_are_one_event_and_unrelated_ones_are_not(
    one: tuple[str, str], other: tuple[str, str], same: bool
) -> None:
    assert (fleet.key_of(*one) == fleet.key_of(*other)) is same


@pytest.mark.parametrize(
    "fault_class", ["program.exception", "scheduler.cancelled", "unknown", "slowdown"]
)
def test_what_concerns_a_job_alone_is_never_part_of_an_event(fault_class: str) -> None:
    assert fleet.key_of(fault_class, "x") == ""


# -- how many make one


def nodes(count: int) -> list[Hit]:
    return [Hit(f"node n{n}", NOW, (f"n{n}",)) for n in range(count)]


def jobs(count: int, by_text: bool, users: int) -> list[Hit]:
    return [Hit(f"job {n}", NOW, uid=n % users, by_text=by_text) for n in range(count)]


@pytest.mark.parametrize(
    ("hits", "size", "made"),
    [
        (nodes(4), 8, False),
        (nodes(5), 8, True),
        (nodes(9), 10_000, False),  # a thousandth of them is ten
        (nodes(10), 10_000, True),
        (jobs(4, False, 4), 8, False),
        (jobs(5, False, 1), 8, True),
        (jobs(100, True, 4), 8, False),  # four users' logs say so, however often
        (jobs(5, True, 5), 8, True),
        (nodes(4) + nodes(4), 8, False),  # the same nodes again
    ],
)
def test_it_takes_so_many_nodes_and_such_a_share_or_so_many_jobs_or_users(
    hits: list[Hit], size: int, made: bool
) -> None:
    assert (fleet.extent(hits, size, LIMITS) is not None) is made


def test_a_job_on_many_nodes_that_all_lose_their_storage_is_an_event_by_itself() -> None:
    of = job(nodes=("n1", "n2", "n3", "n4", "n5"))
    cause = decided(failed(of, n1=[GONE], n2=[GONE], n3=[GONE], n4=[GONE], n5=[GONE])).cause
    assert fleet.extent([fleet.hit("job 12", NOW, cause, 1001)], 100, LIMITS) is not None


def test_what_the_log_alone_says_names_no_node_of_an_event() -> None:
    cause = decided(failed(n1=[log("storage", "OSError: [Errno 116] Stale file handle")])).cause
    hit = fleet.hit("job 12", NOW, cause, 1001)
    assert (hit.nodes, hit.by_text) == ((), True)


# -- what its members get


JOBS = [
    # what, the job's changes, what n3 shows, the answer alone, and as one of many
    ("shared storage", {}, [GONE], "requeue", "hold"),
    ("the fabric", {}, [PORT], "requeue", "hold"),
    ("a driver that was rolled out", {}, [DRIVER], "requeue", "requeue"),
    ("GPUs that broke", {}, [GPU], "requeue", "requeue"),
    ("a peer that was lost", {}, [log("collective.timeout")], "requeue", "hold"),
    ("not opted in", {"comment": ""}, [GONE], "leave", "leave"),
    ("--no-requeue", {"requeue": False}, [GONE], "leave", "leave"),
    ("cancelled", {"state": "CANCELLED"}, [GONE], "leave", "leave"),
]


@pytest.mark.parametrize(("of", "seen", "alone", "among"), [row[1:] for row in JOBS],
                         ids=[row[0] for row in JOBS])  # fmt: skip
def test_a_job_follows_the_verdict_of_the_event(
    of: dict[str, object], seen: list[Finding], alone: str, among: str
) -> None:
    incident = failed(job(**of), n3=seen)
    assert decided(incident).job.verdict == alone
    decision = decided(incident, fleet=EVENT)
    assert decision.job.verdict == among
    assert decision.fleet == EVENT.decision
    if among == "hold":
        assert "it has hit 9 nodes and 6 jobs (01KEVENT)" in decision.job.reason


NODES = [
    ("storage", [GONE], 5, "watch"),
    ("the fabric, for the second time today", [PORT], 5, "watch"),
    ("a driver, for the second time today", [DRIVER], 5, "watch"),
    ("less memory than slurm.conf has", [MEMORY], 0, "watch"),
    ("a GPU that the node names", [GPU], 0, "drain"),
]


@pytest.mark.parametrize(("seen", "before", "verdict"), [row[1:] for row in NODES],
                         ids=[row[0] for row in NODES])  # fmt: skip
def test_a_node_is_drained_for_a_part_of_its_own_and_for_nothing_that_all_show(
    seen: list[Finding], before: int, verdict: str
) -> None:
    (answer,) = decided(failed(n3=seen), fleet=EVENT, named_today={"n3": before}).nodes
    assert answer.verdict == verdict
    if seen in ([PORT], [DRIVER], [MEMORY]):
        assert answer.reason.endswith("one of 9 nodes and 6 jobs, no drain")


def test_the_same_alone_drains_the_node() -> None:
    for seen in (PORT, DRIVER, MEMORY):
        (answer,) = decided(failed(n3=[seen]), named_today={"n3": 5}).nodes
        assert answer.verdict == "drain"


def test_a_restart_avoids_the_nodes_that_show_the_same_and_stay_in_service() -> None:
    decision = decided(failed(n3=[DRIVER]), fleet=EVENT)
    assert decision.job.excluded == ("n3", "n7", "n8")
    named = decided(failed(job(required=("n7",)), n3=[DRIVER]), fleet=EVENT)
    assert named.job.excluded == ("n3", "n8"), "a node that it asks for by name is its owner's wish"


def test_a_job_that_hangs_as_many_do_is_left_running() -> None:
    """What its processes wait for may answer again."""
    case = running(hang=HANG)
    assert decided(case).job.verdict == "requeue"
    assert decided(case, fleet=EVENT).job.verdict == "leave"


def test_a_lost_node_is_one_of_many_where_power_fails() -> None:
    case = failed(job(state="NODE_FAIL"), lost=["n3"], silent=["n3"])
    (answer,) = decided(case, fleet=EVENT, named_today={"n3": 1}).nodes
    assert (answer.verdict, decided(case, fleet=EVENT).job.verdict) == ("watch", "requeue")


def test_the_decision_says_that_it_is_one_of_many_and_what_was_rejected() -> None:
    decision = decided(failed(n3=[GONE]), fleet=EVENT)
    assert decision.rule.endswith("job hold, node watch, as one of many")
    assert any(text.startswith("a restart at once:") for text in decision.considered)
    assert "had it not hit 9 nodes and 6 jobs at once" in decision.would_change[0]
    assert not any("budget" in text for text in decision.would_change)
    drained = decided(failed(n3=[MEMORY]), fleet=EVENT)
    assert "a broken part that n3 names itself would have drained it" in drained.would_change


def test_what_hit_many_speaks_against_no_node_later() -> None:
    assert offenders.marks_of(decided(failed(n3=[PORT]))) != ()
    assert offenders.marks_of(decided(failed(n3=[PORT]), fleet=EVENT)) == ()
    assert offenders.marks_of(decided(failed(n3=[GPU]), fleet=EVENT)) != ()
    assert offenders.marks_of(decided(failed(n1=[log("collective.timeout")]), fleet=EVENT)) == ()


# -- the one decision


def test_one_decision_lists_all_says_why_and_is_told_once(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    spool.create(controller.spool)
    hits = [*nodes(5), *jobs(2, False, 2)]
    extent = fleet.extent(hits, 8, LIMITS)
    assert extent is not None
    row = policy.rule_for("storage", {})
    event = fleet.decision("storage", hits, extent, row, LIMITS, NOW, "act")
    controller.knows({"type": "decision", "decision": event.to_dict()})
    gone = Implicated("n9", "/data is not mounted", "storage", "storage.not_mounted")
    held = Action("hold", "", "verified", utc(NOW), "comment", "held for its owner")
    alone = replace(held, state="recorded", step="", detail="no grant covers hold")
    numbers = range(30_000_030, 30_000_042)
    for number in (*range(30, 33), *numbers):
        done = held if number in numbers else alone
        controller.decided(
            f"d{number}",
            job_id=number,
            job_target=str(number),
            actions=(replace(done, target=str(number)),),
            fleet=event.id,
            cause=Cause("storage", "established", "n9: /data is not mounted", (gone,)),
            job=JobAnswer("hold", "it has hit 5 nodes"),
            nodes=(),
        )
    more = [asdict(Member("node n6", "2026-12-02T06:00:00.000000Z", ("n6",)))]
    controller.knows({"type": "joined", "decision": event.id, "members": more})

    listed = controller.json("decisions")["decisions"]
    assert [one["id"] for one in listed] == [event.id], "its members are not listed beside it"
    (follower,) = controller.json("decisions", "--job", "31")["decisions"]
    assert follower["fleet"] == event.id
    (need,) = controller.json("status")["needs_a_person"]
    assert need["subject"].startswith("fleet event storage of ")
    assert f"once it is mended, recovery explain {event.id} names" in need["what"]
    told = " ".join(controller.run("explain", event.id)[0].split())
    assert "members: 17 jobs, 7 nodes" in told
    assert "job 31: hold, d31" in told
    assert "nodes (n[0-4,6,9])" in told
    command = f"once it is mended: scontrol release {','.join(map(str, numbers))}"
    assert command in told, "the shell must see one list, however long it is"
    lie = "not held, they lie as they ended; once it is mended: scontrol requeue 30,31,32"
    assert lie in told
    assert "considered: a drain of each node" in told
    assert "limit: within 300 s: 5 nodes and 2 jobs; 5 nodes" in told
    assert event.id in controller.run("explain", "31")[0]
    controller.run("ack", event.id, "--owner", "ann")
    assert controller.json("status")["needs_a_person"] == []


def test_an_idle_node_with_a_broken_part_is_still_decided_on_by_itself() -> None:
    (answer,) = decided(sick("n3", GPU), fleet=EVENT).nodes
    assert answer.verdict == "drain"
