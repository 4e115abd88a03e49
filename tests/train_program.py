"""examples/train.py as tests run it: where it lies, a copy for jobs, how far a run of it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pynvml

from recovery.demo.cluster import Cluster
from slurm_hooks import progress

EXAMPLES = Path(__file__).parent.parent / "examples"


def staged(cluster: Cluster) -> Path:
    """Copy train.py, and what it needs, to where whoever a job belongs to may read them."""
    program = cluster.folder / "program"
    program.mkdir()
    for source in (EXAMPLES / "train.py", Path(str(pynvml.__file__))):
        shutil.copy(source, program)
    return program / "train.py"


def step_of(run: Path) -> int:
    """The step of the run in this folder as the toolkit reads it, 0 before the first."""
    path = run / "progress"
    found = progress.in_file(path.read_bytes()) if path.exists() else None
    return found.step if found else 0
