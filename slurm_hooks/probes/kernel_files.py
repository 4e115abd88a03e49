"""Read the kernel's small files, as sysfs and procfs have them: one value, or a page of text.

A file that is missing, refuses, or holds something else is None: drivers differ in what they
offer, and a counter that cannot be read says nothing about a fault.
"""

from __future__ import annotations

import os

_PAGE_BYTES = 4096
"""What a sysfs attribute holds at most."""


def text(path: str, limit: int = _PAGE_BYTES) -> str | None:
    """Return at most ``limit`` bytes of a file as text without white space around it, or None."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        content = os.read(descriptor, limit)
        while len(content) < limit and (more := os.read(descriptor, limit - len(content))):
            content += more
        return content.decode("utf-8", "replace").strip()
    except OSError:
        return None
    finally:
        os.close(descriptor)


def number(path: str) -> int | None:
    """Return the whole number that a file holds, or None."""
    content = text(path)
    digits = content.isascii() and content.isdigit() and len(content) <= 20 if content else False
    return int(content) if content and digits else None


def names(folder: str) -> list[str]:
    """Return the names in a folder, sorted; none where there is no such folder."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  # names, of thousands of processes
    except OSError:
        return []
