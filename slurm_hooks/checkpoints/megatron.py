"""Megatron-LM's folders: ``latest_checkpointed_iteration.txt`` and ``iter_*`` with all ranks.

The tracker is written when every rank has saved, so an iteration newer than it is unfinished. In a
classic ``iter_*`` each rank has a folder ``mp_rank_TT[_PPP[_EEE]]``; in a distributed one lies a
torch.distributed.checkpoint with ``common.pt``. Source: Megatron-LM, megatron/training/
checkpointing.py.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from slurm_hooks.checkpoints import distcp, parts, pickles, pytorch
from slurm_hooks.checkpoints.reading import Listing, Reader, shown, whole
from slurm_hooks.checkpoints.verdict import Broken, Candidate, Judged, Writing

TRACKER = "latest_checkpointed_iteration.txt"

_ITERATION = re.compile(r"iter_(\d{7,15})")
_RANK = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3}))?(?:_(\d{3}))?")


def candidates(listing: Listing, reader: Reader) -> list[Candidate] | None:
    """Return the iterations in a folder, or the one that it is; None if it is not Megatron's."""
    if any(map(_RANK.fullmatch, listing.folders)):
        return [_candidate(listing.path, listing.modified, None, reader)]
    names = [name for name in listing.folders if _ITERATION.fullmatch(name)]
    if not names and TRACKER not in listing.files:
        return None
    tracked = _tracked(listing, reader) if TRACKER in listing.files else None
    found = [
        _candidate(listing.path / name, listing.folders[name].st_mtime, tracked, reader)
        for name in names
    ]
    if TRACKER in listing.files and f"iter_{tracked or 0:07}" not in names and tracked:
        missing = Broken(f"{TRACKER} names it, and it is not there")
        path = str(listing.path / f"iter_{tracked:07}")
        found.append(Candidate(path, "megatron", tracked, 0.0, functools.partial(_raise, missing)))
    return found


def _raise(error: Broken) -> Judged:
    raise error


def _tracked(listing: Listing, reader: Reader) -> int | None:
    """The iteration that the tracker names; -1 where it cannot be read, None for a release."""
    try:
        text = reader.small(listing.path / TRACKER, 64).decode("ascii", "replace").strip()
    except Broken:
        return -1
    if text == "release":
        return None
    return int(text) if re.fullmatch(r"\d{1,15}", text) else -1


def _candidate(path: Path, modified: float, tracked: int | None, reader: Reader) -> Candidate:
    match = _ITERATION.fullmatch(path.name)
    step = int(match[1]) if match else None
    judge = functools.partial(_judge, path, step, tracked, reader)
    return Candidate(str(path), "megatron", step, modified, judge)


def _judge(path: Path, step: int | None, tracked: int | None, reader: Reader) -> Judged:
    if step is not None and tracked is not None and step > tracked:
        told = f"still names {tracked}" if tracked >= 0 else "cannot be read"
        raise Writing(f"{TRACKER}, written when all ranks have saved, {told}")
    listing = reader.listing(path)
    ranks = {name: _rank(name) for name in listing.folders if _RANK.fullmatch(name)}
    if not ranks and not distcp.is_one(listing):
        raise Broken("no rank has saved anything")
    found = [parts.judge_folder(listing, reader)]
    if ranks:
        sizes = _sizes(listing, next(iter(ranks)), reader)
        for axis, what in enumerate(("tensor", "pipeline", "expert")):
            have = [rank[axis] for rank in ranks.values()]
            parts.need_all(have, max(max(have) + 1, sizes[axis]), f"{what}-parallel rank")
        _need_grid(set(ranks.values()))
    return Judged(step if step is not None else found[0].step, found[0].contents, found[0].notes)


def _need_grid(ranks: set[tuple[int, int, int]]) -> None:
    """Every tensor rank is there for every pipeline rank; experts are not in every folder."""
    tensors = {rank[0] for rank in ranks}
    stages = {rank[1:] for rank in ranks}
    for tensor in tensors:
        for stage, expert in stages:
            if (tensor, stage, expert) not in ranks:
                raise Broken(f"the folder of tensor rank {tensor}, stage {stage} is missing")


def _rank(name: str) -> tuple[int, int, int]:
    match = _RANK.fullmatch(name)
    numbers = [int(group or 0) for group in match.groups()] if match else [0, 0, 0]
    return numbers[0], numbers[1], numbers[2]


def _sizes(listing: Listing, folder: str, reader: Reader) -> tuple[int, int, int]:
    """Tensor, pipeline and expert sizes as the saved arguments have them; 1 where unknown."""
    inside = reader.listing(listing.path / folder)
    for name in ("model_optim_rng.pt", "model_rng.pt"):
        if name not in inside.files:
            continue
        with reader.open(inside.path / name) as source:
            _judged, saved = pytorch.judge(source, reader)
        arguments = saved.get("args") if isinstance(saved, pickles.Table) else None
        return (
            _size(arguments, "tensor_model_parallel_size"),
            _size(arguments, "pipeline_model_parallel_size"),
            1,  # an expert rank has a folder of its own only where its weights are not shared
        )
    raise Broken(f"{shown(folder)} holds no model_optim_rng.pt")


def _size(arguments: Any, name: str) -> int:
    value = whole(arguments.get(name)) if isinstance(arguments, pickles.Object) else None
    return max(1, min(value or 1, 100_000))
