"""`recovery check`: ask for deep checks, or see what was asked and answered.

Owns the words on the terminal; ``checking`` asks and answers. A hung spool hangs nobody here.
"""

from __future__ import annotations

import json
import os
import pwd
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

from recovery import checking
from recovery.checking import Answer
from recovery.commands import opening
from recovery.slurm.base import Node, Scheduler, SchedulerUnavailable
from recovery.slurm.hostlist import HostlistError, expand
from recovery.store import Store
from slurm_hooks.check_request import Request
from slurm_hooks.config import Config
from slurm_hooks.deadline import run_one
from slurm_hooks.record import utc

SCHEMA = "checks/v1"
LOOK_BACK_SECONDS = 86_400.0


class CheckError(Exception):
    """Nobody was asked; the text is one line that says why."""


@click.command()
@click.argument("nodes", required=False)
@click.option("--why", default="", help="What the node is suspected of; stands in its record.")
@opening.JSON
def check(nodes: str | None, why: str, as_json: bool) -> None:
    """Ask NODES (`n[1-4]`) for a deep check; without NODES, what was asked and answered."""
    config = opening.configuration()
    shown: dict[str, Any]
    try:
        if nodes is not None:
            said = ask(config, opening.scheduler(config), expand(nodes), why)
            shown = {"schema": "checks-asked/v1", "said": said}
        else:
            with opening.index(config) as store:
                shown = document(config, store, time.time())
            said = text(shown)
    except HostlistError as error:
        opening.fail(str(error), 2)
    except CheckError as error:
        opening.fail(str(error), 1)
    click.echo(json.dumps(shown) if as_json else "\n".join(said or ["nothing was asked"]))


def ask(config: Config, scheduler: Scheduler, names: Collection[str], why: str) -> list[str]:
    """Ask ``names`` for a deep check; return a line for each that says what happens next.

    Raises:
        CheckError: Slurm knows one of them not, or the spool takes no request.
    """
    try:
        nodes: Mapping[str, Node] | None = scheduler.nodes(names)
    except SchedulerUnavailable:
        nodes = None
    unknown = [name for name in names if nodes is not None and name not in nodes]
    if unknown:
        raise CheckError(f"Slurm knows no node {', '.join(unknown[:5])}; nobody was asked")

    def put() -> bytes:
        return json.dumps(
            [asdict(one) for one in checking.ask(config.spool.path, names, "asked", _who(), why)]
        ).encode()

    outcome = run_one(put, checking.SPOOL_SECONDS)
    if outcome.status != "ok":
        said = str(outcome.detail).partition(": ")[2] or outcome.detail
        raise CheckError(f"the spool takes no request ({outcome.status}): {said}")
    return [f"{name}: {_next(nodes, name)}" for name in names]


def document(config: Config, store: Store, now: float) -> dict[str, Any]:
    """Return what was asked and answered in the last day, and what still stands."""
    trusted = {0, os.geteuid(), *config.spool.trusted_uids}
    requests = checking.standing(config.spool.path, trusted)
    found = checking.answers(store, utc(now - LOOK_BACK_SECONDS), utc(now + LOOK_BACK_SECONDS))
    return {
        "schema": SCHEMA,
        "requests": None if requests is None else [asdict(request) for request in requests],
        "answers": [asdict(answer) for answer in found],
    }


def text(shown: Mapping[str, Any]) -> list[str]:
    """Return the lines of a ``document``, each of 80 columns at most."""
    answers = [Answer(**item) for item in shown["answers"]]
    if shown["requests"] is None:
        return ["the spool does not answer: what stands there is not known", *_answered(answers)]
    lines = []
    for request in [Request(**item) for item in shown["requests"]]:
        refused = [a.why for a in answers if a.request == request.id and a.verdict == "refused"]
        waits = refused[-1] if refused else "its next health check answers"
        lines.append(_cut(f"{request.time[:16]}Z  {request.node}  waits: {waits}"))
    return lines + _answered(answers)


def _answered(answers: Sequence[Answer]) -> list[str]:
    return [
        _cut(f"{answer.time[:16]}Z  {answer.node}  {answer.verdict}: {answer.why}")
        for answer in answers
        if answer.verdict != "refused"
    ]


def _next(nodes: Mapping[str, Node] | None, name: str) -> str:
    if nodes is None:
        return "asked; Slurm does not answer, so whether it can be checked now is not known"
    node = nodes[name]
    if not node.drained and node.state != "DOWN":
        return "asked; it is in service, and waits for a day to be drained and idle"
    if node.state not in ("IDLE", "DOWN"):
        return "asked; a job is on it, and the check waits until that has ended"
    return "asked; its next health check answers"


def _who() -> str:
    name = os.environ.get("SUDO_USER")
    try:
        return name or pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _cut(line: str) -> str:
    shown = "".join(one if one.isprintable() else "?" for one in line)
    return shown if len(shown) <= 80 else shown[:79] + "…"
