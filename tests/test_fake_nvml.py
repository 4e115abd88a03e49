"""The fake GPUs answer the real pynvml as their state file says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from recovery.demo import fake_nvml


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_nvml.build(tmp_path_factory.mktemp("nvml"))


def ask(
    library: Path, state: Path, program: str, timeout: float = 20
) -> subprocess.CompletedProcess[str]:
    """Run ``program`` (with ``pynvml`` and ``answer`` at hand) under the fake GPUs."""
    source = "import json, pynvml\ndef answer(value): print(json.dumps(value), flush=True)\n"
    return subprocess.run(
        [sys.executable, "-c", source + program],
        env={**os.environ, **fake_nvml.environment(library, state)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def answer(library: Path, folder: Path, state: Mapping[str, Any], expression: str) -> Any:
    """Return what ``expression`` is for the node of ``state``, or the NVML code it raised."""
    path = folder / "state.json"
    fake_nvml.write_state(path, state)
    program = (
        "try:\n"
        "    pynvml.nvmlInit()\n"
        "    gpu = pynvml.nvmlDeviceGetHandleByIndex\n"
        f"    answer({expression})\n"
        "except pynvml.NVMLError as error: answer({'code': error.value})\n"
    )
    done = ask(library, path, program)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_healthy_node_has_the_gpus_that_its_state_counts(library: Path, tmp_path: Path) -> None:
    seen = answer(
        library,
        tmp_path,
        {"count": 4},
        "[(pynvml.nvmlDeviceGetMinorNumber(gpu(i)), pynvml.nvmlDeviceGetName(gpu(i)),"
        " pynvml.nvmlDeviceGetPciInfo(gpu(i)).busId)"
        " for i in range(pynvml.nvmlDeviceGetCount())]",
    )
    assert [minor for minor, _, _ in seen] == [0, 1, 2, 3]
    assert seen[3][1:] == ["NVIDIA H100 80GB HBM3", "00000000:3B:00.0"]


def test_without_a_state_file_no_driver_is_loaded(library: Path, tmp_path: Path) -> None:
    done = ask(library, tmp_path / "none", "pynvml.nvmlInit()")
    assert "NVMLError_DriverNotLoaded: Driver Not Loaded" in done.stderr


@pytest.mark.parametrize("text", ["", "{", "[1, {]", '{"gpus": ', "\x00\xff", "{" * 100_000])
def test_a_broken_state_file_is_an_unknown_error(library: Path, tmp_path: Path, text: str) -> None:
    state = tmp_path / "state.json"
    state.write_text(text, encoding="latin-1")
    assert "NVMLError_Unknown" in ask(library, state, "pynvml.nvmlInit()").stderr


@pytest.mark.parametrize(
    ("setting", "expression", "expected"),
    [
        ({"lost": True}, "pynvml.nvmlDeviceGetName(gpu(3))", {"code": 15}),
        ({"reset_required": True}, "pynvml.nvmlDeviceGetName(gpu(3))", {"code": 16}),
        ({"error": 999}, "pynvml.nvmlDeviceGetName(gpu(3))", {"code": 999}),
        ({"absent": True}, "pynvml.nvmlDeviceGetCount()", 7),
        ({"ecc_uncorrectable": 2}, "pynvml.nvmlDeviceGetTotalEccErrors(gpu(3), 1, 0)", 2),
        ({"sram_uncorrectable": 2}, "pynvml.nvmlDeviceGetMemoryErrorCounter(gpu(3), 1, 0, 7)", 2),
        ({"remap_pending": True}, "pynvml.nvmlDeviceGetRemappedRows(gpu(3))", [0, 0, 1, 0]),
        ({"remap_failed": True}, "pynvml.nvmlDeviceGetRemappedRows(gpu(3))", [0, 0, 0, 1]),
        ({"retired_pending": 1}, "pynvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu(3))", 1),
        ({}, "pynvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu(3))", {"code": 3}),
        ({"retired_dbe": 3}, "len(pynvml.nvmlDeviceGetRetiredPages(gpu(3), 1))", 3),
        ({"thermal": True}, "pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu(3))", 0x48),
        ({"power_brake": True}, "pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu(3))", 0x88),
        (
            {"nvlink_down": [4]},
            "[pynvml.nvmlDeviceGetNvLinkState(gpu(3), n) for n in (4, 5)]",
            [0, 1],
        ),
        (
            {"nvlink_errors": {"4": {"crc": 9}}},
            "[f.value.ullVal for f in"
            " pynvml.nvmlDeviceGetFieldValues(gpu(3), [(163, 4), (163, 5), 91])]",
            [9, 0, 18],
        ),
        (
            {"fields": {"230": 4, "307": 1}},
            "[f.value.ullVal for f in pynvml.nvmlDeviceGetFieldValues(gpu(3), [230, 307])]",
            [4, 1],
        ),
        (
            {"fields_not_supported": [230]},
            "[f.nvmlReturn for f in pynvml.nvmlDeviceGetFieldValues(gpu(3), [230, 91])]",
            [3, 0],
        ),
        (
            {"errors": {"nvmlDeviceGetEccMode": 999}},
            "pynvml.nvmlDeviceGetEccMode(gpu(3))",
            {"code": 999},
        ),
        ({"not_supported": ["nvmlDeviceGetName"]}, "pynvml.nvmlDeviceGetName(gpu(3))", {"code": 3}),
    ],
)
def test_a_setting_of_one_gpu_is_what_nvml_says_of_it(
    library: Path, tmp_path: Path, setting: Mapping[str, Any], expression: str, expected: Any
) -> None:
    state = {"count": 8, "gpus": {"3": setting}}
    assert answer(library, tmp_path, state, expression) == expected
    other = answer(library, tmp_path, state, expression.replace("gpu(3)", "gpu(2)"))
    assert other != expected or "gpu(3)" not in expression or not setting


def test_index_order_and_minor_numbers_may_differ(library: Path, tmp_path: Path) -> None:
    state = {"count": 4, "minor_order": [2, 3, 0, 1], "gpus": {"3": {"lost": True}}}
    minors = "[pynvml.nvmlDeviceGetMinorNumber(gpu(i)) for i in (0, 2, 3)]"
    assert answer(library, tmp_path, state, minors) == [2, 0, 1]
    assert answer(library, tmp_path, state, "gpu(1)") == {"code": 15}


def test_a_fault_can_be_put_on_a_gpu_under_a_running_program(library: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    fake_nvml.write_state(state, {"count": 1})
    program = (
        "pynvml.nvmlInit(); gpu = pynvml.nvmlDeviceGetHandleByIndex(0)\n"
        "answer(pynvml.nvmlDeviceGetName(gpu)); input()\n"
        "try: pynvml.nvmlDeviceGetName(gpu)\n"
        "except pynvml.NVMLError as error: answer(error.value)\n"
    )
    source = "import json, pynvml\ndef answer(value): print(json.dumps(value), flush=True)\n"
    with subprocess.Popen(
        [sys.executable, "-c", source + program],
        env={**os.environ, **fake_nvml.environment(library, state)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as rank:
        assert rank.stdin and rank.stdout
        assert "H100" in rank.stdout.readline()
        fake_nvml.write_state(state, {"count": 1, "gpus": {"0": {"lost": True}}})
        rank.stdin.write("\n")
        rank.stdin.flush()
        assert rank.stdout.readline() == "15\n"


@pytest.mark.parametrize(
    "state", [{"hang_seconds": 0.4}, {"gpus": {"0": {"hang_seconds": 0.4}}}], ids=["node", "gpu"]
)
def test_a_hang_lasts_as_long_as_the_state_says(
    library: Path, tmp_path: Path, state: Mapping[str, Any]
) -> None:
    started = time.monotonic()
    assert answer(library, tmp_path, state, "gpu(0) and 1") == 1
    assert time.monotonic() - started >= 0.4


def test_a_crash_is_a_segmentation_fault(library: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    fake_nvml.write_state(state, {"crash": True})
    assert ask(library, state, "pynvml.nvmlInit()").returncode == -signal.SIGSEGV


def test_a_mismatched_driver_refuses_to_start(library: Path, tmp_path: Path) -> None:
    assert answer(library, tmp_path, {"driver_mismatch": True}, "1") == {"code": 18}


def test_several_builds_at_once_all_get_a_whole_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with ThreadPoolExecutor(3) as pool:
        built = list(pool.map(fake_nvml.build, [tmp_path / "same", tmp_path / "same", tmp_path]))
    sizes = {path.stat().st_size for path in built}
    assert len(sizes) == 1
    assert not list(tmp_path.rglob(".build-*"))


def test_a_second_build_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fake_nvml.build(tmp_path / "first")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert fake_nvml.build(tmp_path / "second").is_file()


def test_without_a_compiler_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(fake_nvml.BuildError, match=r"^no C compiler.*apt-get install gcc\)$"):
        fake_nvml.build(tmp_path)
