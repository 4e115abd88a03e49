"""The sha256 of a job's output files, read as the job's user and in pieces, however large they are.

Owns how they are read; what they are compared with is ``drill``'s.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from slurm_hooks import as_user

FILES_LIMIT = 1000
_PIECE_BYTES = 1 << 20


class DigestError(Exception):
    """Files could not be read; the text says which and why."""


def of(uid: int, path: Path, deadline_seconds: float, only: Collection[str] = ()) -> dict[str, str]:
    """Return the sha256 of the file ``path``, or of each regular file below the folder ``path``.

    The keys are names below the folder, and the file's own name for a file. Of a folder, where
    ``only`` some names matter, no others are read. All are read as the user ``uid``, in a child
    that is given up after ``deadline_seconds``. Links below a folder are not followed.

    Raises:
        DigestError: there is no such file, that user may not read it, it took too long, or a
            folder holds more than FILES_LIMIT files or none.
    """

    def look() -> bytes:
        return json.dumps({name: _sha256(file) for name, file in _files(path, only)}).encode()

    outcome = as_user.look(uid, look, deadline_seconds)
    if outcome.status != "ok":
        why = outcome.detail or outcome.status
        raise DigestError(f"{path} cannot be read as the job's user ({outcome.status}): {why}")
    found: dict[str, str] = json.loads(outcome.output)
    if not found and not only:
        raise DigestError(f"{path} holds no file")
    return found


def difference(wanted: dict[str, str], found: dict[str, str]) -> str:
    """Return what differs of the files that are ``wanted``, empty where all are as they should be.

    What else was found does not matter: a resumed run may have left more checkpoints behind.
    """
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        return f"{missing[0]} is missing{_more(len(missing))}"
    others = sorted(name for name in wanted if wanted[name] != found[name])
    if others:
        name = others[0]
        told = f"{found[name][:12]}… instead of {wanted[name][:12]}…"
        return f"{name} differs, sha256 {told}{_more(len(others))}"
    return ""


def _more(count: int) -> str:
    return f", and {count - 1} more" if count > 1 else ""


def _files(path: Path, only: Collection[str]) -> Iterable[tuple[str, Path]]:
    if not path.is_dir():
        yield path.name, path
        return
    number = 0
    for folder, _, names in os.walk(path, onerror=_refuse):
        for name in names:
            file = Path(folder) / name
            known = str(file.relative_to(path))
            if (only and known not in only) or file.is_symlink() or not file.is_file():
                continue
            number += 1
            if number > FILES_LIMIT:
                raise DigestError(f"more than {FILES_LIMIT} files; name a folder below it")
            yield known, file


def _refuse(error: OSError) -> None:
    raise error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with as_user.open_regular(path) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
