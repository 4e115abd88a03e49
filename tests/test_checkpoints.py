"""What `slurm-hooks verify-checkpoint` promises, on files made by the real libraries.

``data/checkpoints/make.py`` made the samples; here they are truncated, flipped, emptied and copied
half, as failures leave them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from slurm_hooks import verify_checkpoint

SAMPLES = Path(__file__).parent / "data/checkpoints"
SCHEMA = json.loads(
    (Path(verify_checkpoint.__file__).parent / "schemas/checkpoint-verdict-v1.json").read_text()
)
LONG_AGO = 1_700_000_000


def verify(path: Path, *options: str) -> dict[str, Any]:
    """Run the command as a user does; return its document, which fits the schema."""
    result = CliRunner().invoke(verify_checkpoint.command, [str(path), "--json", *options])
    document: dict[str, Any] = json.loads(result.output)
    jsonschema.validate(document, SCHEMA)
    assert result.exit_code == (0 if document["status"] == "complete" else 1)
    return document


def put(source: str | Path, target: Path) -> Path:
    """Copy a sample to ``target`` with a time long past, so that nobody waits for it to settle."""
    source = SAMPLES / source
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
    return settle(target)


def settle(path: Path) -> Path:
    for item in [path, *path.rglob("*")] if path.is_dir() else [path]:
        os.utime(item, (LONG_AGO, LONG_AGO))
    return path


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return settle(path)


def truncate(path: Path, share: float = 0.5) -> None:
    os.truncate(path, int(path.stat().st_size * share))
    settle(path)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    write(path, bytes(content))


def place_of_tensor(path: Path) -> int:
    """Return where the data of the first tensor begin in a torch.save archive."""
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data/0"))
        start = archive.getinfo(name).header_offset
    lengths = path.read_bytes()[start + 26 : start + 30]
    name_bytes, extra_bytes = struct.unpack("<2H", lengths)
    return start + 30 + int(name_bytes) + int(extra_bytes)


def document_with_digest(step: int) -> bytes:
    document: dict[str, Any] = {"step": step, "weights": [1.5, 2.5]}
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    return json.dumps({**document, "sha256": digest}).encode()


def megatron(top: Path, *iterations: int, tracked: int) -> Path:
    for iteration in iterations:
        for rank in range(2):
            folder = f"iter_{iteration:07}/mp_rank_{rank:02}"
            put("megatron_rank.pt", top / folder / "model_optim_rng.pt")
    write(top / "latest_checkpointed_iteration.txt", str(tracked).encode())
    return top


def deepspeed(top: Path, *steps: int, latest: int) -> Path:
    for step in steps:
        folder = top / f"global_step{step}"
        put("deepspeed_model_states.pt", folder / "mp_rank_00_model_states.pt")
        for rank in range(2):
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            put("deepspeed_optim_states.pt", folder / name)
    write(top / "latest", f"global_step{latest}".encode())
    return top


def huggingface(top: Path, *steps: int) -> Path:
    for step in steps:
        folder = put("sharded", top / f"checkpoint-{step}")
        put("zip.pt", folder / "optimizer.pt")
        put("zip.pt", folder / "rng_state.pth")
        write(folder / "trainer_state.json", json.dumps({"global_step": step}).encode())
    return top


def orbax(top: Path) -> Path:
    return put("orbax", top)


def manifests(top: Path, *steps: int) -> Path:
    for step in steps:
        content = b"weights" * step
        about = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        folder = top / f"step_{step}"
        write(folder / "weights.bin", content)
        manifest = {"step": step, "files": {"weights.bin": about}}
        write(folder / "manifest.json", json.dumps(manifest).encode())
    return top


@pytest.mark.parametrize(
    ("sample", "kind", "step"),
    [
        ("zip.pt", "pytorch", 1200),
        ("legacy.pt", "pytorch", 1200),
        ("lightning.ckpt", "lightning", 1200),
        ("model.safetensors", "safetensors", None),
        ("sharded", "safetensors", None),
        ("dcp", "distcp", None),
        ("orbax", "orbax", 200),
    ],
)
@pytest.mark.parametrize("deep", [(), ("--deep",)])
def test_what_the_real_libraries_wrote_is_complete(
    tmp_path: Path, sample: str, kind: str, step: int | None, deep: tuple[str, ...]
) -> None:
    found = verify(put(sample, tmp_path / sample), *deep)
    assert (found["status"], found["newest"]["format"], found["step"]) == ("complete", kind, step)


@pytest.mark.parametrize("sample", ["zip.pt", "legacy.pt", "lightning.ckpt", "model.safetensors"])
def test_a_file_cut_off_anywhere_is_never_complete(tmp_path: Path, sample: str) -> None:
    path = put(sample, tmp_path / sample)
    whole = path.read_bytes()
    for length in {0, 1, 4, 8, len(whole) // 3, len(whole) // 2, len(whole) - 30, len(whole) - 1}:
        write(path, whole[:length])
        found = verify(path)
        assert found["status"] == "broken", (length, found)
        assert found["passed_over"][0]["why"]


@pytest.mark.parametrize("sample", ["zip.pt", "lightning.ckpt", "megatron_rank.pt"])
def test_a_flipped_bit_in_the_data_is_found_by_a_deep_look(tmp_path: Path, sample: str) -> None:
    path = put(sample, tmp_path / sample)
    flip(path, place_of_tensor(path))
    assert verify(path)["status"] == "complete"  # a hook reads no terabytes
    found = verify(path, "--deep")
    assert found["status"] == "broken"
    assert "CRC" in found["passed_over"][0]["why"]


def test_a_flipped_bit_in_a_distributed_shard_is_found_by_a_deep_look(tmp_path: Path) -> None:
    folder = put("dcp", tmp_path / "dcp")
    shard = folder / "__0_0.distcp"
    flip(shard, shard.read_bytes().index(b"data/0") + 70)
    assert verify(folder, "--deep")["status"] == "broken"


def test_zeros_where_a_copy_never_arrived_are_not_a_checkpoint(tmp_path: Path) -> None:
    path = put("zip.pt", tmp_path / "step_5.pt")
    size = path.stat().st_size
    write(path, bytes(size))
    assert verify(path)["status"] == "broken"


def test_a_hole_makes_a_file_unverified_and_not_broken(tmp_path: Path) -> None:
    content = (SAMPLES / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    big = 1 << 20
    header = {"w": {"dtype": "F32", "shape": [big // 4], "data_offsets": [0, big]}}
    raw = json.dumps(header).encode()
    path = write(tmp_path / "m.safetensors", len(raw).to_bytes(8, "little") + raw)
    os.truncate(path, 8 + len(raw) + big)
    assert verify(settle(path))["status"] == "unverified"


def test_the_checkpoint_before_a_truncated_one_is_found(tmp_path: Path) -> None:
    put("zip.pt", tmp_path / "step_100.pt")
    newest = put("zip.pt", tmp_path / "step_200.pt")
    truncate(newest)
    found = verify(tmp_path)
    assert (found["step"], found["newest"]["path"]) == (100, str(tmp_path / "step_100.pt"))
    assert [item["step"] for item in found["passed_over"]] == [200]
    assert "cut off" in found["passed_over"][0]["why"]


def test_the_step_decides_where_names_tell_it_whatever_the_times(tmp_path: Path) -> None:
    put("zip.pt", tmp_path / "step_9.pt")
    put("zip.pt", tmp_path / "step_10.pt")
    os.utime(tmp_path / "step_9.pt", (LONG_AGO + 99, LONG_AGO + 99))
    assert verify(tmp_path)["step"] == 10


Damage = Callable[[Path], None]


def _missing(name: str) -> Damage:
    def damage(top: Path) -> None:
        path = top / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def _short(name: str) -> Damage:
    return lambda top: truncate(top / name)


def _empty(name: str) -> Damage:
    return lambda top: truncate(top / name, 0)


def _holding(name: str, text: str) -> Damage:
    return lambda top: (write(top / name, text.encode()), None)[1]


TREES: dict[str, Callable[[Path], Path]] = {
    "megatron": lambda top: megatron(top, 100, 200, tracked=200),
    "deepspeed": lambda top: deepspeed(top, 100, 200, latest=200),
    "huggingface": lambda top: huggingface(top, 100, 200),
    "orbax": orbax,
    "manifest": lambda top: manifests(top, 100, 200),
}

SHARD = "global_step200/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
DAMAGES: list[tuple[str, Damage, str]] = [
    ("megatron", _missing("iter_0000200/mp_rank_01"), "broken"),
    ("megatron", _missing("iter_0000200/mp_rank_00/model_optim_rng.pt"), "broken"),
    ("megatron", _short("iter_0000200/mp_rank_01/model_optim_rng.pt"), "broken"),
    ("megatron", _holding("latest_checkpointed_iteration.txt", "100"), "writing"),
    ("deepspeed", _missing(SHARD), "broken"),
    ("deepspeed", _short(SHARD), "broken"),
    ("deepspeed", _empty("global_step200/mp_rank_00_model_states.pt"), "broken"),
    ("deepspeed", _holding("latest", "global_step100"), "writing"),
    ("huggingface", _missing("checkpoint-200/trainer_state.json"), "writing"),
    ("huggingface", _short("checkpoint-200/trainer_state.json"), "broken"),
    ("huggingface", _missing("checkpoint-200/model-00002-of-00002.safetensors"), "broken"),
    ("huggingface", _short("checkpoint-200/model-00001-of-00002.safetensors"), "broken"),
    ("huggingface", _empty("checkpoint-200/optimizer.pt"), "broken"),
    ("orbax", _missing("200/commit_success.txt"), "writing"),
    ("orbax", _short("200/_CHECKPOINT_METADATA"), "broken"),
    ("orbax", _short("200/default/manifest.ocdbt"), "broken"),
    ("orbax", _missing("200/default"), "broken"),
    ("manifest", _missing("step_200/weights.bin"), "broken"),
    ("manifest", _short("step_200/weights.bin"), "broken"),
    ("manifest", _short("step_200/manifest.json"), "broken"),
    ("manifest", lambda top: flip(top / "step_200/weights.bin", 7), "broken"),
]


@pytest.mark.parametrize("kind", TREES)
def test_the_newest_of_each_trainers_folders_is_found(tmp_path: Path, kind: str) -> None:
    found = verify(TREES[kind](tmp_path / "run"))
    assert (found["status"], found["step"], found["newest"]["format"]) == ("complete", 200, kind)
    assert found["passed_over"] == []


@pytest.mark.parametrize("place", range(len(DAMAGES)))
def test_a_damaged_newest_one_is_passed_over(tmp_path: Path, place: int) -> None:
    kind, damage, state = DAMAGES[place]
    top = TREES[kind](tmp_path / "run")
    damage(top)
    found = verify(top)
    assert (found["status"], found["step"]) == ("complete", 100), found
    assert [(item["step"], item["state"]) for item in found["passed_over"]] == [(200, state)]


def test_one_step_given_by_its_own_path_is_judged_by_itself(tmp_path: Path) -> None:
    assert verify(megatron(tmp_path / "m", 100, tracked=100) / "iter_0000100")["step"] == 100
    assert verify(deepspeed(tmp_path / "d", 100, latest=100) / "global_step100")["step"] == 100
    assert verify(huggingface(tmp_path / "h", 100) / "checkpoint-100")["step"] == 100
    assert verify(orbax(tmp_path / "o") / "200")["step"] == 200


def test_megatrons_distributed_checkpoints_need_every_shard(tmp_path: Path) -> None:
    for iteration in (100, 200):
        folder = put("dcp", tmp_path / f"iter_{iteration:07}")
        put("megatron_rank.pt", folder / "common.pt")
        write(folder / "metadata.json", b'{"sharded_backend": "torch_dist"}')
    write(tmp_path / "latest_checkpointed_iteration.txt", b"200")
    assert verify(tmp_path)["step"] == 200
    truncate(tmp_path / "iter_0000200/__0_0.distcp", 0.9)
    assert verify(tmp_path)["step"] == 100


def test_a_trainers_checkpoint_with_deepspeed_in_it_needs_all_its_ranks(tmp_path: Path) -> None:
    for step in (100, 200):
        folder = put("sharded", tmp_path / f"checkpoint-{step}")
        deepspeed(folder, step, latest=step)
        write(folder / "trainer_state.json", json.dumps({"global_step": step}).encode())
    assert verify(tmp_path)["step"] == 200
    (tmp_path / "checkpoint-200" / SHARD).unlink()
    found = verify(tmp_path)
    assert (found["step"], found["passed_over"][0]["state"]) == (100, "broken")


def test_a_lost_last_rank_is_known_by_the_sizes_that_the_others_saved(tmp_path: Path) -> None:
    top = megatron(tmp_path, 100, tracked=100)
    shutil.rmtree(top / "iter_0000100/mp_rank_01")
    assert "rank 1 of 2" in verify(top)["passed_over"][0]["why"]


def test_a_tracker_that_names_nothing_there_is_told(tmp_path: Path) -> None:
    found = verify(megatron(tmp_path, 100, tracked=300))
    assert found["step"] == 100
    assert "not there" in found["passed_over"][0]["why"]


def test_a_distributed_checkpoint_needs_its_metadata_and_every_byte_of_its_shards(
    tmp_path: Path,
) -> None:
    folder = put("dcp", tmp_path / "step_50")
    truncate(folder / "__0_0.distcp", 0.9)
    assert verify(folder)["passed_over"][0]["state"] == "broken"
    (folder / "__0_0.distcp").unlink()
    assert "missing" in verify(folder)["passed_over"][0]["why"]
    again = put("dcp", tmp_path / "step_60")
    (again / ".metadata").unlink()
    assert verify(again)["passed_over"][0]["state"] == "writing"


@pytest.mark.parametrize(
    "name",
    ["step_300.pt.tmp", ".step_300.pt.Ab3dE9", "step_300.tmp.pt", "tmp_step_300.pt"],
)
def test_what_bears_a_temporary_name_is_still_being_written(tmp_path: Path, name: str) -> None:
    put("zip.pt", tmp_path / "step_100.pt")
    put("zip.pt", tmp_path / name)
    found = verify(tmp_path)
    assert found["step"] == 100
    assert [(item["step"], item["state"]) for item in found["passed_over"]] == [(300, "writing")]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("orbax", "300.orbax-checkpoint-tmp-1700000000"),
        ("huggingface", "tmp-checkpoint-300"),
    ],
)
def test_a_folder_with_a_temporary_name_is_still_being_written(
    tmp_path: Path, kind: str, name: str
) -> None:
    top = TREES[kind](tmp_path / "run")
    source = top / ("200" if kind == "orbax" else "checkpoint-200")
    shutil.copytree(source, top / name)
    settle(top)
    found = verify(top)
    assert (found["step"], found["passed_over"][0]["state"]) == (200, "writing")


def test_a_file_that_grows_while_it_is_looked_at_is_still_being_written(tmp_path: Path) -> None:
    path = tmp_path / "step_7.pt"
    path.write_bytes((SAMPLES / "zip.pt").read_bytes())
    done = threading.Event()

    def grow() -> None:
        while not done.wait(0.02):
            os.utime(path)

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        found = verify(path)
    finally:
        done.set()
        writer.join()
    assert found["passed_over"][0]["state"] == "writing"


def test_what_was_written_after_the_failure_does_not_count(tmp_path: Path) -> None:
    put("zip.pt", tmp_path / "step_1.pt")
    late = put("zip.pt", tmp_path / "step_2.pt")
    os.utime(late, (LONG_AGO + 60, LONG_AGO + 60))
    when = time.strftime("%Y-%m-%dT%H:%M:%S+0000", time.gmtime(LONG_AGO + 30))
    found = verify(tmp_path, "--failed-at", when)
    assert (found["step"], found["passed_over"][0]["state"]) == (1, "writing")
    assert verify(tmp_path)["step"] == 2


def test_a_plain_document_with_its_own_sha256_is_checked(tmp_path: Path) -> None:
    write(tmp_path / "step-10.json", document_with_digest(10))
    newest = write(tmp_path / "step-20.json", document_with_digest(20))
    assert verify(tmp_path)["step"] == 20
    assert verify(tmp_path)["newest"]["checked"] == "contents"
    write(newest, newest.read_bytes().replace(b"1.5", b"1.6"))
    assert verify(tmp_path)["step"] == 10
    truncate(newest)
    assert verify(tmp_path)["step"] == 10


def test_a_document_that_only_points_to_a_checkpoint_is_none(tmp_path: Path) -> None:
    write(tmp_path / "step-10.json", document_with_digest(10))
    write(tmp_path / "latest_checkpoint.json", b'{"step": 99}')
    found = verify(tmp_path)
    assert (found["step"], found["passed_over"]) == (10, [])
    assert verify(tmp_path / "latest_checkpoint.json")["status"] == "unverified"


def test_a_file_with_a_sha256_beside_it_is_checked(tmp_path: Path) -> None:
    for step in (10, 20):
        path = write(tmp_path / f"state-step{step}.npz", b"arrays" * step)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        write(tmp_path / f"{path.name}.sha256", f"{digest}  {path.name}\n".encode())
    assert verify(tmp_path)["step"] == 20
    flip(tmp_path / "state-step20.npz", 3)
    found = verify(tmp_path)
    assert (found["step"], found["passed_over"][0]["step"]) == (10, 20)


def test_a_nemo_archive_is_whole_or_not(tmp_path: Path) -> None:
    path = tmp_path / "model-step=40.nemo"
    with tarfile.open(path, "w") as archive:
        archive.add(SAMPLES / "lightning.ckpt", "model_weights.ckpt")
        archive.addfile(tarfile.TarInfo("model_config.yaml"), io.BytesIO(b""))
    settle(path)
    found = verify(path)
    assert (found["status"], found["newest"]["format"]) == ("complete", "nemo")
    for share in (0.05, 0.2, 0.4):
        shutil.copyfile(path, tmp_path / "cut.nemo")
        truncate(tmp_path / "cut.nemo", share)
        assert verify(tmp_path / "cut.nemo")["status"] == "broken", share


class Trap:
    """Unpickling this makes the folder that its argument names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["evil.pt", "evil/.metadata", "evil_step_3.ckpt"])
