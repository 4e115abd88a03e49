"""What an operator changes: ``resume`` closes the circuit breaker."""

from __future__ import annotations

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
