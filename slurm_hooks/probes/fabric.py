"""The fabric probe: are the ports to the other nodes up, as fast as they should be, and clean?

Judges what ``fabric_reading`` reads of InfiniBand and RoCE ports, and whether the services run that
an NVSwitch or an IMEX domain needs. A port that was never active is no fault (many adapters have
one without a cable), and error counters count as growth since the last look: what they show was
often there before. So a healthy node is silent, and so is one that was just installed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from slurm_hooks import catalog
from slurm_hooks.context import HookContext, boot_id
from slurm_hooks.frozen import frozen
from slurm_hooks.probe_config import LINK_ERRORS_PER_MINUTE, FabricProbe
from slurm_hooks.probes import Look, Probe, Seen, Skipped
from slurm_hooks.probes.fabric_reading import (
    Port,
    has_enabled_imex,
    has_nvswitches,
    read_ports,
    service_runs,
)
from slurm_hooks.record import Evidence, Finding

CODES = (
    "fabric.device_missing",
    "fabric.link_down",
    "fabric.port_down",
    "fabric.port_errors",
    "fabric.port_not_active",
    "fabric.port_slow",
    "fabric.service_down",
    "fabric.transport_errors",
)

TRANSPORT_ERRORS_PER_MINUTE = {
    "local_ack_timeout_err": 60.0,
    "req_transport_retries_exceeded": 0.0,
    "rnr_nak_retry_err": 0.0,
}
"""Growth that tells of a peer or path which stopped answering: every killed job leaves some, so it
is told only of a job that failed."""

_LINK_DOWNED = "link_downed"

_LEAST_PEERS = 3
"""Ports of one model that must agree on a faster rate before one is called slow."""

_MAX_REMEMBERED = 512


@frozen
class _Memory:
    """What earlier looks left: ports once active, and, of this boot, counters and first sights.

    Times are seconds since boot. ``active`` has the names of ports by place.
    """

    now: float
    boot: str
    active: Mapping[str, str]
    counters: Mapping[str, Mapping[str, int]]
    since: Mapping[str, float]
    counted: float | None

    @classmethod
    def recall(cls, state: Mapping[str, Any]) -> _Memory:
        """Return what a state holds; an unusable one is no memory."""
        now, boot = time.clock_gettime(time.CLOCK_BOOTTIME), boot_id()
        try:
            active = {str(place): str(name) for place, name in state.get("active", {}).items()}
            if state.get("boot") != boot:
                return cls(now, boot, active, {}, {}, None)
            counters = {
                str(place): {str(name): int(value) for name, value in values.items()}
                for place, values in state.get("counters", {}).items()
            }
            since = {str(what): float(seen) for what, seen in state.get("since", {}).items()}
            counted = state.get("counted")
            return cls(now, boot, active, counters, since, None if not counted else float(counted))
        except (AttributeError, TypeError, ValueError):
            return cls(now, boot, {}, {}, {}, None)

    def grown(self, port: Port, counter: str) -> int:
        """How much a counter has grown since the last count; one that went back was reset."""
        before = self.counters.get(port.place, {}).get(counter)
        value = port.counters[counter]
        if before is None:
            return 0
        return value - before if value >= before else value

    @property
    def minutes(self) -> float:
        """Minutes since the last count, never less than one: a burst is not a rate."""
        return max(1.0, (self.now - self.counted) / 60) if self.counted is not None else 1.0


def look(given: Look) -> Seen:
    """Look at every port, and at the services.

    Raises:
        Skipped: there is no RDMA device here, none is wanted or remembered, and no NVSwitch.
    """
    config, memory = given.config.probes.fabric, _Memory.recall(given.state)
    counts = given.context.hook != "prolog"  # reading 8 ports' counters asks the firmware 80 times
    counters = (*LINK_ERRORS_PER_MINUTE, *TRANSPORT_ERRORS_PER_MINUTE, _LINK_DOWNED)
    ports = read_ports(config.root, config.ignore, counters if counts else ())
    services = _services(config)
    if not (ports or services or config.devices or memory.active):
        raise Skipped("no InfiniBand or RoCE device and no NVSwitch here")

    held: dict[str, float] = {}
    findings = [
        *_missing(ports, config, memory),
        *_states(ports, config, memory, held),
        *_rates(ports, config, memory),
        *_down(services, config, memory, held),
    ]
    if counts:
        findings += _counters(ports, config, memory, given.context)
    now_active = {port.place: port.name for port in ports if port.is_active}
    state = {
        "boot": memory.boot,
        "active": dict(list({**memory.active, **now_active}.items())[-_MAX_REMEMBERED:]),
        "since": held,
        "counters": {port.place: dict(port.counters) for port in ports}
        if counts
        else memory.counters,
        "counted": memory.now if counts else memory.counted,
    }
    notes = {port.name: f"{port.state}, {port.physical}, {port.rate} Gb/s" for port in ports}
    return Seen(tuple(findings), state, {"ports": notes, "services": services})


def _services(config: FabricProbe) -> dict[str, bool]:
    """The services that this node needs, and whether they run; not those that cannot be told."""
    needed = list(config.services)
    if has_nvswitches(config.root):
        needed.append("nvidia-fabricmanager")
    if has_enabled_imex(config.root):
        needed.append("nvidia-imex")
    answers = {name: service_runs(config.root, name) for name in dict.fromkeys(needed)}
    return {name: runs for name, runs in answers.items() if runs is not None}


def _is_wanted(port: Port, config: FabricProbe) -> bool:
    return port.device in config.devices or port.name in config.devices


def _missing(ports: Sequence[Port], config: FabricProbe, memory: _Memory) -> Iterator[Finding]:
    """Devices configured and not there; a warning where one was only seen earlier."""
    there = {port.device for port in ports} | {port.name for port in ports}
    for wanted in config.devices:
        if wanted not in there:
            seen = f"{wanted} is configured; there are: {', '.join(sorted(there)) or 'none'}"
            yield _finding("fabric.device_missing", memory, seen, port=wanted)
    places = {port.place for port in ports}
    for place, name in memory.active.items():
        device = name.partition("/")[0]
        if place in places or device in config.devices or name in config.devices:
            continue
        if not _is_ignored(device, config):
            seen = f"{name} at {place} was active at an earlier look and is not there now"
            yield _finding("fabric.device_missing", memory, seen, severity="warning", port=name)


def _is_ignored(device: str, config: FabricProbe) -> bool:
    return any(fnmatchcase(device, pattern) for pattern in config.ignore)


def _states(
    ports: Sequence[Port], config: FabricProbe, memory: _Memory, held: dict[str, float]
) -> Iterator[Finding]:
    """Ports that should be active and are not.

    One with a link waits for its subnet manager, as all do for a moment after a reset.
    """
    for port in ports:
        if port.is_active or not (_is_wanted(port, config) or port.place in memory.active):
            continue
        seen = f"{port.name}: state {port.state}, physical state {port.physical}"
        about: dict[str, Any] = {"port": port.name, "pci": port.pci}
        if not port.has_link or port.state.endswith("DOWN"):
            yield _finding("fabric.port_down", memory, seen, **about)
            continue
        first = memory.since.get(port.place, memory.now)
        held[port.place] = first
        severity = "fault" if memory.now - first >= config.hold else "warning"
        details = {"state": port.state}
        yield _finding(
            "fabric.port_not_active", memory, seen, severity=severity, details=details, **about
        )


def _rates(ports: Sequence[Port], config: FabricProbe, memory: _Memory) -> Iterator[Finding]:
    """Ports slower than configured, or the only one of its model that is slower than the others.

    Two slower ones may be meant so: storage is often on adapters of the same model.
    """
    active = [port for port in ports if port.is_active and port.rate]
    for port in active:
        same = [other for other in active if (other.model, other.layer) == (port.model, port.layer)]
        rates = Counter(other.rate for other in same)
        usual, number = rates.most_common(1)[0]
        wanted = config.rate if config.rate and _is_wanted(port, config) else None
        if wanted and (port.rate or 0) < wanted:
            severity, most = "fault", wanted
            seen = f"{port.name}: {port.rate:g} Gb/s, configured are {wanted:g}"
        elif number >= _LEAST_PEERS and len(same) - number == 1 and (port.rate or 0) < (usual or 0):
            severity, most = "warning", usual or 0.0
            seen = f"{port.name}: {port.rate:g} Gb/s, {number} others of its model have {usual:g}"
        else:
            continue
        details = {"rate": f"{port.rate:g}", "most": f"{most:g}"}
        yield _finding(
            "fabric.port_slow",
            memory,
            seen,
            severity=severity,
            details=details,
            port=port.name,
            pci=port.pci,
        )


def _down(
    services: Mapping[str, bool], config: FabricProbe, memory: _Memory, held: dict[str, float]
) -> Iterator[Finding]:
    """Services that are needed and do not run; a fault once that has lasted: they start late."""
    for service, runs in services.items():
        if runs:
            continue
        first = memory.since.get(service, memory.now)
        held[service] = first
        yield _finding(
            "fabric.service_down",
            memory,
            f"{service}.service has no process",
            severity="fault" if memory.now - first >= config.hold else "warning",
            resolution="restart_imex" if service == "nvidia-imex" else None,
            details={"service": service},
        )


def _counters(
    ports: Sequence[Port], config: FabricProbe, memory: _Memory, context: HookContext
) -> Iterator[Finding]:
    job = context.job
    failed = job if job and context.hook == "epilog" and job.exit not in (None, "0:0") else None
    for port in ports:
        about: dict[str, Any] = {"port": port.name, "pci": port.pci}
        if port.counters.get(_LINK_DOWNED) is not None:
            downed = memory.grown(port, _LINK_DOWNED)
            if downed:
                seen = f"{port.name}: {_LINK_DOWNED} +{downed} since the last look"
                key = f"{_LINK_DOWNED}:{port.counters[_LINK_DOWNED]}"
                yield _finding("fabric.link_down", memory, seen, key=key, count=downed, **about)
        limits = {**LINK_ERRORS_PER_MINUTE, **config.errors_per_minute}
        errors = _too_many(port, memory, limits)
        if errors:
            yield _finding(
                "fabric.port_errors",
                memory,
                f"{port.name}, in {memory.minutes:.1f} minutes: {errors}",
                details={"errors": errors},
                **about,
            )
        lost = _too_many(port, memory, TRANSPORT_ERRORS_PER_MINUTE) if failed else ""
        if failed and lost:
            yield _finding(
                "fabric.transport_errors",
                memory,
                f"{port.name}, in {memory.minutes:.1f} minutes: {lost}",
                details={"errors": lost},
                job_id=failed.id,
                **about,
            )


def _too_many(port: Port, memory: _Memory, limits: Mapping[str, float]) -> str:
    """The counters that grew by more than ``limits`` a minute, as ``symbol_error +700``."""
    grown = {name: memory.grown(port, name) for name in limits if name in port.counters}
    return ", ".join(
        f"{name} +{more}" for name, more in grown.items() if more > limits[name] * memory.minutes
    )


def _finding(
    code: str,
    memory: _Memory,
    seen: str,
    *,
    key: str | None = None,
    severity: str | None = None,
    resolution: str | None = None,
    details: Mapping[str, Any] | None = None,
    **about: Any,
) -> Finding:
    evidence = Evidence("sysfs", seen, key=f"{memory.boot}:{about.get('port')}:{key or code}")
    return catalog.finding(
        code,
        evidence=(evidence,),
        severity=severity,
        resolution=resolution,
        details=details,
        **about,
    )


PROBE = Probe(
    name="fabric",
    look=look,
    needs="InfiniBand or RoCE devices in /sys/class/infiniband, or NVSwitches",
    cost="milliseconds; reads error counters in epilogs and health checks only",
    codes=CODES,
)
