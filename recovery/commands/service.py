"""``recovery run``, ``once`` and ``demo``: what does something rather than tell of it."""

from __future__ import annotations

import json
import signal
import sys

import click

from recovery.commands import opening

_SPOOL_SECONDS = 10.0
"""One pass by hand waits for the spool, which the service looks at again and again."""


@click.command()
def run() -> None:
    """The aggregator as a service: watch, decide, and act where granted, until SIGTERM."""
    from recovery import aggregator

    config = opening.configuration()
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: stopping.append(number))
    with opening.aggregator(config) as running:
        aggregator.run(running, config.controller.poll, lambda: bool(stopping))


@click.command()
@opening.JSON
def once(as_json: bool) -> None:
    """One pass of the aggregator, then stop."""
    with opening.aggregator(opening.configuration()) as running:
        done = running.pass_once(_SPOOL_SECONDS)
    document = {
        "schema": "pass/v1",
        "accepted": done.accepted,
        "rejected": done.rejected,
        "decisions": [decision.id for decision in done.decided],
        "problems": list(done.problems),
    }
    if as_json:
        click.echo(json.dumps(document))
    else:
        click.echo(
            f"{done.accepted} records taken in, {done.rejected} rejected,"
            f" {len(done.decided)} decisions"
        )


@click.command()
@click.option("--keep", is_flag=True, help="Leave the cluster up and say how to look around.")
@opening.JSON
def demo(keep: bool, as_json: bool) -> None:
    """A real Slurm job loses a GPU and comes back, on a private cluster, in two minutes."""
    from recovery.demo.story import tell

    sys.exit(tell(keep=keep, as_json=as_json))
