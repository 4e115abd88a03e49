"""How fast classify-log reads ordinary logs, against ``grep -E`` for the same strings.

    python benchmarks/classify_log.py [MEGABYTES]

Writes logs as training programs do (Megatron, Hugging Face, NCCL at INFO, progress bars) and one
whose lines all differ, each with a failure at the end, and prints for each: megabytes per second of
one core searched whole, the same for grep, and their ratio. Then the time for a small, a large and
a huge (sparse) file at the limits of the hook, which must not grow with the size. The machine's
other work is in both figures, so the ratio is what counts. At the end the confusion matrix on the
sets of the tests.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from slurm_hooks.joblog.layout import Layout, parse_layout
from slurm_hooks.joblog.read import Limits
from slurm_hooks.joblog.signatures import load
from slurm_hooks.joblog.verdict import classify

MEGABYTE = 1_000_000

DATA = Path(__file__).parent.parent / "tests" / "data"
SETS = {
    "composed": DATA / "logs",
    "public": DATA / "public_logs",
    "unseen": DATA / "unseen_logs",
    "further public": DATA / "more_public_logs",
    "further unseen": DATA / "more_unseen_logs",
}

_END = (
    "5: Traceback (most recent call last):\n"
    '5:   File "/home/u/train.py", line 9, in <module>\n'
    "5: KeyError: 'tokens'\n"
    "srun: error: n1: task 5: Exited with exit code 1\n"
)

_WORDS = [
    f"{chr(97 + n % 26)}{chr(97 + n * 7 % 26)}o{chr(97 + n * 11 % 26)}a" * 3 for n in range(97)
]
"""Words for a log whose lines differ in more than their digits: the dearest kind."""

ORDINARY = {
    "megatron": lambda n: (
        f" [2026-09-18 03:12:{n % 60:02d}] iteration {n:8d}/  500000 | consumed samples: {n * 1024}"
        f" | elapsed time per iteration (ms): 5120.4 | learning rate: 2.9e-04 | lm loss:"
        f" {2 + n % 7 / 100:.6E} | grad norm: 0.214 | number of skipped iterations:   0 |"
        " number of nan iterations:   0 |\n"
    ),
    "hugging face": lambda n: (
        f"{{'loss': {2 + n % 9 / 10:.4f}, 'grad_norm': 1.25, 'learning_rate': 4.9e-05,"
        f" 'epoch': {n / 1000:.2f}}}\n"
    ),
    "nccl info": lambda n: (
        f"gpu-b07:21911:22870 [{n % 8}] NCCL INFO Channel {n % 32:02d}/0 : {n % 64}[{n % 8}] ->"
        f" {(n + 8) % 64}[{n % 8}] [send] via NET/IB/{n % 8}/GDRDMA\n"
    ),
    "no two alike": lambda n: (
        f"sample {n}: {_WORDS[n % 97]} {_WORDS[n * 31 % 89]} {_WORDS[n * 17 % 83]}"
        f" {_WORDS[n * 7 % 79]} {_WORDS[n * 13 % 73]}\n"
    ),
    "progress bar": lambda n: (
        f"Epoch 3:  {n % 100:2d}%|{'#' * (n % 20):20s}| {n}/90000 [1:02:03<2:03:04,  1.37it/s,"
        f" loss=2.{n % 100:02d}]\r"
    ),
}


def main() -> None:
    """Print the figures."""
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with tempfile.TemporaryDirectory() as folder:
        print(f"searched whole, {size} MB each, one core: MB/s")
        print(f"{'log':14} {'classify-log':>12} {'grep -E':>9} {'ratio':>6}")
        for name in ORDINARY:
            path = _write(Path(folder) / "log", name, size * MEGABYTE)
            ours, grep = _speeds(path)
            print(f"{name:14} {ours:12.0f} {grep:9.0f} {ours / grep:6.2f}")
        _bounded(Path(folder))
    for name, folder in SETS.items():
        if folder.exists():
            _matrix(name, folder)


def _write(path: Path, name: str, size: int) -> Path:
    with path.open("w", encoding="utf-8") as log:
        written = n = 0
        while written < size:
            lines = "".join(ORDINARY[name](n + k) for k in range(1000))
            log.write(lines)
            written, n = written + len(lines), n + 1000
        log.write(_END)
    return path


def _speeds(path: Path) -> tuple[float, float]:
    """Megabytes per second of processor time of ours and of grep, best of three each."""
    megabytes = path.stat().st_size / MEGABYTE
    literals = {text for signature in load().signatures for text in signature.any}
    pattern = "|".join(sorted(re.sub(r"([][().*+?^$|\\{}])", r"\\\1", one) for one in literals))
    limits = Limits(whole=1 << 40)
    ours, grep = [], []
    for _ in range(3):
        began = time.process_time()
        answer = classify([path], limits=limits).document
        ours.append(time.process_time() - began)
        if answer["class"] != "program.exception":
            raise SystemExit(f"wrong answer: {answer}")
        began = sum(os.times()[2:4])
        # Into a pipe: writing to /dev/null, grep stops at its first match.
        subprocess.run(["grep", "-E", "-c", pattern, path], stdout=subprocess.PIPE, check=True)
        grep.append(sum(os.times()[2:4]) - began)
    return megabytes / min(ours), megabytes / max(min(grep), 0.001)


def _bounded(folder: Path) -> None:
    print("\nat the hook's limits: seconds")
    for megabytes in (10, 100, 10_000):
        path = _write(folder / "log", "megatron", min(megabytes, 100) * MEGABYTE)
        if megabytes > 100:
            with path.open("rb+") as log:
                tail = log.read()[-12 * MEGABYTE :]
                log.seek(megabytes * MEGABYTE)
                log.write(tail)
        began = time.process_time()
        classify([path])
        print(f"{megabytes:7d} MB {time.process_time() - began:8.2f}")


def _matrix(name: str, folder: Path) -> None:
    print(f"\nthe {name} set: rows are the reading, columns the verdict")
    wanted = json.loads((folder / "verdicts.json").read_text(encoding="utf-8"))
    cells: Counter[tuple[str, str]] = Counter()
    right_class = right_nodes = innocents = 0
    for one in wanted:
        layout = parse_layout(one["layout"]) if one["layout"] else Layout()
        answer = classify([folder / one["file"]], layout, one.get("hosts")).document
        cells[one["job_verdict"], answer["job_verdict"]] += 1
        right_class += answer["class"] == one["class"]
        named = {item["node"] for item in answer["implicated"]}
        right_nodes += named == set(one["implicated"])
        innocents += len(named - set(one["implicated"]))
    verdicts = ("requeue", "hold", "leave")
    print(f"{'':10}" + "".join(f"{name:>9}" for name in verdicts))
    for row in verdicts:
        print(f"{row:10}" + "".join(f"{cells[row, column]:9d}" for column in verdicts))
    print(f"class right: {right_class} of {len(wanted)}; nodes right: {right_nodes}")
    print(f"program faults restarted: {cells['hold', 'requeue']}; innocent nodes: {innocents}")


if __name__ == "__main__":
    main()
