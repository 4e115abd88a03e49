"""From an incident's evidence to its cause, and to the resources that it names.

Pure. The order of precedence is the operators': the scheduler's own word that somebody ended the
job; then what a node's kernel, driver or probes say of its hardware; then the job's own log; then
the kernel's word on the program; and ``unknown`` where nothing speaks. A victim's line is never a
cause, a node outside the attempt never implicated, and nobody is implicated for being silent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from recovery.decision import Cause, Confidence, Implicated
from recovery.incident import Incident, LogVerdict, Sighting, resolution_of
from recovery.slurm.base import Job
from recovery.stalls import Hang, Slowdown
from slurm_hooks.record import SEVERITIES

STOP_REQUESTED = 93
"""Exit code by which a program asks not to be run again (convention of this toolkit)."""

_SCHEDULER_STATES = {
    "CANCELLED": ("scheduler.cancelled", "the job was cancelled"),
    "PREEMPTED": ("scheduler.preempted", "the job was preempted"),
    "TIMEOUT": ("scheduler.time_limit", "the job reached its time limit"),
    "DEADLINE": ("scheduler.deadline", "the job reached its deadline"),
    "REVOKED": ("scheduler.cancelled", "the job runs on another cluster of the federation"),
}

_SLOWING = (
    "gpu.hardware_slowdown",
    "gpu.nvlink",
    "gpu.pcie",
    "gpu.power_",
    "gpu.software_thermal_slowdown",
    "gpu.thermal_slowdown",
    "gpu.too_hot",
    "fabric.",
    "host.cpu_throttled",
)
"""Codes of clocks, links and ports: telemetry by which a slow node differs from its peers."""

# Ranked: an earlier class explains a later one where both are seen on the attempt's nodes.
_NODE_CLASSES = ("hardware", "network.fabric", "node.software", "storage")


def of(incident: Incident) -> Cause:
    """Return the cause that the incident's evidence establishes, suggests, or does not tell."""
    if incident.known_cause is not None:
        return incident.known_cause
    if incident.slowdown:
        return _slowed(incident, incident.slowdown)
    job = incident.job
    if job and not incident.hang and (not incident.requeued or job.held_by_expedite):
        said = _scheduler_said(job)
        if said:
            return said
    hardware = _by_nodes(incident, ("hardware",))
    if hardware:
        return hardware
    if incident.job is None:
        return _by_nodes(incident, _NODE_CLASSES[1:]) or _unknown("no fault that names a resource")
    if incident.job.state in ("NODE_FAIL", "BOOT_FAIL") or (incident.requeued and incident.lost):
        return _lost_nodes(incident)
    others = _by_nodes(incident, _NODE_CLASSES[1:])
    if others:
        return others
    if incident.hang:
        return _hung(incident.hang)
    if incident.log and incident.log.fault_class not in ("unknown", "cascade", "none"):
        return _by_log(incident, incident.log)
    return _by_program_evidence(incident) or _unexplained(incident)


def with_other_users(
    cause: Cause, uid: int | None, earlier: Mapping[tuple[str, str], Set[int]], enough: int
) -> Cause:
    """Return the cause, or the GPU where programs of so many users have failed of it alike.

    One program's illegal access is its own mistake; the same GPU does not find mistakes in the
    programs of ``enough`` users. ``earlier`` are the uids whose programs failed of a node's GPU
    (``Implicated.device``).
    """
    for item in cause.implicated:
        if not _within(cause.fault_class, "program") or not item.device or uid is None:
            continue
        users = {*earlier.get((item.node, item.device), ()), uid}
        if len(users) >= enough:
            return Cause(
                "hardware.gpu",
                "established",
                f"{item.node}: {item.why}, as in jobs of {len(users)} users: it is the GPU",
                (replace(item, resolution="contact_support"),),
                f"hardware.gpu/{item.code}",
            )
    return cause


def _scheduler_said(job: Job) -> Cause | None:
    if job.state in _SCHEDULER_STATES:
        fault_class, summary = _SCHEDULER_STATES[job.state]
        return Cause(fault_class, "established", summary, fingerprint=fault_class)
    if job.exit_code == STOP_REQUESTED:
        summary = f"the program exited {STOP_REQUESTED}: it asks not to be run again"
        fault_class = "program.stop_requested"
        return Cause(fault_class, "established", summary, fingerprint=fault_class)
    return None


def _by_nodes(incident: Incident, classes: Sequence[str]) -> Cause | None:
    """A fault that a node reports of itself, gravest class and severity first."""
    grave = [s for s in incident.sightings if _is_own_fault(s)]
    for wanted in classes:
        seen = [s for s in grave if _within(s.fault_class, wanted)]
        if not seen:
            continue
        # A contained error beside an uncontained one is the smaller part of the same story.
        first = min(seen, key=_order)
        same = [s for s in seen if s.fault_class == first.fault_class]
        implicated = _implicated(same)
        summary = f"{first.node}: {first.finding.summary}"
        if len({item.node for item in implicated}) > 1:
            summary += f" (and {len({item.node for item in implicated}) - 1} more nodes)"
        fingerprint = f"{first.fault_class}/{first.finding.code}"
        return Cause(first.fault_class, "established", summary, implicated, fingerprint)
    return None


def _is_own_fault(sighting: Sighting) -> bool:
    """At least a fault, and not the word of a text that the user can write."""
    severe = SEVERITIES.index(sighting.finding.severity) >= SEVERITIES.index("fault")
    return severe and not sighting.finding.code.startswith("log.")


