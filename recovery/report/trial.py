"""The trial for a terminal and as a document: agreement, objections, grants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recovery import trial
from recovery.grants import scope_text
from recovery.guard import Standing
from recovery.report.words import wrapped
from recovery.trial import Case
from slurm_hooks.config import Config, Needs


def document(
    config: Config, cases: Sequence[Case], stand: Sequence[Standing], since: str, until: str
) -> dict[str, Any]:
    """Return ``trial/v1``."""
    needs = Needs()
    return {
        "schema": "trial/v1",
        "since": since,
        "until": until,
        "mode": config.mode,
        "rows": [row.to_dict() for row in trial.rows(cases)],
        "objections": trial.objections(cases),
        "grants": [
            {
                "actions": list(one.grant.actions),
                "scope": scope_text(one.grant),
                "state": one.state,
                "why": one.why,
            }
            for one in stand
        ],
        "needs": {"reviews": needs.reviews, "agreement": needs.agreement},
        "supported": trial.supported(cases, needs.reviews, needs.agreement),
    }


def text(document: Mapping[str, Any]) -> str:
    """Return the trial in words, 80 columns wide."""
    everything = document["rows"][0]
    lines = [
        f"{document['since'][:16]}Z to {document['until'][:16]}Z, mode {document['mode']}:"
        f" {everything['decisions']} decisions, {everything['reviewed']} reviewed",
        "",
        f"{'class':<24}{'action':<9}{'made':>5}{'seen':>5}{'help':>5}{'amb':>4}{'dis':>4}{'bad':>4}"
        f"{'agreement, 95%':>19}",
    ]
    for row in document["rows"]:
        lines.append(
            f"{row['fault_class'][:23]:<24}{row['action']:<9}{row['decisions']:>5}"
            f"{row['reviewed']:>5}{row['helpful']:>5}{row['ambiguous']:>4}{row['disruptive']:>4}"
            f"{row['bad']:>4}{_interval(row):>19}"
        )
    lines += [
        "made: decisions; seen: reviewed, as helpful, ambiguous or disruptive; bad: ended",
        "badly without a review; agreement: helpful of all judged, and where it may lie",
        "",
        f"{'class':<24}{'action':<9}{'to decision':>13}{'GPU-hours saved':>17}{'cost':>12}",
    ]
    for row in document["rows"]:
        took = _seconds(row["delay"][0]) if row["delay"] else "-"
        hours = (row["saved_gpu_hours"], row["cost_gpu_hours"])
        saved, cost = (f"{one:g}" if row["estimated"] else "-" for one in hours)
        lines.append(
            f"{row['fault_class'][:23]:<24}{row['action']:<9}{took:>13}{saved:>17}{cost:>12}"
        )
    lines += [""]
    delay = everything["delay"]
    if delay:
        said = f"{_seconds(delay[0])} in the middle, nine of ten within {_seconds(delay[1])}"
        lines += wrapped("failure to decision  ", said)
    lines += wrapped("GPU-hours            ", gpu_hours(everything))
    if document["objections"]:
        lines += ["", "What people objected to, and what ended badly"]
        for one in document["objections"]:
            said = f"{one['decision']} {one['class']}, {one['action']}: {one['verdict']}"
            lines += wrapped("  ", f"{said}, {one['who']}: {one['why'] or 'no reason given'}")
    lines += ["", "Grants"]
    for one in document["grants"]:
        said = f"{', '.join(one['actions'])} ({one['scope']}): {one['state']}, {one['why']}"
        lines += wrapped("  ", said)
    lines += wrapped("  ", supported_text(document))
    return "\n".join(lines)


def gpu_hours(row: Mapping[str, Any]) -> str:
    """Return what acting saved, would have saved and cost, in words."""
    if not row["estimated"]:
        return "nothing to go by yet: nobody has run a failed job again"
    return (
        f"{row['saved_gpu_hours']:g} saved or to be saved by running at once what people ran"
        f" later, {row['cost_gpu_hours']:g} burned by restarts that failed again"
        f" ({row['estimated']} decisions)"
    )


def supported_text(document: Mapping[str, Any]) -> str:
    """Return which grants the evidence would carry, in words."""
    needs = document["needs"]
    bar = f"needs = {{reviews = {needs['reviews']}, agreement = {needs['agreement']:.2f}}}"
    carried = [
        f"{one['action']} in {one['partition'] or 'no partition'}"
        f" ({one['reviewed']} reviews, agreement ≥ {one['agreement_at_least']:.2f})"
        for one in document["supported"]
        if one["supported"]
    ]
    return f"with {bar} the evidence supports: {'; '.join(carried) or 'none yet'}"


def _interval(row: Mapping[str, Any]) -> str:
    if row["interval"] is None:
        return "-"
    low, high = row["interval"]
    return f"{row['agreement']:.2f} ({low:.2f}-{high:.2f})"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min"
