"""classify-log names the first primary failure, blames nobody innocent, and says when it is unsure.

The logs in ``data/logs`` are composed in the forms that the programs print; hosts, users and
numbers are invented. They were written after the signatures.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest

import slurm_hooks

SET = Path(__file__).parent / "data" / "logs"
CASES: list[dict[str, Any]] = json.loads((SET / "verdicts.json").read_text(encoding="utf-8"))
SCHEMA = Path(slurm_hooks.__file__).parent / "schemas" / "log-verdict-v1.json"

_PROGRAM = "from slurm_hooks.classify_log import command; command()"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments], capture_output=True, text=True, timeout=60
    )


def verdict(*arguments: str) -> dict[str, Any]:
    """Return the document that the command prints, once it has passed its schema."""
    answer: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    fastjsonschema.validate(json.loads(SCHEMA.read_text(encoding="utf-8")), answer)
    return answer


@pytest.mark.parametrize("case", CASES, ids=[case["file"] for case in CASES])
def test_the_verdict_is_the_one_that_an_operator_would_give(case: dict[str, Any]) -> None:
    hosts = [f"--hosts={address}={node}" for address, node in case.get("hosts", {}).items()]
    layout = [f"--layout={case['layout']}"] if case["layout"] else []
    answer = verdict(str(SET / case["file"]), *layout, *hosts)
    assert (answer["class"], answer["job_verdict"]) == (case["class"], case["job_verdict"])
    assert [one["node"] for one in answer["implicated"]] == case["implicated"]


def test_a_cause_before_a_long_echo_is_found_in_a_log_too_large_to_read_whole(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    echo = "[rank7]: ncclRemoteError: A call failed possibly due to a network error\n"
    with log.open("w") as out:
        out.write("step 1 | loss 2.0\n" * 1_500_000)
        out.write("3: KeyError: 'tokens'\n")
        out.write(echo * 250_000)
    answer = verdict(str(log))
    assert (answer["class"], answer["cause"]["number"]) == ("program.exception", 1_500_001)
    assert answer["cascade"] >= 10_000
    assert answer["read"][0]["unread_bytes"] > 0


def test_a_sites_own_signature_comes_first(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(
        '["site.license"]\nclass = "program.access"\nrole = "root"\n'
        'any = ["licence server"]\nanchors = ["licence server"]\n'
        "pattern = 'licence server said no'\nsource = \"our licence server\"\n"
    )
    log = tmp_path / "log"
    log.write_text("the licence server said no\n")
    answer = verdict(str(log), f"--signatures={tmp_path}")
    assert (answer["class"], answer["job_verdict"]) == ("program.access", "hold")


def test_the_text_fits_a_terminal_and_names_line_and_node() -> None:
    lines = run(str(SET / "link-down-on-one-host.log"), "--layout=k[1-4]:4").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "network.fabric (established)"
    assert any(line.startswith("names: k4") for line in lines)


def test_what_cannot_be_read_is_one_line_and_status_1(tmp_path: Path) -> None:
    ended = run(str(tmp_path / "none"))
    assert (ended.returncode, ended.stdout, len(ended.stderr.splitlines())) == (1, "", 1)


@pytest.mark.parametrize("layout", ["n[1-", "n[1-4]:x", "n[1-99999999]:8"])
def test_a_wrong_layout_is_wrong_usage(layout: str) -> None:
    assert run(str(SET / "gpu-memory.log"), f"--layout={layout}").returncode == 2
