"""Wall time and memory of the hooks, against ``python -c "import pynvml"`` in the same run.

    ./scripts/bench hooks --runs 20

Each line is one program, run as slurmd runs it (no PATH, output read to its end). Lines take turns,
so that a machine that grows busy slows all of them. Time is the median of wall times; memory is
the largest sum of proportional set sizes over the program and its children, sampled in runs of
their own. Aims: hooks within twice the import of pynvml, with probes off within twice
``python -c pass``, and below 45 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_hooks import probes, spool

PROGRAMS = Path(sys.executable).parent

JOB = {
    "SLURM_CLUSTER_NAME": "bench",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_UID": "0",
    "SLURM_JOB_USER": "root",
    "SLURM_JOB_PARTITION": "train",
    "SLURM_NODELIST": "n1",
    "SLURM_JOB_GPUS": "0-7",
    "SLURM_JOB_EXIT_CODE2": "0:0",
}


@dataclass(frozen=True)
class Line:
    """One row of the table: what is run, and which row it is compared with."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    against: str | None = None
    aim: float | None = None


def main() -> int:
    """Measure, print the table, and exit 1 if an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20, help="runs of each program")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(lines(Path(folder)), arguments.runs)
    if arguments.json:
        print(json.dumps({"schema": "bench-hooks/v1", "rows": rows}, indent=2))
    else:
        print_table(rows)
    return 0 if all(row["kept"] for row in rows) else 1


def lines(folder: Path) -> tuple[Line, ...]:
    """Return what is measured, with the configurations for it written into ``folder``."""
    spool.create(folder / "spool")
    (folder / "kernel.log").touch()
    found = ", ".join(probes.NAMES)
    full = {"SLURMD_NODENAME": "n1", "SLURM_RECOVERY_CONFIG": configuration(folder, True)}
    none = {"SLURMD_NODENAME": "n1", "SLURM_RECOVERY_CONFIG": configuration(folder, False)}
    driver = {
        name: os.environ[name]
        for name in ("LD_LIBRARY_PATH", "FAKE_NVML_STATE")
        if name in os.environ
    }
    python, pynvml, passing = sys.executable, 'python -c "import pynvml"', "python -c pass"

    def hook(name: str) -> tuple[str, ...]:
        return (str(PROGRAMS / f"slurm-hook-{name}"),)

    return (
        Line(passing, (python, "-c", "pass"), {}),
        Line(pynvml, (python, "-c", "import pynvml"), {}),
        Line(f"prolog ({found})", hook("prolog"), {**full, **JOB, **driver}, pynvml, 2.0),
        Line(f"epilog ({found})", hook("epilog"), {**full, **JOB, **driver}, pynvml, 2.0),
        Line(f"health check ({found})", hook("health-check"), {**full, **driver}, pynvml, 2.0),
        Line("prolog, probes off", hook("prolog"), {**none, **JOB}, passing, 2.0),
    )


def configuration(folder: Path, with_probes: bool) -> str:
    """Write a recovery.toml and return its path."""
    path = folder / ("probes.toml" if with_probes else "none.toml")
    text = f'[spool]\npath = "{folder}/spool"\nbuffer = "{folder}/buffer"\n'
    if with_probes:
        text += f'[probes.kernel_log]\npath = "{folder}/kernel.log"\n'
    else:
        text += "".join(f"[probes.{name}]\nhooks = []\n" for name in (*probes.NAMES, "site"))
    path.write_text(text)
    return str(path)


def measure(table: tuple[Line, ...], runs: int) -> list[dict[str, object]]:
    """Run every line ``runs`` times, in turns, and return the rows of the table."""
    for line in table:
        run(line)  # compiled files, page cache, first states
    times: dict[str, list[float]] = {line.name: [] for line in table}
    for _ in range(runs):
        for line in table:
            times[line.name].append(run(line))
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows: list[dict[str, object]] = []
    for line in table:
        ratio = medians[line.name] / medians[line.against] if line.against else None
        rows.append(
            {
                "name": line.name,
                "milliseconds": round(medians[line.name] * 1000, 1),
                "megabytes": round(max(memory(line) for _ in range(3)) / 1e6, 1),
                "against": line.against,
                "ratio": None if ratio is None else round(ratio, 2),
                "aim": line.aim,
                "kept": ratio is None or line.aim is None or ratio <= line.aim,
            }
        )
    return rows


def run(line: Line) -> float:
    """Run a line once and return its wall time in seconds."""
    started = time.perf_counter()
    subprocess.run(line.argv, env=dict(line.environ), capture_output=True, check=True)
    return time.perf_counter() - started


def memory(line: Line) -> int:
    """Run a line once and return its largest proportional set size in bytes, children included."""
    process = subprocess.Popen(
        line.argv, env=dict(line.environ), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    largest = 0
    while process.poll() is None:
        largest = max(largest, sum(map(proportional_bytes, family(process.pid))))
    return largest


def family(pid: int) -> list[int]:
    """Return a process and its descendants (proc(5), children)."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return [pid]
    return [pid, *(below for child in text.split() for below in family(int(child)))]


def proportional_bytes(pid: int) -> int:
    """Return a process's proportional set size, 0 if it has ended."""
    try:
        for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if row.startswith("Pss:"):
                return int(row.split()[1]) * 1024
    except OSError:
        pass
    return 0


def print_table(rows: list[dict[str, object]]) -> None:
    """Print the rows for a person."""
    print(f"{'program':46} {'ms':>8} {'MB':>6} {'ratio':>6} {'aim':>5}  kept")
    for row in rows:
        ratio, aim = row["ratio"] or "", row["aim"] or ""
        kept = "" if row["aim"] is None else "yes" if row["kept"] else "NO"
        print(
            f"{row['name']:46} {row['milliseconds']:>8} {row['megabytes']:>6} {ratio:>6} {aim:>5}"
            f"  {kept}"
        )


if __name__ == "__main__":
    sys.exit(main())
