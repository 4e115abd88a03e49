"""The ``recovery`` command: parse, call, print. What it calls lies in the modules beside it.

Exit status: 0 done, 1 the answer is no, 2 wrong usage or configuration (``design``).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from recovery.report import text
from slurm_hooks import config_file
from slurm_hooks.config import Config, ConfigError, load
from slurm_hooks.record import utc

_ONCE_SECONDS = 5.0
"""How long a single pass waits for the spool: the service comes back to it, this one does not."""

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


_METRICS_LIMIT = 100_000
"""Most decisions that figures are made of, the newest: some hundred megabytes of memory."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="recovery.toml to read, instead of SLURM_RECOVERY_CONFIG or /etc/slurm/recovery.toml.",
)
def main(config: Path | None) -> None:
    """Keeps distributed training on a Slurm cluster making progress."""
    if config is not None:
        os.environ["SLURM_RECOVERY_CONFIG"] = str(config)


@main.command()
def run() -> None:
    """The aggregator as a service: watch, decide, and act where granted, until SIGTERM."""
    from recovery import aggregator

    config = _config()
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: stopping.append(number))
    with _aggregator(config) as running:
        aggregator.run(running, config.controller.poll, lambda: bool(stopping))


@main.command()
@_JSON
def once(as_json: bool) -> None:
    """One pass of the aggregator, then stop."""
    with _aggregator(_config()) as running:
        done = running.pass_once(ingest_seconds=_ONCE_SECONDS)
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


@main.command()
@_JSON
def status(as_json: bool) -> None:
    """Mode, grants, breakers, last pass, open decisions, silent nodes."""
    config = _config()
    with _store(config) as store:
        document = text.status_document(config, store, utc())
    click.echo(json.dumps(document) if as_json else text.status(document))


@main.command()
@click.option("--node", help="Only decisions that name this node.")
@click.option("--job", type=int, help="Only decisions on this job.")
@click.option("--user", help="Only decisions on jobs of this user.")
@click.option("--partition", help="Only decisions on jobs of this partition.")
@click.option("--class", "fault_class", help="Only decisions of this fault class.")
@click.option("--limit", default=20, show_default=True, help="At most so many, newest first.")
@_JSON
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
    with _store(_config()) as store:
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


@main.command()
@click.argument("name")
@_JSON
def explain(name: str, as_json: bool) -> None:
    """The whole story of a decision id, a job number or a node."""
    with _store(_config()) as store:
        decision = store.decision(name)
        found = [decision] if decision else []
        if not found and name.isdigit():
            found = store.decisions(job=int(name), limit=50)[::-1]
        if not found:
            found = store.decisions(node=name, limit=10)[::-1]
    if not found:
        _fail(f"no decision, job or node called {name!r} is known; see: recovery decisions", 1)
    if as_json:
        items = [decision.to_dict() for decision in found]
        click.echo(json.dumps({"schema": "decisions/v1", "decisions": items}))
        return
    click.echo("\n\n".join(text.story(decision) for decision in found))


@main.command()
@click.option("--days", default=30, show_default=True, help="Of jobs decided on in so many days.")
@_JSON
def metrics(days: int, as_json: bool) -> None:
    """Effective training time, time to failure and to recovery, for Prometheus."""
    from recovery import effort
    from recovery.report import prometheus

    since = utc(time.time() - days * 86_400)
    with _store(_config()) as store:
        figures = effort.of_jobs(store.decisions(since=since, limit=_METRICS_LIMIT))
    click.echo(json.dumps(figures.to_dict()) if as_json else prometheus.fleet(figures), nl=as_json)


@main.command()
@_JSON
def grants(as_json: bool) -> None:
    """Which grants are in force, and what the others still lack."""
    document = text.grants_document(_config())
    click.echo(json.dumps(document) if as_json else text.grants(document))


@main.command()
@click.option("--why", required=True, help="What was found, and why it is safe to go on.")
def resume(why: str) -> None:
    """Close the circuit breaker, so that nodes may be drained again."""
    from recovery.journal import Journal

    config = _config()
    with _store(config) as store:
        open_breakers = [one.kind for one in store.breakers().values() if one.tripped]
    if not open_breakers:
        _fail("no circuit breaker is open", 1)
    journal = Journal(config.controller.state / "journal")
    who = os.environ.get("SUDO_USER") or str(os.getuid())
    for kind in open_breakers:
        event = {"type": "breaker", "kind": kind, "tripped": False, "why": f"{who}: {why}"}
        journal.append({"time": utc(), **event})
        click.echo(f"{kind}: closed")


@main.command()
@click.option("--keep", is_flag=True, help="Leave the cluster up and say how to look around.")
@_JSON
def demo(keep: bool, as_json: bool) -> None:
    """A real Slurm job loses a GPU and comes back, on a private cluster, in two minutes."""
    from recovery.demo.story import tell

    sys.exit(tell(keep=keep, as_json=as_json))


def _config() -> Config:
    try:
        return load()
    except ConfigError as error:
        _fail(str(error), 2)


@contextmanager
def _aggregator(config: Config) -> Iterator[Any]:
    """The one aggregator of this state folder, while the lock is held."""
    from filelock import FileLock, Timeout

    from recovery.aggregator import Aggregator
    from recovery.journal import JournalError
    from recovery.slurm.cli import CliScheduler
    from recovery.store import StoreError

    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    state = config.controller.state
    try:
        state.mkdir(mode=0o750, parents=True, exist_ok=True)
        lock = FileLock(state / "aggregator.lock", timeout=0)
        with lock:
            controller = config.controller
            scheduler = CliScheduler(None, controller.command_timeout, controller.restart_nice)
            running = Aggregator(config, scheduler)
            try:
                yield running
            finally:
                running.close()
    except Timeout:
        _fail(f"another aggregator holds {state}/aggregator.lock; stop it first", 1)
    except (JournalError, StoreError) as error:
        _fail(str(error), 2)
    except OSError as error:
        _fail(f"{error.filename or state}: {error.strerror}", 2)


@contextmanager
def _store(config: Config) -> Iterator[Any]:
    """The index, level with the journal, for reading."""
    from recovery.journal import Journal, JournalError
    from recovery.store import StoreError, open_store

    state = config.controller.state
    if not state.is_dir():
        path = config_file.path()
        _fail(f"{state} is not there; start `recovery run`, or mend controller.state in {path}", 2)
    try:
        store = open_store(state / "index.sqlite", Journal(state / "journal"))
    except (JournalError, StoreError) as error:
        _fail(str(error), 2)
    try:
        yield store
    finally:
        store.close()


def _fail(message: str, code: int) -> NoReturn:
    click.echo(message, err=True)
    sys.exit(code)
