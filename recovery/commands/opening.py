"""What commands open before they do anything: the configuration, the index, the aggregator.

Owns how each failure to do so is told: one line on standard error, and the exit status.
"""

from __future__ import annotations

import logging
import os
import pwd
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from slurm_hooks import config_file
from slurm_hooks.config import Config, ConfigError, load
from slurm_hooks.record import utc

if TYPE_CHECKING:  # what a command does not use, it does not wait for
    from recovery.aggregator import Aggregator
    from recovery.slurm.base import Scheduler
    from recovery.store import Store


def moment(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """Read an option's time as records have it: 90m, 6h, 3d ago, or 2026-12-02T05:30 in UTC."""
    if value is None:
        return None
    ago = re.fullmatch(r"(\d{1,6})([smhdw])", value)
    if ago:
        return utc(time.time() - int(ago.group(1)) * _SECONDS[ago.group(2)])
    if re.fullmatch(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?)?Z?", value):
        return value.replace(" ", "T").rstrip("Z")
    raise click.BadParameter(f"{value!r} is no time: 90m, 6h, 3d, or 2026-12-02T05:30")


def job_name(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """Read an option's job as squeue names one: 12, a task 6_2, a part 12+1."""
    from recovery import naming

    try:
        return None if value is None else naming.job(value)
    except naming.UnknownForm as error:
        raise click.BadParameter(str(error)) from error


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def configuration() -> Config:
    """Return recovery.toml, or end with status 2 and a line that names the mistake."""
    try:
        return load()
    except ConfigError as error:
        fail(str(error), 2)


def scheduler(config: Config) -> Scheduler:
    """Return the way to Slurm that the configuration names; nothing is asked yet."""
    seconds = config.controller.command_timeout
    if config.slurm.backend == "rest":
        from recovery.slurm.rest import RestScheduler

        return RestScheduler(config.slurm, timeout_seconds=seconds)
    from recovery.slurm.cli import CliScheduler

    return CliScheduler(None, seconds, config.controller.restart_nice)


@contextmanager
def aggregator(config: Config) -> Iterator[Aggregator]:
    """The one aggregator of this state folder, while the lock is held."""
    from filelock import FileLock, Timeout

    from recovery.aggregator import Aggregator
    from recovery.journal import JournalError
    from recovery.store import StoreError

    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    state = config.controller.state
    try:
        state.mkdir(mode=0o750, parents=True, exist_ok=True)
        lock = FileLock(state / "aggregator.lock", timeout=0)
        with lock:
            running = Aggregator(config, scheduler(config))
            try:
                yield running
            finally:
                running.close()
    except Timeout:
        fail(f"another aggregator holds {state}/aggregator.lock; stop it first", 1)
    except (JournalError, StoreError) as error:
        fail(str(error), 2)
    except OSError as error:
        fail(f"{error.filename or state}: {error.strerror}", 2)


def state_folder(config: Config) -> Path:
    """Return the controller's own folder, or end with a line that says who may work there."""
    state = config.controller.state
    try:
        owner = state.stat().st_uid
    except FileNotFoundError:
        path = config_file.path()
        fail(f"{state} is not there; start `recovery run`, or mend controller.state in {path}", 2)
    except OSError as error:
        fail(f"{state}: {error.strerror}; {_BY_OTHERS}", 2)
    if not os.access(state, os.R_OK | os.W_OK | os.X_OK):
        fail(f"{state} belongs to {_name(owner)}: sudo -u {_name(owner)} …; {_BY_OTHERS}", 2)
    return state


_BY_OTHERS = "without those rights read the spool's decisions/ (docs/spool.md)"


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"'#{uid}'"


@contextmanager
def index(config: Config) -> Iterator[Store]:
    """The index, level with the journal, for reading."""
    from recovery.journal import Journal, JournalError
    from recovery.store import StoreError
    from recovery.store_opening import open_store

    state = state_folder(config)
    try:
        store = open_store(state / "index.sqlite", Journal(state / "journal"))
    except (JournalError, StoreError) as error:
        fail(str(error), 2)
    try:
        yield store
    finally:
        store.close()


def fail(message: str, code: int) -> NoReturn:
    """End with one line on standard error."""
    click.echo(message, err=True)
    sys.exit(code)
