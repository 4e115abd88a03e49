"""The gate: a node with a fatal finding drains itself, if and only if it has been told it may.

Owns what permission looks like on a node (``control/effective.json`` and the slots beside it) and
the only Slurm commands a hook ever gives: one read, one write. Every doubt leaves the gate open:
permission absent, expired or not a trusted owner's, no free slot, Slurm silent. At most as many
nodes as there are slots can gate at once, however many fail together. Runs in a child.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_hooks import looking
from slurm_hooks.frozen import frozen
from slurm_hooks.node_config import NodeConfig
from slurm_hooks.record import FaultRecord, seconds_of, utc
from slurm_hooks.spool import SpoolError, read_regular

EFFECTIVE_SCHEMA = "effective/v1"

VALID_SECONDS = 60.0
"""How long a permission holds, and how far clocks may differ before it is worth nothing."""

SLOTS_LIMIT = 1000

SCONTROL_PATHS = (
    "/usr/bin/scontrol",
    "/usr/local/bin/scontrol",
    "/opt/slurm/bin/scontrol",
    "/opt/slurm/current/bin/scontrol",
    "/usr/local/slurm/bin/scontrol",
    "/cm/shared/apps/slurm/current/bin/scontrol",
)
"""Where scontrol is looked for: slurmd gives its hooks no PATH."""

OUR_REASON = "recovery:"
"""How every drain reason of this toolkit begins."""

_REASON_LIMIT = 200

_STATE = "gate"
"""Name of the state that tells whether the gate has been closed in this boot, or when it failed to.

