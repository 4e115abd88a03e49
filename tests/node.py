"""A node for tests: a spool, a local folder, site probes, and hooks run as slurmd runs them.

    node.probe("x", 'echo "[…]"'); run = node.run("prolog"); node.records()

slurmd gives a hook no PATH and little else, and reads its standard output to the end of file
(measured on 22.05 to 26.05), and so does ``Node.run``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_hooks import probes, spool

PROGRAMS = Path(sys.executable).parent


@dataclass(frozen=True)
class Run:
    """How one run of a hook ended: exit status, wall time, and what it printed."""

    status: int
    seconds: float
    stdout: str
    stderr: str


@dataclass
class Node:
    """One node's folders, and the name by which slurmd calls it."""

    root: Path
    name: str = "n1"

    def __post_init__(self) -> None:
        self.spool = self.root / "spool"
        self.buffer = self.root / "buffer"
        self.probes = self.root / "probes.d"
        self.config = self.root / "recovery.toml"
        self.notes = self.root / "notes"
        spool.create(self.spool)
        self.probes.mkdir()
        self.configure()

    def configure(self, settings: str = "") -> None:
        """Write recovery.toml: no probes but the site's and those in ``settings``."""
        self.config.write_text(
            f'[spool]\npath = "{self.spool}"\nbuffer = "{self.buffer}"\n'
            f'[probes.site]\npath = "{self.probes}"\n'
            + "".join(
                f"[probes.{name}]\nhooks = []\n"
                for name in probes.NAMES
                if f"[probes.{name}]" not in settings
            )
            + settings
        )

    def probe(self, name: str, script: str) -> Path:
        """Install a site's probe, a shell script."""
        path = self.probes / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def finds(self, *findings: dict[str, Any], name: str = "site_check") -> None:
        """Let a site's probe answer with ``findings``."""
        self.probe(name, f"cat <<'END'\n{json.dumps(list(findings))}\nEND")

    def run(self, hook: str, **environ: str) -> Run:
        """Run a hook as slurmd does, and wait for the end of its output."""
        started = time.monotonic()
        process = self.start(hook, **environ)
        stdout, stderr = process.communicate(timeout=90)
        return Run(process.returncode, time.monotonic() - started, stdout, stderr)

    def start(self, hook: str, **environ: str) -> subprocess.Popen[str]:
        """Start a hook as slurmd does: in a process group of its own, without a PATH."""
        told = {
            "SLURMD_NODENAME": self.name,
            "SLURM_RECOVERY_CONFIG": str(self.config),
            "SLURM_RECOVERY_NOTES": str(self.notes),
        }
        return subprocess.Popen(
            [PROGRAMS / f"slurm-hook-{hook.replace('_', '-')}"],
            env={**told, **environ},
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def records(self) -> list[dict[str, Any]]:
        """Return the records in the spool, in the order of their ids."""
        names = sorted((self.spool / "incoming").glob("*.json"))
        return [json.loads(path.read_bytes()) for path in names]

    def waiting(self) -> list[str]:
        """Return the names of what waits in the local buffer."""
        return list(spool.Buffer(self.buffer).waiting())

    def heartbeat(self) -> dict[str, Any]:
        """Return the node's heartbeat."""
        found: dict[str, Any] = json.loads(
            (self.spool / "heartbeat" / f"{self.name}.json").read_bytes()
        )
        return found


def job(job_id: int = 7, exit_code: str | None = None, comment: str = "") -> dict[str, str]:
    """Return what slurmd tells a prolog, or an epilog, of a job (names: ``man prolog``)."""
    environ = {
        "SLURM_CLUSTER_NAME": "c1",
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOB_UID": str(os.getuid()),
        "SLURM_JOB_USER": "ann",
        "SLURM_JOB_PARTITION": "train",
        "SLURM_NODELIST": "n[1-2]",
        "SLURM_JOB_GPUS": "0-3",
        "SLURM_JOB_RESTART_COUNT": "1",
        "SLURM_JOB_COMMENT": comment,
    }
    if exit_code is not None:
        environ["SLURM_JOB_EXIT_CODE2"] = exit_code
    return environ
