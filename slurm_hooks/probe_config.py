"""The probes' sections of recovery.toml, ``[probes.nvml]`` and so on, one class for each.

``hooks`` names the hooks that run a probe by default, ``deadline`` is in seconds. The rest of the
file is ``config``'s.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Literal

from slurm_hooks.frozen import frozen

Hook = Literal["prolog", "epilog", "health_check"]
ALL_HOOKS: tuple[Hook, ...] = ("prolog", "epilog", "health_check")

LINK_ERRORS_PER_MINUTE: Mapping[str, float] = {
    "symbol_error": 10.0,
    "link_error_recovery": 5.0,
    "local_link_integrity_errors": 0.0,
    "excessive_buffer_overrun_errors": 0.0,
    "port_rcv_errors": 600.0,
    "port_xmit_discards": 6000.0,
    "roce_slow_restart": 600.0,
}
"""Growth of a port's error counters, as sysfs names them, that is still healthy.

Source: NVSentinel's NIC monitor. For symbol errors this is between its two marks, 120 an hour (the
specification's bit error rate) and 600 a minute.
"""


@frozen
class NvmlProbe:
    """The NVML probe. ``expect_gpus``: ``"gres"`` asks what Slurm configured, or a number.

    ``nvlinks`` is how many each GPU should have up: ``"model"`` takes the number known for the
    model. ``ecc`` and ``mig`` say how every GPU of this node should be set. What comes and goes by
    itself (a slowdown, a hot GPU) counts once it has been seen over ``hold`` seconds.
    """

    hooks: tuple[Hook, ...] = ALL_HOOKS
    deadline: float = 10.0
    expect_gpus: Literal["gres"] | int = "gres"
    nvlinks: Literal["model"] | int = "model"
    ecc: Literal["any", "on", "off"] = "any"
    mig: Literal["any", "on", "off"] = "any"
    hold: float = 10.0

    def __post_init__(self) -> None:
        for name in ("expect_gpus", "nvlinks"):
            number = getattr(self, name)
            if isinstance(number, int) and not 0 <= number <= 1024:
                raise ValueError(f"{name} must be between 0 and 1024, not {number}")
        if self.hold <= 0:
            raise ValueError(f"hold must be more than 0 seconds, not {self.hold}")


@frozen
class KernelLogProbe:
    """The kernel-log probe. ``path`` is /dev/kmsg or a text file; ``%n`` is the node's name."""

    hooks: tuple[Hook, ...] = ALL_HOOKS
    deadline: float = 5.0
    path: str = "/dev/kmsg"
    max_bytes: int = 4 * 1024 * 1024


@frozen
class JoblogProbe:
    """The job-log probe: what a failed job's own log says, read as its user.

    At most ``max_bytes`` of the end of each file are searched. ``signatures`` is a folder of the
    site's own log signatures; it need not exist.
    """

    hooks: tuple[Hook, ...] = ("epilog", "health_check")
    deadline: float = 10.0
    max_bytes: int = 64 * 1024 * 1024
    signatures: Path = Path("/etc/slurm/log-signatures.d")


@frozen
class CheckpointProbe:
    """The checkpoint probe: looks at opted-in jobs' checkpoints and progress, as their users."""

    hooks: tuple[Hook, ...] = ALL_HOOKS
    deadline: float = 10.0


@frozen
class ActivityProbe:
    """The activity probe: what GPUs and processes of opted-in running jobs show, health checks."""

    hooks: tuple[Hook, ...] = ("health_check",)
    deadline: float = 10.0


@frozen
class HangEvidenceProbe:
    """The hang_evidence probe: answers the controller where it suspects that a job hangs."""

    hooks: tuple[Hook, ...] = ("health_check",)
    deadline: float = 12.0


@frozen
class StorageProbe:
    """The storage probe. ``mounts`` must be mounted, answer and take a small write.

    ``read_only`` are mounts that are looked at and never written to. From ``full_percent`` on,
    used space or inodes are worth a warning.
    """

    hooks: tuple[Hook, ...] = ALL_HOOKS
    deadline: float = 3.0
    mounts: tuple[str, ...] = ()
    read_only: tuple[str, ...] = ()
    full_percent: float = 98.0

    def __post_init__(self) -> None:
        for name in ("mounts", "read_only"):
            paths = getattr(self, name)
            wrong = [path for path in paths if path != os.path.normpath(path) or path[:1] != "/"]
            if wrong or len(paths) > 32:
                raise ValueError(f"{name} must be at most 32 absolute paths, not {wrong or paths}")
        if not 1 <= self.full_percent <= 100:
            raise ValueError(f"full_percent must be between 1 and 100, not {self.full_percent}")


@frozen
class ProcessesProbe:
    """The processes probe: what a job left behind, looked at in its epilog.

    With ``end``, what carries the job's id is sent SIGTERM and, ``grace`` seconds later, SIGKILL;
    never while another job that may be the same user's is on the node.
    """

    hooks: tuple[Hook, ...] = ("epilog",)
    deadline: float = 8.0
    end: bool = False
    grace: float = 3.0

    def __post_init__(self) -> None:
        if set(self.hooks) - {"epilog"}:
            raise ValueError('hooks can only be ["epilog"] or []: no other hook ends a job')
        if not 0 <= self.grace <= self.deadline - 4:
            raise ValueError(f"grace must be between 0 and deadline - 4 seconds, not {self.grace}")


