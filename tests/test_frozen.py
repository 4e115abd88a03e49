"""What ``frozen`` makes of a class is what ``dataclass(frozen=True)`` would."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace
from typing import Any

import pytest

from slurm_hooks.frozen import frozen


@frozen
class Quick:
    """A class of ours."""

    a: int
    b: tuple[int, ...] = ()
    c: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.a < 0:
            raise ValueError("a must not be negative")


@dataclass(frozen=True)
class Slow:
    """The same, by Python's own means."""

    a: int
    b: tuple[int, ...] = ()
    c: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.a < 0:
            raise ValueError("a must not be negative")


@frozen
class QuickMore(Quick):
    """One that adds a field."""

    d: int = 4


@dataclass(frozen=True)
class SlowMore(Slow):
    """The same, by Python's own means."""

    d: int = 4


MAKING: list[Callable[[Any], Any]] = [
    lambda made: made(1),
    lambda made: made(1, (2,)),
    lambda made: made(1, c={"x": 1}),
    lambda made: made(b=(3,), a=2),
    lambda made: replace(made(1), a=5),
    lambda made: asdict(made(1, (2,), {"x": 1})),
    lambda made: [one.name for one in fields(made)],
    lambda made: pickle.loads(pickle.dumps(made(1))) == made(1),
    lambda made: made(1) == made(1),
    lambda made: made(1) == made(2),
    lambda made: made(1) == (1, (), {}),
    lambda made: made(1).c is made(1).c,
    lambda made: made.__match_args__,
    lambda made: made(),
    lambda made: made(-1),
    lambda made: made(1, 2, 3, 4, 5),
    lambda made: made(1, a=2),
    lambda made: made(1, z=2),
    lambda made: replace(made(1), z=2),
    lambda made: setattr(made(1), "a", 2),
    lambda made: setattr(made(1), "z", 2),
    lambda made: delattr(made(1), "a"),
    lambda made: hash(made(1)),
    lambda made: {made(1, (), None): 1}[made(1, (), None)],
]


def what_comes_of(make: Callable[[Any], Any], kind: type) -> object:
    """Return what is shown of a result, or the kind of the error."""
    try:
        return repr(make(kind)).replace("Quick", "Slow")
    except (TypeError, ValueError, FrozenInstanceError) as error:
        return type(error)


@pytest.mark.parametrize("kinds", [(Quick, Slow), (QuickMore, SlowMore)])
@pytest.mark.parametrize("make", MAKING)
def test_it_behaves_as_a_frozen_dataclass(make: Callable[[Any], Any], kinds: Any) -> None:
    quick, slow = kinds
    assert what_comes_of(make, quick) == what_comes_of(make, slow)


def test_what_was_left_out_of_an_import_is_there_for_who_uses_it() -> None:
    script = """
from slurm_hooks import lean
lean.load("dataclasses", without="inspect", get_annotations=lean.own_annotations)
import sys
assert "inspect" not in sys.modules
import dataclasses
@dataclasses.dataclass
class Undocumented:
    a: int = 1
assert Undocumented.__doc__ == "Undocumented(a: int = 1)", Undocumented.__doc__
import inspect
assert inspect.signature
assert inspect.get_annotations(Undocumented) == lean.own_annotations(Undocumented) == {"a": int}
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
