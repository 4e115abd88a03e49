"""Whether recovery would work on this cluster, as seen from its controller.

Owns the questions about what is the controller's own: configuration, state, spool, munge, what
each node last said. What slurmctld's settings answer is ``doctor_slurm``'s; what only a node can
know, ``slurm-hooks doctor`` says there. Whatever touches a file system is asked in a child under a
deadline, so that a cluster with a hung spool can be examined too.
"""

from __future__ import annotations

import os
import pickle
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from recovery import munge
from recovery.admission import Refused
from recovery.site import doctor_slurm
from recovery.site.slurm_settings import Settings, SlurmSilent, ask
from recovery.slurm.base import SchedulerError
from recovery.slurm.cli import CliScheduler
from recovery.slurm.hostlist import compress
from recovery.spool_reader import SpoolReader
from slurm_hooks import config_file, file_systems, spool
from slurm_hooks.check import Check
from slurm_hooks.config import Config, ConfigError, load
from slurm_hooks.deadline import run_one

_SECONDS = 10.0

SILENT_INTERVALS = 3
"""A node whose heartbeat is older than so many intervals of health checks is silent."""

CLOCK_SECONDS = 30.0
"""Clocks further apart make a record look older or newer than it is; MUNGE allows 300 s."""

LEAST_FREE_BYTES = 1 << 30

_NAMES_SHOWN = 200


def examine(environment: Mapping[str, str]) -> list[Check]:
    """Return all answers for this controller."""
    config, first = _configuration(config_file.path())
    checks = [first, _answer("state", lambda: _state(config))]
    checks.append(_answer("spool", lambda: _spool(config)))
    if config.spool.authenticate == "munge":
        checks.append(_answer("munge", lambda: _munge(config)))
    checks.append(_answer("aggregator", lambda: _aggregator(config)))
    try:
        slurm = ask(environment)
    except SlurmSilent as error:
        mend = (
            "systemctl status slurmctld; if it runs, run this on the controller, with SLURM_CONF"
            " and PATH as the aggregator has them"
        )
        return [*checks, Check("Slurm", "broken", f"{error}", mend)]
    checks += [question() for question in doctor_slurm.questions(config, slurm)]
    return [*checks, *_nodes(config, slurm, environment)]


def _answer(subject: str, question: Callable[[], Check]) -> Check:
    """Ask in a child; what does not answer would hang the aggregator's children as well."""
    outcome = run_one(lambda: pickle.dumps(question()), _SECONDS)
    if outcome.status == "ok":
        answer: Check = pickle.loads(outcome.output)
        return answer
    says = f"{outcome.status}: {outcome.detail}"
    return Check(subject, "broken", says, f"see what the {subject} lies on")


def _configuration(path: Path) -> tuple[Config, Check]:
    try:
        config = load(path)
    except ConfigError as error:
        return Config(), Check("configuration", "broken", str(error), "correct that line")
    if not path.exists():
        says = f"{path} is missing: defaults hold, and nothing but watching is done"
        return config, Check("configuration", "warning", says, "recovery init")
    found = path.stat()
    if found.st_uid not in {0, os.geteuid()} or found.st_mode & 0o022:
        says = f"{path} can be changed by others than root"
        mend = f"chown root {path}; chmod go-w {path}"
        return config, Check("configuration", "broken", says, mend)
    return config, Check("configuration", "ok", f"{path}: mode {config.mode}")


def _state(config: Config) -> Check:
    state = config.controller.state
    mend = f"install -d -m 0750 {state}, owned by whom the aggregator runs as"
    if not state.is_dir():
        return Check("state", "broken", f"{state} is no folder", f"recovery init, or {mend}")
    if not os.access(state, os.W_OK | os.X_OK):
        return Check("state", "broken", f"{state} cannot be written by uid {os.geteuid()}", mend)
    if state.stat().st_mode & 0o022:
        says = f"others could write the journal in {state}"
        return Check("state", "broken", says, f"chmod go-w {state}")
    kind = file_systems.of(state)
    if file_systems.is_remote(kind):
        says = f"{state} lies on {kind}: the journal hangs, or is lost, with it"
        return Check("state", "warning", says, "controller.state = a folder on a disk of its own")
    space = os.statvfs(state)
    free = space.f_bavail * space.f_frsize
    if free < LEAST_FREE_BYTES:
        says = f"{free >> 20} MiB are free at {state}; what is not on disk is not done"
        return Check("state", "warning", says, "make room, or move controller.state")
    return Check("state", "ok", f"{state}: {free >> 30} GiB free")


