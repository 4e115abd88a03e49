"""What several files of tests share: a real Slurm of their own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from recovery.demo.cluster import Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Four nodes with eight GPUs each, one for a whole file: tests mend what they break."""
    if shutil.which("slurmctld", path="/usr/sbin:/usr/local/sbin") is None:
        pytest.fail("no Slurm on this machine; ./scripts/setup installs it")
    with Cluster(nodes=4, gpus=8) as running:
        yield running
