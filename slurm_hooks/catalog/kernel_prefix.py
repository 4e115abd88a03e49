"""Take off what dmesg, journald and syslog write before a kernel message, and read its time.

    >>> undress("Dec  2 05:31:37 n3 kernel: [ 123.456789] NVRM: loading").text
    'NVRM: loading'

A message is believed to be the kernel's if it stands where a kernel message stands: behind a
``kernel:`` tag or a bare dmesg prefix. Behind any other tag the whole line is returned, so that
``ann: NVRM: Xid …``, which Ann logged, does not begin like a driver's line.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import datetime

_TAG = re.compile(r"(?P<before>(?:\S*[^:\s] +){1,8})kernel(?:\[\d+\])?: ")
"""``Dec  2 05:31:37 n3 kernel: ``; no word before the tag ends in a colon, or it were the tag."""

_LEVEL = re.compile(r"<\d{1,3}>|[a-z]+ *:[a-z]+ *: ")
"""``<4>`` of dmesg -r, ``kern  :err   : `` of dmesg -x."""

_UPTIME = re.compile(r"\[ *(?P<uptime>\d{1,10}\.\d{1,9})\] ?")
_CALLER = re.compile(r"\[ *[TC]\d{1,7}\] ?")
"""``[ T1234]``: CONFIG_PRINTK_CALLER's thread or processor."""

_BRACKET_DATE = re.compile(
    r"\[(?P<date>[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4})\] ?"
)
"""``[Wed Dec  2 05:31:37 2026] `` of dmesg -T, in the node's own time zone."""

_ISO = re.compile(
    r"(?P<iso>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)(?P<zone>Z|[+-]\d\d:?\d\d)?\b ?"
)

_SYSLOG = re.compile(r"^(?P<date>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d)\b")
"""``Dec  2 05:31:37`` of syslog and of journalctl -o short."""

_DAY_SECONDS = 86400.0


@dataclass(frozen=True)
class Undressed:
    """A message and its time: ``seconds`` since the epoch, or ``uptime`` since some boot."""

    text: str
    seconds: float | None = None
    uptime: float | None = None


def undress(line: str, now_seconds: float | None = None) -> Undressed:
    """Return the message of a text log's line without its prefix; unknown prefixes stay.

    ``now_seconds`` (by default the clock's) tells the year of a syslog time, which has none.
    """
    rest, seconds = line, None
    tag = _TAG.match(rest)
    if tag:
        iso = _ISO.search(tag["before"])
        syslog = _SYSLOG.search(tag["before"])
        if iso:
            seconds = _iso_seconds(iso)
        elif syslog:
            seconds = _syslog_seconds(syslog, time.time() if now_seconds is None else now_seconds)
        rest = rest[tag.end() :]
    level = _LEVEL.match(rest)
    if level:
        rest = rest[level.end() :]
    for pattern in (_BRACKET_DATE, _ISO):
        stamp = pattern.match(rest)
        if stamp and not tag:
            seconds = _bracket_seconds(stamp) if pattern is _BRACKET_DATE else _iso_seconds(stamp)
            rest = rest[stamp.end() :]
    uptime = _UPTIME.match(rest)
    if uptime:
        rest = rest[uptime.end() :]
        # journalctl -o short-monotonic has host and tag behind the stamp.
        tag = tag or re.match(r"\S*[^:\s] kernel: ", rest)
        if tag and tag.string is rest:
            rest = rest[tag.end() :]
    caller = _CALLER.match(rest)
    if caller:
        rest = rest[caller.end() :]
    return Undressed(rest, seconds, float(uptime["uptime"]) if uptime else None)


def _iso_seconds(match: re.Match[str]) -> float | None:
    """Seconds of an ISO time; one without a zone is the node's own time."""
    zone = match["zone"] or ""
    fraction = re.search(r"[.,]\d+", match["iso"])
    whole = match["iso"][:19].replace("T", " ")
    if zone == "Z":
        zone = "+0000"
    try:
        moment = datetime.strptime(whole, "%Y-%m-%d %H:%M:%S")
        if zone:
            moment = datetime.strptime(f"{whole}{zone.replace(':', '')}", "%Y-%m-%d %H:%M:%S%z")
        base = moment.timestamp()
    except (ValueError, OverflowError):
        return None
    return base + (float(f"0.{fraction[0][1:]}") if fraction else 0.0)


def _syslog_seconds(match: re.Match[str], now_seconds: float) -> float | None:
    """Seconds of a date without a year: the latest such date that is not beyond tomorrow."""
    this_year = datetime.fromtimestamp(now_seconds).year
    for year in (this_year + 1, this_year, this_year - 1):
        try:
            moment = datetime.strptime(f"{year} {match['date']}", "%Y %b %d %H:%M:%S")
        except ValueError:
            continue
        if moment.timestamp() <= now_seconds + _DAY_SECONDS:
            return moment.timestamp()
    return None


def _bracket_seconds(match: re.Match[str]) -> float | None:
    try:
        return datetime.strptime(match["date"], "%a %b %d %H:%M:%S %Y").timestamp()
    except (ValueError, OverflowError):
        return None
