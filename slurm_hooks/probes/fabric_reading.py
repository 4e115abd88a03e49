"""What the kernel tells of this node's RDMA ports and of the services that an NVSwitch needs.

Reads sysfs below a root folder and judges nothing. Source of names and formats: Linux kernel,
Documentation/ABI/stable/sysfs-class-infiniband; InfiniBand and RoCE have the same files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from fnmatch import fnmatchcase
from pathlib import Path

from slurm_hooks.frozen import frozen
from slurm_hooks.probes.kernel_files import names, number, text

_MAX_DEVICES = 256
_MAX_PORTS = 8

ACTIVE, LINK_UP = 4, 5
"""Numbers of ``state`` ("4: ACTIVE") and ``phys_state`` ("5: LinkUp")."""

_CGROUPS = ("sys/fs/cgroup/system.slice", "sys/fs/cgroup/systemd/system.slice")
"""Where systemd keeps its services' cgroups: unified, and beside version 1."""


@frozen
class Port:
    """One port as it is now. ``place`` stays the same when the kernel names devices anew.

    ``state`` and ``physical`` are sysfs' own words (``4: ACTIVE``), ``rate`` is in Gb/s, and
    ``counters`` has the values of those asked for that this driver offers.
    """

    device: str
    number: int
    pci: str | None
    model: str
    layer: str
    state: str
    physical: str
    rate: float | None
    counters: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The port as commands name it: ``mlx5_0/1``."""
        return f"{self.device}/{self.number}"

    @property
    def place(self) -> str:
        """The port by its PCI address where it has one."""
        return f"{self.pci or self.device}/{self.number}"

    @property
    def is_active(self) -> bool:
        """Whether the port carries traffic."""
        return _code(self.state) == ACTIVE

    @property
    def has_link(self) -> bool:
        """Whether the cable's other end answers; some drivers tell no physical state."""
        return _code(self.physical) in (LINK_UP, None)


def read_ports(root: Path, ignored: Iterable[str], counters: Iterable[str]) -> list[Port]:
    """Return the ports of this node's own adapters, by name.

    Devices whose name matches one of ``ignored`` (shell patterns) are left out, and so are
    SR-IOV's virtual functions: they come and go with whom they are lent to.
    """
    folder = str(root / "sys/class/infiniband")
    wanted, patterns = tuple(counters), tuple(ignored)
    ports = []
    for device in names(folder)[:_MAX_DEVICES]:
        here = f"{folder}/{device}"
        if any(fnmatchcase(device, pattern) for pattern in patterns):
            continue
        if names(f"{here}/device/physfn"):
            continue
        pci = _pci(Path(here) / "device")
        model = text(f"{here}/hca_type") or text(f"{here}/board_id") or ""
        for port in names(f"{here}/ports")[:_MAX_PORTS]:
            if port.isdigit():
                ports.append(_port(f"{here}/ports/{port}", device, int(port), pci, model, wanted))
    return ports


def _port(
    here: str, device: str, port: int, pci: str | None, model: str, counters: tuple[str, ...]
) -> Port:
    found = {}
    for counter in counters:
        value = number(f"{here}/counters/{counter}")
        if value is None:
            value = number(f"{here}/hw_counters/{counter}")
        if value is not None:
            found[counter] = value
    rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec", text(f"{here}/rate") or "")
    return Port(
        device=device,
        number=port,
        pci=pci,
        model=model,
        layer=text(f"{here}/link_layer") or "unknown",
        state=text(f"{here}/state") or "unknown",
        physical=text(f"{here}/phys_state") or "unknown",
        rate=float(rate.group(1)) if rate else None,
        counters=found,
    )


def _pci(link: Path) -> str | None:
    """The PCI address that a device's link ends in."""
    try:
        place = link.resolve().name
    except (OSError, RuntimeError):
        return None
    return place if re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", place) else None


def _code(words: str) -> int | None:
    code = words.partition(":")[0]
    return int(code) if code.isdigit() else None


def has_nvswitches(root: Path) -> bool:
    """Whether the driver found NVSwitches here, which need the fabric manager."""
    return any(re.fullmatch(r"nvidia-nvswitch\d+", name) for name in names(str(root / "dev")))


def has_enabled_imex(root: Path) -> bool:
    """Whether this node has IMEX channels, and its IMEX service is to be started with the node.

    Sites that start it for each job have it disabled; then it is theirs to watch.
    """
    wants = names(str(root / "etc/systemd/system/multi-user.target.wants"))
    return "nvidia-imex.service" in wants and bool(
        names(str(root / "dev/nvidia-caps-imex-channels"))
    )


def service_runs(root: Path, service: str) -> bool | None:
    """Whether systemd has processes of ``service`` (no suffix) running; None where none can tell.

    Looks for the service's cgroup, which goes when its last process has: no command is run. In a
    container the services are the host's and cannot be seen.
    """
    if text(str(root / "proc/1/comm")) != "systemd":
        return None
    slices = [folder for folder in _CGROUPS if names(str(root / folder))]
    if not slices:
        return None
    return any(text(str(root / folder / f"{service}.service/cgroup.procs")) for folder in slices)
