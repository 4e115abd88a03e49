"""Find the newest complete checkpoint under a path, and say why newer ones do not count.

    >>> find("/data/run1/ckpt").step                                    # doctest: +SKIP
    1200

Owns the search and the order: the largest step first, as the trainers themselves choose when they
resume, and by time where names bear no steps. Formats are their own modules' business.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from slurm_hooks.checkpoints import (
    deepspeed,
    distcp,
    huggingface,
    manifest,
    megatron,
    orbax,
    parts,
    ranks,
    safetensors,
)
from slurm_hooks.checkpoints.reading import (
    TEMPORARY,
    Limits,
    Listing,
    Reader,
    plain_name,
    step_of,
)
from slurm_hooks.checkpoints.verdict import (
    Broken,
    Candidate,
    Checkpoint,
    Judged,
    NotComplete,
    Unverified,
    Verdict,
    Writing,
)

_TRAINERS: tuple[Callable[[Listing, Reader], list[Candidate] | None], ...] = (
    megatron.candidates,
    deepspeed.candidates,
    huggingface.candidates,
    orbax.candidates,
)
"""The trainers' layouts, the most particular first."""

_DIGEST = ".sha256"
_FOLDER_WITH_STEP = re.compile(r"step|iter|checkpoint|ckpt|epoch|^\d+$", re.IGNORECASE)
_AFTER_FAILURE_SECONDS = 1.0
"""Clocks of a file server and a node differ by this much without anything being wrong."""


def find(
    path: str | os.PathLike[str],
    *,
    deep: bool = False,
    limits: Limits | None = None,
    failed_at: float | None = None,
) -> Verdict:
    """Return the newest complete checkpoint at or under ``path``.

    ``deep`` compares checksums where a format has them. What was written after ``failed_at``
    (seconds since the epoch) was still being written by the failed attempt. Reads with the rights
    of this process: for a job's files call it through ``as_user.look``.
    """
    top = Path(path)
    reader = Reader(limits or Limits(), deep)
    notes: list[str] = []
    candidates: list[Candidate] = []
    try:
        status = top.stat()
        candidates = (
            _in_folder(reader.listing(top), reader, reader.limits.depth)
            if stat.S_ISDIR(status.st_mode)
            else [_file(top, status.st_mtime, reader, has_digest=_beside(top))]
        )
    except FileNotFoundError:
        notes.append("there is nothing at this path")
    except OSError as error:
        notes.append(f"cannot be looked at: {error.strerror}")
        return Verdict(os.fspath(path), "unverified", searched_all=False, notes=tuple(notes))
    except NotComplete as error:
        notes.append(str(error))
        return Verdict(os.fspath(path), "unverified", searched_all=False, notes=tuple(notes))
    return _choose(os.fspath(path), _newest_first(candidates), reader, failed_at, tuple(notes))


def _choose(
    path: str,
    candidates: list[Candidate],
    reader: Reader,
    failed_at: float | None,
    notes: tuple[str, ...],
) -> Verdict:
    passed_over: list[Checkpoint] = []
    for candidate in candidates[: reader.limits.candidates]:
        checkpoint = _judged(candidate, reader, failed_at)
        if checkpoint.state == "complete":
            return Verdict(path, "complete", checkpoint, tuple(passed_over), reader.complete, notes)
        passed_over.append(checkpoint)
    searched_all = reader.complete and len(candidates) <= reader.limits.candidates
    doubtful = not searched_all or any(item.state == "unverified" for item in passed_over)
    if not candidates and searched_all:
        return Verdict(path, "none", searched_all=True, notes=notes)
    return Verdict(
        path,
        "unverified" if doubtful else "broken",
        passed_over=tuple(passed_over),
        searched_all=searched_all,
        notes=notes,
    )


def _judged(candidate: Candidate, reader: Reader, failed_at: float | None) -> Checkpoint:
    reader.forget()
    judged, failure = Judged(), None
    try:
        judged = candidate.judge()
        if failed_at is not None and reader.modified > failed_at + _AFTER_FAILURE_SECONDS:
            raise Writing("it was still being written after the failure")
        reader.look_again()
    except NotComplete as error:
        failure = error
    except RecursionError:
        failure = Unverified("it is nested too deeply to be followed")
    return Checkpoint(
        path=candidate.path,
        format=candidate.format,
        state=failure.state if failure else "complete",
        step=candidate.step if candidate.step is not None else judged.step,
        checked="contents" if judged.contents and not failure else "structure",
        bytes=reader.total_bytes,
        modified=reader.modified or candidate.modified,
        why=str(failure) if failure else None,
    )


def _newest_first(candidates: list[Candidate]) -> list[Candidate]:
    if any(candidate.step is not None for candidate in candidates):
        # Beside checkpoints whose names tell their steps, a document without one is a pointer.
        candidates = [item for item in candidates if item.step is not None or item.format != "json"]
    if all(candidate.step is not None for candidate in candidates):
        return sorted(candidates, key=lambda item: (item.step or 0, item.modified), reverse=True)
    return sorted(candidates, key=lambda item: item.modified, reverse=True)


