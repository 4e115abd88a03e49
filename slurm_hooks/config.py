"""recovery.toml: one file for nodes and controller, with defaults that only watch.

Owns which keys exist and what they default to. A missing file is the default configuration; a
broken one is an error that names the line (``toml_reader``).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from slurm_hooks.toml_reader import ConfigError, read_file

__all__ = ["Config", "ConfigError", "config_path", "load"]

DEFAULT_PATH = Path("/etc/slurm/recovery.toml")

PATH_VARIABLE = "SLURM_RECOVERY_CONFIG"
"""Environment variable that names another file; a wrapper script of a hook may set it."""

Hook = Literal["prolog", "epilog", "health_check"]
ActionName = Literal["requeue", "hold", "drain", "return", "gate"]

ALL_HOOKS: tuple[Hook, ...] = ("prolog", "epilog", "health_check")


@dataclass(frozen=True)
class Spool:
    """Where records travel, and how the aggregator knows who wrote one.

    ``%n`` in ``buffer`` is the node's name, for several slurmd on one host. ``trusted_uids`` may
    write records under ``owner`` authentication.
    """

    path: Path = Path("/shared/slurm-recovery")
    buffer: str = "/var/spool/slurm-recovery"
    authenticate: Literal["owner", "munge"] = "owner"
    trusted_uids: tuple[int, ...] = (0,)
    max_record_bytes: int = 256 * 1024
    buffer_records: int = 1000


@dataclass(frozen=True)
class Budget:
    """Seconds that all probes of one run of a hook may take together, delivery included."""

    prolog: float = 6.0
    epilog: float = 20.0
    health_check: float = 40.0

    def __post_init__(self) -> None:
        for name, limit in (("prolog", 60), ("epilog", 300), ("health_check", 55)):
            seconds = getattr(self, name)
            if not 0.5 <= seconds <= limit:
                raise ValueError(f"{name} must be between 0.5 and {limit} seconds, not {seconds}")


@dataclass(frozen=True)
class Hooks:
    """What holds for every hook."""

    budget: Budget = field(default_factory=Budget)


@dataclass(frozen=True)
class NvmlProbe:
    """The NVML probe. ``expect_gpus``: ``"gres"`` asks what Slurm configured, or a number."""

    hooks: tuple[Hook, ...] = ALL_HOOKS
    deadline: float = 10.0
    expect_gpus: Literal["gres"] | int = "gres"


@dataclass(frozen=True)
class KernelLogProbe:
    """The kernel-log probe. ``path`` is /dev/kmsg or a text file; ``%n`` is the node's name."""

    hooks: tuple[Hook, ...] = ALL_HOOKS
    deadline: float = 5.0
    path: str = "/dev/kmsg"
    max_bytes: int = 4 * 1024 * 1024


@dataclass(frozen=True)
class Probes:
    """One section for each probe."""

    nvml: NvmlProbe = field(default_factory=NvmlProbe)
    kernel_log: KernelLogProbe = field(default_factory=KernelLogProbe)


@dataclass(frozen=True)
class Controller:
    """The aggregator's own: where its state lives, how often it looks.

    ``state`` is on the controller's own disk. ``poll`` seconds pass between looks at the spool,
    ``snapshot`` seconds between full looks at the scheduler. Records stay in the index for
    ``index_days``; their archive is the site's own to thin out.
    """

    state: Path = Path("/var/lib/slurm-recovery")
    poll: float = 0.25
    snapshot: float = 30.0
    command_timeout: float = 20.0
    index_days: int = 90


@dataclass(frozen=True)
class Policy:
    """Limits of deciding.

    ``settle`` seconds are waited for silent nodes after a job has left COMPLETING; ``gather_max``
    bounds a stuck COMPLETING. ``max_restarts`` is the budget of one job.
    """

    max_restarts: int = 3
    settle: float = 5.0
    gather_max: float = 120.0


@dataclass(frozen=True)
class Guard:
    """Limits of acting: how many nodes this toolkit may have drained at one time."""

    max_drained_nodes: int = 8
    max_drained_share: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.max_drained_share <= 1:
            raise ValueError("max_drained_share must be between 0 and 1")


@dataclass(frozen=True)
class Needs:
    """Evidence a grant waits for: reviewed decisions, and the lower 95% bound of agreement."""

    reviews: int = 20
    agreement: float = 0.80


@dataclass(frozen=True)
class Grant:
    """Permission to take ``actions`` in a scope; an empty scope list means any.

    ``accept_untested`` holds the admin's reason for acting without a trial's evidence.
    """

    actions: tuple[ActionName, ...]
    partitions: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    needs: Needs = field(default_factory=Needs)
    accept_untested: str | None = None


@dataclass(frozen=True)
class Config:
    """All of recovery.toml."""

    mode: Literal["monitor", "act"] = "monitor"
    spool: Spool = field(default_factory=Spool)
    hooks: Hooks = field(default_factory=Hooks)
    probes: Probes = field(default_factory=Probes)
    controller: Controller = field(default_factory=Controller)
    policy: Policy = field(default_factory=Policy)
    guard: Guard = field(default_factory=Guard)
    grant: tuple[Grant, ...] = ()


def config_path() -> Path:
    """Return the file to read: SLURM_RECOVERY_CONFIG, else /etc/slurm/recovery.toml."""
    return Path(os.environ.get(PATH_VARIABLE) or DEFAULT_PATH)


def load(path: Path | None = None) -> Config:
    """Return the configuration of ``path``, by default ``config_path()``.

    Raises:
        ConfigError: the file cannot be used; the text names file, line and key.
    """
    return read_file(Config, path or config_path())
