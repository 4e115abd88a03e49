"""The logs of one failed job, and the finding that they are worth.

Apart from ``joblog`` because of what it loads. The logs are a user's: they are found and read in a
child that has become that user, with limits on bytes and time; what comes back is a small document.
"""

from __future__ import annotations

import glob
import heapq  # noqa: F401 - Counter loads it when first used, as a user who may not read it
import itertools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurm_hooks import as_user, catalog, deadline, optin, task_environment
from slurm_hooks.context import HookContext
from slurm_hooks.joblog import open_files, paths, signatures, takeover
from slurm_hooks.joblog.layout import Layout, LayoutError, expand
from slurm_hooks.joblog.read import Limits
from slurm_hooks.joblog.verdict import Verdict, classify
from slurm_hooks.probes import Look, Seen, Skipped
from slurm_hooks.record import Evidence, Finding, RecordJob

FILES_LIMIT = 16
"""Most files read of one job, the newest of them."""

SOURCE, VERDICT_SOURCE = "job_log", "log_verdict"
"""Sources of a finding's evidence: the line itself, and a log-verdict/v1 document around it."""

_EVIDENCE_CHARACTERS = 2_000
_LINE_CHARACTERS = 400
_IMPLICATED_LIMIT = 8

_RESERVE_SECONDS = 0.5
"""What of the deadline is kept for turning the child's answer into a finding."""


def look(given: Look) -> Seen:
    """Return one finding: the verdict on the job's logs.

    Raises:
        Skipped: nobody's job, or not the host that has its output.
    """
    context, settings = given.context, given.config.probes.joblog
    job = context.job
    if job is None or job.uid is None:
        raise Skipped("no job, or nobody's")
    began = time.monotonic()
    nodes = _nodes(job)
    _agree(given, nodes)
    patterns = _patterns(context)
    if not patterns:
        raise Skipped("Slurm did not tell where the job's output is")
    extra = (settings.signatures,)
    signatures.load(*extra)  # as root: a site's folder need not be its users' to read
    layout = Layout(nodes, len(job.gpus) or None)
    addresses = _hosts(nodes)
    held = open_files.recall(
        open_files.folder(given.config.spool, context.node), job.id, job.restart
    )
    patterns += [glob.escape(path) for path in held]

    def read() -> bytes:
        verdict = classify(
            _files(patterns),
            layout,
            addresses,
            Limits(),
            settings.max_bytes,
            extra,
            _dumps(context),
        )
        return json.dumps(_answer(verdict)).encode()

    left = settings.deadline - _RESERVE_SECONDS - (time.monotonic() - began)
    outcome = as_user.look(job.uid, read, max(0.2, left))
    if outcome.status != "ok":
        return Seen((_unread(job, outcome.detail or outcome.status),))
    answer = json.loads(outcome.output)
    if not answer["document"]["read"]:
        if context.stdout is None and not answer["unreadable"] and not _wishes(context).logs:
            raise Skipped("Slurm told of no output, and there is none where sbatch puts it")
        why = "; ".join(answer["unreadable"].values()) or "there is no such file"
        return Seen((_unread(job, why),))
    return Seen((_finding(job, answer["document"]),), notes={"unreadable": answer["unreadable"]})


def _agree(given: Look, nodes: tuple[str, ...]) -> None:
    """Return where this node is to read; the batch host is, another one where that is lost.

    Raises:
        Skipped: it is not.
    """
    context, place = given.context, given.config.spool.path
    if len(nodes) < 2 or context.node not in nodes:
        if nodes and nodes[0] != context.node:
            raise Skipped(f"the job's output is read on its batch host, {nodes[0]}")
        return
    opted_in = _wishes(context).opted_in
    position = nodes.index(context.node)
    if position == 0:
        if opted_in:  # whoever else looks waits for this; a spool that hangs delays nothing here
            deadline.run_one(lambda: _claim(place, context, 0.0), _CLAIM_SECONDS)
        if context.job and context.job.exit == "0:0":
            raise Skipped("the job's script exited 0")
        return
    patience = takeover.patience(position) if opted_in else None
    if patience is None:
        raise Skipped(f"the job's output is read on its batch host, {nodes[0]}")
    outcome = deadline.run_one(lambda: _claim(place, context, patience), patience + _CLAIM_SECONDS)
    if outcome.status != "ok":
        raise Skipped(f"who reads could not be agreed: {outcome.detail or outcome.status}")
    if outcome.output != _OURS:
        raise Skipped(f"the job's output is read on its batch host, {nodes[0]}, or by another node")


_OURS = b"ours"
_CLAIM_SECONDS = 1.0


