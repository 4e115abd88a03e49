"""Reviews: what people think of a decision, as a file of their own in the spool's ``reviews``.

    >>> parse(b'{"schema": "review/v1", "decision": "d1", "verdict": "helpful"}').verdict
    'helpful'

Owns the form of such a file and who counts as a reviewer. Who wrote one is the uid that owns the
file, and when is the file's own time: neither is believed from its content. How files are found is
``review_files``', what reviews amount to ``trial``'s.
"""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from recovery.decision import Decision, Review, ReviewVerdict
from slurm_hooks import spool
from slurm_hooks.config import Spool
from slurm_hooks.record import new_id

SCHEMA = "review/v1"
VERDICTS: tuple[str, ...] = get_args(ReviewVerdict)
WOULD_HAVE = ("requeue", "hold", "leave", "drain", "watch", "return")

SIZE_LIMIT_BYTES = 16 * 1024
NOTE_LIMIT_CHARACTERS = 2000
ID_LIMIT_CHARACTERS = 64
READABLE_DAYS = 30


class ReviewRefused(Exception):
    """What was written is no review; the text is the reason in one sentence."""


@dataclass(frozen=True)
class Written:
    """What a review's file says; whose word it is, the file itself tells."""

    decision: str
    verdict: ReviewVerdict
    would_have: str = ""
    note: str = ""


def parse(content: bytes) -> Written:
    """Return what a file in ``reviews`` says.

    Raises:
        ReviewRefused: it is not a JSON document of ``review/v1``.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ReviewRefused(f"it is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ReviewRefused(f"its schema is not {SCHEMA}")
    unknown = document.keys() - {"schema", "decision", "verdict", "would_have", "note"}
    if unknown:
        raise ReviewRefused(f"unknown key {sorted(unknown)[0]!r}")
    values = {key: document.get(key, "") for key in ("decision", "would_have", "note")}
    wrong = [key for key, value in values.items() if not isinstance(value, str)]
    if wrong:
        raise ReviewRefused(f"{wrong[0]} is no text")
    if not 0 < len(values["decision"]) <= ID_LIMIT_CHARACTERS:
        raise ReviewRefused("it names no decision")
    if document.get("verdict") not in VERDICTS:
        raise ReviewRefused(f"its verdict is none of {', '.join(VERDICTS)}")
    if values["would_have"] not in ("", *WOULD_HAVE):
        raise ReviewRefused(f"would_have is none of {', '.join(WOULD_HAVE)}")
    if len(values["note"]) > NOTE_LIMIT_CHARACTERS:
        raise ReviewRefused(f"its note is longer than {NOTE_LIMIT_CHARACTERS} characters")
    return Written(verdict=document["verdict"], **values)


def encode(written: Written) -> bytes:
    """Return the content of a review's file.

    Raises:
        ReviewRefused: ``parse`` would not take it.
    """
    document = {"schema": SCHEMA, **{k: v for k, v in asdict(written).items() if v}}
    content = json.dumps(document).encode() + b"\n"
    parse(content)
    return content


def write(path: Path, settings: Spool, content: bytes) -> str:
    """Put a review into the spool ``path`` as the caller's word, return its id.

    Raises:
        SpoolError: it could not be written.
    """
    review_id = new_id()
    spool.write(path / "reviews", f"{review_id}.json", spool.seal(content, settings))
    return review_id


def reviewer_uids(names: Iterable[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the uids of configured reviewers, and the names that no user has."""
    uids: list[int] = []
    unknown: list[str] = []
    for name in names:
        try:
            uids.append(int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid)
        except KeyError:
            unknown.append(name)
    return tuple(uids), tuple(unknown)


def name_of(uid: int) -> str:
    """Return a uid's name, or its number where nobody has it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def refusal(decision: Decision | None, uid: int) -> str:
    """Return why ``uid`` may not judge this decision, empty where they may."""
    if decision is None:
        return "no such decision is known"
    if decision.attempt is not None and decision.uid == uid:
        return "whoever owns the job does not judge the decision on it"
    return ""


def judgment(reviews: Sequence[Review]) -> str:
    """Return what the reviews of one decision amount to, empty where there are none.

    Each person's latest counts. The most critical of them stands: it takes everybody to be helpful.
    """
    latest = {
        review.uid: review.verdict for review in sorted(reviews, key=lambda r: (r.time, r.id))
    }
    for verdict in ("disruptive", "ambiguous", "helpful"):
        if verdict in latest.values():
            return verdict
    return ""


def in_spool(path: Path) -> dict[str, Decision]:
    """Return the decisions of the readable record's last days, by id, as they stood last.

    For reviewers who may not read the controller's own folder.
    """
    known: dict[str, Decision] = {}
    for file in sorted((path / "decisions").glob("????-??-??.jsonl"))[-READABLE_DAYS:]:
        with file.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    decision = Decision.from_dict(json.loads(line))
                    known[decision.id] = decision
    return known


def unjudged(decisions: Iterable[Decision], uid: int) -> list[Decision]:
    """Return those that ``uid`` may review and has not, newest first."""
    newest = sorted(decisions, key=lambda d: (d.time, d.id), reverse=True)
    return [d for d in newest if all(r.uid != uid for r in d.reviews) and not refusal(d, uid)]


def me() -> int:
    """Return who writes: the uid under which this process makes files."""
    return os.geteuid()
