"""classify-log names the first primary failure, blames nobody innocent, and says when it is unsure.

The logs in ``data/logs`` are composed in the forms that the programs print; hosts, users and
numbers are invented. They were written after the signatures. Those in ``data/public_logs`` and
``data/more_public_logs`` are cut from public reports (``source``), hosts and users changed; each
was read before the classifier saw it. What it said at first, and which of them the signatures
have since been fitted to, is in the READMEs; those in ``unseen_logs`` and ``more_unseen_logs`` are
held out.
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
from slurm_hooks.joblog.layout import Layout, parse_layout
from slurm_hooks.joblog.verdict import classify

DATA = Path(__file__).parent / "data"
SET = DATA / "logs"


def cases(folder: Path) -> list[dict[str, Any]]:
    """Return the readings of one set."""
    found: list[dict[str, Any]] = json.loads((folder / "verdicts.json").read_text("utf-8"))
    return found


CASES = cases(SET)
PUBLIC = DATA / "public_logs"
UNSEEN = DATA / "unseen_logs"
MORE_PUBLIC = DATA / "more_public_logs"
MORE_UNSEEN = DATA / "more_unseen_logs"
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


@pytest.mark.parametrize(
    ("folder", "wrong_class"), [(PUBLIC, 1), (UNSEEN, 2), (MORE_PUBLIC, 6), (MORE_UNSEEN, 2)]
)
def test_no_program_of_a_public_log_is_restarted_and_no_innocent_node_blamed(
    folder: Path, wrong_class: int
) -> None:
    right = 0
    for case in cases(folder):
        layout = parse_layout(case["layout"]) if case["layout"] else Layout()
        answer = classify([folder / case["file"]], layout).document
        named = {one["node"] for one in answer["implicated"]}
        assert named <= set(case["implicated"]), case["file"]
        if case["job_verdict"] == "hold" and not case.get("missed"):
            assert answer["job_verdict"] == "hold", case["file"]
        right += answer["class"] == case["class"]
    assert right >= len(cases(folder)) - wrong_class


def test_torchruns_word_on_the_first_failure_is_in_the_answer() -> None:
    log = PUBLIC / "launcher-says-sigsegv.log"
    answer = verdict(str(log), "--layout=gpu-a:8")
    assert answer["first_failure"] == {"node": "gpu-a", "rank": 0, "exit_code": -11, "signal": 11}
    assert "first to fail: rank 0, signal 11" in run(str(log)).stdout


HEADER = 'Traceback (most recent call last):\n  File "/home/u/train.py", line 9, in <module>\n'


@pytest.mark.parametrize(
    "log",
    [
        HEADER + "    main()\n",
        HEADER + "    main()\nmylib.WrongShape: 3\n",
        HEADER + "    main()\nRuntimeError: attempt 5/5 failed, not retrying\n",
        HEADER.replace("  File", "File") + "main()\nlib.exc.BackendRefused: no\n",
        "".join(
            f"(Core pid=7) ERROR 09-18 00:55:15 [core.py:718] {line}\n"
            for line in (HEADER + "    main()\nValueError: none left").splitlines()
        ),
        # Dated as dmesg -T dates its lines.
        "".join(
            f"[Thu Aug 16 09:05:19 2018] {line}\n"
            for line in ("step\n" * 50 + HEADER + "    main()\nKeyError: 3").splitlines()
        ),
        'trainer/0 Traceback (most recent call last):\ntrainer/0   File "a.py", line 1, in f\n',
    ],
)
def test_a_traceback_that_nothing_else_explains_holds_the_job(tmp_path: Path, log: str) -> None:
    (tmp_path / "log").write_text(log)
    answer = classify([tmp_path / "log"]).document
    assert (answer["class"], answer["job_verdict"]) == ("program.exception", "hold")


@pytest.mark.parametrize(
    ("words", "fault_class"),
    [
        # A launcher's own traceback tells no more than its children's ends.
        (
            HEADER.replace("/home/u/train.py", "/lib/torch/distributed/run.py") + "    main()\n",
            "unknown",
        ),
        # A worker whose parent is gone, after a rank that a signal ended.
        (
            HEADER.replace("/home/u/train.py", "/lib/python3.11/multiprocessing/connection.py")
            + "    recv()\nEOFError\nsrun: error: n2: task 5: Killed\n",
            "unknown",
        ),
        # Interleaved victims: the first header's own end is not found.
        (
            "Traceback (most recent call last):\n"
            + HEADER
            + "    wait()\ntorch.distributed.DistBackendError: NCCL error in: a.cpp:1, remote"
            " process exited or there was a network error\n",
            "collective.peer_lost",
        ),
    ],
)
def test_a_victims_traceback_holds_nothing(tmp_path: Path, words: str, fault_class: str) -> None:
    (tmp_path / "log").write_text(words)
    answer = classify([tmp_path / "log"]).document
    assert (answer["class"], answer["job_verdict"]) == (fault_class, "requeue")


@pytest.mark.parametrize(
    "line",
    [
        "double free or corruption (!prev)\nAborted (core dumped)",
        "/var/spool/slurmd/job1/slurm_script: line 12:  4321 Segmentation fault      python a.py",
        "srun: error: n1: task 0: Exited with exit code 139",
        "subprocess.CalledProcessError: Command 'python' died with <Signals.SIGSEGV: 11>.",
        "mp.ProcessExitedException: process 0 terminated with signal SIGILL",
    ],
)
def test_a_crash_is_the_programs_whoever_reports_it(tmp_path: Path, line: str) -> None:
    (tmp_path / "log").write_text(line + "\n")
    answer = classify([tmp_path / "log"]).document
    assert (answer["class"], answer["job_verdict"]) == ("program.crash", "hold")


RAS = """{label}Job summary
{label}===========
{label}
{label}  Nodes  Processes         GPUs  Processes     GPUs
{label}(total)   per node  per process    (total)  (total)
{label}      4          8            1         32       32
{label}
{label}Errors
{label}======
{label}
{label}{how}
{label}  Process 3487984 on node 10.0.0.3 managing GPU 5
{label}
{label}#0-0 (cf264af53edbe986) INCOMPLETE
{label}  Missing communicator data from 1 rank
{label}  The missing rank: 21
"""

TIMEOUT = (
    "[rank0]:[E1206 18:44:16.99 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective"
    " operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=4, NumelOut=4,"
    " Timeout(ms)=600000) ran for 600003 milliseconds before timing out.\n"
)


@pytest.mark.parametrize(
    ("label", "how"),
    [
        ("", "INCOMPLETE\n  Missing communicator data from 1 job process"),
        ("0: ", "DEAD\n0:   1 job process is considered dead (unreachable via the RAS network)"),
    ],
)
def test_a_process_that_nccls_own_report_cannot_reach_is_named(
    tmp_path: Path, label: str, how: str
) -> None:
    log = tmp_path / "log"
    log.write_text(RAS.format(label=label, how=how) + TIMEOUT)
    answer = verdict(str(log), "--layout=n[1-4]:8", "--hosts=10.0.0.3=n3")
    (named,) = answer["implicated"]
    assert (named["node"], named["gpu"]) == ("n3", 5)
    assert "process 3487984" in named["why"]


def test_nccls_report_as_json_counts_and_one_of_a_dying_job_blames_nobody(tmp_path: Path) -> None:
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    log = tmp_path / "log"
    log.write_text(TIMEOUT)

    def rank(number: int, **more: Any) -> dict[str, Any]:
        host = f"10.0.0.{1 + number // 2}"
        return {"rank": number, "host": host, "pid": 100 + number, "cuda_dev": number % 2, **more}

    gone = {"unresponsive": True, "considered_dead": False}
    for missing, blamed in (([5], ["n3"]), ([1, 3, 5], [])):
        document = {
            "nccl_version": "2.29.1",
            "communicators": [
                {
                    "hash": "0xae",
                    "ranks": [rank(n, collective_counts={}) for n in range(8) if n not in missing],
                    "missing_ranks": [rank(n, status=gone) for n in missing],
                }
            ],
        }
        (dumps / "ncclras.json").write_text(json.dumps(document))
        hosts = [f"--hosts=10.0.0.{n}=n{n}" for n in range(1, 5)]
        answer = verdict(str(log), "--layout=n[1-4]:2", f"--dumps={dumps}", *hosts)
        assert [one["node"] for one in answer["implicated"]] == blamed


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
