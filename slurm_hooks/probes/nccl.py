"""The NCCL probe: does the library start, and does a collective over this node's GPUs go well?

Off by default. The cheap part loads libnccl and lets it open its bootstrap socket. The deep part is
an all-reduce through NVIDIA's nccl4py where that is installed beside these hooks
(``nccl_collective``), else by the all_reduce_perf that the configuration names. It runs only in the
prolog or epilog of a job that has every GPU of the node, or in a deep check of a node that is
drained and idle: nobody's work is slowed, and no GPU is touched that is somebody else's. Correct
results come first; bandwidth is held against a floor (``catalog/nccl_floors.toml``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slurm_hooks import catalog, gres
from slurm_hooks.probe_config import NcclProbe
from slurm_hooks.probes import Look, Probe, Seen, Skipped
from slurm_hooks.probes.nccl_run import Ran, bootstrap, refusal, run
from slurm_hooks.probes.nccl_tests_output import Output, parse
from slurm_hooks.record import Evidence, Finding

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FLOORS = Path(catalog.__file__).parent / "nccl_floors.toml"

_SOURCE = "nccl"
_BOOTSTRAP_SECONDS = 8.0
_RESERVE_SECONDS = 0.5
_BUDGET_SHARE = 0.6
"""What of a hook's budget this probe counts on: delivery has the rest."""

_LEAST_SECONDS = 10.0
"""What a collective needs at least, in a deep check: NCCL connects eight GPUs in some seconds."""

_COLLECTIVE = "slurm_hooks.probes.nccl_collective"
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_TAIL_CHARACTERS = 1500
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def look(given: Look) -> Seen:
    """Return what NCCL's start and, where it may be run, its collective show.

    Raises:
        Skipped: a deep check of a node that has no GPUs, or no NCCL that anybody asked for.
    """
    started = time.monotonic()
    settings = given.config.probes.nccl
    nccl4py = _nccl4py()
    gpus, why_not = _gpus_to_use(given)
    if given.context.deep and not gpus:
        raise Skipped(why_not)
    findings, notes = _start(settings)
    codes = [finding.code for finding in findings]
    asked_for = bool(settings.hooks or settings.all_reduce_perf or nccl4py)
    if given.context.deep and not asked_for and codes == ["nccl.library_missing"]:
        raise Skipped(f"nobody has configured NCCL here: {findings[0].summary}")
    if findings or not (nccl4py or settings.all_reduce_perf):
        return Seen(tuple(findings), notes=notes)
    if not gpus:
        return Seen(notes={**notes, "collective": f"not run: {why_not}"})
    seconds = _seconds(given) - _RESERVE_SECONDS - (time.monotonic() - started)
    why_not = refusal(nccl4py or Path(settings.all_reduce_perf)) or _too_short(given, seconds)
    if why_not:
        return Seen((catalog.finding("nccl.not_run", details={"why": why_not}),), notes=notes)
    argv = _nccl4py_argv(settings, gpus) if nccl4py else _argv(settings, gpus)
    try:
        ran = run(argv, _environment(settings), seconds)
    except OSError as error:
        why = f"{argv[0]}: {error.strerror}"
        return Seen((catalog.finding("nccl.not_run", details={"why": why}),), notes=notes)
    output = parse(ran.output)
    findings = list(_judge(ran, output, settings, seconds))
    measured = "no bandwidth" if output.busbw is None else f"{output.busbw:.1f} GB/s"
    by = "nccl4py" if nccl4py else Path(settings.all_reduce_perf).name
    return Seen(tuple(findings), notes={**notes, "collective": f"{gpus} GPUs, {measured}, by {by}"})


def _start(settings: NcclProbe) -> tuple[list[Finding], dict[str, Any]]:
    """The cheap part: findings, and what to tell a person of a library that is well."""
    library = settings.library
    if "/" in library and (why := refusal(Path(library))):
        return [_library_missing(why)], {}
    seconds = min(_BOOTSTRAP_SECONDS, max(0.2, settings.deadline / 2))
    outcome = bootstrap(library, settings.interface, seconds)
    detail = outcome.detail or outcome.status
    if outcome.status == "hang":
        return [_finding("nccl.bootstrap_hang", detail)], {}
    if outcome.status == "error":  # dlopen's OSError, or a library without NCCL's functions
        return [_library_missing(detail.partition(": ")[2])], {}
    if outcome.status == "crash":
        return [_finding("nccl.bootstrap_failed", f"it was {detail}")], {}
    answer = json.loads(outcome.output)
    if answer["result"]:
        why = f"ncclGetUniqueId: {answer['error']} ({answer['result']})"
        on = f" on {settings.interface}" if settings.interface else ""
        return [_finding("nccl.bootstrap_failed", f"{why}{on}, NCCL {answer['version']}")], {}
    return [], {"version": answer["version"], "bootstrap": answer["address"] or "no IP address"}


def _nccl4py() -> Path | None:
    """Where nccl4py lies in this Python, which has not loaded it; None where it is not."""
    try:
        found = importlib.util.find_spec("nccl.core")
    except (ImportError, ValueError):
        return None
    return Path(found.origin) if found and found.origin else None


def _gpus_to_use(given: Look) -> tuple[int, str]:
    """How many GPUs the collective may use; 0, and why, where it must not run."""
    job, hook = given.context.job, given.context.hook
    if not given.context.deep and (hook not in ("prolog", "epilog") or job is None):
        return 0, "only the prolog or epilog of a job, or a deep check, may use GPUs"
    wanted = given.config.probes.nvml.expect_gpus
    if isinstance(wanted, int):
        configured: gres.ConfiguredGpus | None = gres.ConfiguredGpus(wanted)
    else:
        slurm_conf = os.environ.get("SLURM_CONF") or given.config.hooks.slurm_conf or None
        configured = gres.find(given.context.node, slurm_conf)
    if configured is None or not configured.count:
        return 0, "nobody says how many GPUs this node has"
    if given.context.deep or job is None:
        return configured.count, ""
    held = set(job.gpus)
    if len(held) != configured.count or not held.issuperset(configured.minors):
        return 0, f"the job has {len(held)} of this node's {configured.count} GPUs"
    return len(held), ""