Emptied by the first health check that finds nothing fatal (``hooks``).
"""


class NotAllowed(Exception):
    """Nobody has given this node leave to gate itself; the normal case, and no news."""


class GateError(Exception):
    """The node may gate itself and could not; the text says why."""


@frozen
class Closed:
    """The gate is closed: the node is drained, by us or by somebody before; the standing reason."""

    how: str
    by_us: bool


@frozen
class NodeState:
    """What one ``scontrol show node`` says that matters here.

    ``state`` is in Slurm's words (``IDLE+DRAIN``), ``cpus_allocated`` how many jobs have.
    """

    drained: bool
    reason: str
    partitions: tuple[str, ...]
    state: str = ""
    cpus_allocated: int = 0


def attempt(
    record: FaultRecord, config: NodeConfig, states: Path, until: float, *, is_news: bool
) -> Closed | None:
    """Close the gate, or return None where there is nothing to do or to say.

    A health check whose finding is no news asks Slurm nothing once the gate is closed for it.
    Where it could not be closed it tries again each time, but says so at most every
    ``hooks.repeat`` seconds. The folder ``states`` keeps what that needs.

    Raises:
        GateError: it may be closed and could not, and that is news.
    """
    known = looking.kept(states, _STATE)
    known = known if known.get("boot_id") == record.boot_id else {}
    routine = record.hook == "health_check"
    if routine and known.get("closed") and not is_news:
        return None
    try:
        closed = close(record, config, until)
    except NotAllowed:
        return None
    except GateError:
        told = known.get("told")
        if routine and told and 0 <= time.time() - told < config.hooks.repeat:
            return None
        looking.keep(states, {_STATE: {"boot_id": record.boot_id, "told": time.time()}})
        raise
    looking.keep(states, {_STATE: {"boot_id": record.boot_id, "closed": True}})
    return closed


def close(record: FaultRecord, config: NodeConfig, until: float) -> Closed:
    """Drain this node for ``record``'s fatal finding, unless somebody has drained it already.

    ``until`` is a moment of ``time.monotonic()`` by which Slurm must have answered twice.

    Raises:
        NotAllowed: not in act mode, no grant that covers this, or none that is valid now.
        GateError: allowed, but no slot is free, Slurm does not answer, or the node, though not
            drained, has a reason that somebody wrote: Slurm would lose it.
    """
    control = config.spool.path / "control"
    leave = permission(control, {0, os.geteuid(), *config.spool.trusted_uids})
    grants = [grant for grant in leave["grants"] if _may_cover(grant, record)]
    if not grants:
        raise NotAllowed("no grant covers it")
    scontrol = Scontrol(find_scontrol(config.hooks.scontrol), config.hooks.slurm_conf)
    node = node_state(scontrol, record.node, _half(until))
    if not any(_in_scope(grant, node.partitions) for grant in grants):
        raise NotAllowed("no grant covers this node")
    if node.drained:
        return Closed(node.reason, by_us=False)
    if node.reason and not node.reason.startswith(OUR_REASON):
        raise GateError(f"the reason {node.reason!r} is somebody's and is not overwritten")
    take_slot(control / "gate", record, leave["gate_slots"])
    reason = reason_for(record)
    arguments = ("update", f"nodename={record.node}", "state=drain", f"reason={reason}")
    scontrol.run(arguments, max(0.1, until - time.monotonic()))
    return Closed(reason, by_us=True)


def reason_for(record: FaultRecord) -> str:
    """Return the drain reason: ours by its first word, with the record that explains it."""
    fatal = next(finding for finding in record.findings if finding.severity == "fatal")
    shown = "".join(c if c.isprintable() else " " for c in fatal.summary)
    return f"{OUR_REASON} gate {record.id}: {' '.join(shown.split())}"[:_REASON_LIMIT]


def permission(control: Path, trusted: set[int]) -> Mapping[str, Any]:
    """Return what is in force: ``grants`` (a list of tables) and ``gate_slots`` (a number).

    ``control`` is the spool's folder of that name; ``trusted`` are the uids that may write there.

    Raises:
        NotAllowed: nothing is, or nobody who may say so has said it; the text says why.
    """
    path = control / "effective.json"
    for place in (control, path):
        try:
            found = place.lstat()
        except OSError as error:
            raise NotAllowed(f"{place}: {error.strerror}") from error
        if found.st_uid not in trusted or found.st_mode & 0o022 or stat.S_ISLNK(found.st_mode):
            raise NotAllowed(f"{place} is not a trusted owner's alone")
    try:
        document = json.loads(read_regular(path, 1 << 20))
        age = time.time() - seconds_of(document["time"])
        if document["schema"] != EFFECTIVE_SCHEMA or document["mode"] != "act":
            raise NotAllowed("monitor mode")
        slots, grants = document["gate_slots"], document["grants"]
        if not isinstance(grants, list) or type(slots) is not int:
            raise NotAllowed(f"{path} is not of the form {EFFECTIVE_SCHEMA}")
    except (SpoolError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise NotAllowed(f"{path} cannot be used: {error}") from error
    if not -VALID_SECONDS <= age <= VALID_SECONDS:
        raise NotAllowed(f"{path} is {age:.0f} s old")
    return {"grants": [grant for grant in grants if isinstance(grant, dict)], "gate_slots": slots}


def _may_cover(grant: Mapping[str, Any], record: FaultRecord) -> bool:
    """Whether a grant can cover this, as far as can be said without a look at Slurm.

    A node does not know accounts and QOS, so a grant that is limited to some covers no gate.
    """
    job = record.job
    if "gate" not in grant.get("actions", ()) or grant.get("accounts") or grant.get("qos"):
        return False
    if grant.get("users") and (job is None or job.user not in grant["users"]):
        return False
    return job is None or job.partition is None or _in_scope(grant, [job.partition])


def _in_scope(grant: Mapping[str, Any], partitions: Sequence[str]) -> bool:
    wanted = grant.get("partitions")
    return not wanted or any(partition in wanted for partition in partitions)


def take_slot(folder: Path, record: FaultRecord, slots: int) -> None:
    """Take one of ``slots`` places in ``folder``, or find that this node has one already.

    Raises:
        GateError: all are taken, or the folder cannot be written.
    """
    content = {
        "node": record.node,
        "boot_id": record.boot_id,
        "time": utc(),
        "record": record.id,
    }
    try:
        held = [path for path in folder.iterdir() if path.name.startswith("slot-")]
    except OSError as error:
        raise GateError(f"{folder}: {error.strerror}") from error
    if any(_holder(path) == record.node for path in held):
        return
    # There may be more than slots: their number has shrunk since.
    free = min(slots, SLOTS_LIMIT) if len(held) < slots else 0
    for path in [folder / f"slot-{number}" for number in range(free)]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o644)
        except FileExistsError:
            continue
        except OSError as error:
            raise GateError(f"{path}: {error.strerror}") from error
        with open(descriptor, "wb") as slot:  # noqa: PTH123 - a descriptor, not a path
            slot.write(json.dumps(content).encode())
        return
    raise GateError(f"all {slots} gate slots are taken: too many nodes fail at once")


def _holder(path: Path) -> str | None:
    try:
        document = json.loads(read_regular(path, 4096))
    except (SpoolError, ValueError, RecursionError):
        return None
    return document.get("node") if isinstance(document, dict) else None


def find_scontrol(configured: str = "") -> str:
    """Return the path of scontrol.

    Raises:
        GateError: it is nowhere where it is looked for.
    """
    paths = (configured,) if configured else SCONTROL_PATHS
    for path in paths:
        if os.access(path, os.X_OK):
            return path
    raise GateError(f"no scontrol at {', '.join(paths)}; set hooks.scontrol in recovery.toml")


@frozen
class Scontrol:
    """scontrol's ``path``, and the slurm.conf it reads where slurmd has not told."""

    path: str
    slurm_conf: str = ""

    def run(self, arguments: Sequence[str], seconds: float) -> str:
        """Run one command and return what it prints.

        Raises:
            GateError: it refused, or did not answer within ``seconds``.
        """
        environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
        slurm_conf = os.environ.get("SLURM_CONF") or self.slurm_conf
        if slurm_conf:
            environ["SLURM_CONF"] = slurm_conf
        try:
            done = subprocess.run(
                [self.path, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=seconds,
                env=environ,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise GateError(f"scontrol {arguments[0]}: no answer in {seconds:.1f} s") from error
        if done.returncode != 0:
            said = " ".join((done.stderr or done.stdout).decode("utf-8", "replace").split())
            raise GateError(f"scontrol {arguments[0]}: {said[:300]}")
        return done.stdout.decode("utf-8", "replace")


def node_state(scontrol: Scontrol, node: str, seconds: float) -> NodeState:
    """Ask Slurm about one node.

    Raises:
        GateError: Slurm did not answer, or not about this node: its state is unknown.
    """
    output = scontrol.run(("show", "node", "-o", node), seconds)
    # One line of Name=value; a reason has spaces and is followed by the time in brackets.
    state = re.search(r"\bState=(\S+)", output)
    if not output.startswith(f"NodeName={node} ") or not state:
        raise GateError(f"scontrol does not know node {node}: {output[:200]!r}")
    reason = re.search(r"\bReason=(.*?)(?: \[[^\[\]]*@[^\[\]]*\])?\s*$", output)
    partitions = re.search(r"\bPartitions=(\S+)", output)
    allocated = re.search(r"\bCPUAlloc=(\d+)", output)
    return NodeState(
        drained="DRAIN" in state.group(1).upper(),
        reason=reason.group(1) if reason else "",
        partitions=tuple(partitions.group(1).split(",")) if partitions else (),
        state=state.group(1).upper(),
        cpus_allocated=int(allocated.group(1)) if allocated else 0,
    )


def _half(until: float) -> float:
    return max(0.1, (until - time.monotonic()) / 2)
