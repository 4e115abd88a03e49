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

from slurm_hooks import config_file

if TYPE_CHECKING:  # a hook delays every job: what it needs is imported when it is needed
    import socket
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    from slurm_hooks.config import Config
    from slurm_hooks.context import HookContext
    from slurm_hooks.deadline import ChildOutcome
    from slurm_hooks.delivery import Delivery
    from slurm_hooks.record import FaultRecord, Finding

CONFIG_SECONDS = 1.0
"""Time for reading recovery.toml; a local disk takes well under a millisecond."""

ERRANDS_SECONDS = 1.0
"""Time for what goes on beside the probes: records that wait from earlier, the job's note."""

RESERVE_SHARE, RESERVE_MOST_SECONDS = 0.35, 6.0
"""What of the budget is kept for delivery: the smaller of a share and a number of seconds."""

TELL_SECONDS = 0.4
"""What of the budget is kept for saying what became of the gate."""

_QUIET = ("ok", "skipped")

_MEMORY = "reported"
"""Name of the state that holds what health checks have reported."""

_GATE = "gate"
"""Name of the state that ``gate`` keeps while something fatal stands."""


def prolog(started: float | None = None) -> NoReturn:
    """Before a job starts on this node: report what is found. ``quiet`` has its first lines.

    Exits 1, which keeps the job from starting here, only where ``gate`` says so. ``started`` is a
    moment of ``time.monotonic()``, by default now: a program that an earlier version installed
    gives none, and must not drain its node for that.
    """
    _leave(_run("prolog", time.monotonic() if started is None else started))


def epilog() -> NoReturn:
    """After a job has ended on this node: report on a job that failed or opted in, whatever."""
    _leave(_run("epilog", time.monotonic()))


def health_check() -> NoReturn:
    """Every minute or so: report what is new, refresh the heartbeat."""
    _leave(_run("health_check", time.monotonic()))


def task_prolog() -> NoReturn:
    """Before each task: print what slurmstepd exports to a task of a job that opted in."""
    try:
        from slurm_hooks import task_environment
        from slurm_hooks.config import Config, load_what_can_be_read
        from slurm_hooks.deadline import run_one

        path = config_file.path()
        read = run_one(lambda: _read(path), CONFIG_SECONDS)
        config = Config()
        if read.output.startswith(b"+"):
            config = load_what_can_be_read(read.output[1:], path)[0]
        for name, value in task_environment.exports(os.environ, config.hooks.run).items():
            print(f"export {name}={value}")
    except BaseException as error:  # a task starts in any case
        _say("task_prolog", f"{type(error).__name__}: {error}")
    _leave(0)


class Ended(BaseException):
    """slurmd has asked the hook to end."""


