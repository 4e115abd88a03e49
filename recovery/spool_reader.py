"""The controller's look into the spool: what waits in its folders, examined and moved.

Owns the files of ``incoming``, ``rejected`` and ``heartbeat`` on the controller's side. What is an
acceptable content says ``admission``, how archives are written ``archive``; when which step is
due and what the index then holds is ``inbox``'s.

Every step may hang for ever with the file system that the spool is on. That is why this also runs
as a program of its own (``python -m recovery.spool_reader``): a line with the settings, then a
line for each step on standard input, a line for each reply on standard output.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import json
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recovery import archive, rejected_files, review_files
from recovery.admission import Refused, check, parse, parse_heartbeat
from recovery.munge import MungeUnavailable, may_speak_for, unseal
from recovery.rejected_files import opened, shown
from slurm_hooks.config import Spool

READ_LIMIT_BYTES = 8 * 1024 * 1024
"""Most content read in one step; it is held in memory."""

HEARTBEATS_LIMIT = 2000
"""Most heartbeats read in one step."""

LIST_LIMIT = 200_000
"""Most names looked at in one step."""

ABANDONED_SECONDS = 86_400.0
"""A hidden file this old is what a writer left that died; then it is moved aside as well."""

RETRY_SECONDS = 60.0
"""A file that could neither be read nor moved aside is left alone for so long."""

_NAME = re.compile(r"([0-7][0-9A-HJKMNP-TV-Z]{25})\.json")
_HEARTBEAT_NAME = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]{0,249})\.json")

Reply = dict[str, Any]


class SpoolReader:
    """The spool's folders; each public step is one bounded look.

    Arguments and replies hold only what JSON can, so that they can cross a pipe. A step leaves
    out of its reply what it has nothing of.
    """

    def __init__(self, spool: Path, settings: Spool) -> None:
        self.spool = spool
        self.settings = settings
        self._trusted = {*settings.trusted_uids, os.geteuid()}
        self._read: dict[str, str] = {}
        self._left_alone: dict[str, float] = {}
        self._beats: dict[str, tuple[int, ...]] = {}

    def step(self, name: str, arguments: Sequence[Any]) -> Reply:
        """Run one step by its name.

        A spool that is away is a problem in the reply, with ``away`` set, and no error.
        """
        steps: dict[str, Callable[..., Reply]] = {
            "replay": self.replay,
            "read": self.read,
            "archive": self.archive,
            "remove": self.remove,
            "heartbeats": self.heartbeats,
            "reviews": self.reviews,
            "dismiss": self.dismiss,
        }
        try:
            with opened(self.spool) as spool:
                return steps[name](spool, *arguments)
        except OSError as error:
            where = self.spool / str(error.filename or "")
            problem = (
                f"{where}: {error.strerror}; is the spool mounted, and made (docs/install.md)?"
            )
            return {"problems": [problem], "away": True}

    def replay(self, spool: int, covered: Mapping[str, int], oldest: str, limit: int) -> Reply:
        """Archived records that the index does not cover."""
        tail = archive.beyond(spool, covered, oldest, limit, self._trusted)
        records = []
        for received, document in tail.records:
            try:
                check(document)
                records.append((received, _one_line(document)))
            except Refused as error:
                tail.problems.append(f"an archived record is left out: {error}")
        return {
            "records": records, "covered": tail.covered, "problems": tail.problems,
            "more": tail.more,
        }  # fmt: skip

    def read(self, spool: int, limit: int) -> Reply:
        """The oldest records in ``incoming``; what is unacceptable is moved aside."""
        rejected: list[tuple[str, str]] = []
        problems: list[str] = []
        self._read = {}
        with opened("incoming", spool) as incoming:
            unsafe = self._unsafe(spool, incoming)
            if unsafe:
                return {"problems": [unsafe]}
            entries, more = self._listed(incoming, limit)
            size = 0
            for name, regular in entries:
                try:
                    text = self._admit(name, regular, incoming)
                    self._read[name] = text
                    size += len(text)
                except FileNotFoundError:
                    continue
                except Refused as error:
                    try:
                        rejected_files.move(spool, "incoming", incoming, name, str(error))
                        rejected.append((shown(name), str(error)))
                    except OSError as failed:
                        self._left_alone[name] = time.monotonic() + RETRY_SECONDS
                        problems.append(
                            f"incoming/{shown(name)} cannot be moved to rejected:"
                            f" {failed.strerror} ({error})"
                        )
                except MungeUnavailable as error:
                    problems.append(f"records wait, since MUNGE does not answer: {error}")
                    break
                except OSError as error:
                    self._left_alone[name] = time.monotonic() + RETRY_SECONDS
                    problems.append(f"incoming/{shown(name)} cannot be read: {error.strerror}")
                if size > READ_LIMIT_BYTES:
                    more = True
                    break
        return {
            "found": list(self._read.items()), "rejected": rejected, "problems": problems,
            "more": more,
        }  # fmt: skip

    def archive(self, spool: int, names: Sequence[str], received: str) -> Reply:
        """Put records of the last ``read`` into the archive."""
        try:
            covered = archive.append(spool, received, [self._read[name] for name in names])
        except OSError as error:
            problem = f"records wait in incoming, the archive takes none: {error.strerror}"
            return {"problems": [problem]}
        return {"covered": covered}

    def remove(self, spool: int, names: Sequence[str]) -> Reply:
        """Take records that are in archive and index out of ``incoming``."""
        problems = []
        with opened("incoming", spool) as incoming:
            for name in names:
                try:
                    os.unlink(name, dir_fd=incoming)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self._left_alone[name] = time.monotonic() + RETRY_SECONDS
                    problems.append(f"incoming/{name} cannot be removed: {error.strerror}")
        return {"problems": problems}

    def heartbeats(self, spool: int) -> Reply:
        """The heartbeats that have changed since they were last read."""
        beats: dict[str, Any] = {}
        problems: list[str] = []
        with opened("heartbeat", spool) as folder:
            unsafe = self._unsafe(spool, folder, "heartbeat")
            if unsafe:
                return {"problems": [unsafe]}
            with os.scandir(folder) as entries:
                for entry in entries:
                    match = _HEARTBEAT_NAME.fullmatch(entry.name)
                    if not match or not entry.is_file(follow_symlinks=False):
                        continue
                    try:
                        seen = entry.stat(follow_symlinks=False)
                        version = (seen.st_mtime_ns, seen.st_ino, seen.st_size)
                        if self._beats.get(entry.name) == version:
                            continue
                        content = self._payload(entry.name, folder, match.group(1))
                        beats[match.group(1)] = parse_heartbeat(content, match.group(1))
                        self._beats[entry.name] = version
                        if len(beats) >= HEARTBEATS_LIMIT:
                            return {"heartbeats": beats, "problems": problems, "more": True}
                    except FileNotFoundError:
                        continue
                    except Refused as error:
                        self._beats[entry.name] = version
                        problems.append(f"heartbeat/{entry.name} is ignored: {error}")
                    except (OSError, MungeUnavailable) as error:
                        problems.append(f"heartbeat/{entry.name} cannot be read: {error}")
        return {"heartbeats": beats, "problems": problems}

    def reviews(self, spool: int, reviewers: Sequence[int]) -> Reply:
        """What reviewers have written; what is none of it is moved aside."""
        try:
            with opened("reviews", spool) as folder:
                found, refused, problems = review_files.look(folder, reviewers, self.settings)
        except FileNotFoundError:
            return {}  # a spool made before there were reviews
        problems += self.dismiss(spool, (), refused).get("problems", ())
        return {"reviews": found, "problems": problems}

    def dismiss(self, spool: int, done: Sequence[str], refused: Sequence[tuple[str, str]]) -> Reply:
        """Take reviews out of their folder: those ``done``, and those ``refused`` for a reason."""
        problems = []
        with opened("reviews", spool) as folder:
            review_files.remove(folder, done)
            for name, reason in refused:
                try:
                    rejected_files.move(spool, "reviews", folder, name, reason)
                except OSError as error:
                    problems.append(f"reviews/{shown(name)}: {reason} ({error.strerror})")
        return {"problems": problems}

    def _listed(self, incoming: int, limit: int) -> tuple[list[tuple[str, bool]], bool]:
        """The first ``limit`` names and whether each is a regular file; whether there are more."""
        now = time.monotonic()
        self._left_alone = {n: until for n, until in self._left_alone.items() if until > now}

        def waiting() -> Iterator[tuple[str, bool]]:
            with os.scandir(incoming) as entries:
                for looked_at, entry in enumerate(entries):
                    if looked_at >= LIST_LIMIT:
                        return
                    if entry.name in self._left_alone:
                        continue
                    if entry.name.startswith(".") and not _abandoned(entry):
                        continue
                    yield entry.name, entry.is_file(follow_symlinks=False)

        entries = heapq.nsmallest(limit + 1, waiting())
        return entries[:limit], len(entries) > limit

    def _admit(self, name: str, regular: bool, incoming: int) -> str:
        """Return a file's record as JSON on one line."""
        if name.startswith("."):
            raise Refused("whoever was writing it has died")
        if not regular:
            raise Refused("it is not a regular file")
        match = _NAME.fullmatch(name)
        if not match:
            raise Refused("its name is not <record id>.json")
        content = self._payload(name, incoming, None)
        return _one_line(parse(content, match.group(1)))

    def _payload(self, name: str, folder: int, node: str | None) -> bytes:
        """Read a file as its writer's authentic word."""
        munge = self.settings.authenticate == "munge"
        limit = self.settings.max_record_bytes
        # munged opens no longer text than 1 MiB: handed one, it would seem to be away.
        content, uid, mode = _read_file(name, folder, 4 * limit // 3 + 4096 if munge else limit)
        if not munge:
            if uid not in self.settings.trusted_uids:
                raise Refused(f"it belongs to uid {uid}, which is not among trusted_uids")
            if mode & 0o022:
                raise Refused(f"others could have written it (mode {stat.S_IMODE(mode):04o})")
            return content
        credential = unseal(content, self.settings.munge_socket)
        if len(credential.payload) > limit:
            raise Refused(f"{len(credential.payload)} bytes are sealed in it, {limit} is the limit")
        if credential.uid not in self.settings.trusted_uids:
            raise Refused(f"uid {credential.uid} sealed it, which is not among trusted_uids")
        speaker = node or _node_in(credential.payload)
        if not may_speak_for(credential.host, speaker):
            raise Refused(f"it was sealed on {credential.host}, but speaks for {speaker}")
        return credential.payload

    def _unsafe(self, spool: int, folder: int, name: str = "incoming") -> str:
        """Why nothing in this folder can be believed, or the empty text."""
        if self.settings.authenticate == "munge":
            return ""
        for path, descriptor, sticky_will_do in ((".", spool, True), (name, folder, False)):
            found = os.fstat(descriptor)
            writable = found.st_mode & 0o022
            if sticky_will_do and found.st_mode & stat.S_ISVTX:
                writable = 0
            if writable or found.st_uid not in self._trusted:
                where = self.spool / path
                return (
                    f"{where} can be written by others, so nothing in it is believed; chmod go-w"
                    " it and make a trusted uid own it, or set authenticate = 'munge'"
                )
        return ""


def _read_file(name: str, folder: int, limit: int) -> tuple[bytes, int, int]:
    """Return a regular file's content, owner and mode; no link is followed, no FIFO waited for."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise Refused("it is not a regular file") from error
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Refused("it is not a regular file")
        parts, missing = [], limit + 1
        while missing > 0 and (part := os.read(descriptor, missing)):
            parts.append(part)
            missing -= len(part)
        if missing <= 0:
            raise Refused(f"it has {found.st_size} bytes, and {limit} is the limit")
        return b"".join(parts), found.st_uid, found.st_mode
    finally:
        os.close(descriptor)


def _one_line(document: dict[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def _node_in(payload: bytes) -> str:
    try:
        document = json.loads(payload)
        return str(document["node"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused("what is sealed in it is no record") from error


def _abandoned(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        return time.time() - entry.stat(follow_symlinks=False).st_mtime > ABANDONED_SECONDS
    return False


def main() -> int:
    """Serve steps to the process at the other end of standard input, until it goes away."""
    settings = json.loads(sys.stdin.readline())
    reader = SpoolReader(Path(settings.pop("path")), Spool(**settings))
    for line in sys.stdin:
        name, arguments = json.loads(line)
        sys.stdout.write(json.dumps(reader.step(name, arguments)) + "\n")
        sys.stdout.flush()
    return 0


def settings_line(spool: Path, settings: Spool) -> str:
    """Return the first line that ``main`` wants."""
    document = {**asdict(settings), "path": str(spool)}
    return json.dumps(document) + "\n"


if __name__ == "__main__":
    sys.exit(main())
