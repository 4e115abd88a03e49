"""A request for a deep check: one file in the spool, ``requests/<node>``, of somebody who may ask.

Owns its form, and that nothing else is believed: no link, FIFO or folder, nothing that somebody
untrusted owns or could have written, nothing larger than a page. Who asks is the controller's
(``recovery.checking``), who answers the node's (``deep_check``). May block for ever on a dead file
system: called in children.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_hooks import spool
from slurm_hooks.record import seconds_of

SCHEMA = "check-request/v1"

FOLDER = "requests"

KINDS = ("asked", "reason", "reboot")
"""Why a node is checked: by command, by the reason it was drained with, after a reboot."""

TEXT_LIMIT = 200
"""Characters of who asked and why."""

_LIMIT_BYTES = 4096
_ID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")


class Unusable(Exception):
    """What lies there is no request that may be believed; the text says why."""


@dataclass(frozen=True)
class Request:
    """One request. ``id`` is a ULID, ``time`` as ``record.utc`` writes it, ``by`` who asked."""

    id: str
    node: str
    kind: str
    time: str
    by: str = ""
    why: str = ""


def write(path: Path, request: Request) -> None:
    """Put a request into the spool ``path``; a node has at most one, the newest.

    Raises:
        SpoolError: it could not be written.
    """
    content = json.dumps({"schema": SCHEMA, **asdict(request)}).encode() + b"\n"
    spool.write(path / FOLDER, request.node, content)


def read(path: Path, node: str, trusted: Collection[int]) -> Request | None:
    """Return what stands for ``node`` in the spool ``path``, None where nothing does.

    ``trusted`` are the uids that may ask.

    Raises:
        Unusable: something stands there that is no request of somebody who may ask.
    """
    nofollow = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = -1
    try:
        folder = os.open(path / FOLDER, nofollow | os.O_DIRECTORY)
        _insist(os.fstat(folder), trusted, f"{path / FOLDER}")
        descriptor = os.open(node, nofollow | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unusable(f"{path / FOLDER / node}: {error.strerror}") from error
    finally:
        if folder >= 0:
            os.close(folder)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Unusable(f"{path / FOLDER / node} is not a regular file")
        _insist(found, trusted, f"{path / FOLDER / node}")
        content = os.read(descriptor, _LIMIT_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > _LIMIT_BYTES:
        raise Unusable(f"{path / FOLDER / node} is larger than {_LIMIT_BYTES} bytes")
    return _understood(content, node)


def _insist(found: os.stat_result, trusted: Collection[int], name: str) -> None:
    if found.st_uid not in trusted:
        raise Unusable(f"{name} belongs to uid {found.st_uid}, whom nobody has trusted to ask")
    if found.st_mode & 0o022:
        raise Unusable(f"{name} can be written by others than its owner")


def _understood(content: bytes, node: str) -> Request:
    try:
        document = json.loads(content)
        if document.pop("schema") != SCHEMA:
            raise Unusable(f"not of the form {SCHEMA}")
        request = Request(**document)
        if not all(isinstance(value, str) for value in asdict(request).values()):
            raise Unusable("a field is not a text")
        seconds_of(request.time)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unusable(f"not of the form {SCHEMA}: {type(error).__name__}") from error
    if request.node != node or request.kind not in KINDS or not _ID.fullmatch(request.id):
        raise Unusable(f"not a request for {node}")
    texts = (request.by, request.why)
    if any(len(text) > TEXT_LIMIT or not text.isprintable() for text in texts):
        raise Unusable("who asked, or why, is not a short text")
    return request
