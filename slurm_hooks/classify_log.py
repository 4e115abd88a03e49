"""``slurm-hooks classify-log``: what ended a job, from its logs or a kernel log."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import click

from slurm_hooks.joblog.layout import Layout, LayoutError, parse_layout
from slurm_hooks.joblog.read import Limits
from slurm_hooks.joblog.signatures import SignatureError
from slurm_hooks.joblog.verdict import Verdict, classify

LIMITS = Limits(whole=32 << 20, count=1 << 30)
"""By hand, a file of this size is read whole; a larger one at its ends."""

WIDTH = 80

_JOB = {
    "requeue": "run it again",
    "hold": "hold it until its owner has looked",
    "leave": "nothing to do",
}


@click.command("classify-log")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE")
@click.option("--layout", help="Where the ranks are: n[1-4]:8, or the nodes alone.")
@click.option("--hosts", multiple=True, metavar="ADDRESS=NODE", help="Whose address this is.")
@click.option(
    "--signatures",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a site's own signatures, tried first.",
)
@click.option(
    "--dumps",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of flight-recorder dumps (nccl_trace_rank_N) and NCCL RAS reports.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one log-verdict/v1 document.")
def command(
    files: tuple[Path, ...],
    layout: str | None,
    hosts: tuple[str, ...],
    signatures: tuple[Path, ...],
    dumps: Path | None,
    as_json: bool,
) -> None:
    """Say what ended a job: read FILE, a job's log (or several of one job) or a kernel log.

    Exit status: 0 an answer, 1 no FILE could be read, 2 wrong usage.
    """
    try:
        where = parse_layout(layout) if layout else Layout()
        addresses = dict(_address(host) for host in hosts)
        written = sorted(dumps.iterdir()) if dumps else []
        verdict = classify(files, where, addresses, LIMITS, extra=signatures, dumps=written)
    except (LayoutError, SignatureError) as problem:
        raise click.UsageError(str(problem)) from problem
    for problem_text in verdict.unreadable.values():
        click.echo(f"slurm-hooks: {problem_text}", err=True)
    if len(verdict.unreadable) == len(files):
        sys.exit(1)
    click.echo(json.dumps(verdict.document) if as_json else _text(verdict))


def _address(text: str) -> tuple[str, str]:
    address, equals, node = text.partition("=")
    if not (address and equals and node):
        raise click.UsageError(f"--hosts {text}: write ADDRESS=NODE, such as 10.0.0.7=n3")
    return address, node


def _text(verdict: Verdict) -> str:
    document = verdict.document
    lines = [
        f"{document['class']} ({document['confidence']})",
        f"job: {document['job_verdict']}, {_JOB[document['job_verdict']]}",
    ]
    cause = document["cause"]
    if cause:
        number = cause["number"] if cause["number"] is not None else f"byte {cause['offset']}"
        where = f"{Path(cause['file']).name}:{number}: " if cause["file"] else ""
        lines += _wrapped("cause: ", where + cause["text"])
    lines += [line for one in document["implicated"] for line in _wrapped("names: ", _named(one))]
    if not document["implicated"]:
        lines.append("names: nobody")
    first = document["first_failure"]
    if first:
        ended = f"signal {first['signal']}" if first["signal"] else f"exit {first['exit_code']}"
        lines.append(f"first to fail: rank {first['rank']}, {ended}, as torchrun saw it")
    if document["dumps"]["ranks"]:
        lines.append(f"flight recorder: dumps of {document['dumps']['ranks']} ranks")
    if document["cascade"]:
        lines.append(f"cascade: {document['cascade']} further lines that follow from it")
    for read in document["read"]:
        if read["unread_bytes"]:
            lines += _wrapped(
                "read: ",
                f"the two ends of {Path(read['file']).name};"
                f" {read['unread_bytes']} bytes between them were not read",
            )
    return "\n".join(lines)


def _named(one: dict[str, Any]) -> str:
    parts = [one["node"] or "a node without a name here"]
    if one["rank"] is not None:
        parts.append(f"rank {one['rank']}")
    if one["gpu"] is not None:
        parts.append(f"GPU {one['gpu']}")
    return f"{', '.join(parts)}: {one['why']}"


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text[: 6 * WIDTH],
        WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=True,
    ) or [label.rstrip()]
