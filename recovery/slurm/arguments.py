"""What is put into a request to Slurm, made safe, and what Slurm's refusals are told apart by.

For ``cli`` and ``rest`` alike: names and texts may come out of a record that somebody forged, so
that nothing is sent which does not have the form of what it should be.
"""

from __future__ import annotations

import functools
import pwd
import re
from collections.abc import Collection

from recovery.slurm.base import CommandRefused
from recovery.slurm.hostlist import compress

REASON_LIMIT = 500
"""Characters of a drain reason. Slurm keeps 70,000 as well, and prints them all in every list."""

ADMIN_COMMENT_LIMIT = 2000
"""Characters of an AdminComment; Slurm sets no limit, its database column ends at 65,535."""

NODE_LIST_LIMIT = 100_000
"""Characters of a hostlist in a command; Linux allows 131,071 in one argument."""

_JOB = re.compile(r"\d{1,10}(?:_\d{1,10})?(?:\+\d{1,5})?", re.ASCII)
NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)

# What the client prints when it is the connection that failed (slurm_errno.c). The first is what
# requeue, hold and release print for a controller that is stopped or frozen.
AWAY = re.compile(
    r"Unexpected message received|Unable to contact slurm controller|Socket timed out"
    r"|Zero Bytes were transmitted|Connection (?:refused|reset|timed out)|backup controller"
    r"|Communication (?:connection|shutdown)|Message (?:send|receive) failure"
    r"|Incompatible versions|authentication (?:error|credential)|Insane message length"
    r"|Resource temporarily unavailable|No route to host|Unable to process configuration"
    r"|not responding|in (?:standby|recovery) mode|Unspecified error",
    re.IGNORECASE,
)


def checked_job(job: str) -> str:
    """Return ``job``; CommandRefused where it is no job id such as ``12``, ``6_2`` or ``12+1``."""
    if not _JOB.fullmatch(job):
        raise CommandRefused(f"not a job id, nothing was sent to Slurm: {job[:60]!r}")
    return job


def checked_nodes(names: Collection[str]) -> str:
    """Return ``names`` as one hostlist; CommandRefused where one has not the form of a node's."""
    for name in names:
        if not NODE.fullmatch(name):
            raise CommandRefused(f"not a node name, nothing was sent to Slurm: {name[:60]!r}")
    text = compress(names)
    if len(text) > NODE_LIST_LIMIT:
        raise CommandRefused(f"{len(names)} nodes are too many for one command")
    return text


def one_line(text: str, limit: int) -> str:
    """Return ``text`` as scontrol takes a value: one line, bounded, in plain quotes.

    scontrol drops a double quote at either end of a reason, and tools that read ``scontrol show``
    split at the next one, hence single quotes.
    """
    words = "".join(one if one.isprintable() else " " for one in text).replace('"', "'").split()
    line = " ".join(words)
    return line if len(line) <= limit else line[: limit - 1] + "…"


@functools.lru_cache(maxsize=256)
def uid_of(user: str) -> int | None:
    """Return a user's uid, None where there is no such user."""
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return None
