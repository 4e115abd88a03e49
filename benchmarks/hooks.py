"""Wall time and memory of the hooks, against ``python -c "import pynvml"`` in the same run.

    ./scripts/bench hooks --runs 20

Each line is one program, run as slurmd runs it (no PATH, output read to its end), from an
installation as a node has it: copied into an environment of its own, not editable, with compiled
files kept. GPUs are eight fake ones with 18 NVLinks each. Lines take turns, so that a machine that
grows busy slows all of them.

Time is the least and the median of wall times, and so are the ratios; the median decides. Processor
time, user's and system's, is the median of what the program and all that it started have used: it
says what a hook takes from a job that has the other cores, and depends less on how busy the machine
is. Memory is
the largest sum of proportional set sizes over the program and its children, sampled in runs of
their own. Aims: hooks within twice the import of pynvml, a prolog without probes (none configured,
or spared by a health check) within twice ``python -c pass``, and all below 45 MB.

For comparison, gcm's check-nvidia-smi (PyPI: gpucm) looks at the same GPUs through the same
library, from an environment of its own; where that cannot be installed within a minute, the reason
is printed instead. NHC (mej/nhc) has no row: it is in neither Debian nor PyPI, so its source was
not at hand.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recovery.demo import fake_nvml
from slurm_hooks import probes, spool

GPUS, LINKS = 8, 18

INSTALLED = ("slurm_hooks", "pynvml", "psutil")
"""What a hook on a node may import, beside Python's own."""

GCM = "gpucm==0.0.2"

GCM_INSTALL_SECONDS = 60.0

PROGRAM = """#!{python}
import re
import sys
from {module} import {function}
if __name__ == '__main__':
    sys.exit({function}())
"""
"""A console script as pip 23 writes it, which loads ``re``."""

USUAL = ("nvml", "kernel_log", "host")

PR_SET_CHILD_SUBREAPER = 36
"""prctl(2): who outlives its parent becomes ours to wait for, and so its processor time is told."""

MEGABYTES = 45.0
"""Most that a hook and its children may hold together."""

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


FUNCTIONS = {
    "prolog": "slurm_hooks.quiet",
    "epilog": "slurm_hooks.hooks",
    "health_check": "slurm_hooks.hooks",
}
"""The hooks and the modules that their scripts name, as in setup.cfg."""

FRESH = "freshness = 3600\n"


@dataclass(frozen=True)
class Line:
    """One row of the table: what is run, what work it does, and which row it is compared with."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    work: str = ""
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
    """Return what is measured, with installation and configurations for it in ``folder``."""
    programs = install(folder / "venv")
    spool.create(folder / "spool")
    (folder / "kernel.log").touch()
    fake_nvml.write_state(folder / "gpus.json", {"count": GPUS, "every": {"nvlinks": LINKS}})
    driver = fake_nvml.environment(fake_nvml.build(folder / "lib"), folder / "gpus.json")
    python, pynvml, passing = (
        str(programs / "python"),
        'python -c "import pynvml"',
        "python -c pass",
    )

    def hook(name: str, kind: str, against: str, work: str, *only: str, more: str = "") -> Line:
        told = {
            "SLURMD_NODENAME": "n1",
            "SLURM_RECOVERY_CONFIG": str(configuration(folder, only, more)),
            "SLURM_RECOVERY_NOTES": str(folder / "notes"),
            **(driver if only else {}),
            **(JOB if kind != "health-check" else {}),
        }
        return Line(name, (str(programs / f"slurm-hook-{kind}"),), told, work, against, 2.0)

    gpus = f"{GPUS} GPUs, {LINKS} links each: all that nvml looks at"
    run(hook("", "health-check", passing, "", *USUAL, more=FRESH))  # spares its prologs
    return (
        Line(passing, (python, "-c", "pass"), {}),
        Line(pynvml, (python, "-c", "import pynvml"), {}),
        hook("prolog, probes off", "prolog", passing, "nothing"),
        hook("prolog, after a health check", "prolog", passing, "its pass", *USUAL, more=FRESH),
        hook("prolog, nvml, kernel_log, host", "prolog", pynvml, gpus, *USUAL),
        hook("prolog, all probes", "prolog", pynvml, gpus, *probes.NAMES),
        hook("epilog, all probes", "epilog", pynvml, gpus, *probes.NAMES),
        hook("health check, all probes", "health-check", pynvml, gpus, *probes.NAMES),
        *gcm(folder / "gcm", driver),
    )


def gcm(folder: Path, driver: Mapping[str, str]) -> tuple[Line, ...]:
    """Install gcm and return its lines, or none, with the reason on standard error."""
    try:
        venv.create(folder, symlinks=True, with_pip=True)
        pip = [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", GCM]
        subprocess.run(pip, capture_output=True, timeout=GCM_INSTALL_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        why = " ".join(said.decode("utf-8", "replace").split())[-300:] or str(error)
        print(f"gcm is left out: {GCM} cannot be installed: {why}", file=sys.stderr)
        return ()
    program = (str(folder / "bin" / "health_checks"), "check-nvidia-smi", "bench", "prolog")
    common = (*program, "--sink", "do_nothing", "--log-folder", str(folder / "log"))
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(folder), **driver}
    counted = ("-c", "gpu_num", "--gpu_num", str(GPUS))
    memory_checks = ("row_remap_pending", "row_remap_failed", "ecc_uncorrected_volatile_total")
    more = tuple(word for check in memory_checks for word in ("-c", check))
    limit = ("--ecc_uncorrected_volatile_threshold", "1")
    return (
        Line("gcm check-nvidia-smi", (*common, *counted), environ, f"{GPUS} GPUs: counted"),
        Line(
            "gcm check-nvidia-smi, 4 checks",
            (*common, *counted, *more, *limit),
            environ,
            f"{GPUS} GPUs: counted, row remapping, ECC errors",
        ),
    )


def install(folder: Path) -> Path:
    """Install the hooks as on a node, and return the folder of programs."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in INSTALLED:
        origin = importlib.import_module(name).__file__
        assert origin
        found = Path(origin)
        ignored = shutil.ignore_patterns("__pycache__")
        if found.name == "__init__.py":
            shutil.copytree(found.parent, packages / name, ignore=ignored)
        else:
            shutil.copy(found, packages)
    programs = folder / "bin"
    for function, module in FUNCTIONS.items():
        program = programs / f"slurm-hook-{function.replace('_', '-')}"
        python = programs / "python"
        program.write_text(PROGRAM.format(python=python, module=module, function=function))
        program.chmod(0o755)
    return programs


