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


_TIMES = (
    click.option("--since", callback=opening.moment, help="From then on: 6h, 3d, or a time."),
    click.option("--until", callback=opening.moment, help="Before then."),
)
_NODE = (click.option("--node", help="Only what names this node."),)
_JOBS = (
    click.option(
        "--job", callback=opening.job_name, help="Only on this job: 12, an array or its task 6_2."
    ),
    click.option("--user", help="Only on jobs of this user."),
    click.option("--partition", help="Only in this partition."),
    click.option("--class", "fault_class", help="Only of this fault class, or below it."),
)


def _options(*options: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Several options of one command, in the order in which its help shows them."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _limit(default: int) -> Callable[..., Any]:
    kind = click.IntRange(1, 100_000)
    return click.option(
        "--limit", type=kind, default=default, show_default=True, help="At most so many."
    )


_filters = _options(*_TIMES, *_NODE, *_JOBS, _limit(20), opening.JSON)


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
    from recovery.report import incidents as report

    limit = wanted.pop("limit")
    with opening.index(opening.configuration()) as store:
        found = store.decisions(**wanted, limit=limit * 10, followers=_names_one(wanted))
        document = report.document(found, limit)
    if as_json:
        click.echo(json.dumps(document))
        return
    click.echo(report.text(document))
    sys.exit(0 if document["incidents"] else 1)


@click.command()
@click.argument("names", metavar="NODE", nargs=-1)
@click.option("--silent", is_flag=True, help="Only nodes that do not report.")
@_options(*_TIMES, *_JOBS, _limit(40), opening.JSON)
def nodes(names: tuple[str, ...], silent: bool, limit: int, as_json: bool, **wanted: Any) -> None:
    """How each node reports, its score, who named it, and what it last found.

    Name nodes, or lists such as n[1-4], for all that is known of them. Every other filter keeps
    the nodes that such a decision names.
    """
    from recovery.asked import Asked
    from recovery.report import nodes as report
    from recovery.slurm.hostlist import HostlistError, expand

    try:
        named = tuple(dict.fromkeys(one for name in names for one in expand(name)))
    except HostlistError as error:
        opening.fail(str(error), 2)
    asked, now = report.Wanted(named, silent, Asked(**wanted)), utc()
    with opening.index(opening.configuration()) as store:
        document = report.document(store, asked, now, None if named else limit)
    if as_json:
        click.echo(json.dumps(document))
        return
    click.echo(report.text(document, now, bool(named)))
    sys.exit(0 if document["nodes"] else 1)


@click.command()
@click.argument("words", metavar="JOB|DECISION|NODE", nargs=-1, required=True)
@opening.JSON
def explain(words: tuple[str, ...], as_json: bool) -> None:
    """The whole story of a job, a decision or a node, in time order.

    A job as squeue names it: 12, a task 6_2, a part 12+1; of a decision's id its beginning is
    enough. What a person must do comes first.
    """
    from recovery import naming
    from recovery.report import explain as report
    from recovery.report import telling

    name = _one_name(words)
    config = opening.configuration()
    with opening.index(config) as store:
        try:
            document = report.document(store, name, utc(), config.policy)
        except naming.Ambiguous as error:
            opening.fail(str(error), 1)
        hint = report.meant(store, name, utc()) if document is None else ""
    if document is None:
        opening.fail(f"no decision, job or node called {name!r} is known; {hint}", 1)
    click.echo(json.dumps(document) if as_json else telling.story(document))


def _one_name(words: tuple[str, ...]) -> str:
    """The name in words as status has them: ``12``, ``job 12`` or ``node n3``."""
    words = tuple(part for word in words for part in word.split())
    if len(words) == 2 and words[0] in ("job", "node", "decision"):
        return words[1]
    if len(words) != 1:
        raise click.UsageError("name one job, decision or node; of many: recovery decisions.")
    return words[0]


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
