"""Checkpoints that carry their own sha256: in a manifest, beside the file, or in a document.

Three plain forms, which any trainer can write:

- a folder with ``MANIFEST`` or ``manifest.json``: ``{"step": N, "files": {"name": {"sha256": …,
  "bytes": …}}}`` (a bare digest in place of the object will do), or lines of ``sha256sum``;
- ``NAME`` with ``NAME.sha256`` beside it, as ``sha256sum NAME > NAME.sha256`` writes;
- a JSON document with ``step`` and ``sha256`` at its top: the digest of the same document without
  ``sha256``, as ``json.dumps(…, sort_keys=True)`` writes it, with or without blanks.

The sizes are compared always, the digests with ``deep`` or where the file is small.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from slurm_hooks.checkpoints.reading import JSON_BYTES, Listing, Reader, Source, shown, whole
from slurm_hooks.checkpoints.verdict import Broken, Judged, Unverified

NAMES = ("MANIFEST", "MANIFEST.json", "manifest.json", "MANIFEST.sha256", "SHA256SUMS")

_SMALL_BYTES = 16 << 20
"""A file up to this size is read whole in any case: its digest costs 10 ms."""

_SUM_LINE = re.compile(r"\\?(?P<digest>[0-9a-fA-F]{64}) [ *](?P<name>[^\n\0]+)")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


def named_in(listing: Listing) -> str | None:
    """Return the name of the folder's manifest, None where it has none."""
    return next((name for name in NAMES if name in listing.files), None)


def is_manifest(listing: Listing, reader: Reader) -> bool:
    """Tell whether the folder's manifest is of this form; other tools write a manifest.json too."""
    name = named_in(listing)
    if name is None:
        return False
    content = reader.small(listing.path / name, JSON_BYTES)
    return b"sha256" in content or _SUM_LINE.match(content.decode("utf-8", "replace")) is not None


def judge_folder(listing: Listing, reader: Reader) -> Judged:
    """Judge a folder with a manifest.

    Raises:
        NotComplete: a file that it names is missing, short or different.
    """
    name = named_in(listing)
    if name is None:
        raise Broken("its manifest is missing")
    step, files = _read_manifest(listing.path / name, reader)
    contents = True
    for file, (digest, size) in files.items():
        parts = Path(file).parts
        if not parts or Path(file).is_absolute() or ".." in parts:
            raise Broken(f"its manifest names {shown(file)}, outside of the folder")
        with reader.open(listing.path / file) as source:
            if size is not None and source.size != size:
                raise Broken(f"{source.name} has {source.size} of {size} bytes")
            contents = _compare(source, digest, reader) and contents
    return Judged(step, contents)


def judge_beside(path: Path, reader: Reader) -> bool:
    """Compare a file with ``NAME.sha256`` beside it; tell whether the digest was compared.

    Raises:
        NotComplete: it differs, or the side file is unreadable.
    """
    side = path.with_name(path.name + ".sha256")
    text = reader.small(side, 4096).decode("utf-8", "replace").strip()
    line = _SUM_LINE.match(text)
    digest = line["digest"] if line else text
    if not _DIGEST.fullmatch(digest):
        raise Broken(f"{shown(side.name)} holds no sha256")
    with reader.open(path) as source:
        return _compare(source, digest, reader)


def judge_json(path: Path, reader: Reader, *, vouched: bool = False) -> Judged:
    """Judge a JSON document with its own ``sha256``, or ``vouched`` for by one beside it.

    Raises:
        NotComplete: it is cut off, or its digest is another.
    """
    document = reader.json(path)
    step = next(
        (whole(document.get(key)) for key in ("step", "global_step") if key in document), None
    )
    stated = document.pop("sha256", None)
    if stated is None:
        if not vouched:
            # It may as well be a pointer to a checkpoint, or a configuration.
            raise Unverified("a JSON document without a sha256")
        return Judged(step, contents=True)
    if not isinstance(stated, str) or stated.lower() not in _digests(document):
        raise Broken(f"{shown(path.name)} does not match its own sha256")
    return Judged(step, contents=True)


def _digests(document: dict[str, Any]) -> list[str]:
    """Digests of the document in the spellings that json.dumps commonly gives it."""
    return [
        hashlib.sha256(
            json.dumps(
                document, sort_keys=ordered, separators=separators, ensure_ascii=escaped
            ).encode("utf-8", "surrogatepass")
        ).hexdigest()
        for ordered in (True, False)
        for separators in (None, (",", ":"))
        for escaped in (True, False)
    ]


def _read_manifest(
    path: Path, reader: Reader
) -> tuple[int | None, dict[str, tuple[str, int | None]]]:
    raw = reader.small(path, JSON_BYTES)
    if not raw.lstrip().startswith(b"{"):
        lines = _SUM_LINE.finditer(raw.decode("utf-8", "surrogateescape"))
        files = {line["name"]: (line["digest"].lower(), None) for line in lines}
        if not files:
            raise Broken(f"{shown(path.name)} lists no file")
        return None, {**files}
    document = reader.json(path)
    listed = document.get("files")
    if not isinstance(listed, dict) or not listed:
        raise Broken(f"{shown(path.name)} lists no file")
    return whole(document.get("step")), {
        name: _expected(path, name, about) for name, about in listed.items()
    }


def _expected(path: Path, name: str, about: Any) -> tuple[str, int | None]:
    digest = about.get("sha256") if isinstance(about, dict) else about
    size = (
        next((about[key] for key in ("bytes", "size") if key in about), None)
        if isinstance(about, dict)
        else None
    )
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise Broken(f"{shown(path.name)} has no sha256 of {shown(name)}")
    return digest.lower(), whole(size)


def _compare(source: Source, digest: str, reader: Reader) -> bool:
    if not reader.deep and source.size > _SMALL_BYTES:
        source.refuse_holes()
        return False
    found = hashlib.sha256()
    for piece in source.chunks(0, source.size):
        found.update(piece)
    if found.hexdigest() != digest.lower():
        raise Broken(f"{source.name} does not match its sha256")
    return True
