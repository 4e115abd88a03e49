"""The storage probe: are the configured mounts there, do they answer, do they take a write?

Each mount is looked at in a child of its own, so that one dead server is named while the others
answer, and so that whoever hangs in D state is abandoned alone. What the kernel says of disks and
servers is ``kernel_log``'s to tell.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_hooks import catalog
from slurm_hooks.deadline import ChildOutcome, run_all
from slurm_hooks.frozen import frozen
from slurm_hooks.probe_config import StorageProbe
from slurm_hooks.probes import Look, Probe, Seen, Skipped
from slurm_hooks.record import Evidence, Finding

_SOURCE = "storage"

_WRITTEN = b"slurm-recovery looks whether this file system takes a write; safe to delete\n"

_LEFTOVERS_LIMIT = 16
"""Most names remembered of files that a look at one mount, cut short, may have left there."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM}

_RESERVE_SECONDS = 0.5
"""What of the deadline is kept for asking where a child hangs, and for the answer."""


@frozen
class Mount:
    """One line of /proc/self/mountinfo (proc(5)); ``options`` are the mount's and its system's."""

    point: str
    kind: str
    options: frozenset[str]


def look(given: Look) -> Seen:
    """Look at every configured mount.

    The state remembers the names of probe files that a hang may have left behind, to be removed
    once the mount answers.

    Raises:
        Skipped: no mount is configured.
    """
    settings = given.config.probes.storage
    paths = tuple(dict.fromkeys((*settings.mounts, *settings.read_only)))
    if not paths:
        raise Skipped("no mounts are configured (probes.storage.mounts)")
    left = _leftovers(given.state)
    names = {path: f".slurm-recovery-{given.context.node}-{os.urandom(8).hex()}" for path in paths}
    tasks = {
        path: functools.partial(_visit, path, names[path], left.get(path, ()), settings)
        for path in paths
    }
    budget = getattr(given.config.hooks.budget, given.context.hook, settings.deadline)
    outcomes = run_all(tasks, _seconds_for_a_mount(settings.deadline, budget))
    findings: list[Finding] = []
    unfinished: dict[str, list[str]] = {}
    for path, outcome in outcomes.items():
        findings += _findings(path, outcome)
        if outcome.status != "ok" and path in settings.mounts:
            unfinished[path] = [*left.get(path, ()), names[path]][-_LEFTOVERS_LIMIT:]
    seconds = {path: f"{outcome.seconds:.3f} s" for path, outcome in outcomes.items()}
    state = {"left": unfinished} if unfinished or left else None
    return Seen(tuple(findings), state, seconds)


def read_mounts(mountinfo: str) -> Mapping[str, Mount]:
    """Return the mounts by mount point; of several on one point the last, which is what is seen."""
    mounts = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        places, kinds = before.split(" "), after.split(" ")
        if len(places) < 6 or len(kinds) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), places[4])
        options = frozenset((*places[5].split(","), *kinds[2].split(",")))
        mounts[point] = Mount(point, kinds[0], options)
    return mounts


def _seconds_for_a_mount(deadline: float, budget: float) -> float:
    """What the probe has, of the hook's budget a half at most, less the time to tell of it."""
    limit = min(deadline, budget / 2)
    return max(limit / 2, limit - _RESERVE_SECONDS)