def _order(sighting: Sighting) -> tuple[int, int, str]:
    """The gravest first; then the plainer class, which explains the finer one; then the earlier."""
    severity = SEVERITIES.index(sighting.finding.severity)
    return (-severity, sighting.fault_class.count("."), sighting.time)


def _implicated(sightings: Iterable[Sighting]) -> tuple[Implicated, ...]:
    found: dict[tuple[object, ...], Implicated] = {}
    for sighting in sightings:
        finding = sighting.finding
        source = finding.evidence[0].source if finding.evidence else sighting.hook
        found.setdefault(
            (sighting.node, finding.gpu, finding.pci, finding.code),
            Implicated(
                sighting.node,
                finding.summary,
                source,
                finding.code,
                finding.gpu,
                resolution=resolution_of(finding),
                uuid=finding.uuid or "",
                pci=finding.pci or "",
                boot_id=sighting.boot_id,
            ),
        )
    return tuple(found.values())


def _lost_nodes(incident: Incident) -> Cause:
    """Slurm ended the job for a node it lost: the one it calls down, else the only silent one.

    Silence alone establishes nothing: that node is avoided, and never drained for it.
    """
    lost = incident.lost or (incident.silent if len(incident.silent) == 1 else ())
    why = "Slurm lost this node while the job ran on it"
    return Cause(
        "node.lost",
        "established" if incident.lost else "probable",
        f"Slurm lost {', '.join(lost) or 'a node'} while the job ran",
        tuple(Implicated(node, why, "slurm", "node.lost") for node in lost),
        "node.lost",
    )


def _by_log(incident: Incident, log: LogVerdict) -> Cause:
    """The program's own word. It may name nodes of its own job, to be excluded and watched."""
    confidence: Confidence = "established" if log.confidence == "established" else "probable"
    if _within(log.fault_class, "hardware"):
        confidence = "probable"  # hardware is established by the machine, not by its victim
    implicated = tuple(
        Implicated(
            str(item["node"]),
            str(item.get("why", ""))[:200],
            "log",
            f"log.{log.fault_class}",
            item["gpu"] if isinstance(item.get("gpu"), int) else None,
            item["rank"] if isinstance(item.get("rank"), int) else None,
        )
        for item in log.implicated
        if item.get("node") in incident.nodes
    )
    summary = f"the job's log says: {log.text[:200]}" if log.text else f"its log: {log.fault_class}"
    fingerprint = f"{log.fault_class}/{_shape(log.text)}"
    return Cause(log.fault_class, confidence, summary, implicated, fingerprint)


def _hung(hang: Hang) -> Cause:
    """Established where a process or a rank is named that the others wait for."""
    confidence: Confidence = "established" if hang.implicated else "probable"
    return Cause("hang", confidence, hang.summary, hang.implicated, "hang")


def _slowed(incident: Incident, slowdown: Slowdown) -> Cause:
    """A running job that is slow, with the node that differs from its peers where one does.

    A node differs by telemetry that it shows and fewer than half of the job's nodes do.
    """
    telling = [s for s in incident.sightings if s.finding.code.startswith(_SLOWING)]
    showing: dict[str, set[str]] = {}
    for sighting in telling:
        showing.setdefault(sighting.finding.code, set()).add(sighting.node)
    differing = [s for s in telling if 2 * len(showing[s.finding.code]) < len(incident.nodes)]
    implicated = _implicated(differing)
    summary = slowdown.summary
    if implicated:
        summary += f"; {implicated[0].node} differs from its peers: {implicated[0].why}"
    return Cause("slowdown", "probable", summary, implicated, "slowdown")


def _by_program_evidence(incident: Incident) -> Cause | None:
    """What the kernel or Slurm say of the program itself: out of memory, an application's Xid."""
    job = incident.job
    for sighting in incident.sightings:
        own = sighting.fault_class.startswith("program.")
        if own and not sighting.finding.code.startswith(("log.", "checkpoint.")):
            summary = f"{sighting.node}: {sighting.finding.summary}"
            fingerprint = f"{sighting.fault_class}/{sighting.finding.code}"
            at_gpu = sighting.finding.gpu is not None or sighting.finding.pci
            where = _implicated([sighting]) if at_gpu else ()
            return Cause(sighting.fault_class, "probable", summary, where, fingerprint)
    if job is not None and job.state == "OUT_OF_MEMORY":
        summary = "Slurm ended the job for its memory use"
        return Cause("program.host_oom", "established", summary, fingerprint="program.host_oom")
    return None


def _unexplained(incident: Incident) -> Cause:
    job = incident.job
    ended = f"exit {job.exit_code}:{job.signal}" if job else "no exit code"
    heard = len(incident.reported)
    summary = f"{ended}; {heard} of {len(incident.nodes)} nodes reported, none saw a fault"
    return _unknown(summary, f"unknown/{ended}")


def _unknown(summary: str, fingerprint: str = "unknown") -> Cause:
    return Cause("unknown", "unknown", summary, fingerprint=fingerprint)


def _within(fault_class: str, above: str) -> bool:
    return fault_class == above or fault_class.startswith(f"{above}.")


def _shape(text: str) -> str:
    """A line without what differs between two attempts: numbers, addresses, paths, hosts."""
    line = re.sub(r"0x[0-9a-fA-F]+|\d+", "#", text)
    return re.sub(r"/\S+", "/…", line)[:120]
