"""``recovery init`` makes a machine ready, says first what it would change, and never twice."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
from importlib import resources
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from slurm_hooks.config import ClassRule, load
from tests.node import Node, job

RECOVERY = Path(sys.executable).parent / "recovery"
NOBODY = pwd.getpwnam("nobody").pw_uid

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="gives folders to another user")


def init(root: Path, *options: str, answer: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``recovery init`` for an image below ``root``."""
    kept = {name: value for name, value in os.environ.items() if name != "SLURM_RECOVERY_CONFIG"}
    user = pwd.getpwuid(os.getuid()).pw_name
    argv = [str(RECOVERY), "init", f"--root={root}", f"--user={user}", *options]
    return subprocess.run(
        argv, env=kept, input=answer, capture_output=True, text=True, timeout=60, check=False
    )


def everything(root: Path) -> dict[str, str]:
    """Every path below ``root`` with its mode, owner and text or target."""
    found = {}
    for path in sorted(root.rglob("*")):
        seen = path.lstat()
        text = str(path.readlink()) if path.is_symlink() else ""
        text = path.read_text("utf-8") if stat.S_ISREG(seen.st_mode) else text
        found[str(path.relative_to(root))] = f"{seen.st_mode:o} {seen.st_uid} {text}"
    return found


def test_a_machine_is_made_ready_without_a_question(tmp_path: Path) -> None:
    done = init(tmp_path, "--yes", "--spool=/data/recovery", "--cluster=alpha")
    assert done.returncode == 0, done.stderr
    config = load(tmp_path / "etc/slurm/recovery.toml")
    assert (config.mode, config.spool.path) == ("monitor", Path("/data/recovery"))
    assert config.controller.cluster == "alpha"
    assert (tmp_path / "data/recovery/control/gate").is_dir()
    assert stat.S_IMODE((tmp_path / "data/recovery/reviews").stat().st_mode) == 0o1777
    assert stat.S_IMODE((tmp_path / "var/lib/slurm-recovery").stat().st_mode) == 0o750
    prolog = tmp_path / "usr/local/libexec/slurm-recovery/slurm-hook-prolog"
    assert stat.S_IMODE(prolog.stat().st_mode) == 0o755
    (python,) = re.findall(r"^python=(\S+)$", prolog.read_text("utf-8"), re.MULTILINE)
    assert Path(python).parent == Path(sys.executable).parent
    for line in ("Prolog=/usr/local/libexec/slurm-recovery/slurm-hook-prolog", "MinJobAge=900"):
        assert line in done.stdout


def test_a_second_run_finds_nothing_to_do(tmp_path: Path) -> None:
    assert init(tmp_path, "--yes", "--spool=/data/recovery").returncode == 0
    before = everything(tmp_path)
    for options in ([], ["--dry-run"], ["--spool=/data/recovery"]):
        again = init(tmp_path, *options)
        assert again.returncode == 0, again.stderr
        assert "Nothing to do" in again.stdout
    assert everything(tmp_path) == before


@pytest.mark.parametrize(("options", "answer"), [(["--dry-run"], ""), ([], "n\n"), ([], "")])
def test_nothing_is_written_that_was_not_agreed_to(
    tmp_path: Path, options: list[str], answer: str
) -> None:
    shown = init(tmp_path, *options, answer=answer)
    assert shown.returncode == 1
    assert f"+++ {tmp_path}/etc/slurm/recovery.toml" in shown.stdout
    assert '+mode = "monitor"' in shown.stdout
    assert everything(tmp_path) == {}


def test_a_changed_file_is_shown_as_a_diff_before_it_is_replaced(tmp_path: Path) -> None:
    init(tmp_path, "--yes")
    unit = tmp_path / "etc/systemd/system/slurm-recovery.service"
    unit.write_text(unit.read_text("utf-8").replace("RestartSec=5", "RestartSec=50"), "utf-8")
    shown = init(tmp_path, answer="y\n")
    assert "-RestartSec=50\n+RestartSec=5\n" in shown.stdout
    assert shown.returncode == 0
    assert "RestartSec=5\n" in unit.read_text("utf-8")


