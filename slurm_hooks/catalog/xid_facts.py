"""From the NVIDIA driver's lines to facts: which finding each becomes, and which belong together.

The rules across lines hold within one look: a memory error that the driver says it contained, a
recovery action that it names afterwards, a link that went down because its GPU died.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from slurm_hooks.catalog import xid
from slurm_hooks.catalog.kernel_fact import Fact
from slurm_hooks.catalog.kernel_line import KernelLine

DRIVER_PREFIXES = ("NVRM:", "nvidia-nvswitch")
"""How each of the lines read here begins. Text in a line's middle may be a process's name, which
its user chose."""

_GONE_LINES = 3
"""The driver says in three lines that a GPU is gone: address, PCI ID, ``fallen off the bus``."""

_SAME_EVENT_SECONDS = 12.0
"""A link that an NVSwitch loses (20034) within this time of a GPU's Xid 79 went with that GPU."""

_RECOVERY = {
    "none": None,
    "gpu reset required": ("gpu.recovery_action", "fatal", "reset_gpu"),
    "node reboot required": ("gpu.recovery_action", "fatal", "reset_node"),
    "drain p2p": ("gpu.drain_p2p", None, None),
    "drain and reset": ("gpu.recovery_action", "fatal", "reset_gpu"),
    "recover imex domain": ("gpu.recover_imex_domain", None, None),
}
"""Xid 154's words (gpu.c of NVIDIA's open driver 595.45.04): code, and where the code's own do not
hold, severity and what mends it."""

_UNKNOWN_RECOVERY = ("gpu.recovery_action", "fault", "contact_support")

_UNCONTAINED = frozenset({"64", "95", "140", "172"})

_NOT_FOR_RECOVERY = frozenset(
    {"gpu.recovery_action", "gpu.application_fault", "gpu.xid_cascade", "gpu.xid_information"}
)
"""Codes that keep their own resolution whatever the driver wants done with the GPU."""


def driver_facts(lines: Iterable[KernelLine]) -> list[Fact]:
    """Return what the NVIDIA driver's lines say, the rules across lines applied."""
    facts: list[Fact] = []
    uuids: dict[str, str] = {}
    opened: str | None = None
    since_opened = 0
    for whole in lines:
        # dmesg indents the further lines of one message.
        if not whole.text.lstrip().startswith(DRIVER_PREFIXES):
            continue
        for text in whole.text.splitlines():
            line = replace(whole, text=text)
            named = xid.decode_uuid(text)
            if named:
                uuids[named[0]] = named[1]
            since_opened += 1
            if xid.opens_gone(text):
                opened, since_opened = xid.opens_gone(text), 1
            gone = xid.decode_gone(text)
            if xid.closes_gone(text) and opened and since_opened <= _GONE_LINES:
                gone, opened = opened, None
            if gone:
                facts.append(_gpu_fact("gpu.fell_off_bus", line, gone, tag="79"))
            event = xid.decode_xid(text)
            if event:
                facts += xid_fact(event, line)
            switch_event = xid.decode_sxid(text)
            if switch_event:
                facts.append(sxid_fact(switch_event, line))
    return [_with_uuid(fact, uuids) for fact in _together(facts)]


def xid_fact(event: xid.XidEvent, line: KernelLine) -> list[Fact]:
    """Return the fact of one Xid; none where the driver says that there is nothing to do."""
    if event.xid == 154:
        return _recovery_fact(event, line)
    known = xid.xids().get(event.xid)
    code = known.code if known else "gpu.xid_unknown"
    resolution = known.resolution if known else None
    meaning = known.meaning if known else "not in the catalogue, so not known to be harmless"
    about = {}
    if event.nvlink:
        about = {"link": event.nvlink.link} if event.nvlink.link is not None else {}
        code, resolution = _nvlink(event.nvlink)
    elif 144 <= event.xid <= 150:
        code, resolution = "gpu.xid_unknown", None
    elif event.xid == 31 and "UNRECOGNIZED_CLIENT" in event.text:
        code, resolution = "gpu.hardware_suspect", "reset_node"
    if code == "gpu.application_fault" and event.pid is not None:
        about["pid"] = event.pid
    if event.caused_by is not None:
        meaning += f", caused by Xid {event.caused_by}"
    return [
        _gpu_fact(
            code,
            line,
            event.pci,
            tag=str(event.xid),
            resolution=resolution,
            meaning=meaning,
            **about,
        )
    ]


