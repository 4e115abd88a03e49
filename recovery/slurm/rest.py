"""The Scheduler by slurmrestd: for an aggregator that has no slurm.conf, as in a container.

    scheduler = RestScheduler(Slurm(backend="rest", url="http://slurmrestd:6820", token="/run/jwt"))
    scheduler.jobs([12])[12].state

Which version of the API is spoken is what slurmrestd offers and this code knows, the newest first.
The documents are those of the commands' JSON, read by ``documents``. What a version cannot do is
CommandRefused, and says what can: measured on 22.05 (v0.0.38), 24.11 (v0.0.42) and 26.05
(v0.0.45),

* v0.0.38 reads, holds and releases; it changes no node, no AdminComment and no list of nodes;
* up to v0.0.44 nothing requeues: the Slurm release that has it is 26.05.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from recovery.slurm import documents
from recovery.slurm.arguments import (
    ADMIN_COMMENT_LIMIT,
    AWAY,
    REASON_LIMIT,
    checked_job,
    checked_nodes,
    one_line,
    uid_of,
)
from recovery.slurm.base import CommandRefused, Job, Node, SchedulerUnavailable
from recovery.slurm.http import Answer, Client, Unanswered
from slurm_hooks.config import Slurm

NEWEST = (0, 0, 45)
"""Of the versions whose documents have been read in tests; a newer one is spoken last."""

_VERSION = re.compile(r"/slurm/v(\d+)\.(\d+)\.(\d+)/jobs/?")
_NO_SUCH_JOB = 2017
"""slurm_errno.h: ESLURM_INVALID_JOB_ID."""

_log = logging.getLogger("recovery.slurm")


@dataclass(frozen=True)
class _Api:
    """One version of the API as this slurmrestd offers it: ``paths`` has the methods of each."""

    version: str
    paths: Mapping[str, Collection[str]]

    def offers(self, method: str, path: str) -> bool:
        return method in self.paths.get(f"/slurm/{self.version}{path}", ())

    def path(self, path: str) -> str:
        """Return the path with the slash at its end that this version wants, or without it."""
        full = f"/slurm/{self.version}{path}"
        return f"{full}/" if f"{full}/" in self.paths else full


class RestScheduler:
    """Implements ``recovery.slurm.base.Scheduler``.

    ``environment`` is for ``scontrol token``; each call ends within ``timeout_seconds``.
    """

    def __init__(
        self,
        settings: Slurm,
        environment: Mapping[str, str] | None = None,
        timeout_seconds: float = 20,
    ) -> None:
        given = os.environ if environment is None else environment
        self._client = Client(settings, {"PATH": os.defpath, **given}, timeout_seconds)
        self._api: _Api | None = None

    def cluster(self) -> str:
        """Return the cluster's name, which each answer tells but those of 22.05."""
        answer = self._ask("GET", self._negotiated().path("/ping"))
        try:
            slurm = json.loads(answer.text)["meta"].get("slurm") or {}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._unreadable("itself", error) from error
        name = slurm.get("cluster")
        if not name:
            raise SchedulerUnavailable(
                "slurmrestd names no cluster: set controller.cluster in recovery.toml"
            )
        return str(name)

    def jobs(self, ids: Collection[int] | None = None) -> Mapping[int, Job]:
        """Return the jobs that slurmctld remembers; see ``Scheduler.jobs``."""
        if ids is not None and not ids:
            return {}
        api = self._negotiated()
        # One is asked for by its id; of several the list is one request, and the id's are not.
        one = next(iter(ids)) if ids is not None and len(ids) == 1 else None
        answer = self._ask("GET", api.path("/jobs" if one is None else f"/job/{int(one)}"))
        if one is not None and _NO_SUCH_JOB in _numbers(answer):
            return {}
        try:
            jobs = documents.read_jobs(answer.text)
        except (documents.DocumentError, documents.AnswerError) as error:
            raise self._unreadable("jobs", error) from error
        return jobs if ids is None else {id_: jobs[id_] for id_ in ids if id_ in jobs}

    def nodes(self, names: Collection[str] | None = None) -> Mapping[str, Node]:
        """Return nodes by name; see ``Scheduler.nodes``."""
        if names is not None and not names:
            return {}
        answer = self._ask("GET", self._negotiated().path("/nodes"))
        try:
            nodes = documents.read_nodes(answer.text, uid_of)
        except (documents.DocumentError, documents.AnswerError) as error:
            raise self._unreadable("nodes", error) from error
        return nodes if names is None else {one: nodes[one] for one in names if one in nodes}

    def reservations(self) -> Mapping[str, Collection[str]]:
        """See ``Scheduler.reservations``."""
        answer = self._ask("GET", self._negotiated().path("/reservations"))
        try:
            return documents.read_reservations(answer.text)
        except (documents.DocumentError, documents.AnswerError) as error:
            raise self._unreadable("reservations", error) from error

    def requeue(self, job: str) -> None:
        self._requeue("requeue", checked_job(job), [])

    def requeue_hold(self, job: str) -> None:
        self._requeue("requeuehold", checked_job(job), ["Hold", "SpecialExit"])

    def start_now(self, job: str, excluded: Collection[str]) -> None:
        checked_nodes(excluded)
        listed = ",".join(sorted(excluded))
        self._update("update job", job, {"excluded_nodes": listed, "begin_time": _now()})

    def hold(self, job: str) -> None:
        self._change("hold", f"/job/{checked_job(job)}", {"hold": True})

    def release(self, job: str) -> None:
        self._change("release", f"/job/{checked_job(job)}", {"hold": False})

    def explain_hold(self, job: str, text: str, excluded: Collection[str] | None = None) -> None:
        body: dict[str, Any] = {"admin_comment": one_line(text, ADMIN_COMMENT_LIMIT)}
        if excluded is not None:
            checked_nodes(excluded)
            body["excluded_nodes"] = ",".join(sorted(excluded))
        self._update("update job", job, {**body, "begin_time": _now()})

    def drain(self, nodes: Collection[str], reason: str) -> None:
        if not nodes:
            return
        reason = one_line(reason, REASON_LIMIT)
        if not reason:
            raise CommandRefused("a drain needs a reason; nothing was sent to Slurm")
        self._nodes("drain", nodes, {"state": ["DRAIN"], "reason": reason})

    def set_reason(self, node: str, reason: str) -> None:
        self._nodes("update", (node,), {"reason": one_line(reason, REASON_LIMIT)})

    def undrain(self, nodes: Collection[str]) -> None:
        if nodes:
            self._nodes("resume", nodes, {"state": ["RESUME"]})

    def _requeue(self, what: str, job: str, flags: list[str]) -> None:
        api = self._negotiated()
        if not api.offers("post", "/jobs/requeue"):
            raise _missing(api, f"scontrol {what}", "v0.0.45 (Slurm 26.05)")
        self._change(what, "/jobs/requeue", {"jobs": [job], "flags": flags})

    def _update(self, what: str, job: str, body: dict[str, Any]) -> None:
        checked_job(job)
        api = self._negotiated()
        if not api.offers("post", "/nodes/"):
            # The first version that changes nodes is the first that takes these keys.
            raise _missing(api, f"scontrol {what}", "v0.0.40 (Slurm 23.11)")
        self._change(what, f"/job/{job}", body)

    def _nodes(self, what: str, nodes: Collection[str], body: dict[str, Any]) -> None:
        checked_nodes(nodes)
        api = self._negotiated()
        if not api.offers("post", "/nodes/"):
            raise _missing(api, f"scontrol update node ({what})", "v0.0.40 (Slurm 23.11)")
        self._change(what, "/nodes", {"name": sorted(nodes), **body})

    def _negotiated(self) -> _Api:
        """Return the version to speak, asked of slurmrestd once."""
        if self._api is None:
            answer = self._ask("GET", "/openapi/v3")
            try:
                paths = {path: tuple(how) for path, how in json.loads(answer.text)["paths"].items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise SchedulerUnavailable("slurmrestd describes no API") from error
            found = [match for path in paths if (match := _VERSION.fullmatch(path))]
            offered = sorted({tuple(int(part) for part in match.groups()) for match in found})
            if not offered:
                raise SchedulerUnavailable("slurmrestd offers no /slurm/…/jobs: openapi/slurmctld?")
            known = [version for version in offered if version <= NEWEST]
            spoken = known[-1] if known else offered[0]
            self._api = _Api("v" + ".".join(map(str, spoken)), paths)
        return self._api

    def _ask(self, method: str, path: str, body: Any = None) -> Answer:
        try:
            answer = self._client.ask(method, path, body)
        except Unanswered as error:
            self._api = None  # what answers next may be another release
            raise SchedulerUnavailable(str(error)) from error
        if answer.status in (401, 403):
            raise SchedulerUnavailable("slurmrestd does not accept our token (or none was given)")
        if answer.status == 404 and not _errors(answer):
            self._api = None
            raise SchedulerUnavailable(f"slurmrestd knows no {path.partition('?')[0]}")
        return answer

    def _change(self, what: str, path: str, body: dict[str, Any]) -> None:
        """Make one request that changes something, and log it."""
        full = self._negotiated().path(path)
        began = time.monotonic()
        status: int | None = None
        try:
            answer = self._ask("POST", full, body)
            status = answer.status
        finally:
            seconds = round(time.monotonic() - began, 3)
            told = {"command": ["POST", full, json.dumps(body)]}
            _log.info("slurmrestd %s", what, extra={**told, "seconds": seconds, "status": status})
        _raise_for(answer)

    def _unreadable(self, what: str, error: Exception) -> SchedulerUnavailable:
        self._api = None
        return SchedulerUnavailable(f"slurmrestd's answer about {what}: {error}"[:500])


def _now() -> dict[str, Any]:
    """This moment, as slurmrestd takes a time that may be unset."""
    return {"set": True, "infinite": False, "number": int(time.time())}


def _missing(api: _Api, what: str, since: str) -> CommandRefused:
    return CommandRefused(
        f"slurmrestd's {api.version} has nothing for '{what}', which {since} is the first to have;"
        ' with [slurm] backend = "cli" it works on every release'
    )


def _errors(answer: Answer) -> list[dict[str, Any]]:
    """Return the document's errors, those of single jobs in it too."""
    try:
        document = json.loads(answer.text)
    except ValueError:
        return []
    if not isinstance(document, dict):
        return []
    errors = [one for one in document.get("errors") or () if isinstance(one, dict)]
    for key in ("results", "status"):
        for one in document.get(key) or ():
            if isinstance(one, dict) and one.get("error_code"):
                errors.append({"error_number": one["error_code"], **one})
    return errors


def _numbers(answer: Answer) -> set[Any]:
    return {one.get("error_number") for one in _errors(answer)}


def _raise_for(answer: Answer) -> None:
    errors = _errors(answer)
    if not errors and answer.status < 300:
        return
    said = [str(one.get("error") or one.get("description") or one) for one in errors]
    text = one_line("; ".join(dict.fromkeys(said)), 500)
    if not text or AWAY.search(text):
        raise SchedulerUnavailable(text or f"slurmrestd answered with status {answer.status}")
    raise CommandRefused(text)