@frozen
class FabricProbe:
    """The fabric probe: InfiniBand and RoCE ports, and the services that NVSwitches need.

    ``devices`` are those that must be there and active, as ``mlx5_0`` or ``mlx5_0/1``, at ``rate``
    Gb/s or more where that is set; others are to stay as they were seen. ``ignore`` has shell
    patterns of devices not to look at, ``services`` systemd services that must run. What often
    mends itself is a fault once it has lasted ``hold`` seconds. ``errors_per_minute`` sets limits
    for error counters by name. Everything is read below ``root``.
    """

    hooks: tuple[Hook, ...] = ALL_HOOKS
    deadline: float = 5.0
    devices: tuple[str, ...] = ()
    rate: float = 0.0
    ignore: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    hold: float = 60.0
    errors_per_minute: Mapping[str, float] = field(default_factory=dict)
    root: Path = Path("/")

    def __post_init__(self) -> None:
        if self.hold < 0:
            raise ValueError(f"hold must not be negative, not {self.hold}")
        unknown = [name for name in self.errors_per_minute if name not in LINK_ERRORS_PER_MINUTE]
        if unknown:
            known = ", ".join(LINK_ERRORS_PER_MINUTE)
            raise ValueError(f"errors_per_minute has no counter {unknown[0]!r}; known: {known}")


@frozen
class NcclProbe:
    """The NCCL probe; in no hook unless a site wants it.

    ``library`` is loaded and started, ``interface`` what NCCL_SOCKET_IFNAME then says. With
    ``all_reduce_perf``, that program of nccl-tests (or a script around it) is run with ``size``
    over a job's GPUs where they are all that the node has. ``floor`` is the least bus bandwidth in
    GB/s: ``"model"`` takes what is known of the GPU, 0 none.
    """

    hooks: tuple[Hook, ...] = ()
    deadline: float = 60.0
    library: str = "libnccl.so.2"
    interface: str = ""
    all_reduce_perf: str = ""
    size: str = "8G"
    floor: Literal["model"] | float = "model"

    def __post_init__(self) -> None:
        if self.all_reduce_perf and not self.all_reduce_perf.startswith("/"):
            raise ValueError("all_reduce_perf must be an absolute path")
        if not re.fullmatch(r"[1-9][0-9]{0,5}[KMG]", self.size):
            raise ValueError(f"size must be a number with K, M or G, not {self.size!r}")
        if isinstance(self.floor, float) and not 0 <= self.floor <= 100_000:
            raise ValueError(f"floor must be between 0 and 100000 GB/s, not {self.floor}")


@frozen
class HostProbe:
    """The host probe: the node's size, and what is left of memory, disk and time.

    The local file systems of ``spaces`` (and of the spool's buffer) should have ``min_free_mib``
    left, the 5- and 15-minute load averages not pass ``load`` for each processor. A job should not
    leave more than the share ``memory_left`` of memory in use, a process not be stuck in the kernel
    for ``blocked`` seconds, a processor not be slowed by heat for the share ``throttled`` of the
    time. ``clock``: must the kernel's clock be synchronised (``as_before``: once it was), and
    be off by at most ``max_clock_offset`` seconds? The kernel's files are read below ``root``.
    """

    hooks: tuple[Hook, ...] = ALL_HOOKS
    deadline: float = 5.0
    spaces: tuple[Path, ...] = (Path("/tmp"), Path("/var/spool"))
    min_free_mib: int = 1024
    load: float = 4.0
    memory_left: float = 0.10
    blocked: float = 120.0
    throttled: float = 0.10
    clock: Literal["any", "as_before", "required"] = "as_before"
    max_clock_offset: float = 0.1
    root: Path = Path("/")

    def __post_init__(self) -> None:
        for name in ("memory_left", "throttled"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be more than 0 and at most 1")
        for name in ("min_free_mib", "load", "blocked", "max_clock_offset"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")


@frozen
class SiteProbes:
    """The site's own probes: every executable in the folder ``path``, each for ``deadline`` s."""

    hooks: tuple[Hook, ...] = ALL_HOOKS
    deadline: float = 5.0
    path: Path = Path("/etc/slurm/probes.d")


@frozen
class Probes:
    """One section for each probe."""

    site: SiteProbes = field(default_factory=SiteProbes)

    nvml: NvmlProbe = field(default_factory=NvmlProbe)
    kernel_log: KernelLogProbe = field(default_factory=KernelLogProbe)
    joblog: JoblogProbe = field(default_factory=JoblogProbe)
    checkpoint: CheckpointProbe = field(default_factory=CheckpointProbe)
    activity: ActivityProbe = field(default_factory=ActivityProbe)
    hang_evidence: HangEvidenceProbe = field(default_factory=HangEvidenceProbe)
    storage: StorageProbe = field(default_factory=StorageProbe)
    processes: ProcessesProbe = field(default_factory=ProcessesProbe)
    fabric: FabricProbe = field(default_factory=FabricProbe)
    nccl: NcclProbe = field(default_factory=NcclProbe)
    host: HostProbe = field(default_factory=HostProbe)
