"""What a hook says of itself: that it failed, and of what.

Owns the last things that are tried when a hook is itself broken: a record, else one line on
standard error.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slurm_hooks.record import Finding


def finding(code: str, error: str, evidence: str | None = None) -> Finding:
    """Return the finding ``code`` (``hook.…``) that tells ``error``."""
    from slurm_hooks import catalog
    from slurm_hooks.record import Evidence

    seen = (Evidence("hook", evidence),) if evidence else ()
    return catalog.finding(code, evidence=seen, details={"error": error})


def report(hook: str, error: BaseException) -> None:
    """Record what the hook itself failed of; where even that fails, say it in one line."""
    text = f"{type(error).__name__}: {error}"
    try:
        import traceback

        from slurm_hooks import configured, context, delivery, news

        config = configured.by_file().config
        told, boot_id = context.told(hook)
        trace = "".join(traceback.format_exception(error))[-2000:]
        record = news.record(told, boot_id, (finding("hook.internal_error", text, trace),))
        now = time.monotonic()
        lost = delivery.deliver(
            delivery.Delivery(record), config.spool, told.node, now + 0.5, now + 1.0
        )
    except BaseException as second:  # nothing is left to try
        lost = f"{type(second).__name__}: {second}"
    if lost:
        say(hook, f"failed, and could not record it: {text}; {lost}")


def say(hook: str, text: str) -> None:
    """Say one line on standard error, which slurmd logs where it does at all."""
    name = hook.replace("_", "-")
    line = " ".join(f"slurm-hook-{name}: {text}".split())[:500]
    with contextlib.suppress(OSError, ValueError):  # where nobody reads, nobody is told
        print(line, file=sys.stderr, flush=True)
