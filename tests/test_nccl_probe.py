"""NCCL's start and an all-reduce within one node: what they show, and where they may be run.

There is no GPU here, so no collective is run: the judgement is tested on what nccl-tests printed
elsewhere (public issues of NVIDIA/nccl-tests and NVIDIA/nccl, whose numbers name them below) and
on programs that hang, crash or flood. The library is a small one of our own with NCCL's functions.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_hooks.catalog import entry
from slurm_hooks.config import Budget, Config, Hooks
from slurm_hooks.context import HookContext
from slurm_hooks.probe_config import NcclProbe, NvmlProbe, Probes
from slurm_hooks.probes import Look, Seen
from slurm_hooks.probes import load as load_probe
from slurm_hooks.probes.nccl_tests_output import parse
from slurm_hooks.record import RecordJob
from tests.node import Node, job

LIBRARY = r"""
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef struct { char internal[128]; } ncclUniqueId;
static const char *mood(void) { const char *m = getenv("FAKE_NCCL"); return m ? m : ""; }
int ncclGetVersion(int *version) { *version = 22703; return 0; }
const char *ncclGetErrorString(int result) {
    return result ? "unhandled system error" : "no error";
}
int ncclGetUniqueId(ncclUniqueId *id) {
    const unsigned char address[] = {2, 0, 0x1f, 0x90, 10, 0, 0, 7};
    const char *interface = getenv("NCCL_SOCKET_IFNAME");
    if (!strcmp(mood(), "hang")) for (;;) pause();
    if (!strcmp(mood(), "crash")) abort();
    if (interface && strcmp(interface, "eth0")) return 2;
    memset(id, 0, sizeof *id);
    memcpy(id->internal + 8, address, sizeof address);
    return 0;
}
"""

DEVICES = "".join(
    f"#  Rank  {n} Group  0 Pid  65234 on      gpu49 device  {n} [0x0a] NVIDIA H200\n"
    for n in range(8)
)
HEADER = """\
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""  # noqa: E501
ROW = "  8589934592    2147483648     float     sum      -1    31662  271.30  {}      {}    31640  271.49  {}      0\n"  # noqa: E501
FOOTER = "# Out of bounds values : {}\n# Avg bus bandwidth    : {} \n#\n"


def output(busbw: float = 475.1, wrong: int = 0, devices: str = DEVICES) -> str:
    """What all_reduce_perf prints of one size (form: NVIDIA/nccl-tests 272)."""
    bounds = "1 FAILED" if wrong else "0 OK"
    start = "# nThread 1 nGpus 8 minBytes 8589934592 maxBytes 8589934592 step: 2(factor)\n#\n"
    row = ROW.format(busbw, wrong, busbw)
    return f"{start}# Using devices\n{devices}{HEADER}{row}{FOOTER.format(bounds, busbw)}"


