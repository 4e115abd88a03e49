"""Whether a file's content is a fault record, and whose word it is.

    >>> parse(b'{"schema": NaN}', "01K…")
    Traceback (most recent call last):
    recovery.admission.Refused: it is not JSON: NaN is no JSON number

Owns what makes a record acceptable: strict JSON, the schema, agreement with itself and with its
file's name. Files and folders belong to ``inbox``, MUNGE's credentials to ``munge``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import cache
from importlib import resources
from typing import Any, NoReturn

import fastjsonschema

from slurm_hooks.record import worst

_REASON_LIMIT = 400

_HEARTBEAT_PROPERTIES = ("node", "boot_id", "time", "verdict", "probes")


_GPUS = {
    "description": "The uuid of each GPU, by its minor number.",
    "type": "object",
    "maxProperties": 256,
    "additionalProperties": {"type": "string", "maxLength": 96},
}


class Refused(Exception):
    """The content is not acceptable; the text is the reason in one sentence."""


def parse(content: bytes, record_id: str) -> dict[str, Any]:
    """Return the document of a fault record; ``record_id`` is what the file's name promises.

    Raises:
        Refused: it is not strict JSON, not of the schema, or contradicts itself or its name.
    """
    document: dict[str, Any] = _strict_json(content)
    check(document)
    if document["id"] != record_id:
        raise Refused(f"its name says {record_id}, but inside it says {document['id']}")
    return document


def check(document: dict[str, Any]) -> None:
    """Check what JSON has read as a fault record.

    Raises:
        Refused: it is not of the schema, or contradicts itself.
    """
    _validate(_validators()[0], document)
    _check_time(document["time"])
    verdict = worst([finding["severity"] for finding in document["findings"]])
    if document["verdict"] != verdict:
        raise Refused(f"its verdict is {document['verdict']}, but its findings say {verdict}")


def parse_heartbeat(content: bytes, node: str) -> dict[str, Any]:
    """Return the document of a node's heartbeat.

    Raises:
        Refused: it is not strict JSON, not of the schema, or another node's.
    """
    document: dict[str, Any] = _strict_json(content)
    _validate(_validators()[1], document)
    if document["node"] != node:
        raise Refused(f"its name says {node}, but inside it says {document['node']}")
    _check_time(document["time"])
    return document


@cache
def schema() -> dict[str, Any]:
    """Return the JSON schema of ``fault-record/v1``."""
    file = resources.files("slurm_hooks") / "schemas" / "fault-record-v1.json"
    document: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return document


@cache
def _validators() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Validators of records and of heartbeats, compiled once: half a record's time otherwise."""
    record = schema()
    named = {name: record["properties"][name] for name in _HEARTBEAT_PROPERTIES}
    heartbeat = {
        **record,
        "required": ["schema", "node", "boot_id", "time", "verdict"],
        "properties": {"schema": {"const": "heartbeat/v1"}, **named, "gpus": _GPUS},
    }
    return compile_schema(record), compile_schema(heartbeat)


def compile_schema(document: dict[str, Any]) -> Callable[[Any], Any]:
    """Return a function that raises fastjsonschema's JsonSchemaValueException on what is wrong."""
    # Its $id is a name; fastjsonschema would take it for an address that references start from.
    unnamed = {key: value for key, value in document.items() if key != "$id"}
    validator: Callable[[Any], Any] = fastjsonschema.compile(unnamed, use_default=False)
    return validator


def _validate(validator: Callable[[Any], Any], document: Any) -> None:
    try:
        validator(document)
    except fastjsonschema.JsonSchemaValueException as error:
        raise Refused(f"it does not follow the schema: {error.message[:_REASON_LIMIT]}") from error


def _strict_json(content: bytes) -> Any:
    if not content:
        raise Refused("it is empty")
    try:
        text = content.decode("utf-8")
        document = json.loads(
            text,
            parse_constant=_no_number,
            parse_float=_number,
            object_pairs_hook=_no_key_twice,
        )
    except RecursionError as error:
        raise Refused("it is nested too deeply") from error
    except ValueError as error:
        raise Refused(f"it is not JSON: {str(error)[:_REASON_LIMIT]}") from error
    # Half a surrogate pair can be written as an escape, and is then in nobody's UTF-8.
    if "\\u" in text and not _encodable(document):
        raise Refused("it holds half of a surrogate pair")
    return document


def _check_time(text: str) -> None:
    try:
        datetime.fromisoformat(text[:-1])  # the schema has seen to its form
    except ValueError as error:
        raise Refused(f"{text} is no time") from error


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _number(text: str) -> float | int:
    """``12.0`` is an integer to JSON schema, but ``12.0`` is no job to scontrol."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _encodable(document: Any) -> bool:
    try:
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
