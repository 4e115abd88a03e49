"""What is promised of kernel lines: every form is read, no forged or mild one is blamed."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_hooks import catalog
from slurm_hooks.catalog import kernel_lines, xid
from slurm_hooks.catalog.kernel_lines import parse_kernel_lines
from slurm_hooks.catalog.kernel_prefix import undress
from slurm_hooks.probes.kernel_log import CODES
from slurm_hooks.record import Finding

PREFIXES = (
    "",
    "[1206331.402911] ",
    "[    0.402911] [ T1234] ",
    "<4>[12.000001] ",
    "kern  :err   : [  12.000001] ",
    "[Wed Dec  2 05:31:37 2026] ",
    "2026-12-02T05:31:37,123456+00:00 ",
    "Dec  2 05:31:37 gpu-a01 kernel: ",
    "Dec  2 05:31:37 gpu-a01 kernel: [ 1234.567890] ",
    "2026-12-02T05:31:37.123456+01:00 gpu-a01 kernel: [ 1234.567890] ",
    "Wed 2026-12-02 05:31:37 UTC gpu-a01 kernel: ",
    "[ 1234.567890] gpu-a01 kernel: ",
)
OWNERS = ("", "pid=1234, name=python3, ", "pid='<unknown>', name=<unknown>, ", "pid=1, name=a b, ")
ADDRESSES = ("PCI:0000:3b:00", "PCI:0000:3b:00.0", "0000:3b:00", "PCI:0000:3B:00")


def one(*lines: str) -> Finding:
    (finding,) = parse_kernel_lines(lines)
    return finding


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("address", ADDRESSES)
def test_an_xid_is_read_in_every_form(prefix: str, owner: str, address: str) -> None:
    finding = one(f"{prefix}NVRM: Xid ({address}): 79, {owner}GPU has fallen off the bus.")
    assert (finding.code, finding.pci, finding.severity) == (
        "gpu.fell_off_bus",
        "0000:3b:00.0",
        "fatal",
    )


@pytest.mark.parametrize(
    "lines",
    [
        ["NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus."],
        [
            "NVRM: The NVIDIA GPU 0000:b3:00.0",
            "NVRM: (PCI ID: 10de:2330) installed in this system has",
            "NVRM: fallen off the bus and is not responding to commands.",
        ],
    ],
)
def test_a_gpu_that_is_gone_is_seen_without_an_xid(lines: list[str]) -> None:
    assert (one(*lines).code, one(*lines).pci) == ("gpu.fell_off_bus", "0000:b3:00.0")


def test_what_the_driver_says_in_several_lines_is_one_fact() -> None:
    lines = [
        "NVRM: GPU at PCI:0000:9c:00: GPU-3f0f2a11-7d0e-0d3e-9a3c-5f2b6a1c7e10",
        "NVRM: Xid (PCI:0000:9c:00): 79, GPU has fallen off the bus.",
        "NVRM: GPU 0000:9c:00.0: GPU has fallen off the bus.",
        "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
    ]
    finding = one(*lines)
    assert (finding.count, finding.uuid) == (1, "GPU-3f0f2a11-7d0e-0d3e-9a3c-5f2b6a1c7e10")
    assert [item.text for item in finding.evidence] == lines[1:]


XIDS = """\
gpu.nvlink_nonfatal    warning  145, RLW_SRC_TRACK Nonfatal XC0 i0 Link 04 (0x4 0x1 0x0)
gpu.nvlink_error       fatal    149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 08 (0x004505c6 0x0)
gpu.nvlink_peer_error fault 149, pid=1, name=x, NETIR_LINK_EVT Fatal XC0 i0 Link -1 (0x020005c6 0x0)
gpu.xid_unknown        warning  149, words of a driver to come
gpu.xid_unknown        warning  9999, words of a driver to come
gpu.application_fault  warning  13, pid=1, name=x, Graphics Exception
gpu.hardware_suspect   warning  31, pid=1, name=x, MMU Fault: ENGINE HOST UNRECOGNIZED_CLIENT
gpu.xid_cascade        info     45, pid=1, name=x, Ch 1
gpu.xid_cascade        info     45, pid=1, name=x, Ch 1 caused by previous Xid 149
gpu.row_remap_failed   fatal    64, Row Remapper Error
gpu.gsp_timeout        fatal    119, pid=1, name=x, Timeout after 6s of waiting for RPC response
gpu.recovery_action fatal 154, recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)
gpu.recovery_action    fault    154, GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)
gpu.recovery_action fault 154, GPU recovery action changed from 0x0 (None) to 0x9 (Words To Come)
"""


@pytest.mark.parametrize("row", XIDS.splitlines())
def test_an_xid_becomes_what_policy_asks(row: str) -> None:
    code, severity, line = row.split(maxsplit=2)
    finding = one(f"NVRM: Xid (PCI:0018:01:00): {line}")
    assert (finding.code, finding.severity) == (code, severity)


def test_a_recovery_action_of_none_is_nothing() -> None:
    line = "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x1 (X) to 0x0 (None)"
    assert parse_kernel_lines([line]) == []


def test_the_drivers_own_advice_overrides_the_table() -> None:
    lost, advice = parse_kernel_lines(
        [
            "NVRM: Xid (PCI:0000:01:00): 119, Timeout waiting for RPC from GSP!",
            "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) "
            "to 0x2 (Node Reboot Required)",
        ]
    )
    assert (lost.resolution, advice.resolution) == ("reset_node", "reset_node")


def test_a_contained_memory_error_is_not_told_as_a_grave_one() -> None:
    contained = ["48, DBE", "94, pid=1, name=x, Contained: SM (0x1)", "171, DRAM"]
    lines = [f"NVRM: Xid (PCI:0000:01:00): {line}" for line in contained]
    assert [one.code for one in parse_kernel_lines(lines)] == ["gpu.ecc_contained"]
    worse = parse_kernel_lines([*lines, "NVRM: Xid (PCI:0000:01:00): 95, Uncontained"])
    assert "gpu.ecc_double_bit" in [one.code for one in worse]
    assert "gpu.ecc_uncontained" in [one.code for one in worse]


def test_one_event_does_not_cancel_its_opposite() -> None:
    lines = [f"NVRM: Xid (PCI:0000:01:00): {number}, PSHC" for number in (163, 162)]
    summaries = [one.summary for one in parse_kernel_lines(lines)]
    assert [summary[-9:] for summary in summaries] == ["(Xid 163)", "(Xid 162)"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("20034, Fatal, Link 63 LTSSM Fault Up", "nvswitch.fatal_error"),
        ("20034, Non-fatal, Link 63 LTSSM Fault Up", "nvswitch.nonfatal_error"),
        ("20034, Link 63 LTSSM Fault Up", "nvswitch.nonfatal_error"),
        ("23001, ingress overflow", "nvswitch.fatal_error"),
    ],
)
def test_a_switchs_own_word_decides(line: str, code: str) -> None:
    assert one(f"nvidia-nvswitch0: SXid (PCI:0000:05:00.0): {line}").code == code


def test_continuation_lines_of_a_switch_are_no_events() -> None:
    before = "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, "
    assert one(
        f"{before}Fatal, Link 63 LTSSM Fault Up",
        f"{before}Severity 1 Engine instance 63 Sub-engine instance 00",
        f"{before}Data {{0x00000000, 0x80000000}}",
    ).count == 1  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "Dec  2 05:31:37 n1 ann: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
        "Dec  2 05:31:37 n1 ann[12]: kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU is gone",
        "x NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
        "traps: NVRM: Xid[12] general protection fault",
    ],
)
def test_text_that_a_user_can_log_is_no_driver_line(line: str) -> None:
    assert parse_kernel_lines([line]) == []


OOM = (
    "oom-kill:constraint={},nodemask=(null),cpuset=/,mems_allowed=0-1,{}task_memcg={},"
    "task=python,pid=  123,uid= 1000"
)
JOB_V1 = "/slurm/uid_1000/job_12"
JOB_V2 = "/system.slice/slurmstepd.scope/job_12"
MADE_UP = f"{JOB_V2}/step_0/user/slurm/job_99"
"""A job can make folders below its own."""


@pytest.mark.parametrize(
    ("limit", "victim", "code", "job"),
    [
        (f"oom_memcg={JOB_V1}", f"{JOB_V1}/step_0", "job.out_of_memory", 12),
        (f"oom_memcg={JOB_V2}/step_0", f"{JOB_V2}/step_0/user/task_0", "job.out_of_memory", 12),
        (f"oom_memcg={MADE_UP}", MADE_UP, "job.out_of_memory", 12),
        ("global_oom", f"{JOB_V2}/step_0", "host.out_of_memory", None),
        ("oom_memcg=/system.slice", f"{JOB_V2}/step_0", "host.out_of_memory", None),
        ("oom_memcg=/docker/1", "/docker/1/job_12", "host.cgroup_out_of_memory", None),
    ],
)
def test_an_out_of_memory_kill_is_its_jobs_or_the_nodes(
    limit: str, victim: str, code: str, job: int | None
) -> None:
    line = OOM.format("CONSTRAINT_X", f"{limit},", victim)
    assert (one(line).code, one(line).job_id) == (code, job)


def test_an_out_of_memory_kill_without_its_cgroup_blames_no_job() -> None:
    kill = "ut of memory: Killed process 7 (python) total-vm:1kB"
    assert one(f"O{kill}").code == "host.out_of_memory"
    assert one(f"Memory cgroup o{kill}").code == "host.cgroup_out_of_memory"


def test_one_kill_is_counted_once() -> None:
    kill = "Memory cgroup out of memory: Killed process 123 (python) total-vm:9kB"
    limit = OOM.format("CONSTRAINT_MEMCG", f"oom_memcg={JOB_V2},", f"{JOB_V2}/step_0")
    assert (one(limit, kill).count, len(one(limit, kill).evidence)) == (1, 2)
    older = "Task in /slurm/uid_0/job_7/step_0 killed as a result of limit of /slurm/uid_0/job_7"
    old_kill = "Memory cgroup out of memory: Kill process 9 (python) score 999 or sacrifice child"
    assert (one(older, old_kill).code, one(older, old_kill).job_id) == ("job.out_of_memory", 7)


OTHERS = """\
host.pcie_corrected pcieport 0000:00:01.0: PCIe Bus Error: severity=Corrected, type=Physical Layer
host.pcie_fatal x 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer
host.pcie_nonfatal nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrectable (Non-Fatal), type=x
host.machine_check       mce: [Hardware Error]: CPU 2: Machine Check: 0 Bank 5: be00000000800400
host.error_corrected     mce: [Hardware Error]: CPU 2: Machine Check: 0 Bank 7: 8c00004000010091
host.memory_error        EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0
host.error_corrected     EDAC MC3: 8 CE memory read error on CPU_SrcID#0
host.memory_error        Memory failure: 0x12345: recovery action for dirty LRU page: Recovered
gpu.init_failed          NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x26:0x65:1474)
gpu.driver_assertion     NVRM: nvAssertFailedNoLog: Assertion failed: pGpu != NULL @ gpu.c:12
gpu.api_mismatch         NVRM: API mismatch: the client has the version 570.1, but
gpu.reset_wanted NVRM: knvlinkUpdatePostRxDetectLinkMask_IMPL: Failed! [NV_ERR_RESET_REQUIRED]
host.hung_task           INFO: task python3:4711 blocked for more than 120 seconds.
host.cpu_stuck           watchdog: BUG: soft lockup - CPU#12 stuck for 22s! [python:123]
host.cpu_stuck           rcu: INFO: rcu_preempt self-detected stall on CPU
host.kernel_oops         BUG: unable to handle page fault for address: ffff
storage.filesystem_error EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2
storage.filesystem_error EXT4-fs (sda1): Remounting filesystem read-only
storage.filesystem_error XFS (nvme0n1p1): Filesystem has been shut down due to log error (0x2).
storage.disk_error       I/O error, dev nvme0n1, sector 12345 op 0x0:(READ)
storage.disk_error       nvme nvme0: I/O 12 QID 3 timeout, aborting
storage.disk_error       nvme nvme0: I/O tag 12 (0x000c) opcode 0x2 QID 3 timeout, reset controller
storage.server_silent    nfs: server filer1 not responding, still trying
storage.server_silent Lustre: 1:0:(client.c:1) fs: Connection to OST1 (at 10.0.0.1) was lost
fabric.link_down         mlx5_core 0000:05:00.0 ens1f0np0: Link down
fabric.link_down         e1000e 0000:00:1f.6 eno1: NIC Link is Down
fabric.nic_failed mlx5_core 0000:05:00.0: poll_health:861:(pid 0): device's health compromised
fabric.cable_fault mlx5_core 0000:05:00.0: Port module event[error]: module 0, Cable error,
fabric.nic_slow_slot mlx5_core 0000:05:00.0: 63.008 Gb/s available PCIe bandwidth, limited by 8
kernel_log.lost          net_ratelimit: 12 callbacks suppressed
-                        usb 1-1: new high-speed USB device number 2 using xhci_hcd
- EXT4-fs (sda1): mounted filesystem with ordered data mode. Opts: errors=remount-ro
"""


@pytest.mark.parametrize("row", OTHERS.splitlines())
def test_other_kernel_lines_have_their_codes(row: str) -> None:
    code, line = row.split(maxsplit=1)
    found = [finding.code for finding in parse_kernel_lines([line])]
    assert found == ([code] if code != "-" else [])


def test_a_task_that_hangs_inside_the_driver_is_told_apart() -> None:
    lines = [
        "INFO: task python3:4711 blocked for more than 120 seconds.",
        "Call Trace:",
        " ? nvidia_unlocked_ioctl+0x1a/0x40 [nvidia]",
    ]
    assert one(*lines).code == "gpu.driver_stuck"


def test_repeated_lines_fold_and_a_gpus_minor_number_is_named() -> None:
    line = "NVRM: Xid (PCI:0000:01:00): 119, Timeout waiting for RPC from GSP!"
    (finding,) = parse_kernel_lines([line] * 1000, {"0000:01:00.0": 3})
    assert (finding.count, len(finding.evidence), finding.gpu) == (1000, 3, 3)
    assert finding.summary.startswith("GPU 3:")


def test_a_flood_of_different_events_keeps_the_gravest() -> None:
    lines = [f"NVRM: Xid (PCI:0000:01:00): 31, pid={pid}, name=x, MMU" for pid in range(500)]
    findings = parse_kernel_lines([*lines, "NVRM: Xid (PCI:0000:01:00): 79, gone"])
    assert len(findings) == 61
    assert findings[0].code == "gpu.fell_off_bus"
    assert findings[-1].code == "kernel_log.more"


def test_every_code_has_its_entry_and_every_entry_its_lines() -> None:
    assert {entry.code for entry in xid.xids().values()} <= set(CODES)
    assert set(CODES) <= set(catalog.entries())
    with (Path(kernel_lines.__file__).parent / "xid.csv").open(newline="") as source:
        for row in csv.DictReader(source):
            line = f"NVRM: Xid (PCI:0000:01:00): {row['xid']}, pid=1, name=x, words"
            assert len(parse_kernel_lines([line])) == 1, row["xid"]


@given(st.text())
def test_no_text_breaks_the_parsers(text: str) -> None:
    xid.decode_xid(text)
    xid.decode_sxid(text)
    parse_kernel_lines([text, undress(text).text])


@given(
    st.sampled_from(PREFIXES),
    st.integers(0, 999_999),
    st.text(max_size=200),
    st.sampled_from(OWNERS),
)
def test_an_xid_line_is_never_silent(prefix: str, number: int, words: str, owner: str) -> None:
    line = f"{prefix}NVRM: Xid (PCI:0000:01:00): {number}, {owner}{words}"
    event = xid.decode_xid(line)
    assert event is not None
    assert (event.xid, event.pci) == (number, "0000:01:00.0")
    findings = parse_kernel_lines([line])
    assert number == 154 or findings
    for finding in findings:
        assert Finding.from_dict(json.loads(json.dumps(finding.to_dict()))) == finding
