"""The site's own probes: executables in a folder, JSON findings on their standard output.

    #!/bin/sh
    echo '[{"code": "site.scratch_small", "severity": "warning", "summary": "/scratch is small"}]'

A probe answers with a list of findings, with the fields of ``record.Finding``, and exit status 0;
an empty list or nothing at all is a clean bill. Anything else is a failure of the probe, never a
fault of the node. Owns how they are found, trusted and run. They run as root: only a file that
nobody but a trusted owner can change is run.
"""

from __future__ import annotations

import functools
import json
import os
import re
import select
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slurm_hooks import bounds
from slurm_hooks.context import HookContext
from slurm_hooks.deadline import Task, run_all
from slurm_hooks.node_config import NodeConfig
from slurm_hooks.record import SEVERITIES, Evidence, Finding, ProbeResult

NAME = "site"

GATHER_SECONDS = 0.5
"""Time after the probes' own deadline in which their answers are brought together."""

_ANSWER_LIMIT_BYTES = 512 * 1024
_PROBES_LIMIT = 32
_FINDINGS_LIMIT = 64

_FILE = re.compile(r"[A-Za-z0-9_-]{1,60}(\.[a-z]{1,4})?")
"""Names that are run; what editors and packagers leave (``x~``, ``x.rpmsave``) is not."""

_TEXTS = ("code", "severity", "summary", "uuid", "pci", "port", "file", "resolution")
_NUMBERS = ("gpu", "link", "rank", "pid", "job_id", "count")


class SiteProbeError(Exception):
    """A site's probe that cannot be run, or whose answer is not one; its text says why."""


def look(context: HookContext, config: NodeConfig, seconds: float) -> bytes:
    """Run in a child: run every probe of the folder side by side, and answer in JSON.

    The answer is ``{"findings": […], "probes": […]}``; a probe is called ``site.<file's stem>``.
    """
    trusted = {0, os.geteuid(), *config.spool.trusted_uids}
    environ = _environment(context)
    tasks: dict[str, Task] = {}
    for path in executables(config.probes.site.path, trusted):
        tasks[f"{NAME}.{path.stem}"] = functools.partial(_run, path, trusted, environ)
    findings: list[Finding] = []
    results: list[ProbeResult] = []
    for name, outcome in run_all(tasks, seconds).items():
        answer = json.loads(outcome.output) if outcome.status == "ok" else []
        found = [Finding.from_dict(item) for item in answer]
        detail = outcome.detail and outcome.detail.removeprefix("SiteProbeError: ")
        status = "findings" if found else outcome.status
        results.append(ProbeResult(name, status, outcome.seconds, detail))
        findings += found
    seen = {
        "findings": [finding.to_dict() for finding in bounds.fit_findings(findings)],
        "probes": [result.to_dict() for result in results],
    }
    return json.dumps(seen).encode()


def executables(folder: Path, trusted: Iterable[int]) -> tuple[Path, ...]:
    """Return the probes in ``folder`` by name; none where there is no such folder.

    Raises:
        SiteProbeError: the folder could be changed by somebody who is not trusted.
    """
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return ()
    if not stat.S_ISDIR(found.st_mode):
        raise SiteProbeError(f"{folder} is not a folder")
    _check_owner(folder, found, trusted)
    names = sorted(path for path in folder.iterdir() if _FILE.fullmatch(path.name))
    return tuple(names[:_PROBES_LIMIT])


def _check_owner(path: Path, found: os.stat_result, trusted: Iterable[int]) -> None:
    if found.st_uid not in trusted:
        raise SiteProbeError(f"{path} belongs to uid {found.st_uid}, who is not trusted; chown it")
    if found.st_mode & 0o022:
        raise SiteProbeError(f"{path} can be changed by others; chmod go-w it")