def sxid_fact(event: xid.SxidEvent, line: KernelLine) -> Fact:
    """Return the fact of one SXid. The printed word decides; without one, the table's always."""
    fatal = event.severity == "fatal" or (
        event.severity is None and event.sxid in xid.always_fatal_sxids()
    )
    return Fact(
        "nvswitch.fatal_error" if fatal else "nvswitch.nonfatal_error",
        line,
        tag=str(event.sxid),
        about={"pci": event.pci, **({"link": event.link} if event.link is not None else {})},
        details={
            "switch": event.switch,
            "sxid": event.sxid,
            "meaning": xid.sxid_names().get(event.sxid, event.text[:80] or "not in the catalogue"),
        },
    )


def _nvlink(detail: xid.NvlinkDetail) -> tuple[str, str | None]:
    if detail.severity == "nonfatal":
        return "gpu.nvlink_nonfatal", detail.resolution
    if detail.peer_is_source:
        return "gpu.nvlink_peer_error", None
    return "gpu.nvlink_error", detail.resolution if detail.resolution != "none" else None


def _recovery_fact(event: xid.XidEvent, line: KernelLine) -> list[Fact]:
    words = event.recovery or "not readable"
    asked = _RECOVERY.get(words.lower(), _UNKNOWN_RECOVERY)
    if asked is None:
        return []
    code, severity, resolution = asked
    fact = _gpu_fact(code, line, event.pci, tag=words, resolution=resolution)
    return [replace(fact, severity=severity, details={**fact.details, "action": words})]


def _gpu_fact(
    code: str,
    line: KernelLine,
    pci: str,
    *,
    tag: str,
    resolution: str | None = None,
    meaning: str = "",
    **about: int,
) -> Fact:
    return Fact(
        code,
        line,
        tag=tag,
        resolution=resolution,
        about={"pci": pci, **about},
        details={"gpu": pci, "label": f"GPU {pci}", "xid": tag, "meaning": meaning},
    )


@dataclass
class _Gpu:
    """What one look saw of one GPU or switch: the first fact of each tag, the last recovery."""

    first: dict[str, Fact] = field(default_factory=dict)
    recovery: Fact | None = None


def _together(facts: Sequence[Fact]) -> list[Fact]:
    """The same facts; those that are a detail of another count as that one's evidence."""
    seen: dict[str | None, _Gpu] = {}
    for fact in facts:
        gpu = seen.setdefault(fact.pci, _Gpu())
        if fact.tag not in gpu.first or _has_number(fact) > _has_number(gpu.first[fact.tag]):
            gpu.first[fact.tag] = fact
        if fact.code == "gpu.recovery_action":
            gpu.recovery = fact
    lost = [gpu.first["79"] for gpu in seen.values() if "79" in gpu.first]
    joined = []
    for fact in facts:
        gpu = seen[fact.pci]
        main = _detail_of(fact, gpu) or _lost_link_of(fact, lost)
        one = replace(main, line=fact.line, times=0) if main else fact
        joined.append(_as_recovery_says(one, seen[one.pci].recovery))
    return joined


def _has_number(fact: Fact) -> bool:
    return "Xid" in fact.line.text


def _detail_of(fact: Fact, gpu: _Gpu) -> Fact | None:
    """The fact of the same GPU that already says what this one says, if there is one."""
    if fact.tag == "79":
        return gpu.first["79"] if _has_number(gpu.first["79"]) > _has_number(fact) else None
    if fact.tag not in ("48", "171"):
        return None
    contained = "94" in gpu.first and not gpu.first.keys() & _UNCONTAINED
    # 171 only adds where the memory error of 48 was; a contained error prints 48 besides its 94.
    wanted = "94" if contained else "48"
    return gpu.first.get(wanted) if fact.tag != wanted else None


def _lost_link_of(fact: Fact, lost: Sequence[Fact]) -> Fact | None:
    if fact.code != "nvswitch.fatal_error" or fact.tag != "20034":
        return None
    for gpu in lost:
        began, now = gpu.line.seconds, fact.line.seconds
        if began is None or now is None or 0 <= now - began <= _SAME_EVENT_SECONDS:
            return gpu
    return None


def _as_recovery_says(fact: Fact, recovery: Fact | None) -> Fact:
    """A hardware fact takes the resolution that the driver itself named last for that GPU."""
    if recovery is None or fact.code in _NOT_FOR_RECOVERY:
        return fact
    return replace(fact, resolution=recovery.resolution)


def _with_uuid(fact: Fact, uuids: dict[str, str]) -> Fact:
    uuid = uuids.get(fact.pci or "")
    return replace(fact, about={**fact.about, "uuid": uuid}) if uuid else fact