def test_nothing_is_ever_unpickled(tmp_path: Path, name: str) -> None:
    made = tmp_path / "made"
    path = write(tmp_path / name, pickle.dumps({"step": 3, "trap": Trap(made)}))
    verify(path, "--deep")
    verify(path.parent)
    assert not made.exists()
    pickle.loads(path.read_bytes())
    assert made.exists()  # the trap was a real one


def _doubling() -> bytes:
    return b"\x80\x04)" + b"2\x86" * 200 + b"\x94."


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02" + b"(" * 100_000,
        b"\x80\x04\x8d" + b"\xff" * 8,
        b"\x80\x02\x8b\xff\xff\xff\xff.",
        b"\x80\x04" + b"]" * 5000 + b"a" * 4999 + b".",
        b"\x80\x02R.",
        b"\x80\x02.",
        b"PK\x03\x04" + bytes(200) + b"PK\x05\x06" + b"\xff" * 18,
        b"\xff" * 100,
        _doubling(),
    ],
)
@pytest.mark.parametrize("name", ["forged.pt", "forged.safetensors", "forged.nemo", ".metadata"])
def test_a_forged_file_ends_in_a_verdict(tmp_path: Path, content: bytes, name: str) -> None:
    started = time.monotonic()
    verify(write(tmp_path / name, content), "--deep")
    verify(tmp_path)
    assert time.monotonic() - started < 5


