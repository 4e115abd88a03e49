"""Read a pickle that is nothing but data; anything that would do something is refused.

    >>> import pickle
    >>> load(pickle.dumps({"entries": [(1, "a", None)]}, protocol=2))
    {'entries': [(1, 'a', None)]}

A pickle is a program. This reader knows only the instructions that describe containers, numbers
and text, which are all that torch's flight recorder writes (measured on torch 2.13: c10's pickler,
protocol 2); a name of a class, a call, a persistent id end the reading. Nothing is imported and
nothing is called. Beside it, ``checkpoints.pickles`` follows the names and calls of saved models
as inert records; here there are none to follow, and half the time is saved.
(Opcodes: CPython's pickletools.)
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class NotPlain(Exception):
    """The bytes are no pickle of plain data, or pass a limit; the text says which."""


@dataclass(frozen=True)
class Limits:
    """What one pickle may cost: bytes, opcodes, values on the stack and in the memo, seconds."""

    bytes: int = 32 << 20
    opcodes: int = 2_000_000
    stack: int = 100_000
    memo: int = 500_000
    seconds: float = 5.0


_CHECK_EVERY = 1 << 16
_LONG_BYTES = 64
"""Longest integer read; a time in nanoseconds has eight bytes."""

_MARK = object()
_CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}
_EMPTY: dict[int, Callable[[], Any]] = {ord("}"): dict, ord("]"): list, ord(")"): tuple}
_FIXED = {
    ord("J"): struct.Struct("<i"),
    ord("K"): struct.Struct("<B"),
    ord("M"): struct.Struct("<H"),
    ord("G"): struct.Struct(">d"),
}
_SIZED = {
    ord("X"): (struct.Struct("<I"), True),
    0x8C: (struct.Struct("<B"), True),
    0x8D: (struct.Struct("<Q"), True),
    ord("B"): (struct.Struct("<I"), False),
    ord("C"): (struct.Struct("<B"), False),
    0x8E: (struct.Struct("<Q"), False),
}
"""Text and bytes: how their length is written, and whether they are text."""

_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_GET = {ord("h"): struct.Struct("<B"), ord("j"): struct.Struct("<I")}
_PUT = {ord("q"): struct.Struct("<B"), ord("r"): struct.Struct("<I")}
_PROTO, _FRAME, _STOP, _OPEN, _LONG1, _MEMOIZE = 0x80, 0x95, ord("."), ord("("), 0x8A, 0x94
_PROTOCOL_LIMIT = 5


def load(content: bytes, limits: Limits | None = None) -> Any:
    """Return the dicts, lists, tuples, numbers and texts that ``content`` describes.

    What comes back may share parts and contain itself, as a forged pickle can: a reader of it must
    not walk, compare or hash what it has not looked at.

    Raises:
        NotPlain: it is cut off, holds more than data, or passes a limit.
    """
    limits = limits or Limits()
    if len(content) > limits.bytes:
        raise NotPlain(f"it has {len(content)} bytes, more than {limits.bytes}")
    try:
        return _Reader(content, limits).run()
    except (IndexError, struct.error, KeyError, ValueError) as problem:
        raise NotPlain(f"it is damaged or cut off: {problem}"[:160]) from problem
    except MemoryError:
        raise NotPlain("it needs too much memory") from None


class _Reader:
    """The stack machine, for instructions that describe data."""

    def __init__(self, content: bytes, limits: Limits) -> None:
        self._content = content
        self._limits = limits
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        ends = time.monotonic() + self._limits.seconds
        for count in range(self._limits.opcodes):
            opcode = self._content[self._at]
            self._at += 1
            if opcode == _STOP:
                if len(self._stack) != 1:
                    raise ValueError("values are left over at its end")
                return self._pop()
            self._value(opcode)
            if not count % _CHECK_EVERY and time.monotonic() > ends:
                raise NotPlain(f"it takes longer than {self._limits.seconds:g} s")
            if len(self._stack) > self._limits.stack or len(self._memo) > self._limits.memo:
                raise NotPlain("it is nested too deeply or has too many parts")
        raise NotPlain(f"it has more than {self._limits.opcodes} opcodes")

    def _value(self, opcode: int) -> None:
        """One instruction that puts a value on the stack, or names one for later."""
        push = self._stack.append
        if opcode in _GET:
            push(self._memo[self._number(_GET[opcode])])
        elif opcode in _PUT:
            self._memo[self._number(_PUT[opcode])] = self._top()
        elif opcode in _SIZED:
            length, is_text = _SIZED[opcode]
            data = self._take(self._number(length))
            push(data.decode("utf-8", "backslashreplace") if is_text else data)
        elif opcode in _FIXED:
            push(self._number(_FIXED[opcode]))
        elif opcode in _CONSTANTS:
            push(_CONSTANTS[opcode])
        elif opcode in _EMPTY:
            push(_EMPTY[opcode]())
        elif opcode == _OPEN:
            push(_MARK)
        elif opcode == _LONG1:
            length_bytes = self._take(1)[0]
            if length_bytes > _LONG_BYTES:
                raise ValueError(f"an integer of {length_bytes} bytes")
            push(int.from_bytes(self._take(length_bytes), "little", signed=True))
        elif opcode == _MEMOIZE:
            self._memo[len(self._memo)] = self._top()
        else:
            self._container(opcode)

    def _container(self, opcode: int) -> None:
        """One instruction that fills or closes a container, or frames what follows."""
        if opcode == ord("a"):
            self._extend([self._pop()])
        elif opcode == ord("e"):
            self._extend(self._since_mark())
        elif opcode == ord("s"):
            value, key = self._pop(), self._pop()
            self._set([key, value])
        elif opcode == ord("u"):
            self._set(self._since_mark())
        elif opcode == ord("t"):
            self._stack.append(tuple(self._since_mark()))
        elif opcode == ord("l"):
            self._stack.append(self._since_mark())
        elif opcode in _TUPLES:
            taken = [self._pop() for _ in range(_TUPLES[opcode])]
            self._stack.append(tuple(reversed(taken)))
        elif opcode == _PROTO:
            if self._take(1)[0] > _PROTOCOL_LIMIT:
                raise ValueError("a protocol that is not known")
        elif opcode == _FRAME:
            self._take(8)
        else:
            raise NotPlain(f"byte {self._at - 1} ({opcode:#04x}) does more than describe data")

    def _take(self, count: int) -> bytes:
        taken = self._content[self._at : self._at + count]
        if len(taken) < count:
            raise ValueError(f"{count} bytes are said to follow, {len(taken)} do")
        self._at += count
        return taken

    def _number(self, form: struct.Struct) -> Any:
        (number,) = form.unpack_from(self._content, self._at)
        self._at += form.size
        return number

    def _top(self) -> Any:
        if self._stack[-1] is _MARK:
            raise ValueError("a value is missing")
        return self._stack[-1]

    def _pop(self) -> Any:
        self._top()
        return self._stack.pop()

    def _since_mark(self) -> list[Any]:
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is _MARK:
                since = self._stack[place + 1 :]
                del self._stack[place:]
                return since
        raise ValueError("a mark is missing")

    def _extend(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not list:
            raise ValueError("values are added to something that is no list")
        target.extend(values)

    def _set(self, flat: list[Any]) -> None:
        target = self._top()
        if type(target) is not dict or len(flat) % 2:
            raise ValueError("a pair is set in something that is no dict")
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            # A tuple that holds itself over and over takes for ever to hash.
            if type(key) not in (str, int, bool, bytes):
                raise NotPlain(f"a key is a {type(key).__name__}")
            target[key] = value
