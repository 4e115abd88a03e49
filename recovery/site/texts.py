"""The text of each file that ``recovery init`` writes, and the lines that it prints.

Pure: ``Site`` in, text out. Where a file goes, and whether it is written, is ``installing``'s.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from slurm_hooks import config_file

HOOKS = {
    "Prolog": "slurm-hook-prolog",
    "Epilog": "slurm-hook-epilog",
    "HealthCheckProgram": "slurm-hook-health-check",
    "TaskProlog": "slurm-hook-task-prolog",
}
"""slurm.conf's key: the program that belongs there."""

_ENTRIES = {
    "slurm-hook-prolog": ("slurm_hooks.quiet", "prolog"),
    "slurm-hook-epilog": ("slurm_hooks.hooks", "epilog"),
    "slurm-hook-health-check": ("slurm_hooks.hooks", "health_check"),
    "slurm-hook-task-prolog": ("slurm_hooks.hooks", "task_prolog"),
}
"""Where each program begins, as setup.cfg has it."""


@dataclass(frozen=True)
class Site:
    """What differs from site to site.

    ``python`` is what this installation runs on, ``hooks`` a folder of scripts that start its
    hooks, whose path stays when the next version lies elsewhere. ``uid`` is ``user``'s, as whom the
    aggregator runs. ``extra_path`` is the folder of Slurm's commands where the usual ones lack it.
    """

    spool: Path
    state: Path
    python: Path
    hooks: Path
    cluster: str = ""
    authenticate: str = "owner"
    user: str = "root"
    uid: int = 0
    config: Path = Path(config_file.DEFAULT_NAME)
    extra_path: str = ""

    @property
    def trusted_uids(self) -> list[int]:
        """Root, whose hooks write records, and the aggregator's own account."""
        return sorted({0, self.uid})


def recovery_toml(site: Site) -> str:
    """Return the example with this site's values in it, and the whole default policy as comments.

    >>> 'path = "/x"' in recovery_toml(Site(Path("/x"), Path("/s"), Path("/p/python"), Path("/h")))
    True
    """
    values = {
        ("spool", "path"): str(site.spool),
        ("spool", "authenticate"): site.authenticate,
        ("spool", "trusted_uids"): site.trusted_uids,
        ("controller", "cluster"): site.cluster,
        ("controller", "state"): str(site.state),
    }
    example = (resources.files("recovery.site") / "recovery.toml").read_text(encoding="utf-8")
    return _with_values(example, values) + _policy_as_comments()


def unit(site: Site) -> str:
    """Return the aggregator's systemd unit, closed to all but what it needs.

    It needs Slurm's commands and munge's socket, its state, the spool, and root's rights only to
    read files that belong to others; nothing of the kernel, of devices or of homes.
    """
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    if site.extra_path:
        path = f"{site.extra_path}:{path}"
    return f"""\
# Written by `recovery init`. Changes of your own: systemctl edit slurm-recovery
[Unit]
Description=slurm-recovery aggregator
Documentation=man:slurm.conf(5)
After=network-online.target slurmctld.service munge.service
Wants=network-online.target
RequiresMountsFor={site.spool} {site.state}

[Service]
User={site.user}
ExecStart={site.python.parent}/recovery run
Environment=SLURM_RECOVERY_CONFIG={site.config}
Environment=PATH={path}
StandardError=append:/var/log/slurm-recovery/aggregator.log
LogsDirectory=slurm-recovery
Restart=on-failure
RestartSec=5
# It may be killed at any moment: an action is on disk before it is taken.
TimeoutStopSec=30

# One pass holds at most its bounded reads; more is a fault, and a restart loses nothing.
MemoryMax=2G
TasksMax=256
UMask=0022
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths={site.spool} {site.state}
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
SystemCallArchitectures=native
CapabilityBoundingSet=CAP_DAC_READ_SEARCH CAP_DAC_OVERRIDE CAP_FOWNER CAP_CHOWN

[Install]
WantedBy=multi-user.target
"""


def logrotate() -> str:
    """Return the rotation of the aggregator's log, which it keeps open for appending."""
    return """\
# Written by `recovery init`.
/var/log/slurm-recovery/aggregator.log {
    weekly
    rotate 8
    compress
    missingok
    notifempty
    copytruncate
}
"""


def hook(site: Site, name: str) -> str:
    """Return the script of a hook, ``slurm-hook-prolog`` for one, as Slurm is to call it.

    slurmd drains the node whose Prolog or Epilog fails. So will the next job of every node do after
    an upgrade of the distribution that took away the Python that they run on, if nothing stands
    between: a virtual environment of another Python finds no package. ``-I`` keeps out what lies in
    the current folder, which for a task prolog is the job's.
    """
    module, function = _ENTRIES[name]
    named = f"export {config_file.PATH_VARIABLE}={shlex.quote(str(site.config))}\n"
    return f"""\
#!/bin/sh
# {name}, written by `recovery init`. Slurm drains the node of a hook that fails, so
# one whose Python or package is gone does nothing; `slurm-hooks doctor` and the silent node tell.
python={shlex.quote(str(site.python))}
[ -x "$python" ] || exit 0
{"" if site.config == Path(config_file.DEFAULT_NAME) else named}\
exec "$python" -Ic 'try:
    from {module} import {function}
except Exception:
    raise SystemExit(0)
{function}()'
"""


def slurm_conf_lines(site: Site) -> str:
    """Return what belongs into slurm.conf; slurm.conf.example says why, and what is dangerous."""
    programs = [f"{key}={site.hooks / name}" for key, name in HOOKS.items()]
    return "\n".join(
        (
            *programs,
            "PrologFlags=Alloc",
            "PrologEpilogTimeout=60",
            "HealthCheckInterval=60",
            "HealthCheckNodeState=ANY,CYCLE",
            "JobRequeue=1",
            "MinJobAge=900",
        )
    )


def _with_values(text: str, values: Mapping[tuple[str, str], object]) -> str:
    """Replace the value of each ``(section, key)``, all of which stand in ``text``."""
    lines, section, left = [], "", dict(values)
    for line in text.splitlines():
        if header := re.fullmatch(r"\[([\w.]+)\]", line):
            section = header[1]
        elif (assigned := re.match(r"(\w+) = ", line)) and (section, assigned[1]) in left:
            # TOML's strings and lists are JSON's.
            value = json.dumps(left.pop((section, assigned[1])), ensure_ascii=False)
            comment = re.search(r"\s+#.*$", line)
            line = f"{assigned[1]} = {value}{comment[0] if comment else ''}"
        lines.append(line)
    if left:
        raise ValueError(f"the example of recovery.toml lacks {sorted(left)}")
    return "\n".join(lines) + "\n"


def _policy_as_comments() -> str:
    table = (resources.files("recovery") / "policy.toml").read_text(encoding="utf-8")
    lines = ["", "# The default policy, whole: uncomment a row, all of it, to replace it."]
    for line in table.splitlines():
        row = re.sub(r'^\["([\w.]+)"\]$', r'[policy.classes."\1"]', line)
        lines.append(row if row.startswith("#") else f"# {row}".rstrip())
    return "\n".join(lines) + "\n"
