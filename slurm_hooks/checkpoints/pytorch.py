"""torch.save files: zip archives, the older format, and plain pickles, by their structure.

Owns ``.pt``, ``.pth``, ``.bin``, ``.ckpt`` (Lightning's have the same form). Nothing is unpickled
(``pickles``). Facts of the formats: torch/serialization.py and caffe2/serialize/inline_container.h;
the samples in tests/data/checkpoints are torch's own.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from typing import Any

from slurm_hooks.checkpoints import pickles
from slurm_hooks.checkpoints.reading import Reader, Source, whole
from slurm_hooks.checkpoints.verdict import Broken, Judged, Unverified

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pth.tar")

PICKLE_BYTES = 64 << 20
"""Largest pickle followed. Tensors lie beside it, so a large model's has a few megabytes."""

_SMALLEST_BYTES = 16
"""Nothing that torch.save writes is smaller; an empty dict takes 300 bytes."""

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_LOCAL_HEADERS_SAMPLED = 64
"""Members whose local header is compared in a quick look; each costs a read of its own."""

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PICKLES_BYTES = 64 << 20

_ITEM_BYTES = {
    "DoubleStorage": 8,
    "FloatStorage": 4,
    "HalfStorage": 2,
    "BFloat16Storage": 2,
    "LongStorage": 8,
    "IntStorage": 4,
    "ShortStorage": 2,
    "CharStorage": 1,
    "ByteStorage": 1,
    "BoolStorage": 1,
    "ComplexDoubleStorage": 16,
    "ComplexFloatStorage": 8,
    "UntypedStorage": 1,
}

_STEP_PLACES: tuple[tuple[str, ...], ...] = (
    ("global_step",),
    ("global_steps",),
    ("step",),
    ("iteration",),
    ("steps",),
    ("iter",),
    ("iter_num",),
    ("num_steps",),
    ("trainer_state", "global_step"),
    ("state", "step"),
    ("state", "global_step"),
    ("train_state", "step"),
    ("meta", "iter"),
)
"""Where trainers keep the step in what they save: Lightning, DeepSpeed, Megatron, mmengine, …"""


def judge(source: Source, reader: Reader) -> tuple[Judged, Any]:
    """Judge one file; return with it the structure of its pickle, for who wants more of it.

    Raises:
        NotComplete: it is not complete, or cannot be vouched for.
    """
    if source.size < _SMALLEST_BYTES:
        raise Broken(f"{source.name} has only {source.size} bytes")
    start = source.exactly(0, 4)
    if start == b"PK\x03\x04":
        return _judge_zip(source, reader)
    if start[:1] == b"\x80" and 2 <= start[1] <= 5:
        return _judge_pickle(source)
    if not start.strip(b"\0"):
        raise Broken(f"{source.name} begins with zeros: its contents never arrived")
    raise Unverified(f"{source.name} is neither a zip archive nor a pickle")


def step_in(found: Any) -> int | None:
    """Return the step that a saved dict holds, None where it holds none that we know."""
    for place in _STEP_PLACES:
        part = found
        for key in place:
            part = part.get(key) if isinstance(part, (pickles.Table, pickles.Object)) else None
        step = whole(part)
        if step is not None:
            return step
    return None


def _judge_zip(source: Source, reader: Reader) -> tuple[Judged, Any]:
    members = _members(source)
    pickled = [item for item in members if item.filename.rpartition("/")[2] == "data.pkl"]
    _check_headers(source, members, pickled, everything=reader.deep)
    if not pickled:
        raise Broken(f"{source.name} is a zip archive without data.pkl")
    if pickled[0].file_size > PICKLE_BYTES:
        raise Unverified(f"{source.name} has a pickle of {pickled[0].file_size} bytes")
    content = _content(source, pickled[0])
    found: Any = None
    notes: tuple[str, ...] = ()
    try:
        found = pickles.read(content)
    except Unverified as error:
        # Its CRC is right, so nothing is lost of it; only its step stays unknown.
        notes = (f"{source.name}: {error}",)
    except Broken as error:
        raise Broken(f"{source.name}: {error}") from error
    prefix = pickled[0].filename[: -len("data.pkl")]
    _check_storages(source, found, {item.filename: item.file_size for item in members}, prefix)
    if reader.deep:
        for item in members:
            _content_checked(source, item)
    else:
        source.refuse_holes()
    return Judged(step_in(found), reader.deep, notes), found


def _members(source: Source) -> list[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(source) as archive:
            members = archive.infolist()
            end = archive.start_dir
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, OSError) as error:
        raise Broken(
            f"{source.name} is cut off: its zip directory is not at its end ({error})"
        ) from error
    for item in members:
        if item.header_offset + _LOCAL_HEADER.size + item.compress_size > end:
            raise Broken(f"{source.name} is too short for its member {item.filename!r:.80}")
    return members


