"""`recovery nodes`: how each node reports, its score, what it last found and who named it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from recovery import asked, inventory
from recovery.asked import Asked
from recovery.offenders import SCORES
from recovery.report.text import SILENT_SECONDS
from recovery.report.words import age, cut, wrapped
from recovery.store import Store
from slurm_hooks.record import SEVERITIES, seconds_of, utc

HISTORY_SECONDS = 30 * 86_400.0

_FINDINGS_LIMIT = 5
_RECORDS_READ = 20
"""Most records of one node that are looked through for its last findings."""

_GRAVITY = {"fatal": 0, "fault": 1, "warning": 2}


@dataclass(frozen=True)
class Wanted:
    """Which nodes are asked for.

    With a filter in ``decisions``, only nodes that such a decision names are shown, and only those
    decisions are counted.
    """

    names: Sequence[str] = ()
    silent: bool = False
    decisions: Asked = field(default_factory=Asked)


def document(store: Store, wanted: Wanted, now: str, limit: int | None = None) -> dict[str, Any]:
    """Return ``nodes/v1``: those that need a look first, ``left_out`` how many there are beyond.

    ``findings`` are the last ones, newest first: of all that are shown one, of named nodes some.
    """
    beats = store.heartbeats(wanted.names or None)
    history = _history(store, wanted, now)
    scores = json.loads(store.meta(SCORES) or "{}")
    taken_out, slurm = _taken_out(store), inventory.known(store)
    if wanted.decisions.given():
        names = history.keys() & set(wanted.names) if wanted.names else history.keys()
    else:
        names = set(wanted.names) or beats.keys() | history.keys() | slurm.names
    items: list[dict[str, Any]] = []
    for node in names:
        beat = beats.get(node)
        if beat is None and node not in history and node not in slurm.names:
            continue
        quiet = seconds_of(now) - seconds_of(beat["received"]) if beat else None
        is_silent = quiet is None or quiet > SILENT_SECONDS
        if wanted.silent and not is_silent:
            continue
        count, last = history.get(node, (0, ""))
        items.append({
            "node": node,
            "silent": is_silent,
            "heard_seconds_ago": None if quiet is None else round(quiet),
            "verdict": beat["verdict"] if beat else None,
            "decisions": count,
            "last_decision": last,
            "score": _score(scores, node),
            "drained": taken_out.get(node),
            "out_of_service": slurm.out.get(node),
        })  # fmt: skip
    items.sort(key=_gravest_first)
    shown = items[:limit]
    each = _FINDINGS_LIMIT if wanted.names else 1
    for item in shown:
        item["findings"] = _findings(store, item["node"], each)
    return {"schema": "nodes/v1", "nodes": shown, "left_out": len(items) - len(shown)}


def text(document: Mapping[str, Any], now: str, named: bool) -> str:
    """Return the nodes, a line or two for each; where they are ``named``, all that is known."""
    lines = []
    for one in document["nodes"]:
        # An old heartbeat says nothing of how a node is now.
        state = "SILENT" if one["silent"] else one["verdict"]
        parts = [_heard(one)]
        if one["decisions"]:
            parts.append(f"named by {_many(one['decisions'])}")
        if not named and one["out_of_service"]:
            parts.append(one["out_of_service"].partition(":")[0])
        if not named and one["score"] and one["score"]["evidence"] > 0:
            parts.append(f"{one['score']['times_chance']:g} times chance")
        lines += wrapped(f"{one['node']:<16} {state:<8} ", ", ".join(parts))
        if named:
            lines += [line for fact in facts(one, now)[1:] for line in wrapped("    ", fact)]
        for seen in one["findings"]:
            lines.append(cut(f"    {seen['time'][:19]}Z  {seen['summary']}"))
    if document["left_out"]:
        lines.append(f"and {document['left_out']} more: --limit, or a filter")
    return "\n".join(lines) or "no such node has reported"


def facts(item: Mapping[str, Any], now: str) -> list[str]:
    """Return what is known of a node now, a sentence each: how it reports, drained, its score."""
    if item["silent"]:
        last = f", {item['verdict']} then" if item["verdict"] else ""
        found = [f"SILENT: {_heard(item)}{last}"]
    else:
        found = [f"its health check says {item['verdict']}, {_heard(item)}"]
    if item["out_of_service"]:
        found.append(f"Slurm, at the last look: {item['out_of_service']}")
    drained = item["drained"]
    if drained:
        since = age(seconds_of(now) - seconds_of(drained["time"]))
        found.append(f"drained by {drained['decision']} {since} ago, returned by no decision since")
    score = item["score"]
    if score is None:
        found.append("its score is not known: no pass has made one yet")
    elif score["evidence"] <= 0:
        found.append("score 0: nothing against it beyond chance")
    else:
        found.append(
            f"score {score['evidence']:g} (avoided above {score['avoided_above']:.1f}, drained"
            f" above {score['drained_above']:.1f}): {score['times_chance']:g} times what chance"
            f" brings; {score['history']}"
        )
    return found


def _heard(item: Mapping[str, Any]) -> str:
    heard = item["heard_seconds_ago"]
    return "never heard of" if heard is None else f"heard {age(heard)} ago"


def _many(decisions: int) -> str:
    return f"{decisions} decision{'' if decisions == 1 else 's'}"


def _gravest_first(item: Mapping[str, Any]) -> tuple[object, ...]:
    score = item["score"]["evidence"] if item["score"] else 0.0
    grave = _GRAVITY.get(item["verdict"] or "", len(_GRAVITY))
    return (not item["silent"], grave, -score, item["node"])


def _history(store: Store, wanted: Wanted, now: str) -> dict[str, tuple[int, str]]:
    """How many of the decisions asked for name each node, and when the last one did."""
    since = wanted.decisions.since or utc(seconds_of(now) - HISTORY_SECONDS)
    one = wanted.names[0] if len(wanted.names) == 1 else None
    return asked.nodes_named(store.file, replace(wanted.decisions, since=since, node=one))


def _score(scores: Mapping[str, Any], node: str) -> dict[str, Any] | None:
    if not scores:
        return None
    nothing = {"evidence": 0.0, "times_chance": 0.0, "history": ""}
    bars = {key: scores[key] for key in ("avoided_above", "drained_above")}
    return {**scores["nodes"].get(node, nothing), **bars}


def _taken_out(store: Store) -> dict[str, dict[str, str]]:
    """The nodes that this toolkit has drained and not returned: by which decision, and when."""
    rows = store.file.rows(
        "SELECT kind, target, decision, time FROM commands WHERE kind IN ('drain', 'return')"
        " AND state = 'verified' ORDER BY time"
    )
    found: dict[str, dict[str, str]] = {}
    for kind, node, decision, time in rows:
        if kind == "drain":
            found[node] = {"decision": decision, "time": time}
        else:
            found.pop(node, None)
    return found


def _findings(store: Store, node: str, limit: int) -> list[dict[str, str]]:
    """The last findings of a node that are worth a warning, newest first."""
    rows = store.file.rows(
        "SELECT time, document FROM records WHERE node = ? ORDER BY time DESC LIMIT ?",
        (node, _RECORDS_READ if limit > 1 else 3),
    )
    found: list[dict[str, str]] = []
    for time, document in rows:
        found += [
            {key: one[key] for key in ("code", "severity", "summary")} | {"time": time}
            for one in json.loads(document)["findings"]
            if SEVERITIES.index(one["severity"]) >= SEVERITIES.index("warning")
        ]
        if len(found) >= limit:
            break
    return found[:limit]
