"""The files of the spool's ``reviews``, a folder into which everybody may write.

Owns which of them are looked at. A file of somebody who is no reviewer, a link, a FIFO, a folder is
left where it is and never opened; a reviewer's file that does not read is moved aside with the
reason. Runs in the spool's child (``spool_reader``).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from recovery.munge import MungeUnavailable, unseal
from recovery.review import SIZE_LIMIT_BYTES, ReviewRefused, parse
from slurm_hooks.config import Spool
from slurm_hooks.record import utc

LIST_LIMIT = 100_000
"""Most names looked at: whoever fills the folder with more delays reviews, and nothing else."""

REVIEWS_LIMIT = 200
"""Most reviews of one look."""

_SEALED_LIMIT_BYTES = 4 * SIZE_LIMIT_BYTES


def look(
    folder: int, reviewers: Collection[int], settings: Spool
) -> tuple[list[dict[str, Any]], list[tuple[str, str]], list[str]]:
    """Return the reviews in ``folder`` (a descriptor), files refused with their reason, problems.

    A review is a dict of ``name``, ``uid``, ``time`` and what ``review.Written`` has.
    """
    found: list[dict[str, Any]] = []
    refused: list[tuple[str, str]] = []
    problems: list[str] = []
    for name in _names(folder, reviewers):
        try:
            content, uid, seconds = _read(name, folder, reviewers)
            if settings.authenticate == "munge":
                credential = unseal(content, settings.munge_socket)
                content, uid = credential.payload, credential.uid
                if uid not in reviewers:
                    raise ReviewRefused(f"uid {uid} sealed it, which is no reviewer's")
            written = asdict(parse(content))
            found.append({"name": name, "uid": uid, "time": utc(seconds), **written})
        except ReviewRefused as error:
            refused.append((name, str(error)))
        except FileNotFoundError:
            continue
        except MungeUnavailable as error:
            problems.append(f"reviews wait, since MUNGE does not answer: {error}")
            break
        except OSError as error:
            problems.append(f"reviews/{name!a} cannot be read: {error.strerror}")
    return found, refused, problems


def remove(folder: int, names: Sequence[str]) -> None:
    """Take reviews that are in the journal out of the folder.

    Where that is not permitted they stay, and are known by their ids.
    """
    for name in names:
        try:
            os.unlink(name, dir_fd=folder)
        except (FileNotFoundError, PermissionError):
            continue


def _names(folder: int, reviewers: Collection[int]) -> list[str]:
    """Names of the reviewers' own plain files, oldest name first."""
    names = []
    with os.scandir(folder) as entries:
        for looked_at, entry in enumerate(entries):
            if looked_at >= LIST_LIMIT:
                break
            if entry.name.startswith(".") or not entry.is_file(follow_symlinks=False):
                continue
            if entry.stat(follow_symlinks=False).st_uid in reviewers:
                names.append(entry.name)
    return sorted(names)[:REVIEWS_LIMIT]


def _read(name: str, folder: int, reviewers: Collection[int]) -> tuple[bytes, int, float]:
    """Return content, owner and time of a reviewer's plain file."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    descriptor = os.open(name, flags, dir_fd=folder)
    try:
        seen = os.fstat(descriptor)
        if not stat.S_ISREG(seen.st_mode) or seen.st_uid not in reviewers:
            raise FileNotFoundError(name)  # it was changed under our eyes
        if not name.endswith(".json") or not name.isprintable():
            raise ReviewRefused("its name is not <id>.json")
        if seen.st_mode & 0o022:
            mode = stat.S_IMODE(seen.st_mode)
            raise ReviewRefused(f"others could have written it (mode {mode:04o})")
        if seen.st_nlink != 1:
            raise ReviewRefused("it has a second name: somebody else may have put it here")
        content = os.read(descriptor, _SEALED_LIMIT_BYTES + 1)
        if len(content) > _SEALED_LIMIT_BYTES:
            raise ReviewRefused(f"it has {seen.st_size} bytes, {SIZE_LIMIT_BYTES} is the limit")
        return content, seen.st_uid, seen.st_mtime
    finally:
        os.close(descriptor)
