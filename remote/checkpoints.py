"""The checkpoints of a run on this node: which there are, which of their files are whole, and their way to other nodes.

    --work W --pattern=P... survey         prints {"now_unix_s", "checkpoints": {path: see `describe`}}
    --work W -- manifest PATH              prints {"files": {name: {"sha256", "size_bytes"}}}
    --work W -- send PATH NAME...          the named files of a checkpoint as a tar stream on stdout
    --work W -- receive PATH               < such a stream   prints {"files": {name: {"sha256", "size_bytes"}}}
    --work W -- clone PATH OTHER_WORK      a copy of a checkpoint at the same path below another working directory
    --work W -- aside PATH...              renames half-written checkpoints to `.half-NAME`, where no script takes them

Patterns and paths are relative to the ranks' working directory, or absolute. A checkpoint is a directory or one file;
the names of its files begin with its own last name. A file is whole where its format can tell: safetensors by its
header and length, PyTorch's zip archives by the directory at their end, Trainer's state and index files by being JSON.
What makes a checkpoint complete is the part of `completeness.py`.
"""

import argparse
import glob
import hashlib
import json
import os
import shutil
import struct
import sys
import tarfile
import time
import zipfile

BLOCK_BYTES = 1 << 20
LARGEST_HEADER_BYTES = 100 * 1000 * 1000  # of a safetensors file, by its specification
STATE = "trainer_state.json"
JSON_NAMES = (STATE, ".index.json")
CHECKED = (".safetensors", ".pt", ".pth", ".bin", ".ckpt") + JSON_NAMES
PART = ".part"


def main(arguments: list) -> int:
    """Carry out one command; 1 where it failed, which is then said on stderr."""
    parser = argparse.ArgumentParser(prog="checkpoints.py")
    parser.add_argument("command", choices=["survey", "manifest", "send", "receive", "clone", "aside"])
    parser.add_argument("--work", required=True)
    parser.add_argument("--pattern", action="append", default=[])
    parser.add_argument("names", nargs="*")
    options = parser.parse_args(arguments)
    work, names = os.path.expanduser(options.work), options.names
    try:
        if options.command == "send":
            send(work, names[0], names[1:], sys.stdout.buffer)
            return 0
        answer = {
            "survey": lambda: survey(work, options.pattern),
            "manifest": lambda: {"files": manifest(work, names[0])},
            "receive": lambda: {"files": receive(work, names[0], sys.stdin.buffer)},
            "clone": lambda: {"cloned": clone(work, *names)},
            "aside": lambda: {"aside": set_aside(work, names)},
        }[options.command]()
    except (OSError, ValueError, EOFError, tarfile.TarError) as error:
        sys.stderr.write("checkpoints: %s\n" % error)
        return 1
    print(json.dumps(answer))
    return 0


def survey(work: str, patterns: list) -> dict:
    """All that matches, half-written or not. Of a file, `why` is why it is not whole; `is_checked`: its format could tell."""
    found = {}
    for pattern in patterns:
        head, tail = os.path.split(os.path.expanduser(pattern))
        for name in (tail, "tmp-" + tail) if tail.startswith("checkpoint-") else (tail,):
            for path in glob.glob(os.path.join(glob.escape(work), head, name)):
                found[os.path.relpath(path, work) if not os.path.isabs(pattern) else path] = describe(work, path)
    return {"checkpoints": found, "now_unix_s": time.time()}


def describe(work: str, path: str) -> dict:
    """One checkpoint's files, and when it was last written to."""
    files, changed = {}, 0.0
    for name in file_names(path):
        full = os.path.join(os.path.dirname(path), name)
        why, is_checked = flaw(full)
        files[name] = {"size_bytes": os.path.getsize(full), "why": why, "is_checked": is_checked}
        changed = max(changed, os.path.getmtime(full))
    return {"files": files, "changed_unix_s": changed, "shards": shards(path)}


def file_names(path: str) -> list:
    """The files of a checkpoint, relative to the directory that it lies in."""
    base = os.path.dirname(path)
    if not os.path.isdir(path):
        return [os.path.basename(path)] if os.path.isfile(path) else []
    found = [os.path.join(where, name) for where, _, names in os.walk(path) for name in names]
    return sorted(os.path.relpath(full, base) for full in found if os.path.isfile(full) and not full.endswith(PART))


def flaw(path: str) -> tuple:
    """(why this file is not whole or None, whether its format could tell)."""
    size = os.path.getsize(path)
    if not path.endswith(CHECKED):
        return None, False
    if size == 0:
        return "is empty", True
    try:
        if path.endswith(JSON_NAMES):
            with open(path, encoding="utf-8") as stream:
                json.load(stream)
        elif path.endswith(".safetensors"):
            check_safetensors(path, size)
        elif starts_with(path, b"PK"):
            zipfile.ZipFile(path).close()  # reads the directory at the file's end
        else:
            return None, False  # PyTorch's format before 1.6, or somebody's own
    except (ValueError, zipfile.BadZipFile, struct.error) as error:
        return "is cut off or damaged (%s)" % error, True
    return None, True


