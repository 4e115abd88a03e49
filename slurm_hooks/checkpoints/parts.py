"""Judge files and whole folders of files, whatever trainer laid them out.

Owns which format a file is, by its name; the trainers' own modules build on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slurm_hooks.checkpoints import distcp, manifest, nemo, pytorch, safetensors
from slurm_hooks.checkpoints.reading import TEMPORARY, Listing, Reader, plain_name, shown
from slurm_hooks.checkpoints.verdict import Broken, Judged, NotComplete, Writing

WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".distcp", ".nemo")
"""Suffixes of files that can hold a model."""

_FOLDER_DEPTH = 4


def format_of(name: str) -> str | None:
    """Return the format that a file's name stands for, None for what is no checkpoint's."""
    if name.endswith(".safetensors"):
        return "safetensors"
    if name.endswith(".nemo"):
        return "nemo"
    if name.endswith(".ckpt"):
        return "lightning"
    return "pytorch" if name.endswith(pytorch.SUFFIXES) else None


def judge_file(path: Path, reader: Reader, *, has_digest: bool = False) -> Judged:
    """Judge one file; ``has_digest`` tells that ``NAME.sha256`` lies beside it.

    Raises:
        NotComplete: it does not count.
    """
    if TEMPORARY.search(path.name):
        raise Writing(f"{shown(path.name)} bears the name of a file being written")
    compared = has_digest and manifest.judge_beside(path, reader)
    if path.suffix == ".json":
        found = manifest.judge_json(path, reader, vouched=compared)
    elif format_of(path.name) is None:
        found = Judged()
    else:
        with reader.open(path) as source:
            if path.suffix == ".safetensors":
                found = safetensors.judge(source)
            elif path.suffix == ".nemo":
                found = nemo.judge(source, reader)
            else:
                found, _structure = pytorch.judge(source, reader)
    return Judged(found.step, found.contents or compared, found.notes)


def judge_folder(listing: Listing, reader: Reader, depth: int = _FOLDER_DEPTH) -> Judged:
    """Judge everything in a folder that belongs to a checkpoint; all of it must be well.

    Raises:
        NotComplete: some part does not count.
    """
    unfinished = [
        name
        for name in (*listing.files, *listing.folders)
        if TEMPORARY.search(name) and (name in listing.folders or format_of(plain_name(name)))
    ]
    if unfinished:
        raise Writing(f"{shown(unfinished[0])} in it is still being written")
    if manifest.is_manifest(listing, reader):
        return manifest.judge_folder(listing, reader)
    found: list[Judged] = []
    if distcp.is_one(listing):
        found.append(distcp.judge(listing, reader))
    safetensors.check_shards(listing, reader)
    for name in listing.files:
        beside = f"{name}.sha256" in listing.files
        if beside or format_of(name):
            found.append(judge_file(listing.path / name, reader, has_digest=beside))
    for name in listing.folders if depth > 0 else ():
        try:
            found.append(judge_folder(reader.listing(listing.path / name), reader, depth - 1))
        except NotComplete as error:
            raise type(error)(f"{shown(name)}: {error}") from error
    return together(found)


def has_weights(listing: Listing, reader: Reader, depth: int = 2) -> bool:
    """Tell whether a folder, or one in it, holds a file that can be a model."""
    if any(name.endswith(WEIGHTS) for name in listing.files):
        return True
    return depth > 0 and any(
        has_weights(reader.listing(listing.path / name), reader, depth - 1)
        for name in listing.folders
    )


def together(found: Iterable[Judged]) -> Judged:
    """Return what several parts tell of the checkpoint that they make up."""
    parts = list(found)
    steps = [part.step for part in parts if part.step is not None]
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    contents = bool(parts) and all(part.contents for part in parts)
    return Judged(max(steps, default=None), contents, notes[:8])


def need_all(have: Iterable[int], count: int, what: str) -> None:
    """See that the ranks 0 to ``count`` - 1 are all there.

    Raises:
        Broken: one is missing.
    """
    present = set(have)
    for rank in range(min(count, 1_000_000)):
        if rank not in present:
            raise Broken(f"{what} {rank} of {count} is missing")
