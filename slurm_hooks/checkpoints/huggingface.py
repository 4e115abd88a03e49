"""Hugging Face Trainer's ``checkpoint-N`` folders.

``trainer_state.json`` is written after the model, the optimizer and the random states, so a folder
without it was not finished. accelerate's folders have the same names and no such file. Source:
transformers, trainer.py (``_save_checkpoint``); accelerate, checkpointing.py.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from slurm_hooks.checkpoints import deepspeed, parts
from slurm_hooks.checkpoints.reading import TEMPORARY, Listing, Reader, shown, whole
from slurm_hooks.checkpoints.verdict import Broken, Candidate, Judged, Writing

STATE = "trainer_state.json"

_FOLDER = re.compile(r"(?:tmp-)?checkpoint[-_](\d{1,15})")
_RANDOM = re.compile(r"rng_state_(\d{1,6})\.pth")


def candidates(listing: Listing, reader: Reader) -> list[Candidate] | None:
    """Return the checkpoints in a folder, or the one that it is; None if there are none."""
    if STATE in listing.files and not _names(listing):
        return [_candidate(listing.path, listing.modified, reader)]
    names = _names(listing)
    if not any(_is_one(reader.listing(listing.path / name)) for name in names[-20:]):
        return None
    return [
        _candidate(listing.path / name, listing.folders[name].st_mtime, reader) for name in names
    ]


def _names(listing: Listing) -> list[str]:
    return [name for name in listing.folders if _FOLDER.fullmatch(name)]


def _is_one(listing: Listing) -> bool:
    signs = (STATE, "training_args.bin", "optimizer.pt", "random_states_0.pkl", "scheduler.pt")
    return any(sign in listing.files for sign in signs)


def _candidate(path: Path, modified: float, reader: Reader) -> Candidate:
    match = _FOLDER.fullmatch(path.name)
    step = int(match[1]) if match else None
    judge = functools.partial(_judge, path, step, reader)
    return Candidate(str(path), "huggingface", step, modified, judge)


def _judge(path: Path, step: int | None, reader: Reader) -> Judged:
    if TEMPORARY.search(path.name):
        raise Writing("it bears the name of a checkpoint being written")
    listing = reader.listing(path)
    stated = None
    if STATE in listing.files:
        stated = whole(reader.json(path / STATE).get("global_step"))
    elif "random_states_0.pkl" not in listing.files:
        raise Writing(f"{STATE}, which is written last, is missing")
    if not parts.has_weights(listing, reader):
        raise Broken("it holds no weights")
    ranks = [int(match[1]) for match in map(_RANDOM.fullmatch, listing.files) if match]
    if ranks:
        parts.need_all(ranks, max(ranks) + 1, "random state of rank")
    # With DeepSpeed the optimizer lies in a folder of its own, in that library's layout.
    inner = deepspeed.candidates(listing, reader) or []
    found = parts.together([parts.judge_folder(listing, reader), *(item.judge() for item in inner)])
    if step is not None and stated is not None and step != stated:
        raise Broken(f"{STATE} is of step {stated}, in {shown(path.name)}")
    return Judged(stated if stated is not None else step, found.contents and not inner, found.notes)
