"""The files that a running job's processes write to, remembered for its epilog.

A program may log into a file that neither Slurm nor the job's owner named. A health check on the
batch host looks at what the job's processes hold open for writing, with the rights of its user, and
keeps the paths in a local folder that only root may use; the epilog reads those files too.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import stat
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from slurm_hooks import as_user, spool
from slurm_hooks.config import Spool
from slurm_hooks.running_jobs import RunningJob

FILES_LIMIT = 32
_PROCESSES_LIMIT = 512
_DESCRIPTORS_LIMIT = 1_024
_NOTES_LIMIT = 128
_NOTE_BYTES = 256 << 10
_PATH_CHARACTERS = 4_096
_NOTE_SECONDS = 30 * 86_400.0
"""A note that no epilog has taken is removed after this."""

_SAMPLE_BYTES = 4_096
_NOT_LOGS = ("/dev/", "/proc/", "/sys/", "/run/")


def folder(place: Spool, node: str) -> Path:
    """Return where the files of ``node``'s jobs are remembered."""
    return place.buffer_of(node) / "open-files"


def remember(job: RunningJob, pids: Sequence[int], where: Path, seconds: float) -> int:
    """Look at the processes ``pids`` of ``job``, and keep what they write to; return how many.

    What an earlier look of the same attempt found is kept too: a log that is opened, written and
    closed for each line is seen now and then. Nothing is changed where nothing new was found.

    Raises:
        SpoolError: the local disk does not take it.
    """
    outcome = as_user.look(job.uid, functools.partial(_written_to, pids), seconds)
    if outcome.status != "ok":
        return 0
    before = recall(where, job.id, job.restart)
    found = list(dict.fromkeys([*json.loads(outcome.output), *before]))[:FILES_LIMIT]
    if set(found) == set(before):
        return len(found)
    spool.make_private(where)
    note = json.dumps({"restart": job.restart, "files": found}).encode()
    spool.write(where, str(job.id), note, durable=False, mode=0o600)
    _forget_old(where)
    return len(found)


def recall(where: Path, job_id: int, restart: int) -> list[str]:
    """Return the files remembered of one attempt; a broken note counts for nothing."""
    with contextlib.suppress(spool.SpoolError, ValueError, RecursionError):
        note = json.loads(spool.read_regular(where / str(job_id), _NOTE_BYTES))
        if isinstance(note, dict) and note.get("restart") == restart:
            files = note.get("files")
            return [one for one in files if isinstance(one, str)] if isinstance(files, list) else []
    return []


def _forget_old(where: Path) -> None:
    notes = []
    for entry in where.iterdir():
        with contextlib.suppress(OSError):
            notes.append((entry.lstat().st_mtime, entry))
    notes.sort()
    now = time.time()
    for place, (changed, entry) in enumerate(notes):
        if now - changed > _NOTE_SECONDS or place < len(notes) - _NOTES_LIMIT:
            with contextlib.suppress(OSError):
                entry.unlink()


def _written_to(pids: Sequence[int]) -> bytes:
    """Run as the user: the regular text files that ``pids`` hold open for writing."""
    found: dict[str, None] = {}
    for pid in pids[:_PROCESSES_LIMIT]:
        for number in _numbers(pid):
            if len(found) >= FILES_LIMIT:
                break
            path = _log(Path(f"/proc/{pid}"), number)
            if path:
                found[path] = None
    return json.dumps(list(found)).encode()


def _numbers(pid: int) -> Iterable[str]:
    try:
        return os.listdir(f"/proc/{pid}/fd")[:_DESCRIPTORS_LIMIT]  # noqa: PTH208
    except OSError:
        return ()  # it ended, or is not the user's to look at


def _log(process: Path, number: str) -> str | None:
    """The path of one open file, if it is a regular one, open for writing, and looks like text."""
    descriptor = process / "fd" / number
    try:
        flags = int((process / "fdinfo" / number).read_text().split("flags:", 1)[1].split()[0], 8)
        status = descriptor.stat()
        if not flags & (os.O_WRONLY | os.O_RDWR) or not stat.S_ISREG(status.st_mode):
            return None
        path = str(descriptor.readlink())
        # In another mount namespace (a container) the same path may be another file.
        if len(path) > _PATH_CHARACTERS or not os.path.samestat(Path(path).stat(), status):
            return None
        if path.startswith(_NOT_LOGS) or b"\0" in as_user.read_start(path, _SAMPLE_BYTES):
            return None
    except (OSError, ValueError, IndexError):
        return None
    return path
