"""The cluster of containers is described without contradiction: no Docker is needed to see that.

scripts/compose-test brings it up for real.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from recovery.demo.cluster import Cluster
from recovery.demo.containers import NODES, SERVICES
from slurm_hooks.config import load

TOP = Path(__file__).parents[1]
DOCKER = TOP / "docker"
SLURM_CONF = DOCKER / "etc" / "slurm.conf"

OF_A_PRIVATE_CLUSTER = re.compile(
    r"(ClusterName|SlurmctldHost|SlurmUser|StateSaveLocation|SlurmdSpoolDir|\w+PidFile"
    r"|Accounting\w+|JobAcctGatherType|Prolog|Epilog|HealthCheckProgram|TaskProlog|NodeName"
    r"|PartitionName)="
)
"""Lines that are about places and daemons which only the containers have."""


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    parsed = yaml.safe_load((TOP / "docker-compose.yml").read_text())
    assert isinstance(parsed, dict)
    return parsed


def test_there_is_a_controller_a_database_and_four_nodes(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == set(SERVICES)
    for name, service in compose["services"].items():
        assert service["hostname"] == name
        assert service["command"] == ("node" if name in NODES else name)
        assert service["healthcheck"]["test"]


def test_nothing_is_privileged_and_no_port_is_published(compose: dict[str, Any]) -> None:
    assert compose["networks"]["cluster"]["internal"] is True
    for service in compose["services"].values():
        assert not {"privileged", "cap_add", "ports", "network_mode", "pid", "devices"} & set(
            service
        )


def test_each_waits_until_what_it_needs_is_healthy(compose: dict[str, Any]) -> None:
    needs = {
        name: {other: how["condition"] for other, how in service.get("depends_on", {}).items()}
        for name, service in compose["services"].items()
    }
    healthy = "service_healthy"
    nodes = {node: {"controller": healthy} for node in NODES}
    assert needs == {"dbd": {}, "controller": {"dbd": healthy}, **nodes}


def test_all_know_one_another_by_the_addresses_they_have(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        known = dict(line.split(":", 1) for line in map(_default, service["extra_hosts"]))
        assert known == {
            name: _default(other["networks"]["cluster"]["ipv4_address"])
            for name, other in compose["services"].items()
        }


def test_spool_homes_and_key_are_on_volumes(compose: dict[str, Any]) -> None:
    assert set(compose["volumes"]) == {"munge", "data"}
    for name, service in compose["services"].items():
        data = {"data:/data"} if name != "dbd" else set()
        assert set(service["volumes"]) == {"munge:/etc/munge", *data}
    assert load(DOCKER / "etc" / "recovery.toml").spool.path.is_relative_to("/data")


def test_every_file_that_the_image_takes_in_is_there() -> None:
    dockerfile = (DOCKER / "Dockerfile").read_text()
    let_in = {line[1:] for line in (TOP / ".dockerignore").read_text().split() if line[0] == "!"}
    taken = [
        word for line in re.findall(r"^COPY (.+) \S+$", dockerfile, re.M) for word in line.split()
    ]
    assert taken
    for path in taken:
        assert (TOP / path).exists(), path
        assert Path(path).parts[0] in let_in, f".dockerignore keeps {path} out"


def test_what_starts_the_containers_is_executable_and_shell() -> None:
    for script in (DOCKER / "entrypoint", TOP / "scripts" / "compose-test"):
        assert script.stat().st_mode & 0o111
        subprocess.run(["bash", "-n", script], check=True)
    subprocess.run(["sh", "-n", DOCKER / "bin" / "with-fake-gpus"], check=True)


def test_slurm_conf_names_the_nodes_and_calls_every_hook() -> None:
    conf = SLURM_CONF.read_text()
    assert re.search(r"^NodeName=n\[1-4\] .*Gres=gpu:8$", conf, re.M)
    assert re.search(r"^SlurmctldHost=controller$", conf, re.M)
    dockerfile = (DOCKER / "Dockerfile").read_text()
    for key in ("Prolog", "Epilog", "HealthCheckProgram", "TaskProlog"):
        found = re.search(rf"^{key}=/usr/local/libexec/fake-gpus/slurm-hook-(\S+)$", conf, re.M)
        assert found, key
        assert re.search(rf"for hook in [^;]*\b{found[1]}\b", dockerfile), found[1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    lines = [line for line in SLURM_CONF.read_text().splitlines() if "=" in line]
    kept = [line for line in lines if not OF_A_PRIVATE_CLUSTER.match(line)]
    with Cluster(1, 1, slurm_conf_extra="\n".join(kept), hooks=False) as running:
        yield running


@pytest.mark.slurm
@pytest.mark.skipif(
    shutil.which("slurmctld", path="/usr/sbin:/sbin:/usr/bin") is None, reason="no Slurm"
)
def test_slurm_takes_the_containers_settings(cluster: Cluster) -> None:
    shown = cluster.run("scontrol", "show", "config").stdout
    in_force = dict(re.findall(r"^(\w+)\s+= (.*?)\s*$", shown, re.MULTILINE))
    assert in_force["SlurmdTimeout"] == "30 sec"
    assert in_force["PrologFlags"].lower() == "alloc"
    assert in_force["ReturnToService"] == "1"


def _default(text: str) -> str:
    """The text with each ``${NAME:-value}`` as it is where NAME is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
