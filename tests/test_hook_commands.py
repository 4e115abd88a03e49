"""``slurm-hooks``: a look by hand, and what would not work on this node."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slurm_hooks import probes
from tests.node import PROGRAMS, Node

FATAL = {"code": "site.gone", "severity": "fatal", "summary": "GPU 3 is gone", "gpu": 3}
WARNING = {"code": "site.check", "severity": "warning", "summary": "something"}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def call(node: Node, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``slurm-hooks`` on the node."""
    environ = {"SLURM_RECOVERY_CONFIG": str(node.config), "SLURMD_NODENAME": node.name}
    return subprocess.run(
        [PROGRAMS / "slurm-hooks", *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(("finding", "status"), [(WARNING, 0), (FATAL, 1)])
def test_a_probe_by_hand_says_what_it_sees(
    node: Node, finding: dict[str, Any], status: int
) -> None:
    node.finds(finding)
    done = call(node, "probe", "site", "--json")
    assert done.returncode == status
    document = json.loads(done.stdout)
    assert document["schema"] == "probe/v1"
    assert document["findings"][0]["code"] == finding["code"]
    assert finding["summary"] in call(node, "probe", "site").stdout
    assert node.records() == [] and not node.buffer.exists(), "a look by hand leaves no trace"


def test_a_probe_by_hand_that_hangs_is_named(node: Node) -> None:
    node.config.write_text(
        node.config.read_text().replace("[probes.site]", "[probes.site]\ndeadline = 0.5")
    )
    node.probe("stuck", "sleep 100")
    done = call(node, "probe", "site")
    assert done.returncode == 1
    assert "site.stuck" in done.stdout and "hang" in done.stdout


def test_each_probe_is_listed_with_what_an_admin_wants_to_know(node: Node) -> None:
    node.configure('[probes.nvml]\nhooks = ["epilog"]\ndeadline = 3\n')
    document = json.loads(call(node, "probe", "--list", "--json").stdout)
    listed = {row["name"]: row for row in document["probes"]}
    assert list(listed) == [*probes.NAMES, "site"]
    assert listed["nvml"]["hooks"] == ["epilog"] and listed["nvml"]["deadline"] == 3
    assert all(row["needs"] and row["cost"] and row["codes"] for row in listed.values())
    text = call(node, "probe", "--list", "kernel_log").stdout
    assert "gpu.fell_off_bus" in text and "nvml" not in text.split()


@pytest.mark.parametrize("arguments", [("probe", "nvlm"), ("probe", "--nope"), ("nope",)])
def test_wrong_use_exits_2_with_what_is_right(node: Node, arguments: tuple[str, ...]) -> None:
    done = call(node, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""


def test_a_wrong_configuration_exits_2_and_names_the_line(node: Node) -> None:
    node.config.write_text("mood = 'act'\n")
    done = call(node, "probe", "site")
    assert done.returncode == 2
    assert f"{node.config}:1: unknown key 'mood'; did you mean 'mode'?" in done.stderr


def checks(node: Node) -> dict[str, dict[str, Any]]:
    """Return doctor's answers by subject."""
    document = json.loads(call(node, "doctor", "--json").stdout)
    assert document["schema"] == "doctor/v1"
    return {check["subject"]: check for check in document["checks"]}


def test_doctor_finds_a_sound_node_sound(node: Node) -> None:
    found = checks(node)
    for subject in ("configuration", "installation", "buffer", "spool"):
        assert found[subject]["status"] == "ok", found[subject]


def test_doctor_says_what_would_not_work_and_what_mends_it(node: Node) -> None:
    (node.spool / "incoming").chmod(0o777)
    node.buffer.mkdir()
    node.buffer.chmod(0o777)
    node.probe("bad", "exit 1").chmod(0o777)
    node.config.write_text(node.config.read_text() + "[polcy]\n")
    found = checks(node)
    assert "did you mean 'policy'?" in found["configuration"]["says"]
    assert found["spool"]["mend"].startswith("chmod go-w")
    assert found["buffer"]["status"] == "broken"
    assert "can be changed by others" in found["probe site.bad"]["says"]
    assert call(node, "doctor").returncode == 1


def test_doctor_answers_on_a_node_whose_configuration_hangs(node: Node) -> None:
    node.config.unlink()
    os.mkfifo(node.config)
    (node.root / "probes.d").rmdir()
    done = call(node, "doctor")
    assert done.returncode == 1
    assert "hang" in done.stdout