def _seconds(given: Look) -> float:
    """How long this probe may take; a deep check gives it what its hook has."""
    settings = given.config.probes.nccl
    if not given.context.deep:
        return settings.deadline
    return min(settings.deadline, given.config.hooks.budget.health_check * _BUDGET_SHARE)


def _too_short(given: Look, seconds: float) -> str:
    """Why there is no time for a collective: cut short, a healthy one would be told as a hang."""
    settings, hook = given.config.probes.nccl, given.context.hook
    budget = getattr(given.config.hooks.budget, hook)
    if given.context.deep:
        return "" if seconds >= _LEAST_SECONDS else f"hooks.budget.{hook} is only {budget:g} s"
    if budget * _BUDGET_SHARE < settings.deadline:
        return (
            f"probes.nccl.deadline is {settings.deadline:g} s and hooks.budget.{hook} only "
            f"{budget:g} s: it needs {settings.deadline / _BUDGET_SHARE:.0f} s"
        )
    return ""


def _argv(settings: NcclProbe, gpus: int) -> list[str]:
    sizes = ["-b", settings.size, "-e", settings.size]
    return [settings.all_reduce_perf, *sizes, "-g", str(gpus), "-n", "20", "-w", "5", "-c", "1"]


def _nccl4py_argv(settings: NcclProbe, gpus: int) -> list[str]:
    size = int(settings.size[:-1]) * _UNITS[settings.size[-1]]
    return [sys.executable, "-I", "-m", _COLLECTIVE, str(gpus), str(size)]


def _environment(settings: NcclProbe) -> dict[str, str]:
    """Nothing of the job's own settings: they could make a healthy node fail."""
    known = {"PATH": _SYSTEM_PATH, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_DEBUG": "WARN"}
    if settings.interface:
        known["NCCL_SOCKET_IFNAME"] = settings.interface
    if "/" in settings.library:
        known["LD_LIBRARY_PATH"] = str(Path(settings.library).parent)
    return known


def _judge(ran: Ran, output: Output, settings: NcclProbe, seconds: float) -> Iterable[Finding]:
    """The gravest thing that the run shows, first wrong results: they are told even of a hang."""
    if output.wrong:
        why = f"{output.wrong} wrong values in {len(output.rows)} sizes"
        yield _finding("nccl.wrong_values", why, ran.output)
    if ran.status is None:
        why = f"no end within {seconds:.0f} s, {_stage(output)}"
        yield _finding("nccl.hang", f"{why}; {ran.where}" if ran.where else why, ran.output)
    elif output.wrong:
        return
    elif ran.status < 0 or not output.finished:
        how = f"signal {-ran.status}" if ran.status < 0 else f"exit status {ran.status}"
        told = f": {output.errors[-1]}" if output.errors else ""
        yield _finding("nccl.failed", f"{how}, {_stage(output)}{told}", ran.output)
    elif slow := _slow(output, settings):
        yield _finding("nccl.slow", slow, ran.output)
    elif ran.status:
        yield _finding("nccl.failed", f"exit status {ran.status} after its end", ran.output)
    elif not output.rows or not output.checked:
        why = "its results were not checked" if output.rows else "it measured no size"
        yield catalog.finding("nccl.not_run", details={"why": why})


def _stage(output: Output) -> str:
    """How far a run came, by what it had printed."""
    if output.finished:
        return "after its last line"
    if output.rows:
        return f"in the collective after {output.rows[-1].size} bytes"
    if output.started:
        return "in the first collective"
    if output.devices:
        return "while NCCL connected the GPUs"
    return "before it named its GPUs"


def _slow(output: Output, settings: NcclProbe) -> str:
    """Why the bandwidth is too low; empty if it is not, or nobody knows what it should be."""
    count = len(output.devices)
    if output.busbw is None or not output.rows or count == 1:
        return ""
    floor = settings.floor
    if floor == "model":
        models = set(output.devices)
        known = _floors().get(models.pop()) if len(models) == 1 else None
        if known is None or count != known["gpus"] or output.largest < known["size"]:
            return ""
        floor = float(known["busbw"])
    if output.busbw >= floor:
        return ""
    return f"{output.busbw:.1f} GB/s over {count} GPUs, and the floor is {floor:g}"


def _floors() -> Mapping[str, Mapping[str, Any]]:
    floors: dict[str, dict[str, Any]] = tomllib.loads(FLOORS.read_text(encoding="utf-8"))
    return floors


def _library_missing(why: str) -> Finding:
    return _finding("nccl.library_missing", why)


def _finding(code: str, why: str, output: str = "") -> Finding:
    text = output.strip()[-_TAIL_CHARACTERS:] or why
    return catalog.finding(code, evidence=(Evidence(_SOURCE, text),), details={"why": why[:400]})


PROBE = Probe(
    name="nccl",
    look=look,
    needs="libnccl; for the collective nccl4py or all_reduce_perf, and all GPUs of the node",
    cost="tens of milliseconds; the collective some 10 to 30 s and 24 GiB of each GPU",
    codes=(
        "nccl.bootstrap_failed",
        "nccl.bootstrap_hang",
        "nccl.failed",
        "nccl.hang",
        "nccl.library_missing",
        "nccl.not_run",
        "nccl.slow",
        "nccl.wrong_values",
    ),
)
