"""Whether Slurm, as it is configured now, runs the hooks and lets a failed job be run again."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable

from recovery.site.slurm_settings import Settings
from recovery.site.texts import HOOKS
from slurm_hooks.check import Check
from slurm_hooks.config import Config
from slurm_hooks.doctor_slurm import MESSAGE_TIMEOUT_SECONDS

OLDEST = (22, 5)
TESTED = ("22.05", "24.11", "26.05")
"""Releases that the tests run on; what lies between them differs in nothing that is used."""

MIN_JOB_AGE_SECONDS = 300
"""A failed job can be requeued until it is purged; evidence alone may take ``gather_max``."""


def questions(config: Config, slurm: Settings) -> list[Callable[[], Check]]:
    """Return the questions that slurmctld's settings answer, in the order of the report."""
    return [
        lambda: _release(slurm),
        lambda: _account(slurm),
        lambda: _cluster(config, slurm),
        *(lambda key=key, name=name: _program(key, name, slurm) for key, name in HOOKS.items()),
        lambda: _flags(slurm),
        lambda: _time_outs(config, slurm),
        lambda: _health_check(config, slurm),
        lambda: _requeue(slurm),
        lambda: _job_age(config, slurm),
        lambda: _open_mode(slurm),
    ]


def _release(slurm: Settings) -> Check:
    version = slurm.text("SLURM_VERSION")
    if slurm.release < OLDEST:
        says = f"slurmctld {version} is older than 22.05, whose JSON is the first that is read"
        return Check("Slurm", "broken", says, "upgrade Slurm")
    return Check("Slurm", "ok", f"slurmctld {version} answers; tested: {', '.join(TESTED)}")


def _account(slurm: Settings) -> Check:
    """``SlurmUser`` reads ``slurm(64030)``."""
    owner = slurm.text("SlurmUser").partition("(")[0]
    mine = os.geteuid()
    try:
        name = pwd.getpwuid(mine).pw_name
    except KeyError:
        name = str(mine)
    if mine == 0 or name == owner:
        return Check("account", "ok", f"{name}: may drain, hold and requeue")
    says = f"{name} is neither root nor SlurmUser ({owner}): draining needs an administrator"
    mend = f"run as root or {owner}, or: sacctmgr modify user {name} set adminlevel=Admin"
    return Check("account", "warning", says, mend)


def _cluster(config: Config, slurm: Settings) -> Check:
    name, wanted = slurm.text("ClusterName"), config.controller.cluster
    if wanted and wanted != name:
        says = f"controller.cluster is {wanted!r}, and Slurm's ClusterName {name!r}"
        return Check("cluster", "broken", says, f'controller.cluster = "{name}"')
    return Check("cluster", "ok", f"{name}{'' if wanted else ', the only one of its spool'}")


def _program(key: str, name: str, slurm: Settings) -> Check:
    value = slurm.text(key)
    if not value:
        says = f"none is configured: {name} never runs"
        return Check(key, "broken" if key == "Epilog" else "warning", says, f"{key}=…/{name}")
    if name in value:
        return Check(key, "ok", value)
    return Check(key, "ok", f"{value} (what it calls is seen on a node: slurm-hooks doctor)")


def _flags(slurm: Settings) -> Check:
    flags = {flag.strip().lower() for flag in slurm.text("PrologFlags").split(",")}
    if slurm.text("Prolog") and not flags & {"alloc", "contain", "x11", "serial", "deferbatch"}:
        says = "a Prolog runs only before the first step, and late on a batch job's other nodes"
        return Check("PrologFlags", "warning", says, "PrologFlags=Alloc")
    return Check("PrologFlags", "ok", ", ".join(sorted(flags - {""})) or "no Prolog")


def _time_outs(config: Config, slurm: Settings) -> Check:
    budget, subject = config.hooks.budget, "time-outs"
    both = slurm.seconds("PrologEpilogTimeout")
    for hook, seconds in (("Prolog", budget.prolog), ("Epilog", budget.epilog)):
        limit = slurm.seconds(f"{hook}Timeout") or both
        if limit is not None and limit <= seconds:
            says = f"Slurm ends the {hook} after {limit} s, whose budget is {seconds:g} s"
            return Check(subject, "broken", f"{says}; that drains the node", _LONGER)
        if limit is None and slurm.text(hook):
            says = f"Slurm waits for a hanging {hook} without a limit"
            return Check(subject, "warning", says, _LONGER)
    message = slurm.seconds("MessageTimeout") or MESSAGE_TIMEOUT_SECONDS
    if budget.prolog >= message:
        says = f"a Prolog of {budget.prolog:g} s is told to users as hung after {message:g} s"
        return Check(subject, "warning", says, f"hooks.budget.prolog = {message / 2:g}")
    return Check(subject, "ok", f"hooks have their {budget.prolog:g} and {budget.epilog:g} s")


_LONGER = "PrologEpilogTimeout=60"


def _health_check(config: Config, slurm: Settings) -> Check:
    subject, interval = "health checks", slurm.seconds("HealthCheckInterval") or 0
    if not slurm.text("HealthCheckProgram"):
        return Check(subject, "ok", "none, as said above")
    if not interval:
        says = "HealthCheckInterval is 0: no node is ever looked at between jobs"
        return Check(subject, "broken", says, "HealthCheckInterval=60")
    limit = slurm.seconds("HealthCheckTimeout") or 60
    if config.hooks.budget.health_check >= limit:
        says = f"Slurm ends them after {limit} s, their budget is longer"
        return Check(subject, "broken", says, f"hooks.budget.health_check = {limit * 2 / 3:g}")
    if "ANY" not in slurm.text("HealthCheckNodeState").upper():
        says = "only some states of nodes are looked at: not those where GPUs are at work"
        return Check(subject, "warning", says, "HealthCheckNodeState=ANY,CYCLE")
    return Check(subject, "ok", f"every {interval} s, in any state")


def _requeue(slurm: Settings) -> Check:
    if slurm.text("JobRequeue") == "1":
        return Check("JobRequeue", "ok", "batch jobs can be requeued unless they forbid it")
    says = "batch jobs cannot be requeued unless they were submitted with --requeue"
    mend = "JobRequeue=1, or examples/lua/job_submit.lua for jobs that opt in"
    return Check("JobRequeue", "warning", says, mend)


def _job_age(config: Config, slurm: Settings) -> Check:
    age = slurm.seconds("MinJobAge")
    least = config.policy.gather_max + config.controller.snapshot
    if age is None or age == 0:
        return Check("MinJobAge", "ok", "ended jobs are never forgotten")
    if age <= least:
        says = f"{age} s: a failed job may be gone before its evidence is complete ({least:g} s)"
        return Check("MinJobAge", "broken", says, "MinJobAge=900")
    if age < MIN_JOB_AGE_SECONDS:
        says = f"{age} s: that is as long as the aggregator may be away"
        return Check("MinJobAge", "warning", says, "MinJobAge=900")
    return Check("MinJobAge", "ok", f"{age} s")


def _open_mode(slurm: Settings) -> Check:
    if slurm.text("JobFileAppend") == "1":
        return Check("open mode", "ok", "a requeued job appends to its output")
    says = "a requeued job begins its output anew, unless it has --open-mode=append"
    return Check("open mode", "ok", f"{says} (examples/lua/cli_filter.lua sets it)")
