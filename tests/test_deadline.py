"""A caller has its answers at the deadline, whatever its children do."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from pathlib import Path

import pytest

from slurm_hooks.deadline import OUTPUT_LIMIT_BYTES, run_all, run_one


def wait_until_gone(pid: int, seconds: float = 5.0) -> None:
    """Wait until no process has this number, or it is a zombie that nobody has reaped yet."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is still there")


def test_answers_come_back_by_name_in_the_order_of_the_tasks() -> None:
    outcomes = run_all({"a": lambda: b"x" * OUTPUT_LIMIT_BYTES, "b": lambda: b""}, 5)
    assert list(outcomes) == ["a", "b"]
    assert outcomes["a"].status == outcomes["b"].status == "ok"
    assert outcomes["a"].output == b"x" * OUTPUT_LIMIT_BYTES
    assert outcomes["b"].output == b""


def test_tasks_run_side_by_side() -> None:
    def nap() -> bytes:
        time.sleep(0.4)
        return b""

    started = time.monotonic()
    outcomes = run_all({str(number): nap for number in range(6)}, 10)
    assert all(outcome.status == "ok" for outcome in outcomes.values())
    assert time.monotonic() - started < 6 * 0.4


def test_a_hanging_task_is_named_at_its_own_deadline_and_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def hang() -> bytes:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pid_file.write_text(str(os.getpid()))
        time.sleep(60)
        return b"late"

    started = time.monotonic()
    outcomes = run_all({"stuck": hang, "fine": lambda: b"1"}, 20, {"stuck": 0.3})
    assert time.monotonic() - started < 5
    assert outcomes["fine"].output == b"1"
    assert outcomes["stuck"].status == "hang"
    detail = outcomes["stuck"].detail or ""
    assert detail.startswith("no answer within 0.3 s; ")
    assert "in state S" in detail and re.search("nanosleep|select", detail)
    wait_until_gone(int(pid_file.read_text()))


def test_a_task_stuck_in_the_kernel_is_left_behind_and_its_place_is_told(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def stuck() -> bytes:
        # Waits, in D state, for a child that waits for somebody to open the FIFO (vfork(2)).
        actions = [(os.POSIX_SPAWN_OPEN, 0, str(fifo), os.O_RDONLY, 0)]
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=actions)
        return b""

    started = time.monotonic()
    outcome = run_one(stuck, 0.5)
    assert time.monotonic() - started < 2
    assert outcome.status == "hang"
    assert "in state D" in (outcome.detail or "")


def test_a_crash_of_a_library_is_a_crash_with_its_signal() -> None:
    def segfault() -> bytes:
        ctypes.string_at(8)
        return b""

    outcome = run_one(segfault, 10)
    assert (outcome.status, outcome.detail) == ("crash", "killed by SIGSEGV")


def test_a_library_that_exits_is_a_crash() -> None:
    def leave() -> bytes:
        os._exit(3)

    outcome = run_one(leave, 10)
    assert outcome.status == "crash"
    assert outcome.detail == "ended with status 3 and without an answer"


@pytest.mark.parametrize("error", [ValueError("no such GPU"), SystemExit("bye"), MemoryError("x")])
def test_an_exception_is_an_error_with_its_text(error: BaseException) -> None:
    def fail() -> bytes:
        raise error

    outcome = run_one(fail, 10)
    assert outcome.status == "error"
    assert outcome.detail == f"{type(error).__name__}: {error}"


def test_an_answer_that_is_too_large_is_an_error() -> None:
    outcome = run_one(lambda: b"x" * (OUTPUT_LIMIT_BYTES + 1), 10)
    assert outcome.status == "error"
    assert "too large" in (outcome.detail or "")


def test_a_task_that_prints_without_end_disturbs_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    def chatter() -> bytes:
        for _ in range(1000):
            os.write(1, b"x" * (1 << 20))
            os.write(2, b"x" * 10)
        return b"done"

    assert run_one(chatter, 20).output == b"done"
    assert capfd.readouterr() == ("", "")


def test_a_grandchild_that_holds_the_pipe_open_delays_nothing(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def leave_a_daemon() -> bytes:
        if os.fork() == 0:
            os.setsid()
            pid_file.write_text(str(os.getpid()))
            time.sleep(60)
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.01)
        return b"fine"

    def leave_a_daemon_and_die() -> bytes:
        if os.fork() == 0:
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGKILL)
        return b""

    started = time.monotonic()
    outcomes = run_all({"daemon": leave_a_daemon, "dead": leave_a_daemon_and_die}, 30)
    assert time.monotonic() - started < 10
    assert outcomes["daemon"].output == b"fine"
    assert outcomes["dead"].detail == "killed by SIGKILL"
    os.kill(int(pid_file.read_text()), signal.SIGKILL)


def test_processes_that_a_task_started_in_its_group_end_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def start_one() -> bytes:
        child = os.fork()
        if child == 0:
            time.sleep(60)
        pid_file.write_text(str(child))
        return b""

    assert run_one(start_one, 10).status == "ok"
    wait_until_gone(int(pid_file.read_text()))


def test_a_child_holds_nothing_of_the_hook_but_its_answer(tmp_path: Path) -> None:
    with (tmp_path / "held").open("w") as held:
        os.set_inheritable(held.fileno(), True)
        outcome = run_one(lambda: repr(sorted(os.listdir("/proc/self/fd"))).encode(), 10)  # noqa: PTH208
        assert held.fileno() > 2
    # 0, 1, 2, the pipe, and the descriptor that lists the folder.
    assert len(eval(outcome.output)) == 5


def test_no_child_and_no_descriptor_is_left_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    def hang() -> bytes:
        time.sleep(30)
        return b""

    run_all({"ok": lambda: b"", "hang": hang}, 0.2)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_task_that_closes_its_pipe_and_goes_on_is_a_hang() -> None:
    def hide() -> bytes:
        os.closerange(3, 100)
        time.sleep(60)
        return b""

    cpu = time.process_time()
    assert run_one(hide, 0.5).status == "hang"
    assert time.process_time() - cpu < 0.3, "the caller spun instead of waiting"
