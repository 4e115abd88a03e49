"""Read the NVIDIA driver's own error lines: Xid (a GPU), SXid (an NVSwitch), a GPU that is gone.

    >>> event = decode_xid("NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name=sh, GPU is gone")
    >>> event.xid, event.pci, event.pid, event.text
    (79, '0000:3b:00.0', 7, 'GPU is gone')

Pure functions over one line of any origin (kmsg, dmesg, journal, a job's own output): what stands
in front of ``NVRM:`` is not looked at. Whether the line can be believed is the caller's business,
what the number means is in ``xid.csv``, ``sxid.csv`` and ``nvlink5.csv`` beside this file (facts
of NVIDIA's Xid catalogue and Fabric Manager guide; the words are ours).
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Severity = Literal["fatal", "nonfatal"]

_PCI = r"(?:PCI:)?(?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{1,2}:[0-9a-fA-F]{1,2}(?:\.[0-9a-fA-F])?)"

_XID = re.compile(rf"NVRM: Xid \({_PCI}\): (?P<xid>\d{{1,6}})(?:, ?|$)(?P<rest>.*)", re.DOTALL)

_OWNER = re.compile(
    r"pid='?(?P<pid>\d{1,10}|<unknown>|[^,']{0,32})'?, name=(?P<name>[^,]{0,64})(?:, |$)"
)
"""``pid=7, name=python, ``, or ``pid='<unknown>', name=<unknown>`` where there is no process."""

_CAUSED_BY = re.compile(r"caused by previous Xid (\d{1,6})")

_RECOVERY = re.compile(
    r"recovery action changed from 0x[0-9a-f]+ \(([^)]{0,64})\) to 0x[0-9a-f]+ \(([^)]{0,64})\)",
    re.I,
)

_LINK = re.compile(
    r"(?P<unit>[A-Z][A-Z0-9_/]+)\s+(?P<word>Fatal|Non-?fatal)\s.*?\bLink\s+(?P<link>-?\d{1,3})\s*"
    r"\((?P<intrinfo>0x[0-9a-fA-F]{1,8})(?:\s+(?P<status>0x[0-9a-fA-F]{1,8}))?",
    re.I,
)
"""Xid 144-150: ``NETIR_LINK_EVT  Fatal  XC0 i0 Link 08 (0x004505c6 0x00000000 ...)``."""

_SXID = re.compile(
    rf"nvidia-nvswitch(?P<switch>\d{{1,3}}): SXid \({_PCI}\): (?P<sxid>\d{{1,6}})"
    r"(?:, ?|$)(?P<rest>.*)",
    re.DOTALL,
)
_SXID_DETAIL = re.compile(r"Severity \d+ Engine instance|Data \{")
"""Continuation lines carry the same prefix and number; they are no events of their own."""

_WORD = re.compile(r"\b(Non-?fatal|Fatal)\b", re.I)
_SXID_LINK = re.compile(r"\bLink (\d{1,3})\b")

_GONE = re.compile(rf"NVRM: GPU (?:at )?{_PCI}: GPU has fallen off the bus")
_GONE_OPENS = re.compile(rf"NVRM: The NVIDIA GPU {_PCI}")
_GONE_CLOSES = re.compile(r"fallen off the bus and is not responding to commands")
_UUID = re.compile(rf"NVRM: GPU at {_PCI}: (?P<uuid>GPU-[0-9a-fA-F-]{{8,64}})")

PEER_SUBCODES = range(32, 38)
"""Sub-codes of Xid 149 by which the device at the other end of the link is the source."""


@dataclass(frozen=True)
class NvlinkDetail:
    """What Xid 144-150 say of a link; ``link`` is None where the driver prints -1.

    ``severity`` is the word in the line, which is authoritative. ``resolution`` is the table's
    for this unit, sub-code and status, or None where they are not in it.
    """

    unit: str
    severity: Severity
    link: int | None
    subcode: int
    resolution: str | None

    @property
    def peer_is_source(self) -> bool:
        """Whether the fault lies at the other end of the link."""
        return self.subcode in PEER_SUBCODES


@dataclass(frozen=True)
class XidEvent:
    """One Xid line. ``pid`` and ``name`` are the process the driver blames, where it knows one.

    ``recovery`` holds Xid 154's words (``Node Reboot Required``), ``caused_by`` the Xid that a
    clean-up line (45) names, ``text`` the line's own words after number and process.
    """

    xid: int
    pci: str
    pid: int | None
    name: str | None
    text: str
    caused_by: int | None = None
    recovery: str | None = None
    nvlink: NvlinkDetail | None = None


@dataclass(frozen=True)
class SxidEvent:
    """One SXid line: switch number and address, and the severity word if it has one."""

    sxid: int
    switch: int
    pci: str
    severity: Severity | None
    link: int | None
    text: str


@dataclass(frozen=True)
class XidEntry:
    """One row of ``xid.csv``: the finding code it becomes, what mends it, what it means."""

    xid: int
    mnemonic: str
    code: str
    resolution: str
    meaning: str
    job_action: str
    node_action: str


def decode_xid(text: str) -> XidEvent | None:
    """Return what an Xid line says, or None for any other text.

    Accepts every form drivers have printed: with and without ``PCI:``, function, process.
    """
    match = _XID.search(text)
    if not match:
        return None
    xid, rest = int(match["xid"]), match["rest"]
    pid, name = None, None
    owner = _OWNER.match(rest)
    if owner:
        pid = int(owner["pid"]) if owner["pid"].isdecimal() and owner["pid"].isascii() else None
        name = owner["name"].strip("'") if owner["name"].strip("'") != "<unknown>" else None
        rest = rest[owner.end() :]
    caused_by = _CAUSED_BY.search(rest)
    recovery = _RECOVERY.search(rest) if xid == 154 else None
    return XidEvent(
        xid=xid,
        pci=canonical_pci(match["pci"]),
        pid=pid,
        name=name,
        text=rest.strip(),
        caused_by=int(caused_by[1]) if caused_by else None,
        recovery=recovery[2] if recovery else None,
        nvlink=_decode_nvlink(xid, rest) if 144 <= xid <= 150 else None,
    )


def decode_sxid(text: str) -> SxidEvent | None:
    """Return what an SXid line says; None for other text and for an SXid's continuation lines."""
    match = _SXID.search(text)
    if not match or _SXID_DETAIL.match(match["rest"]):
        return None
    word, link = _WORD.search(match["rest"]), _SXID_LINK.search(match["rest"])
    return SxidEvent(
        sxid=int(match["sxid"]),
        switch=int(match["switch"]),
        pci=canonical_pci(match["pci"]),
        severity=_severity(word[1]) if word else None,
        link=int(link[1]) if link else None,
        text=match["rest"].strip(),
    )


