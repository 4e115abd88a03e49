"""Whether Slurm runs the hooks here, and leaves them their time: what slurm.conf says.

Reads the file as ``gres`` does, and asks Slurm nothing: a node is examined before it is in service.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurm_hooks import file_systems, slurm_conf
from slurm_hooks.check import Check
from slurm_hooks.config import Config

PROGRAMS = {
    "Prolog": "slurm-hook-prolog",
    "Epilog": "slurm-hook-epilog",
    "HealthCheckProgram": "slurm-hook-health-check",
    "TaskProlog": "slurm-hook-task-prolog",
}
"""slurm.conf's key: the hook that belongs there, itself or in a script of the site's."""

MESSAGE_TIMEOUT_SECONDS = 10.0
"""Slurm's default (slurm.conf(5)); a prolog that takes longer is told to users as hung."""

_ALLOCATES = {"alloc", "contain", "deferbatch", "forcerequeueonfail", "serial", "x11"}
"""PrologFlags with which the prolog runs at allocation, on every node (slurm.conf(5))."""

_WRAPPER_BYTES = 64 * 1024

_PYTHON = re.compile(rb"^python=(\S.*)$", re.MULTILINE)
"""The line that says so in the scripts of ``recovery init``."""

_PYTHON_SECONDS = 2.0

Settings = Mapping[str, Sequence[str]]
"""Every value of a key of slurm.conf, by the key in lower case."""


def questions(config: Config) -> Sequence[tuple[str, Callable[[], Check]]]:
    """Return what to ask, each with its subject; an answer may block on a file system."""
    programs = [
        (key, lambda key=key, name=name: _program(key, name, config))
        for key, name in PROGRAMS.items()
    ]
    return [*programs, ("Slurm's time-outs", lambda: _times(config))]


def settings(config: Config) -> tuple[Path | None, Settings]:
    """Return slurm.conf's path, None where none can be read, and what it says."""
    named = [os.environ.get("SLURM_CONF"), config.hooks.slurm_conf]
    for path in (*(Path(name) for name in named if name), *slurm_conf.USUAL_FILES):
        found: dict[str, list[str]] = {}
        files: list[slurm_conf.Stamp] = []
        for line in slurm_conf.lines_of(path, files):
            for key, value in line.items():
                found.setdefault(key, []).append(value)
        if files:
            return path, found
    return None, {}


def _program(key: str, name: str, config: Config) -> Check:
    path, found = settings(config)
    if path is None:
        says = "no slurm.conf can be read here: whether Slurm runs it is not known"
        return Check(key, "warning", says, 'name it: hooks.slurm_conf = "/path/slurm.conf"')
    values = [part for value in found.get(key.lower(), ()) for part in value.split(",") if part]
    own = Path(os.path.realpath(_beside_python(name)))
    if not values:
        says = f"{path} names none, so {name} never runs"
        return Check(key, "warning", says, f"in {path}: {key}={_beside_python(name)}")
    programs = [one for value in values for one in _expand(value)]
    if not programs:
        says = f"{', '.join(values)} is nothing that is there: Slurm takes it for a failure"
        return Check(key, "broken", says, f"correct {key} in {path}")
    for program in programs:
        if not os.access(program, os.X_OK):
            return Check(key, "broken", f"{program} cannot be run", f"chmod +x {program}")
        kind = file_systems.of(program)
        if file_systems.is_remote(kind):
            says = f"{program} lies on {kind}, and hangs with it before its first line"
            return Check(key, "broken", says, f"copy {program} to the node's own disk")
    running = [p for p in programs if Path(os.path.realpath(p)) == own or _mentions(p, name)]
    if not running:
        says = f"{', '.join(map(str, programs))} does not name {name}"
        return Check(key, "warning", says, f"let it end with: exec {_beside_python(name)}")
    for program in running:
        if (python := _python_of(program)) and not _has_the_package(python):
            says = f"{program} does nothing: {python} is gone, or has no slurm_hooks"
            return Check(key, "broken", says, "recovery init --node, of an installation that works")
    if key == "HealthCheckProgram" and not _number(found, "healthcheckinterval", 0):
        says = f"{running[0]} never runs: HealthCheckInterval is 0"
        return Check(key, "broken", says, f"in {path}: HealthCheckInterval=60")
    return Check(key, "ok", f"{running[0]} ({path})")


def _times(config: Config) -> Check:
    subject, budget = "Slurm's time-outs", config.hooks.budget
    path, found = settings(config)
    if path is None:
        return Check(subject, "warning", "no slurm.conf can be read here")
    for hook, key in (("prolog", "prologtimeout"), ("epilog", "epilogtimeout")):
        limit = _number(found, key, 0) or _number(found, "prologepilogtimeout", 0)
        seconds = getattr(budget, hook)
        if 0 < limit < seconds:
            says = f"Slurm ends the {hook} after {limit:g} s, and its budget is {seconds:g} s"
            mend = f"hooks.budget.{hook} = {max(0.5, limit - 2):g}, or a longer time in {path}"
            return Check(subject, "broken", says, mend)
    message = _number(found, "messagetimeout", MESSAGE_TIMEOUT_SECONDS)
    if budget.prolog >= message:
        says = f"a prolog of {budget.prolog:g} s is told to users as hung after {message:g} s"
        mend = f"hooks.budget.prolog = {max(0.5, message - 4):g}, or MessageTimeout in {path}"
        return Check(subject, "warning", says, mend)
    flags = {
        flag.lower() for value in found.get("prologflags", ()) for flag in value.split(",") if flag
    }
    if "prolog" in found and not flags & _ALLOCATES:
        says = "a prolog runs only before a node's first step: too late to send a job back"
        return Check(subject, "warning", says, f"in {path}: PrologFlags=Alloc")
    return Check(subject, "ok", f"leave hooks their budgets ({path})")


def _number(found: Settings, key: str, default: float) -> float:
    try:
        return float(found[key][-1])
    except (KeyError, ValueError):
        return default


def _expand(value: str) -> Sequence[Path]:
    """The programs that a value of slurm.conf names; it may be a pattern (glob(7))."""
    path = Path(value)
    if not path.is_absolute():
        return ()
    if any(sign in path.name for sign in "*?["):
        return sorted(path.parent.glob(path.name))
    return [path] if path.exists() else ()


def _mentions(program: Path, name: str) -> bool:
    with program.open("rb") as script:
        return name.encode() in script.read(_WRAPPER_BYTES)


def _python_of(program: Path) -> str:
    """The Python that a script of ``recovery init`` runs; the empty text where it is another's."""
    with program.open("rb") as script:
        found = _PYTHON.search(script.read(_WRAPPER_BYTES))
    return "".join(shlex.split(os.fsdecode(found[1]))[:1]) if found else ""


def _has_the_package(python: str) -> bool:
    """``-I``: as the hooks start it."""
    import subprocess

    argv = [python, "-Ic", "import slurm_hooks.hooks"]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=_PYTHON_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _beside_python(name: str) -> Path:
    import sys

    return Path(sys.executable).parent / name