def test_the_admins_recovery_toml_is_never_touched(tmp_path: Path) -> None:
    config = tmp_path / "etc/slurm/recovery.toml"
    config.parent.mkdir(parents=True)
    config.write_text('# mine\n[spool]\npath = "/mine"\n', "utf-8")
    against = init(tmp_path, "--yes", "--spool=/other")
    assert against.returncode == 2
    assert "spool.path = '/mine', not '/other'" in against.stderr
    assert set(everything(tmp_path)) == {"etc", "etc/slurm", "etc/slurm/recovery.toml"}
    assert init(tmp_path, "--yes").returncode == 0
    assert (tmp_path / "mine/incoming").is_dir()
    assert config.read_text("utf-8").startswith("# mine")


def test_the_whole_default_policy_stands_in_recovery_toml_as_comments(tmp_path: Path) -> None:
    init(tmp_path, "--yes")
    text = (tmp_path / "etc/slurm/recovery.toml").read_text("utf-8")
    table = text.partition("# The default policy, whole")[2]
    rows = re.findall(r"^# (\[policy\..+\]|\w+ = \S+)$", table, re.MULTILINE)
    uncommented = tmp_path / "uncommented.toml"
    uncommented.write_text("\n".join(rows), "utf-8")
    default = (resources.files("recovery") / "policy.toml").read_text("utf-8")
    names = re.findall(r'^\["(.+)"\]$', default, re.MULTILINE)
    assert list(load(uncommented).policy.classes) == names
    first = '[policy.classes."hardware.gpu"]\njob = "requeue"\nnode = "drain"'
    assert first in uncommented.read_text("utf-8")
    assert load(uncommented).policy.classes["hardware.gpu"] == ClassRule(
        "requeue", "drain", fleet="requeue"
    )


@needs_root
def test_an_aggregator_without_roots_rights_owns_what_it_writes(tmp_path: Path) -> None:
    done = init(tmp_path, "--yes", "--user=nobody")
    assert done.returncode == 0, done.stderr
    spool = tmp_path / "shared/slurm-recovery"
    folders = [spool, *spool.rglob("*"), tmp_path / "var/lib/slurm-recovery"]
    assert {folder.stat().st_uid for folder in folders} == {NOBODY}
    raw = (tmp_path / "etc/slurm/recovery.toml").read_bytes()
    assert b"trusted_uids = [0, 65534]" in raw
    assert "User=nobody" in (tmp_path / "etc/systemd/system/slurm-recovery.service").read_text()


@needs_root
def test_folders_that_nodes_write_are_left_to_the_admin_where_munge_tells_whose_word_it_is(
    tmp_path: Path,
) -> None:
    options = ("--yes", "--user=nobody", "--authenticate=munge")
    init(tmp_path, *options)
    spool = tmp_path / "shared/slurm-recovery"
    for name in ("incoming", "heartbeat", "claims", "control/gate"):  # as docs/install.md has it
        shutil.chown(spool / name, group=NOBODY)
        (spool / name).chmod(0o775)
    assert "Nothing to do" in init(tmp_path, *options).stdout
    (spool / "control").chmod(0o775)
    assert "-folder, mode 0775" in init(tmp_path, *options).stdout
    assert stat.S_IMODE((spool / "control").stat().st_mode) == 0o755


def test_a_node_gets_the_hooks_and_the_configuration_alone(tmp_path: Path) -> None:
    assert init(tmp_path, "--yes", "--node").returncode == 0
    files = [path for path, seen in everything(tmp_path).items() if not seen.startswith("4")]
    assert files == [
        "etc/slurm/recovery.toml",
        *(
            f"usr/local/libexec/slurm-recovery/slurm-hook-{name}"
            for name in ("epilog", "health-check", "prolog", "task-prolog")
        ),
    ]


HOOKS = Path("usr/local/libexec/slurm-recovery")