def _leave(status: int) -> NoReturn:
    """End at once: there is nothing to tear down, and it would take 5 ms (measured)."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(status)


def _run(hook: str, started: float) -> int:
    gc.disable()  # a hook's life is too short for garbage: saves 6 ms of 60, and children's memory
    try:
        _end_on_signals()
        lock = _only_one_at_a_time() if hook == "health_check" else None
        if hook == "health_check" and lock is None:
            return 0
        return _sense_and_report(hook, started)
    except Ended:
        return 0
    except BaseException as error:  # a hook fails open, and records what it caught
        _report_own_failure(hook, error)
    return 0


def _sense_and_report(hook: str, started: float) -> int:
    from slurm_hooks.deadline import Children

    path = config_file.path()
    with Children() as children:
        children.start("config", lambda: _read(path), CONFIG_SECONDS)
        from slurm_hooks import looking  # while the child reads

        read = children.wait()["config"]
        config, troubles = _configured(read, path)
    told, boot_id = _told(hook)
    budget = getattr(config.hooks.budget, hook)
    reserve = min(budget * RESERVE_SHARE, RESERVE_MOST_SECONDS)
    states = looking.states_of(config.spool, told.node)
    freshness = 0.0 if troubles else config.hooks.freshness
    names = () if _is_spared(told, states, boot_id, freshness) else looking.names_for(hook, config)
    with Children() as children:
        left = max(0.1, started + budget - reserve - time.monotonic())
        looking.start(children, names, told, config, states, left)
        seconds = min(left, ERRANDS_SECONDS)
        until = time.monotonic() + seconds * 0.8
        children.start("errands", lambda: _errands(config, told, boot_id, until), seconds)
        if hook == "health_check":
            children.start("history", lambda: _remembered(states), left)
        from slurm_hooks import delivery, record  # while the children look

        outcomes = children.wait()
    seen = looking.collect(names, outcomes)
    report = record.FaultRecord(
        id=record.new_id(),
        cluster=told.cluster,
        node=told.node,
        boot_id=boot_id,
        time=record.utc(),
        hook=hook,
        job=told.job,
        findings=(*troubles, *seen.findings),
        probes=seen.results,
    )
    if hook == "health_check":
        work = _what_is_news(report, seen.states, outcomes["history"].output, config.hooks.repeat)
    elif _worth_reporting(report):
        work = delivery.Delivery(report, states=seen.states)
    else:
        work = delivery.Delivery(None)
    if freshness:
        from slurm_hooks.freshness import with_pass

        work = with_pass(work, report)
    ends = started + budget - reserve * 0.4, started + budget - reserve * 0.1
    lost = delivery.deliver(work, config.spool, told.node, *ends)
    if lost:
        _say(hook, f"record {report.id} ({report.verdict}) is lost: {lost}")
    if report.verdict == "ok" and not troubles:
        _spare_prologs(hook, read.output[1:], config, states, boot_id, started + budget)
    if report.verdict != "fatal" or troubles:
        return 0
    return _gate(report, config, started + budget, is_news=work.record is not None)


def _is_spared(told: HookContext, states: Path, boot_id: str, freshness_seconds: float) -> bool:
    """Whether a health check has passed just before this prolog."""
    if told.hook != "prolog" or not freshness_seconds:
        return False
    from slurm_hooks.deadline import run_one
    from slurm_hooks.freshness import freshly_passed

    fresh = run_one(lambda: freshly_passed(states, boot_id, freshness_seconds), CONFIG_SECONDS)
    return bool(fresh.output)


def _spare_prologs(
    hook: str, raw: bytes, config: Config, states: Path, boot_id: str, until: float
) -> None:
    """Note, for prologs to come, that they have nothing to do, where that is so."""
    from slurm_hooks import looking, quiet
    from slurm_hooks.deadline import run_one

    fresh = config.hooks.freshness if looking.names_for("prolog", config) else None
    if hook == "epilog" or fresh == 0:
        return
    seconds = max(0.1, min(CONFIG_SECONDS, until - time.monotonic()))
    run_one(lambda: quiet.leave_note(raw, states, boot_id, fresh), seconds)


def _errands(config: Config, told: HookContext, boot_id: str, until: float) -> bytes:
    """Run in a child: what belongs to no probe and is not waited for long."""
    from slurm_hooks import delivery, task_environment

    try:
        if told.hook != "health_check":
            task_environment.note(told, config.hooks.run)
        if told.hook == "prolog" and told.job and told.job.comment:
            from slurm_hooks import running_jobs

            running_jobs.note(told, config.spool)
    finally:
        delivery.forward(config.spool, told, boot_id, until)
    return b""


def _gate(report: FaultRecord, config: Config, until: float, *, is_news: bool) -> int:
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
        told = _own("hook.gate_closed", outcome.output[1:].decode())
    else:
        told = _own("hook.gate_failed", str(outcome.detail).removeprefix("GateError: "))
    news = replace(report, id=record.new_id(), time=record.utc(), findings=(told,), probes=())
    ends = until - TELL_SECONDS / 2, until
    lost = delivery.deliver(delivery.Delivery(news), config.spool, report.node, *ends)
    if lost:
        _say(report.hook, f"record {news.id} ({told.summary}) is lost: {lost}")
    return int(outcome.status == "ok" and report.hook == "prolog")


def _worth_reporting(report: FaultRecord) -> bool:
    """Whether a prolog or an epilog has something to say.

    That this node saw nothing is evidence too, where a job failed or its owner asked for recovery.
    """
    if report.findings or any(probe.status not in _QUIET for probe in report.probes):
        return True
    job = report.job
    if job is None or report.hook != "epilog":
        return False
    if job.exit != "0:0":
        return True
    from slurm_hooks import optin

    wishes = optin.parse(job.comment)
    return wishes.opted_in or bool(wishes.problems)


def _what_is_news(
    report: FaultRecord, states: Mapping[str, Any], memory: bytes, repeat_seconds: float
) -> Delivery:
    import json
    from dataclasses import replace

    from slurm_hooks import history
    from slurm_hooks.delivery import Delivery, heartbeat

    remembered, gate = json.loads(memory or b"[{}, {}]")
    judged = history.review(
        remembered, report.boot_id, report.findings, report.probes, time.time(), repeat_seconds
    )
    if judged.memory != remembered:
        states = {**states, _MEMORY: judged.memory}
    if gate and report.verdict != "fatal":
        states = {**states, _GATE: {}}  # mended: what is fatal next closes the gate anew
    news = replace(report, findings=judged.findings) if judged.due else None
    return Delivery(news, heartbeat(report), states)


def _remembered(states: Path) -> bytes:
    import json

    from slurm_hooks.looking import kept

    return json.dumps([kept(states, _MEMORY), kept(states, _GATE)]).encode()


def _read(path: Path) -> bytes:
    """Run in a child: the configuration file after a ``+``, or ``-`` where there is none."""
    try:
        return b"+" + config_file.read(path)
    except FileNotFoundError:
        return b"-"


def _configured(outcome: ChildOutcome, path: Path) -> tuple[Config, tuple[Finding, ...]]:
    """Return the configuration to go on with, and what is wrong with the configured one."""
    from slurm_hooks.config import Config, load_what_can_be_read

    if outcome.output == b"-":
        return Config(), ()
    if outcome.status == "ok":
        config, error = load_what_can_be_read(outcome.output[1:], path)
        return config, (_own("hook.config_error", error),) if error else ()
    code = "hook.config_unreachable" if outcome.status == "hang" else "hook.config_error"
    return Config(), (_own(code, f"{path}: {outcome.detail}"),)


def _told(hook: str) -> tuple[HookContext, str]:
    from dataclasses import replace

    from slurm_hooks.bounds import node_name
    from slurm_hooks.context import HookContext, boot_id

    told = HookContext.from_environ(hook, os.environ)
    return replace(told, node=node_name(told.node)), boot_id()


def _own(code: str, error: str, evidence: str | None = None) -> Finding:
    from slurm_hooks import catalog
    from slurm_hooks.record import Evidence

    seen = (Evidence("hook", evidence),) if evidence else ()
    return catalog.finding(code, evidence=seen, details={"error": error})


def _report_own_failure(hook: str, error: BaseException) -> None:
    """Record what the hook itself failed of; where even that fails, say it in one line."""
    text = f"{type(error).__name__}: {error}"
    try:
        import traceback

        from slurm_hooks import delivery, record
        from slurm_hooks.deadline import run_one

        path = config_file.path()
        config, _ = _configured(run_one(lambda: _read(path), CONFIG_SECONDS), path)
        told, boot_id = _told(hook)
        trace = "".join(traceback.format_exception(error))[-2000:]
        report = record.FaultRecord(
            id=record.new_id(),
            cluster=told.cluster,
            node=told.node,
            boot_id=boot_id,
            time=record.utc(),
            hook=hook,
            job=told.job,
            findings=(_own("hook.internal_error", text, trace),),
        )
        now = time.monotonic()
        lost = delivery.deliver(
            delivery.Delivery(report), config.spool, told.node, now + 0.5, now + 1.0
        )
    except BaseException as second:  # nothing is left to try
        lost = f"{type(second).__name__}: {second}"
    if lost:
        _say(hook, f"failed, and could not record it: {text}; {lost}")


def _say(hook: str, text: str) -> None:
    name = hook.replace("_", "-")
    line = " ".join(f"slurm-hook-{name}: {text}".split())[:500]
    with contextlib.suppress(OSError, ValueError):  # where nobody reads, nobody is told
        print(line, file=sys.stderr, flush=True)


def _end_on_signals() -> None:
    """End well when slurmd asks for it: a hook that dies of a signal would drain the node."""

    def end(_number: int, _frame: object) -> None:
        raise Ended

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)


def _only_one_at_a_time() -> socket.socket | None:
    """Return what marks this health check as the running one, or None if another is running.

    A name in the abstract namespace (unix(7)) lives in memory and is gone with its process, so
    no disk is touched and nothing stale is left. Any local user could take it as well: a holder
    of another user is none of ours and is ignored. Nodes of two clusters on one machine may have
    one name, but have not one configuration.
    """
    import socket
    import struct
    import zlib

    node = os.environ.get("SLURMD_NODENAME", "")[:80]
    which = zlib.crc32(os.fsencode(config_file.path()))
    name = f"\0slurm-hook-health-check {which:08x} {node}".encode("utf-8", "backslashreplace")[:107]
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        mark.bind(name)
        mark.listen(64)
        return mark
    except OSError:
        mark.setblocking(False)
    try:
        mark.connect(name)
        peer = mark.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        holder = struct.unpack("3i", peer)[1]
    except OSError:
        return mark
    return None if holder in (0, os.geteuid()) else mark
