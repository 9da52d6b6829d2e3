"""Which checkpoint is the newest complete one, over the disks of all nodes, and how its files get from one to another."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from supervised import INTERPRETERS, REMOTE

sys.path.insert(0, str(REMOTE))

import checkpoints
import completeness

PATTERN = "out/checkpoint-*"
LONG_AGO_S = 1000.0


def archive() -> bytes:
    """A file as torch.save writes it: a zip archive."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as out:
        out.writestr("archive/data.pkl", b"x" * 400)
    return stream.getvalue()


def tensors(size_bytes: int = 64) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size_bytes], "data_offsets": [0, size_bytes]}}).encode()
    return struct.pack("<Q", len(header)) + header + b"w" * size_bytes


def trainer(work: Path, step: int, ranks: tuple[int, ...] = (0,), *, is_head: bool = True) -> Path:
    """What the ranks of one node write of a Trainer checkpoint."""
    path = work / "out" / f"checkpoint-{step}"
    path.mkdir(parents=True)
    if is_head:
        (path / "model.safetensors").write_bytes(tensors())
        for name in ("optimizer.pt", "scheduler.pt", "training_args.bin"):
            (path / name).write_bytes(archive())
        (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    for rank in ranks:
        (path / f"rng_state_{rank}.pth").write_bytes(archive())
    return path


def choose(
    *works: Path, pattern: str = PATTERN, is_trainer: bool = True, quiet_s: float = LONG_AGO_S, ranks: int = 2
) -> completeness.Choice:
    """The choice over nodes with these working directories, one rank each; all was last written `quiet_s` before."""
    surveys = {}
    for number, work in enumerate(works):
        found = checkpoints.survey(str(work), [pattern])["checkpoints"]
        surveys[f"node{number}"] = {path: dict(each, quiet_s=quiet_s) for path, each in found.items()}
    homes = {rank: f"node{rank * len(works) // ranks}" for rank in range(ranks)}
    return completeness.newest_complete(surveys, homes, is_trainer)


def stateless(choice: completeness.Choice, ranks: int = 2) -> list[int]:
    found: list[int] = completeness.stateless_ranks(choice.files, ranks)
    return found


def cut(name: str) -> Callable[[Path], object]:
    """Keeps the first half of a file."""
    return lambda path: os.truncate(path / name, (path / name).stat().st_size // 2)


def sharded(path: Path) -> None:
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (path / "model.safetensors").rename(path / names["a"])
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: (path / "trainer_state.json").unlink(), "it has no trainer_state.json, which is written last"),
        (cut("trainer_state.json"), "trainer_state.json on node0 is cut off or damaged"),
        (cut("model.safetensors"), "model.safetensors on node0 is cut off or damaged"),
        (cut("optimizer.pt"), "optimizer.pt on node0 is cut off or damaged"),
        (lambda path: os.truncate(path / "scheduler.pt", 0), "scheduler.pt on node0 is empty"),
        (lambda path: (path / "optimizer.pt").unlink(), "it lacks an optimizer, which other checkpoints have"),
        (lambda path: (path / "model.safetensors").unlink(), "it lacks a model, which other checkpoints have"),
        (sharded, "it lacks checkpoint-30/model-00002-of-00002.safetensors, which its index names"),
        (lambda path: path.rename(path.with_name("tmp-checkpoint-30")), "it was not renamed yet"),
    ],
    ids=["no-state", "state", "model", "optimizer", "empty", "no-optimizer", "no-model", "shard", "tmp"],
)
def test_a_half_written_trainer_checkpoint_is_skipped_and_named(
    tmp_path: Path, damage: Callable[[Path], object], why: str
) -> None:
    """Whatever the last one lacks, the one before is taken, by number and not by name (100 comes after 30)."""
    trainer(tmp_path, 9, (0, 1))
    trainer(tmp_path, 20, (0, 1))
    damage(trainer(tmp_path, 30, (0, 1)))
    choice = choose(tmp_path)
    assert choice.path == "out/checkpoint-20"
    (said,) = choice.skipped.values()
    assert why in said
    trainer(tmp_path, 100, (0, 1))
    assert choose(tmp_path).path == "out/checkpoint-100"


def test_each_rank_writes_on_its_own_disk(tmp_path: Path) -> None:
    """A checkpoint is the union of all nodes; one that another rank had not come to is half, one on a lost disk is not."""
    head, other = tmp_path / "head", tmp_path / "other"
    for step in (10, 20):
        trainer(head, step)
        trainer(other, step, (1,), is_head=False)
    whole = choose(head, other)
    assert (whole.path, whole.skipped, stateless(whole)) == ("out/checkpoint-20", {}, [])
    assert (stateless(whole, 3), stateless(whole, 1)) == ([2], [0])  # Trainer names the state of a single rank differently
    (other / "out/checkpoint-20/rng_state_1.pth").unlink()
    early = choose(head, other, quiet_s=0.5)  # killed between rank 0 and rank 1
    assert early.path == "out/checkpoint-10"
    assert early.skipped == {"out/checkpoint-20": "it lacks rng_state_1.pth, which other checkpoints have"}
    late = choose(head, other)  # long before the failure: it was there, and its disk is gone
    assert (late.path, stateless(late)) == ("out/checkpoint-20", [1])
    (other / "out/checkpoint-10/rng_state_1.pth").unlink()
    wiped = choose(head, other, quiet_s=0.5)
    assert (wiped.path, stateless(wiped)) == ("out/checkpoint-20", [1])


