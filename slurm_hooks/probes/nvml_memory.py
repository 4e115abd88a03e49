"""What the NVML probe remembers from run to run, within one boot and one driver.

Faults keep the time when they were first seen, what comes and goes is told from what stays, and
counters are read as growth. A reboot or another driver starts it all anew: errors from before are
history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_hooks.probes.nvml_reading import Device
from slurm_hooks.record import utc

_LONGEST_GAP_SECONDS = 15 * 60
"""Two samples further apart say nothing of the time between them."""

Since = tuple[float, str, float]
"""When something was first seen (seconds since boot, and UTC), and when last (since boot)."""


@dataclass
class Memory:
    """What is remembered of earlier runs in this boot, and what this run adds to it.

    Times are seconds since boot (``now``). ``since`` has, by what was seen, when it was first and
    last seen; ``counters`` has, by device, the values of growing counters at the ``last_look``.
    """

    now: float
    boot: str
    hold: float
    since: Mapping[str, Since] = field(default_factory=dict)
    counters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    last_look: float = 0.0
    new_since: dict[str, Since] = field(default_factory=dict)
    new_counters: dict[str, dict[str, int]] = field(default_factory=dict)

    @classmethod
    def recall(cls, state: Mapping[str, Any], now: float, boot: str, hold: float) -> Memory:
        """Return the memory that ``to_dict`` left in ``state``; an unusable one is no memory."""
        try:
            since = {
                str(what): (float(first), str(utc_first), float(last))
                for what, (first, utc_first, last) in state.get("since", {}).items()
            }
            counters = {
                str(device): {str(name): int(value) for name, value in values.items()}
                for device, values in state.get("counters", {}).items()
            }
            return cls(now, boot, hold, since, counters, float(state.get("last_look", 0.0)))
        except (AttributeError, TypeError, ValueError):
            return cls(now, boot, hold)

    def to_dict(self) -> dict[str, Any]:
        """Return what to keep for the next run, as JSON data."""
        since = {what: list(times) for what, times in self.new_since.items()}
        return {"since": since, "counters": self.new_counters, "last_look": self.now}

    def first_seen(self, what: str, gap: float | None = None) -> tuple[float, str]:
        """Note that ``what`` is seen now; return when it was first, since boot and as UTC.

        After more than ``gap`` seconds without a look it begins anew.
        """
        known = self.since.get(what)
        if not known or (gap is not None and self.now - known[2] > gap):
            known = (self.now, utc(), self.now)
        self.new_since[what] = (known[0], known[1], self.now)
        return known[0], known[1]

    def held(self, what: str) -> bool:
        """Whether ``what``, seen now, was also seen at a look at least ``hold`` seconds ago."""
        return self.now - self.first_seen(what, _LONGEST_GAP_SECONDS)[0] >= self.hold

    def would_be_held(self, what: str) -> bool:
        """Whether seeing ``what`` now would make it held; notes nothing."""
        known = self.since.get(what)
        if not known or self.now - known[2] > _LONGEST_GAP_SECONDS:
            return False
        return self.now - known[0] >= self.hold

    def grown(self, device: Device, counter: str, value: int) -> tuple[int, float]:
        """Keep a counter's value; return its growth since the last look, and the minutes between.

        A counter that went back was reset: what it shows now has grown since. Only values other
        than zero are kept, since healthy links have hundreds of counters at zero.
        """
        known = self.counters.get(device.key)
        kept = self.new_counters.setdefault(device.key, dict(known or {}))
        kept.pop(counter, None)
        if value:
            kept[counter] = value
        if known is None:
            return 0, 0.0
        before = known.get(counter, 0)
        minutes = max((self.now - self.last_look) / 60, 1 / 60)
        return (value - before if before <= value else value), minutes
