"""The waits of a story: what is waited for, and how far a run is, is shown meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from recovery.demo.teller import Teller
from recovery.demo.training import Run

T = TypeVar("T")


class Waits(Protocol):
    """A cluster, of whatever kind."""

    def wait(self, condition: Callable[[], T | None], timeout_seconds: float, what: str) -> T:
        """Return the first true value of ``condition``; ClusterError where none came in time."""


@dataclass(frozen=True)
class Until:
    """``until(condition, "job 5 ends")``: each wait has this limit, each run this many steps."""

    cluster: Waits
    teller: Teller
    limit_seconds: float
    steps: int

    def __call__(self, condition: Callable[[], T | None], what: str, run: Run | None = None) -> T:
        """Return the first true value of ``condition``; show the progress of ``run`` meanwhile.

        Raises:
            ClusterError: none came in time.
        """

        def look() -> T | None:
            step = f", step {run.step} of {self.steps}" if run else ""
            self.teller.progress(f"waiting until {what}{step}")
            return condition()

        return self.cluster.wait(look, self.limit_seconds, what)
