"""``slurm-hooks``: run a probe by hand, and say whether a node would work.

Only parses and prints; what is looked at belongs to ``looking`` and ``doctor``. Commands that are
whole subjects of their own live in their modules and are imported when they are called.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from slurm_hooks import doctor as examination
from slurm_hooks import looking, probes, site_probes, usage
from slurm_hooks.bounds import node_name
from slurm_hooks.config import Config, ConfigError, load
from slurm_hooks.context import HookContext
from slurm_hooks.deadline import Children
from slurm_hooks.looking import states_of
from slurm_hooks.record import ProbeResult, worst

_ELSEWHERE = {
    "classify-log": "slurm_hooks.classify_log",
    "verify-checkpoint": "slurm_hooks.verify_checkpoint",
}
"""Commands that live in modules of their own, as ``command``."""

_BY_HAND_SECONDS = 40.0
"""Time for all probes run by hand, beside each one's own deadline; a health check's budget."""


class _WrongUse(click.ClickException):
    exit_code = 2


class _Commands(usage.Commands):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _ELSEWHERE:
            command: click.Command = importlib.import_module(_ELSEWHERE[cmd_name]).command
            return command
        return super().get_command(ctx, cmd_name)


@click.group(cls=_Commands)
def main() -> None:
    """What runs on a node, by hand: probes, and whether this node would work."""


@main.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--list", "listing", is_flag=True, help="List probes: needs, cost, hooks, codes.")
def probe(names: Sequence[str], as_json: bool, listing: bool) -> None:
    """Run probes here and now; by default all. Changes nothing and reports nothing.

    Exits 0 if the node is well, 1 if there is a fault or a probe did not end well.
    """
    config = _config()
    known = (*probes.NAMES, site_probes.NAME)
    for name in names:
        if name not in known:
            raise _WrongUse(f"no probe is called {name!r}; there are {', '.join(known)}")
    if listing:
        _list(names or known, config, as_json)
        return
    seen = look(names or known, config)
    verdict = worst([finding.severity for finding in seen.findings])
    if as_json:
        document = {
            "schema": "probe/v1",
            "verdict": verdict,
            "findings": [finding.to_dict() for finding in seen.findings],
            "probes": [result.to_dict() for result in seen.results],
            "notes": seen.notes,
        }
        click.echo(json.dumps(document, indent=2, default=str))
    else:
        _print_round(seen, verdict)
    unwell = any(result.status in ("hang", "crash", "error") for result in seen.results)
    sys.exit(1 if unwell or verdict in ("fault", "fatal") else 0)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def doctor(as_json: bool) -> None:
    """Say what is configured here, what would not work, and the line that mends it.

    Exits 1 if anything would not work.
    """
    checks = examination.examine()
    if as_json:
        document = {"schema": "doctor/v1", "checks": [check.to_dict() for check in checks]}
        click.echo(json.dumps(document, indent=2))
    else:
        for check in checks:
            click.echo(f"{check.status:8} {check.subject:20} {check.says}")
            if check.mend:
                click.echo(f"{'':29} mend: {check.mend}")
    sys.exit(1 if any(check.status == "broken" for check in checks) else 0)


def look(names: Sequence[str], config: Config) -> looking.Round:
    """Run the probes ``names`` as a health check would, without leaving a trace."""
    told = HookContext.from_environ("health_check", os.environ)
    states = states_of(config.spool, node_name(told.node))
    with Children() as children:
        looking.start(children, names, told, config, states, _BY_HAND_SECONDS, remember=False)
        return looking.collect(names, children.wait())


def _print_round(seen: looking.Round, verdict: str) -> None:
    for result in seen.results:
        click.echo(_result_line(result))
        for key, value in seen.notes.get(result.name, {}).items():
            click.echo(f"    {key}: {value}")
    for finding in seen.findings:
        click.echo(f"{finding.severity:8} {finding.code}: {finding.summary}")
        for item in finding.evidence:
            click.echo(f"    {item.source}: {item.text}")
    click.echo(f"verdict: {verdict}")


def _result_line(result: ProbeResult) -> str:
    line = f"{result.name:16} {result.status:9} {result.seconds * 1000:8.1f} ms"
    return f"{line}  {result.detail}" if result.detail else line


def _list(names: Sequence[str], config: Config, as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    for name in names:
        section = getattr(config.probes, name)
        row = {"name": name, "hooks": list(section.hooks), "deadline": section.deadline}
        if name == site_probes.NAME:
            about = {
                "needs": f"executables in {section.path}",
                "cost": "theirs",
                "codes": ["the site's own"],
            }
        else:
            known = probes.load(name)
            about = {"needs": known.needs, "cost": known.cost, "codes": list(known.codes)}
        rows.append({**row, **about})
    if as_json:
        click.echo(json.dumps({"schema": "probes/v1", "probes": rows}, indent=2))
        return
    for row in rows:
        click.echo(f"{row['name']}")
        click.echo(f"    hooks:    {', '.join(row['hooks']) or 'none'}")
        click.echo(f"    deadline: {row['deadline']} s")
        click.echo(f"    needs:    {row['needs']}")
        click.echo(f"    costs:    {row['cost']}")
        click.echo(f"    codes:    {' '.join(row['codes'])}")


def _config() -> Config:
    try:
        return load()
    except ConfigError as error:
        raise _WrongUse(str(error)) from error
