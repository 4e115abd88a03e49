"""What one kernel line says, and how many that say the same become one finding.

A reader (``xid_facts``, ``kernel_lines``) makes ``Fact``s, one for each line that means something;
``fold`` makes findings of them: 800,000 equal lines are one finding with a count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_hooks import catalog
from slurm_hooks.catalog.kernel_line import KernelLine
from slurm_hooks.record import SEVERITIES, Evidence, Finding, utc

SOURCE = "kernel_log"

_EVIDENCE_TEXTS = 3
"""Lines quoted of one finding: the first ones, which tell what began it, and the last."""

_EVIDENCE_CHARACTERS = 600

FINDINGS_LIMIT = 60
"""Most findings of one look, so that a record stays far below its size limit."""


@dataclass(frozen=True)
class Fact:
    """What one line says: a catalogue code, and Finding's fields and summary details for it.

    ``tag`` tells apart what must not be folded though code and thing are equal (Xid numbers: 162
    is no repetition of 163, and does not undo it). ``times`` is 0 for a line that only adds to what
    another has told.
    """

    code: str
    line: KernelLine
    tag: str = ""
    severity: str | None = None
    resolution: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    times: int = 1

    @property
    def pci(self) -> str | None:
        """The PCI address that the line names, if it does."""
        pci: str | None = self.about.get("pci")
        return pci


def fold(facts: Iterable[Fact]) -> list[Finding]:
    """Return one finding for each distinct code, tag and thing, in the order of first sight.

    Beyond FINDINGS_LIMIT the mildest give way to one ``kernel_log.more`` that counts them.
    """
    groups: dict[tuple[Any, ...], list[Fact]] = {}
    counts: dict[tuple[Any, ...], int] = {}
    for fact in facts:
        key = (fact.code, fact.tag, *sorted(fact.about.items()))
        kept = groups.setdefault(key, [])
        counts[key] = counts.get(key, 0) + fact.times
        if len(kept) < _EVIDENCE_TEXTS:
            kept.append(fact)
        else:
            kept[-1] = fact
    findings = [_finding(kept, counts[key]) for key, kept in groups.items()]
    if len(findings) <= FINDINGS_LIMIT:
        return findings
    order = sorted(findings, key=lambda one: SEVERITIES.index(one.severity), reverse=True)
    dropped = order[FINDINGS_LIMIT:]
    more = catalog.finding(
        "kernel_log.more",
        details={"findings": len(dropped), "lines": sum(one.count for one in dropped)},
    )
    return [*order[:FINDINGS_LIMIT], more]


def evidence(line: KernelLine) -> Evidence:
    """Return the line as evidence; a very long one is shortened."""
    moment = utc(line.seconds) if line.seconds is not None else None
    return Evidence(SOURCE, line.text[:_EVIDENCE_CHARACTERS], moment, line.key)


def _finding(facts: list[Fact], count: int) -> Finding:
    first = facts[0]
    return catalog.finding(
        first.code,
        evidence=tuple(evidence(fact.line) for fact in facts),
        severity=first.severity,
        resolution=first.resolution,
        details=first.details,
        count=max(count, 1),
        **first.about,
    )
