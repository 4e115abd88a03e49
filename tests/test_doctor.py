"""``slurm-hooks doctor``: what is configured, what would not work, and the line that mends it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import slurm_hooks
from recovery.demo.cluster import Cluster
from slurm_hooks import file_systems
from tests.node import PROGRAMS, Node

CONF = """ClusterName=c
PrologFlags=Alloc
Prolog={programs}/slurm-hook-prolog
Epilog={programs}/slurm-hook-epilog
HealthCheckProgram={programs}/slurm-hook-health-check
HealthCheckInterval=60
TaskProlog={programs}/slurm-hook-task-prolog
"""

MOUNTS = r"""21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
22 21 0:20 / /proc rw - proc proc rw
30 21 0:51 / /opt rw,relatime shared:7 master:2 - nfs4 server:/opt rw
31 30 8:2 / /opt/own rw - xfs /dev/sdb rw
32 21 0:52 / /with\040space rw - lustre 10.0.0.1@tcp:/x rw
33 21 0:53 / /later rw - tmpfs tmpfs rw
34 33 0:54 / /later rw - fuse.sshfs host:/ rw
half a line
"""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    made = Node(tmp_path)
    slurm_conf(made)
    made.configure(f'[hooks]\nslurm_conf = "{tmp_path}/slurm.conf"\n')
    return made


def slurm_conf(node: Node, *, without: str = "", **changes: str) -> None:
    """Write a slurm.conf that is right but for its line ``without`` and the keys changed."""
    text = CONF.format(programs=PROGRAMS)
    kept = [line for line in text.splitlines() if not without or not line.startswith(f"{without}=")]
    lines = [*kept, *(f"{key}={value}" for key, value in changes.items()), ""]
    (node.root / "slurm.conf").write_text("\n".join(lines))


def examine(node: Node, **environ: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return doctor's exit status and its answers by subject."""
    told = {"SLURM_RECOVERY_CONFIG": str(node.config), "SLURMD_NODENAME": node.name, **environ}
    inherited = {name: text for name, text in os.environ.items() if name != "SLURM_CONF"}
    done = subprocess.run(
        [PROGRAMS / "slurm-hooks", "doctor", "--json"],
        env={**inherited, **told},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    document = json.loads(done.stdout)
    assert document["schema"] == "doctor/v1"
    return done.returncode, {check["subject"]: check for check in document["checks"]}


def test_a_node_on_which_all_works_passes(node: Node) -> None:
    status, found = examine(node)
    assert [check for check in found.values() if check["status"] == "broken"] == []
    assert status == 0
    for key in ("Prolog", "Epilog", "HealthCheckProgram", "TaskProlog", "Slurm's time-outs"):
        assert found[key]["status"] == "ok", found[key]
    assert "monitor" in found["configuration"]["says"]
    assert found["gate"]["says"].startswith("never closes")


@pytest.mark.parametrize(
    ("without", "changes", "subject", "status", "says", "mend"),
    [
        ("Prolog", {}, "Prolog", "warning", "never runs", "Prolog=/"),
        ("Epilog", {"Epilog": "/gone/epilog"}, "Epilog", "broken", "nothing that is", "correct"),
        ("Epilog", {"Epilog": "/gone.d/*"}, "Epilog", "broken", "nothing that is", "correct"),
        ("Epilog", {"Epilog": "/etc/passwd"}, "Epilog", "broken", "cannot be run", "chmod +x"),
        ("Epilog", {"Epilog": "/bin/true"}, "Epilog", "warning", "does not name", "exec /"),
        ("HealthCheckInterval", {}, "HealthCheckProgram", "broken", "never runs", "Interval=60"),
        ("", {"PrologEpilogTimeout": "10"}, "Slurm's time-outs", "broken", "epilog after 10", "8"),
        ("", {"PrologTimeout": "5"}, "Slurm's time-outs", "broken", "prolog after 5 s", "= 3"),
        ("", {"MessageTimeout": "6"}, "Slurm's time-outs", "warning", "as hung", "= 2"),
        ("PrologFlags", {}, "Slurm's time-outs", "warning", "too late", "PrologFlags=Alloc"),
    ],
)
def test_what_slurm_conf_lacks_is_said_with_the_line_that_mends_it(
    node: Node,
    without: str,
    changes: dict[str, str],
    subject: str,
    status: str,
    says: str,
    mend: str,
) -> None:
    slurm_conf(node, without=without, **changes)
    exit_status, found = examine(node)
    assert found[subject]["status"] == status, found[subject]
    assert says in found[subject]["says"]
    assert mend in found[subject]["mend"]
    assert exit_status == int(status == "broken")


@pytest.mark.parametrize("python", ["/nonexistent/python", "/bin/false"])
def test_a_hook_that_does_nothing_since_its_python_is_gone_is_found(
    node: Node, python: str
) -> None:
    script = node.root / "slurm-hook-epilog"
    script.write_text(f"#!/bin/sh\n# slurm-hook-epilog\npython={python}\n")
    script.chmod(0o755)
    slurm_conf(node, Epilog=str(script))
    status, found = examine(node)
    assert (status, found["Epilog"]["status"]) == (1, "broken")
    assert python in found["Epilog"]["says"]
    assert "recovery init --node" in found["Epilog"]["mend"]


@pytest.mark.parametrize("name", ["incoming", "heartbeat", "claims", "control/gate"])
def test_each_folder_that_a_node_writes_into_is_tried(node: Node, name: str) -> None:
    (node.spool / name).rmdir()
    (node.spool / name).touch()
    status, found = examine(node)
    assert (status, found["spool"]["status"]) == (1, "broken")
    assert str(node.spool / name) in found["spool"]["says"]


def test_a_script_of_the_site_that_runs_the_hook_counts_as_the_hook(node: Node) -> None:
    folder = node.root / "prolog.d"
    folder.mkdir()
    for name, text in (("10-site", "true"), ("20-recovery", f"exec {PROGRAMS}/slurm-hook-prolog")):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    slurm_conf(node, without="Prolog", Prolog=f"{folder}/*")
    _, found = examine(node)
    assert found["Prolog"]["status"] == "ok"
    assert "20-recovery" in found["Prolog"]["says"]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("bindfs"), reason="needs root and bindfs")
