"""Commands whose wrong use is told in one line, as every other error is.

    $ recovery resume
    Error: Missing option '--why'. Try: recovery resume --help

click's own words are four lines of which the last matters.
"""

from __future__ import annotations

import click


class _Wrong(click.ClickException):
    exit_code = click.UsageError.exit_code


class Commands(click.Group):
    """A group of commands whose usage errors end with exit status 2 and one line."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except click.UsageError as wrong:
            about = (wrong.ctx or ctx).command_path
            said = " ".join(wrong.format_message().split())
            raise _Wrong(f"{said} Try: {about} --help") from wrong
