"""DeepSpeed's folders: ``latest`` names ``global_step*``, which has a file of each rank.

``latest`` is written when all ranks have saved. The model's files say how many ranks there were
(``dp_world_size``, ``mp_world_size``). Source: DeepSpeed, runtime/engine.py
(``_get_ckpt_name``, ``_get_zero_ckpt_name``, ``_save_checkpoint``).
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from slurm_hooks.checkpoints import parts, pickles, pytorch
from slurm_hooks.checkpoints.reading import Listing, Reader, shown, step_of, whole
from slurm_hooks.checkpoints.verdict import Broken, Candidate, Judged, Writing

LATEST = "latest"

_STEP_FOLDER = re.compile(r"global_step\d{1,15}")
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"
)


def candidates(listing: Listing, reader: Reader) -> list[Candidate] | None:
    """Return the steps in a folder, or the one that it is; None if it is not DeepSpeed's."""
    if any(map(_MODEL.fullmatch, listing.files)):
        return [_candidate(listing.path, listing.modified, None, reader)]
    names = [name for name in listing.folders if _STEP_FOLDER.fullmatch(name)]
    tag = _latest(listing, reader) if LATEST in listing.files else None
    if tag and tag not in names and tag in listing.folders:
        names.append(tag)
    if not names and not (tag and _STEP_FOLDER.fullmatch(tag)):
        return None
    found = [
        _candidate(listing.path / name, listing.folders[name].st_mtime, tag, reader)
        for name in names
    ]
    if tag and tag not in names:
        path = listing.path / tag
        found.append(_candidate(path, 0.0, tag, reader))
    return found


def _latest(listing: Listing, reader: Reader) -> str:
    """The folder that ``latest`` names; empty where it names none."""
    try:
        text = reader.small(listing.path / LATEST, 256).decode("utf-8", "replace").strip()
    except Broken:
        return ""
    return text if text and Path(text).name == text else ""


def _candidate(path: Path, modified: float, tag: str | None, reader: Reader) -> Candidate:
    step = step_of(path.name)
    judge = functools.partial(_judge, path, step, tag, reader)
    return Candidate(str(path), "deepspeed", step, modified, judge)


def _judge(path: Path, step: int | None, tag: str | None, reader: Reader) -> Judged:
    named = step_of(tag) if tag else None
    if tag == "":
        raise Writing("latest, which is written last, names no checkpoint")
    if step is not None and named is not None and step > named:
        raise Writing(f"latest, written when all ranks have saved, still names {shown(tag or '')}")
    listing = reader.listing(path)
    models = [match for match in map(_MODEL.fullmatch, listing.files) if match]
    if not models:
        raise Broken("it has no model_states.pt")
    with reader.open(path / models[0].string) as source:
        judged, saved = pytorch.judge(source, reader)
    data_ranks, model_ranks = _size(saved, "dp_world_size"), _size(saved, "mp_world_size")
    optimizers = [match for match in map(_OPTIMIZER.fullmatch, listing.files) if match]
    sharded = [match for match in models if match["dp"] is not None]
    if sharded and not optimizers:
        raise Broken("it has no optim_states.pt")
    _need_ranks([int(match["mp"]) for match in models], model_ranks, "model states of rank")
    for matches, what in ((optimizers, "optimizer states"), (sharded, "model states")):
        if matches:
            _need_ranks([int(match["dp"]) for match in matches], data_ranks, f"{what} of rank")
            _need_grid({(int(match["dp"]), int(match["mp"])) for match in matches}, what)
    found = parts.judge_folder(listing, reader)
    told = step if step is not None else judged.step
    return Judged(told if told is not None else found.step, found.contents, found.notes)


def _need_ranks(have: list[int], count: int, what: str) -> None:
    parts.need_all(have, max(max(have) + 1, count), what)


def _need_grid(ranks: set[tuple[int, int]], what: str) -> None:
    for data in {rank[0] for rank in ranks}:
        for model in {rank[1] for rank in ranks}:
            if (data, model) not in ranks:
                raise Broken(f"{what} of rank {data}, model rank {model} are missing")


def _size(saved: object, key: str) -> int:
    value = whole(saved.get(key)) if isinstance(saved, pickles.Table) else None
    return max(1, min(value or 1, 1_000_000))
