"""Write the note that ``quiet`` reads: the plan for hooks to come, and whether prologs are spared.

Owns what goes into a note. What makes one believed is ``quiet``'s.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from slurm_hooks import freshness, quiet, spool, toml_reader

_SECTIONS = ("mode", "spool", "hooks", "probes")
"""What ``NodeConfig`` has: the rest of recovery.toml is the controller's."""


def leave_note(told: bytes, states: Path, boot_id: str, freshness_seconds: float | None) -> bytes:
    """Run in a child: note what the configuration asks for; prologs may have nothing to do.

    ``told`` is the configuration file as ``quiet`` compares it, and has been found without a
    mistake. ``freshness_seconds`` is None where prologs run no probe, else how long the health
    check's pass among ``states`` spares them.

    Raises:
        SpoolError: the folder for notes does not take it.
    """
    place = quiet.note_path()
    if place is None:
        return b""
    until: float | None = quiet.FOR_EVER
    passed = b""
    if freshness_seconds is not None:
        passed = freshness.content(states)
        until = freshness.spared_until(passed, boot_id, freshness_seconds)
    if until is None:
        until, passed = quiet.NEVER, b""
    where = (os.fsencode(states.parent), os.fsencode(freshness.file(states)))
    head = (quiet.SCHEMA, quiet.package_mark(), boot_id.encode(), str(until).encode(), *where)
    lines = (*head, passed, _plan(told[1:]))
    if any(b"\n" in line for line in lines):
        return b""
    folder = Path(place).parent
    folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    spool.make_private(folder)
    content = b"\n".join((*lines, told))
    spool.write(folder, Path(place).name, content, durable=False, mode=0o600)
    return b""


def _plan(raw: bytes) -> bytes:
    """Return the node's part of the configuration in JSON, nothing where it is too large."""
    document = toml_reader.loads(raw.decode())
    part = {name: document[name] for name in _SECTIONS if name in document}
    content = json.dumps(part, separators=(",", ":")).encode()
    return content if len(content) <= quiet.PLAN_LIMIT_BYTES else b""
