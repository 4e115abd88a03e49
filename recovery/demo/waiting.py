"""Waiting for a condition, never for a guessed time, and never without a limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from recovery.demo.programs import ClusterError

T = TypeVar("T")


def wait_for(
    condition: Callable[[], T | None],
    timeout_seconds: float,
    what: str,
    *,
    poll_seconds: float,
    look_into: Callable[[], str] = str,
) -> T:
    """Return the first true value of ``condition``, asked again and again.

    Between two looks ``poll_seconds`` pass, and as long as a look takes where that is more: one
    that runs a command must not keep the processor from what it waits for.

    Raises:
        ClusterError: none came in time; the text says ``what`` was waited for and ends with what
            ``look_into`` returns.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        began = time.monotonic()
        value = condition()
        if value:
            return value
        now = time.monotonic()
        if now > deadline:
            text = f"not within {timeout_seconds:g} s: {what}\n{look_into()}"
            raise ClusterError(text.rstrip("\n"))
        time.sleep(max(poll_seconds, now - began))
