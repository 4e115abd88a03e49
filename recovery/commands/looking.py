"""What an operator looks at: ``status``, ``incidents``, ``decisions``, ``nodes``,
``explain``, ``metrics``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import click

from recovery.commands import opening
from recovery.report import text
from slurm_hooks.record import utc

_METRICS_LIMIT = 100_000
"""Most decisions that figures are made of, the newest: some hundred megabytes of memory."""


@click.command()
@opening.JSON
def status(as_json: bool) -> None:
    """Mode, grants, breakers, last pass, open decisions, silent nodes."""
    config = opening.configuration()
    with opening.index(config) as store:
        document = text.status_document(config, store, utc())
    click.echo(json.dumps(document) if as_json else text.status(document))


def _filters(command: Callable[..., None]) -> Callable[..., None]:
    """The filters that every list has."""
    options = (
        click.option("--since", callback=opening.moment, help="From then on: 6h, 3d, or a time."),
        click.option("--until", callback=opening.moment, help="Before then."),
        click.option("--node", help="Only what names this node."),
        click.option("--job", type=int, help="Only on this job."),
        click.option("--user", help="Only on jobs of this user."),
        click.option("--partition", help="Only on jobs of this partition."),
        click.option("--class", "fault_class", help="Only of this fault class."),
        click.option("--limit", default=20, show_default=True, help="At most so many."),
        opening.JSON,
    )
    for option in reversed(options):
        command = option(command)
    return command


def _names_one(wanted: Mapping[str, Any]) -> bool:
    return any(wanted[name] is not None for name in ("job", "node", "user"))


@click.command()
@_filters
def decisions(as_json: bool, **wanted: Any) -> None:
    """What was decided, newest first; of a fleet event the one decision on it.

    With --job, --node or --user also what was done with its members.
    """
    with opening.index(opening.configuration()) as store:
        found = store.decisions(**wanted, followers=_names_one(wanted))
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
@_filters
def incidents(as_json: bool, **wanted: Any) -> None:
    """Jobs and nodes that something happened to, newest first, each with its attempts."""
    from recovery.report import lists

    limit = wanted.pop("limit")
    with opening.index(opening.configuration()) as store:
        found = store.decisions(**wanted, limit=limit * 10, followers=_names_one(wanted))
        document = lists.incidents_document(found, limit)
    if as_json:
        click.echo(json.dumps(document))
        return
    click.echo(lists.incidents(document))
    sys.exit(0 if document["incidents"] else 1)


@click.command()
@click.argument("names", metavar="NODE", nargs=-1)
@click.option("--silent", is_flag=True, help="Only nodes that do not report.")
@opening.JSON
def nodes(names: tuple[str, ...], silent: bool, as_json: bool) -> None:
    """How each node reports, how often decisions named it, and what it last found."""
    from recovery.report import lists

    with opening.index(opening.configuration()) as store:
        document = lists.nodes_document(store, names, utc(), silent=silent)
    if as_json:
        click.echo(json.dumps(document))
        return
    click.echo(lists.nodes(document))
    sys.exit(0 if document["nodes"] else 1)


@click.command()
@click.argument("name")
@opening.JSON
def explain(name: str, as_json: bool) -> None:
    """The whole story of a decision id, a job number or a node."""
    from recovery.report import lists

    with opening.index(opening.configuration()) as store:
        decision = store.decision(name)
        found = [decision] if decision else []
        if not found and name.isdigit():
            found = store.decisions(job=int(name), limit=50)[::-1]
        if not found:
            found = store.decisions(node=name, limit=10)[::-1]
        known = lists.nodes_document(store, [name], utc()) if not found else {"nodes": []}
    if known["nodes"]:
        click.echo(json.dumps(known) if as_json else lists.nodes(known))
        return
    if not found:
        opening.fail(
            f"no decision, job or node called {name!r} is known; see: recovery decisions", 1
        )
    if as_json:
        items = [decision.to_dict() for decision in found]
        click.echo(json.dumps({"schema": "decisions/v1", "decisions": items}))
        return
    click.echo("\n\n".join(text.story(decision) for decision in found))


@click.command()
@click.option("--days", default=30, show_default=True, help="Of jobs decided on in so many days.")
@opening.JSON
def metrics(days: int, as_json: bool) -> None:
    """Effective training time, time to failure and to recovery, for Prometheus."""
    from recovery import effort
    from recovery.report import prometheus

    since = utc(time.time() - days * 86_400)
    with opening.index(opening.configuration()) as store:
        figures = effort.of_jobs(store.decisions(since=since, limit=_METRICS_LIMIT))
    click.echo(json.dumps(figures.to_dict()) if as_json else prometheus.fleet(figures), nl=as_json)
