"""What people have said, in the index: reviews, the trial's cases, grants as they stood last.

    judged.cases(store.file, since, until)

Owns these tables and the events ``review``, ``rerun`` and ``grant`` of the journal; ``store`` calls
it with each decision and each such event. What needs a person is ``concerns``'.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recovery.decision import Decision
from recovery.index_file import IndexFile
from recovery.trial import Case, case_of

LATEST = 200
"""How many of the latest judged decisions a grant stands on: what was thought of an older policy
fades, and enough are left for any bar up to 0.98."""

_SCANNED = 5000


@dataclass(frozen=True)
class GrantEvent:
    """How a grant stood when that last changed; ``scope`` is its actions and scope in words."""

    in_force: bool
    why: str
    time: str
    scope: str


def put(file: IndexFile, decision: Decision) -> None:
    """Take in a decision as it stands now; what follows a fleet event is judged with that.

    Unless acting on it ended badly: that counts by itself.
    """
    case = case_of(decision)
    if decision.fleet and not case.judged:
        return
    document = json.dumps(case.to_dict(), separators=(",", ":"))
    file.change(
        "INSERT OR REPLACE INTO cases VALUES (?, ?, ?, ?)",
        (case.decision, case.time, case.judged, document),
    )
    file.change_many(
        "INSERT OR IGNORE INTO reviews VALUES (?, ?)",
        [(decision.id, review.uid) for review in decision.reviews],
    )


def put_grant(file: IndexFile, event: Mapping[str, Any]) -> None:
    """Take in an event ``grant``: the grant ``key`` came into force, or fell back."""
    key = str(event["key"])
    scope = str(event.get("scope") or key)
    row = (key, bool(event["in_force"]), str(event["why"]), event["time"], scope)
    file.change("INSERT OR REPLACE INTO grants VALUES (?, ?, ?, ?, ?)", row)


def grants(file: IndexFile) -> dict[str, GrantEvent]:
    """Return how each grant that was ever in force stood last, by its key."""
    rows = file.rows("SELECT key, in_force, why, time, scope FROM grants")
    return {key: GrantEvent(bool(in_force), *others) for key, in_force, *others in rows}


def cases(file: IndexFile, since: str, until: str) -> list[Case]:
    """Return the cases with since <= time < until, oldest first."""
    query = "SELECT document FROM cases WHERE time >= ? AND time < ? ORDER BY time, decision"
    return [Case.from_dict(json.loads(text)) for (text,) in file.rows(query, (since, until))]


def latest_judged(file: IndexFile, wanted: Callable[[Case], bool]) -> list[Case]:
    """Return the latest judged cases that are ``wanted``, newest first, at most LATEST."""
    query = "SELECT document FROM cases WHERE judged ORDER BY time DESC LIMIT ?"
    found = (Case.from_dict(json.loads(text)) for (text,) in file.rows(query, (_SCANNED,)))
    return [case for case in found if wanted(case)][:LATEST]


def unreviewed(file: IndexFile, uid: int, limit: int) -> list[Decision]:
    """Return the newest decisions that ``uid`` may review and has not, newest first."""
    rows = file.rows(
        "SELECT document FROM decisions d WHERE (d.uid IS NULL OR d.uid != ?) AND NOT EXISTS"
        " (SELECT 1 FROM reviews r WHERE r.decision = d.id AND r.uid = ?)"
        " AND EXISTS (SELECT 1 FROM cases c WHERE c.decision = d.id)"
        " ORDER BY time DESC LIMIT ?",
        (uid, uid, limit),
    )
    return [Decision.from_dict(json.loads(text)) for (text,) in rows]
