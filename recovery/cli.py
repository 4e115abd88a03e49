"""The ``recovery`` command: parse, call, print. What it calls lies in the modules beside it.

Exit status: 0 done, 1 the answer is no, 2 wrong usage or configuration (``design``).
"""

from __future__ import annotations

import json
import logging
import os
import pwd
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from recovery.report import text
from slurm_hooks import config_file
from slurm_hooks.config import Config, ConfigError, load
from slurm_hooks.record import utc

_PAUSED_NODES_LIMIT = 1000

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


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
        done = running.pass_once()
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
@_JSON
def grants(as_json: bool) -> None:
    """Which grants are in force, and what the others still lack."""
    document = text.grants_document(_config())
    click.echo(json.dumps(document) if as_json else text.grants(document))


_PARTITION = click.option("--partition", help="Only this partition.")
_NODE = click.option("--node", help="Only this node, or a list such as n[1-4].")
_JOB = click.option("--job", help="Only this job: 12, an array 6, or a task of it, 6_2.")


@main.command()
@_PARTITION
@_NODE
@_JOB
@click.option("--why", required=True, help="For whoever wonders why nothing happens.")
def pause(partition: str | None, node: str | None, job: str | None, why: str) -> None:
    """Send no further command, from now on until `recovery resume`; deciding goes on."""
    for scope, name in _scopes(partition, node, job):
        _order({"type": "pause", "scope": scope, "name": name, "paused": True, "why": why})
        click.echo(f"{scope} {name}".rstrip() + ": paused")


@main.command()
@_PARTITION
@_NODE
@_JOB
@click.option("--why", required=True, help="What was found, and why it is safe to go on.")
def resume(partition: str | None, node: str | None, job: str | None, why: str) -> None:
    """End a pause; with no scope, the pause of all, and close every circuit breaker."""
    wanted = _scopes(partition, node, job)
    with _store(_config()) as store:
        tripped = [one.kind for one in store.breakers().values() if one.tripped]
        paused = {(one.scope, one.name) for one in store.pauses()}
    ended = [scope for scope in wanted if scope in paused]
    closed = tripped if wanted == [("all", "")] else []
    if not ended and not closed:
        others = ", ".join(f"{scope} {name}".rstrip() for scope, name in sorted(paused))
        hint = f"; paused: {others}" if others else ""
        _fail(f"nothing of that is paused, and no circuit breaker is open{hint}", 1)
    for kind in closed:
        said = f"{_who()}: {why}"
        _order({"type": "breaker", "kind": kind, "tripped": False, "why": said})
        click.echo(f"{kind}: closed")
    for scope, name in ended:
        _order({"type": "pause", "scope": scope, "name": name, "paused": False, "why": why})
        click.echo(f"{scope} {name}".rstrip() + ": resumed")


def _scopes(partition: str | None, node: str | None, job: str | None) -> list[tuple[str, str]]:
    from recovery.slurm.hostlist import HostlistError, expand

    try:
        nodes = expand(node, _PAUSED_NODES_LIMIT) if node else ()
    except HostlistError as error:
        _fail(f"--node {node}: {error}", 2)
    if job is not None and not re.fullmatch(r"\d+(_\d+)?", job, re.ASCII):
        _fail(f"--job {job}: not a job's number", 2)
    found = [("node", name) for name in nodes]
    found += [("partition", name) for name in (partition or "").split(",") if name]
    found += [("job", job)] if job else []
    return found or [("all", "")]


def _order(event: dict[str, Any]) -> None:
    """Journal a person's order; the aggregator takes it in before its next command."""
    from recovery.journal import Journal, JournalError

    try:
        journal = Journal(_config().controller.state / "journal")
        journal.append({"time": utc(), "who": _who(), **event})
    except JournalError as error:
        _fail(str(error), 2)


def _who() -> str:
    """Who gives an order: who called sudo, else the account, by its number where it has no name."""
    try:
        account = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        account = str(os.getuid())
    return os.environ.get("SUDO_USER") or account


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
            scheduler = CliScheduler(timeout_seconds=config.controller.command_timeout)
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
    from recovery.store import StoreError
    from recovery.store_opening import open_store

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