@pytest.mark.parametrize("name", ["prolog", "epilog", "health-check", "task-prolog"])
def test_a_hook_is_the_program_of_its_name(tmp_path: Path, name: str) -> None:
    init(tmp_path, "--yes", "--node")
    script = (tmp_path / HOOKS / f"slurm-hook-{name}").read_text("utf-8")
    (entry,) = entry_points(group="console_scripts", name=f"slurm-hook-{name}")
    assert f"from {entry.module} import {entry.attr}\n" in script
    assert script.endswith(f"{entry.attr}()'\n")


def test_a_hook_does_its_work(tmp_path: Path) -> None:
    init(tmp_path, "--yes", "--node")
    node = Node(tmp_path / "node")
    node.finds({"code": "site.check", "severity": "fault", "summary": "something"})
    done = run_as_slurmd_does(tmp_path / HOOKS / "slurm-hook-prolog", node)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [record["verdict"] for record in node.records()] == ["fault"]


@pytest.mark.parametrize("name", ["prolog", "epilog", "health-check", "task-prolog"])
@pytest.mark.parametrize("python", ["/nonexistent/python", sys._base_executable])  # type: ignore[attr-defined]
def test_a_hook_whose_python_or_package_is_gone_fails_no_job(
    tmp_path: Path, name: str, python: str
) -> None:
    init(tmp_path, "--yes", "--node")
    script = tmp_path / HOOKS / f"slurm-hook-{name}"
    script.write_text(script.read_text("utf-8").replace(sys.executable, python), "utf-8")
    assert python in script.read_text("utf-8")
    done = run_as_slurmd_does(script, Node(tmp_path / "node"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def run_as_slurmd_does(script: Path, node: Node) -> subprocess.CompletedProcess[str]:
    """Run a hook on ``node``, in a folder where a job has put a file of our package's name."""
    (node.root / "slurm_hooks.py").write_text("raise SystemExit(9)\n")
    told = {
        "SLURM_RECOVERY_CONFIG": str(node.config),
        "SLURM_RECOVERY_NOTES": str(node.notes),
        "SLURMD_NODENAME": node.name,
    }
    return subprocess.run(
        [script], env={**told, **job(exit_code="1:0")}, cwd=node.root,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_links_of_an_earlier_version_are_replaced(tmp_path: Path) -> None:
    prolog = tmp_path / HOOKS / "slurm-hook-prolog"
    prolog.parent.mkdir(parents=True)
    old = tmp_path / "old"
    old.write_text("an earlier version's program")
    prolog.symlink_to(old)
    done = init(tmp_path, "--yes", "--node")
    assert f"-link to {old}\n" in done.stdout
    assert not prolog.is_symlink()
    assert old.read_text() == "an earlier version's program"


def test_a_unit_that_somebody_has_masked_stays_masked(tmp_path: Path) -> None:
    unit = tmp_path / "etc/systemd/system/slurm-recovery.service"
    unit.parent.mkdir(parents=True)
    unit.symlink_to("/dev/null")
    refused = init(tmp_path, "--yes")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "move it away" in refused.stderr
    assert str(unit.readlink()) == "/dev/null"


def test_a_link_where_the_spool_belongs_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/slurm-recovery").symlink_to(elsewhere)
    refused = init(tmp_path, "--yes")
    assert refused.returncode == 2
    assert "is no folder" in refused.stderr
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("path", ["/a b", "/a%b", "/a\nExecStart=/bin/false", '/a"b'])
@pytest.mark.parametrize("option", ["--spool", "--state", "--hooks"])
def test_a_path_that_a_unit_cannot_name_is_refused(tmp_path: Path, option: str, path: str) -> None:
    refused = init(tmp_path, "--yes", f"{option}={path}")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "choose another" in refused.stderr
    assert everything(tmp_path) == {}


def test_an_unknown_user_is_named(tmp_path: Path) -> None:
    refused = init(tmp_path, "--yes", "--user=nosuchuser")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "nosuchuser" in refused.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    init(tmp_path, "--yes")
    unit = tmp_path / "etc/systemd/system/slurm-recovery.service"
    # It would look for the units named in After= on this machine.
    alone = re.sub(r"^(After|Wants|RequiresMountsFor)=.*\n", "", unit.read_text(), flags=re.M)
    unit.write_text(alone)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "slurm-recovery.service" not in done.stderr, done.stderr
