"""Captures what squeue --json says of a federation's jobs, on real daemons of this machine.

    apt-get install slurmdbd mariadb-server     (nothing of it need be running)
    .venv/bin/python tests/data/slurm/capture_federation.py

Needs root. Starts MariaDB, slurmdbd and two private clusters, east and west, makes one federation
of them and lets a job fail. Writes 22.05/squeue-federation.json (its cluster of origin's answer)
and 22.05/squeue-federation-sibling.json (the other's, while both wait to run it).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from recovery.demo.cluster import Cluster
from recovery.demo.ports import Ports

HERE = Path(__file__).parent / "22.05"
NOBODY = 65534
WAIT_SECONDS = 60.0


class Daemons:
    """What both clusters need: one munge key, MariaDB, and slurmdbd, in ``folder``."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.socket = folder / "munge" / "socket"
        ports = Ports(2)
        self.database_port, self.port = ports.numbers
        ports.close()

    def start(self, *argv: str | Path, **environment: str) -> None:
        log = self._stack.enter_context((self.folder / "log").open("ab"))
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)

    @property
    def accounting(self) -> str:
        """The lines of slurm.conf by which a controller finds them."""
        return (
            "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=localhost\n"
            f"AccountingStoragePort={self.port}\nAccountingStoragePass={self.socket}\n"
            f"AuthInfo=socket={self.socket}\n"
        )

    def start_munge(self) -> None:
        folder = self.socket.parent
        folder.mkdir(mode=0o755)
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        files = [f"--{name}-file={folder}/{name}" for name in ("key", "pid", "log", "seed")]
        self.start("/usr/sbin/munged", "--foreground", "--force", f"--socket={self.socket}", *files)

    def start_database(self) -> None:
        data = self.folder / "db"
        data.mkdir()
        shutil.chown(data, "mysql", "mysql")
        place = ("--no-defaults", f"--datadir={data}", "--user=mysql")
        subprocess.run(
            ["mariadb-install-db", *place, "--auth-root-authentication-method=normal"],
            check=True,
            capture_output=True,
        )
        where = (f"--socket={data}/sock", f"--port={self.database_port}", f"--pid-file={data}/pid")
        self.start("/usr/sbin/mariadbd", *place, *where, "--bind-address=127.0.0.1")
        made = "create user s@'127.0.0.1' identified by 'x'; grant all on *.* to s@'127.0.0.1'"
        client = ("mariadb", "--no-defaults", f"--socket={data}/sock", "-uroot", "-e")
        until(lambda: done(*client, "select 1"))
        done(*client, f"{made}; create user s@localhost identified by 'x';"
             " grant all on *.* to s@localhost")  # fmt: skip

    def start_slurmdbd(self) -> None:
        conf = self.folder / "slurmdbd.conf"
        conf.write_text(
            f"AuthType=auth/munge\nAuthInfo=socket={self.socket}\nDbdHost=localhost\n"
            f"DbdPort={self.port}\nSlurmUser=root\nStorageType=accounting_storage/mysql\n"
            f"StorageHost=127.0.0.1\nStoragePort={self.database_port}\nStorageUser=s\n"
            f"StoragePass=x\nPidFile={self.folder}/slurmdbd.pid\n"
        )
        conf.chmod(0o600)
        named = "ClusterName=east\nSlurmctldHost=localhost\nAuthType=auth/munge\n"
        nodes = "NodeName=x\nPartitionName=y Nodes=x\n"
        (self.folder / "slurm.conf").write_text(f"{named}{self.accounting}{nodes}")
        self.start("/usr/sbin/slurmdbd", "-D", SLURM_CONF=str(self.folder / "slurm.conf"))
        until(lambda: self.sacctmgr("show", "cluster"))
        self.sacctmgr("add", "cluster", "east", "west")
        self.sacctmgr("add", "federation", "coast", "clusters=east,west")
        self.sacctmgr("add", "account", "lab")
        self.sacctmgr("add", "user", "nobody", "account=lab")

    def sacctmgr(self, *words: str) -> bool:
        return done("sacctmgr", "-i", *words, SLURM_CONF=str(self.folder / "slurm.conf"))


def done(*argv: str, **environment: str) -> bool:
    """Whether a command succeeds."""
    ran = subprocess.run(argv, capture_output=True, env={**os.environ, **environment}, timeout=60)
    return ran.returncode == 0


def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so.

    Raises:
        TimeoutError: it is not, within a minute.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("a daemon does not answer")
        time.sleep(0.2)


@contextlib.contextmanager
def daemons() -> Iterator[Daemons]:
    folder = Path(tempfile.mkdtemp(prefix="federation-"))
    folder.chmod(0o755)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        made = Daemons(folder, stack)
        made.start_munge()
        until(made.socket.exists)
        made.start_database()
        made.start_slurmdbd()
        yield made


def submit(cluster: Cluster) -> int:
    return cluster.submit(
        f"--uid={NOBODY}", "--chdir=/", "--output=/dev/null", "--comment=recovery=requeue",
        "--job-name=failed", "--gpus-per-node=8", "--wrap=sleep 2; exit 1",
    )  # fmt: skip


def main() -> None:
    with daemons() as shared:
        extra = "TaskProlog=/bin/true\n" + shared.accounting
        with Cluster(2, 8, hooks=False, slurm_conf_extra=f"ClusterName=east\n{extra}") as east:
            # As long as it knows of no other cluster that answers, it runs the job itself.
            job = submit(east)
            east.wait(lambda: east.job(job)["JobState"] == "FAILED", WAIT_SECONDS, "it fails")
            answer = east.run("squeue", "--json", "--states=all").stdout
            (HERE / "squeue-federation.json").write_text(answer)
            with Cluster(2, 8, hooks=False, slurm_conf_extra=f"ClusterName=west\n{extra}") as west:
                east.restart_controller()  # it asks slurmdbd where west listens
                east.wait(
                    lambda: (
                        "PersistConnSend/Recv:Yes"
                        in east.run("scontrol", "show", "federation").stdout
                    ),
                    WAIT_SECONDS,
                    "east reaches west",
                )
                submit(east)
                west.wait(lambda: west.run("squeue", "-h").stdout, WAIT_SECONDS, "it is there")
                answer = west.run("squeue", "--json", "--states=all").stdout
                (HERE / "squeue-federation-sibling.json").write_text(answer)


if __name__ == "__main__":
    main()
