"""Whatever stands in a hook's environment and files, it ends well, in time, with a valid record."""

from __future__ import annotations

import json
import random
from pathlib import Path

import fastjsonschema
import pytest

from tests.node import Node, job

SCHEMA = Path(__file__).parents[1] / "slurm_hooks/schemas/fault-record-v1.json"

NASTY = (
    b"",
    b"\x00\xff\xfe",
    b"{}",
    b"[]",
    b"null",
    b"[[[[",
    b'{"entries": [1], "boot_id": 7}',
    b'{"entries": {"x": {"first": "y", "keys": null}}}',
    b"1e999",
    b'"' + b"\\u0000" * 1000 + b'"',
    b"[" * 100_000,
    b"mode = 'act'\n" * 3,
    b"x" * 600_000,
)

VALUES = (
    "",
    "0",
    "-1",
    "9" * 40,
    "\udcff\udcfe",
    "a b;$(reboot)`id`",
    "\x1b[31m",
    "é" * 9000,
    "1:2:3",
)

FILES = (
    "recovery.toml",
    "buffer/dropped",
    "buffer/state/reported.json",
    "buffer/state/passed.json",
    "buffer/state/gate.json",
    "buffer/01ARZ3NDEKTSV4RRFFQ69G5FAV.fatal.json",
    "spool/control/effective.json",
    "spool/control/gate/slot-0",
)


@pytest.mark.parametrize("seed", range(24))
def test_a_hook_survives_whatever_it_is_given(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    node = Node(tmp_path)
    node.configure("[hooks]\nfreshness = 60\nbudget = {prolog = 3, epilog = 3, health_check = 3}\n")
    node.finds({"code": "site.gone", "severity": "fatal", "summary": "gone"})
    (node.buffer / "state").mkdir(parents=True)
    node.buffer.chmod(0o700)
    for name in chance.sample(FILES, 4):
        content = chance.choice(NASTY)
        path = tmp_path / name
        # A configuration that names no spool would send records to the machine's real one.
        path.write_bytes(path.read_bytes() + content if name == "recovery.toml" else content)
    told = job(exit_code="1:0")
    for name in chance.sample(sorted(told), 4):
        told[name] = chance.choice(VALUES)
    hook = ("prolog", "epilog", "health_check")[seed % 3]
    run = node.run(hook, **told)
    assert (run.status, run.stdout, run.stderr) == (0, "", "")
    assert run.seconds < 3.2
    validate = fastjsonschema.compile(json.loads(SCHEMA.read_text()))
    found = []
    for path in (node.spool / "incoming").glob("*.json"):
        if "01ARZ3NDEKTSV4RRFFQ69G5FAV" in path.name:
            continue  # what was planted in the buffer is forwarded as it is, for the inbox to judge
        found.append(json.loads(path.read_bytes()))
        validate(found[-1])
    assert any(record["verdict"] == "fatal" for record in found)
