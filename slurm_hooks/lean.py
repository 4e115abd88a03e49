"""Load modules of Python's own without what they import and a hook does not use.

    >>> load("dataclasses", without="inspect", get_annotations=own_annotations)

``dataclasses`` imports ``inspect`` for one line that writes a missing docstring, and ``urllib``,
which ``pathlib`` wants, imports ``ipaddress``: 7 of the 60 ms that a prolog with probes takes, and
a prolog delays every job. What is left out is loaded all the same by whoever uses it.

Python 3.12 and 3.13 ask ``inspect`` for each dataclass's annotations as well, which would load it:
11 ms. So the one function that is asked for is written out here.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # see config_file
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def own_annotations(cls: type) -> dict[str, Any]:
    """Return a class's own annotations as they are written: ``inspect.get_annotations(cls)``."""
    return dict(cls.__annotations__)


def load(name: str, *, without: str, **instead: Callable[..., Any]) -> None:
    """Import the module ``name``; in it, ``without`` is loaded when it is first used.

    ``instead`` are functions that take the place of those of ``without`` by the same name, and so
    need nothing loaded. Does nothing where either is loaded already.
    """
    if name in sys.modules or without in sys.modules:
        return
    stand_in = type(sys)(without)
    stand_in.__dict__.update(instead)

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
