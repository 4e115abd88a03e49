"""What Slurm calls: prolog, epilog, health check. Sense, report, and never get in the way.

Owns the course of one hook and its time. The process that slurmd waits for touches only its own
memory and its children: configuration, probes, spool and local disk are theirs, and a child that
does not come back is left behind. Whatever goes wrong in here, the hook exits 0 and says so.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from slurm_hooks import lean, own_failures

if TYPE_CHECKING:  # a hook delays every job: what it needs is imported when it is needed
    from pathlib import Path

    from slurm_hooks.configured import Configured
    from slurm_hooks.context import HookContext
    from slurm_hooks.looking import Round
    from slurm_hooks.node_config import NodeConfig
    from slurm_hooks.record import FaultRecord

ERRANDS_SECONDS = 1.0
"""Time for what goes on beside the probes: records that wait from earlier, the job's note."""

SPARING_SECONDS = 1.0
"""Time for reading or writing what spares prologs their probes, on the local disk or in memory."""

RESERVE_SHARE, RESERVE_MOST_SECONDS = 0.35, 6.0
"""What of the budget is kept for delivery: the smaller of a share and a number of seconds."""

TELL_SECONDS = 0.4
"""What of the budget is kept for saying what became of the gate."""


def prolog(started: float | None = None, plan: bytes | None = None) -> NoReturn:
    """Before a job starts on this node: report what is found. ``quiet`` has its first lines.

    Exits 1, which keeps the job from starting here, only where ``gate`` says so. ``started`` is a
    moment of ``time.monotonic()``, by default now, and ``plan`` what ``quiet`` was answered, None
    if it has not asked: a program that an earlier version installed gives none, and must not drain
    its node for that.
    """
    _leave(_run("prolog", time.monotonic() if started is None else started, plan))


def epilog() -> NoReturn:
    """After a job has ended on this node: report on a job that failed or opted in, whatever."""
    _leave(_run("epilog", time.monotonic()))


def health_check() -> NoReturn:
    """Every minute or so: report what is new, refresh the heartbeat."""
    _leave(_run("health_check", time.monotonic()))


def task_prolog() -> NoReturn:
    """Before each task: print what slurmstepd exports to a task of a job that opted in."""
    try:
        from slurm_hooks import configured, task_environment

        run = configured.by_file().config.hooks.run
        for name, value in task_environment.exports(os.environ, run).items():
            print(f"export {name}={value}")
    except BaseException as error:  # a task starts in any case
        own_failures.say("task_prolog", f"{type(error).__name__}: {error}")
    _leave(0)


class Ended(BaseException):
    """slurmd has asked the hook to end."""


