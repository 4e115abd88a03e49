"""Write docs/findings.md from the catalogue: what each code means and what follows from it.

``scripts/docs`` runs it; a test fails while the committed page differs from the catalogue.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby

from slurm_hooks import catalog
from slurm_hooks.catalog.xid import xids

_HEAD = """\
# Findings

What the hooks can report, by code. Written by `scripts/docs` from `slurm_hooks/catalog/`: change it
there. *Class* is what [policy](policy.md) decides by; *none* explains nothing by itself. *Severity*
and *what mends it* are the usual ones: the evidence may say more than the code does, such as a
driver that names its own recovery action. Only `fatal` may ever stop a job from starting.
"""

_XID_HEAD = """\
## Xid numbers

Which finding an Xid becomes. A number that is not here becomes `gpu.xid_unknown`, never nothing.
The word Fatal or Nonfatal in a line of Xid 144-150 decides, not the number.

| Xid | finding | what mends it | meaning |
|---|---|---|---|
"""


def document() -> str:
    """Return the page as Markdown: one section for each code, then the table of Xid numbers."""
    return "\n".join([_HEAD, *_sections(), _XID_HEAD + "".join(_xid_rows())])


def _sections() -> Iterator[str]:
    by_code = sorted(catalog.entries().values(), key=lambda entry: entry.code)
    for subject, entries in groupby(by_code, key=lambda entry: entry.code.partition(".")[0]):
        yield f"## {subject}\n"
        for entry in entries:
            yield (
                f"### {entry.code}\n\n"
                f"{entry.meaning}\n\n"
                f"- Class `{entry.fault_class}`, severity `{entry.severity}`, "
                f"what mends it: `{entry.resolution}`\n"
                f"- Likely cause: {entry.likely_cause}\n"
                f"- What we do: {entry.we_do}\n"
                f"- What you do: {entry.admin_does}\n"
                f"- Source: {entry.source}\n"
            )


def _xid_rows() -> Iterator[str]:
    for entry in sorted(xids().values(), key=lambda one: one.xid):
        yield f"| {entry.xid} | `{entry.code}` | `{entry.resolution}` | {entry.meaning} |\n"


if __name__ == "__main__":
    sys.stdout.write(document())
