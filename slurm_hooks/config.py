"""recovery.toml: one file for nodes and controller, with defaults that only watch.

Owns which keys exist and what they default to. A missing file is the default configuration; a
broken one is an error that names the line (``toml_reader``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from slurm_hooks import config_file
from slurm_hooks.probe_config import Probes
from slurm_hooks.toml_reader import ConfigError, read_bytes, read_file, salvage

__all__ = ["Config", "ConfigError", "load", "load_what_can_be_read"]

ActionName = Literal["requeue", "hold", "drain", "return", "gate"]


MUNGE_PAYLOAD_BYTES = 700 * 1024
"""Most that a credential may hold: munged opens none whose text is longer than 1 MiB.

Measured on 0.5.15: it seals up to 1 MiB, and opens again what had 760 KiB but not 770.
"""


@dataclass(frozen=True)
class Spool:
    """Where records travel, and how the aggregator knows who wrote one.

    ``%n`` in ``buffer`` is the node's name, for several slurmd on one host. ``trusted_uids`` may
    write records under ``owner`` authentication, and seal them under ``munge``. ``munge_socket``
    is munged's where the site runs one of its own for Slurm (slurm.conf: AuthInfo=socket=…).
    """

    path: Path = Path("/shared/slurm-recovery")
    buffer: str = "/var/spool/slurm-recovery"
    authenticate: Literal["owner", "munge"] = "owner"
    munge_socket: str = ""
    trusted_uids: tuple[int, ...] = (0,)
    max_record_bytes: int = 256 * 1024
    buffer_records: int = 1000

    def __post_init__(self) -> None:
        if not 64 * 1024 <= self.max_record_bytes <= 16 * 1024 * 1024:
            raise ValueError("max_record_bytes must be between 65536 and 16777216")
        if self.authenticate == "munge" and self.max_record_bytes > MUNGE_PAYLOAD_BYTES:
            raise ValueError(
                f"max_record_bytes can be at most {MUNGE_PAYLOAD_BYTES} with authenticate = 'munge'"
            )
        if self.munge_socket and not self.munge_socket.startswith("/"):
            raise ValueError(f"munge_socket must be an absolute path, not {self.munge_socket!r}")
        if not 10 <= self.buffer_records <= 100_000:
            raise ValueError("buffer_records must be between 10 and 100000")

    def buffer_of(self, node: str) -> Path:
        """Return the node's local folder."""
        return Path(self.buffer.replace("%n", node))


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
    """What holds for every hook.

    A finding that stays is reported again at most every ``repeat`` seconds by health checks. A
    health check that passed within ``freshness`` seconds satisfies a prolog; 0 turns that off.
    ``scontrol`` is its path where it is in none of the usual places, ``slurm_conf`` what it reads
    where that is not Slurm's default: a health check is not told. ``run`` is a folder in memory
    through which prologs tell task prologs of jobs that opted in.
    """

    budget: Budget = field(default_factory=Budget)
    repeat: float = 3600.0
    freshness: float = 0.0
    scontrol: str = ""
    slurm_conf: str = ""
    run: Path = Path("/run/slurm-recovery")

    def __post_init__(self) -> None:
        if not 0 <= self.repeat <= 7 * 86_400:
            raise ValueError("repeat must be between 0 and 604800 seconds")
        if not 0 <= self.freshness <= 3600:
            raise ValueError("freshness must be between 0 and 3600 seconds")


@dataclass(frozen=True)
class Controller:
    """The aggregator's own: where its state lives, how often it looks.

    ``state`` is on the controller's own disk. ``poll`` seconds pass between looks at the spool,
    ``snapshot`` seconds between full looks at the scheduler. Records stay in the index for
    ``index_days``; their archive is the site's own to thin out. ``cluster`` is Slurm's ClusterName:
    where it is set, records of another cluster in the same spool are left alone.
    """

    cluster: str = ""
    state: Path = Path("/var/lib/slurm-recovery")
    poll: float = 0.25
    snapshot: float = 30.0
    command_timeout: float = 20.0
    index_days: int = 90


@dataclass(frozen=True)
class ClassRule:
    """What a fault class asks for; ``recovery/policy.toml`` has the defaults and says it in full.

    ``restarts`` is how many restarts in a row the class may cause, None for the job's budget.
    """

    job: Literal["requeue", "hold", "leave"]
    node: Literal["drain", "watch", "none"] = "watch"
    exclude: bool = True
    drain_after: int = 1
    restarts: int | None = None


@dataclass(frozen=True)
class Policy:
    """Limits of deciding.

    ``settle`` seconds are waited for silent nodes after a job has left COMPLETING; ``gather_max``
    bounds a stuck COMPLETING. ``max_restarts`` is the budget of one job, ``no_progress`` how many
    attempts in a row may end without progress. ``classes`` overrides rows of the default table.

    A running job is suspected to hang when its step has stood still for ``hang_factor`` times what
    nine of ten of its own steps take to be seen, and longer than any pause that it has come back
    from; never before ``hang_minimum`` seconds, always after ``hang_maximum``, which also bounds
    its start. Its nodes then have ``hang_evidence`` seconds to tell what they see.
    A job is slow that has lost the share ``slow_loss`` of its own best throughput over
    ``slow_window`` seconds.
    """

    max_restarts: int = 3
    max_restarts_per_user_hour: int = 10
    max_restarts_per_hour: int = 30
    no_progress: int = 3
    settle: float = 5.0
    gather_max: float = 120.0
    hang_minimum: float = 900.0
    hang_maximum: float = 7200.0
    hang_factor: float = 5.0
    hang_evidence: float = 180.0
    slow_loss: float = 0.3
    slow_window: float = 1800.0
    classes: dict[str, ClassRule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.hang_minimum <= self.hang_maximum:
            raise ValueError("hang_minimum must be more than 0 and at most hang_maximum")
        if self.hang_factor < 1:
            raise ValueError(f"hang_factor must be at least 1, not {self.hang_factor}")
        if not 0 < self.slow_loss < 1:
            raise ValueError(f"slow_loss must be between 0 and 1, not {self.slow_loss}")
        if self.hang_evidence <= 0 or self.slow_window <= 0:
            raise ValueError("hang_evidence and slow_window must be more than 0 seconds")


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


def load(path: Path | None = None) -> Config:
    """Return the configuration of ``path``, by default ``config_file.path()``.

    Raises:
        ConfigError: the file cannot be used; the text names file, line and key.
    """
    return read_file(Config, path or config_file.path())


def load_what_can_be_read(raw: bytes, path: Path) -> tuple[Config, str | None]:
    """Return the configuration in a file's content ``raw``, and what is wrong with it, if anything.

    For hooks, which have to report a mistake to the spool that the same file names: sections
    without a mistake hold, the others stand at their defaults, and nothing but watching is
    configured.
    """
    try:
        return read_bytes(Config, raw, path), None
    except ConfigError as error:
        sections = salvage(Config, raw)
        return replace(Config(**sections), mode="monitor", grant=()), str(error)
