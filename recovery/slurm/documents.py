"""Slurm's JSON documents read as Job and Node: the same code for 22.05, 24.11 and 26.05.

Pure: text in, dataclasses out. Which command printed the text is ``cli``'s business. JSON is read
rather than ``scontrol show job -o``, whose ``Comment=`` a user can fill with ``JobState=…``: in
JSON a user's text stays inside its own string.

What differs between releases (tests/data/slurm holds captures of each):

* 22.05 (openapi v0.0.38) has plain numbers; later releases wrap them as ``{"set", "infinite",
  "number"}``.
* 22.05 shows one word of a job's state, a flag before the base state: a job that is completing
  is ``COMPLETING`` and nothing tells what it will be. Later releases list base state and flags.
* 22.05 prints an empty list, and exits 0, where slurmctld did not answer; its ``errors`` tell.

A document that lacks a field this code needs raises DocumentError: a wrong version must not pass
for an idle cluster.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from recovery.slurm.base import Job, Node
from recovery.slurm.hostlist import HostlistError, expand

UidOf = Callable[[str], "int | None"]
"""The uid of a user name, None where there is no such user (Slurm's JSON has names alone)."""

_JOB_BASES = frozenset(
    (
        *("PENDING", "RUNNING", "SUSPENDED", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT"),
        *("NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"),
    )
)
# What a flag that 22.05 shows alone says of the base state (slurm.h: enum job_states, JOB_…).
_BASE_BEHIND = {
    "CONFIGURING": "RUNNING",
    "RESIZING": "RUNNING",
    "SIGNALING": "RUNNING",
    "STOPPED": "RUNNING",
    "REQUEUE_HOLD": "PENDING",
    "RESV_DEL_HOLD": "PENDING",
}
_NODE_BASES = frozenset(("UNKNOWN", "DOWN", "IDLE", "ALLOCATED", "MIXED", "ERROR", "FUTURE"))
_UNSET = 0xFFFFFFFE
"""slurm.h: NO_VAL; it and INFINITE, one above, are what 22.05 prints for "not set"."""

_LOCAL_ID_LIMIT = (1 << 26) - 1
"""slurm.h: MAX_JOB_ID. The bits above number the cluster of a federation that a job comes from."""

_WRAPPED_NUMBER = frozenset(("set", "infinite", "number"))
_GPU = re.compile(r"gpu(?::[^:(,]+)*?:(\d+)(?:\(.*)?")


class DocumentError(Exception):
    """The text is not the document that was asked for."""


class AnswerError(Exception):
    """The document reports an error of its own instead of an answer; the text is Slurm's."""


def read_jobs(text: str) -> dict[int, Job]:
    """Return the jobs of a ``squeue --json`` document by their id.

    Raises DocumentError, and AnswerError where Slurm put an error into the document.
    """
    return {job.id: job for job in _records(text, "jobs", _is_job, _job)}


def read_nodes(text: str, uid_of: UidOf) -> dict[str, Node]:
    """Return the nodes of a ``scontrol show nodes --json`` (22.05: ``sinfo --json``) document.

    Raises DocumentError, and AnswerError where Slurm put an error into the document.
    """

    def node(fields: dict[str, Any]) -> Node:
        return _node(fields, uid_of)

    return {node.name: node for node in _records(text, "nodes", _is_node, node)}


def read_reservations(text: str) -> dict[str, tuple[str, ...]]:
    """Return the nodes of each reservation without FLEX, of slurmrestd's ``/reservations``.

    Raises DocumentError, and AnswerError where Slurm put an error into the document.
    """

    def reservation(fields: dict[str, Any]) -> tuple[str, tuple[str, ...]] | None:
        flags = _words(fields["flags"])
        return None if "FLEX" in flags else (_text(fields["name"]), _names(fields["node_list"]))

    return dict(filter(None, _records(text, "reservations", _is_reservation, reservation)))


def _records(
    text: str,
    kind: str,
    is_record: Callable[[dict[str, Any]], bool],
    build: Callable[[dict[str, Any]], Any],
) -> list[Any]:
    """Return what ``build`` makes of each record in the document's list ``kind``.

    Records are built while the text is parsed, innermost first, so that ten thousand of them
    never stand in memory as the hundreds of fields each that Slurm prints.
    """

    def shrink(fields: dict[str, Any]) -> Any:
        if fields.keys() == _WRAPPED_NUMBER:
            return fields["number"] if fields["set"] and not fields["infinite"] else None
        return build(fields) if is_record(fields) else fields

    try:
        document = json.loads(text, object_hook=shrink)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"not JSON: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise DocumentError(f"a record of {kind} lacks or misuses {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get(kind), list):
        raise DocumentError(f"no list of {kind}")
    if errors := document.get("errors"):
        raise AnswerError(_error_text(errors))
    records: list[Any] = document[kind]
    if any(isinstance(record, dict) for record in records):
        raise DocumentError(f"a record of {kind} has another shape")
    return records


def _error_text(errors: Any) -> str:
    """Return Slurm's own words: ``[{"description": …, "error": …, "source": …}, …]``."""
    if not isinstance(errors, list):
        return str(errors)[:500]
    texts = [
        ": ".join(str(part) for part in (one.get("description"), one.get("error")) if part)
        if isinstance(one, dict)
        else str(one)
        for one in errors
    ]
    return "; ".join(texts)[:500]


def _is_job(fields: dict[str, Any]) -> bool:
    return "job_id" in fields and "job_state" in fields


def _is_reservation(fields: dict[str, Any]) -> bool:
    return "node_list" in fields and "flags" in fields


def _is_node(fields: dict[str, Any]) -> bool:
    return "slurmd_start_time" in fields and "name" in fields


def _job(fields: dict[str, Any]) -> Job:
    state, flags = _job_state(fields["job_state"])
    exit_code, signal = _exit(fields["exit_code"])
    array_job, array_task = _number(fields["array_job_id"]), fields["array_task_id"]
    return Job(
        id=_id(fields["job_id"]),
        name=_text(fields["name"]),
        user=_text(fields["user_name"]),
        uid=_id(fields["user_id"]),
        account=_text(fields["account"]),
        partition=_text(fields["partition"]),
        qos=_text(fields["qos"]),
        state=state,
        flags=flags,
        reason=_reason(fields["state_description"], fields["state_reason"]),
        nodes=_names(fields["nodes"]),
        batch_host=_text(fields["batch_host"]),
        node_count=_number(fields["node_count"]),
        excluded=_names(fields["excluded_nodes"]),
        required=_names(fields["required_nodes"]),
        restarts=_number(fields["restart_cnt"]),
        batch=bool(fields["batch_flag"]),
        requeue=bool(fields["requeue"]),
        submit_time=_number(fields["submit_time"]),
        eligible_time=_number(fields["eligible_time"]),
        start_time=_number(fields["start_time"]),
        end_time=_number(fields["end_time"]),
        exit_code=exit_code,
        signal=signal,
        priority=_number(fields["priority"]),
        reservation=_text(fields.get("resv_name")),
        deadline=_number(fields.get("deadline")),
        time_limit_seconds=_number(fields.get("time_limit")) * 60,
        time_min_seconds=_number(fields.get("time_minimum")) * 60,
        dependency=_text(fields.get("dependency")),
        array=f"{array_job}_{array_task}" if array_job and array_task is not None else None,
        het_job_id=_number(fields["het_job_id"]) or None,
        het_parts=_het_parts(_text(fields["het_job_id_set"])),
        gpus=_job_gpus(fields),
        federated=bool(_text(fields.get("federation_origin")))
        or _id(fields["job_id"]) > _LOCAL_ID_LIMIT,
        held_by_expedite="REQUEUE_HOLD" in flags
        and "EXPEDITED_REQUEUE" in _words(fields.get("flags"))
        # An administrator's hold on top of Slurm's own shows here alone; a user's nowhere.
        and fields["state_reason"] == "JobHeldUser",
        # 26.05 has it in an object that names the whole job as a step.
        sluid=_text(fields.get("step_id", {}).get("sluid")) or None,
        comment=_text(_comment(fields, "user", "comment")),
        admin_comment=_text(_comment(fields, "administrator", "admin_comment")),
        stdout=_text(fields.get("stdout_expanded")) or _text(fields["standard_output"]),
        work_dir=_text(fields["current_working_directory"]),
    )


def _node(fields: dict[str, Any], uid_of: UidOf) -> Node:
    words = [word.upper() for word in _words(fields["state"]) + _words(fields.get("state_flags"))]
    bases = [word for word in words if word in _NODE_BASES]
    set_by = _text(fields["reason_set_by_user"])
    return Node(
        name=_text(fields["name"]),
        state=bases[0] if bases else "UNKNOWN",
        flags=frozenset(words) - _NODE_BASES,
        reason=_text(fields["reason"]),
        reason_uid=uid_of(set_by) if set_by else None,
        reason_time=_number(fields["reason_changed_at"]),
        boot_time=_number(fields["boot_time"]),
        partitions=tuple(_words(fields["partitions"])),
        gpus=_gpus(_text(fields["gres"])),
    )


def _job_state(value: Any) -> tuple[str, frozenset[str]]:
    """Return the base state and the flags beside it.

    SPECIAL_EXIT counts as a base state, as it does to everybody who reads squeue, although for
    Slurm it is a flag of PENDING. In 22.05 COMPLETING, REQUEUED and others hide the base; they
    are then both, state and flag.
    """
    words = _words(value)
    bases = [word for word in words if word in _JOB_BASES]
    flags = frozenset(words) - _JOB_BASES
    if "SPECIAL_EXIT" in flags and (not bases or bases == ["PENDING"]):
        return "SPECIAL_EXIT", flags
    if bases:
        return bases[0], flags
    if not words:
        raise TypeError("job_state")
    return _BASE_BEHIND.get(words[0], words[0]), flags


def _exit(value: Any) -> tuple[int, int]:
    """Return the exit code and the signal of 22.05's wait status or later releases' object."""
    if not isinstance(value, dict):
        status = _number(value)
        return (status >> 8) & 0xFF, status & 0x7F
    return _number(value["return_code"]), _number(value["signal"]["id"])


def _comment(fields: dict[str, Any], whose: str, old_name: str) -> Any:
    """Return one of a job's comments: flat by name, in later releases in an object as well."""
    if old_name not in fields and isinstance(comment := fields["comment"], dict):
        return comment[whose]
    value = fields[old_name]
    return value[whose] if isinstance(value, dict) else value


def _reason(description: Any, reason: Any) -> str:
    """Return what squeue shows in its last column; the description says more than the reason."""
    text = _text(description) or _text(reason)
    return "" if text == "None" else text


def _gpus(gres: str) -> int:
    """Return the GPUs in ``gpu:8``, ``gpu:a100:4(S:0-1),gpu:v100:4,shard:3``."""
    terms = re.split(r",(?![^(]*\))", gres)
    return sum(int(match[1]) for term in terms if (match := _GPU.fullmatch(term.strip())))


def _job_gpus(fields: dict[str, Any]) -> int:
    """Return a job's GPUs: those given it, node by node, else those it asks for."""
    given = [text for text in fields["gres_detail"] if isinstance(text, str)]
    if given:
        return sum(map(_gpus, given))
    each, whole = (
        _gpus(_text(fields[name]).replace("gres:", "").replace("gres/", ""))
        for name in ("tres_per_node", "tres_per_job")
    )
    return each * max(1, _number(fields["node_count"])) if each else whole


def _het_parts(text: str) -> tuple[int, ...]:
    """Return the ids in ``9-10`` or ``9,12-13``, empty for what is no heterogeneous job."""
    try:
        return tuple(int(one) for one in expand(f"[{text}]")) if text else ()
    except HostlistError as error:
        raise TypeError(str(error)) from error


def _names(value: Any) -> tuple[str, ...]:
    try:
        return expand(_text(value))
    except HostlistError as error:
        raise TypeError(str(error)) from error


def _number(value: Any) -> int:
    """Return a number, 0 where Slurm says that it is not set."""
    if value is None:
        return 0
    if not isinstance(value, int):
        raise TypeError(f"{value!r:.40} where a number belongs")
    return 0 if value in (_UNSET, _UNSET + 1) else value


def _id(value: Any) -> int:
    """Return a number of a kind for which 0 means something: unset must not become root."""
    if not isinstance(value, int):
        raise TypeError(f"{value!r:.40} where an id belongs")
    return value


def _text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} where text belongs")
    return "" if value == "(null)" else value


def _words(value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    return [word for word in value if isinstance(word, str)]
