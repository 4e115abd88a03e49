"""NeMo's ``.nemo`` files: a tar archive, plain or gzipped, with the configuration and the weights.

Source: NVIDIA NeMo, core/connectors/save_restore_connector.py (``model_config.yaml`` beside
``model_weights.ckpt`` or a folder of distributed weights).
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import IO, cast

from slurm_hooks.checkpoints import pytorch
from slurm_hooks.checkpoints.reading import Reader, Source
from slurm_hooks.checkpoints.verdict import Broken, Judged, Unverified

_MEMBERS_LIMIT = 100_000
_END_BYTES = 1024
"""A tar archive ends with two blocks of zeros."""


def judge(source: Source, reader: Reader) -> Judged:
    """Judge one file.

    Raises:
        NotComplete: it is cut off, or holds no weights.
    """
    if source.exactly(0, min(2, source.size)) == b"\x1f\x8b":
        raise Unverified(f"{source.name} is gzipped; unpack it to see whether it is whole")
    end, weights, config = 0, False, False
    step = None
    for member in _members(source):
        name = member.name.rpartition("/")[2]
        end = member.offset_data + (member.size + 511) // 512 * 512
        if end > source.size:
            raise Broken(f"{source.name} is cut off inside of {name!r:.60}")
        config = config or name == "model_config.yaml"
        if name.endswith(".ckpt") and member.isreg() and member.size:
            found, _structure = pytorch.judge(
                source.window(member.offset_data, member.size), reader
            )
            step, weights = found.step, True
        weights = weights or "model_weights/" in member.name
    if not weights or not config:
        raise Broken(f"{source.name} holds no {'weights' if config else 'model_config.yaml'}")
    if source.exactly(end, min(_END_BYTES, source.size - end)) != bytes(_END_BYTES):
        raise Broken(f"{source.name} is cut off: the end of the archive is missing")
    return Judged(step, contents=reader.deep)


def _members(source: Source) -> Iterator[tarfile.TarInfo]:
    source.seek(0)
    try:
        with tarfile.open(fileobj=cast("IO[bytes]", source), mode="r:") as archive:
            for count, member in enumerate(archive):
                if count > _MEMBERS_LIMIT:
                    raise Unverified(f"{source.name} has more than {_MEMBERS_LIMIT} members")
                yield member
    except (tarfile.TarError, ValueError, OSError) as error:
        raise Broken(f"{source.name} is cut off or no tar archive: {error}"[:200]) from error
