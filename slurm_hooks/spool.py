"""Drop a record into the spool: atomic, authentic, and kept on the node while the spool is away.

    >>> import tempfile, pathlib
    >>> spool = pathlib.Path(tempfile.mkdtemp())
    >>> create(spool)
    >>> drop(spool, "01K0000000000000000000000A", b"{}").name
    '01K0000000000000000000000A.json'

Owns the folders' names and modes, and the writer's side of them. What is read from the spool
belongs to the controller's inbox. Everything here may block for ever on a dead file system: hooks
call it in children (``deadline``).
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_hooks.frozen import frozen
from slurm_hooks.record import SEVERITIES

if TYPE_CHECKING:  # an import more delays every job
    from slurm_hooks.node_config import Spool

FOLDERS = {
    "incoming": 0o755,
    "heartbeat": 0o755,
    "archive": 0o755,
    "rejected": 0o755,
    "decisions": 0o755,
    # Reviewers write here themselves, each as the owner of their own file.
    "reviews": 0o1777,
    "requests": 0o755,
    "control": 0o755,
    "control/gate": 0o755,
    "claims": 0o755,
}

OF_NODES = ("incoming", "heartbeat", "claims", "control/gate")
"""The folders that nodes write into; all others are the aggregator's, and the reviewers'."""

MUNGE_COMMANDS = ("/usr/bin/munge", "/usr/local/bin/munge", "/opt/munge/bin/munge")
"""Where MUNGE's command is looked for: slurmd gives its hooks no PATH."""

_MUNGE_SECONDS = 3.0

_BUFFERED = re.compile(r"([0-7][0-9A-HJKMNP-TV-Z]{25})\.(ok|info|warning|fault|fatal)\.json")
_DROPPED = "dropped"
_READ_LIMIT_BYTES = 17 * 1024 * 1024


class SpoolError(Exception):
    """A folder that cannot take or give a record; its text says which, and why."""


def create(spool: Path) -> None:
    """Make the spool's folders with their modes; what exists already is left as it is."""
    spool.mkdir(mode=0o755, parents=True, exist_ok=True)
    for name, mode in FOLDERS.items():
        folder = spool / name
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(mode)  # mkdir's own mode is subject to the umask


def drop(spool: Path, record_id: str, content: bytes) -> Path:
    """Put a record into ``incoming`` and return its path; afterwards it is on disk, whole.

    Dropping the same record again replaces it by itself.

    Raises:
        SpoolError: it could not be written; nothing of it is left behind.
    """
    write(spool / "incoming", f"{record_id}.json", content)
    return spool / "incoming" / f"{record_id}.json"


def beat(spool: Path, node: str, content: bytes) -> None:
    """Replace the node's heartbeat.

    Raises:
        SpoolError: it could not be written.
    """
    write(spool / "heartbeat", f"{node}.json", content)