class Bench:
    """A node with eight GPUs whose all_reduce_perf is a script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "all_reduce_perf"
        self.library = folder / "libnccl.so.2"
        source = folder / "nccl.c"
        source.write_text(LIBRARY, encoding="ascii")
        build = ["cc", "-shared", "-fPIC", "-o", str(self.library), str(source)]
        subprocess.run(build, check=True)

    def prints(self, text: str, then: str = "") -> None:
        (self.folder / "text").write_text(text, encoding="utf-8")
        self.does(f"cat {self.folder}/text; {then}")

    def does(self, script: str) -> None:
        note = f'echo "$@" >{self.folder}/argv; env >{self.folder}/env'
        self.program.write_text(f"#!/bin/sh\n{note}\n{script}\n", encoding="utf-8")
        self.program.chmod(0o755)

    def was_run(self) -> bool:
        return (self.folder / "argv").exists()

    def look(
        self, hook: str = "epilog", gpus: int = 8, budget: float = 30.0, **settings: Any
    ) -> Seen:
        chosen = {"library": str(self.library), "deadline": 10.0, **settings}
        chosen.setdefault("all_reduce_perf", str(self.program))
        probes = Probes(nccl=NcclProbe(**chosen), nvml=NvmlProbe(expect_gpus=8))
        config = Config(hooks=Hooks(budget=Budget(epilog=budget)), probes=probes)
        held = RecordJob(7, 0, uid=1001, gpus=tuple(range(gpus)))
        context = HookContext(hook, "n1", job=None if hook == "health_check" else held)
        return load_probe("nccl").look(Look(context, config))

    def code(self, **settings: Any) -> str | None:
        seen = self.look(**settings)
        assert len(seen.findings) <= 1, seen.findings
        return seen.findings[0].code if seen.findings else None


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path)
    made.prints(output())
    return made


def test_it_is_in_no_hook_unless_a_site_wants_it() -> None:
    assert NcclProbe().hooks == ()
    assert NcclProbe().all_reduce_perf == ""


def test_a_healthy_node_is_silent_and_its_notes_say_what_was_measured(bench: Bench) -> None:
    seen = bench.look(interface="eth0")
    assert seen.findings == ()
    assert seen.notes["version"] == "2.27.3"
    assert seen.notes["bootstrap"] == "10.0.0.7"
    assert seen.notes["collective"] == "8 GPUs, 475.1 GB/s, by all_reduce_perf"
    assert (bench.folder / "argv").read_text().startswith("-b 8G -e 8G -g 8 ")
    assert "NCCL_SOCKET_IFNAME=eth0" in (bench.folder / "env").read_text()


def test_the_jobs_own_settings_do_not_reach_the_collective(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("SPANK_LD_PRELOAD", "/home/ann/evil.so")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    bench.look()
    text = (bench.folder / "env").read_text()
    assert not any(word in text for word in ("P2P", "evil", "CUDA_VISIBLE"))


@pytest.mark.parametrize(
    ("hook", "gpus"), [("health_check", 8), ("epilog", 4), ("prolog", 0), ("epilog", 9)]
)
def test_no_gpu_is_touched_that_is_not_the_jobs_alone(bench: Bench, hook: str, gpus: int) -> None:
    seen = bench.look(hook=hook, gpus=gpus)
    assert seen.findings == ()
    assert "not run" in seen.notes["collective"]
    assert not bench.was_run()


def test_wrong_results_are_fatal(bench: Bench) -> None:
    bench.prints(output(wrong=237_858), "exit 1")
    (finding,) = bench.look().findings
    assert (finding.code, finding.severity) == ("nccl.wrong_values", "fatal")
    assert "237858 wrong values" in finding.summary


def test_a_slow_node_is_told_by_the_floor_of_its_model(bench: Bench) -> None:
    bench.prints(output(busbw=111.0))
    (finding,) = bench.look().findings
    assert finding.code == "nccl.slow"
    assert "111.0 GB/s over 8 GPUs, and the floor is 431" in finding.summary


def test_a_model_without_a_floor_is_judged_by_its_results_alone(bench: Bench) -> None:
    bench.prints(output(busbw=111.0, devices=DEVICES.replace("H200", "GB10")))
    assert bench.code() is None
    assert bench.code(floor=200.0) == "nccl.slow"
    assert bench.code(floor=0.0) is None


def test_a_floor_holds_for_its_number_of_gpus_and_its_sizes_only(bench: Bench) -> None:
    bench.prints(output(busbw=111.0, devices="".join(DEVICES.splitlines(True)[:4])))
    assert bench.code() is None
    bench.prints(output(busbw=111.0).replace("8589934592", "33554432"))
    assert bench.code() is None


def test_a_hang_is_told_with_where_it_hung_and_leaves_nothing_behind(bench: Bench) -> None:
    bench.prints(
        output().partition("#\n#    ")[0] + HEADER, f"echo $$ >{bench.folder}/pid; exec sleep 600"
    )
    node = Node(_made(bench.folder / "node"))
    _configure(node, bench, deadline=2.0)
    run = node.run("epilog", **_whole_node())
    assert (run.status, run.stdout) == (0, "")
    assert run.seconds < 6
    (record,) = node.records()
    (finding,) = record["findings"]
    assert finding["code"] == "nccl.hang"
    assert "in the first collective; threads in " in finding["summary"]
    pid = int((bench.folder / "pid").read_text())
    _wait(lambda: not Path(f"/proc/{pid}").exists())


def test_a_crash_is_told_with_its_last_words(bench: Bench) -> None:
    words = "n1: Test NCCL failure common.cu:1204 'unhandled cuda error / '\n"
    bench.prints(output().partition("# Out of")[0] + words, "kill -SEGV $$")
    (finding,) = bench.look().findings
    assert finding.code == "nccl.failed"
    assert "signal 11" in finding.summary
    assert "unhandled cuda error" in finding.summary


def test_an_output_that_ends_without_its_footer_is_no_success(bench: Bench) -> None:
    bench.prints(output().partition("# Out of")[0])
    assert bench.code() == "nccl.failed"
    bench.prints("")
    assert bench.code() == "nccl.failed"


def test_a_run_that_checked_or_measured_nothing_is_no_success(bench: Bench) -> None:
    bench.prints(FOOTER.format("0 OK", 0))
    assert bench.code() == "nccl.not_run"
    bench.prints(output(), "exit 3")
    assert bench.code() == "nccl.failed"


def test_a_flood_is_bounded_and_its_end_is_still_read(bench: Bench) -> None:
    bench.prints(output(), "")
    bench.does(f"yes '{'x' * 200}' | head -c 30000000; cat {bench.folder}/text")
    seen = bench.look()
    assert seen.findings == ()
    assert seen.notes["collective"] == "8 GPUs, 475.1 GB/s, by all_reduce_perf"


def test_a_program_that_leaves_a_daemon_behind_does_not_hold_the_hook(bench: Bench) -> None:
    bench.prints(output(), "sleep 600 &")
    started = time.monotonic()
    node = Node(_made(bench.folder / "node"))
    _configure(node, bench, deadline=5.0)
    assert node.run("epilog", **_whole_node()).seconds < 4
    assert time.monotonic() - started < 5
    assert [record["findings"] for record in node.records()] == [[]]


def test_a_budget_that_is_too_short_is_said_and_is_no_hang(bench: Bench) -> None:
    (finding,) = bench.look(budget=15.0, deadline=10.0).findings
    assert finding.code == "nccl.not_run"
    assert "it needs 17 s" in finding.summary
    assert not bench.was_run()


def test_root_runs_and_loads_nothing_that_others_can_change(bench: Bench) -> None:
    bench.program.chmod(0o777)
    assert bench.code() == "nccl.not_run"
    assert not bench.was_run()
    bench.library.chmod(0o666)
    assert bench.code() == "nccl.library_missing"


def test_a_missing_program_or_library_is_said(bench: Bench) -> None:
    assert bench.code(all_reduce_perf="/nowhere/all_reduce_perf") == "nccl.not_run"
    assert bench.code(library="libnccl-nowhere.so.2") == "nccl.library_missing"
    assert bench.code(library="libm.so.6") == "nccl.library_missing", "not NCCL"


@pytest.mark.parametrize(
    ("mood", "code"), [("hang", "nccl.bootstrap_hang"), ("crash", "nccl.bootstrap_failed")]
)
def test_a_library_that_hangs_or_crashes_takes_nothing_with_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, mood: str, code: str
) -> None:
    monkeypatch.setenv("FAKE_NCCL", mood)
    (finding,) = bench.look(deadline=2.0).findings
    assert finding.code == code
    assert ("state S" if mood == "hang" else "SIGABRT") in finding.summary
    assert not bench.was_run()


def test_an_interface_on_which_nccl_cannot_start_is_named(bench: Bench) -> None:
    (finding,) = bench.look(interface="ib9").findings
    assert finding.code == "nccl.bootstrap_failed"
    assert "on ib9" in finding.summary


OLD = """\
# Using devices
#   Rank  0 on     node03 device  0 [0x00] Tesla P100-PCIE-16GB
#   Rank  1 on     node03 device  1 [0x00] Tesla P100-PCIE-16GB