def _run(path: Path, trusted: Iterable[int], environ: dict[str, str]) -> bytes:
    """Run one probe in the child's own process group, and return its findings as JSON."""
    import subprocess

    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise SiteProbeError(f"{path} is not a regular file")
    _check_owner(path, found, trusted)
    if not found.st_mode & 0o100:
        raise SiteProbeError(f"{path} is not executable; chmod +x it, or remove it")
    process = subprocess.Popen(
        [str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        cwd="/",
    )
    assert process.stdout and process.stderr
    output, complaint = _both(process.stdout.fileno(), process.stderr.fileno())
    status = process.wait()
    if status != 0:
        words = complaint.decode("utf-8", "replace").split()
        raise SiteProbeError(f"exit status {status}: {' '.join(words)[-400:]}")
    return json.dumps([finding.to_dict() for finding in parse(output)]).encode()


def _both(out: int, err: int) -> tuple[bytes, bytes]:
    """Read both streams to their ends; of what is said in error, keep the last part."""
    output, complaint, streams = bytearray(), bytearray(), [out, err]
    while streams:
        for stream in select.select(streams, [], [])[0]:
            chunk = os.read(stream, 1 << 16)
            if not chunk:
                streams.remove(stream)
            elif stream == err:
                complaint = (complaint + chunk)[-4096:]
            else:
                output += chunk
                if len(output) > _ANSWER_LIMIT_BYTES:
                    raise SiteProbeError(f"it printed more than {_ANSWER_LIMIT_BYTES} bytes")
    return bytes(output), bytes(complaint)


def parse(output: bytes) -> tuple[Finding, ...]:
    """Return the findings in a probe's output.

    Raises:
        SiteProbeError: it is not a JSON list of findings.
    """
    if not output.strip():
        return ()
    try:
        document = json.loads(output)
    except (ValueError, RecursionError) as error:
        raise SiteProbeError(f"its output is not JSON: {error}") from error
    if not isinstance(document, list):
        raise SiteProbeError("its output is not a list of findings")
    if len(document) > _FINDINGS_LIMIT:
        raise SiteProbeError(f"{len(document)} findings are more than {_FINDINGS_LIMIT}")
    return bounds.fit_findings([_finding(item) for item in document])


def _finding(item: Any) -> Finding:
    if not isinstance(item, dict):
        raise SiteProbeError("a finding must be an object")
    for name in ("code", "severity", "summary"):
        if name not in item:
            raise SiteProbeError(f"a finding lacks {name!r}")
    known: dict[str, Any] = {}
    for name, value in item.items():
        if (name in _TEXTS and isinstance(value, str)) or (name in _NUMBERS and type(value) is int):
            known[name] = value
        elif name == "evidence" and isinstance(value, list):
            known[name] = tuple(_evidence(entry) for entry in value)
        else:
            raise SiteProbeError(f"a finding's {name!r} cannot be {value!r:.60}")
    if known["severity"] not in SEVERITIES:
        choices = ", ".join(SEVERITIES)
        raise SiteProbeError(f"severity {known['severity']!r:.40} is not one of {choices}")
    return Finding(**known)


def _evidence(item: Any) -> Evidence:
    fields = ("source", "text", "time", "key")
    if not isinstance(item, dict) or not {"source", "text"} <= item.keys() <= set(fields):
        raise SiteProbeError("evidence must be an object of source, text, and maybe time and key")
    if not all(isinstance(value, str) for value in item.values()):
        raise SiteProbeError("evidence must be made of texts")
    return Evidence(**item)


def _environment(context: HookContext) -> dict[str, str]:
    """What a probe is told: Slurm's names, and nothing that a user has written."""
    environ = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C.UTF-8",
        "SLURMD_NODENAME": context.node,
        "SLURM_HOOK": context.hook,
    }
    job = context.job
    if job:
        environ["SLURM_JOB_ID"] = str(job.id)
        environ["SLURM_JOB_GPUS"] = ",".join(map(str, job.gpus))
        if job.uid is not None:
            environ["SLURM_JOB_UID"] = str(job.uid)
    return environ
