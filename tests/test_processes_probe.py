"""What a finished job left is told, and ended only where asked for; never anything of another job.

Processes are real: each test has a PID namespace of its own, so that nothing else on this machine
is in sight of a probe that may kill, and nothing a test starts outlives it.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from recovery.demo import fake_nvml
from recovery.demo.cluster import Cluster
from slurm_hooks import spool
from slurm_hooks.config import Config, ConfigError, load
from slurm_hooks.context import HookContext
from slurm_hooks.probes import Look, Skipped
from slurm_hooks.probes import load as load_probe
from slurm_hooks.probes.process_table import survey
from slurm_hooks.record import RecordJob
from tests.node import PROGRAMS, Node, job

ANN, BOB = 51_001, 51_002
JOB = 4_000_007
SLEEP = "exec sleep 600"
STUBBORN = f"trap '' TERM; {SLEEP}"
RESTLESS = "trap '' TERM; while :; do sleep 0.05; done"


class Machine:
    """A node whose processes are the test's own: jobs' leftovers, and hooks among them."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.started: list[subprocess.Popen[str]] = []
        setup = (
            "mount -t tmpfs tmpfs /dev && mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9 && "
            "mknod -m 666 /dev/nvidia2 c 1 3 && echo up && exec sleep 600"
        )
        self.init = subprocess.Popen(
            ["unshare", "-m", "-p", "-f", "--mount-proc", "--kill-child", "sh", "-c", setup],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.init.stdout
        assert self.init.stdout.readline() == "up\n"
        children = Path(f"/proc/{self.init.pid}/task/{self.init.pid}/children")
        self.inside = children.read_text(encoding="ascii").split()[0]

    def configure(self, **settings: object) -> None:
        lines = [f"{key} = {str(value).lower()}" for key, value in settings.items()]
        self.node.configure("\n".join(["[probes.processes]", *lines, ""]))

    def start(
        self, uid: int, script: str, environ: Mapping[str, str] = {}, group: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start a process in this machine, in the cgroup ``group``; its script has begun."""
        join = ["sh", "-c", f'echo 0 > {group}/cgroup.procs; exec "$@"', "sh"] if group else []
        become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
        told = [f"{name}={value}" for name, value in environ.items()]
        clean = ["env", "-i", "PATH=/usr/bin:/bin", *told]
        process = subprocess.Popen(
            [*self._enter(), *join, *become, *clean, "bash", "-c", f"echo begun; {script}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.started.append(process)
        assert process.stdout
        assert process.stdout.readline() == "begun\n"
        return process

    def step_daemon(self, title: str, uid: int | None) -> None:
        """Start what shows as a slurmstepd of that title, with a task of ``uid`` as its child."""
        program = self.node.root / "slurmstepd"
        shutil.copy("/usr/bin/sleep", program)
        become = f"setpriv --reuid={uid} --regid={uid} --clear-groups"
        task = f"{become} bash -c 'echo task; exec sleep 600' & " if uid else "echo task; "
        daemon = self.start(0, f"{task} exec -a '{title}' {program} 600")
        assert daemon.stdout
        assert daemon.stdout.readline() == "task\n"

    def mount(self, behind: str, point: str) -> int:
        """Mount a folder through bindfs in this machine; return the pid of its server."""
        setup = "[ -e /dev/fuse ] || mknod /dev/fuse c 10 229; mkdir -p $0 $1; exec bindfs -f $0 $1"
        server = subprocess.Popen([*self._enter(), "sh", "-c", setup, behind, point], text=True)
        self.started.append(server)
        deadline = time.monotonic() + 30
        inside = [*self._enter(), "mountpoint", "-q", point]
        while subprocess.run(inside, stderr=subprocess.DEVNULL, check=False).returncode:
            assert time.monotonic() < deadline, "bindfs does not mount"
        (pid,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        return int(pid)

    def go_on(self) -> None:
        """Continue what was stopped; nsenter stops with the program that it waits for."""
        for process in self.started:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            if process.poll() is None:
                for pid in (*children.read_text(encoding="ascii").split(), str(process.pid)):
                    os.kill(int(pid), signal.SIGCONT)

    def epilog(
        self, told: Mapping[str, str] = {}, *, restart: int = 1, **changes: str
    ) -> list[dict[str, Any]]:
        """Run the epilog of job JOB of ANN, which has failed, and return its findings."""
        environ = {**job(JOB, "1:0"), "SLURM_JOB_UID": str(ANN), **told, **changes}
        environ |= {"SLURM_JOB_RESTART_COUNT": str(restart), "SLURMD_NODENAME": "n1"}
        environ["SLURM_RECOVERY_CONFIG"] = str(self.node.config)
        before = len(self.node.records())
        done = subprocess.run(
            [*self._enter(), PROGRAMS / "slurm-hook-epilog"],
            env=environ,
            cwd=self.node.root,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0
        (record,) = self.node.records()[before:]
        (probe,) = record["probes"]
        assert probe["status"] in ("ok", "findings"), probe
        found: list[dict[str, Any]] = record["findings"]
        return found

    def _enter(self) -> list[str]:
        return ["/usr/bin/nsenter", "-t", self.inside, "-p", "-m", "-r", "-w"]

    def close(self) -> None:
        self.init.kill()
        for process in [self.init, *self.started]:
            process.wait(10)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    assert os.geteuid() == 0, "needs root: other users' processes are what this probe looks at"
    made = Machine(Node(tmp_path))
    made.configure()
    yield made
    made.close()


def of_job(number: int = JOB, restart: int = 1) -> dict[str, str]:
    return {"SLURM_JOB_ID": str(number), "SLURM_RESTART_COUNT": str(restart)}


def codes(findings: list[dict[str, Any]]) -> list[str]:
    return [finding["code"] for finding in findings]


def names_below(pid: int) -> list[str]:
    """The names of a process and of its first descendants."""
    names = []
    while True:
        names.append(Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip())
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        if not children:
            return names
        pid = int(children[0])


def signal_of(process: subprocess.Popen[str]) -> int:
    """Wait for a started process to be ended; return the signal that ended it."""
    return -process.wait(10)


def lives(process: subprocess.Popen[str]) -> bool:
    return process.poll() is None


def test_a_node_with_nothing_left_is_silent(machine: Machine) -> None:
    machine.start(BOB, SLEEP, of_job(JOB + 1))
    machine.start(ANN, SLEEP)
    assert machine.epilog() == []


def test_what_a_job_left_is_reported_and_left_alone_by_default(machine: Machine) -> None:
    left = machine.start(ANN, SLEEP, of_job())
    (finding,) = machine.epilog()
    assert (finding["code"], finding["count"]) == ("processes.left_behind", 1)
    assert finding["job_id"] == JOB
    assert "sleep (pid" in finding["summary"]
    assert lives(left)


@pytest.mark.parametrize("name", ["SLURMD_NODENAME", "SLURM_CONF"])
def test_what_another_slurmd_of_the_machine_started_is_not_this_ones(
    machine: Machine, name: str
) -> None:
    told = {"SLURM_CONF": "/etc/slurm/slurm.conf", "SLURMD_NODENAME": "n1"}
    machine.start(ANN, SLEEP, {**of_job(), **told, name: "another"})
    assert machine.epilog(SLURM_CONF=told["SLURM_CONF"]) == []
    machine.start(ANN, SLEEP, {**of_job(), **told})
    (found,) = machine.epilog(SLURM_CONF=told["SLURM_CONF"])
    assert found["count"] == 1


def test_where_configured_it_is_asked_to_end_and_then_made_to(machine: Machine) -> None:
    machine.configure(end=True, grace=0.5)
    polite, stubborn = (machine.start(ANN, script, of_job()) for script in (SLEEP, STUBBORN))
    (finding,) = machine.epilog()
    assert (finding["code"], finding["severity"]) == ("processes.ended", "info")
    assert finding["count"] == 2
    assert signal_of(polite) == signal.SIGTERM
    assert signal_of(stubborn) == signal.SIGKILL


def test_what_starts_others_while_it_is_ended_leaves_none_of_them(machine: Machine) -> None:
    machine.configure(end=True, grace=0.2)
    restless = [machine.start(ANN, RESTLESS, of_job()) for _ in range(3)]
    assert codes(machine.epilog()) == ["processes.ended"]
    assert [signal_of(process) for process in restless] == [signal.SIGKILL] * 3
    assert machine.epilog() == []


def test_a_failing_slurm_query_cannot_kill_another_job_of_the_user(machine: Machine) -> None:
    """There is no query; the other job's own processes are what spares it, and this job's too."""
    machine.configure(end=True, grace=0.5)
    other = machine.start(ANN, SLEEP, of_job(JOB + 1))
    left = machine.start(ANN, SLEEP, of_job())
    (finding,) = machine.epilog()
    assert finding["code"] == "processes.left_behind"
    assert f"not ended: job {JOB + 1}" in finding["summary"]
    assert lives(other)
    assert lives(left)


@pytest.mark.parametrize("uid", [ANN, None], ids=["of the user", "of nobody knows whom"])
def test_another_jobs_slurmstepd_spares_everything(machine: Machine, uid: int | None) -> None:
    machine.configure(end=True, grace=0.5)
    left = machine.start(ANN, SLEEP, of_job())
    machine.step_daemon(f"slurmstepd: [{JOB + 1}.extern]", uid)
    assert codes(machine.epilog()) == ["processes.left_behind"]
    assert lives(left)


def test_another_users_job_does_not_keep_leftovers_alive(machine: Machine) -> None:
    machine.configure(end=True, grace=0.5)
    left = machine.start(ANN, SLEEP, of_job())
    machine.step_daemon(f"slurmstepd: [{JOB + 1}.batch]", BOB)
    assert codes(machine.epilog()) == ["processes.ended"]
    assert signal_of(left) == signal.SIGTERM


@pytest.mark.parametrize("title", [f"slurmstepd: [{JOB}.extern]", "/usr/sbin/slurmstepd"])
def test_nothing_is_ended_while_a_slurmstepd_may_be_the_jobs_own(
    machine: Machine, title: str
) -> None:
    machine.configure(end=True, grace=0.5)
    left = machine.start(ANN, SLEEP, of_job())
    machine.step_daemon(title, None)
    assert codes(machine.epilog()) == ["processes.left_behind"]
    assert lives(left)


def test_a_repeated_epilog_spares_the_next_attempt_of_the_same_job(machine: Machine) -> None:
    machine.configure(end=True, grace=0.5)
    attempt = machine.start(ANN, SLEEP, of_job(restart=2))
    assert machine.epilog(restart=1) == []
    assert lives(attempt)


def test_a_forged_job_id_ends_nobody_else(machine: Machine) -> None:
    machine.configure(end=True, grace=0.5)
    others = [machine.start(uid, SLEEP, of_job()) for uid in (BOB, 0, 999)]
    assert machine.epilog() == []
    assert all(lives(process) for process in others)


def test_a_user_without_a_job_id_on_a_process_keeps_it(machine: Machine) -> None:
    machine.configure(end=True, grace=0.5)
    beside = machine.start(ANN, SLEEP)
    left = machine.start(ANN, SLEEP, of_job())
    assert codes(machine.epilog()) == ["processes.ended"]
    assert signal_of(left) == signal.SIGTERM
    assert lives(beside)


def test_a_gpu_that_is_still_held_is_a_fault_of_the_node(machine: Machine) -> None:
    machine.start(ANN, "exec sleep 600 3</dev/nvidia2", of_job())
    held, left = machine.epilog()
    assert (held["code"], held["gpu"], held["severity"]) == ("processes.gpu_held", 2, "fault")
    assert left["code"] == "processes.left_behind"


def on_gpu(machine: Machine, pids: dict[str, list[int]], **more: object) -> dict[str, str]:
    """Let NVML count ``pids`` on GPUs by minor number; return what an epilog is told of that."""
    folder, state = machine.node.root / "nvml", machine.node.root / "gpus.json"
    folder.mkdir()
    library = fake_nvml.build(folder)
    gpus = {gpu: {"processes": listed} for gpu, listed in pids.items()}
    fake_nvml.write_state(state, {"count": 4, "minor_order": [3, 2, 1, 0], "gpus": gpus, **more})
    return dict(fake_nvml.environment(library, state))


def pid_inside(process: subprocess.Popen[str]) -> int:
    """The pid that the process has printed: what it is called inside the machine."""
    assert process.stdout
    return int(process.stdout.readline())


def test_nvml_tells_of_who_holds_a_gpu_without_having_it_open(machine: Machine) -> None:
    beside = machine.start(ANN, f"echo $$; {SLEEP}")
    others = [machine.start(uid, f"echo $$; {SLEEP}", of_job(JOB + 1)) for uid in (BOB, 0)]
    pids = [pid_inside(process) for process in (beside, *others)]
    told = on_gpu(machine, {"2": [*pids, 999_999]})
    (held,) = machine.epilog(told)
    assert (held["code"], held["gpu"], held["pid"]) == ("processes.gpu_held", 2, pids[0])
    assert machine.epilog(told, SLURM_JOB_GPUS="0,1") == [], "not a GPU of this job"


def test_an_nvml_that_hangs_costs_the_probe_nothing_but_its_answer(machine: Machine) -> None:
    left = machine.start(ANN, f"echo $$; {SLEEP}", of_job())
    told = on_gpu(machine, {"2": [pid_inside(left)]}, hang_seconds=60, hang_in="nvmlInit")
    assert codes(machine.epilog(told)) == ["processes.left_behind"]


def test_what_outlives_sigkill_is_told_with_where_it_waits(machine: Machine) -> None:
    """Like a hard NFS mount: a request that a file system has taken and does not answer.

    One bindfs lies over another that is stopped, so that the upper one waits within the request.
    """
    machine.configure(end=True, grace=0.2)
    lower = machine.mount("/dev/disk", "/dev/lower")
    machine.mount("/dev/lower", "/dev/upper")
    os.kill(lower, signal.SIGSTOP)
    try:
        stuck = machine.start(ANN, "exec cat /dev/upper/file", of_job())
        deadline = time.monotonic() + 30
        while "cat" not in names_below(stuck.pid):
            assert time.monotonic() < deadline
        (found,) = machine.epilog()
        assert (found["code"], found["severity"]) == ("processes.unkillable", "fault")
        assert "cat, state D" in found["evidence"][0]["text"]
        assert lives(stuck)
    finally:
        machine.go_on()
    stuck.wait(30)


def test_a_gpu_held_by_no_job_is_told_and_its_holder_never_ended(machine: Machine) -> None:
    machine.configure(end=True, grace=0.5)
    holder = machine.start(ANN, "exec sleep 600 3</dev/nvidia2")
    assert codes(machine.epilog()) == ["processes.gpu_held"]
    assert machine.epilog(SLURM_JOB_GPUS="0,1") == [], "not a GPU of this job"
    assert lives(holder)


def test_a_gpu_that_its_holders_end_frees_is_not_called_held(machine: Machine) -> None:
    machine.configure(end=True, grace=0.5)
    machine.start(ANN, "exec sleep 600 3</dev/nvidia2", of_job())
    assert codes(machine.epilog()) == ["processes.ended"]


def test_the_cgroup_is_believed_before_the_environment(machine: Machine, tmp_path: Path) -> None:
    """Whatever SLURM_JOB_ID a process of another job was started with, it stays that job's."""
    pids = Path("/sys/fs/cgroup/pids")
    root = pids if pids.is_dir() else pids.parent
    group = root / f"slurm-{tmp_path.name}-{os.getpid()}" / f"job_{JOB + 1}"
    group.mkdir(parents=True)
    try:
        machine.configure(end=True, grace=0.5)
        other = machine.start(ANN, SLEEP, of_job(), group)
        assert machine.epilog() == []
        assert lives(other)
    finally:
        machine.close()
        for folder in (group, group.parent):
            folder.rmdir()


def test_a_flood_of_leftovers_is_one_finding(machine: Machine) -> None:
    machine.start(ANN, "for i in $(seq 40); do sleep 600 & done; wait", of_job())
    time_limit = time.monotonic() + 10
    while (finding := machine.epilog()[0])["count"] < 41:
        assert time.monotonic() < time_limit
    assert len(finding["evidence"]) == 16
    assert "and 37 more" in finding["summary"]


@pytest.mark.parametrize(
    ("hook", "uid"), [("prolog", ANN), ("health_check", ANN), ("epilog", 0), ("epilog", 999)]
)
def test_only_the_end_of_a_users_job_is_looked_at(hook: str, uid: int) -> None:
    context = HookContext(hook, "n1", job=RecordJob(JOB, 0, uid=uid))
    with pytest.raises(Skipped):
        load_probe("processes").look(Look(context, Config()))


def test_no_other_hook_can_be_configured_to_end_processes(tmp_path: Path) -> None:
    config = tmp_path / "recovery.toml"
    config.write_text('[probes.processes]\nhooks = ["prolog"]\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="no other hook ends a job"):
        load(config)


@pytest.mark.slurm
def test_a_real_second_job_of_the_user_survives_the_epilog_of_the_first() -> None:
    settings = "[probes.processes]\nend = true\ngrace = 0.5\n"
    with Cluster(1, 2, config=settings, slurm_conf_extra=f"FirstJobId={JOB}") as cluster:
        spool.create(cluster.spool)
        # By number: 26.05 knows no user by the name of nobody.
        nobody = pwd.getpwnam("nobody").pw_uid
        submit = (
            f"--uid={nobody}",
            "--chdir=/",
            "--output=/dev/null",
            "--gpus-per-node=1",
            "--wrap",
        )
        second = cluster.submit(*submit, SLEEP)

        def of_second() -> set[int]:
            # Not its task prolog, which is a process of the job as well, for a moment.
            found = survey(nobody).processes
            pids = {process.pid for process in found if process.job == second}
            return {pid for pid in pids if Path(f"/proc/{pid}/comm").read_text() == "sleep\n"}

        before = cluster.wait(of_second, 30, "the second job runs")
        first = cluster.submit(*submit, "setsid -f sleep 600; exit 1")
        cluster.wait(lambda: cluster.job(first)["JobState"] == "FAILED", 30, "the first fails")

        def record() -> dict[str, Any] | None:
            texts = [path.read_bytes() for path in (cluster.spool / "incoming").glob("*.json")]
            found = [one for one in map(json.loads, texts) if one["hook"] == "epilog"]
            return found[0] if found else None

        reported = cluster.wait(record, 30, "the epilog reports")
        assert reported is not None
        assert [probe["status"] for probe in reported["probes"] if probe["name"] == "processes"]
        assert of_second() == before
        assert cluster.job(second)["JobState"] == "RUNNING"
        left = [one for one in reported["findings"] if one["code"] == "processes.left_behind"]
        assert left, "setsid leaves the tree by which proctrack/linuxproc ends a job"
        assert "not ended: job" in left[0]["summary"]
        assert str(second) in left[0]["summary"]
