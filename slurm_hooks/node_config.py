"""What a node reads of recovery.toml: the spool, the hooks and the probes.

Apart from ``config``, which adds the controller's sections: a prolog delays every job, and loads
nothing that it does not use.
"""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Literal

from slurm_hooks.frozen import frozen
from slurm_hooks.probe_config import Probes

MUNGE_PAYLOAD_BYTES = 700 * 1024
"""Most that a credential may hold: munged opens none whose text is longer than 1 MiB.

Measured on 0.5.15: it seals up to 1 MiB, and opens again what had 760 KiB but not 770.
"""


@frozen
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

    def jobs_of(self, node: str) -> Path:
        """Return the local folder where the node's opted-in jobs are noted (``running_jobs``)."""
        return self.buffer_of(node) / "jobs"


@frozen
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


@frozen
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


@frozen
class NodeConfig:
    """The part of recovery.toml that hooks and probes go by."""

    mode: Literal["monitor", "act"] = "monitor"
    spool: Spool = field(default_factory=Spool)
    hooks: Hooks = field(default_factory=Hooks)
    probes: Probes = field(default_factory=Probes)