def _in_folder(listing: Listing, reader: Reader, depth: int) -> list[Candidate]:
    """The checkpoints in a folder, or the folder itself where it is one."""
    for trainer in _TRAINERS:
        found = trainer(listing, reader)
        if found is not None:
            return found
    whole_folder = _whole_folder(listing, reader)
    if whole_folder:
        return [whole_folder]
    name = listing.path.name
    if _FOLDER_WITH_STEP.search(name) and step_of(name) is not None:
        # What lies in a folder of one step belongs together: all of it must be well.
        return [_folder(listing, "folder", reader)] if parts.has_weights(listing, reader) else []
    return [*_files(listing, reader), *_below(listing, reader, depth)]


def _whole_folder(listing: Listing, reader: Reader) -> Candidate | None:
    with contextlib.suppress(Broken):
        if manifest.is_manifest(listing, reader):
            return _folder(listing, "manifest", reader)
    if manifest.named_in(listing) and parts.has_weights(listing, reader, depth=0):
        return _folder(listing, "manifest", reader)
    if distcp.is_one(listing):
        return _folder(listing, "distcp", reader)
    if safetensors.is_sharded(listing):
        return _folder(listing, "safetensors", reader)
    return None


def _files(listing: Listing, reader: Reader) -> list[Candidate]:
    ours: dict[tuple[int, int], str] = {}
    for name, status in listing.files.items():
        plain = plain_name(name)
        if f"{name}{_DIGEST}" in listing.files or parts.format_of(plain) or _json_with_step(plain):
            # Of a file and links to it, such as `latest.pt`, the name that tells the step.
            identity = (status.st_dev, status.st_ino)
            if identity not in ours or step_of(ours[identity]) is None:
                ours[identity] = name
    grouped = ranks.groups(ours.values())
    members = {name for group in grouped.values() for name in group.names.values()}
    found = [_group(listing, common, group, reader) for common, group in grouped.items()]
    for name in ours.values():
        if name not in members:
            modified, beside = listing.files[name].st_mtime, f"{name}{_DIGEST}" in listing.files
            found.append(_file(listing.path / name, modified, reader, has_digest=beside))
    return found


def _group(listing: Listing, common: str, group: ranks.Group, reader: Reader) -> Candidate:
    def judge() -> Judged:
        parts.need_all(group.names, group.count, "rank")
        return parts.together(
            parts.judge_file(
                listing.path / name, reader, has_digest=f"{name}{_DIGEST}" in listing.files
            )
            for name in group.names.values()
        )

    modified = max(listing.files[name].st_mtime for name in group.names.values())
    return Candidate(str(listing.path / common), "ranks", step_of(common), modified, judge)


def _json_with_step(name: str) -> bool:
    return name.endswith(".json") and (
        step_of(name) is not None or re.search("ckpt|checkpoint", name, re.IGNORECASE) is not None
    )


def _below(listing: Listing, reader: Reader, depth: int) -> list[Candidate]:
    found: list[Candidate] = []
    seen: set[tuple[int, int]] = set()
    for name, status in listing.folders.items():
        identity = (status.st_dev, status.st_ino)
        if identity in seen:
            continue  # a link such as `latest` to a folder beside it
        seen.add(identity)
        if depth <= 0:
            reader.complete = False
            break
        path = listing.path / name
        if TEMPORARY.search(name):
            step = step_of(plain_name(name))
            judge = functools.partial(_unfinished, "it bears the name of one being written")
            found.append(Candidate(str(path), "folder", step, status.st_mtime, judge))
        elif f"{name}-unfinished" in listing.files:
            judge = functools.partial(_unfinished, "a marker -unfinished lies beside it")
            found.append(Candidate(str(path), "nemo", step_of(name), status.st_mtime, judge))
        else:
            with contextlib.suppress(Broken):  # a folder that cannot be listed holds none for us
                found += _in_folder(reader.listing(path), reader, depth - 1)
    return found


def _unfinished(why: str) -> Judged:
    raise Writing(why)


def _folder(listing: Listing, kind: str, reader: Reader) -> Candidate:
    def judge() -> Judged:
        return parts.judge_folder(reader.listing(listing.path), reader)

    step = step_of(listing.path.name)
    return Candidate(str(listing.path), kind, step, listing.modified, judge)


def _file(path: Path, modified: float, reader: Reader, *, has_digest: bool) -> Candidate:
    judge = functools.partial(parts.judge_file, path, reader, has_digest=has_digest)
    kind = parts.format_of(path.name) or ("json" if path.suffix == ".json" else "sha256")
    return Candidate(str(path), kind, step_of(plain_name(path.name)), modified, judge)


def _beside(path: Path) -> bool:
    return path.with_name(path.name + _DIGEST).exists()
