"""One notice, sent by every way that is configured: ``python -m recovery.notify_send``.

Reads ``{"notice", "settings", "ways"}`` from standard input and writes to standard output which
ways failed and why, ``{}`` where none did. No text reaches a shell.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

_SUBJECT_CHARACTERS = 120


class NotSent(Exception):
    """A way that did not take the notice; the text says why."""


def main() -> int:
    """Send one notice."""
    request = json.load(sys.stdin)
    notice, settings = request["notice"], request["settings"]
    senders: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], None]] = {
        "command": _command,
        "webhook": _webhook,
        "slack": _slack,
        "mail": _mail,
    }
    failed: dict[str, str] = {}
    for way in request["ways"]:
        try:
            senders[way](notice, settings)
        except NotSent as error:
            failed[way] = str(error)[:400]
    json.dump(failed, sys.stdout)
    return 0


def first_line(notice: Mapping[str, Any]) -> str:
    """Return what a person must do, on one line."""
    whose = f" of {notice['job_owner']}" if notice["job_owner"] else ""
    line = f"{notice['subject']}{whose}: {notice['what']}"
    return "".join(one if one.isprintable() else " " for one in line)


def body(notice: Mapping[str, Any]) -> str:
    """Return the text of a mail: what to do first, then what is known."""
    lines = [first_line(notice), ""]
    if notice["cluster"]:
        lines.append(f"cluster           {notice['cluster']}")
    lines.append(f"since             {notice['since']}")
    if notice["count"] > 1:
        lines.append(f"times             {notice['count']}")
    if notice["looked_after_by"]:
        lines.append(f"looked after by   {notice['looked_after_by']}")
    if notice["decision"]:  # a breaker or a grant is nobody's to look after, it has a cure
        lines.append(f"the whole story   recovery explain {notice['decision']}")
        lines.append(f"you look after it recovery ack '{notice['subject']}' --owner YOU")
    return "\n".join(lines) + "\n"


def _command(notice: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    _run([*settings["command"]], json.dumps(notice), settings)


def _mail(notice: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    addresses = [*settings["mail"]]
    if settings["mail_owner"] and notice["job_owner"]:
        addresses.append(notice["job_owner"])  # Slurm mails to a user's name as well
    subject = first_line(notice)[:_SUBJECT_CHARACTERS]
    for address in addresses:
        if not address.startswith("-"):
            _run([settings["mail_program"], "-s", subject, address], body(notice), settings)


def _run(command: list[str], text: str, settings: Mapping[str, Any]) -> None:
    try:
        done = subprocess.run(
            command,
            input=text.encode("utf-8", "backslashreplace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=settings["timeout"],
            check=False,
        )
    except OSError as error:
        raise NotSent(f"{command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise NotSent(f"{command[0]}: not done in {settings['timeout']:g} s") from error
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip()[-200:]
        raise NotSent(f"{command[0]} ended with status {done.returncode}: {said}")


def _webhook(notice: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    _post(settings["webhook"], notice, settings["timeout"])


def _slack(notice: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    # Slack's own three (api.slack.com/reference/surfaces/formatting): "&", "<" and ">".
    text = body(notice).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    _post(settings["slack"], {"text": text}, settings["timeout"])


def _post(url: str, document: Mapping[str, Any], timeout: float) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "slurm-recovery"}
    request = urllib.request.Request(url, json.dumps(document).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            answer.read(4096)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise NotSent(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
