"""Tells a story on a terminal of 80 columns, or plainly into a pipe, each step as it happens."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Sequence
from typing import TextIO

from recovery.demo.promises import Promise

WIDTH = 80

_BOLD, _DIM, _GREEN, _RED, _PLAIN = "\033[1m", "\033[2m", "\033[32m", "\033[31m", "\033[0m"
_CLEAR_LINE = "\r\033[K"
_MARGIN = " " * 9
_PROMISE_COLUMNS, _KEPT_COLUMNS = 34, 4


class Teller:
    """Writes to ``out``; colour and a line that changes in place only where that is a terminal.

    NO_COLOR (no-color.org) is respected.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._began = time.monotonic()
        self._live = out.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._colour = self._live and not os.environ.get("NO_COLOR")
        self._shown = ""
        self._gap = False

    @property
    def seconds(self) -> float:
        """Seconds since the story began."""
        return time.monotonic() - self._began

    def title(self, text: str) -> None:
        """Begin a scene."""
        self._gap = True
        self._print(self._in(_BOLD, text))

    def say(self, text: str) -> None:
        """Tell one step, with the time at which it was seen."""
        clock = f"{self.seconds:6.1f} s "
        self._print(
            "\n".join(textwrap.wrap(text, WIDTH, initial_indent=clock, subsequent_indent=_MARGIN))
        )

    def progress(self, text: str) -> None:
        """Show what is going on, in place; nothing where lines cannot be changed."""
        if self._live and text != self._shown:
            self._shown = text
            self._out.write(f"{_CLEAR_LINE}{_MARGIN}{self._in(_DIM, text[: WIDTH - 10])}")
            self._out.flush()

    def quote(self, command: str, lines: Sequence[str]) -> None:
        """Show a command and what it printed."""
        self._gap = True
        self._print(f"  $ {self._in(_BOLD, command)}")
        self._print("\n".join(self._in(_DIM, line) if line else "" for line in lines))
        self._gap = True

    def lines(self, texts: Sequence[str]) -> None:
        """Show lines to copy: as they are, however long."""
        self._print("\n".join(f"  {text}" for text in texts))

    def table(self, promises: Sequence[Promise]) -> None:
        """Show every promise, what was observed, and whether it was kept."""
        observed_columns = WIDTH - _PROMISE_COLUMNS - _KEPT_COLUMNS - 4
        widths = (_PROMISE_COLUMNS, observed_columns)
        self._gap = True
        self._print(self._in(_BOLD, _row(("promise", "observed"), widths)[0] + "  kept"))
        for one in promises:
            first, *rest = _row((one.promise, one.observed), widths)
            kept = self._in(_GREEN, "yes") if one.kept else self._in(_RED, "NO")
            self._print("\n".join((f"{first}  {kept}", *map(str.rstrip, rest))))
        kept_count = sum(one.kept for one in promises)
        self._print(f"\n{kept_count} of {len(promises)} promises kept, {self.seconds:.0f} s")

    def _print(self, text: str) -> None:
        before = (_CLEAR_LINE if self._live else "") + ("\n" if self._gap else "")
        self._gap = False
        self._out.write(f"{before}{text}\n")
        self._out.flush()
        self._shown = ""

    def _in(self, style: str, text: str) -> str:
        return f"{style}{text}{_PLAIN}" if self._colour else text


def _row(texts: tuple[str, str], widths: tuple[int, int]) -> list[str]:
    columns = [textwrap.wrap(t, w) or [""] for t, w in zip(texts, widths, strict=True)]
    height = max(map(len, columns))
    padded = [column + [""] * (height - len(column)) for column in columns]
    pairs = zip(*padded, strict=True)
    return [f"{left:<{widths[0]}}  {right:<{widths[1]}}" for left, right in pairs]
