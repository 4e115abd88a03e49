"""The trial as one HTML page that needs nothing else: no network, no script; light, dark, print.

Charts are inline SVG whose places are percentages and whose text is the page's own, so that they
read on a telephone as on a desk. Owns the page; what it shows is ``report.trial``'s document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from recovery.report.trial import gpu_hours, supported_text
from recovery.trial import Case

_DAYS_LIMIT = 60
_NO_BREAK_HYPHEN = "&#8209;"
_CHART_HEIGHT = 140
_VERDICTS = (
    ("helpful", "helpful"),
    ("ambiguous", "ambiguous"),
    ("disruptive", "disruptive"),
    ("", "not reviewed"),
)

_COLOURS = {
    "ambiguous": "ambiguous",
    "disruptive": "disruptive",
    "ended badly": "disruptive",
}

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c2127; --soft: #5b6570; --rule: #d9dee3;
  --helpful: #2468b4; --ambiguous: #b57a00; --disruptive: #c2392b; --none: #b9c1c9; }
@media (prefers-color-scheme: dark) { :root { --ground: #14181c; --ink: #e6eaee; --soft: #9aa5b0;
  --rule: #333b43; --helpful: #6aa9ee; --ambiguous: #e0ab3f; --disruptive: #f0796b;
  --none: #55606b; } }
@media print { :root { color-scheme: light; --ground: #fff; --ink: #000; --soft: #444;
  --rule: #bbb; --helpful: #2468b4; --ambiguous: #b57a00; --disruptive: #c2392b; --none: #b9c1c9; }
  svg *, .key { print-color-adjust: exact; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1rem 4rem; background: var(--ground);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
p { margin: .3rem 0; max-width: 46rem; } .soft { color: var(--soft); font-size: .9rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 1rem;
  margin: 1.4rem 0 0; padding: 1rem 0; border-block: 1px solid var(--rule); }
.figures b { display: block; font-size: 1.6rem; line-height: 1.2; font-weight: 600; }
svg { display: block; width: 100%; overflow: visible; }
.row { display: grid; grid-template-columns: 17rem 1fr 9.5rem; gap: .2rem 1rem; padding: .2rem 0;
  align-items: center; font-variant-numeric: tabular-nums; }
.row span:last-child { text-align: right; color: var(--soft); font-size: .9rem; }
@media screen and (max-width: 40rem) { thead { display: none; }
  tr { display: grid; grid-template-columns: repeat(3, 1fr); gap: .2rem .6rem; padding: .6rem 0;
    border-bottom: 1px solid var(--rule); }
  tr td { display: block; padding: 0; border: 0; text-align: left; white-space: normal; }
  tr td.left { grid-column: span 2; font-weight: 600; } tr td.left + td.left { grid-column: auto; }
  td[data-name]::after { content: " " attr(data-name); color: var(--soft); } }
@media (max-width: 40rem) { .row { grid-template-columns: 1fr auto; padding: .5rem 0; }
  .row svg { grid-row: 2; grid-column: 1 / -1; } }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .4rem; border-bottom: 1px solid var(--rule); text-align: right;
  overflow-wrap: normal; white-space: nowrap; }
th { color: var(--soft); font-weight: 500; white-space: normal; vertical-align: bottom; }
.left { text-align: left; } td.left { white-space: normal; }
.objection { border-bottom: 1px solid var(--rule); padding: .5rem 0; break-inside: avoid; }
.objection p { max-width: none; margin: 0; } .objection .soft span { margin-right: .9rem; }
.key { display: inline-block; width: .7rem; height: .7rem; border-radius: 2px;
  margin: 0 .35rem 0 0; }
.legend span { margin-right: 1.1rem; white-space: nowrap; } .ends { display: flex;
  justify-content: space-between; }
@media print { html { font-size: 12px; } body { max-width: none; padding: 0; }
  h2 { break-after: avoid; }
  .figures { grid-template-columns: repeat(5, 1fr); } .row { padding: 0; }
  tr, .row, .figures, svg { break-inside: avoid; } .scroll { overflow: visible; }
  th, td { padding: .2rem .3rem; } }
"""


