"""safetensors files and the index of a model in several of them.

Source of the format: huggingface/safetensors, "Format": eight bytes of header length, a JSON
header with each tensor's place, then the data, without a gap and without checksums.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from slurm_hooks.checkpoints.reading import Listing, Reader, Source, shown, whole
from slurm_hooks.checkpoints.verdict import Broken, Judged, Unverified

HEADER_BYTES = 100_000_000
"""Largest header that the format's own reader takes."""

_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
}

_SHARD = re.compile(
    r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(?P<kind>safetensors|bin)"
)


def judge(source: Source) -> Judged:
    """Judge one ``.safetensors`` file.

    Raises:
        NotComplete: header and length do not agree, or there is no header.
    """
    length = int.from_bytes(source.exactly(0, min(8, source.size)).ljust(8, b"\xff"), "little")
    if not 2 <= length <= HEADER_BYTES:
        raise Broken(f"{source.name} has no safetensors header")
    raw = source.exactly(8, length)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Broken(f"{source.name}: its header is damaged: {error}"[:200]) from error
    if not isinstance(header, dict):
        raise Broken(f"{source.name}: its header is no object")
    metadata = header.pop("__metadata__", None)
    end = 0
    for first, last, name in sorted(_span(source, name, about) for name, about in header.items()):
        if first != end:
            raise Broken(f"{source.name}: tensor {shown(name)} does not begin where the last ends")
        end = last
    if source.size != 8 + length + end:
        raise Broken(f"{source.name} has {source.size} of {8 + length + end} bytes")
    source.refuse_holes()
    step = _text_step(metadata) if isinstance(metadata, dict) else None
    return Judged(step, notes=("safetensors has no checksums",))


def is_sharded(listing: Listing) -> bool:
    """Tell whether the folder holds a model in several files, by its index or their names."""
    return any(
        name.endswith((".safetensors.index.json", ".bin.index.json")) or _SHARD.fullmatch(name)
        for name in listing.files
    )


def check_shards(listing: Listing, reader: Reader) -> None:
    """See that every shard is there which an index in the folder, or the others' names, tell of.

    Raises:
        NotComplete: one is missing, or an index cannot be read.
    """
    for name in listing.files:
        if name.endswith((".safetensors.index.json", ".bin.index.json")):
            weights = reader.json(listing.path / name).get("weight_map")
            if not isinstance(weights, dict):
                raise Broken(f"{shown(name)} has no weight_map")
            for shard in {str(shard) for shard in weights.values()}:
                if Path(shard).name != shard or shard not in listing.files:
                    raise Broken(f"shard {shown(shard)}, which {shown(name)} names, is missing")
    for match in filter(None, map(_SHARD.fullmatch, listing.files)):
        for number in range(1, min(int(match["count"]), len(listing.files) + 1) + 1):
            other = f"{match['stem']}-{number:05}-of-{match['count']}.{match['kind']}"
            if other not in listing.files:
                raise Broken(f"shard {shown(other)} is missing")


def _span(source: Source, name: str, about: Any) -> tuple[int, int, str]:
    """Where a tensor's data begin and end; its shape agrees with that."""
    try:
        first, last = about["data_offsets"]
        shape, kind = about["shape"], about["dtype"]
        numbers = [first, last, *shape]
    except (TypeError, KeyError, ValueError) as error:
        raise Broken(f"{source.name}: tensor {shown(name)} is not described") from error
    if any(whole(number) is None for number in numbers) or len(shape) > 64:
        raise Broken(f"{source.name}: tensor {shown(name)} has an impossible place")
    if not isinstance(kind, str) or kind not in _BITS:
        raise Unverified(f"{source.name}: tensor {shown(name)} has an unknown type")
    if (math.prod(shape) * _BITS[kind] + 7) // 8 != last - first:
        raise Broken(f"{source.name}: tensor {shown(name)} has a size unlike its shape")
    return first, last, name


def _text_step(metadata: dict[str, Any]) -> int | None:
    for key in ("step", "global_step", "iteration"):
        text = metadata.get(key)
        if isinstance(text, str) and re.fullmatch(r"\d{1,15}", text):
            return int(text)
    return None
