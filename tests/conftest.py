"""What several files of tests share: a Slurm, a user's folder, and the order in which they run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.demo.cluster import Cluster
from tests.failing_job import NOBODY

LONGEST_FIRST = (
    "test_crash_between_steps",
    "test_hang_on_slurm",
    "test_recovery_on_slurm",
    "test_evidence_on_slurm",
    "test_drill_on_slurm",
    "test_demo",
    "test_training_job",
    "test_gate_on_slurm",
    "test_stopping_on_slurm",
    "test_returning_on_slurm",
    "test_deep_check_on_slurm",
    "test_kinds_of_jobs_on_slurm",
    "test_right_attempt_on_slurm",
)
"""Files that take half a minute and more. A worker runs a file as a whole, so one of these begun
late leaves the other workers idle at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, then what waits for a Slurm; the short rest fills the end."""
    rank = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(
        key=lambda item: (
            rank.get(item.path.stem, len(rank)),
            item.get_closest_marker("slurm") is None,
        )
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Four nodes with eight GPUs each, one for a whole file: tests mend what they break."""
    if shutil.which("slurmctld", path="/usr/sbin:/usr/local/sbin") is None:
        pytest.fail("no Slurm on this machine; ./scripts/setup installs it")
    with Cluster(nodes=4, gpus=8) as running:
        yield running


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder of the user ``nobody``, which pytest's own, root's, would hide."""
    folder = Path(tempfile.mkdtemp(prefix="nobodys-"))
    folder.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)
