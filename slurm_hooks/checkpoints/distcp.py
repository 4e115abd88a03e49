"""torch.distributed.checkpoint folders: ``.metadata`` and the shards that it names.

The coordinator writes ``.metadata`` last and renames it into place, so a folder of shards without
one was not finished. It is a pickle whose ``_StorageInfo`` entries say which bytes of which file
hold each piece; a piece is a torch.save archive of its own, whose CRCs a deep look compares.
Source: torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from slurm_hooks.checkpoints import pickles, pytorch
from slurm_hooks.checkpoints.reading import Listing, Reader, shown, whole
from slurm_hooks.checkpoints.verdict import Broken, Judged, Unverified, Writing

METADATA = ".metadata"


def is_one(listing: Listing) -> bool:
    """Tell whether the folder is such a checkpoint, finished or not."""
    return METADATA in listing.files or any(name.endswith(".distcp") for name in listing.files)


def judge(listing: Listing, reader: Reader) -> Judged:
    """Judge the folder.

    Raises:
        NotComplete: ``.metadata`` or a shard is missing, short or damaged.
    """
    if METADATA not in listing.files:
        raise Writing("its .metadata, which is written last, is missing")
    try:
        found = pickles.read(reader.small(listing.path / METADATA, pytorch.PICKLE_BYTES))
    except Broken as error:
        raise Broken(f".metadata: {error}") from error
    pieces: dict[str, list[tuple[int, int]]] = {}
    for path, offset, length in _pieces(found):
        pieces.setdefault(path, []).append((offset, length))
    if not pieces:
        raise Unverified("its .metadata names no shard")
    for path, places in pieces.items():
        parts = PurePosixPath(path).parts
        if not parts or ".." in parts or path.startswith("/"):
            raise Broken(f".metadata names {shown(path)}, outside of the folder")
        with reader.open(listing.path / path) as source:
            needed = max(offset + length for offset, length in places)
            if source.size < needed:
                raise Broken(f"shard {source.name} has {source.size} of {needed} bytes")
            if not reader.deep:
                source.refuse_holes()
                continue
            for offset, length in places:
                if source.exactly(offset, min(4, length)) == b"PK\x03\x04":
                    pytorch.judge(source.window(offset, length), reader)
    return Judged(contents=reader.deep)


def _pieces(found: Any) -> Iterator[tuple[str, int, int]]:
    for info in pickles.objects(found, "_StorageInfo"):
        path, offset, length = (info.get(key) for key in ("relative_path", "offset", "length"))
        if not isinstance(path, str) or whole(offset) is None or whole(length) is None:
            raise Broken(".metadata has an entry that says no place")
        yield path, offset, length
