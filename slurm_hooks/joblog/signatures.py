"""Log signatures: data beside the catalogue, compiled once; a site adds a folder of its own.

    >>> signature, found = match(load(), "srun: error: n3: task 7: Exited with exit code 1")
    >>> signature.id, found["host"]
    ('slurm.task_exited', 'n3')

``catalog/log_signatures/*.toml`` has one table for each signature, read in the order of the file
names: the first that matches a line has it. ``classes.toml`` says what each class means for a job.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent.parent / "catalog" / "log_signatures"

CLASSES_FILE = "classes.toml"

ROLES = ("root", "cascade", "noise", "exit")
"""``root`` may be the cause, ``cascade`` is a victim's line, ``noise`` is neither, and ``exit``
says that a process ended, not why."""

BLAMES = ("none", "reporter", "named", "peer", "lonely", "rank")
"""Whom a signature implicates: nobody; the node that wrote the line; the nodes captured in it; the
peer that most partners name; the node that is alone in showing it; the ranks captured in it."""

ANCHORS = (
    *("rror", "xception", "Traceback", "NCCL WARN", "atchdog", "exit", "illed", "ailed"),
    *("signal", "core dumped", "o space left", "quota exc", "not found", "o such file"),
    *("ERROR", "NVRM: ", "topping train", "GPU is lost"),
)
"""Strings of which one is in every line that a signature of ours is meant for.

Each costs one pass of ``bytes.find`` over the log (2 to 4 GB/s), whatever the number of
signatures; a signature whose lines have none of them names its own in ``anchors``."""


_READ_BY_NAME = ("class", "role", "any", "pattern", "anchors")


class SignatureError(Exception):
    """A signature file that cannot be used; its text names file, table and what is wrong."""


@dataclass(frozen=True)
class LogClass:
    """What a cause of this class means: the job's verdict, and its tier of precedence."""

    job: str
    tier: int


@dataclass(frozen=True)
class Signature:
    """One kind of line.

    ``any`` are literals of which one is in every matching line; ``anchors`` are those that the
    whole log has to be searched for, where ANCHORS would miss the line. ``indented`` allows the
    pattern on lines that start with blanks, which otherwise are a traceback's source text.
    ``everywhere`` is the job's verdict where a ``lonely`` fault is not one node's alone.
    """

    id: str
    fault_class: str
    role: str
    any: tuple[str, ...]
    pattern: re.Pattern[str]
    source: str
    confidence: str = "established"
    blame: str = "none"
    everywhere: str = "hold"
    indented: bool = False
    anchors: tuple[str, ...] = ()
    resolution: str | None = None


@dataclass(frozen=True)
class Catalogue:
    """All signatures in order, the classes, and the literals that find candidate lines."""

    signatures: tuple[Signature, ...]
    classes: Mapping[str, LogClass]
    anchors: tuple[bytes, ...]

    def named(self, signature_id: str) -> Signature:
        """Return the signature called ``signature_id``.

        Raises:
            KeyError: there is none.
        """
        for signature in self.signatures:
            if signature.id == signature_id:
                return signature
        raise KeyError(signature_id)


@functools.cache
def load(*extra: Path) -> Catalogue:
    """Return the catalogue that ships, with the ``*.toml`` of the folders ``extra`` before it.

    Raises:
        SignatureError: a file cannot be read or a table is wrong.
    """
    classes: dict[str, LogClass] = {}
    signatures: list[Signature] = []
    for folder in (*extra, FOLDER):
        for path in sorted(folder.glob("*.toml")):
            tables = _tables(path)
            if path.name == CLASSES_FILE:
                classes.update({name: _class(path, name, one) for name, one in tables.items()})
            else:
                signatures += [_signature(path, name, one) for name, one in tables.items()]
    for signature in signatures:
        if signature.fault_class not in classes:
            raise SignatureError(f"{signature.id}: unknown class {signature.fault_class!r}")
    return Catalogue(tuple(signatures), classes, _anchors(signatures))


def class_names() -> tuple[str, ...]:
    """Return the classes that ship, without reading a signature."""
    return tuple(sorted(_tables(FOLDER / CLASSES_FILE)))


def match(catalogue: Catalogue, text: str) -> tuple[Signature, Mapping[str, str]] | None:
    """Return the first signature that ``text`` (a Line's text) has, and what it captures."""
    indented = text.startswith(("    ", "\t", '  File "', "frame #"))
    for signature in catalogue.signatures:
        if indented and not signature.indented:
            continue
        if not any(literal in text for literal in signature.any):
            continue
        found = signature.pattern.search(text)
        if found:
            captures = {name: value for name, value in found.groupdict().items() if value}
            return signature, captures
    return None


def _tables(path: Path) -> dict[str, dict[str, Any]]:
    try:
        tables: dict[str, dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))
        return tables
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise SignatureError(f"{path}: {problem}") from problem


def _class(path: Path, name: str, table: Mapping[str, Any]) -> LogClass:
    if table.get("job") not in ("requeue", "hold", "leave") or not isinstance(
        table.get("tier"), int
    ):
        raise SignatureError(f"{path}: [{name}] needs job = requeue|hold|leave and tier = number")
    return LogClass(table["job"], table["tier"])


def _signature(path: Path, name: str, table: Mapping[str, Any]) -> Signature:
    try:
        signature = Signature(
            id=name,
            fault_class=table["class"],
            role=table["role"],
            any=tuple(table["any"]),
            pattern=re.compile(table["pattern"]),
            anchors=tuple(table.get("anchors", ())),
            **{key: table[key] for key in table if key not in _READ_BY_NAME},
        )
    except (KeyError, TypeError, re.error) as problem:
        raise SignatureError(f"{path}: [{name}]: {problem}") from problem
    if signature.role not in ROLES or signature.blame not in BLAMES or not signature.any:
        raise SignatureError(f"{path}: [{name}]: role, blame or any is not one that exists")
    return signature


def _anchors(signatures: Sequence[Signature]) -> tuple[bytes, ...]:
    own = {text for signature in signatures for text in signature.anchors}
    return tuple(text.encode() for text in (*ANCHORS, *sorted(own - set(ANCHORS))))
