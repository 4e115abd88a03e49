"""One answer of ``slurm-hooks doctor``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Check:
    """One answer. ``mend`` is the line that mends what is ``broken`` or unwise (``warning``)."""

    subject: str
    status: Literal["ok", "warning", "broken"]
    says: str
    mend: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)
