"""What a reader of the kernel's log hands to its parser.

Apart from the parser, which a look that finds nothing new never loads.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelLine:
    """One kernel message without its prefix; ``key`` identifies it on its node.

    ``seconds`` is when it was logged, since the epoch, where that is known.
    """

    text: str
    key: str | None = None
    seconds: float | None = None
