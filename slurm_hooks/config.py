"""recovery.toml: one file for nodes and controller, with defaults that only watch.

Owns which keys exist and what they default to: the controller's here, a node's in ``node_config``
and ``probe_config``. A missing file is the default configuration; a
broken one is an error that names the line (``toml_reader``).
"""

from __future__ import annotations

from dataclasses import field, replace
from pathlib import Path
from typing import Literal

from slurm_hooks import config_file
from slurm_hooks.frozen import frozen
from slurm_hooks.node_config import MUNGE_PAYLOAD_BYTES, Budget, Hooks, NodeConfig, Spool
from slurm_hooks.toml_reader import ConfigError, read_bytes, read_file, salvage

__all__ = [
    "MUNGE_PAYLOAD_BYTES",
    "Budget",
    "Config",
    "ConfigError",
    "Hooks",
    "NodeConfig",
    "Spool",
    "load",
    "load_what_can_be_read",
]

ActionName = Literal["requeue", "hold", "drain", "return", "gate"]


@frozen
class Controller:
    """The aggregator's own: where its state lives, how often it looks.

    ``state`` is on the controller's own disk. ``poll`` seconds pass between looks at the spool,
    ``snapshot`` seconds between full looks at the scheduler. Records stay in the index for
    ``index_days``; their archive is the site's own to thin out. ``cluster`` is Slurm's ClusterName:
    where it is not set, Slurm is asked. Records of another cluster in the same spool are left
    alone. A job that is started again gets the nice value ``-restart_nice``, which makes up for the
    age that a requeue takes from its priority; 0 leaves its nice value alone.
    """

    cluster: str = ""
    state: Path = Path("/var/lib/slurm-recovery")
    poll: float = 0.25
    snapshot: float = 30.0
    command_timeout: float = 20.0
    index_days: int = 90
    restart_nice: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.restart_nice <= 2_147_483_645:  # man sbatch, --nice
            raise ValueError("restart_nice must be between 0 and 2147483645")


@frozen
class Slurm:
    """How the controller speaks with Slurm.

    ``cli`` runs Slurm's commands; ``rest`` asks slurmrestd at ``url``, ``unix:/PATH``,
    ``http://HOST:PORT`` or ``https://HOST:PORT``, as ``user`` (empty: whom this runs as). ``token``
    is a file with that user's JWT, read anew whenever it changes; empty: ``scontrol token`` makes
    one. A socket with rest_auth/local, which needs none: ``token = "none"``.
    """

    backend: Literal["cli", "rest"] = "cli"
    url: str = "unix:/run/slurmrestd/slurmrestd.socket"
    user: str = ""
    token: str = ""

    def __post_init__(self) -> None:
        if not self.url.startswith(("unix:/", "http://", "https://")):
            raise ValueError(f"url must begin with unix:/, http:// or https://, not {self.url!r}")
        if self.token not in ("", "none") and not self.token.startswith("/"):
            raise ValueError(f"token must be the absolute path of a file, not {self.token!r}")


@frozen
class ClassRule:
    """What a fault class asks for; ``recovery/policy.toml`` has the defaults and says it in full.

    ``restarts`` is how many restarts in a row the class may cause, None for the job's budget.
    ``fleet`` takes the place of ``job`` where one cause has hit many, and ``job`` is ``requeue``.
    """

    job: Literal["requeue", "hold", "leave"]
    node: Literal["drain", "watch", "none"] = "watch"
    exclude: bool = True
    drain_after: int = 1
    restarts: int | None = None
    fleet: Literal["requeue", "hold", "leave"] = "hold"


