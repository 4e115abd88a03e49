"""Where events go: durable in the journal first, then found by the index, then seen in the spool.

Owns that order, and nothing else: a reader of the index never sees what a crash could take back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from recovery.decision import FINAL_ACTIONS, Action, Decision, Member, Outcome, Review
from recovery.grants import Change
from recovery.journal import Journal
from recovery.publish import Publisher
from recovery.store_opening import open_store
from slurm_hooks.record import utc

log = logging.getLogger("recovery.ledger")

_REPUBLISHED_LIMIT = 1000


class Ledger:
    """Journal and index in the folder ``state``, the readable record in the spool's ``publisher``.

    ``clock`` returns seconds since the epoch.
    """

    def __init__(self, state: Path, publisher: Publisher, clock: Callable[[], float]) -> None:
        self._journal = Journal(state / "journal")
        self.store = open_store(state / "index.sqlite", self._journal)
        self._publisher, self._clock = publisher, clock

    def close(self) -> None:
        """Close the index."""
        self.store.close()

    def decided(self, decision: Decision) -> None:
        """Record a new decision."""
        self._record({"type": "decision", "decision": decision.to_dict()})
        former = self.store.decision(decision.revises) if decision.revises else None
        if former is not None:
            self._publisher.add(former)
        self._publisher.add(decision)
        log.info("decided %s: %s: %s", decision.id, decision.job.verdict, decision.cause.summary)

    def acted(self, decision: Decision, action: Action) -> None:
        """Record an action's new state; the readable record is told of final ones."""
        self._record({"type": "action", "decision": decision.id, "action": asdict(action)})
        if action.state in FINAL_ACTIONS:
            self._publisher.add(decision.with_action(action))
        step = f" ({action.step})" if action.state == "planned" else ""
        log.info("%s %s: %s%s %s", decision.id, action.name, action.state, step, action.detail)

    def ended(self, decision: Decision, outcome: Outcome) -> None:
        """Record an outcome of ``decision``, which carries it already."""
        self._record({"type": "outcome", "decision": decision.id, "outcome": asdict(outcome)})
        self._publisher.add(decision)
        log.info("%s outcome: %s: %s", decision.id, outcome.state, outcome.detail)

    def reviewed(self, decision_id: str, review: Review) -> None:
        """Record a person's review of a decision."""
        event = {"type": "review", "decision": decision_id, "review": asdict(review)}
        self._record(event)
        self.publish_again(decision_id)
        log.info("%s reviewed by %s: %s", decision_id, review.who, review.verdict)

    def rerun(self, decision_id: str, time: str) -> None:
        """Record when somebody else ran the job of a decision again."""
        self._record({"type": "rerun", "decision": decision_id, "rerun": time})
        self.publish_again(decision_id)

    def grant_changed(self, change: Change, scope: str) -> None:
        """Record that a grant came into force or fell back."""
        self._record({"type": "grant", **asdict(change), "scope": scope})
        what = "is in force" if change.in_force else "is SUSPENDED, its actions only recorded"
        log.warning("the grant for %s %s: %s", scope, what, change.why)

    def joined(self, decision_id: str, members: Sequence[Member]) -> None:
        """Record who else a fleet event has hit."""
        event = {"type": "joined", "decision": decision_id}
        self._record({**event, "members": [asdict(one) for one in members]})
        self.publish_again(decision_id)
        log.info("%s: %d more hit, %s …", decision_id, len(members), members[0].subject)

    def publish_again(self, decision_id: str) -> None:
        """Tell the readable record how a decision stands now."""
        decision = self.store.decision(decision_id)
        if decision is not None:
            self._publisher.add(decision)

    def tripped(self, kind: str, why: str) -> None:
        """Record that a circuit breaker has opened."""
        self._record({"type": "breaker", "kind": kind, "tripped": True, "why": why})
        log.error("circuit breaker: %s; `recovery resume --why …` closes it", why)

    def republish(self, since: str, published: str) -> None:
        """Tell the readable record again what changed after ``published``, or shortly before.

        A crash may have come between the journal and the spool: better told twice than never.
        ``since`` bounds the decisions looked at; both are times as ``record.utc`` writes them.
        """
        for decision in reversed(self.store.decisions(since=since, limit=_REPUBLISHED_LIMIT)):
            times = [decision.time, *(outcome.time for outcome in decision.outcomes)]
            if decision.open or max(times) >= published:
                self._publisher.add(decision)

    def catch_up(self) -> None:
        """Take in what another process has journaled, such as `recovery pause`.

        Where nobody has, that costs a look at the size of the journal's last part.
        """
        if self._journal.last_seq() != self.store.last_seq():
            self.store.follow(self._journal)

    def added(self, decision: Decision, text: str) -> None:
        """Record an addendum: what was learnt too late for a decision that was acted on."""
        self._record({"type": "addendum", "decision": decision.id, "text": text})
        self._publisher.add(replace(decision, addenda=(*decision.addenda, text)))
        log.info("%s addendum: %s", decision.id, text)

    def _record(self, event: Mapping[str, object]) -> None:
        whole = {"time": utc(self._clock()), **event}
        seq = self._journal.append(whole)
        if seq == self.store.last_seq() + 1:
            self.store.apply({"seq": seq, **whole})
        else:  # somebody else has journaled since, such as `recovery pause`: theirs comes first
            self.store.follow(self._journal)
