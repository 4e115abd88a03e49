"""What is said of checkpoints: the data, its JSON form, and how a format says no.

``schemas/checkpoint-verdict-v1.json`` is the contract of the JSON form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

SCHEMA = "checkpoint-verdict/v1"

State = Literal["complete", "unverified", "writing", "broken"]


class NotComplete(Exception):
    """Why a checkpoint does not count, in one sentence without its path."""

    state: ClassVar[State] = "broken"


class Broken(NotComplete):
    """Something that must be there is missing, short or wrong."""


class Writing(NotComplete):
    """Its writer has not finished, or died before it did."""

    state = "writing"


class Unverified(NotComplete):
    """Nothing speaks against it, but too little was seen to vouch for it."""

    state = "unverified"


@dataclass(frozen=True)
class Judged:
    """What judging a complete checkpoint told: its step if it says one, and notes for a person.

    ``contents`` tells that its format has checksums and that they were all compared.
    """

    step: int | None = None
    contents: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """Something that may be a checkpoint, before it is judged.

    ``step`` is what its name says. ``modified`` is in seconds since the epoch. ``judge`` raises
    NotComplete where the checkpoint does not count.
    """

    path: str
    format: str
    step: int | None
    modified: float
    judge: Callable[[], Judged]


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint and what was found. ``why`` tells, unless it is complete, what is wrong.

    ``checked`` is ``contents`` where every checksum was compared, else ``structure``. ``bytes``
    counts the files that were looked at; ``modified`` is in seconds since the epoch.
    """

    path: str
    format: str
    state: State
    step: int | None
    checked: Literal["structure", "contents"]
    bytes: int
    modified: float
    why: str | None = None


@dataclass(frozen=True)
class Verdict:
    """The newest complete checkpoint under ``path``, and why newer ones do not count.

    ``status``: ``complete`` (``newest`` is it), ``unverified`` (none is certain, some may be
    good), ``broken`` (there are some, none is usable), ``none`` (there is none yet).
    ``passed_over`` are those newer than ``newest``, newest first. ``searched_all`` is False where
    a limit ended the search before its end.
    """

    path: str
    status: Literal["complete", "unverified", "broken", "none"]
    newest: Checkpoint | None = None
    passed_over: tuple[Checkpoint, ...] = ()
    searched_all: bool = True
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> int | None:
        """The step of the newest complete checkpoint, None where there is none or it is silent."""
        return self.newest.step if self.newest else None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of ``checkpoint-verdict/v1``."""
        return {
            "schema": SCHEMA,
            "path": self.path,
            "status": self.status,
            "step": self.step,
            "newest": asdict(self.newest) if self.newest else None,
            "passed_over": [asdict(item) for item in self.passed_over],
            "searched_all": self.searched_all,
            "notes": list(self.notes),
        }
