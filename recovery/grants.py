"""Which grants are in force: an admin's permission, and the evidence that it waits for.

Owns how a grant's evidence is gathered and what is said when that changes. A grant waits until its
trial has brought what it needs; one that had it and lost it again, by later reviews or by how its
actions ended, is suspended. What a grant then allows is ``guard``'s.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from recovery import judged, trial
from recovery.guard import Agreement, Standing, standing
from recovery.store import Store
from slurm_hooks.config import Config, Grant

_CLASSES_TOLD = 3


@dataclass(frozen=True)
class Change:
    """A grant that came into force, or fell back."""

    key: str
    in_force: bool
    why: str


def key_of(grant: Grant) -> str:
    """Return what tells this grant from others: its scope and actions, whatever it needs."""
    scope = {name: value for name, value in asdict(grant).items() if name not in ("needs",)}
    scope.pop("accept_untested")
    return hashlib.sha256(json.dumps(scope, sort_keys=True).encode()).hexdigest()[:16]


def standings(config: Config, store: Store | None) -> tuple[Standing, ...]:
    """Return how each grant of the configuration stands by the evidence there is (None: none)."""
    if store is None:
        return tuple(standing(grant, Agreement()) for grant in config.grant)
    known = judged.grants(store.file)
    return tuple(_standing(grant, store, known.get(key_of(grant))) for grant in config.grant)


def _standing(grant: Grant, store: Store, last: judged.GrantEvent | None) -> Standing:
    if grant.accept_untested:
        return standing(grant, Agreement())
    cases = judged.latest_judged(store.file, lambda case: trial.covers(grant, case))
    reviewed = [case.verdict for case in cases if case.verdict]
    bad = sum(bool(case.bad) and not case.verdict for case in cases)
    evidence = Agreement(len(reviewed), reviewed.count("helpful"), bad)
    return standing(grant, evidence, was_in_force=last is not None)


def changes(store: Store, now: Sequence[Standing]) -> list[Change]:
    """Return what has changed since it was last recorded; a first "waiting" is no change."""
    known = judged.grants(store.file)
    found = []
    for one in now:
        key = key_of(one.grant)
        before = known[key].in_force if key in known else False
        if one.in_force != before:
            against = "" if one.in_force else _against(one.grant, store)
            found.append(Change(key, one.in_force, one.why + against))
    return found


def _against(grant: Grant, store: Store) -> str:
    """Of which classes of failure the decisions are that speak against a grant, most first."""
    cases = judged.latest_judged(store.file, lambda case: trial.covers(grant, case))
    classes = Counter(
        case.fault_class
        for case in cases
        if case.verdict != "helpful"  # ended badly, or judged so
    )
    told = ", ".join(f"{count} of {name}" for name, count in classes.most_common(_CLASSES_TOLD))
    return f"; against it: {told}" if told else ""


def scope_text(grant: Grant) -> str:
    """Return a grant's scope in words: ``partitions trial; users ann``."""
    parts = (
        ("partitions", grant.partitions),
        ("accounts", grant.accounts),
        ("users", grant.users),
        ("qos", grant.qos),
    )
    return "; ".join(f"{name} {', '.join(names)}" for name, names in parts if names) or "everywhere"
