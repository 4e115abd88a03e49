"""People are told of what needs them: which notice is due, and the child that sends it.

Owns when: a subject is told when it comes up or comes up again, not oftener than ``repeat``, at
most ``per_hour`` in all; what could not be sent is tried again. Sending is ``notify_send``'s, a
process of its own, so that no mail server delays a pass. What was told is kept in the index only
once it was sent: a crash tells a thing twice rather than never.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass

from recovery import concerns, judged
from recovery.store import Store
from slurm_hooks.config import Notify
from slurm_hooks.record import seconds_of, utc

log = logging.getLogger("recovery.notify")

TRIES = 5
RETRY_SECONDS = (5.0, 30.0, 120.0, 600.0)
LOOK_SECONDS = 2.0
LOOK_BACK_SECONDS = 86_400.0

_HOUR_SECONDS = 3600.0
_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Notice:
    """What somebody must know; ``what`` is what they must do, and comes first wherever it is read.

    ``mark`` is the decision or time that this subject came up with.
    """

    subject: str
    what: str
    since: str
    mark: str
    count: int = 1
    decision: str = ""
    job_owner: str = ""
    looked_after_by: str = ""

    def document(self, cluster: str) -> dict[str, object]:
        """Return ``notice/v1``."""
        known = {key: value for key, value in asdict(self).items() if key != "mark"}
        return {"schema": "notice/v1", "cluster": cluster, **known}


@dataclass
class _Sending:
    """A notice on its way; ``ways`` are those that have not taken it yet."""

    notice: Notice
    ways: tuple[str, ...]
    tried: int = 0
    due: float = 0.0
    until: float = 0.0
    child: subprocess.Popen[bytes] | None = None


def ways(settings: Notify) -> tuple[str, ...]:
    """Return the ways that are configured."""
    known = {
        "command": settings.command,
        "webhook": settings.webhook,
        "slack": settings.slack,
        "mail": settings.mail or settings.mail_owner,
    }
    return tuple(name for name, value in known.items() if value)


class Notifier:
    """Tells people what the index says needs them; ``clock`` returns seconds since the epoch."""

    def __init__(
        self, settings: Notify, cluster: str, store: Store, clock: Callable[[], float]
    ) -> None:
        self._settings, self._cluster, self._store = settings, cluster, store
        self._clock, self._ways = clock, ways(settings)
        self._sending: _Sending | None = None
        self._waiting: list[_Sending] = []
        self._sent: deque[float] = deque()
        self._look_due = 0.0
        self._limited = False

    def step(self) -> str:
        """Begin what is due and see to what was begun; never waits. Return a problem, or nothing.

        One notice is sent at a time.
        """
        if not self._ways:
            return ""
        now = self._clock()
        if self._sending is not None:
            self._see_to(self._sending, now)
        if now >= self._look_due:
            self._look_due = now + LOOK_SECONDS
            self._look(now)
        if self._sending is None:
            self._begin(now)
        if self._limited:
            return f"more than {self._settings.per_hour} notices in an hour: the rest waits"
        failing = [one for one in self._waiting if one.tried]
        return f"{failing[0].notice.subject}: could not tell anybody yet" if failing else ""

    def close(self) -> None:
        """End what is being sent; it is sent again at the next start."""
        if self._sending is not None:
            _end(self._sending)
            self._sending = None

    def _look(self, now: float) -> None:
        busy = {one.notice.subject for one in self._waiting}
        if self._sending is not None:
            busy.add(self._sending.notice.subject)
        for notice in notices(self._store, utc(now - LOOK_BACK_SECONDS)):
            if notice.subject not in busy and self._is_due(notice, now):
                self._waiting.append(_Sending(notice, self._ways))

    def _is_due(self, notice: Notice, now: float) -> bool:
        told = self._store.meta(f"told/{notice.subject}")
        if told is None:
            return True
        when, mark = json.loads(told)
        return bool(mark != notice.mark and now - seconds_of(when) >= self._settings.repeat)

    def _begin(self, now: float) -> None:
        while self._sent and now - self._sent[0] > _HOUR_SECONDS:
            self._sent.popleft()
        ready = [one for one in self._waiting if one.due <= now]
        self._limited = bool(ready) and len(self._sent) >= self._settings.per_hour
        if not ready or self._limited:
            return
        sending = ready[0]
        self._waiting.remove(sending)
        request = {
            "notice": sending.notice.document(self._cluster),
            "settings": asdict(self._settings),
            "ways": sending.ways,
        }
        sending.until = now + self._settings.timeout * len(sending.ways) + _GRACE_SECONDS
        try:
            sending.child = subprocess.Popen(
                [sys.executable, "-m", "recovery.notify_send"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",
                start_new_session=True,
            )
            assert sending.child.stdin
            sending.child.stdin.write(json.dumps(request).encode())  # far less than a pipe holds
            sending.child.stdin.close()
        except OSError as error:
            self._again(sending, f"the sender does not start: {error.strerror}", now)
            return
        self._sent.append(now)
        self._sending = sending

    def _see_to(self, sending: _Sending, now: float) -> None:
        assert sending.child and sending.child.stdout
        if sending.child.poll() is None:
            if now < sending.until:
                return
            failed = dict.fromkeys(sending.ways, "no answer in time")
        else:
            try:
                failed = json.loads(sending.child.stdout.read())
            except ValueError:
                failed = dict.fromkeys(sending.ways, "the sender died")
        _end(sending)
        self._sending = None
        if failed:
            sending.ways = tuple(failed)
            self._again(sending, "; ".join(f"{way}: {why}" for way, why in failed.items()), now)
            return
        self._told(sending.notice, now)
        log.info("told of %s: %s", sending.notice.subject, sending.notice.what)

    def _again(self, sending: _Sending, why: str, now: float) -> None:
        sending.tried += 1
        log.warning("%s: not told (try %d): %s", sending.notice.subject, sending.tried, why)
        if sending.tried >= TRIES:
            log.error("%s: given up; it stays open in status", sending.notice.subject)
            self._told(sending.notice, now)
            return
        sending.due, sending.child = now + RETRY_SECONDS[sending.tried - 1], None
        self._waiting.append(sending)

    def _told(self, notice: Notice, now: float) -> None:
        self._store.put_meta(f"told/{notice.subject}", json.dumps([utc(now), notice.mark]))


def notices(store: Store, since: str) -> Iterable[Notice]:
    """Return what came up since then and needs somebody, whoever was told of it."""
    for kind, breaker in store.breakers().items():
        if breaker.tripped:
            what = f"find out why, then recovery resume --why …: {breaker.why}"
            yield Notice(f"circuit breaker {kind}", what, breaker.time, breaker.time)
    for grant in judged.grants(store.file).values():
        if not grant.in_force and grant.time >= since:
            what = (
                "suspended: do by hand what it did, recovery status lists it;"
                f" recovery trial tells what speaks against it: {grant.why}"
            )
            yield Notice(f"grant for {grant.scope}", what, grant.time, grant.time)
    for one in concerns.since(store.file, since):
        yield Notice(
            one.subject,
            one.what,
            one.time,
            one.decision,
            one.count,
            one.decision,
            one.owner,
            one.who,
        )


def _end(sending: _Sending) -> None:
    child = sending.child
    if child is None:
        return
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    if child.stdout:
        child.stdout.close()
    with suppress(subprocess.TimeoutExpired):
        child.wait(0.5)
