"""What people think of decisions, and what follows: ``review``, ``trial``, ``grants``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click

from recovery.commands import opening
from recovery.decision import Decision
from slurm_hooks import config_file
from slurm_hooks.config import Config
from slurm_hooks.record import utc

_VERDICTS = ("helpful", "ambiguous", "disruptive")
_WOULD_HAVE = ("requeue", "hold", "leave", "drain", "watch", "return")
_DAY_SECONDS = 86_400.0
_NEXT_LIMIT = 200


@click.command()
@opening.JSON
def grants(as_json: bool) -> None:
    """Which grants are in force, and what the others still lack."""
    from recovery.grants import standings
    from recovery.report import text

    config = opening.configuration()
    if config.controller.state.is_dir():
        with opening.index(config) as store:
            stand = standings(config, store)
    else:
        stand = standings(config, None)
    document = text.grants_document(config, stand)
    click.echo(json.dumps(document) if as_json else text.grants(document))


@click.command()
@click.argument("decision_id", metavar="ID", required=False)
@click.argument("verdict", type=click.Choice(_VERDICTS), required=False)
@click.option("--would-have", type=click.Choice(_WOULD_HAVE), help="What you would have done.")
@click.option("--note", default="", help="Why, for whoever reads the trial.")
@click.option("--next", "walk", is_flag=True, help="Walk through what you have not reviewed yet.")
@opening.JSON
def review(
    decision_id: str | None,
    verdict: str | None,
    would_have: str | None,
    note: str,
    walk: bool,
    as_json: bool,
) -> None:
    """Judge a decision: helpful, ambiguous or disruptive.

    Whose word it is, the system says: the review is a file that you own in the spool's folder
    reviews. Judging again adds to it; your latest counts.
    """
    from recovery import naming
    from recovery import review as reviews

    config = opening.configuration()
    _must_be_reviewer(config)
    if walk:
        _walk(config)
        return
    if decision_id is None or verdict is None:
        raise click.UsageError("name a decision and a verdict, or use --next")
    try:
        decision = _find(config, decision_id)
    except naming.Ambiguous as error:
        opening.fail(str(error), 1)
    decision_id = decision.id if decision else decision_id
    why = reviews.refusal(decision, reviews.me())
    if why:
        opening.fail(f"{decision_id} is not reviewed: {why}; see: recovery decisions", 1)
    review_id = _send(config, decision_id, verdict, would_have or "", note)
    if as_json:
        document = {
            "schema": "reviewed/v1",
            "review": review_id,
            "decision": decision_id,
            "verdict": verdict,
            "by": reviews.name_of(reviews.me()),
        }
        click.echo(json.dumps(document))
    else:
        click.echo(f"{decision_id}: {verdict}, says {reviews.name_of(reviews.me())}")


@click.command()
@click.option("--days", default=30.0, show_default=True, help="Decisions of so many days.")
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), help="Write one page to this file."
)
@opening.JSON
def trial(days: float, html: Path | None, as_json: bool) -> None:
    """What decisions and reviews amount to, and which grants that supports."""
    from recovery import judged
    from recovery.grants import standings
    from recovery.report import trial as report

    config, now = opening.configuration(), time.time()
    since, until = utc(now - days * _DAY_SECONDS), utc(now)
    with opening.index(config) as store:
        cases = judged.cases(store.file, since, until)
        stand = standings(config, store)
    document = report.document(config, cases, stand, since, until)
    if html is not None:
        from recovery.report import trial_page

        try:
            html.write_text(trial_page.page(document, cases), encoding="utf-8")
        except OSError as error:
            opening.fail(f"{html}: {error.strerror}", 2)
    if as_json:
        click.echo(json.dumps(document))
    elif html is not None:
        click.echo(f"{html} written: {len(cases)} decisions")
    else:
        click.echo(report.text(document))


def _must_be_reviewer(config: Config) -> None:
    from recovery import review as reviews

    uids, _ = reviews.reviewer_uids(config.review.reviewers)
    if reviews.me() not in uids:
        who, path = reviews.name_of(reviews.me()), config_file.path()
        among = ", ".join(config.review.reviewers) or "nobody"
        opening.fail(f"{who} is no reviewer; [review] reviewers in {path} names {among}", 1)


def _find(config: Config, decision_id: str) -> Decision | None:
    from recovery import naming
    from recovery import review as reviews

    if _can_read_index(config):
        with opening.index(config) as store:
            found = naming.decision_id(store.file, decision_id)
            return store.decision(found) if found else None
    known = reviews.in_spool(config.spool.path)
    return known.get(naming.among(known, decision_id) or "")


def _can_read_index(config: Config) -> bool:
    """Whether this is who runs the aggregator; others read the spool's readable record."""
    try:
        with (config.controller.state / "index.sqlite").open("r+b"):
            return True
    except FileNotFoundError:
        return True  # the index says best what is missing
    except OSError:
        return False


def _send(config: Config, decision_id: str, verdict: str, would_have: str, note: str) -> str:
    from recovery import review as reviews
    from slurm_hooks.spool import SpoolError

    try:
        written = reviews.Written(decision_id, verdict, would_have, note)  # type: ignore[arg-type]
        content = reviews.encode(written)
        return reviews.write(config.spool.path, config.spool, content)
    except (SpoolError, reviews.ReviewRefused) as error:
        opening.fail(f"the review is not written: {error}", 2)


def _walk(config: Config) -> None:
    """Show what this person has not judged, newest first, and ask for a verdict."""
    from recovery import judged
    from recovery import review as reviews
    from recovery.report import telling

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        opening.fail("--next asks on a terminal; without one: recovery review ID VERDICT", 2)
    uid = reviews.me()
    if _can_read_index(config):
        with opening.index(config) as store:
            waiting = judged.unreviewed(store.file, uid, _NEXT_LIMIT)
    else:
        waiting = reviews.unjudged(reviews.in_spool(config.spool.path).values(), uid)
    waiting = waiting[:_NEXT_LIMIT]
    for number, decision in enumerate(waiting, 1):
        click.echo(f"\n{telling.decision(decision)}\n")
        answer = _ask(f"{number} of {len(waiting)}: [h]elpful [a]mbiguous [d]isruptive", "hadsq")
        if answer == "q":
            break
        if answer == "s":
            continue
        verdict = next(one for one in _VERDICTS if one.startswith(answer))
        would_have, note = "", ""
        if verdict != "helpful":
            names = click.Choice(("", *_WOULD_HAVE))
            would_have = click.prompt("you would have", default="", type=names, show_default=False)
            note = click.prompt("why", default="", show_default=False)
        _send(config, decision.id, verdict, would_have, note)
    click.echo("nothing is left to review" if not waiting else "done")


def _ask(question: str, letters: str) -> str:
    while True:
        letter = str(click.prompt(f"{question} [s]kip [q]uit"))[:1].lower()
        if letter in letters:
            return letter
