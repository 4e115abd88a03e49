"""The configuration that a hook goes on with, whatever has become of the file.

Owns reading it in a child, understanding what came back, and what to go by where it cannot be used.
A plan that an earlier hook has noted (``quiet``) needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_hooks import config_file
from slurm_hooks.deadline import Children
from slurm_hooks.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from slurm_hooks.deadline import ChildOutcome
    from slurm_hooks.node_config import NodeConfig
    from slurm_hooks.record import Finding

SECONDS = 1.0
"""Time for reading recovery.toml; a local disk takes well under a millisecond."""


@frozen
class Configured:
    """A configuration, what is wrong with the file, and the file's content as ``quiet`` has it.

    ``is_planned`` says that the plan was noted: then ``told`` is empty, and no record waits.
    """

    config: NodeConfig
    troubles: tuple[Finding, ...] = ()
    told: bytes = b""
    is_planned: bool = False


def by_plan(plan: bytes) -> Configured | None:
    """Return the configuration of a noted ``plan``, in JSON; None where it cannot be used."""
    import json

    from slurm_hooks import node_config, toml_reader

    try:
        document = json.loads(plan)
        if not isinstance(document, dict):
            return None
        config = toml_reader.read(node_config.NodeConfig, document)
    except (ValueError, toml_reader.WrongKey, RecursionError):
        return None
    return Configured(config, is_planned=True)


def by_file(meanwhile: Callable[[], object] = lambda: None) -> Configured:
    """Return the configuration in the file, which a child reads while ``meanwhile`` is called."""
    path = config_file.path()
    with Children() as children:
        children.start("config", lambda: _read(path), SECONDS)
        meanwhile()
        return _understood(children.wait()["config"], path)


def _read(path: Path) -> bytes:
    """Run in a child: the configuration file after a ``+``, or ``-`` where there is none."""
    try:
        return b"+" + config_file.read(path)
    except FileNotFoundError:
        return b"-"


def _understood(outcome: ChildOutcome, path: Path) -> Configured:
    from slurm_hooks.config import Config, load_what_can_be_read
    from slurm_hooks.own_failures import finding

    if outcome.output == b"-":
        return Configured(Config(), told=outcome.output)
    if outcome.status == "ok":
        config, error = load_what_can_be_read(outcome.output[1:], path)
        troubles = (finding("hook.config_error", error),) if error else ()
        return Configured(config, troubles, outcome.output)
    code = "hook.config_unreachable" if outcome.status == "hang" else "hook.config_error"
    return Configured(Config(), (finding(code, f"{path}: {outcome.detail}"),))