def decode_gone(text: str) -> str | None:
    """Return the address of the GPU that a line without an Xid says has fallen off the bus."""
    match = _GONE.search(text)
    return canonical_pci(match["pci"]) if match else None


def opens_gone(text: str) -> str | None:
    """Return the address in the first of the three lines that say so of a GPU, else None."""
    match = _GONE_OPENS.search(text)
    return canonical_pci(match["pci"]) if match else None


def closes_gone(text: str) -> bool:
    """Whether this is the last of those three lines."""
    return bool(_GONE_CLOSES.search(text))


def decode_uuid(text: str) -> tuple[str, str] | None:
    """Return address and UUID from the line by which the driver introduces a failing GPU."""
    match = _UUID.search(text)
    return (canonical_pci(match["pci"]), match["uuid"]) if match else None


def canonical_pci(text: str) -> str:
    """Return a PCI address as records have it, ``0000:3b:00.0``: the driver often omits ``.0``.

    NVML's eight-digit domain (``00000000:3B:00.0``) becomes the same.
    """
    address, _, function = text.lower().partition(".")
    domain, bus, device = address.split(":")
    return f"{int(domain, 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.{function or '0'}"


@functools.cache
def xids() -> Mapping[int, XidEntry]:
    """Return ``xid.csv`` by number. A number that is not there is unknown, never harmless."""
    entries = (XidEntry(xid=int(row.pop("xid")), **row) for row in _rows("xid.csv"))
    return {entry.xid: entry for entry in entries}


@functools.cache
def always_fatal_sxids() -> frozenset[int]:
    """Return the SXids that are fatal whatever the line says or omits."""
    return frozenset(int(row["sxid"]) for row in _rows("sxid.csv") if row["always_fatal"] == "yes")


@functools.cache
def sxid_names() -> Mapping[int, str]:
    """Return NVSwitch error names by number."""
    return {int(row["sxid"]): row["name"] for row in _rows("sxid.csv")}


def _decode_nvlink(xid: int, text: str) -> NvlinkDetail | None:
    match = _LINK.search(text)
    if not match:
        word = _WORD.search(text)
        return NvlinkDetail("", _severity(word[1]), None, 0, None) if word else None
    intrinfo, status = int(match["intrinfo"], 16), match["status"]
    subcode = (intrinfo >> 20) & 0x3F
    return NvlinkDetail(
        unit=match["unit"],
        severity=_severity(match["word"]),
        link=int(match["link"]) if int(match["link"]) >= 0 else None,
        subcode=subcode,
        resolution=_nvlink_resolution(
            xid, match["unit"], intrinfo, int(status, 16) if status else 0
        ),
    )


def _nvlink_resolution(xid: int, unit: str, intrinfo: int, status: int) -> str | None:
    """The table's resolution: by the unit's name, else by the bits that encode the unit.

    Drivers have used two layouts of the low bits; a pattern has 32 places, highest bit first.
    """
    subcode = (intrinfo >> 20) & 0x3F
    bits = f"{intrinfo:032b}"
    by_bits = None
    for row in _nvlink_rows():
        if int(row["xid"]) != xid or int(row["subcode"]) != subcode:
            continue
        if int(row["error_status"], 16) != status:
            continue
        if set(unit.split("/")) & set(row["unit"].split("/")):
            return row["resolution"]
        if any(_fits(bits, row[layout]) for layout in ("intrinfo_v1", "intrinfo_v2")):
            by_bits = by_bits or row["resolution"]
    return by_bits


def _fits(bits: str, pattern: str) -> bool:
    return all(wanted in ("-", bit) for bit, wanted in zip(bits, pattern, strict=True))


def _severity(word: str) -> Severity:
    return "fatal" if word.lower() == "fatal" else "nonfatal"


@functools.cache
def _nvlink_rows() -> tuple[dict[str, str], ...]:
    return _rows("nvlink5.csv")


def _rows(name: str) -> tuple[dict[str, str], ...]:
    with (Path(__file__).parent / name).open(encoding="utf-8", newline="") as source:
        return tuple(csv.DictReader(source))
