"""What kind of file system a path lies on, and which kinds hang when something elsewhere does.

A hook whose interpreter, packages or wrapper lie on such a one hangs with it before its first line.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

REMOTE = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "9p", "virtiofs", "afs", "coda", "ceph"),
        *("lustre", "gpfs", "beegfs", "beegfs_nodev", "wekafs", "panfs", "pvfs2", "orangefs"),
        *("glusterfs", "ocfs2", "gfs2", "autofs", "fuse"),
    )
)
"""Types, as mounts name them, that are served from beyond this node or by a process on it.

``fuse.…`` of any kind is one as well: it hangs when its process does.
"""


def is_remote(kind: str) -> bool:
    """Whether a file system of this type can hang with something that is no local disk."""
    return kind in REMOTE or kind.startswith("fuse.")


def of(path: Path) -> str:
    """Return the type of the file system that holds ``path`` (proc(5), mountinfo); "" if unknown.

    Follows links, so it may block where the file system itself does.
    """
    table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    return of_resolved(os.path.realpath(path), table)


def of_resolved(path: str, mountinfo: str) -> str:
    """Return the type that the table ``mountinfo`` gives for a ``path`` without links.

    >>> of_resolved("/opt/x", "30 21 0:5 / /opt rw,relatime shared:1 - nfs4 server:/opt rw")
    'nfs4'
    """
    best, kind = "", ""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 6 or not after:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # of several on one point the last is what is seen
            best, kind = point, after.split(" ")[0]
    return kind
