"""Commands whose wrong use, or full output, is told in one line, as every other error is.

    $ recovery resume
    Error: Missing option '--why'. Try: recovery resume --help

click's own words are four lines of which the last matters, and of a full disk a traceback.
"""

from __future__ import annotations

import errno
import os
from typing import Any

import click

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Wrong(click.ClickException):
    exit_code = click.UsageError.exit_code


class Commands(click.Group):
    """A group of commands whose usage errors end with exit status 2 and one line.

    Standard output that takes no more ends them with exit status 1 and one line.
    """

    def main(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().main(*arguments, **options)
        except OSError as error:
            if error.errno not in _FULL or error.filename is not None:
                raise
            # Python writes once more what is left, when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            said = (
                f"Error: the output is cut short: {error.strerror}; make room, or write elsewhere"
            )
            click.echo(said, err=True)
            raise SystemExit(1) from error

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except click.UsageError as wrong:
            about = (wrong.ctx or ctx).command_path
            said = " ".join(wrong.format_message().split())
            raise _Wrong(f"{said} Try: {about} --help") from wrong