def _claim(place: Path, context: HookContext, wait_seconds: float) -> bytes:
    return _OURS if takeover.claim(place, context, wait_seconds) else b""


def _hosts(nodes: Sequence[str]) -> dict[str, str]:
    """The addresses that /etc/hosts gives to the job's nodes; no name server is asked."""
    try:
        content = Path("/etc/hosts").read_bytes()[:_HOSTS_BYTES].decode("utf-8", "replace")
    except OSError:
        return {}
    wanted = set(nodes)
    found: dict[str, str] = {}
    for line in content.splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        named = wanted & {name.partition(".")[0] for name in names} | wanted & set(names)
        if len(named) == 1:
            found[address] = named.pop()
    return {address: node for address, node in found.items() if not address.startswith("127.")}


_HOSTS_BYTES = 1 << 20


def _dumps(context: HookContext) -> list[Path]:
    """Run as the user: what the attempt's ranks left in the folder that it was given."""
    job, work_dir = context.job, context.work_dir
    if job is None or work_dir is None or not _wishes(context).opted_in:
        return []
    folder = Path(work_dir) / task_environment.dump_folder(job.id, job.restart)
    try:
        return sorted(itertools.islice(folder.iterdir(), _DUMPS_LIMIT))
    except OSError:
        return []


_DUMPS_LIMIT = 20_000


def _nodes(job: RecordJob) -> tuple[str, ...]:
    try:
        return expand(job.nodes) if job.nodes else ()
    except LayoutError:
        return ()


def _patterns(context: HookContext) -> list[str]:
    """Shell patterns of the job's output files, and of those that its owner names."""
    known = paths.letters(context)
    wanted = [
        paths.to_glob(pattern, known, context.work_dir)
        for pattern in (context.output, context.stderr)
        if pattern
    ]
    for pattern in _wishes(context).logs:
        absolute = pattern.startswith("/")
        folder = glob.escape(context.work_dir) if context.work_dir else None
        wanted.append(pattern if absolute else f"{folder}/{pattern}" if folder else None)
    return list(dict.fromkeys(pattern for pattern in wanted if pattern))


def _wishes(context: HookContext) -> optin.OptIn:
    return optin.parse(context.job.comment if context.job else None)


def _files(patterns: Sequence[str]) -> list[Path]:
    """Run as the user: the files that match, the newest last."""
    found: dict[str, float] = {}
    for pattern in patterns:
        matches = glob.iglob(pattern)  # noqa: PTH207  # Path.glob takes no absolute pattern
        for name in itertools.islice(matches, FILES_LIMIT * 8):
            try:
                found.setdefault(os.path.realpath(name), Path(name).stat().st_mtime)
            except OSError:
                continue
    newest = sorted(found, key=lambda name: found[name])[-FILES_LIMIT:]
    return [Path(name) for name in newest]


def _answer(verdict: Verdict) -> dict[str, Any]:
    return {"document": verdict.document, "unreadable": dict(verdict.unreadable)}


def _finding(job: RecordJob, document: dict[str, Any]) -> Finding:
    cause, implicated = document["cause"] or {}, document["implicated"]
    named = implicated[0] if len(implicated) == 1 else {}
    gpu = named.get("gpu")
    evidence = [Evidence(VERDICT_SOURCE, _compact(document))]
    if cause:
        evidence.insert(0, Evidence(SOURCE, cause["text"][:_EVIDENCE_CHARACTERS]))
    about: dict[str, Any] = {
        "job_id": job.id,
        "rank": named.get("rank"),
        "gpu": gpu if isinstance(gpu, int) else None,
        "file": cause.get("file"),
        "count": document["cascade"] + 1,
    }
    return catalog.finding(
        code_of(document["class"]),
        evidence=tuple(evidence),
        details={"confidence": document["confidence"]},
        **about,
    )


def code_of(fault_class: str) -> str:
    """Return the finding code of a log's cause: ``log.`` and the class, dots as underscores."""
    return "log." + fault_class.replace(".", "_")


def _compact(document: dict[str, Any]) -> str:
    """The document, small enough for one evidence text."""
    cause = document["cause"]
    small = {
        **document,
        "cause": {**cause, "line": cause["line"][:_LINE_CHARACTERS], "text": ""} if cause else None,
        "implicated": document["implicated"][:_IMPLICATED_LIMIT],
        "signatures": [],
        "read": [],
    }
    text = json.dumps(small)
    if len(text) > _EVIDENCE_CHARACTERS:
        text = json.dumps({**small, "cause": None, "implicated": small["implicated"][:1]})
    return text


def _unread(job: RecordJob, why: str) -> Finding:
    return catalog.finding("log.unreadable", job_id=job.id, details={"why": why[:200]})
