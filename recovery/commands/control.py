"""What an operator changes: ``pause`` and ``resume``, and ``ack``, which names who sees to it."""

from __future__ import annotations

import json
import os
import pwd
from typing import Any

import click

from recovery.commands import opening
from slurm_hooks.record import utc

_PAUSED_NODES_LIMIT = 1000


_PARTITION = click.option("--partition", help="Only this partition.")
_NODE = click.option("--node", help="Only this node, or a list such as n[1-4].")
_JOB = click.option(
    "--job", callback=opening.job_name, help="Only this job: 12, an array 6, a task of it 6_2."
)


@click.command()
@_PARTITION
@_NODE
@_JOB
@click.option("--why", required=True, help="For whoever wonders why nothing happens.")
def pause(partition: str | None, node: str | None, job: str | None, why: str) -> None:
    """Send no further command, from now on until `recovery resume`; deciding goes on."""
    for scope, name in _scopes(partition, node, job):
        _order({"type": "pause", "scope": scope, "name": name, "paused": True, "why": why})
        click.echo(f"{scope} {name}".rstrip() + ": paused")


@click.command()
@_PARTITION
@_NODE
@_JOB
@click.option("--why", required=True, help="What was found, and why it is safe to go on.")
def resume(partition: str | None, node: str | None, job: str | None, why: str) -> None:
    """End a pause; with no scope, the pause of all, and close every circuit breaker."""
    wanted = _scopes(partition, node, job)
    with opening.index(opening.configuration()) as store:
        tripped = [one.kind for one in store.breakers().values() if one.tripped]
        paused = {(one.scope, one.name) for one in store.pauses()}
    ended = [scope for scope in wanted if scope in paused]
    closed = tripped if wanted == [("all", "")] else []
    if not ended and not closed:
        others = ", ".join(f"{scope} {name}".rstrip() for scope, name in sorted(paused))
        hint = f"; paused: {others}" if others else ""
        opening.fail(f"nothing of that is paused, and no circuit breaker is open{hint}", 1)
    for kind in closed:
        said = f"{_who()}: {why}"
        _order({"type": "breaker", "kind": kind, "tripped": False, "why": said})
        click.echo(f"{kind}: closed")
    for scope, name in ended:
        _order({"type": "pause", "scope": scope, "name": name, "paused": False, "why": why})
        click.echo(f"{scope} {name}".rstrip() + ": resumed")


def _scopes(partition: str | None, node: str | None, job: str | None) -> list[tuple[str, str]]:
    from recovery import naming
    from recovery.slurm.hostlist import HostlistError, expand

    try:
        nodes = expand(node, _PAUSED_NODES_LIMIT) if node else ()
    except HostlistError as error:
        opening.fail(f"--node {node}: {error}", 2)
    found = [("node", name) for name in nodes]
    found += [("partition", name) for name in (partition or "").split(",") if name]
    # Slurm restarts and holds a heterogeneous job whole: a part's pause is its leader's.
    found += [("job", naming.whole(job))] if job else []
    return found or [("all", "")]


def _order(event: dict[str, Any]) -> None:
    """Journal a person's order; the aggregator takes it in before its next command."""
    from recovery.journal import Journal, JournalError

    try:
        config = opening.configuration()
        if config.controller.state.exists():  # a pause may come before the first pass
            opening.state_folder(config)
        journal = Journal(config.controller.state / "journal")
        journal.append({"time": utc(), "who": _who(), **event})
    except JournalError as error:
        opening.fail(str(error), 2)


def _who() -> str:
    """Who gives an order: who called sudo, else the account, by its number where it has no name."""
    try:
        account = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        account = str(os.getuid())
    return os.environ.get("SUDO_USER") or account


@click.command()
@click.argument("words", metavar="ID", nargs=-1, required=True)
@click.option("--owner", required=True, help="Who looks after it.")
@opening.JSON
def ack(words: tuple[str, ...], owner: str, as_json: bool) -> None:
    """Say who looks after a job, a node or a decision that needs a person."""
    from recovery import concerns, naming

    name = " ".join(words)
    with opening.index(opening.configuration()) as store:
        try:
            found = concerns.find(store.file, name)
        except naming.Ambiguous as error:
            opening.fail(str(error), 1)
    if found is None:
        opening.fail(f"nothing called {name!r} needs a person; see: recovery status", 1)
    _order({"type": "ack", "subject": found.subject, "who": owner, "by": _who()})
    if as_json:
        click.echo(json.dumps({"schema": "ack/v1", "subject": found.subject, "owner": owner}))
    else:
        click.echo(f"{found.subject}: {owner} looks after it")
