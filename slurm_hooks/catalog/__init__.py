"""The fault catalogue: what each finding code means, as data beside this file.

    >>> entry("gpu.fell_off_bus").fault_class
    'hardware.gpu'

``findings/*.toml`` has one table for each code, in the file named for the probe that yields it.
Loaded only when something is found: a healthy hook never parses it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_hooks.frozen import frozen
from slurm_hooks.record import Evidence, Finding

FINDINGS = Path(__file__).parent / "findings"


@frozen
class Entry:
    """What the catalogue says of one code.

    ``fault_class`` is the cause class of docs/policy (``hardware.gpu``, ``program.gpu_fault``,
    ``storage``, …, or ``none`` for what explains nothing by itself). ``resolution`` names what
    mends it (``reset_gpu``, ``reset_node``, ``restart_app``, ``contact_support``, ``none``, …).
    ``summary`` is a sentence with ``{gpu}``-like places for a finding's fields and details.
    """

    code: str
    fault_class: str
    severity: str
    resolution: str
    summary: str
    meaning: str
    likely_cause: str
    we_do: str
    admin_does: str
    source: str


def entries() -> Mapping[str, Entry]:
    """Return all entries by code."""
    return _entries()


def entry(code: str) -> Entry:
    """Return the entry of ``code``.

    Raises:
        KeyError: the catalogue does not have it.
    """
    return _entries()[code]


def finding(
    code: str,
    *,
    evidence: tuple[Evidence, ...] = (),
    severity: str | None = None,
    resolution: str | None = None,
    details: Mapping[str, Any] | None = None,
    **about: Any,
) -> Finding:
    """Return a Finding with what the catalogue knows filled in.

    ``about`` are Finding's fields (``gpu``, ``pci``, ``link``, …); ``details`` fill further places
    of the summary. ``severity`` and ``resolution`` override the catalogue where the evidence says
    more than the code does (a driver's own recovery action, a printed ``Nonfatal``).

    Raises:
        KeyError: the catalogue does not have ``code``, or its summary wants a place not given.
    """
    known = entry(code)
    return Finding(
        code=code,
        severity=severity or known.severity,
        summary=known.summary.format_map({**about, **(details or {})}),
        resolution=resolution or known.resolution,
        evidence=evidence,
        **about,
    )


@functools.cache
def _entries() -> Mapping[str, Entry]:
    from slurm_hooks.toml_reader import loads

    found: dict[str, Entry] = {}
    for path in sorted(FINDINGS.glob("*.toml")):
        for code, table in loads(path.read_text(encoding="utf-8")).items():
            found[code] = Entry(code=code, fault_class=table.pop("class"), **table)
    return found
