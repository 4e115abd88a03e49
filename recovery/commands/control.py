"""What an operator changes: ``resume`` closes the circuit breaker, ``ack`` names who sees to it."""

from __future__ import annotations

import json
import os

import click

from recovery.commands import opening
from slurm_hooks.record import utc


@click.command()
@click.option("--why", required=True, help="What was found, and why it is safe to go on.")
def resume(why: str) -> None:
    """Close the circuit breaker, so that nodes may be drained again."""
    from recovery.journal import Journal

    config = opening.configuration()
    with opening.index(config) as store:
        open_breakers = [one.kind for one in store.breakers().values() if one.tripped]
    if not open_breakers:
        opening.fail("no circuit breaker is open", 1)
    journal = Journal(config.controller.state / "journal")
    who = os.environ.get("SUDO_USER") or str(os.getuid())
    for kind in open_breakers:
        event = {"type": "breaker", "kind": kind, "tripped": False, "why": f"{who}: {why}"}
        journal.append({"time": utc(), **event})
        click.echo(f"{kind}: closed")


@click.command()
@click.argument("name", metavar="ID")
@click.option("--owner", required=True, help="Who looks after it.")
@opening.JSON
def ack(name: str, owner: str, as_json: bool) -> None:
    """Say who looks after a job, a node or a decision that needs a person."""
    from recovery import concerns
    from recovery.journal import Journal, JournalError

    config = opening.configuration()
    with opening.index(config) as store:
        found = concerns.find(store.file, name)
    if found is None:
        opening.fail(f"nothing called {name!r} needs a person; see: recovery status", 1)
    by = os.environ.get("SUDO_USER") or str(os.getuid())
    event = {"type": "ack", "subject": found.subject, "who": owner, "by": by}
    try:
        Journal(config.controller.state / "journal").append({"time": utc(), **event})
    except JournalError as error:
        opening.fail(str(error), 2)
    if as_json:
        click.echo(json.dumps({"schema": "ack/v1", "subject": found.subject, "owner": owner}))
    else:
        click.echo(f"{found.subject}: {owner} looks after it")
