"""The ``recovery`` command: which commands there are, and in which module each lies.

Owns the table of commands; a module is imported when its command is called, so that a question
does not wait for what answers another. Exit status: 0 done, 1 the answer is no, 2 wrong usage or
configuration (``design``).
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import click

from slurm_hooks import usage

_COMMANDS = {
    "run": "service",
    "once": "service",
    "demo": "service",
    "status": "looking",
    "incidents": "looking",
    "decisions": "looking",
    "nodes": "looking",
    "explain": "looking",
    "metrics": "looking",
    "grants": "judging",
    "review": "judging",
    "trial": "judging",
    "replay": "rehearsing",
    "drill": "rehearsing",
    "check": "checks",
    "pause": "control",
    "resume": "control",
    "ack": "control",
    "init": "site",
    "doctor": "site",
}
"""Each command, in the order of the help, and its module in ``recovery.commands``."""


class _Commands(usage.Commands):
    """The commands of the table, each loaded when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(f"recovery.commands.{_COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="recovery.toml to read, instead of SLURM_RECOVERY_CONFIG or /etc/slurm/recovery.toml.",
)
def main(config: Path | None) -> None:
    """Keeps distributed training on a Slurm cluster making progress."""
    if config is not None:
        os.environ["SLURM_RECOVERY_CONFIG"] = str(config)
