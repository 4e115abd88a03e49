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

    Raises:
        ClusterError: none came in time; the text says ``what`` was waited for and ends with what
            ``look_into`` returns.
    """
    deadline = time.monotonic() + timeout_seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            text = f"not within {timeout_seconds:g} s: {what}\n{look_into()}"
            raise ClusterError(text.rstrip("\n"))
        time.sleep(poll_seconds)
    return value