def _check_headers(
    source: Source,
    members: list[zipfile.ZipInfo],
    pickled: list[zipfile.ZipInfo],
    *,
    everything: bool,
) -> None:
    stride = 1 if everything else max(1, len(members) // _LOCAL_HEADERS_SAMPLED)
    for item in (*pickled[:1], *members[::stride], *members[-1:]):
        _data_offset(source, item)


def _data_offset(source: Source, item: zipfile.ZipInfo) -> int:
    header = _LOCAL_HEADER.unpack(source.exactly(item.header_offset, _LOCAL_HEADER.size))
    if header[0] != b"PK\x03\x04":
        raise Broken(f"{source.name} has no member where its directory says {item.filename!r:.80}")
    return item.header_offset + _LOCAL_HEADER.size + int(header[9]) + int(header[10])


def _content(source: Source, item: zipfile.ZipInfo) -> bytes:
    """A small member whole, its CRC compared."""
    raw = source.exactly(_data_offset(source, item), item.compress_size)
    if item.compress_type == zipfile.ZIP_DEFLATED:
        try:
            raw = zlib.decompressobj(-15).decompress(raw, item.file_size + 1)
        except zlib.error as error:
            raise Broken(f"{source.name}: {item.filename!r:.80} is damaged: {error}") from error
    elif item.compress_type != zipfile.ZIP_STORED:
        raise Unverified(f"{source.name} is compressed in a way that torch does not use")
    if len(raw) != item.file_size or zlib.crc32(raw) != item.CRC:
        raise Broken(f"{source.name}: {item.filename!r:.80} does not match its CRC")
    return raw


def _content_checked(source: Source, item: zipfile.ZipInfo) -> None:
    if item.compress_type != zipfile.ZIP_STORED:
        if item.file_size > PICKLE_BYTES:
            raise Unverified(f"{source.name} has a large compressed member")
        _content(source, item)
    elif source.crc32(_data_offset(source, item), item.compress_size) != item.CRC:
        raise Broken(f"{source.name}: {item.filename!r:.80} does not match its CRC")


def _check_storages(source: Source, found: Any, sizes: dict[str, int], prefix: str) -> None:
    """Every tensor's storage that the pickle refers to is a member, and as large as it must be."""
    for storage in pickles.references(found):
        key, needed = _storage(storage)
        if key is None:
            continue
        size = sizes.get(f"{prefix}data/{key}")
        if size is None:
            raise Broken(f"{source.name} lacks the data of tensor storage {key[:20]!r}")
        if needed is not None and size < needed:
            raise Broken(f"{source.name}: tensor storage {key[:20]!r} has {size} of {needed} bytes")


def _storage(reference: pickles.Reference) -> tuple[str | None, int | None]:
    """The key and size in bytes of ``('storage', type, key, device, count, …)``."""
    parts = reference.id
    if not isinstance(parts, tuple) or len(parts) < 5 or parts[0] != "storage":
        return None, None
    kind, key, count = parts[1], parts[2], parts[4]
    if not isinstance(key, str) or type(count) is not int or not isinstance(kind, pickles.Name):
        return None, None
    item_bytes = _ITEM_BYTES.get(kind.name)
    return key, None if item_bytes is None else item_bytes * count


def _judge_pickle(source: Source) -> tuple[Judged, Any]:
    stream = io.BytesIO(source.exactly(0, min(source.size, _LEGACY_PICKLES_BYTES)))
    try:
        first = pickles.read_next(stream)
        if first != _LEGACY_MAGIC:
            if source.size > _LEGACY_PICKLES_BYTES or stream.tell() == source.size:
                return Judged(step_in(first), notes=("a plain pickle has no checksums",)), first
            raise Broken(f"{source.size - stream.tell()} bytes follow the end of its pickle")
        found = [pickles.read_next(stream) for _ in range(4)]
    except Broken as error:
        if source.size > _LEGACY_PICKLES_BYTES:
            raise Unverified(f"{source.name} is a pickle too large to be followed") from error
        raise Broken(f"{source.name}: {error}") from error
    _check_legacy_length(source, found[2], found[3], stream.tell())
    source.refuse_holes()
    return Judged(step_in(found[2]), notes=("torch's older format has no checksums",)), found[2]


def _check_legacy_length(source: Source, saved: Any, keys: Any, place: int) -> None:
    """Behind the pickles stand, for each key, eight bytes of count and the data."""
    sizes = dict(_storage(reference) for reference in pickles.references(saved))
    if not isinstance(keys, list) or len(keys) > source.size // 8:
        raise Broken(f"{source.name} has no list of tensor storages")
    for key in keys:
        needed = sizes.get(key) if isinstance(key, str) else None
        if needed is None:
            raise Unverified(f"{source.name} has a storage of a type that is not known")
        place += 8 + needed
    if place > source.size:
        raise Broken(f"{source.name} is cut off: {source.size} of {place} bytes")
