"""A spool that hangs delays no job beyond the budget, and what was found arrives once it is back.

A folder mounted through bindfs whose process is stopped blocks every access to it in the kernel,
as a dead NFS server does.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm_hooks import spool
from tests.node import Node, job

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("bindfs"), reason="needs root and bindfs"
)

FAULT = {"code": "site.bad", "severity": "fault", "summary": "GPU 3 is unwell", "gpu": 3}


@dataclass
class Served(Node):
    """A node whose spool is served by the process ``server``."""

    server: int = 0

    @contextmanager
    def hung_spool(self) -> Iterator[None]:
        """Stop the file system's process for a while."""
        os.kill(self.server, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.server, signal.SIGCONT)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    shutil.rmtree(made.spool)
    behind = tmp_path / "behind"
    behind.mkdir()
    made.spool.mkdir()
    server = subprocess.Popen(["bindfs", "-f", str(behind), str(made.spool)])
    try:
        until = time.monotonic() + 20
        while not made.spool.is_mount() and time.monotonic() < until:
            time.sleep(0.01)
        spool.create(made.spool)
        made.server = server.pid
        made.configure("[hooks]\nbudget = {prolog = 3, epilog = 3, health_check = 3}\n")
        yield made
    finally:
        server.send_signal(signal.SIGCONT)
        subprocess.run(["umount", "-l", str(made.spool)], check=False)
        server.kill()
        server.wait()


@pytest.mark.parametrize("hook", ["prolog", "epilog", "health_check"])
def test_a_hung_spool_costs_no_more_than_the_budget_and_loses_nothing(
    node: Served, hook: str
) -> None:
    node.finds(FAULT)
    with node.hung_spool():
        run = node.run(hook, **job(exit_code="9:0"))
        assert (run.status, run.stdout, run.stderr) == (0, "", "")
        assert run.seconds < 3.2
        assert len(node.waiting()) == 1
    node.finds()
    assert node.run("prolog").status == 0
    assert node.waiting() == []
    (record,) = node.records()
    assert (record["hook"], record["verdict"]) == (hook, "fault")


def test_a_healthy_prolog_does_not_wait_for_a_hung_spool(node: Served) -> None:
    node.probe("fine", "true")
    with node.hung_spool():
        run = node.run("prolog", **job())
    assert run.status == 0
    assert run.seconds < 0.9
