"""Slurm's settings as slurmctld has them in force, for ``recovery doctor``.

Asks ``scontrol show config``, since what a file says may not have been read yet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from recovery.slurm import command

_SECONDS = 10.0
_LIMIT_BYTES = 1 << 20

_LINE = re.compile(r"(\w+)(?:\[\d+\])?\s*= (.*)")
_NUMBER = re.compile(r"\d+")


class SlurmSilent(Exception):
    """slurmctld told no settings; the text says why."""


class Settings:
    """What slurmctld says of itself; a key that a release does not have reads as unset."""

    def __init__(self, text: str) -> None:
        self._values: dict[str, list[str]] = {}
        for line in text.splitlines():
            if match := _LINE.fullmatch(line.strip()):
                self._values.setdefault(match[1].lower(), []).append(match[2].strip())

    def text(self, key: str) -> str:
        """Return a value, empty where it is unset; a list's items are joined by commas."""
        found = [one for one in self._values.get(key.lower(), ()) if one not in ("(null)", "N/A")]
        return ",".join(found)

    def seconds(self, key: str) -> int | None:
        """Return the number in ``60 sec``; None where Slurm has none, and so no limit."""
        match = _NUMBER.match(self.text(key))
        return int(match[0]) if match else None

    @property
    def release(self) -> tuple[int, int]:
        """The year and month of the release, ``(0, 0)`` where it says none."""
        match = re.match(r"(\d+)\.(\d+)", self.text("SLURM_VERSION"))
        return (int(match[1]), int(match[2])) if match else (0, 0)


def ask(environment: Mapping[str, str]) -> Settings:
    """Return the settings in force.

    Raises:
        SlurmSilent: scontrol cannot be run, or slurmctld did not answer.
    """
    try:
        said = command.run(["scontrol", "show", "config"], environment, _SECONDS, _LIMIT_BYTES)
    except OSError as error:
        raise SlurmSilent(f"scontrol cannot be run: {error.strerror}") from error
    except (command.CommandTimeout, command.OutputTooLarge) as error:
        raise SlurmSilent(f"scontrol gave no answer within {_SECONDS:g} s") from error
    settings = Settings(said.stdout)
    if said.status or not settings.text("SLURM_VERSION"):
        raise SlurmSilent((said.stderr.strip() or "scontrol said nothing").splitlines()[0][:200])
    return settings
