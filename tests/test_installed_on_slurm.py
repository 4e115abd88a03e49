"""Installed as ``recovery init`` says, upgraded and uninstalled: Slurm never loses a node by it."""

from __future__ import annotations

import json
import re
import site
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.demo.cluster import Cluster

pytestmark = pytest.mark.slurm

WAIT_SECONDS = 60.0

RUNS_UNTIL = "touch {0}.runs; until [ -e {0} ]; do sleep 0.05; done; exit 3"


class Site:
    """A cluster of one node that knows nothing of this toolkit but what ``install`` tells it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.hooks = cluster.folder / "libexec"
        self.slurm_conf = cluster.layout.slurm_conf
        self.without = self.slurm_conf.read_text("utf-8")

    def init(self, *options: str, python: str = sys.executable) -> str:
        """Run ``recovery init`` of the installation that has ``python``; return what it prints."""
        command = "from recovery.cli import main; main()"
        argv = [python, "-c", command, "init", f"--hooks={self.hooks}", "--yes", *options]
        return self.cluster.run(*argv).stdout

    def install(self) -> None:
        """Follow docs/install.md: the hooks first, then the lines for slurm.conf."""
        self.init("--node")
        printed = self.init("--root", f"{self.cluster.folder}/elsewhere")
        lines = re.findall(r"^\w+=\S+$", printed, re.MULTILINE)
        assert f"Epilog={self.hooks}/slurm-hook-epilog" in lines
        self.configure(self.without + "\n".join(lines) + "\n")
        assert (
            f"{self.hooks}/slurm-hook-epilog" in self.cluster.run("scontrol", "show", "conf").stdout
        )

    def configure(self, text: str) -> None:
        """Put a slurm.conf in force, on the node as well."""
        before = self.reconfigured()
        self.slurm_conf.write_text(text, "utf-8")
        self.cluster.run("scontrol", "reconfigure")
        self.cluster.wait(
            lambda: self.reconfigured() > before, WAIT_SECONDS, "slurmd has heard of it"
        )

    def reconfigured(self) -> int:
        """How often slurmd has been told to (22.05 and later say it in words of their own)."""
        return len(re.findall("reconfigure", self.cluster.slurmd_log("n1")))

    def start(self, name: str) -> int:
        """Start a job that runs until ``finish``."""
        told = self.cluster.folder / name
        job = self.cluster.submit("--wrap", RUNS_UNTIL.format(told))
        # RUNNING is said before its prologs have run.
        self.cluster.wait(told.with_suffix(".runs").exists, WAIT_SECONDS, "the job's script runs")
        return job

    def finish(self, job: int, name: str) -> None:
        """Let a job fail, and see that its node takes the next one."""
        (self.cluster.folder / name).touch()
        self.wait_for(job, "FAILED")
        self.wait_for(self.cluster.submit("--wrap", "srun true"), "COMPLETED")
        assert self.cluster.job(job)["ExitCode"] == "3:0"
        assert "DRAIN" not in self.cluster.node("n1")["State"], self.cluster.node("n1")

    def wait_for(self, job: int, state: str) -> None:
        found = self.cluster.job
        self.cluster.wait(lambda: found(job)["JobState"] == state, WAIT_SECONDS, state)

    def reported(self, job: int) -> bool:
        """Whether an epilog has reported on a job."""
        records = (self.cluster.spool / "incoming").glob("*.json")
        told = [json.loads(path.read_bytes()).get("job") or {} for path in records]
        return job in [one.get("id") for one in told]


@pytest.fixture(scope="module")
def installed() -> Iterator[Site]:
    with Cluster(nodes=1, gpus=0, hooks=False) as cluster:
        made = Site(cluster)
        made.install()
        yield made


def test_with_the_lines_that_init_prints_slurm_runs_the_hooks(installed: Site) -> None:
    job = installed.start("first")
    installed.finish(job, "first")
    installed.cluster.wait(lambda: installed.reported(job), WAIT_SECONDS, "the epilog's record")


def test_a_node_whose_python_is_gone_runs_jobs_as_if_nothing_were_installed(
    installed: Site,
) -> None:
    scripts = {path: path.read_text("utf-8") for path in installed.hooks.iterdir()}
    for path, text in scripts.items():
        path.write_text(text.replace(sys.executable, "/nonexistent/python"), "utf-8")
    job = installed.start("without-python")
    installed.finish(job, "without-python")
    assert not installed.reported(job)
    for path, text in scripts.items():
        path.write_text(text, "utf-8")


def test_a_job_that_runs_during_an_upgrade_is_reported_by_the_next_version(
    installed: Site,
) -> None:
    job = installed.start("upgraded")
    folder = installed.cluster.folder / "next"
    venv.create(folder)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    same = "".join(f"site.addsitedir({path!r});" for path in site.getsitepackages())
    (packages / "these.pth").write_text(f"import site; {same}\n", "utf-8")
    printed = installed.init("--node", python=str(python))
    assert f"+python={python}\n" in printed
    installed.finish(job, "upgraded")
    installed.cluster.wait(lambda: installed.reported(job), WAIT_SECONDS, "the epilog's record")


def test_uninstalled_as_documented_while_a_job_runs_nothing_is_drained(installed: Site) -> None:
    job = installed.start("uninstalled")
    installed.configure(installed.without)
    in_force = installed.cluster.run("scontrol", "show", "config").stdout
    assert str(installed.hooks) not in in_force
    # docs/install.md has an admin wait a minute here, for hooks that run.
    installed.cluster.wait(lambda: not running(installed.hooks), WAIT_SECONDS, "no hook runs")
    for path in installed.hooks.iterdir():
        path.unlink()
    installed.finish(job, "uninstalled")


def running(folder: Path) -> bool:
    """Whether a process was started by a path below ``folder``."""
    said = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True, check=True)
    return str(folder) in said.stdout