def _leftovers(state: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    left = state.get("left")
    if not isinstance(left, dict):
        return {}
    return {
        path: tuple(
            name for name in names if re.fullmatch(r"\.slurm-recovery-[^/]{1,280}", str(name))
        )
        for path, names in left.items()
        if isinstance(names, list)
    }


def _findings(path: str, outcome: ChildOutcome) -> Iterable[Finding]:
    if outcome.status == "hang":
        return [_finding("storage.hang", path, outcome.detail or "no answer")]
    if outcome.status != "ok":
        return [_finding("storage.error", path, f"the look ended badly: {outcome.detail}")]
    return [_finding(code, path, why) for code, why in json.loads(outcome.output)]


def _finding(code: str, path: str, why: str) -> Finding:
    evidence = (Evidence(_SOURCE, f"{path}: {why}"),)
    return catalog.finding(code, evidence=evidence, details={"why": why[:300]}, file=path)


def _visit(path: str, name: str, left: Sequence[str], settings: StorageProbe) -> bytes:
    """Run in the mount's own child: return its findings, as JSON pairs of code and reason."""
    found: list[tuple[str, str]] = []
    written = path in settings.mounts
    try:
        _say("statvfs")
        status = os.statvfs(path)  # also makes an automounter mount it
        _say("mounts")
        mount = _mount_of(path)
        if mount is None:
            found.append(("storage.not_mounted", "nothing is mounted there"))
            return json.dumps(found).encode()
        found += _space(status, settings.full_percent)
        if written and ("ro" in mount.options or status.f_flag & os.ST_RDONLY):
            found.append(("storage.read_only", f"{mount.kind} is mounted read-only"))
        elif written:
            _write(Path(path), name, left)
    except OSError as error:
        found = [entry for entry in found if entry[0] != "storage.almost_full"]
        found.append(_failure(error))
    return json.dumps(found).encode()


def _say(step: str) -> None:
    """Name this process for the step it is at: the name is shown with a process that hangs."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(f"storage:{step}", encoding="ascii")


def _mount_of(path: str) -> Mount | None:
    """The mount whose point is ``path``, or the folder it is a link to; None if there is none."""
    text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    mounts = read_mounts(text)
    mount = mounts.get(path) or mounts.get(os.path.realpath(path))
    # What an automounter could not mount still shows the automounter itself.
    return None if mount is None or mount.kind == "autofs" else mount


def _space(status: os.statvfs_result, full_percent: float) -> Iterable[tuple[str, str]]:
    """What is left for users, as df(1) counts it; zero of zero is a system that does not count."""
    amounts = (
        ("space", status.f_blocks, status.f_bfree, status.f_bavail),
        ("inodes", status.f_files, status.f_ffree, status.f_favail),
    )
    for what, total, free, available in amounts:
        if total == 0 or free > total:
            continue
        used = total - free
        percent = 100.0 * used / max(1, used + available)
        if available == 0:
            yield "storage.full", f"no {what} left"
        elif percent >= full_percent:
            yield "storage.almost_full", f"{percent:.1f}% of its {what} are used"


def _write(folder: Path, name: str, left: Sequence[str]) -> None:
    """Write a small file through to the storage and remove it, and what earlier looks left.

    Raises:
        OSError: as the system calls do; ``_failure`` reads it.
    """
    _say("open")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder / name, flags, 0o600)
    try:
        try:
            _say("write")
            if os.write(descriptor, _WRITTEN) != len(_WRITTEN):
                raise OSError(errno.ENOSPC, "a write was cut short")
            _say("fsync")
            os.fsync(descriptor)
        finally:
            _say("close")
            os.close(descriptor)
    finally:
        _say("unlink")
        (folder / name).unlink()
        for earlier in left:
            with contextlib.suppress(FileNotFoundError):
                (folder / earlier).unlink()


def _failure(error: OSError) -> tuple[str, str]:
    code = errno.errorcode.get(error.errno or 0, "?")
    why = f"{error.strerror or error} ({code})"
    if error.errno in _FULL:
        return "storage.full", f"a write of {len(_WRITTEN)} bytes failed: {why}"
    if error.errno == errno.EROFS:
        return "storage.read_only", why
    if error.errno in _REFUSED:
        return "storage.refused", why
    if error.errno == errno.ENOENT:
        return "storage.not_mounted", why
    return "storage.error", why


PROBE = Probe(
    name="storage",
    look=look,
    needs="probes.storage.mounts; root, to write where users' folders are",
    cost="milliseconds, and a small file written and removed on each mount",
    codes=(
        "storage.almost_full",
        "storage.error",
        "storage.full",
        "storage.hang",
        "storage.not_mounted",
        "storage.read_only",
        "storage.refused",
    ),
)
