"""What an operator looks at: ``status``, ``decisions``, ``explain``."""

from __future__ import annotations

import json
import sys

import click

from recovery.commands import opening
from recovery.report import text
from slurm_hooks.record import utc


@click.command()
@opening.JSON
def status(as_json: bool) -> None:
    """Mode, grants, breakers, last pass, open decisions, silent nodes."""
    config = opening.configuration()
    with opening.index(config) as store:
        document = text.status_document(config, store, utc())
    click.echo(json.dumps(document) if as_json else text.status(document))


@click.command()
@click.option("--node", help="Only decisions that name this node.")
@click.option("--job", type=int, help="Only decisions on this job.")
@click.option("--user", help="Only decisions on jobs of this user.")
@click.option("--partition", help="Only decisions on jobs of this partition.")
@click.option("--class", "fault_class", help="Only decisions of this fault class.")
@click.option("--limit", default=20, show_default=True, help="At most so many, newest first.")
@opening.JSON
def decisions(
    node: str | None,
    job: int | None,
    user: str | None,
    partition: str | None,
    fault_class: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """What was decided, newest first."""
    with opening.index(opening.configuration()) as store:
        found = store.decisions(
            node=node, job=job, user=user, partition=partition, fault_class=fault_class, limit=limit
        )
    if as_json:
        items = [decision.to_dict() for decision in found]
        click.echo(json.dumps({"schema": "decisions/v1", "decisions": items}))
        return
    for decision in found:
        click.echo(text.line(decision))
    if not found:
        click.echo("no decision", err=True)
        sys.exit(1)


@click.command()
@click.argument("name")
@opening.JSON
def explain(name: str, as_json: bool) -> None:
    """The whole story of a decision id, a job number or a node."""
    with opening.index(opening.configuration()) as store:
        decision = store.decision(name)
        found = [decision] if decision else []
        if not found and name.isdigit():
            found = store.decisions(job=int(name), limit=50)[::-1]
        if not found:
            found = store.decisions(node=name, limit=10)[::-1]
    if not found:
        opening.fail(
            f"no decision, job or node called {name!r} is known; see: recovery decisions", 1
        )
    if as_json:
        items = [decision.to_dict() for decision in found]
        click.echo(json.dumps({"schema": "decisions/v1", "decisions": items}))
        return
    click.echo("\n\n".join(text.story(decision) for decision in found))
