"""Whether this node would work: what is configured, what each part can do here, and what mends it.

Owns the questions. Every answer that touches a file system is fetched in a child under a deadline,
so that a node with a hung mount can be examined too.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from slurm_hooks import config_file, gate, probes, site_probes
from slurm_hooks.bounds import node_name
from slurm_hooks.config import Config, load_what_can_be_read
from slurm_hooks.context import HookContext
from slurm_hooks.deadline import ChildOutcome, Children, run_one
from slurm_hooks.delivery import buffer_of
from slurm_hooks.looking import collect, start, states_of
from slurm_hooks.record import ProbeResult
from slurm_hooks.spool import MUNGE_COMMANDS, SpoolError, make_private, seal, write

NETWORK_FILE_SYSTEMS = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "afs", "ceph", "glusterfs"),
    *("lustre", "gpfs", "beegfs", "beegfs_nodev", "wekafs", "panfs", "pvfs2"),
    *("fuse.glusterfs", "fuse.ceph", "fuse.beegfs", "fuse.juicefs", "fuse.sshfs", "fuse.s3fs"),
)
"""Types of file systems, as mounts name them, that hang when something beyond this node does."""

_SECONDS = 3.0
_PROBE_SECONDS = 40.0


@dataclass(frozen=True)
class Check:
    """One answer. ``mend`` is the line that mends what is ``broken`` or unwise (``warning``)."""

    subject: str
    status: Literal["ok", "warning", "broken"]
    says: str
    mend: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)


def examine() -> tuple[Check, ...]:
    """Return all answers for this node."""
    path = config_file.path()
    config, first = _configuration(path)
    told = HookContext.from_environ("health_check", os.environ)
    told = replace(told, node=node_name(told.node))
    asked: list[tuple[str, Callable[[], Check]]] = [
        ("installation", _installation),
        ("buffer", lambda: _buffer(config, told.node)),
        ("spool", lambda: _spool(config, told.node)),
        ("gate", lambda: _gate(config)),
    ]
    if config.spool.authenticate == "munge":
        asked.append(("munge", lambda: _munge(config)))
    checks = [first]
    for subject, question in asked:
        checks.append(_answer(subject, question))
    return (*checks, *_probes(config, told))


def _answer(subject: str, question: Callable[[], Check]) -> Check:
    """Ask in a child; what does not answer would hang a hook's child as well."""
    import pickle

    outcome = run_one(lambda: pickle.dumps(question()), _SECONDS)
    if outcome.status == "ok":
        answer: Check = pickle.loads(outcome.output)
        return answer
    return Check(subject, "broken", _why(outcome), f"see what the {subject} lies on")


def _why(outcome: ChildOutcome) -> str:
    return f"{outcome.status}: {outcome.detail}"


def _configuration(path: Path) -> tuple[Config, Check]:
    outcome = run_one(lambda: config_file.read(path) if path.exists() else b"", _SECONDS)
    if outcome.status != "ok":
        return Config(), Check(
            "configuration", "broken", f"{path}: {_why(outcome)}", "keep it on the node's own disk"
        )
    config, error = load_what_can_be_read(outcome.output, path)
    if error:
        return config, Check("configuration", "broken", error, "correct that line")
    if not outcome.output:
        says = f"{path} is missing or empty: defaults hold, and nothing but watching is done"
        return config, Check("configuration", "warning", says, f"write {path}, or leave it so")
    kind = file_system(path)
    if kind in NETWORK_FILE_SYSTEMS:
        says = f"{path} lies on {kind}: when that hangs, hooks fall back to the defaults"
        return config, Check("configuration", "warning", says, "copy it to the node's own disk")
    found = path.stat()
    if found.st_uid not in {0, os.geteuid()} or found.st_mode & 0o022:
        says = f"{path} can be changed by others than root"
        return config, Check(
            "configuration", "broken", says, f"chown root {path}; chmod go-w {path}"
        )
    return config, Check("configuration", "ok", f"{path}: mode {config.mode}")


def _installation() -> Check:
    places = {
        "Python": Path(sys.executable).resolve(),
        "slurm_hooks": Path(__file__).resolve(),
        "the environment": Path(sys.prefix),
    }
    for name, place in places.items():
        kind = file_system(place)
        if kind in NETWORK_FILE_SYSTEMS:
            says = f"{name} lies on {kind} ({place}): hooks hang with it before their first line"
            return Check(
                "installation", "broken", says, "install slurm-recovery on the node's own disk"
            )
    return Check("installation", "ok", f"{sys.executable} on the node's own disk")