def check_safetensors(path: str, size: int) -> None:
    """Raise ValueError unless the file is as long as its header says."""
    with open(path, "rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > min(size, LARGEST_HEADER_BYTES):
            raise ValueError("its header is incomplete")
        header = json.loads(stream.read(length).decode("utf-8"))
    end = max([tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"] or [0])
    if size != 8 + length + end:
        raise ValueError("%d of %d bytes" % (size, 8 + length + end))


def starts_with(path: str, magic: bytes) -> bool:
    with open(path, "rb") as stream:
        return stream.read(len(magic)) == magic


def shards(path: str) -> list:
    """The files that index files of a checkpoint name."""
    found = set()
    for name in file_names(path):
        if name.endswith(JSON_NAMES[1]):
            full = os.path.join(os.path.dirname(path), name)
            try:
                with open(full, encoding="utf-8") as stream:
                    weight_map = json.load(stream)["weight_map"]
            except (ValueError, KeyError, TypeError):
                continue  # `flaw` says so
            found.update(os.path.join(os.path.dirname(name), shard) for shard in weight_map.values())
    return sorted(found)


def manifest(work: str, path: str) -> dict:
    """Hash and size of every file of a checkpoint."""
    full = os.path.join(work, os.path.expanduser(path))
    base = os.path.dirname(full)
    return {name: {"sha256": sha256(os.path.join(base, name)), "size_bytes": size(base, name)} for name in file_names(full)}


def size(base: str, name: str) -> int:
    return os.path.getsize(os.path.join(base, name))


def sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(BLOCK_BYTES), b""):
            digest.update(block)
    return digest.hexdigest()


def send(work: str, path: str, names: list, out) -> None:
    """Write some files of a checkpoint as a tar stream; the last one written by Trainer comes last here too."""
    base = os.path.dirname(os.path.join(work, os.path.expanduser(path)))
    with tarfile.open(fileobj=out, mode="w|", dereference=True) as archive:
        for name in sorted(names, key=lambda name: (os.path.basename(name) == STATE, name)):
            archive.add(os.path.join(base, name), arcname=name, recursive=False)


def receive(work: str, path: str, stream) -> dict:
    """Write the files of a tar stream beside their place and rename them; what arrived, as `manifest` would tell it."""
    base = os.path.dirname(os.path.join(work, os.path.expanduser(path)))
    top, received = os.path.basename(path), {}
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            parts = member.name.split("/")
            if not member.isfile() or parts[0] != top or ".." in parts:
                raise ValueError("refused: %r is no file of %s" % (member.name, top))
            target = os.path.join(base, *parts)
            os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
            received[member.name] = write(archive.extractfile(member), target, member)
            if received[member.name]["size_bytes"] != member.size:
                raise ValueError("%s was cut short" % member.name)
    return received


def write(content, target: str, member: tarfile.TarInfo) -> dict:
    """Copy a stream to a file, by way of a name that is never taken for a part of a checkpoint; its hash and size."""
    beside = os.path.join(os.path.dirname(target), ".%s.%d%s" % (os.path.basename(target), os.getpid(), PART))
    digest, size_bytes = hashlib.sha256(), 0
    try:
        with open(beside, "wb") as out:
            for block in iter(lambda: content.read(BLOCK_BYTES), b""):
                digest.update(block)
                size_bytes += len(block)
                out.write(block)
        os.chmod(beside, member.mode & 0o777)
        os.utime(beside, (member.mtime, member.mtime))  # when it was written tells whether it is whole
        os.rename(beside, target)
    except (OSError, EOFError, tarfile.TarError):  # the disk is full, or the stream was cut
        os.unlink(beside)
        raise
    return {"sha256": digest.hexdigest(), "size_bytes": size_bytes}


def clone(work: str, path: str, other_work: str) -> str:
    """Copy a checkpoint: the run that it is from keeps its own."""
    source, target = os.path.join(work, path), os.path.join(other_work, path)
    if not os.path.exists(target):
        beside = os.path.join(os.path.dirname(target), ".%s.%d%s" % (os.path.basename(target), os.getpid(), PART))
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        (shutil.copytree if os.path.isdir(source) else shutil.copy2)(source, beside)
        os.rename(beside, target)
    return target


def set_aside(work: str, paths: list) -> list:
    """Rename checkpoints so that no script takes them for whole ones; those that were here."""
    done = []
    for path in paths:
        full = os.path.join(work, os.path.expanduser(path))
        target = os.path.join(os.path.dirname(full), ".half-" + os.path.basename(full))
        if not os.path.lexists(full):
            continue  # it is on another node
        shutil.rmtree(target, ignore_errors=True)
        try:
            os.rename(full, target)
            done.append(path)
        except FileNotFoundError:
            pass  # another node was faster, on a disk in common
    return done


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
