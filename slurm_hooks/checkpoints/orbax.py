"""Orbax's step folders: unfinished ones have a temporary name, or lack the commit marker.

On POSIX file systems a step is written under ``N.orbax-checkpoint-tmp-…`` and renamed; where
renames are not atomic, ``commit_success.txt`` appears at last. ``_CHECKPOINT_METADATA`` gets its
commit time at the end. Arrays lie in an OCDBT database, whose ``manifest.ocdbt`` begins with its
magic number and its own length. Sources: orbax.checkpoint, path/atomicity.py and metadata/step;
TensorStore, kvstore/ocdbt/format.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from slurm_hooks.checkpoints.reading import Listing, Reader, shown, step_of
from slurm_hooks.checkpoints.verdict import Broken, Candidate, Judged, Writing

METADATA = "_CHECKPOINT_METADATA"
COMMITTED = "commit_success.txt"
_TEMPORARY = ".orbax-checkpoint-tmp"
_SIGNS = (METADATA, COMMITTED, "_METADATA", "manifest.ocdbt", "orbax.checkpoint")
_STEP = re.compile(r"(?:[A-Za-z][\w-]*_)?\d{1,15}")

_MANIFEST_MAGIC = bytes.fromhex("0cdb3a2a")
_MANIFEST_BYTES = 64 << 20


def candidates(listing: Listing, reader: Reader) -> list[Candidate] | None:
    """Return the steps in a folder, or the one that it is; None if it is not Orbax's."""
    if _is_one(listing):
        return [_candidate(listing.path, listing.modified, reader, need_marker=False)]
    names = [name for name in listing.folders if _STEP.fullmatch(name)]
    temporary = [name for name in listing.folders if _TEMPORARY in name]
    insides = {name: reader.listing(listing.path / name) for name in names[-50:]}
    ours = any(_is_one(inside) or _has_item(inside, reader) for inside in insides.values())
    if not ours and not temporary:
        return None
    # One marker in a folder means that its file system needs them all.
    need_marker = any(COMMITTED in inside.files for inside in insides.values())
    return [
        _candidate(
            listing.path / name, listing.folders[name].st_mtime, reader, need_marker=need_marker
        )
        for name in (*names, *temporary)
    ]


def _is_one(listing: Listing) -> bool:
    return any(sign in listing.files for sign in _SIGNS)


def _has_item(listing: Listing, reader: Reader) -> bool:
    return any(_is_one(reader.listing(listing.path / name)) for name in list(listing.folders)[:8])


def _candidate(path: Path, modified: float, reader: Reader, *, need_marker: bool) -> Candidate:
    step = step_of(path.name.partition(_TEMPORARY)[0])
    judge = functools.partial(_judge, path, step, reader, need_marker)
    return Candidate(str(path), "orbax", step, modified, judge)


def _judge(path: Path, step: int | None, reader: Reader, need_marker: bool) -> Judged:
    if _TEMPORARY in path.name:
        raise Writing("it still has its temporary name")
    listing = reader.listing(path)
    if need_marker and COMMITTED not in listing.files:
        raise Writing(f"{COMMITTED}, which is written last, is missing")
    if METADATA in listing.files:
        about = reader.json(path / METADATA)
        if about.get("init_timestamp_nsecs") and not about.get("commit_timestamp_nsecs"):
            raise Writing(f"{METADATA} has no commit time")
    items = [reader.listing(path / name) for name in listing.folders]
    if not items and not _has_arrays(listing):
        raise Broken("it holds nothing")
    for item in (listing, *items):
        if _TEMPORARY in item.path.name:
            raise Writing(f"{shown(item.path.name)} still has its temporary name")
        _check_item(item, reader)
    return Judged(step, notes=("the arrays' own checksums are not compared",))


def _has_arrays(listing: Listing) -> bool:
    return "manifest.ocdbt" in listing.files or "checkpoint" in listing.files


def _check_item(item: Listing, reader: Reader) -> None:
    if "_METADATA" in item.files:
        reader.json(item.path / "_METADATA")
        if not _has_arrays(item) and not item.folders:
            raise Broken(f"{shown(item.path.name)} holds no arrays")
    if "manifest.ocdbt" in item.files:
        content = reader.small(item.path / "manifest.ocdbt", _MANIFEST_BYTES)
        if content[:4] != _MANIFEST_MAGIC or int.from_bytes(content[4:12], "little") != len(
            content
        ):
            raise Broken(f"manifest.ocdbt in {shown(item.path.name)} is cut off or damaged")
        data = [name for name in item.folders if name == "d" or name.startswith("ocdbt.process_")]
        for name in data:
            _check_data(reader.listing(item.path / name), reader)


def _check_data(listing: Listing, reader: Reader) -> None:
    for name in listing.files:
        reader.open(listing.path / name).close()
    for name in listing.folders:
        for inner in reader.listing(listing.path / name).files:
            reader.open(listing.path / name / inner).close()
