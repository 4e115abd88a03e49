"""What would have happened, and what does on purpose: ``replay``, ``drill``."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import click

from recovery.commands import opening
from slurm_hooks.config import ConfigError, load


@click.command()
@click.argument("spool", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option(
    "--policy",
    "policy_file",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="A recovery.toml whose [policy] and [fleet] are tried.",
)
@opening.JSON
def replay(spool: Path, policy_file: Path, as_json: bool) -> None:
    """What another policy would have decided on the history in SPOOL."""
    from recovery import replay as replaying
    from recovery.report.words import cut, wrapped

    config = opening.configuration()
    try:
        other = load(policy_file)
        recorded = replaying.read(spool)
    except ConfigError as error:
        opening.fail(str(error), 2)
    except OSError as error:
        opening.fail(f"{error.filename or spool}: {error.strerror}", 2)
    found = replaying.compare(recorded, config, other)
    if as_json:
        document = {"schema": "replay/v1", "unread": recorded.unread, **asdict(found)}
        click.echo(json.dumps(document))
        return
    for one in found.changes:
        click.echo(cut(f"{one.decision}  {one.time[:19]}Z  {one.subject} [{one.fault_class}]"))
        for mark, what, why in (
            ("- ", one.before, one.why_before),
            ("+ ", one.after, one.why_after),
        ):
            click.echo("\n".join([*wrapped(f"  {mark}", what), *wrapped("      ", why)]))
    click.echo(f"{len(found.changes)} of {found.decisions} decisions would have been others")
    if found.differently:
        click.echo(f"{found.differently} do not replay as they were recorded: another policy then?")
    if found.not_replayed:
        click.echo(f"{found.not_replayed} left out: their evidence is not in the archive any more")


def _number(_context: click.Context, _argument: click.Parameter, value: str) -> int:
    """Read a job's own number, by which the scheduler is asked."""
    from recovery import naming

    try:
        name = naming.job(value)
    except naming.UnknownForm as error:
        raise click.BadParameter(str(error)) from error
    if not name.isdecimal():
        raise click.BadParameter(
            f"name it by its own number, the JobId of: scontrol show job {name}"
        )
    return int(name)


@click.command()
@click.argument("job", callback=_number)
@click.option(
    "--kind",
    type=click.Choice(("kill", "requeue", "exclude")),
    default="kill",
    show_default=True,
    help="Abort its ranks; or requeue it; or requeue it off its first node.",
)
@click.option(
    "--check", help="A command that ends with 0 where the finished job's output is usable."
)
@click.option(
    "--reference",
    type=click.Path(path_type=Path),
    help="A file or folder of a run that nothing interrupted, which the job's owner may read.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="What must equal the reference when the job is over; below its working folder.",
)
@click.option(
    "--timeout", default=600.0, show_default=True, help="Seconds until a step has failed."
)
@opening.JSON
def drill(
    job: int,
    kind: str,
    check: str | None,
    reference: Path | None,
    output: Path | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Interrupt a noncritical JOB on purpose, and judge its resumption.

    Its output is judged by a command (--check), or by the sha256 of its files, which must be those
    of a run that nothing interrupted (--reference, --output).
    """
    if (reference is None) != (output is None):
        raise click.UsageError("--reference and --output belong together")
    from recovery import drill as drilling
    from recovery.journal import Journal
    from recovery.slurm.base import SchedulerError
    from recovery.slurm.cli import CliScheduler

    config = opening.configuration()
    try:
        command = shlex.split(check or "")
    except ValueError as error:
        opening.fail(f"--check cannot be read: {error}", 2)
    wanted = drilling.Drill(job, kind, command, timeout, reference, output)  # type: ignore[arg-type]
    scheduler = CliScheduler(timeout_seconds=config.controller.command_timeout)
    journal = Journal(config.controller.state / "journal")
    steps: list[drilling.Step] = []
    try:
        with opening.index(config) as store:
            level = lambda: store.follow(journal)  # noqa: E731 - one use, and its name says it
            for step in drilling.perform(wanted, scheduler, store, level):
                steps.append(step)
                if not as_json:
                    mark = "" if step.kept else "NOT "
                    click.echo(f"{step.seconds:7.1f} s  {mark}{step.name}: {step.detail}")
    except drilling.DrillRefused as error:
        opening.fail(f"job {job} is not interrupted: {error}", 1)
    except SchedulerError as error:
        opening.fail(f"Slurm: {error}", 2)
    kept = all(step.kept for step in steps)
    if as_json:
        document = {"schema": "drill/v1", "job": job, "kind": kind, "kept": kept}
        click.echo(json.dumps({**document, "steps": [asdict(step) for step in steps]}))
    sys.exit(0 if kept else 1)
