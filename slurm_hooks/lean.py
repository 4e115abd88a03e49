"""Load modules of Python's own without what they import and a hook does not use.

    >>> load("dataclasses", without="inspect")

``dataclasses`` imports ``inspect`` for one line that writes a missing docstring, and ``urllib``,
which ``pathlib`` wants, imports ``ipaddress``: 7 of the 60 ms that a prolog with probes takes, and
a prolog delays every job. What is left out is loaded all the same by whoever uses it.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # see config_file
if TYPE_CHECKING:
    from typing import Any


def load(name: str, *, without: str) -> None:
    """Import the module ``name``; in it, ``without`` is loaded when it is first used.

    Does nothing where either is loaded already.
    """
    if name in sys.modules or without in sys.modules:
        return
    stand_in = type(sys)(without)

    def attribute(wanted: str) -> Any:
        return getattr(_imported(without), wanted)

    stand_in.__dict__["__getattr__"] = attribute  # PEP 562
    sys.modules[without] = stand_in
    try:
        _imported(name)
    finally:
        del sys.modules[without]


def _imported(name: str) -> Any:
    __import__(name)
    return sys.modules[name]