def _spool(config: Config) -> Check:
    settings, base = config.spool, config.spool.path
    mine = {*settings.trusted_uids, os.geteuid()}
    for name in spool.FOLDERS:
        folder = base / name
        if folder.is_symlink() or not folder.is_dir():
            says = f"{folder} is no folder: is the spool mounted?"
            return Check("spool", "broken", says, f"mount it, or: recovery init --spool {base}")
        found = folder.stat()
        if name != "reviews" and settings.authenticate == "owner":
            if found.st_uid not in mine:
                says = f"{folder} belongs to uid {found.st_uid}, who is not trusted"
                return Check("spool", "broken", says, "chown it, or spool.trusted_uids")
            if found.st_mode & 0o022:
                says = f"others could write into {folder}"
                return Check("spool", "broken", says, f"chmod go-w {folder}")
    for name in ("control", "incoming", "archive"):
        try:
            spool.write(base / name, ".doctor", b"")
            (base / name / ".doctor").unlink()
        except (spool.SpoolError, OSError) as error:
            mend = "run as its owner, or export it without root_squash: docs/install.md"
            return Check("spool", "broken", str(error), mend)
    return Check("spool", "ok", f"{base}: writable, {settings.authenticate} authentication")


def _munge(config: Config) -> Check:
    try:
        sealed = spool.seal(b"doctor", config.spool)
        munge.unseal(sealed, config.spool.munge_socket)
    except (spool.SpoolError, munge.MungeUnavailable, Refused) as error:
        mend = "start munged here, or name its socket: spool.munge_socket"
        return Check("munge", "broken", str(error), mend)
    return Check("munge", "ok", "a credential made here opens here")


def _aggregator(config: Config) -> Check:
    path = config.spool.path / "control" / "effective.json"
    try:
        age = time.time() - path.stat().st_mtime
    except OSError:
        says = "it has never published anything into this spool"
        return Check("aggregator", "warning", says, "systemctl enable --now slurm-recovery")
    if age > 60:
        says = f"it last published {age:.0f} s ago: it does not run"
        return Check("aggregator", "warning", says, "systemctl status slurm-recovery")
    return Check("aggregator", "ok", f"runs: published {max(age, 0):.0f} s ago")


def _nodes(config: Config, slurm: Settings, environment: Mapping[str, str]) -> list[Check]:
    """What every node's heartbeat says: the hooks run there, reach the spool and are believed."""
    try:
        known = CliScheduler(environment).nodes()
    except SchedulerError as error:
        return [Check("nodes", "broken", str(error), "scontrol show nodes")]
    outcome = run_one(lambda: pickle.dumps(_beats(config)), _SECONDS)
    if outcome.status != "ok":
        return [Check("nodes", "broken", f"{outcome.status}: {outcome.detail}", "see the spool")]
    beats, problems = pickle.loads(outcome.output)
    trust = "see spool.trusted_uids"
    if config.spool.authenticate == "munge":
        trust = f"the same munge.key and time there as here, munged restarted; else {trust}"
    checks = [Check("heartbeats", "broken", one, trust) for one in problems[:3]]
    up = {name for name, node in known.items() if node.state not in ("DOWN", "FUTURE", "UNKNOWN")}
    if not slurm.text("HealthCheckProgram"):
        says = "no health checks: what nodes can do is not known before a job fails there"
        return [*checks, Check("nodes", "warning", says, "HealthCheckProgram=…")]
    patience = SILENT_INTERVALS * (slurm.seconds("HealthCheckInterval") or 60)
    now = time.time()
    silent = [name for name in up if name not in beats or now - beats[name][1] > patience]
    if silent:
        says = f"{len(silent)} of {len(up)} have no heartbeat of the last {patience} s"
        where = _names(silent)
        checks.append(
            Check("nodes", "broken", f"{says}: {where}", "on one of them: slurm-hooks doctor")
        )
    else:
        checks.append(Check("nodes", "ok", f"{len(up)} in service, each with a fresh heartbeat"))
    apart = {name: told - seen for name, (told, seen) in beats.items() if name in up}
    wrong = [name for name, seconds in apart.items() if abs(seconds) > CLOCK_SECONDS]
    if wrong:
        most = max(abs(apart[name]) for name in wrong)
        says = f"{_names(wrong)}: up to {most:.0f} s away from the spool's server"
        checks.append(Check("clocks", "broken", says, "start chrony or ntpd there"))
    elif apart:
        most = max(abs(seconds) for seconds in apart.values())
        checks.append(Check("clocks", "ok", f"within {most:.1f} s of the spool's server"))
    return checks


def _beats(config: Config) -> tuple[dict[str, tuple[float, float]], list[str]]:
    """When each node's last heartbeat was, by the node's clock and by the file server's."""
    reader = SpoolReader(config.spool.path, config.spool)
    found: dict[str, tuple[float, float]] = {}
    problems: list[str] = []
    more = True
    while more:
        reply = reader.step("heartbeats", ())
        problems += reply.get("problems", [])
        for node, beat in reply.get("heartbeats", {}).items():
            told = datetime.fromisoformat(re.sub("Z$", "+00:00", beat["time"])).timestamp()
            seen = (config.spool.path / "heartbeat" / f"{node}.json").stat().st_mtime
            found[node] = (told, seen)
        more = bool(reply.get("more"))
    return found, problems


def _names(nodes: list[str]) -> str:
    text = compress(nodes)
    return text if len(text) <= _NAMES_SHOWN else f"{text[:_NAMES_SHOWN]}…"