def _buffer(config: Config, node: str) -> Check:
    buffer = buffer_of(config.spool, node)
    mend = f"install -d -o root -m 0700 {buffer.folder}"
    try:
        make_private(buffer.folder)
        make_private(states_of(config.spool, node))
        write(buffer.folder, ".doctor", b"")
        (buffer.folder / ".doctor").unlink()
    except SpoolError as error:
        return Check("buffer", "broken", str(error), mend)
    kind = file_system(buffer.folder)
    if kind in NETWORK_FILE_SYSTEMS:
        says = f"{buffer.folder} lies on {kind}, and would be away with it"
        return Check("buffer", "broken", says, "name a local folder: spool.buffer")
    waiting = len(buffer.waiting())
    says = f"{buffer.folder}: {waiting} of {buffer.limit} records wait"
    return Check("buffer", "warning" if waiting else "ok", says)


def _spool(config: Config, node: str) -> Check:
    spool = config.spool
    incoming = spool.path / "incoming"
    try:
        found = incoming.lstat()
    except OSError as error:
        says = f"{incoming}: {error.strerror}; records wait in the buffer"
        return Check(
            "spool", "broken", says, "mount the spool, or once on the controller: recovery init"
        )
    if not stat.S_ISDIR(found.st_mode):
        return Check("spool", "broken", f"{incoming} is not a folder", "recovery init")
    if spool.authenticate == "owner":
        if found.st_uid not in spool.trusted_uids:
            says = f"{incoming} belongs to uid {found.st_uid}, who is not trusted"
            return Check("spool", "broken", says, f"chown root {incoming}, or spool.trusted_uids")
        if found.st_mode & 0o022:
            says = f"others could write records into {incoming}"
            return Check("spool", "broken", says, f"chmod go-w {incoming}, or use munge")
    try:
        write(incoming, f".doctor.{node}", b"")
        (incoming / f".doctor.{node}").unlink()
    except (SpoolError, OSError) as error:
        return Check("spool", "broken", str(error), "export it writable for root of the nodes")
    return Check("spool", "ok", f"{spool.path}: writable, {spool.authenticate} authentication")


def _munge(config: Config) -> Check:
    try:
        seal(b"doctor", config.spool)
    except SpoolError as error:
        if not any(os.access(command, os.X_OK) for command in MUNGE_COMMANDS):
            return Check("munge", "broken", str(error), "install munge")
        socket = config.spool.munge_socket or "its default socket"
        mend = f"start munged (asked: {socket}), or name its socket: spool.munge_socket"
        return Check("munge", "broken", str(error), mend)
    return Check("munge", "ok", "makes credentials")


def _gate(config: Config) -> Check:
    try:
        scontrol = gate.find_scontrol(config.hooks.scontrol)
    except gate.GateError as error:
        return Check("gate", "warning", str(error), 'hooks.scontrol = "/path/of/scontrol"')
    return Check("gate", "ok", f"{scontrol}; used only under a grant that includes gate")


def _probes(config: Config, told: HookContext) -> Sequence[Check]:
    names = (*probes.NAMES, site_probes.NAME)
    states = states_of(config.spool, told.node)
    with Children() as children:
        start(children, names, told, config, states, _PROBE_SECONDS, remember=False)
        seen = collect(names, children.wait())
    return [_probe(result, config) for result in seen.results]


def _probe(result: ProbeResult, config: Config) -> Check:
    subject = f"probe {result.name}"
    section = getattr(config.probes, result.name.partition(".")[0])
    hooks = ", ".join(section.hooks) or "no hook"
    if result.status == "skipped":
        return Check(subject, "warning", f"cannot look here: {result.detail}")
    if result.status in ("hang", "crash", "error"):
        mend = f"slurm-hooks probe {result.name.partition('.')[0]}"
        return Check(subject, "broken", f"{result.status}: {result.detail}", mend)
    return Check(subject, "ok", f"{result.seconds * 1000:.0f} ms, in {hooks}")


def file_system(path: Path) -> str:
    """Return the type of the file system that holds ``path`` (proc(5), mountinfo); "" if unknown.

    Asks nothing of the file system itself.
    """
    wanted = os.path.realpath(path) if path.is_absolute() else str(path)
    best, kind = "", ""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        inside = wanted == point or wanted.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind
