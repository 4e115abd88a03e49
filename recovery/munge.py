"""Open a MUNGE credential: who sealed it, on which host, and what is in it.

Owns the ``unmunge`` command and what its exit status means. Whether that host may speak for a
node is answered here too, since only the credential knows the host.

MUNGE proves that the cluster's key was used by that uid; root of any node that has the key can
seal in another node's name. The host tells an honest mistake or a changed file, not such a root.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from dataclasses import dataclass
from functools import lru_cache

from recovery.admission import Refused

COMMANDS = ("/usr/bin/unmunge", "/usr/local/bin/unmunge", "/opt/munge/bin/unmunge")

SECONDS = 3.0
"""Longest wait for munged; it answers in a few milliseconds."""

_READABLE = {0: "", 15: "expired", 16: "rewound", 17: "replayed"}
"""Exit statuses with which a credential is authentic all the same (munge.h: EMUNGE_CRED_…).

Records wait in buffers longer than a credential lives, clocks differ, and after a crash we read a
file again; that a record counts once is ensured by its id.
"""

_UNAVAILABLE = (1, 2, 3, 4, 5, 6, 7)
"""EMUNGE_SNAFU … EMUNGE_TIMEOUT: munged, its socket or the arguments, not the credential."""

_NUMBER_BEHIND_NAME = re.compile(r".*\(([0-9]+)\)")
_HOST = re.compile(r"(\S+) \(([0-9a-fA-F.:]+)\)")


class MungeUnavailable(Exception):
    """munged or its command is not there, or does not answer: nothing is known of the content."""


@dataclass(frozen=True)
class Credential:
    """An authentic credential; ``host`` is ``name (address)`` as unmunge prints it."""

    uid: int
    host: str
    payload: bytes


def unseal(content: bytes, socket_path: str = "") -> Credential:
    """Return what a credential holds; ``socket_path`` is munged's, empty for MUNGE's default.

    Raises:
        Refused: it is no credential, or not an authentic one.
        MungeUnavailable: it could not be examined.
    """
    if not content.startswith(b"MUNGE:"):
        raise Refused("it is no MUNGE credential, and authenticate = 'munge' asks for one")
    command = next((path for path in COMMANDS if os.access(path, os.X_OK)), None)
    if command is None:
        raise MungeUnavailable(f"no unmunge command at {', '.join(COMMANDS)}")
    # The metadata come first on standard output, an empty line follows, then the payload.
    arguments = [command, "--keys=UID,ENCODE_HOST,LENGTH"]
    if socket_path:
        arguments.append(f"--socket={socket_path}")
    try:
        done = subprocess.run(
            arguments, input=content, capture_output=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MungeUnavailable(f"{command}: {error}") from error
    if done.returncode not in _READABLE:
        said = done.stderr.decode("utf-8", "replace").strip()[:200]
        if done.returncode in _UNAVAILABLE:
            raise MungeUnavailable(said)
        raise Refused(f"its credential is not authentic: {said}")
    return _read(done.stdout)


def _read(output: bytes) -> Credential:
    head, separator, payload = output.partition(b"\n\n")
    lines = (line.partition(":") for line in head.decode("utf-8", "replace").splitlines())
    fields = {key: value.strip() for key, _, value in lines}
    uid = _NUMBER_BEHIND_NAME.fullmatch(fields.get("UID", ""))
    if not separator or not uid or fields.get("LENGTH") != str(len(payload)):
        raise MungeUnavailable("unmunge printed something else than expected")
    return Credential(int(uid.group(1)), fields.get("ENCODE_HOST", ""), payload)


def may_speak_for(host: str, node: str) -> bool:
    """Whether a credential sealed on ``host`` can be the word of ``node``.

    No only where both are known and differ: a NodeName need not be a host name, and Debian's
    hosts call themselves 127.0.1.1.
    """
    match = _HOST.fullmatch(host)
    if not match:
        return True
    name, address = match.groups()
    if name == node or name.split(".")[0] == node.split(".")[0]:
        return True
    if address.startswith("127.") or address in ("::1", "0.0.0.0", "::"):
        return True
    known = _addresses(node)
    return not known or address in known


@lru_cache(maxsize=65_536)
def _addresses(node: str) -> frozenset[str]:
    try:
        found = socket.getaddrinfo(node, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset(str(entry[4][0]) for entry in found)
