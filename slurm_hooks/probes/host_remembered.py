"""What the host probe remembers from run to run; and what of it outlives a reboot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from slurm_hooks.frozen import frozen

_MAX_JOBS = 256


@frozen
class Remembered:
    """What earlier looks left. Times are seconds since boot, but ``jobs``' and ``looked``: UTC.

    ``jobs`` were started here and have not been seen to end; they and ``clock`` outlive a reboot.
    ``idle_used`` and ``idle_huge`` are the least bytes in use without a job in this boot.
    """

    boot: str | None = None
    looked: float = 0.0
    jobs: Mapping[int, float] = field(default_factory=dict)
    clock: bool = False
    idle_used: int | None = None
    idle_huge: int | None = None
    blocked: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    throttled: Mapping[str, int] = field(default_factory=dict)
    measured: float | None = None

    @classmethod
    def recall(cls, state: Mapping[str, Any]) -> Remembered:
        """Return what ``to_dict`` left; an unusable memory is none."""
        try:
            return cls(
                boot=None if state.get("boot") is None else str(state["boot"]),
                looked=float(state.get("looked", 0.0)),
                jobs={int(job): float(since) for job, since in state.get("jobs", {}).items()},
                clock=state.get("clock") is True,
                idle_used=_bytes(state.get("idle_used")),
                idle_huge=_bytes(state.get("idle_huge")),
                blocked={
                    str(name): (float(since), int(switches))
                    for name, (since, switches) in state.get("blocked", {}).items()
                },
                throttled={str(cpu): int(ms) for cpu, ms in state.get("throttled", {}).items()},
                measured=None if state.get("measured") is None else float(state["measured"]),
            )
        except (AttributeError, TypeError, ValueError):
            return cls()

    def of_boot(self, boot: str) -> Remembered:
        """Return what of it still holds in this boot."""
        return self if self.boot == boot else Remembered(jobs=self.jobs, clock=self.clock)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "boot": self.boot,
            "looked": self.looked,
            "jobs": {str(job): since for job, since in list(self.jobs.items())[-_MAX_JOBS:]},
            "clock": self.clock,
            "idle_used": self.idle_used,
            "idle_huge": self.idle_huge,
            "blocked": {name: list(first) for name, first in self.blocked.items()},
            "throttled": dict(self.throttled),
            "measured": self.measured,
        }


def _bytes(value: Any) -> int | None:
    return None if value is None else int(value)
