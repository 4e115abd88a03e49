"""Frozen dataclasses that are quick to define.

    >>> @frozen
    ... class Place:
    ...     name: str
    ...     links: tuple[int, ...] = ()
    >>> Place("a")
    Place(name='a', links=())

``dataclass(frozen=True)`` writes and compiles six functions for each class: 0.6 ms. A prolog with
probes defines some fifty classes, and delays every job. Here all classes share six functions that
are written out below; what is defined is a dataclass to everyone else (``fields``, ``replace``,
``asdict``, mypy). An instance takes some microseconds more to make, so what is made by the thousand
is better off with ``dataclass``.
"""

from __future__ import annotations

from dataclasses import MISSING, FrozenInstanceError, dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn, TypeVar

    from typing_extensions import dataclass_transform

    T = TypeVar("T")
else:

    def dataclass_transform(**_options):  # what only a type checker needs
        return lambda decorator: decorator


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """Make a class what ``dataclass(frozen=True)`` makes of it."""
    made = dataclass(init=False, repr=False, eq=False)(cls)
    for function in (__init__, __repr__, __eq__, __hash__, __setattr__, __delattr__):
        setattr(made, function.__name__, function)
    return made


def __init__(self: Any, /, *values: Any, **named: Any) -> None:
    fields = type(self).__dataclass_fields__
    given = dict(zip(fields, values))  # noqa: B905 - more values than fields are told below
    unknown = [name for name in named if name not in fields or name in given]
    if len(values) > len(fields) or unknown:
        wrong = ", ".join(unknown) or f"{len(values)} values"
        raise TypeError(f"{type(self).__name__} cannot take {wrong}: it has {', '.join(fields)}")
    given.update(named)
    for name, one in fields.items():
        if name in given:
            value = given[name]
        elif one.default is not MISSING:
            value = one.default
        elif one.default_factory is not MISSING:
            value = one.default_factory()
        else:
            raise TypeError(f"{type(self).__name__} lacks {name!r}")
        self.__dict__[name] = value
    if hasattr(self, "__post_init__"):
        self.__post_init__()


def __repr__(self: Any) -> str:
    shown = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
    return f"{type(self).__qualname__}({shown})"


def __eq__(self: Any, other: object) -> bool:
    return self.__dict__ == other.__dict__ if type(other) is type(self) else NotImplemented


def __hash__(self: Any) -> int:
    return hash(tuple(self.__dict__.values()))


def __setattr__(self: Any, name: str, value: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def __delattr__(self: Any, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")