def page(document: Mapping[str, Any], cases: Sequence[Case]) -> str:
    """Return the page; every text of a person or a log is escaped."""
    everything = document["rows"][0]
    title = f"Trial, {document['since'][:10]} to {document['until'][:10]}"
    parts = [
        f"<h1>{title.replace('-', _NO_BREAK_HYPHEN)}</h1>",
        f'<p class="soft">slurm-recovery in {escape(document["mode"])} mode. What was decided,'
        " what people thought of it, and what that allows.</p>",
        _figures(everything),
        _section("Agreement, with its 95% interval", _agreement(document)),
        _section("Decisions by day", _days(cases)),
        _section("By class and action", _table(document["rows"])),
        _section("GPU-hours", f"<p>{escape(gpu_hours(everything))}.</p>"),
        _section("What people objected to, and what ended badly", _objections(document)),
        _section("Grants", _grants(document)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{content}</section>"


def _figures(row: Mapping[str, Any]) -> str:
    delay = f"{row['delay'][0]:.1f} s" if row["delay"] else "-"
    agreement = f"{row['agreement']:.0%}" if row["agreement"] is not None else "-"
    figures = (
        (row["decisions"], "decisions"),
        (row["reviewed"], "reviewed"),
        (agreement, "called helpful"),
        (row["disruptive"], "would have been disruptive"),
        (delay, "from failure to decision, the middle one"),
    )
    cells = "".join(f"<div><b>{value}</b><span>{name}</span></div>" for value, name in figures)
    return f'<div class="figures">{cells}</div>'


def _agreement(document: Mapping[str, Any]) -> str:
    rows = [row for row in document["rows"] if row["interval"]]
    if not rows:
        return "<p>Nothing has been reviewed yet: <code>recovery review --next</code>.</p>"
    bar = document["needs"]["agreement"]
    lines = [
        f'<p class="soft">The dashed line is {bar:.2f}, which a grant needs by default: the left'
        " end of an interval must lie beyond it.</p>"
    ]
    for row in rows:
        low, high = row["interval"]
        name = f"{row['fault_class']}, {row['action']}"
        if row["fault_class"] == "all":
            name = "all together"
        said = f"{row['agreement']:.2f} ({low:.2f} to {high:.2f})"
        lines.append(
            f'<div class="row"><span>{_broken(name)}</span>'
            f'<svg height="20" role="img" aria-label="{escape(name)}: {said}">'
            '<line x1="0" x2="100%" y1="10" y2="10" stroke="var(--rule)"/>'
            f'<line x1="{bar:.1%}" x2="{bar:.1%}" y1="0" y2="20" stroke="var(--soft)"'
            ' stroke-dasharray="3 3"/>'
            f'<line x1="{low:.1%}" x2="{high:.1%}" y1="10" y2="10" stroke="var(--helpful)"'
            ' stroke-width="6" stroke-opacity=".45"/>'
            f'<circle cx="{row["agreement"]:.1%}" cy="10" r="5" fill="var(--helpful)"/></svg>'
            f"<span>{said}</span></div>"
        )
    return "\n".join(lines)


def _days(cases: Sequence[Case]) -> str:
    counts: dict[str, dict[str, int]] = {}
    for case in cases:
        day = counts.setdefault(case.time[:10], {})
        day[case.verdict] = day.get(case.verdict, 0) + 1
    days = sorted(counts)[-_DAYS_LIMIT:]
    if not days:
        return "<p>No decision has been made in this time.</p>"
    most = max(sum(counts[day].values()) for day in days)
    width = 100 / len(days)
    bars: list[str] = []
    for place, date in enumerate(days):
        top = float(_CHART_HEIGHT)
        for verdict, name in _VERDICTS:
            count = counts[date].get(verdict, 0)
            if count:
                height = count / most * (_CHART_HEIGHT - 4)
                top -= height
                bars.append(
                    f'<rect x="{place * width + width * 0.1:.2f}%" width="{width * 0.8:.2f}%"'
                    f' y="{top:.1f}" height="{height:.1f}" fill="var(--{verdict or "none"})">'
                    f"<title>{date}: {count} {name}</title></rect>"
                )
    keys = "".join(
        f'<span><i class="key" style="background:var(--{verdict or "none"})"></i>{name}</span>'
        for verdict, name in _VERDICTS
    )
    total = f"Decisions by day and verdict, at most {most} a day"
    last = f"<span>{days[-1]}</span>" if len(days) > 1 else ""
    return (
        f'<p class="legend soft">{keys}</p>'
        f'<p class="soft">At most {most} a day; days without a decision are left out.</p>'
        f'<svg height="{_CHART_HEIGHT}" role="img" aria-label="{total}">{"".join(bars)}'
        f'<line x1="0" x2="100%" y1="{_CHART_HEIGHT}" y2="{_CHART_HEIGHT}" stroke="var(--soft)"/>'
        f'</svg><p class="ends soft" style="max-width:none"><span>{days[0]}</span>{last}</p>'
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = ("made", "reviewed", "helpful", "ambiguous", "disruptive", "ended badly",
             "failure to decision", "GPU-h saved", "GPU-h cost")  # fmt: skip
    head = "".join(f"<th>{name}</th>" for name in names)
    keys = ("decisions", "reviewed", "helpful", "ambiguous", "disruptive", "bad")
    body = []
    for row in rows:
        delay = f"{row['delay'][0]:.1f} s" if row["delay"] else "-"
        values = [str(row[key]) for key in keys] + [delay]
        hours = (row["saved_gpu_hours"], row["cost_gpu_hours"])
        values += [f"{one:g}" if row["estimated"] else "-" for one in hours]
        cells = "".join(
            f'<td data-name="{name}">{value}</td>'
            for name, value in zip(names, values, strict=True)
        )
        name = f'<td class="left">{_broken(row["fault_class"])}</td>'
        body.append(f'<tr>{name}<td class="left">{escape(row["action"])}</td>{cells}</tr>')
    return (
        '<div class="scroll"><table><thead><tr><th class="left">class</th>'
        f'<th class="left">action</th>{head}</tr></thead><tbody>{"".join(body)}</tbody>'
        "</table></div>"
    )


def _objections(document: Mapping[str, Any]) -> str:
    if not document["objections"]:
        return "<p>Nothing.</p>"
    return "\n".join(
        f'<div class="objection"><p class="soft"><span><i class="key" style="background:'
        f'var(--{_COLOURS.get(one["verdict"], "none")})"></i>{escape(one["verdict"])},'
        f" {escape(one['who'])}</span> <span>{_broken(one['class'])}, {escape(one['action'])}"
        f"</span> <code>{escape(one['decision'])}</code></p>"
        f"<p>{escape(one['why'] or 'no reason given')}</p></div>"
        for one in document["objections"]
    )


def _broken(fault_class: str) -> str:
    """A class whose name may be broken behind its dots."""
    return escape(fault_class).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _grants(document: Mapping[str, Any]) -> str:
    lines = [
        f"<p><b>{escape(', '.join(one['actions']))}</b> ({escape(one['scope'])}):"
        f" {escape(one['state'])}, {escape(one['why'])}</p>"
        for one in document["grants"]
    ] or ["<p>No grant is configured: everything is only recorded.</p>"]
    said = supported_text(document)
    return "\n".join(lines) + f"\n<p>{escape(said[0].upper() + said[1:])}.</p>"