def test_checkpoints_of_other_scripts(tmp_path: Path) -> None:
    """A file that can be checked counts at once; what cannot must have been left alone before the failure."""
    (tmp_path / "step-9.pt").write_bytes(archive())
    (tmp_path / "step-10.pt").write_bytes(archive())
    assert choose(tmp_path, pattern="step-*.pt", is_trainer=False, quiet_s=0.0).path == "step-10.pt"
    os.truncate(tmp_path / "step-10.pt", 300)
    assert choose(tmp_path, pattern="step-*.pt", is_trainer=False).path == "step-9.pt"
    (tmp_path / "state-1.npz").write_bytes(b"numbers")
    assert choose(tmp_path, pattern="state-*", is_trainer=False).path == "state-1.npz"
    fresh = choose(tmp_path, pattern="state-*", is_trainer=False, quiet_s=1.0)
    assert fresh.path is None and fresh.skipped == {"state-1.npz": "it was written to until 1.0 s before the failure"}
    for step, names in ((1, ("model_1.bin", "sampler")), (2, ("model_2.bin",))):
        (tmp_path / f"save_{step}").mkdir()
        for name in names:
            (tmp_path / f"save_{step}" / name).write_bytes(archive())
    half = choose(tmp_path, pattern="save_*", is_trainer=False)
    assert half.path == "save_1" and half.skipped == {"save_2": "it lacks sampler, which other checkpoints have"}
    assert choose(tmp_path, pattern="nothing-*", is_trainer=False).path is None


def call(interpreter: str, work: Path, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    argv = [interpreter, "-S", "-E", str(REMOTE / "checkpoints.py"), "--work", str(work), *arguments]
    return subprocess.run(argv, input=stdin, capture_output=True, timeout=60)


def answer(done: subprocess.CompletedProcess[bytes]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_the_files_travel_by_hash(interpreter: str, tmp_path: Path) -> None:
    """What is sent arrives with its bytes, mode and time, Trainer's last file last; a survey there finds it whole."""
    source, target = tmp_path / "source", tmp_path / "far" / "target"
    path = trainer(source, 7, (0,))
    (path / "optimizer.pt").chmod(0o640)
    os.utime(path / "optimizer.pt", (1e9, 1e9))
    wanted = answer(call(interpreter, source, "--", "manifest", "out/checkpoint-7"))["files"]
    stream = call(interpreter, source, "--", "send", "out/checkpoint-7", *wanted).stdout
    with tarfile.open(fileobj=io.BytesIO(stream)) as archived:
        assert archived.getnames()[-1] == "checkpoint-7/trainer_state.json"
    cut_short = call(interpreter, target, "--", "receive", "out/checkpoint-7", stdin=stream[: stream.index(b"PK") + 100])
    assert cut_short.returncode == 1 and b"checkpoints:" in cut_short.stderr
    assert answer(call(interpreter, target, "--", "receive", "out/checkpoint-7", stdin=stream))["files"] == wanted
    arrived = target / "out" / "checkpoint-7"
    assert {path.name for path in arrived.iterdir()} == {path.name for path in path.iterdir()}
    assert (arrived / "optimizer.pt").stat().st_mode & 0o777 == 0o640 and (arrived / "optimizer.pt").stat().st_mtime == 1e9
    found = answer(call(interpreter, target, f"--pattern={PATTERN}", "survey"))["checkpoints"]["out/checkpoint-7"]
    assert set(found["files"]) == set(wanted) and not any(file["why"] for file in found["files"].values())
    assert answer(call(interpreter, target, "--", "aside", "out/checkpoint-7", "out/gone"))["aside"] == ["out/checkpoint-7"]
    assert answer(call(interpreter, target, f"--pattern={PATTERN}", "survey"))["checkpoints"] == {}


@pytest.mark.parametrize("name", ["../x", "checkpoint-7/../../x", "/etc/x", "other/x"])
def test_a_stream_cannot_write_elsewhere(tmp_path: Path, name: str) -> None:
    """Only files of the checkpoint that was asked for are taken."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as out:
        out.addfile(tarfile.TarInfo(name), io.BytesIO())
    done = call(sys.executable, tmp_path / "work", "--", "receive", "out/checkpoint-7", stdin=stream.getvalue())
    assert done.returncode == 1 and b"refused" in done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