def test_a_fifo_and_a_link_to_a_device_are_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "step_9.pt")
    (tmp_path / "step_8.pt").symlink_to("/dev/zero")
    put("zip.pt", tmp_path / "step_1.pt")
    assert verify(tmp_path)["step"] == 1
    assert verify(tmp_path / "step_9.pt")["status"] == "broken"


def test_a_folder_that_contains_itself_is_searched_once(tmp_path: Path) -> None:
    put("zip.pt", tmp_path / "run/step_1.pt")
    (tmp_path / "run/again").symlink_to(tmp_path / "run")
    assert verify(tmp_path)["step"] == 1


def test_files_of_single_ranks_are_one_checkpoint(tmp_path: Path) -> None:
    for step in (100, 200):
        for rank in range(3):
            put("zip.pt", tmp_path / f"step{step}_rank{rank}.pt")
    assert verify(tmp_path)["step"] == 200
    truncate(tmp_path / "step200_rank1.pt")
    assert verify(tmp_path)["step"] == 100
    put("zip.pt", tmp_path / "step300_rank0.pt")
    found = verify(tmp_path)
    assert (found["step"], len(found["passed_over"])) == (100, 2)
    assert "rank 1 of 3 is missing" in found["passed_over"][0]["why"]


def test_a_link_to_the_newest_one_does_not_hide_its_step(tmp_path: Path) -> None:
    put("model.safetensors", tmp_path / "step_9.safetensors")
    put("model.safetensors", tmp_path / "step_10.safetensors")
    (tmp_path / "latest.safetensors").symlink_to("step_9.safetensors")
    assert verify(tmp_path)["step"] == 10


