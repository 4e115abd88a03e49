"""A deep check of this node: whether one was asked for, whether it may run now, and its answer.

Owns the course of it, within one health check. What costs nobody anything has been looked at by
then; what is left is what uses the GPUs (``probes.nccl``) and what the site's health checks leave
out. It runs only where Slurm, asked at that moment, says that the node is drained or down and that
nothing runs on it. The answer is a finding of the health check's record, with the request's id.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from slurm_hooks import catalog, check_request, gate, looking, probes, site_probes
from slurm_hooks.check_request import Request, Unusable
from slurm_hooks.context import HookContext
from slurm_hooks.deadline import Children, run_one
from slurm_hooks.looking import Round
from slurm_hooks.node_config import NodeConfig, Spool
from slurm_hooks.record import SEVERITIES, Evidence, Finding, ProbeResult

SOURCE = "check"
"""Source of the evidence whose key is the request's id and whose text begins with its kind."""

SLURM_SECONDS = 5.0
"""Time for the one question to Slurm."""

_STATE = "check"
"""Name of the state that holds which request has been answered, and which refusal been told."""

_OF_A_JOB = ("joblog", "checkpoint", "processes")
"""Probes that look at a job; a drained and idle node has none."""

_NCCL = "nccl"
_GRAVE = SEVERITIES.index("fault")
_WELL = ("ok", "findings", "skipped")


def wanted(settings: Spool, node: str) -> bytes:
    """Run in a child: return the request that stands for this node and has no answer yet, in JSON.

    Empty where there is none.
    """
    trusted = {0, os.geteuid(), *settings.trusted_uids}
    try:
        request = check_request.read(settings.path, node, trusted)
    except Unusable as error:
        return json.dumps({"unusable": str(error)}).encode()
    if request is None:
        return b""
    known = looking.kept(looking.states_of(settings, node), _STATE)
    if known.get("answered") == request.id:
        return b""
    return json.dumps({"request": asdict(request), "told": known.get("told")}).encode()


def answered(
    asked: bytes, seen: Round, told: HookContext, config: NodeConfig, states: Path, until: float
) -> Round:
    """Return ``seen`` with what the check that is ``asked`` for adds to it, and the answer.

    ``until`` is a moment of ``time.monotonic()``.
    """
    document = json.loads(asked)
    if "unusable" in document:
        why = document["unusable"]
        found = catalog.finding("hook.request_unusable", details={"error": why})
        return replace(seen, findings=(*seen.findings, found))
    request = Request(**document["request"])
    why_not = _why_not_now(told.node, config, until)
    if why_not:
        if document["told"] == [request.id, why_not]:
            return seen
        kept = {_STATE: {"told": [request.id, why_not]}}
        return _with(seen, _answer("check.refused", request, why_not), kept)
    deep = _look_deeply(seen, told, config, states, until)
    return _with(deep, _verdict(request, deep), {_STATE: {"answered": request.id}})


def _why_not_now(node: str, config: NodeConfig, until: float) -> str:
    """Why nothing may be run here now; empty where Slurm says that no job is here or can come."""
    seconds = max(0.1, min(SLURM_SECONDS, until - time.monotonic()))

    def ask() -> bytes:
        scontrol = gate.Scontrol(gate.find_scontrol(config.hooks.scontrol), config.hooks.slurm_conf)
        return json.dumps(_in_the_way(gate.node_state(scontrol, node, seconds))).encode()

    outcome = run_one(ask, seconds + 0.2)
    if outcome.status != "ok":
        said = str(outcome.detail).removeprefix("GateError: ")
        return f"Slurm does not say that this node is idle: {said}"
    why_not: str = json.loads(outcome.output)
    return why_not


def _in_the_way(node: gate.NodeState) -> str:
    """Why a node in this state is not left alone; empty if it is."""
    base, *_flags = node.state.split("+")
    if not node.drained and not base.startswith("DOWN"):
        return "the node is in service: drain it first"
    if node.cpus_allocated or not base.startswith(("IDLE", "DOWN")) or "COMPL" in node.state:
        return "a job is still on the node"
    if "REBOOT" in node.state or "POWER" in node.state:
        return f"the node is about to go ({node.state})"
    return ""


def _look_deeply(
    seen: Round, told: HookContext, config: NodeConfig, states: Path, until: float
) -> Round:
    """Return ``seen`` and what the probes show that the health check does not run so."""
    names = _names(config)
    context = replace(told, deep=True)
    before = [result for result in seen.results if result.name != _NCCL]
    found = [one for one in seen.findings if not one.code.startswith(f"{_NCCL}.")]
    with Children() as children:
        seconds = max(0.1, until - time.monotonic())
        looking.start(children, names, context, config, states, seconds)
        more = looking.collect(names, children.wait())
    return Round(
        (*found, *more.findings),
        (*before, *more.results),
        {**seen.states, **more.states},
        {**seen.notes, **more.notes},
    )


def _names(config: NodeConfig) -> tuple[str, ...]:
    """The probes that belong to a deep check and that a health check here leaves out.

    One that the configuration gives to no hook is turned off, but for ``nccl``, which is in none
    by default and waits for this; a health check that has it runs no collective.
    """
    every = [name for name in (*probes.NAMES, site_probes.NAME) if name not in _OF_A_JOB]
    given = {name: getattr(config.probes, name).hooks for name in every}
    left_out = [name for name in every if given[name] and "health_check" not in given[name]]
    return tuple(name for name in every if name in left_out or name == _NCCL)


def _verdict(request: Request, seen: Round) -> Finding:
    faults = [f for f in seen.findings if SEVERITIES.index(f.severity) >= _GRAVE]
    failed = [result for result in seen.results if result.status not in _WELL]
    if faults or failed:
        words = [fault.summary for fault in faults]
        words += [f"probe {one.name} ended in {one.status}" for one in failed]
        more = f" and {len(words) - 1} more" if len(words) > 1 else ""
        return _answer("check.failed", request, words[0] + more)
    return _answer("check.passed", request, _done(seen.results))


def _done(results: Sequence[ProbeResult]) -> str:
    looked = [result.name for result in results if result.status != "skipped"]
    skipped = [f"{r.name} ({r.detail})" for r in results if r.status == "skipped"]
    return ", ".join(looked) + (f"; not looked at: {', '.join(skipped)}" if skipped else "")


def _answer(code: str, request: Request, why: str) -> Finding:
    words = f"{request.kind}: {request.why}" if request.why else request.kind
    evidence = Evidence(SOURCE, words, time=request.time, key=request.id)
    return catalog.finding(code, evidence=(evidence,), details={"why": why[:400]})


def _with(seen: Round, answer: Finding, kept: dict[str, Any]) -> Round:
    return replace(seen, findings=(*seen.findings, answer), states={**seen.states, **kept})