#                                                 out-of-place                    in-place
#      bytes             N    type      op     time  algbw  busbw      res     time  algbw  busbw      res
   134217728      33554432   float     sum   11.920  11.26  11.26    0e+00   11.914  11.27  11.27    0e+00
 Out of bounds values : 0 OK
 Avg bus bandwidth    : 11.2639
"""  # noqa: E501  # NVIDIA/nccl-tests 5: NCCL 1

ERROR_COLUMN = """\
#       size         count      type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                       (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           256     float     sum    46.30    0.02    0.04  1e-07    46.35    0.02    0.04  1e-07
   134217728      16777216     float     sum   3298.6   20.34   20.34  0e+00   3070.3   21.86   21.86    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 6.6
"""  # noqa: E501  # NVIDIA/nccl 1244, NVIDIA/nccl-tests 44

RCCL = """\
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong     algo     proto   nchannels
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
   268435456      67108864     float     sum      -1   1377.7  194.84  365.33      0   1376.1  195.07  365.77      0    RING    SIMPLE          32
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 249.115
"""  # noqa: E501  # ROCm/rccl-tests

TAGGED = """\
[1,0]<stdout>:#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw  #wrong
[1,0]<stdout>:           8             2     float     sum      -1    12.90    0.00    0.00      0    12.87    0.00    0.00      0
[1,0]<stdout>:    67108864      16777216     float     sum      -1[0]    24410    2.75    5.27      0[0]     24425    2.75    5.27      0
[1,0]<stdout>:# Out of bounds values : 0 OK
[1,0]<stdout>:# Avg bus bandwidth    : 92.3405
"""  # noqa: E501  # aws/aws-k8s-tester 503, NVIDIA/nccl 1453

PER_ITERATION = """\
# nccl-tests version 2.19.6 nccl-headers=23007 nccl-library=23007
# Collective test starting: all_reduce_perf
#  Rank  0 Group  0 Pid 249104 on node1 device  0 [0000:00:05] NVIDIA B200
#       size         count      type   redop    root  cputime   algbw   busbw  #wrong    i_min    i_max    i_p99    i_cv%  cputime   algbw   busbw  #wrong    i_min    i_max    i_p99    i_cv%           timestamp
  8589934592    2147483648     float     sum      -1    18011  476.93  834.63   1e+06    18001    18101    18100     0.20    18001  477.20  835.10       0    18001    18101    18100     0.20 2026-07-22 10:00:00