def test_a_manifest_that_leads_outside_is_refused(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret", b"s")
    about = {"sha256": hashlib.sha256(b"s").hexdigest(), "bytes": 1}
    manifest = {"step": 5, "files": {f"../{secret.name}": about}}
    write(tmp_path / "step_5/manifest.json", json.dumps(manifest).encode())
    assert verify(tmp_path / "step_5")["status"] == "broken"


def test_an_empty_folder_has_no_checkpoint_yet_and_that_is_not_broken(tmp_path: Path) -> None:
    assert verify(tmp_path)["status"] == "none"
    assert verify(tmp_path / "nothing")["status"] == "none"


def test_an_unknown_format_is_unverified_and_not_broken(tmp_path: Path) -> None:
    path = write(tmp_path / "step_3.pt", b"my own format, quite fine" * 10)
    assert verify(path)["status"] == "unverified"


def test_the_words_on_the_screen_name_the_step_and_the_reason(tmp_path: Path) -> None:
    put("zip.pt", tmp_path / "step_100.pt")
    truncate(put("zip.pt", tmp_path / "step_200.pt"))
    result = CliRunner().invoke(verify_checkpoint.command, [str(tmp_path)])
    assert result.exit_code == 0
    assert "complete: step 100, pytorch" in result.output
    assert "newer, broken: step 200" in result.output


def test_a_checkpoint_with_a_huge_pickle_is_complete_by_its_checksum(tmp_path: Path) -> None:
    samples = pickle.dumps({"seen": list(range(1_010_000))}, 2)
    path = tmp_path / "step_3.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", samples)
        archive.writestr("a/version", b"3\n")
    found = verify(settle(path))
    assert (found["status"], found["step"]) == ("complete", 3)
