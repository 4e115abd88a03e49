"""The story's training job: examples/train.py, run as an ordinary account, and what it leaves.

Files of root's jobs are never read (``as_user``), so root submits as another account. That one
may see neither this installation nor its interpreter (both may lie in a home folder): what the
job needs is copied into the cluster's own folder, and runs with the first interpreter that the
account can run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from recovery.demo.cluster import Cluster
from recovery.demo.programs import SYSTEM_PATH, ClusterError

ORDINARY_ACCOUNT = "nobody"

STEPS = 100
STEP_SECONDS = 0.08
SAVE_EVERY = 20

_INTERPRETERS = ("/usr/bin/python3", "/usr/local/bin/python3", sys.executable)
_USABLE = "import sys; sys.exit(sys.version_info < (3, 10))"
_NODES_AND_RANKS = ("--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4")


@dataclass(frozen=True)
class Run:
    """One job and the folder that it works in."""

    job_id: int
    folder: Path

    @property
    def log(self) -> str:
        """What all attempts have written so far."""
        return _text(self.folder / "train.log")

    @property
    def step(self) -> int:
        """The last step done, 0 before the first."""
        text = _text(self.folder / "progress")
        return int(json.loads(text)["step"]) if text else 0

    @property
    def newest_checkpoint(self) -> int | None:
        """The step of the newest checkpoint."""
        names = sorted(path.stem for path in (self.folder / "ckpt").glob("step-*.json"))
        return int(names[-1].partition("-")[2]) if names else None

    @property
    def weights(self) -> str | None:
        """The sha256 of the final weights, None before the end."""
        text = _text(self.folder / "final.json")
        return str(json.loads(text)["sha256"]) if text else None

    def began(self, attempt: int) -> bool:
        """Whether that attempt, counted from 0, has written its first line."""
        return f"attempt {self.job_id}.{attempt}:" in self.log

    @property
    def attempts(self) -> int:
        """How many attempts have begun to train."""
        return len(re.findall(rf"attempt {self.job_id}\.\d+:", self.log))

    def began_at(self, attempt: int) -> int | None:
        """The step at which that attempt began."""
        found = re.search(rf"attempt {self.job_id}\.{attempt}:.* step=(\d+)", self.log)
        return int(found[1]) if found else None


class Training:
    """Submits training jobs to a private cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.account = ORDINARY_ACCOUNT if os.geteuid() == 0 else None
        self._programs = cluster.folder / "training"
        self._stage()

    def submit(self, name: str, *arguments: str, avoided: str = "") -> Run:
        """Submit a run that works in a folder ``name``, off the node ``avoided``.

        ``arguments`` go to train.py.
        """
        folder = self._cluster.folder / name
        folder.mkdir()
        if self.account:
            shutil.chown(folder, self.account)
        job = self._cluster.submit(
            f"--job-name={name}",
            *_NODES_AND_RANKS,
            *([f"--exclude={avoided}"] if avoided else []),
            f"--output={folder}/train.log",
            f"--comment=recovery=requeue,max_restarts=3,checkpoint={folder}/ckpt,"
            f"progress={folder}/progress,logs={folder}/*.log",
            self._programs / "train.sbatch",
            f"--steps={STEPS}",
            f"--step-seconds={STEP_SECONDS}",
            f"--save-every={SAVE_EVERY}",
            *arguments,
            user=self.account,
            env={
                "RUN": str(folder),
                "PROGRAM": f"{self._programs}/train.py",
                "HOME": str(folder),
                "PATH": f"{self._programs}/bin:{SYSTEM_PATH}",
            },
        )
        return Run(job, folder)

    def _stage(self) -> None:
        (self._programs / "bin").mkdir(parents=True)
        pynvml = importlib.util.find_spec("pynvml")
        assert pynvml is not None and pynvml.origin is not None  # this package requires it
        for source in (*_examples(), Path(pynvml.origin)):
            shutil.copyfile(source, self._programs / source.name)
        python = self._programs / "bin" / "python3"
        python.write_text(f'#!/bin/sh\nexec {self._interpreter()} "$@"\n', encoding="utf-8")
        python.chmod(0o755)

    def _interpreter(self) -> str:
        """The first interpreter that the account can run and that train.py can be run by."""
        for python in _INTERPRETERS:
            argv = ("sh", "-c", '"$0" -c "$1"', python, _USABLE)
            if self._cluster.run(*argv, check=False, user=self.account).returncode == 0:
                return python
        who = self.account or "this account"
        raise ClusterError(f"no Python >= 3.10 that {who} can run: apt-get install python3")


def _examples() -> tuple[Path, Path]:
    """The training job, in this checkout or where the wheel has put its data.

    Raises:
        ClusterError: the installation lacks it.
    """
    names = ("train.py", "train.sbatch")
    checkout = Path(__file__).resolve().parents[2] / "examples"
    files = metadata.distribution("slurm-recovery").files or ()
    installed = [Path(str(file.locate())).resolve().parent for file in files if file.name in names]
    for folder in (checkout, *installed):
        if all((folder / name).is_file() for name in names):
            return folder / names[0], folder / names[1]
    raise ClusterError(f"examples/{names[0]} is missing from this installation: install it anew")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