def _leave(status: int) -> NoReturn:
    """End at once: there is nothing to tear down, and it would take 5 ms (measured)."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(status)


def _run(hook: str, started: float, plan: bytes | None = None) -> int:
    gc.disable()  # a hook's life is too short for garbage: saves 6 ms of 60, and children's memory
    try:
        _end_on_signals()
        if hook == "health_check":
            from slurm_hooks import one_at_a_time

            mark = one_at_a_time.mark_running()
            if mark is None:
                return 0
        return _sense_and_report(hook, started, plan)
    except Ended:
        return 0
    except BaseException as error:  # a hook fails open, and records what it caught
        own_failures.report(hook, error)
    return 0


def _sense_and_report(hook: str, started: float, plan: bytes | None) -> int:
    lean.load("dataclasses", without="inspect", get_annotations=lean.own_annotations)
    lean.load("pathlib", without="ipaddress")
    from slurm_hooks import context, looking
    from slurm_hooks.deadline import Children

    configured = _configured(hook, plan)
    config, troubles = configured.config, configured.troubles
    told, boot_id = context.told(hook)
    budget = getattr(config.hooks.budget, hook)
    reserve = min(budget * RESERVE_SHARE, RESERVE_MOST_SECONDS)
    states = looking.states_of(config.spool, told.node)
    freshness = 0.0 if troubles else config.hooks.freshness
    names = () if _is_spared(told, states, boot_id, freshness) else looking.names_for(hook, config)
    with Children() as children:
        left = max(0.1, started + budget - reserve - time.monotonic())
        looking.start(children, names, told, config, states, left)
        if hook != "prolog" or not configured.is_planned:
            seconds = min(left, ERRANDS_SECONDS)
            until = time.monotonic() + seconds * 0.8
            children.start("errands", lambda: _errands(config, told, boot_id, until), seconds)
        if hook != "prolog":  # a prolog has nothing to tell, as a rule
            from slurm_hooks import news  # while the children look

            if hook == "health_check":
                children.start("history", lambda: news.remembered(states), left)
        outcomes = children.wait()
    seen = looking.collect(names, outcomes)
    if asked := outcomes["errands"].output if "errands" in outcomes else b"":
        from slurm_hooks import deep_check

        until = started + budget - reserve
        seen = deep_check.answered(asked, seen, told, config, states, until)
    verdict = "ok"
    if hook != "prolog" or troubles or not seen.is_well:
        memory = outcomes["history"].output if "history" in outcomes else b""
        ends = started + budget - reserve * 0.4, started + budget - reserve * 0.1
        report, is_told = _tell(told, boot_id, configured, seen, memory, ends)
        verdict = report.verdict
    if troubles:
        return 0
    if verdict == "fatal":
        return _gate(report, config, started + budget, is_news=is_told)
    has_asked = hook != "prolog" or plan is not None
    spares = freshness if verdict == "ok" else 0.0
    _note(told, boot_id, configured, spares, started + budget, has_asked=has_asked)
    return 0


def _configured(hook: str, plan: bytes | None) -> Configured:
    """Return what to go by: what an earlier hook has noted, else what the file says."""
    from slurm_hooks import configured, quiet

    if hook != "prolog":
        plan = quiet.plan()
    known = configured.by_plan(plan) if plan else None
    if known and not (hook == "health_check" and known.config.hooks.freshness):
        return known
    return configured.by_file()


def _tell(
    told: HookContext,
    boot_id: str,
    configured: Configured,
    seen: Round,
    memory: bytes,
    ends: tuple[float, float],
) -> tuple[FaultRecord, bool]:
    """Deliver what there is to tell; return the record of this run, and whether it was any news.

    ``ends`` are moments of ``time.monotonic()``, as ``delivery`` takes them.
    """
    from slurm_hooks import delivery, news

    config = configured.config
    report = news.record(told, boot_id, (*configured.troubles, *seen.findings), seen.results)
    if told.hook == "health_check":
        work = news.what_is_news(report, seen.states, memory, config.hooks.repeat)
    elif news.worth_reporting(report):
        work = delivery.Delivery(report, states=seen.states)
    else:
        work = delivery.Delivery(None)
    if config.hooks.freshness and not configured.troubles:
        from slurm_hooks.freshness import with_pass

        work = with_pass(work, report)
    lost = delivery.deliver(work, config.spool, told.node, *ends)
    if lost:
        own_failures.say(told.hook, f"record {report.id} ({report.verdict}) is lost: {lost}")
    return report, work.record is not None


def _is_spared(told: HookContext, states: Path, boot_id: str, freshness_seconds: float) -> bool:
    """Whether a health check has passed just before this prolog."""
    if told.hook != "prolog" or not freshness_seconds:
        return False
    from slurm_hooks.deadline import run_one
    from slurm_hooks.freshness import freshly_passed

    fresh = run_one(lambda: freshly_passed(states, boot_id, freshness_seconds), SPARING_SECONDS)
    return bool(fresh.output)


def _note(
    told: HookContext,
    boot_id: str,
    configured: Configured,
    freshness: float,
    until: float,
    *,
    has_asked: bool,
) -> None:
    """Note, for hooks to come, the plan, and that prologs have nothing to do where that is so.

    Not where the plan came from a note; nor where this hook has not asked whether there is one,
    and has nothing to add to it.
    """
    config = configured.config
    if told.hook == "epilog" or configured.is_planned or not configured.told:
        return
    from slurm_hooks import looking, noting
    from slurm_hooks.deadline import run_one

    spares = freshness if looking.names_for("prolog", config) else None
    if spares == 0 and not has_asked:
        return
    states = looking.states_of(config.spool, told.node)
    seconds = max(0.1, min(SPARING_SECONDS, until - time.monotonic()))
    run_one(lambda: noting.leave_note(configured.told, states, boot_id, spares), seconds)


def _errands(config: NodeConfig, told: HookContext, boot_id: str, until: float) -> bytes:
    """Run in a child: what belongs to no probe and is not waited for long.

    Answers, in a health check, with the deep check that is asked for: empty where none is.
    """
    from slurm_hooks import delivery, task_environment

    asked = b""
    try:
        if told.hook != "health_check":
            task_environment.note(told, config.hooks.run)
        elif os.path.lexists(config.spool.path / "requests" / told.node):
            from slurm_hooks import deep_check

            asked = deep_check.wanted(config.spool, told.node)
        if told.hook == "prolog" and told.job and told.job.comment:
            from slurm_hooks import running_jobs

            running_jobs.note(told, config.spool)
    finally:
        delivery.forward(config.spool, told, boot_id, until)
    return asked


def _gate(report: FaultRecord, config: NodeConfig, until: float, *, is_news: bool) -> int:
    """Close the gate where this node may, record it, and return the hook's exit status."""
    from dataclasses import replace

    from slurm_hooks import delivery, gate, looking, record
    from slurm_hooks.deadline import run_one

    states = looking.states_of(config.spool, report.node)

    def close() -> bytes:
        closed = gate.attempt(report, config, states, until - TELL_SECONDS - 0.1, is_news=is_news)
        if closed is None:
            return b""
        return b"+" + closed.how.encode() if closed.by_us else b"="

    outcome = run_one(close, max(0.1, until - TELL_SECONDS - time.monotonic()))
    if outcome.status == "ok" and outcome.output in (b"", b"="):
        return int(outcome.output == b"=" and report.hook == "prolog")
    if outcome.status == "ok":
        told = own_failures.finding("hook.gate_closed", outcome.output[1:].decode())
    else:
        told = own_failures.finding(
            "hook.gate_failed", str(outcome.detail).removeprefix("GateError: ")
        )
    news = replace(report, id=record.new_id(), time=record.utc(), findings=(told,), probes=())
    ends = until - TELL_SECONDS / 2, until
    lost = delivery.deliver(delivery.Delivery(news), config.spool, report.node, *ends)
    if lost:
        own_failures.say(report.hook, f"record {news.id} ({told.summary}) is lost: {lost}")
    return int(outcome.status == "ok" and report.hook == "prolog")


def _end_on_signals() -> None:
    """End well when slurmd asks for it: a hook that dies of a signal would drain the node."""

    def end(_number: int, _frame: object) -> None:
        raise Ended

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
