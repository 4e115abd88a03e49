"""``recovery init`` and ``recovery doctor``: this machine made ready, and examined."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import sys
import textwrap
from pathlib import Path

import click

from recovery.commands import opening
from slurm_hooks import config_file
from slurm_hooks.config import ConfigError, load

_HOOKS = Path("/usr/local/libexec/slurm-recovery")

_USUAL_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")

_PATH = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.option("--spool", type=_PATH, help="The folder that all nodes and the controller see.")
@click.option("--state", type=_PATH, help="The journal's folder, on the controller's own disk.")
@click.option("--cluster", help="Slurm's ClusterName, where several clusters share a spool.")
@click.option(
    "--authenticate", type=click.Choice(["owner", "munge"]), help="Whose records are believed."
)
@click.option("--user", default="root", show_default=True, help="Whom the aggregator runs as.")
@click.option(
    "--hooks", type=_PATH, default=_HOOKS, show_default=True, help="Folder of the hooks' scripts."
)
@click.option("--node", is_flag=True, help="A compute node: only recovery.toml and the hooks.")
@click.option(
    "--root", type=_PATH, default=Path("/"), help="Write below this folder, for an image."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only show; exit 1 if anything would change.")
def init(
    spool: Path | None,
    state: Path | None,
    cluster: str | None,
    authenticate: str | None,
    user: str,
    hooks: Path,
    node: bool,
    root: Path,
    yes: bool,
    dry_run: bool,
) -> None:
    """Make this machine ready: show what would change, ask, and write it.

    Writes recovery.toml (unless there is one), the spool's folders, the hooks' scripts, a systemd
    unit for the aggregator and its log's rotation, and prints the lines for slurm.conf. What is
    left out is asked of recovery.toml, else has its default. Run again, it finds nothing to do.
    """
    from recovery.site import installing, texts

    config = config_file.path().absolute()
    try:
        found = load(root / config.relative_to("/"))
        uid = pwd.getpwnam(user).pw_uid
        scontrol = shutil.which("scontrol")
        folder = str(Path(scontrol).parent) if scontrol else ""
        site = texts.Site(
            spool=(spool or found.spool.path).absolute(),
            state=(state or found.controller.state).absolute(),
            python=Path(sys.executable),
            hooks=hooks.absolute(),
            cluster=found.controller.cluster if cluster is None else cluster,
            authenticate=authenticate or found.spool.authenticate,
            user=user,
            uid=uid,
            config=config,
            extra_path="" if folder in _USUAL_FOLDERS else folder,
        )
        changes = (installing.plan_node if node else installing.plan)(site, root)
    except KeyError:
        opening.fail(f"no user {user!r} on this machine; see: getent passwd", 2)
    except (ConfigError, installing.InstallError) as error:
        opening.fail(str(error), 2)
    except OSError as error:
        opening.fail(f"{error.filename}: {error.strerror}", 2)
    for change in changes:
        click.echo(change.shown())
    if not changes:
        click.echo("Nothing to do: all is as it should be.")
    elif dry_run:
        sys.exit(1)
    elif yes or click.confirm(f"Make these {len(changes)} changes?", err=True):
        try:
            installing.apply(changes)
        except installing.InstallError as error:
            opening.fail(str(error), 1)
        click.echo(f"{len(changes)} changes made.")
    else:
        opening.fail("nothing was changed", 1)
    if not node:
        click.echo(_NEXT.format(lines=texts.slurm_conf_lines(site), config=config))


_NEXT = """
Copy {config} to every node, and run there: recovery init --node
Then add to slurm.conf (slurm.conf.example gives each line's reason and danger):

{lines}

and: systemctl daemon-reload; systemctl enable --now slurm-recovery; recovery doctor"""


@click.command()
@opening.JSON
def doctor(as_json: bool) -> None:
    """Say whether it all would work, from slurm.conf to each node's last word.

    Each finding says how to mend it. Exits 1 if anything would not work.
    """
    from recovery.site import doctor as examination

    checks = examination.examine(os.environ)
    if as_json:
        document = {"schema": "doctor/v1", "checks": [check.to_dict() for check in checks]}
        click.echo(json.dumps(document, indent=2))
    else:
        for check in checks:
            click.echo(_wrapped(f"{check.status:8}{check.subject:20}", check.says))
            if check.mend:
                click.echo(_wrapped(" " * 28, f"mend: {check.mend}"))
    sys.exit(1 if any(check.status == "broken" for check in checks) else 0)


def _wrapped(first: str, text: str) -> str:
    """Lines of 80 columns; a path or a command is never broken in two."""
    return textwrap.fill(
        text,
        width=80,
        initial_indent=first,
        subsequent_indent=" " * 28,
        break_long_words=False,
        break_on_hyphens=False,
    )
