"""A job whose ranks meet in torch's all_reduce at every step, on the CPU; it resumes where it was.

srun python3 gloo_train.py FOLDER
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed


def main(folder: Path) -> None:
    job, restart = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_RESTART_COUNT", "0")
    rank, ranks = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{job}.{restart}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(minutes=30),
    )
    progress = folder / "progress"
    step = json.loads(progress.read_text())["step"] if progress.exists() else 0
    torch.distributed.barrier()
    while True:
        total = torch.ones(1024)
        torch.distributed.all_reduce(total)
        assert total[0] == ranks
        step += 1
        if rank == 0:
            new = progress.with_suffix(".new")
            new.write_text(json.dumps({"step": step}))
            new.replace(progress)
        time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