def test_hooks_that_lie_on_a_file_system_that_can_hang_are_insisted_upon(
    node: Node, elsewhere: Path
) -> None:
    program = elsewhere / "slurm-hook-epilog"
    shutil.copy(PROGRAMS / "slurm-hook-epilog", program)
    slurm_conf(node, without="Epilog", Epilog=str(program))
    status, found = examine(node)
    assert status == 1
    assert "lies on fuse" in found["Epilog"]["says"]
    assert "the node's own disk" in found["Epilog"]["mend"]
    slurm_conf(node)
    package = Path(slurm_hooks.__file__).parent
    shutil.copytree(package, elsewhere / "slurm_hooks")
    status, found = examine(node, PYTHONPATH=str(elsewhere))
    assert status == 1
    assert "hang with it before their first line" in found["installation"]["says"]
    assert "the node's own disk" in found["installation"]["mend"]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system that a process serves."""
    behind, seen = tmp_path / "behind", tmp_path / "seen"
    behind.mkdir()
    seen.mkdir()
    server = subprocess.Popen(["bindfs", "-f", str(behind), str(seen)])
    try:
        until = time.monotonic() + 20
        while not seen.is_mount() and time.monotonic() < until:
            time.sleep(0.01)
        yield seen
    finally:
        subprocess.run(["umount", "-l", str(seen)], check=False)
        server.kill()
        server.wait()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/usr/bin/python3", "ext4"),
        ("/opt/venv/bin/python", "nfs4"),
        ("/optional", "ext4"),
        ("/opt/own/x", "xfs"),
        ("/with space/x", "lustre"),
        ("/later/x", "fuse.sshfs"),
    ],
)
def test_the_mount_that_is_seen_says_where_a_path_lies(path: str, kind: str) -> None:
    assert file_systems.of_resolved(path, MOUNTS) == kind


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "lustre", "gpfs", "beegfs", "fuse", "fuse.any"])
def test_file_systems_served_from_elsewhere_are_known(kind: str) -> None:
    assert file_systems.is_remote(kind)
    assert not any(file_systems.is_remote(own) for own in ("ext4", "xfs", "overlay", "fuseblk"))


def test_each_probe_says_what_it_can_do_and_what_it_lacks(node: Node) -> None:
    log = node.root / "kern.log"
    log.touch(mode=0o600)
    settings = f'[probes.kernel_log]\npath = "{log}"\n[probes.storage]\n[probes.nvml]\n'
    node.configure(f'[hooks]\nslurm_conf = "{node.root}/slurm.conf"\n{settings}')
    node.finds({"code": "site.check", "severity": "warning", "summary": "something"})
    status, found = examine(node)
    assert status == 0, [check for check in found.values() if check["status"] == "broken"]
    assert f"source: {log}" in found["probe kernel_log"]["says"]
    assert "no mounts are configured" in found["probe storage"]["says"]
    assert "off, in no hook" in found["probe fabric"]["says"]
    assert "finds something now" in found["probe site.site_check"]["says"]
    log.unlink()
    status, found = examine(node)
    assert (status, found["probe kernel_log"]["status"]) == (1, "broken")
    assert "probes.kernel_log.hooks = []" in found["probe kernel_log"]["mend"]


@pytest.mark.slurm
def test_a_private_clusters_nodes_are_sound() -> None:
    with Cluster(nodes=1, gpus=2) as cluster:
        told = {"SLURMD_NODENAME": "n1", "FAKE_NVML_STATE": str(cluster.gpu_state("n1"))}
        told["LD_LIBRARY_PATH"] = str(cluster.layout.library_folder)
        done = cluster.run("slurm-hooks", "doctor", check=False, env=told)
        assert done.returncode == 0, done.stdout
        assert "broken" not in done.stdout
        told_of_gpus = done.stdout.partition("probe nvml")[2].splitlines()[0]
        assert "gpus: 2" in told_of_gpus
