"""Read a TOML file into frozen dataclasses; say file, line, key and the nearest right key.

    >>> @dataclass(frozen=True)
    ... class Section:
    ...     settle: float = 5.0
    >>> read(Section, {"settle": 7})
    Section(settle=7.0)

Owns types and messages; which keys exist is what the dataclasses of ``config`` say.
"""

from __future__ import annotations

import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from slurm_hooks import config_file

T = TypeVar("T")


class ConfigError(Exception):
    """A configuration that cannot be used; its text is one line that says what to mend."""


class WrongKey(Exception):
    """A key that does not exist or holds a wrong value, by its path from the top of the file."""

    def __init__(self, path: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.path = path


def read_file(kind: type[T], path: Path) -> T:
    """Return ``path`` read as the dataclass ``kind``; a file that is not there gives defaults.

    Raises:
        ConfigError: unreadable, not TOML, an unknown key, or a value of the wrong type.
    """
    try:
        raw = config_file.read(path)
    except FileNotFoundError:
        return kind()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    return read_bytes(kind, raw, path)


def read_bytes(kind: type[T], raw: bytes, path: Path) -> T:
    """Return a file's content ``raw`` read as the dataclass ``kind``; ``path`` is for messages.

    Raises:
        ConfigError: not TOML, an unknown key, or a value of the wrong type.
    """
    limit = config_file.SIZE_LIMIT_BYTES
    if len(raw) > limit:
        raise ConfigError(f"{path}: larger than {limit} bytes; is it the right file?")
    try:
        text = raw.decode("utf-8")
        document = loads(text)
    except ValueError as error:  # not UTF-8, or not TOML
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    try:
        return read(kind, document)
    except WrongKey as error:
        raise ConfigError(f"{path}:{line_of(text, error.path)}: {error}") from error


def loads(text: str) -> dict[str, Any]:
    """Return what a TOML text holds.

    Raises:
        ValueError: it is not TOML.
    """
    if sys.version_info >= (3, 11):  # loaded only for a file: most hooks know what it holds
        import tomllib
    else:
        import tomli as tomllib
    document: dict[str, Any] = tomllib.loads(text)
    return document


def read(kind: type[T], document: Mapping[str, Any], path: tuple[str, ...] = ()) -> T:
    """Return the dataclass ``kind`` filled from ``document``.

    A class may check its values in ``__post_init__`` by raising ValueError; a message that starts
    with a field's name points at that key's line.

    Raises:
        WrongKey: an unknown key, a missing one, or a value of the wrong type.
    """
    hints = typing.get_type_hints(kind)
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    for key in document:
        if key not in known:
            near = _nearest(key, known)
            advice = f"did you mean {near!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise WrongKey((*path, key), f"unknown key {'.'.join((*path, key))!r}; {advice}")
    for required in fields(kind):  # type: ignore[arg-type]
        no_default = required.default is MISSING and required.default_factory is MISSING
        if no_default and required.name not in document:
            missing = ".".join((*path, required.name))
            raise WrongKey(path, f"{missing!r} is missing")
    values = {key: _convert(hints[key], value, (*path, key)) for key, value in document.items()}
    try:
        return kind(**values)
    except ValueError as error:
        named = re.match(r"\w+", str(error))
        key = named.group() if named and named.group() in known else ""
        raise WrongKey((*path, key) if key else path, f"{'.'.join(path)}: {error}") from error


def salvage(kind: type[Any], raw: bytes) -> dict[str, Any]:
    """Return the top-level values of ``kind`` that a broken file still holds, by name.

    Of a file that is not TOML, what stands above the line that tomllib names is tried.
    """
    lines = raw[: config_file.SIZE_LIMIT_BYTES].decode("utf-8", "replace").splitlines()
    document: dict[str, Any] = {}
    for _attempt in range(2):
        try:
            document = loads("\n".join(lines) + "\n")
            break
        except ValueError as error:
            named = re.search(r"at line (\d+)", str(error))
            lines = lines[: int(named.group(1)) - 1] if named else lines[:-1]
    found = {}
    hints = typing.get_type_hints(kind)
    for key, value in document.items():
        if key in hints:
            try:
                found[key] = _convert(hints[key], value, (key,))
            except WrongKey:
                continue
    return found


def line_of(text: str, path: tuple[str, ...]) -> int:
    """Return the line where the key at ``path`` stands, or the nearest enclosing one, else 1.

    tomllib keeps no positions; this looks for ``[a.b]``, ``[[a]]`` and ``key =`` in order. A path
    element that is a number chooses among the ``[[a]]`` of an array.
    """
    best, section, counts = (0, 1), (), {}  # type: tuple[int, int], tuple[str, ...], dict[str, int]
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        header = re.match(r"\[\[?([^\[\]]+)\]\]?\s*(#.*)?$", stripped)
        if header:
            section = tuple(part.strip(" \"'") for part in header.group(1).split("."))
            if stripped.startswith("[["):
                position = counts.get(header.group(1), 0)
                counts[header.group(1)] = position + 1
                section = (*section, str(position))
            here = section
        else:
            key = re.match(r"([\w.\"'-]+)\s*=", stripped)
            if not key:
                continue
            here = section + tuple(part.strip("\"'") for part in key.group(1).split("."))
        matched = len(here) if here == path[: len(here)] else 0
        if matched > best[0]:
            best = (matched, number)
    return best[1]


def _convert(hint: Any, value: Any, path: tuple[str, ...]) -> Any:
    """Return ``value`` as the type ``hint``, or raise WrongKey naming both types."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            try:
                return _convert(option, value, path)
            except WrongKey:
                continue
        raise _wrong_type(path, hint, value)
    if origin is typing.Literal:
        if value not in arguments:
            near = _nearest(str(value), [str(argument) for argument in arguments])
            hint_text = f"; did you mean {near!r}?" if near else ""
            choices = ", ".join(repr(choice) for choice in arguments)
            message = f"{'.'.join(path)} = {value!r} is not one of {choices}{hint_text}"
            raise WrongKey(path, message)
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong_type(path, hint, value)
        return tuple(
            _convert(arguments[0], item, (*path, str(position)))
            for position, item in enumerate(value)
        )
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise _wrong_type(path, hint, value)
        return {key: _convert(arguments[1], item, (*path, key)) for key, item in value.items()}
    if is_dataclass(hint):
        if not isinstance(value, dict):
            raise _wrong_type(path, hint, value)
        return read(typing.cast("type[Any]", hint), value, path)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if type(value) is not hint:
        raise _wrong_type(path, hint, value)
    return value


def _nearest(word: str, known: Iterable[str]) -> str | None:
    import difflib  # only for mistakes: hooks import this module for every job

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return near[0] if near else None


_TOML_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}


def _wrong_type(path: tuple[str, ...], hint: Any, value: Any) -> WrongKey:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    names = [_TOML_NAMES.get(option, "") or _shape(option) for option in options]
    return WrongKey(path, f"{'.'.join(path)} must be {' or '.join(names)}, not {value!r:.60}")


def _shape(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is tuple:
        return "a list"
    if origin is dict or is_dataclass(hint):
        return "a table"
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(hint))
    return "a path" if hint is Path else str(hint)