def configuration(folder: Path, only: tuple[str, ...], more: str) -> Path:
    """Write a recovery.toml in which the probes ``only`` run, and return its path.

    ``more`` are lines of ``[hooks]``.
    """
    path = folder / f"{'-'.join(only) or 'none'}{'-fresh' if more else ''}.toml"
    text = f'[spool]\npath = "{folder}/spool"\nbuffer = "{folder}/buffer"\n'
    text += f'[hooks]\nrun = "{folder}/run"\n{more}'
    text += f'[probes.kernel_log]\npath = "{folder}/kernel.log"\n'
    if only != probes.NAMES:
        off = {*probes.NAMES, "site"} - set(only)
        text += "hooks = []\n" if "kernel_log" in off else ""
        text += "".join(f"[probes.{name}]\nhooks = []\n" for name in off - {"kernel_log"})
    path.write_text(text)
    return path


def measure(table: tuple[Line, ...], runs: int) -> list[dict[str, object]]:
    """Run every line ``runs`` times, in turns, and return the rows of the table."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for line in table:
        run(line)  # compiled files, page cache, first states
    times: dict[str, list[Time]] = {line.name: [] for line in table}
    for _ in range(runs):
        for line in table:
            times[line.name].append(run(line))
    least = {name: min(one.wall for one in seen) for name, seen in times.items()}
    medians = {name: statistics.median(one.wall for one in seen) for name, seen in times.items()}
    used = {name: statistics.median(one.processor for one in seen) for name, seen in times.items()}
    rows: list[dict[str, object]] = []
    for line in table:
        ratio, best, share = (
            round(seconds[line.name] / seconds[line.against], 2) if line.against else None
            for seconds in (medians, least, used)
        )
        megabytes = round(max(memory(line) for _ in range(3)) / 1e6, 1)
        kept = ratio is None or line.aim is None or (ratio <= line.aim and megabytes < MEGABYTES)
        rows.append(
            {
                "name": line.name,
                "work": line.work,
                "milliseconds": round(medians[line.name] * 1000, 1),
                "least_milliseconds": round(least[line.name] * 1000, 1),
                "processor_milliseconds": round(used[line.name] * 1000, 1),
                "megabytes": megabytes,
                "against": line.against,
                "ratio": ratio,
                "least_ratio": best,
                "processor_ratio": share,
                "aim": line.aim,
                "kept": kept,
            }
        )
    return rows


@dataclass(frozen=True)
class Time:
    """What one run of a program took, in seconds: on the clock, and of the processors."""

    wall: float
    processor: float


def run(line: Line) -> Time:
    """Run a line once and return its time."""
    before, started = processor_seconds(), time.perf_counter()
    subprocess.run(line.argv, env=dict(line.environ), capture_output=True, check=True)
    wall = time.perf_counter() - started
    try:
        while True:  # until nobody is left that it had started
            os.wait()
    except ChildProcessError:
        return Time(wall, processor_seconds() - before)


def processor_seconds() -> float:
    """Return what all processes that have been waited for have used, user and system."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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
    print(
        f"{'':34} {'wall time, ms':>16} {'cpu ms':>7} {'':>6} {'ratio of':>20}\n"
        f"{'program':34} {'least':>8} {'median':>7} {'median':>7} {'MB':>6}"
        f" {'least':>6} {'median':>6} {'cpu':>6} {'aim':>4}  kept  work"
    )
    for row in rows:
        times = f"{row['least_milliseconds']:>8} {row['milliseconds']:>7}"
        times += f" {row['processor_milliseconds']:>7} {row['megabytes']:>6}"
        ratios = " ".join(
            f"{row[name] or '':>6}" for name in ("least_ratio", "ratio", "processor_ratio")
        )
        kept = "" if row["aim"] is None else "yes" if row["kept"] else "NO"
        aim = row["aim"] or ""
        print(f"{row['name']:34} {times} {ratios} {aim:>4}  {kept:4}  {row['work']}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
