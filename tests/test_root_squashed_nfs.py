"""A spool on an NFS that squashes root works as docs/install.md says; run by scripts/nfs-test.

Hooks run as root, who is nobody on that file system; the aggregator as another account, who is not.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.demo.cluster import Cluster
from slurm_hooks import spool
from tests.failing_job import ACT

MOUNT, EXPORT = os.environ.get("SQUASHED_MOUNT", ""), os.environ.get("SQUASHED_EXPORT", "")

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(not MOUNT, reason="needs an NFS that squashes root: scripts/nfs-test"),
]

WAIT_SECONDS = 180.0
"""In a kernel that is a process everything takes some ten times as long."""

NOBODY = 65534

USER = "daemon"
"""An account that every distribution has, and that is not whom root is squashed to."""

SLOW = "[hooks]\nbudget = {prolog = 9, epilog = 40, health_check = 40}\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster with its spool on the NFS, made by ``recovery init`` and the documented command."""
    with Cluster(nodes=1, gpus=0, slurm_user=USER, health_check_seconds=20) as running:
        (Path(EXPORT) / "site/spool").mkdir(parents=True)
        shutil.chown(Path(EXPORT) / "site/spool", USER)
        settings = f'authenticate = "munge"\nmunge_socket = "{running.layout.munge_socket}"\n'
        path = f'path = "{MOUNT}/site/spool"\n'
        running.configure(f"{ACT}[spool]\n{path}{settings}{SLOW}")
        elsewhere = running.folder / "elsewhere"
        (elsewhere / MOUNT[1:]).parent.mkdir(parents=True)
        (elsewhere / MOUNT[1:]).symlink_to(MOUNT)
        chosen = (f"--user={USER}", "--authenticate=munge", f"--spool={MOUNT}/site/spool")
        running.run("recovery", "init", "--yes", f"--root={elsewhere}", *chosen)
        for name in ("incoming", "heartbeat", "claims", "control/gate"):
            folder = Path(EXPORT) / "site/spool" / name  # on the file server, where root is root
            os.chown(folder, -1, NOBODY)
            folder.chmod(0o775)
        yield running


def test_root_is_nobody_on_this_file_system() -> None:
    place = Path(EXPORT) / "open"
    place.mkdir()
    place.chmod(0o777)
    (Path(MOUNT) / "open/file").touch()
    assert (place / "file").stat().st_uid == NOBODY
    with pytest.raises(PermissionError):
        (Path(MOUNT) / "file").touch()


def test_a_node_and_the_controller_find_nothing_to_mend(cluster: Cluster) -> None:
    there = cluster.run("slurm-hooks", "doctor", check=False).stdout.splitlines()
    (line,) = (line for line in there if line.split()[1] == "spool")
    assert line.startswith("ok "), line
    here = cluster.run("recovery", "doctor", check=False, user=USER).stdout.splitlines()
    (line,) = (line for line in here if line.split()[1:2] == ["spool"])
    assert line.startswith("ok "), line


def test_a_failed_job_is_reported_and_run_again(cluster: Cluster) -> None:
    script = 'test "${SLURM_RESTART_COUNT:-0}" -gt 0 || exit 7'
    opted_in = ("--comment=recovery=requeue", "--output=/dev/null")
    job = cluster.submit(*opted_in, "--wrap", script)

    def done() -> bool:
        cluster.run("recovery", "once", user=USER, timeout_seconds=WAIT_SECONDS)
        found = cluster.job(job)
        return (found["JobState"], found["Restarts"]) == ("COMPLETED", "1")

    cluster.wait(done, 2 * WAIT_SECONDS, "the second attempt")
    archived = [*(Path(MOUNT) / "site/spool/archive").rglob("*.jsonl")]
    assert f'"id":{job},' in archived[0].read_text()
    assert list((Path(MOUNT) / "site/spool/rejected").iterdir()) == []
    assert archived[0].owner() == USER


def test_what_a_node_may_do_it_reads_there(cluster: Cluster) -> None:
    cluster.run("recovery", "once", user=USER, timeout_seconds=WAIT_SECONDS)
    said = cluster.run("slurm-hooks", "doctor", check=False).stdout
    (line,) = (line for line in said.splitlines() if line.split()[1:2] == ["gate"])
    assert "no grant in force includes gate" in line, "and not that nobody could be believed"
    assert {*spool.OF_NODES} < {*spool.FOLDERS}
