"""Read the structure of a pickle without doing anything that it says.

    >>> import pickle
    >>> read(pickle.dumps({"step": 1200})).get("step")
    1200

A pickle is a program for a stack machine. Here that program runs on inert data: a name of a class
stays a name, a call stays a record of the call, nothing is imported and nothing is called. What
comes out is a tree of the few types below, in which the other modules look for steps, storages and
shards. Nothing in it is hashed or compared as a whole: a forged pickle can nest a tuple in itself
a hundred times over, and a hash of that takes for ever. (Opcodes: CPython's pickletools.)
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from slurm_hooks.checkpoints.verdict import Broken, Unverified

OPCODES_LIMIT = 1_000_000
"""Most opcodes followed, some 0.8 s (measured); a thousand tensors take 30,000."""

_VALUE_OPCODES = frozenset(
    {"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE"}
    | {"BINUNICODE8", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT"}
    | {"BINFLOAT", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Name(NamedTuple):
    """A class or function that the pickle names."""

    module: str
    name: str


@dataclass
class Table:
    """A dict: its pairs in order, a key possibly several times."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def get(self, key: str) -> Any:
        """Return the last value of the text ``key``, None where there is none."""
        for name, value in reversed(self.pairs):
            if isinstance(name, str) and name == key:
                return value
        return None


@dataclass
class Object:
    """What a call or a class would have made: the callable, its arguments, its state."""

    made_by: Any
    arguments: Any = ()
    state: Any = None
    items: Table = field(default_factory=Table)

    def get(self, key: str) -> Any:
        """Return a key's value or an attribute's, None where there is none."""
        found = self.items.get(key)
        return self.state.get(key) if found is None and isinstance(self.state, Table) else found


@dataclass
class Reference:
    """A persistent id; torch.save writes one for each tensor's storage."""

    id: Any


_MARK = object()


def read(content: bytes) -> Any:
    """Return the structure of the one pickle that ``content`` is.

    Raises:
        Broken: it is cut off, or no pickle.
        Unverified: it has too many opcodes.
    """
    stream = io.BytesIO(content)
    found = read_next(stream)
    if stream.tell() != len(content):
        raise Broken(f"{len(content) - stream.tell()} bytes follow the end of the pickle")
    return found


def read_next(stream: io.BytesIO) -> Any:
    """Return the structure of the pickle at the stream's place, and move behind it.

    Raises:
        Broken, Unverified: as ``read``.
    """
    machine = _Machine()
    try:
        for count, (opcode, argument, _place) in enumerate(pickletools.genops(stream)):
            if count > OPCODES_LIMIT:
                raise Unverified(f"its pickle has more than {OPCODES_LIMIT} opcodes")
            if opcode.name == "STOP":
                return machine.stack[-1]
            machine.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise Broken(f"its pickle is damaged or cut off: {error}"[:160]) from error
    except MemoryError:
        raise Unverified("its pickle needs too much memory") from None
    raise Broken("its pickle has no end")


def references(found: Any) -> Iterator[Reference]:
    """Yield each persistent id in a structure once, however often it is shared."""
    for part in _parts(found):
        if isinstance(part, Reference):
            yield part


def objects(found: Any, name: str) -> Iterator[Object]:
    """Yield the objects made by a class called ``name``, each once."""
    for part in _parts(found):
        made_by = part.made_by if isinstance(part, Object) else None
        if isinstance(made_by, Name) and made_by.name == name:
            yield part


def _parts(found: Any) -> Iterator[Any]:
    seen: set[int] = set()
    waiting = [found]
    while waiting:
        part = waiting.pop()
        if isinstance(part, (str, int, float, bytes, Name)) or part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if isinstance(part, (list, tuple)):
            waiting.extend(part)
        elif isinstance(part, Table):
            for pair in part.pairs:
                waiting.extend(pair)
        elif isinstance(part, Object):
            waiting.extend((part.made_by, part.arguments, part.state, part.items))
        elif isinstance(part, Reference):
            waiting.append(part.id)


class _Machine:
    """The stack machine of pickle on inert data."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        if name in _VALUE_OPCODES:
            self.stack.append(argument)
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            self.stack.append(self.memo[int(argument)])
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[int(argument)] = self.stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif name == "MARK":
            self.stack.append(_MARK)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            self.stack.append(self._take(_TUPLES[name]))
        elif name not in ("PROTO", "FRAME", "READONLY_BUFFER"):
            self._build(name, argument)

    def _build(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif name in ("EMPTY_TUPLE",):
            stack.append(())
        elif name in ("EMPTY_LIST", "EMPTY_SET"):
            stack.append([])
        elif name == "EMPTY_DICT":
            stack.append(Table())
        elif name in ("LIST", "FROZENSET"):
            stack.append(self._since_mark())
        elif name == "DICT":
            stack.append(Table(_pairs(self._since_mark())))
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            self._extend([stack.pop()] if name == "APPEND" else self._since_mark())
        elif name in ("SETITEM", "SETITEMS"):
            self._set(list(self._take(2)) if name == "SETITEM" else self._since_mark())
        elif name == "GLOBAL":
            module, _, attribute = str(argument).partition(" ")
            stack.append(Name(module, attribute))
        elif name == "STACK_GLOBAL":
            module, attribute = self._take(2)
            stack.append(Name(str(module)[:200], str(attribute)[:200]))
        elif name in ("REDUCE", "NEWOBJ"):
            stack.append(Object(*self._take(2)))
        elif name == "NEWOBJ_EX":
            made_by, arguments, _keywords = self._take(3)
            stack.append(Object(made_by, arguments))
        elif name in ("OBJ", "INST"):
            parts = self._since_mark()
            made_by = parts.pop(0) if name == "OBJ" else Name(*str(argument).split(" ", 1))
            stack.append(Object(made_by, tuple(parts)))
        elif name == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], Object):
                stack[-1].state = state
        elif name in ("BINPERSID", "PERSID"):
            stack.append(Reference(stack.pop() if name == "BINPERSID" else argument))
        elif name == "POP":
            stack.pop()
        elif name == "POP_MARK":
            self._since_mark()
        elif name == "DUP":
            stack.append(stack[-1])
        else:  # EXT1, EXT2, EXT4 and NEXT_BUFFER name things outside of the pickle
            stack.append(Object(Name("", name)))

    def _take(self, count: int) -> tuple[Any, ...]:
        if len(self.stack) < count:
            raise IndexError("its stack is empty")
        taken = tuple(self.stack[-count:])
        del self.stack[-count:]
        return taken

    def _since_mark(self) -> list[Any]:
        for place in range(len(self.stack) - 1, -1, -1):
            if self.stack[place] is _MARK:
                since = self.stack[place + 1 :]
                del self.stack[place:]
                return since
        raise IndexError("a mark is missing")

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, Object):
            target.items.pairs.extend((None, value) for value in values)

    def _set(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        table = target.items if isinstance(target, Object) else target
        if isinstance(table, Table):
            table.pairs.extend(_pairs(flat))


def _pairs(flat: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))
