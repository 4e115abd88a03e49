"""One round of probes: each in a child of its own, side by side, all inside one deadline.

Owns how a probe's answer comes back and how a probe that does not come back is told. What a probe
looks at is its own module's business; who wants a round belongs to ``hooks`` and ``cli``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from slurm_hooks import bounds, probes, site_probes
from slurm_hooks.context import HookContext
from slurm_hooks.deadline import ChildOutcome, Children
from slurm_hooks.frozen import frozen
from slurm_hooks.node_config import NodeConfig, Spool
from slurm_hooks.record import Finding, ProbeResult
from slurm_hooks.spool import SpoolError, make_private, read_regular, write

STATE_LIMIT_BYTES = 512 * 1024
"""Largest state that a probe may keep; half of what a child may answer."""


QUIET = ("ok", "skipped")
"""How a probe ends that has nothing to tell."""


@frozen
class Round:
    """What a round of probes saw.

    ``states`` are those to be kept once the findings are safe, by the probe's name; a probe
    without findings has kept its own already. ``notes`` are for a person's eyes.
    """

    findings: tuple[Finding, ...] = ()
    results: tuple[ProbeResult, ...] = ()
    states: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def is_well(self) -> bool:
        """Whether nothing was found and every probe has looked, or had nothing to look at."""
        return not self.findings and all(one.status in QUIET for one in self.results)


def names_for(hook: str, config: NodeConfig) -> tuple[str, ...]:
    """Return the probes that the configuration gives to ``hook``, the site's own last."""
    names = (*probes.NAMES, site_probes.NAME)
    return tuple(name for name in names if hook in getattr(config.probes, name).hooks)


def states_of(spool: Spool, node: str) -> Path:
    """Return the folder in which the node's probes keep their states."""
    return spool.buffer_of(node) / "state"


def start(
    children: Children,
    names: Sequence[str],
    context: HookContext,
    config: NodeConfig,
    states: Path,
    seconds: float,
    *,
    remember: bool = True,
) -> None:
    """Start the probes ``names`` among ``children``; their states lie in the folder ``states``.

    Without ``remember`` they leave no trace: a look by hand must not take a line from a hook.
    """
    for name in names:
        reason = probes.idle(name, context, config)
        if reason:
            children.spare(name, _answer(probes.Seen(), reason))
            continue
        limit = min(seconds, getattr(config.probes, name).deadline)
        if name == site_probes.NAME:
            inner = max(0.1, min(limit, seconds - site_probes.GATHER_SECONDS))
            task = functools.partial(site_probes.look, context, config, inner)
            limit = inner + site_probes.GATHER_SECONDS
        else:
            task = functools.partial(_look, name, context, config, states, remember)
        children.start(name, task, limit)


def collect(names: Sequence[str], outcomes: Mapping[str, ChildOutcome]) -> Round:
    """Return what the probes ``names`` saw, in that order."""
    findings: list[Finding] = []
    results: list[ProbeResult] = []
    states: dict[str, Any] = {}
    notes: dict[str, Mapping[str, Any]] = {}
    for name in names:
        outcome = outcomes[name]
        if outcome.status != "ok":
            results.append(ProbeResult(name, outcome.status, outcome.seconds, outcome.detail))
            continue
        answer = json.loads(outcome.output)
        if name == site_probes.NAME:
            findings += [Finding.from_dict(item) for item in answer["findings"]]
            results += [ProbeResult.from_dict(item) for item in answer["probes"]]
            continue
        found = [Finding.from_dict(item) for item in answer["findings"]]
        findings += found
        status = "skipped" if "skipped" in answer else "findings" if found else "ok"
        results.append(ProbeResult(name, status, outcome.seconds, answer.get("skipped")))
        notes[name] = answer["notes"]
        if answer["state"] is not None:
            states[name] = answer["state"]
    return Round(tuple(findings), tuple(results), states, notes)


def keep(folder: Path, states: Mapping[str, Any]) -> None:
    """Write states to be found by the next run; a broken one costs a repeated report, no more.

    Raises:
        SpoolError: the local disk does not take them.
    """
    make_private(folder)
    for name, state in states.items():
        content = json.dumps(state).encode()
        if len(content) > STATE_LIMIT_BYTES:
            raise SpoolError(f"the state of {name} is {len(content)} bytes, too large to keep")
        write(folder, f"{name}.json", content, durable=False)


def kept(folder: Path, name: str) -> Mapping[str, Any]:
    """Return the state called ``name``, empty where there is none or it cannot be read."""
    try:
        state = json.loads(read_regular(folder / f"{name}.json", STATE_LIMIT_BYTES))
    except (SpoolError, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def _look(
    name: str, context: HookContext, config: NodeConfig, states: Path, remember: bool
) -> bytes:
    """Run in the child: look, and answer in JSON."""
    if probes.has_no_job(name, context, config):
        return _answer(probes.Seen(), "no job that opted in runs here")
    try:
        seen = probes.load(name).look(probes.Look(context, config, kept(states, name)))
    except probes.Skipped as reason:
        return _answer(probes.Seen(), str(reason))
    if remember and seen.state is not None and not seen.findings:
        # Nothing was found, so nothing can be lost: no need to wait for a record to be safe.
        keep(states, {name: dict(seen.state)})
        seen = replace(seen, state=None)
    return _answer(seen)


def _answer(seen: probes.Seen, skipped: str | None = None) -> bytes:
    answer: dict[str, Any] = {
        "findings": [finding.to_dict() for finding in bounds.fit_findings(seen.findings)],
        "state": None if seen.state is None else dict(seen.state),
        "notes": dict(seen.notes),
    }
    if skipped is not None:
        answer["skipped"] = skipped[: bounds.DETAIL]
    return json.dumps(answer, default=str).encode()