def write(
    folder: Path,
    name: str,
    content: bytes,
    *,
    durable: bool = True,
    mode: int = 0o644,
    uid: int | None = None,
) -> None:
    """Write ``folder/name`` under a hidden name beside it, and rename it: seen whole or not at all.

    The folder must be one, not a link to one: a spool that is not mounted must not be mistaken for
    an empty one, nor a planted link be followed. ``uid`` is whose the file becomes, if not ours.

    Raises:
        SpoolError: it could not be written; the hidden file is removed again.
    """
    with _opened(folder) as descriptor:
        hidden = f".{name}.{os.urandom(6).hex()}"
        try:
            try:
                _write_file(hidden, content, descriptor, durable, mode, uid)
                os.rename(hidden, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(hidden, dir_fd=descriptor)
                raise
            if durable:
                os.fsync(descriptor)
        except OSError as error:
            raise SpoolError(f"{folder}: cannot write {name}: {error.strerror}") from error


def seal(content: bytes, settings: Spool) -> bytes:
    """Return the record as it travels: itself for ``owner``, in a credential for ``munge``.

    Raises:
        SpoolError: MUNGE is not there, or made no credential in time.
    """
    if settings.authenticate != "munge":
        return content
    import subprocess

    command = next((path for path in MUNGE_COMMANDS if os.access(path, os.X_OK)), None)
    if command is None:
        raise SpoolError(f"no munge command at {', '.join(MUNGE_COMMANDS)}")
    where = [f"--socket={settings.munge_socket}"] if settings.munge_socket else []
    try:
        done = subprocess.run(
            [command, *where],
            input=content,
            capture_output=True,
            timeout=_MUNGE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SpoolError(f"{command}: {error}") from error
    if done.returncode != 0:
        raise SpoolError(f"{command}: {done.stderr.decode('utf-8', 'replace').strip()[:200]}")
    return done.stdout.strip()


@frozen
class Buffer:
    """Records that wait on the node's own disk: at most ``limit`` of them.

    A file's name is ``<id>.<verdict>.json``, so that age and gravity are known without reading.
    """

    folder: Path
    limit: int = 1000

    def keep(self, record_id: str, verdict: str, content: bytes) -> None:
        """Keep a record; where there is no room, the oldest of the mildest makes some.

        Raises:
            SpoolError: the local disk does not take it.
        """
        make_private(self.folder)
        waiting = self.waiting()
        surplus = len(waiting) + 1 - self.limit
        if surplus > 0:
            gravity = ("ok", *SEVERITIES)
            mildest = sorted(waiting, key=lambda name: (gravity.index(name.split(".")[1]), name))
            for name in mildest[:surplus]:
                self.forget(name)
            self._count_dropped(surplus)
        write(self.folder, f"{record_id}.{verdict}.json", content)

    def waiting(self) -> Sequence[str]:
        """Return the names of the records that wait, the oldest first."""
        try:
            names = os.listdir(self.folder)  # noqa: PTH208 - names are all that is wanted
        except OSError:
            return ()
        return sorted(name for name in names if _BUFFERED.fullmatch(name))

    def read(self, name: str) -> tuple[str, bytes]:
        """Return a waiting record's id and content.

        Raises:
            SpoolError: it is gone, or no regular file.
        """
        return name.split(".")[0], read_regular(self.folder / name)

    def forget(self, name: str) -> None:
        """Remove a record that has arrived, or that has to make room."""
        with contextlib.suppress(FileNotFoundError):
            (self.folder / name).unlink()

    def dropped(self) -> int:
        """Return how many records have been dropped for want of room and not yet reported."""
        try:
            return max(0, int(read_regular(self.folder / _DROPPED, 64)))
        except (SpoolError, ValueError):
            return 0

    def dropping_reported(self) -> None:
        """Start counting anew: a record that says how many were dropped is safe."""
        self.forget(_DROPPED)

    def _count_dropped(self, more: int) -> None:
        count = str(self.dropped() + more).encode()
        write(self.folder, _DROPPED, count, durable=False)


def make_private(folder: Path) -> None:
    """Make a local folder that only its owner may use.

    Raises:
        SpoolError: it cannot be made, or somebody else could write into it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise SpoolError(f"{folder}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise SpoolError(f"{folder} is not a folder")
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        raise SpoolError(f"{folder} can be written by others; chmod go-w it and make root own it")


def read_regular(path: Path, limit_bytes: int = _READ_LIMIT_BYTES) -> bytes:
    """Return the content of a regular file, following no link and waiting for no FIFO.

    Raises:
        SpoolError: it is missing, not a regular file, or larger than ``limit_bytes``.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as source:  # noqa: PTH123 - a descriptor, not a path
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SpoolError(f"{path} is not a regular file")
            content = source.read(limit_bytes + 1)
    except OSError as error:
        raise SpoolError(f"{path}: {error.strerror}") from error
    if len(content) > limit_bytes:
        raise SpoolError(f"{path} is larger than {limit_bytes} bytes")
    return content


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(folder, flags)
    except OSError as error:
        raise SpoolError(f"{folder}: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_file(
    name: str, content: bytes, folder: int, durable: bool, mode: int, uid: int | None
) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fchmod(descriptor, mode)
        if uid is not None and uid != os.geteuid():
            os.fchown(descriptor, uid, -1)
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
