"""Make the samples beside this file with the real libraries, so that tests need none of them.

pip install '.[test-torch]' && python tests/data/checkpoints/make.py
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import jax.numpy
import orbax.checkpoint
import safetensors.torch
import torch
import torch.distributed.checkpoint

HERE = Path(__file__).parent


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1200}
    torch.save(saved, HERE / "zip.pt")
    torch.save(saved, HERE / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(
        {
            "epoch": 3,
            "global_step": 1200,
            "pytorch-lightning_version": "2.5.0",
            "state_dict": model.state_dict(),
            "loops": {},
            "optimizer_states": [optimizer.state_dict()],
        },
        HERE / "lightning.ckpt",
    )
    arguments = argparse.Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=1)
    torch.save(
        {"args": arguments, "iteration": 100, "model": model.state_dict()},
        HERE / "megatron_rank.pt",
    )
    torch.save(
        {
            "module": model.state_dict(),
            "dp_world_size": 2,
            "mp_world_size": 1,
            "global_steps": 100,
        },
        HERE / "deepspeed_model_states.pt",
    )
    torch.save({"optimizer_state_dict": optimizer.state_dict()}, HERE / "deepspeed_optim_states.pt")
    safetensors.torch.save_file(model.state_dict(), HERE / "model.safetensors")
    sharded = HERE / "sharded"
    sharded.mkdir(exist_ok=True)
    weights = {}
    for number, (name, tensor) in enumerate(model.state_dict().items(), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        safetensors.torch.save_file({name: tensor}, sharded / file)
        weights[name] = file
    index = {"metadata": {"total_size": 144}, "weight_map": weights}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    shutil.rmtree(HERE / "dcp", ignore_errors=True)
    torch.distributed.checkpoint.save(
        {"model": model.state_dict(), "step": 1200}, checkpoint_id=HERE / "dcp", no_dist=True
    )
    shutil.rmtree(HERE / "orbax", ignore_errors=True)
    with orbax.checkpoint.CheckpointManager(HERE / "orbax") as manager:
        for step in (100, 200):
            manager.save(
                step, args=orbax.checkpoint.args.StandardSave({"w": jax.numpy.arange(8.0)})
            )


if __name__ == "__main__":
    main()
