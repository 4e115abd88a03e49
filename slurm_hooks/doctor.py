"""Whether this node would work: what is configured, what each part can do here, and what mends it.

Owns the questions. Every answer that touches a file system is fetched in a child under a deadline,
so that a node with a hung mount can be examined too.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_hooks import config_file, doctor_slurm, file_systems, gate, probes, site_probes
from slurm_hooks.bounds import node_name
from slurm_hooks.check import Check
from slurm_hooks.config import Config, load_what_can_be_read
from slurm_hooks.context import HookContext
from slurm_hooks.deadline import ChildOutcome, Children, run_one
from slurm_hooks.delivery import buffer_of
from slurm_hooks.looking import collect, start, states_of
from slurm_hooks.record import ProbeResult
from slurm_hooks.spool import MUNGE_COMMANDS, OF_NODES, SpoolError, make_private, seal, write

_SECONDS = 3.0
_PROBE_SECONDS = 40.0
_NOTES_CHARACTERS = 200

_EVERYWHERE = ("kernel_log",)
"""Probes of which every node has what they look at."""


def examine() -> tuple[Check, ...]:
    """Return all answers for this node."""
    path = config_file.path()
    config, first = _configuration(path)
    told = HookContext.from_environ("health_check", os.environ)
    told = replace(told, node=node_name(told.node))
    asked: list[tuple[str, Callable[[], Check]]] = [
        ("user", _user),
        ("installation", _installation),
        ("buffer", lambda: _buffer(config, told.node)),
        ("spool", lambda: _spool(config, told.node)),
        ("gate", lambda: _gate(config)),
    ]
    if config.spool.authenticate == "munge":
        asked.append(("munge", lambda: _munge(config)))
    asked += doctor_slurm.questions(config)
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
    kind = file_systems.of(path)
    if file_systems.is_remote(kind):
        says = f"{path} lies on {kind}: when that hangs, hooks fall back to the defaults"
        return config, Check("configuration", "warning", says, "copy it to the node's own disk")
    found = path.stat()
    if found.st_uid not in {0, os.geteuid()} or found.st_mode & 0o022:
        says = f"{path} can be changed by others than root"
        return config, Check(
            "configuration", "broken", says, f"chown root {path}; chmod go-w {path}"
        )
    return config, Check("configuration", "ok", f"{path}: mode {config.mode}")


def _user() -> Check:
    if os.geteuid() == 0:
        return Check("user", "ok", "root, as whom slurmd runs hooks")
    says = f"uid {os.geteuid()}: what follows is what this user can do, and slurmd is root"
    return Check("user", "warning", says, "sudo slurm-hooks doctor")


def _installation() -> Check:
    """Look where everything lies that a hook loads before it can watch over its own time."""
    places = [
        ("Python", Path(sys.executable)),
        ("Python's library", Path(os.__file__)),
        ("the environment", Path(sys.prefix)),
        ("slurm_hooks", Path(__file__)),
        *(("a folder on Python's path", Path(folder)) for folder in sys.path if folder),
    ]
    for name, place in places:
        kind = file_systems.of(place)
        if file_systems.is_remote(kind):
            says = f"{name} lies on {kind} ({place}): hooks hang with it before their first line"
            mend = "install slurm-recovery, and Python, on the node's own disk"
            return Check("installation", "broken", says, mend)
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
    kind = file_systems.of(buffer.folder)
    if file_systems.is_remote(kind):
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
            "spool", "broken", says, "mount the spool, or make it: docs/install.md, step 2"
        )
    if not stat.S_ISDIR(found.st_mode):
        return Check(
            "spool",
            "broken",
            f"{incoming} is not a folder",
            "make the spool: docs/install.md, step 2",
        )
    if spool.authenticate == "owner":
        if found.st_uid not in spool.trusted_uids:
            says = f"{incoming} belongs to uid {found.st_uid}, who is not trusted"
            return Check("spool", "broken", says, f"chown root {incoming}, or spool.trusted_uids")
        if found.st_mode & 0o022:
            says = f"others could write records into {incoming}"
            return Check("spool", "broken", says, f"chmod go-w {incoming}, or use munge")
    try:
        for name in OF_NODES:
            write(spool.path / name, f".doctor.{node}", b"")
            (spool.path / name / f".doctor.{node}").unlink()
    except (SpoolError, OSError) as error:
        mend = "recovery init on the controller, if it lacks a folder; else export it writable for"
        mend += " root of the nodes (with root_squash: docs/install.md)"
        return Check("spool", "broken", str(error), mend)
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
    trusted = {0, os.geteuid(), *config.spool.trusted_uids}
    why, slots = "no grant in force includes gate", 0
    try:
        leave = gate.permission(config.spool.path / "control", trusted)
        if any("gate" in grant.get("actions", ()) for grant in leave["grants"]):
            slots = leave["gate_slots"]
    except gate.NotAllowed as error:
        why = str(error)
    try:
        scontrol = gate.find_scontrol(config.hooks.scontrol)
    except gate.GateError as error:
        mend = 'hooks.scontrol = "/path/of/scontrol"'
        return Check("gate", "broken" if slots else "warning", str(error), mend)
    if not slots:
        return Check("gate", "ok", f"never closes: {why}")
    says = f"closes for fatal findings, at most {slots} nodes at once, by {scontrol}"
    return Check("gate", "ok", says)


def _probes(config: Config, told: HookContext) -> Sequence[Check]:
    names = (*probes.NAMES, site_probes.NAME)
    states = states_of(config.spool, told.node)
    with Children() as children:
        start(children, names, told, config, states, _PROBE_SECONDS, remember=False)
        seen = collect(names, children.wait())
    return [_probe(result, config, seen.notes.get(result.name, {})) for result in seen.results]


def _probe(result: ProbeResult, config: Config, notes: Mapping[str, Any]) -> Check:
    """Say what a probe can do here, or why it cannot, and what it would need."""
    subject = f"probe {result.name}"
    name = result.name.partition(".")[0]
    section = getattr(config.probes, name)
    hooks = ", ".join(section.hooks)
    if result.status in ("hang", "crash", "error"):
        says = f"{result.status}: {result.detail}"
        return Check(
            subject, "broken" if hooks else "warning", says, f"see: slurm-hooks probe {name}"
        )
    if result.status == "skipped":
        return _skipped(subject, name, section, str(result.detail))
    can = "; ".join(f"{key}: {value}" for key, value in notes.items())[:_NOTES_CHARACTERS]
    says = f"{result.seconds * 1000:.0f} ms, in {hooks or 'no hook'}{can and '; '}{can}"
    if result.status == "findings":
        return Check(
            subject, "warning", f"finds something now; {says}", f"slurm-hooks probe {name}"
        )
    return Check(subject, "ok", says)


def _skipped(subject: str, name: str, section: Any, why: str) -> Check:
    if not section.hooks:
        return Check(subject, "ok", f"off, in no hook; would not look here: {why}")
    needs = probes.load(name).needs
    if "health_check" not in section.hooks or why.startswith("no job"):
        return Check(subject, "ok", f"in {', '.join(section.hooks)}, of a job; needs {needs}")
    says = f"cannot look here: {why}; needs {needs}"
    off = f"or, where that is right: probes.{name}.hooks = []"
    # Everywhere, and where an admin has set something for it, it is meant to look.
    if name in _EVERYWHERE or section != type(section)() or why.endswith("not installed"):
        return Check(subject, "broken", says, f"provide what it needs, {off}")
    return Check(subject, "ok", says)