@frozen
class Policy:
    """Limits of deciding.

    ``settle`` seconds are waited for silent nodes after a job has left COMPLETING; ``gather_max``
    bounds a stuck COMPLETING. ``max_restarts`` is the budget of one job, ``no_progress`` how many
    attempts in a row may end without progress. ``classes`` overrides rows of the default table.
    Where programs of ``users_that_blame_a_gpu`` users fail of one GPU within a week, it is the GPU.
    A mended node returns after ``checks_before_return`` clean health checks in a row.

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
    users_that_blame_a_gpu: int = 3
    checks_before_return: int = 3
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


@frozen
class Offenders:
    """Nodes that fail more often than chance lets them; ``recovery/offenders.py`` has the method.

    A failure counts half after ``half_life_days``. A node is a suspect, which restarted jobs avoid,
    once a whole fleet of healthy nodes would have one such with a chance of ``exclude_chance``, and
    is drained at ``drain_chance``. At most ``max_excluded`` suspects are avoided at a time.
    """

    half_life_days: float = 30.0
    exclude_chance: float = 0.05
    drain_chance: float = 0.001
    max_excluded: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.half_life_days <= 365:
            raise ValueError("half_life_days must be between 1 and 365")
        if not 0 < self.drain_chance <= self.exclude_chance < 1:
            raise ValueError("0 < drain_chance <= exclude_chance < 1 must hold")


@frozen
class Fleet:
    """When one cause that hits many nodes or jobs is one incident (``recovery/fleet.py``).

    That is when, within ``window`` seconds, at least ``nodes`` nodes and the share ``share`` of all
    show it, or at least ``jobs`` jobs have failed of it. What may be shared is decided on
    ``gather`` seconds after it was first seen, so that the others can show it too.
    """

    window: float = 300.0
    nodes: int = 5
    share: float = 0.001
    jobs: int = 5
    gather: float = 5.0

    def __post_init__(self) -> None:
        if self.nodes < 2 or self.jobs < 2:
            raise ValueError("nodes and jobs must be at least 2: one is no fleet")
        if not 0 <= self.share <= 1:
            raise ValueError("share must be between 0 and 1")
        if not 0 <= self.gather < self.window:
            raise ValueError("gather must be at least 0 and less than window")


@frozen
class Guard:
    """Limits of acting. Whichever is reached opens the circuit breaker of its kind of action.

    How many nodes this toolkit may have drained at one time and how many it may drain in an hour,
    and how many jobs it may put back to work in an hour: fewer than ``policy`` has restarts for, so
    that a fleet that fails stops the automation before it holds everybody's jobs.
    """

    max_drained_nodes: int = 8
    max_drained_share: float = 0.05
    max_drained_per_hour: int = 8
    max_requeues_per_hour: int = 20

    def __post_init__(self) -> None:
        if not 0 <= self.max_drained_share <= 1:
            raise ValueError("max_drained_share must be between 0 and 1")


@frozen
class Needs:
    """Evidence a grant waits for: reviewed decisions, and the lower 95% bound of agreement."""

    reviews: int = 20
    agreement: float = 0.80


@frozen
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


@frozen
class Review:
    """Whose verdict on decisions counts: ``reviewers`` are names of users, or uids as text."""

    reviewers: tuple[str, ...] = ()


@frozen
class Notify:
    """How people are told of what needs them; each way is off while it is empty.

    ``command`` gets the notice as JSON on standard input. ``webhook`` gets the same document by
    POST, ``slack`` a text as Slack's incoming webhooks take it. ``mail`` lists addresses of the
    people on call, ``mail_owner`` writes to the job's owner too; ``mail_program`` is called as
    slurmctld calls MailProg: ``-s SUBJECT ADDRESS``, the text on standard input. One subject is
    told again after ``repeat`` seconds at the earliest; at most ``per_hour`` notices are sent.
    """

    command: tuple[str, ...] = ()
    webhook: str = ""
    slack: str = ""
    mail: tuple[str, ...] = ()
    mail_owner: bool = False
    mail_program: str = "/bin/mail"
    repeat: float = 4 * 3600.0
    per_hour: int = 30
    timeout: float = 10.0

    def __post_init__(self) -> None:
        for url in (self.webhook, self.slack):
            if url and not url.startswith(("http://", "https://")):
                raise ValueError(f"a webhook's address begins with https://, not {url!r}")
        if self.command and not self.command[0].startswith("/"):
            raise ValueError(f"command must begin with an absolute path, not {self.command[0]!r}")
        if not 1 <= self.timeout <= 60:
            raise ValueError("timeout must be between 1 and 60 seconds")


@frozen
class Config(NodeConfig):
    """All of recovery.toml: what a node reads of it, and what the controller does."""

    controller: Controller = field(default_factory=Controller)
    slurm: Slurm = field(default_factory=Slurm)
    policy: Policy = field(default_factory=Policy)
    fleet: Fleet = field(default_factory=Fleet)
    guard: Guard = field(default_factory=Guard)
    review: Review = field(default_factory=Review)
    notify: Notify = field(default_factory=Notify)
    offenders: Offenders = field(default_factory=Offenders)
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
