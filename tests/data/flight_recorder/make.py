"""Make the dumps beside this file with torch itself: gloo on the CPU, six ranks, one of them late.

pip install '.[test-torch]' && python tests/data/flight_recorder/make.py

Rank 2 comes to five collectives of the default group and one of a smaller one, and not to the
sixth, an all_reduce; a thread of each rank writes its dump while the others wait, as NCCL's
watchdog does. Of gloo, torch 2.13 knows no device times and no members of groups; dumps with what
it knows of NCCL's are composed in the test.
"""

from __future__ import annotations

import datetime
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed
import torch.multiprocessing
from torch._C import _distributed_c10d

HERE = Path(__file__).parent


def rank_main(rank: int, port: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.distributed.init_process_group(
        "gloo", rank=rank, world_size=6, timeout=datetime.timedelta(seconds=60)
    )
    tensor = torch.ones(4)
    small = torch.distributed.new_group([0, 1, 2, 3])
    for _ in range(3):
        torch.distributed.all_reduce(tensor)
    torch.distributed.broadcast(tensor, 0)
    if rank < 4:
        torch.distributed.all_reduce(tensor, group=small)
    torch.distributed.barrier()
    threading.Thread(target=write, args=(rank,), daemon=True).start()
    if rank != 2:
        torch.distributed.all_reduce(tensor)
    time.sleep(60)


def write(rank: int) -> None:
    time.sleep(3)
    pickled = _distributed_c10d._dump_fr_trace(True, False, False)
    (HERE / f"nccl_trace_rank_{rank}").write_bytes(pickled)
    (HERE / f"rank_{rank}.json").write_bytes(_distributed_c10d._dump_fr_trace_json(True, False))
    os._exit(0)


if __name__ == "__main__":
    os.environ["TORCH_FR_BUFFER_SIZE"] = "200"
    torch.multiprocessing.spawn(rank_main, (sys.argv[1],), nprocs=6)
