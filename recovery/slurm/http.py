"""One HTTP request to slurmrestd under a deadline, by a Unix socket or TCP, with a bounded answer.

Owns connections, and the token that goes with them; what the documents mean is ``rest``'s.
"""

from __future__ import annotations

import http.client
import json
import os
import pwd
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from recovery.slurm import command
from slurm_hooks.config import Slurm

CHUNK_BYTES = 1 << 16
OUTPUT_LIMIT_BYTES = 256 << 20
"""Most that is read of one answer, as for the commands."""

TOKEN_SECONDS = 3600
"""Lifespan of a token that we make; a new one is made when half of it has passed."""

_TOKEN_LIMIT_BYTES = 64 * 1024


class Unanswered(Exception):
    """No answer came, or none that is one; the text says why, and never holds the token."""


@dataclass(frozen=True)
class Answer:
    """What slurmrestd answered: HTTP's status and the body."""

    status: int
    text: str


class Client:
    """Speaks to one slurmrestd; each request has a connection of its own."""

    def __init__(
        self, settings: Slurm, environment: Mapping[str, str], timeout_seconds: float
    ) -> None:
        self._settings = settings
        self._environment = environment
        self._timeout_seconds = timeout_seconds
        self._made: tuple[str, float] | None = None

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """Send one request and return its answer.

        Raises:
            Unanswered: there is no token, nobody listens, or the answer does not end in time.
        """
        deadline = time.monotonic() + self._timeout_seconds
        headers = {"Accept": "application/json", "Connection": "close", **self._credentials()}
        content = None
        if body is not None:
            content = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        connection = self._connection()
        try:
            connection.request(method, path, content, headers)
            answer = connection.getresponse()
            return Answer(answer.status, _read(answer, connection, deadline))
        except TimeoutError as error:
            raise Unanswered(
                f"{self._settings.url} gave no answer within {self._timeout_seconds:g} s"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            said = getattr(error, "strerror", None) or type(error).__name__
            raise Unanswered(f"{self._settings.url}: {said}") from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        url = self._settings.url
        if url.startswith("unix:"):
            return _UnixConnection(url.removeprefix("unix:"), self._timeout_seconds)
        parts = urlsplit(url)
        host = parts.hostname or "localhost"
        if parts.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                host, parts.port, timeout=self._timeout_seconds, context=context
            )
        return http.client.HTTPConnection(host, parts.port, timeout=self._timeout_seconds)

    def _credentials(self) -> Mapping[str, str]:
        if self._settings.token == "none":
            return {}
        user = self._settings.user or pwd.getpwuid(os.geteuid()).pw_name
        path = self._settings.token
        token = _from_file(Path(path)) if path else self._own_token(user)
        return {"X-SLURM-USER-NAME": user, "X-SLURM-USER-TOKEN": token}

    def _own_token(self, user: str) -> str:
        if self._made and time.monotonic() < self._made[1]:
            return self._made[0]
        argv = ["scontrol", "token", f"lifespan={TOKEN_SECONDS}", f"username={user}"]
        try:
            said = command.run(argv, self._environment, self._timeout_seconds, _TOKEN_LIMIT_BYTES)
        except (OSError, command.CommandTimeout, command.OutputTooLarge) as error:
            raise Unanswered(f"scontrol token: {error or type(error).__name__}") from error
        token = said.stdout.strip().removeprefix("SLURM_JWT=")
        if said.status or not token:
            raise Unanswered(f"scontrol token: {said.stderr.strip()[:300] or 'made none'}")
        self._made = (token, time.monotonic() + TOKEN_SECONDS / 2)
        return token


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket, whose server needs no name."""

    def __init__(self, path: str, timeout_seconds: float) -> None:
        super().__init__("localhost", timeout=timeout_seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _read(
    answer: http.client.HTTPResponse, connection: http.client.HTTPConnection, deadline: float
) -> str:
    """Read to the end, however slowly it trickles in, but not past the deadline."""
    parts = bytearray()
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        if connection.sock is not None:
            connection.sock.settimeout(remaining)
        chunk = answer.read1(CHUNK_BYTES)
        if not chunk:
            return parts.decode("utf-8", "replace")
        parts += chunk
        if len(parts) > OUTPUT_LIMIT_BYTES:
            raise Unanswered(f"an answer of more than {OUTPUT_LIMIT_BYTES >> 20} MiB")


def _from_file(path: Path) -> str:
    try:
        with path.open("rb") as source:
            token = source.read(_TOKEN_LIMIT_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Unanswered(f"the token in {path} cannot be read: {error}"[:300]) from error
    token = token.removeprefix("SLURM_JWT=")
    if not token or not token.isprintable():
        raise Unanswered(f"{path} holds no token")
    return token
