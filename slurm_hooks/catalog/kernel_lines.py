"""Kernel log lines to findings: the one door for the probe and for whoever has a log in hand.

    >>> [one.code for one in parse_kernel_lines(["NVRM: Xid (PCI:0000:17:00): 45, pid=7, name=x"])]
    ['gpu.xid_cascade']

The NVIDIA driver's numbered lines are read by ``xid_facts``, out-of-memory kills by ``oom_facts``;
everything else is a pattern in ``kernel_lines.toml``.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_hooks.catalog.kernel_fact import Fact, fold
from slurm_hooks.catalog.kernel_line import KernelLine
from slurm_hooks.catalog.kernel_prefix import undress
from slurm_hooks.catalog.oom_facts import oom_facts
from slurm_hooks.catalog.xid import canonical_pci
from slurm_hooks.catalog.xid_facts import driver_facts
from slurm_hooks.record import Finding

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TRIGGERS = ("NVRM", "nvswitch", "oom-kill", "of memory", "as a result of limit of", "[nvidia")
"""What the lines of the modules above, and a stack that is inside the driver, contain."""

_ABOUT = ("port", "file")

_STACK_LINES = 60
"""How far below a hung task's headline its stack may name a module."""


@dataclass(frozen=True)
class _Pattern:
    """One row of ``kernel_lines.toml``; its expression is compiled when its literal was seen."""

    code: str
    has: str
    expression: str


def parse_kernel_lines(
    lines: Iterable[KernelLine | str], minors: Mapping[str, int] | None = None
) -> list[Finding]:
    """Return the findings in ``lines``, equal ones folded into one with a count.

    A ``str`` is a line of a text log, whose dmesg, journal or syslog prefix is taken off; a
    ``KernelLine`` is a message as the kernel logged it. ``minors`` are GPUs' minor numbers by PCI
    address (``0000:3b:00.0``), where they are known.
    """
    literals = (*_TRIGGERS, *_patterns())
    wanted: list[tuple[int, KernelLine]] = []
    for number, line in enumerate(lines):
        message = KernelLine(undress(line).text) if isinstance(line, str) else line
        if any(literal in message.text for literal in literals):
            wanted.append((number, message))
    messages = [line for _, line in wanted]
    facts = [*driver_facts(messages), *oom_facts(messages), *_pattern_facts(wanted)]
    return fold(_with_minor(fact, minors or {}) for fact in facts)


def _pattern_facts(lines: Sequence[tuple[int, KernelLine]]) -> list[Fact]:
    facts: list[Fact] = []
    hung: tuple[int, int] | None = None
    for number, line in lines:
        fact = _pattern_fact(line)
        if fact is not None:
            facts.append(fact)
        if fact is not None and fact.code == "host.hung_task":
            hung = (len(facts) - 1, number)
        elif hung and "[nvidia" in line.text and number - hung[1] <= _STACK_LINES:
            # Stuck inside the NVIDIA driver: the process cannot be killed, the GPU not reset.
            facts[hung[0]] = replace(facts[hung[0]], code="gpu.driver_stuck")
            hung = None
    return facts


def _pattern_fact(line: KernelLine) -> Fact | None:
    for literal, patterns in _patterns().items():
        if literal not in line.text:
            continue
        for one in patterns:
            match = re.match(one.expression, line.text)
            if match:
                return _fact(one.code, match, line)
    return None


def _fact(code: str, match: re.Match[str], line: KernelLine) -> Fact:
    groups = {name: text for name, text in match.groupdict().items() if text is not None}
    about = {name: groups.pop(name) for name in _ABOUT if name in groups}
    pci = groups.pop("pci", None)
    if pci and re.fullmatch(r"[0-9a-f]{4,8}(:[0-9a-f]{2}){2}(\.[0-9a-f])?", pci):
        about["pci"] = canonical_pci(pci)
    details = {"gpu": about.get("pci", "?"), **groups}
    return Fact(code, line, tag=groups.get("why", ""), about=about, details=details)


def _with_minor(fact: Fact, minors: Mapping[str, int]) -> Fact:
    minor = minors.get(fact.pci or "")
    if minor is None:
        return fact
    return replace(fact, about={**fact.about, "gpu": minor}, details={**fact.details, "gpu": minor})


@functools.cache
def _patterns() -> Mapping[str, tuple[_Pattern, ...]]:
    """The patterns by the literal that a line must contain: most lines end there."""
    text = (Path(__file__).parent / "kernel_lines.toml").read_text(encoding="utf-8")
    by_literal: dict[str, tuple[_Pattern, ...]] = {}
    for table in tomllib.loads(text)["line"]:
        row = _Pattern(table["code"], table["has"], table["pattern"])
        by_literal[row.has] = (*by_literal.get(row.has, ()), row)
    return by_literal
