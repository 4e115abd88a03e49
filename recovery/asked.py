"""Which decisions a list is asked for: the filters of `decisions`, `incidents` and `nodes` as SQL.

A class stands for all below it (``hardware`` for ``hardware.gpu``), and a node that lies in several
partitions is found by each of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from recovery.decision import Decision
from recovery.index_file import IndexFile

_CONDITIONS = {
    "node": "n.node = :node",
    "job": "d.id IN (SELECT decision FROM job_names WHERE name = :job)",
    "user": "d.owner = :user",
    "partition": "(d.partition = :partition OR d.job_id IS NULL AND"
    " instr(',' || d.partition || ',', ',' || :partition || ','))",
    # All that begins with the class and a dot: the slash is the character after that. The plus
    # keeps SQLite to the newest first: by class it would have to sort all that there are of it.
    "fault_class": "(+d.fault_class = :fault_class OR"
    " +d.fault_class > :fault_class || '.' AND +d.fault_class < :fault_class || '/')",
    "since": "t.time >= :since",
    "until": "t.time < :until",
}


_LOOKUPS = {
    "node": ("decision_nodes n CROSS JOIN decisions d ON d.id = n.decision", "n"),
    "job": ("job_names j CROSS JOIN decisions d ON d.id = j.decision AND j.name = :job", "j"),
    "": ("decisions d", "d"),
}


@dataclass(frozen=True)
class Asked:
    """What all have to be; None where it does not matter. since <= time < until.

    ``node`` is implicated, judged or excluded by the decision. ``job`` is a name (``naming.job``).
    """

    node: str | None = None
    job: str | None = None
    user: str | None = None
    partition: str | None = None
    fault_class: str | None = None
    since: str | None = None
    until: str | None = None

    def given(self) -> dict[str, Any]:
        """Return the filters that were given, by their name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def decisions(file: IndexFile, asked: Asked, limit: int, followers: bool) -> list[Decision]:
    """Return at most ``limit`` decisions, newest first; see ``Store.decisions``."""
    given = asked.given()
    # The order of the tables is the order of the lookup: by node or job first, where one is given.
    by = next((one for one in ("node", "job") if one in given), "")
    table, time = _LOOKUPS[by]
    alone = "" if followers else " AND NOT d.follows"
    rows = file.rows(
        f"SELECT d.document FROM {table} WHERE {_where(given, time)}{alone}"
        f" ORDER BY {time}.time DESC, d.id DESC LIMIT :limit",
        {**given, "limit": limit},
    )
    return [Decision.from_dict(json.loads(text)) for (text,) in rows]


def nodes_named(file: IndexFile, asked: Asked) -> dict[str, tuple[int, str]]:
    """Return how many of the decisions name each node, and the time of the last that does."""
    given = asked.given()
    about_jobs = given.keys() - {"node", "since", "until"}
    joined = " JOIN decisions d ON d.id = n.decision" if about_jobs else ""
    rows = file.rows(
        f"SELECT n.node, count(*), max(n.time) FROM decision_nodes n{joined}"
        f" WHERE {_where(given, 'n')} GROUP BY n.node",
        given,
    )
    return {node: (count, last) for node, count, last in rows}


def _where(given: dict[str, Any], time: str) -> str:
    conditions = [_CONDITIONS[name].replace("t.time", f"{time}.time") for name in given]
    return " AND ".join(conditions) or "1"