# Out of bounds values : 1 FAILED
# Avg bus bandwidth    : 834.865
# Collective test concluded: all_reduce_perf
"""  # noqa: E501  # NVIDIA/nccl-tests, src/util.cu; 389


@pytest.mark.parametrize(
    ("text", "busbw", "wrong", "largest"),
    [
        (output(), 475.1, 0, 8589934592),
        (OLD, 11.265, 0, 134217728),
        (ERROR_COLUMN, 21.1, 0, 134217728),
        (RCCL, 365.55, 0, 268435456),
        (TAGGED, 5.27, 0, 67108864),
        (PER_ITERATION, 834.865, 1_000_000, 8589934592),
    ],
    ids=["now", "NCCL 1", "error column", "rccl-tests", "tagged", "per iteration"],
)
def test_every_form_of_output_is_read(text: str, busbw: float, wrong: int, largest: int) -> None:
    read = parse(text)
    assert read.finished
    assert read.checked
    assert read.busbw == pytest.approx(busbw)
    assert (read.wrong, read.largest) == (wrong, largest)


def test_the_old_out_of_bounds_line_alone_tells_of_wrong_values() -> None:
    read = parse(ERROR_COLUMN.replace(": 0 OK", ": 248 FAILED"))
    assert read.wrong == 248, "NVIDIA/nccl-tests 7"


def test_the_json_form_is_read_and_a_cut_one_is_an_error() -> None:
    place = {"time": 31662.0, "alg_bw": 271.3, "bus_bw": 475.1, "nwrong": 2.0}
    document = {
        "version": 2,
        "config": {"ngpus": 8, "devices": [{"rank": 0, "device_info": "NVIDIA H200"}]},
        "results": [
            {"size": 1 << 33, "out_of_place": place, "in_place": {**place, "nwrong": None}}
        ],
        "out_of_bounds": {"count": 1, "okay": "false"},
        "average_bus_bandwidth": {"bandwidth": 475.1, "okay": "unchecked"},
        "errors": [""],
    }
    text = json.dumps(document)
    read = parse(text)
    assert read.finished
    assert read.wrong == 2
    assert read.busbw == pytest.approx(475.1)
    assert read.devices == ("NVIDIA H200",)
    for length in range(1, len(text), 7):
        cut = parse(text[:length])
        assert not cut.finished
        assert cut.errors
    assert not parse('{"results": [7], "out_of_bounds": []}').finished


def test_noise_between_and_within_the_lines_is_passed_over() -> None:
    noise = "8 more processes have sent help message help-mtl-ofi.txt\n"
    broken = ROW.format(1.0, 0, 1.0).replace("271.30", "n1:1:2 [0] NCCL INFO")
    read = parse(output().replace("# Out of", noise + broken + "\0\xff\n# Out of"))
    assert read.finished
    assert read.busbw == pytest.approx(475.1)


def test_every_code_has_an_entry() -> None:
    for code in load_probe("nccl").codes:
        assert entry(code).code == code


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _configure(node: Node, bench: Bench, deadline: float) -> None:
    node.configure(
        f'[probes.nccl]\nhooks = ["epilog"]\nlibrary = "{bench.library}"\n'
        f'all_reduce_perf = "{bench.program}"\ndeadline = {deadline}\n'
        "[probes.nvml]\nhooks = []\nexpect_gpus = 8\n"
    )


def _whole_node() -> dict[str, str]:
    return {**job(exit_code="1:0"), "SLURM_JOB_GPUS": "0-7"}


def _wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)
