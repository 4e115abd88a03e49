"""Every line of slurm.conf.example, the optional ones included, is one that Slurm accepts."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.demo.cluster import Cluster

pytestmark = pytest.mark.slurm

EXAMPLE = Path(__file__).parents[1] / "slurm.conf.example"

INSTALLED = "/usr/local/libexec/slurm-recovery/slurm-hook-"

WRAPPER = {"prolog", "epilog", "health-check", "task-prolog"}


def settings() -> dict[str, str]:
    """Return the example's settings, those to be chosen as well."""
    lines = re.findall(r"^#?(\w+)=(\S+)$", EXAMPLE.read_text(), re.MULTILINE)
    assert len(lines) == len(dict(lines)), "no key stands there twice"
    return dict(lines)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster with the example's lines; the hooks are this cluster's own wrappers of them."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    programs = {name: f"{folder}/bin/{name}" for name in WRAPPER}
    lines = [
        f"{key}={programs[value.removeprefix(INSTALLED)] if INSTALLED in value else value}"
        for key, value in settings().items()
    ]
    extra = "\n".join(lines)
    with Cluster(nodes=1, gpus=1, folder=folder, slurm_conf_extra=extra) as running:
        yield running


def test_slurm_takes_every_line_as_it_stands(cluster: Cluster) -> None:
    shown = cluster.run("scontrol", "show", "config").stdout
    in_force = dict(re.findall(r"^(\w+)(?:\[0\])?\s+= (.*?)\s*$", shown, re.MULTILINE))
    for key, value in settings().items():
        told = in_force[key].removesuffix(" sec")
        if INSTALLED in value:
            assert told == f"{cluster.folder}/bin/{value.removeprefix(INSTALLED)}"
        else:
            wanted = set(value.split(","))
            assert wanted <= set(told.split(",")), (
                f"{key}: {value} was asked for, {told} is in force"
            )


def test_the_programs_it_names_are_those_that_are_installed() -> None:
    for value in settings().values():
        if value.startswith("/"):
            assert (Path(sys.executable).parent / Path(value).name).exists(), value


def test_a_job_runs_under_them(cluster: Cluster) -> None:
    job = cluster.submit("--wrap", "srun true")
    cluster.wait(lambda: cluster.job(job)["JobState"] == "COMPLETED", 60, "the job has run")
    assert "DRAIN" not in cluster.node("n1")["State"]
