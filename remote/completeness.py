"""Which checkpoint of a run is the newest complete one: a decision over what all nodes found. It touches no file.

Each rank writes on its own node's disk, so a checkpoint is the union of the nodes' files. Trainer (read in Transformers 4.36
and 5.24) writes model, optimizer.pt, scheduler.pt, rng_state_<rank>.pth, and last trainer_state.json; ranks do not wait for
each other there. Some releases write all that into `tmp-checkpoint-<step>` and then rename it. Of other checkpoints nothing is
known but that they must not be written to any more.
"""

import os
import re

import checkpoints

QUIET_S = 2.0  # a checkpoint that was written to so shortly before the failure may lack the rest
RANKS_APART_S = 60.0  # by how much one rank may write its part of a checkpoint after another
TRAINER_NAME = re.compile(r"checkpoint-(\d+)$")
RANK_FILE = re.compile(r"rng_state_(\d+)\.pth$")
PARTS = {
    "an optimizer": re.compile(r"optimizer\.(pt|bin)$"),
    "a scheduler": re.compile(r"scheduler\.pt$"),
    "a model": re.compile(r".*model.*\.(safetensors|bin)$"),
}


class Choice:
    """The checkpoint to go on from, or None; the names of its files; why others were skipped."""

    def __init__(self, path: str, files: set, skipped: dict) -> None:
        self.path = path
        self.files = files
        self.skipped = skipped


def newest_complete(surveys: dict, homes: dict, is_trainer: bool) -> Choice:
    """The newest complete checkpoint of all.

    Args:
        surveys: node -> path -> what `describe` found, with `quiet_s`: how long before the failure it was last written
            to. The head first, whose files win where nodes differ.
        homes: rank -> its node, in the attempt that failed: a rank's own files are taken from there.
        is_trainer: the script uses Transformers' Trainer.
    """
    merged = {path: merge(surveys, path, homes) for path in {path for found in surveys.values() for path in found}}
    skipped = {}
    for path in sorted(merged, key=lambda path: age(path, merged[path]), reverse=True):
        why = incomplete(path, merged, len(homes), is_trainer)
        if not why:
            return Choice(path, inner_names(path, merged[path]["files"]), skipped)
        skipped[path] = why
    return Choice(None, set(), skipped)


def stateless_ranks(files: set, world_size: int) -> list:
    """The ranks of a job to come for which a Trainer checkpoint holds no state of their random numbers."""
    names = ["rng_state_%d.pth" % rank for rank in range(world_size)] if world_size > 1 else ["rng_state.pth"]
    return [rank for rank, name in enumerate(names) if name not in files]


def merge(surveys: dict, path: str, homes: dict) -> dict:
    """One checkpoint with the files of all nodes, each as the node whose word counts has it."""
    having = [(node, found[path]) for node, found in surveys.items() if path in found]
    files = {}
    for node, part in having:
        for name, file in part["files"].items():
            if name not in files or home(name, homes) == node:
                files[name] = dict(file, node=node)
    return {
        "files": files,
        "quiet_s": min(part["quiet_s"] for _, part in having),
        "changed_unix_s": max(part["changed_unix_s"] for _, part in having),
        "shards": sorted({name for _, part in having for name in part["shards"]}),
    }


def home(name: str, homes: dict) -> str:
    """The node that a rank's own file is written on; None for other files."""
    match = RANK_FILE.match(os.path.basename(name))
    return homes.get(int(match.group(1))) if match else None


def age(path: str, checkpoint: dict) -> tuple:
    """A key that sorts by the numbers in the last name, then by time: `epoch_2_step_400` comes after `epoch_2_step_50`."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", os.path.basename(path)))
    return numbers, checkpoint["changed_unix_s"], path


def incomplete(path: str, merged: dict, world_size: int, is_trainer: bool) -> str:
    """Why a checkpoint cannot be gone on from, or None."""
    checkpoint, name = merged[path], os.path.basename(path)
    files = checkpoint["files"]
    if not any(file["size_bytes"] for file in files.values()):
        return "it is empty"
    for file_name, file in sorted(files.items()):
        if file["why"]:
            return "%s on %s %s" % (file_name, file["node"], file["why"])
    lost = [shard for shard in checkpoint["shards"] if shard not in files]
    if lost:
        return "it lacks %s, which its index names" % lost[0]
    if is_trainer and name.startswith("tmp-checkpoint-"):
        return "it was not renamed yet"
    is_trainers_own = is_trainer and TRAINER_NAME.match(name)
    if is_trainers_own and "%s/%s" % (name, checkpoints.STATE) not in files:
        return "it has no %s, which is written last" % checkpoints.STATE
    if not is_trainers_own and checkpoint["quiet_s"] < QUIET_S and not is_one_checked_file(name, files):
        return "it was written to until %.1f s before the failure" % max(0.0, checkpoint["quiet_s"])
    if is_trainers_own:
        lacking = sorted(trainers_parts(path, merged, world_size) - parts(path, files))
    else:
        lacking = sorted(older_names(path, merged) - inner_names(path, files))
    return "it lacks %s, which other checkpoints have" % lacking[0] if lacking else None


def is_one_checked_file(name: str, files: dict) -> bool:
    return set(files) == {name} and files[name]["is_checked"]


def trainers_parts(path: str, merged: dict, world_size: int) -> set:
    """What a Trainer checkpoint must have because others have it.

    Model, optimizer and scheduler if any other has them, for Trainer may have been removing this one. Each rank's state as
    an older one has it, where the failure may have come between rank 0 and the others: later on, what is not there is on
    a disk that was lost, or was written by fewer ranks.
    """
    key, may_be_cut = age(path, merged[path]), merged[path]["quiet_s"] < RANKS_APART_S
    wanted = set()
    for other in merged:
        for part in parts(other, merged[other]["files"]):
            match = RANK_FILE.match(part)
            is_cut = match and may_be_cut and int(match.group(1)) < world_size and age(other, merged[other]) < key
            if is_cut or not match:
                wanted.add(part)
    return wanted


def parts(path: str, files: dict) -> set:
    """Which of the parts that Trainer writes are there; ranks' states by their names."""
    names = inner_names(path, files)
    found = {part for part in PARTS if any(PARTS[part].match(name) for name in names)}
    return found | {name for name in names if RANK_FILE.match(name)}


def older_names(path: str, merged: dict) -> set:
    """What any checkpoint must have because an older one of its kind, also a directory, has it under the same name."""
    names = set()
    for other in merged:
        files = merged[other]["files"]
        if age(other, merged[other]) < age(path, merged[path]) and set(files) != {os.path.basename(other)}:
            numbers = set(re.findall(r"\d+", os.path.basename(other)))
            names.update(name for name in inner_names(other, files) if not numbers & set(re.findall(r"\d+", name)))
    return names


def inner_names(path: str, files: dict) -> set:
    """The names of a checkpoint's files within it."""
    return {os.path.relpath(file, os.path.basename(path)) for file in files}
