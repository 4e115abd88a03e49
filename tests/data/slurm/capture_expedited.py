"""Captures what squeue --json says of jobs that were submitted with --requeue=expedite.

    .venv/bin/python tests/data/slurm/capture_expedited.py

Needs root and Slurm 26.05. Writes 26.05/squeue-expedited.json with three jobs, by name:

    by_slurm    its batch script has failed and no Epilog has, so Slurm holds it
    by_admin    the same, and an administrator holds it besides
    by_person   it ran, and a person has requeued and held it
"""

from __future__ import annotations

from pathlib import Path

from recovery.demo.cluster import Cluster

NOBODY = 65534
WAIT_SECONDS = 60.0
OUT = Path(__file__).parent / "26.05" / "squeue-expedited.json"


def main() -> None:
    extra = "TaskProlog=/bin/true\nSlurmctldParameters=enable_expedited_requeue"
    with Cluster(2, 8, hooks=False, slurm_conf_extra=extra) as cluster:

        def submit(name: str, script: str) -> int:
            return cluster.submit(
                f"--uid={NOBODY}", "--chdir=/", "--output=/dev/null", "--requeue=expedite",
                f"--job-name={name}", "--gpus-per-node=1", f"--wrap={script}",
            )  # fmt: skip

        def until(job: int, state: str) -> None:
            what = f"job {job} becomes {state}"
            cluster.wait(lambda: cluster.job(job)["JobState"] == state, WAIT_SECONDS, what)

        for name in ("by_slurm", "by_admin"):
            job = submit(name, "exit 7")
            until(job, "REQUEUE_HOLD")
        cluster.run("scontrol", "hold", str(job))
        by_person = submit("by_person", "sleep 600")
        until(by_person, "RUNNING")
        cluster.run("scontrol", "requeuehold", str(by_person))
        until(by_person, "PENDING")
        OUT.write_text(cluster.run("squeue", "--json", "--states=all").stdout)


if __name__ == "__main__":
    main()
