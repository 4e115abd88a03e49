"""``slurm-hooks verify-checkpoint PATH``: which checkpoint would a restart find?

Owns the words on the screen; the judging is ``checkpoints``'. Reads with the rights of whoever
calls it.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime

import click

from slurm_hooks.checkpoints import Checkpoint, Limits, Verdict, find

_BY_HAND = Limits(seconds=60.0)
_DEEP = Limits(entries=1_000_000, seconds=7 * 86_400.0)


@click.command("verify-checkpoint")
@click.argument("path", type=click.Path())
@click.option("--deep", is_flag=True, help="Read everything and compare checksums; takes long.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--failed-at",
    type=click.DateTime(formats=["%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%dT%H:%M:%S"]),
    help="When the attempt failed; what was written later does not count.",
)
def command(path: str, deep: bool, as_json: bool, failed_at: datetime | None) -> None:
    """Find the newest complete checkpoint at or under PATH.

    Exit status: 0 there is one, 1 there is none.
    """
    verdict = find(
        path,
        deep=deep,
        limits=_DEEP if deep else _BY_HAND,
        failed_at=failed_at.timestamp() if failed_at else None,
    )
    if as_json:
        click.echo(json.dumps(verdict.to_dict(), indent=2))
    else:
        click.echo("\n".join(_lines(verdict)))
    sys.exit(0 if verdict.status == "complete" else 1)


def _lines(verdict: Verdict) -> list[str]:
    lines = []
    if verdict.newest:
        lines.append(f"complete: {_named(verdict.newest)}, {verdict.newest.checked} checked")
    else:
        words = {
            "none": "no checkpoint here yet",
            "broken": "no usable checkpoint: every one found is unfinished or broken",
            "unverified": "no checkpoint could be verified",
        }
        lines.append(f"{words[verdict.status]}: {ascii(verdict.path)[1:-1]}")
    lines += [f"  newer, {item.state}: {_named(item)}: {item.why}" for item in verdict.passed_over]
    lines += [f"  {note}" for note in verdict.notes]
    if not verdict.searched_all:
        lines.append("  a limit ended the search early; there may be more")
    return lines


def _named(checkpoint: Checkpoint) -> str:
    step = "step unknown" if checkpoint.step is None else f"step {checkpoint.step}"
    return f"{step}, {checkpoint.format} {ascii(checkpoint.path)[1:-1]}"
