"""The training script and its files on every node: one immutable directory per content, only what changed is sent."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.actions import agent
from orchestrator.actions.carry import COPY_IDLE_TIMEOUT_S
from orchestrator.actions.resolve import sha256_of
from orchestrator.actions.shared_root import by_root
from orchestrator.errors import InventoryError
from orchestrator.nodes.archive import Entry, archive
from orchestrator.nodes.fleet import Fleet
from orchestrator.nodes.transport import Transport, check, parse_json, run
from orchestrator.specs.events import Emit, Step
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.inventory import Job

LEFT_OUT = frozenset({"__pycache__", ".git", ".venv", ".ipynb_checkpoints"})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """One file of a job: where it lies here, and where it comes to lie in the job's directory."""

    source: Path
    path: str
    sha256: str
    mode: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFiles:
    """A job's files, its script first, and the name that their content gives the directory."""

    script: str
    files: tuple[JobFile, ...]

    @property
    def digest(self) -> str:
        """16 hex digits over every path, mode and content."""
        return hashlib.sha256(json.dumps(self.manifest(), sort_keys=True).encode()).hexdigest()[:16]

    def manifest(self) -> dict[str, Any]:
        """What remote/stage.py reads."""
        return {
            "files": [
                {"path": file.path, "sha256": file.sha256, "mode": file.mode, "size_bytes": file.size_bytes}
                for file in self.files
            ]
        }


def collect(job: Job) -> JobFiles:
    """The script and the `sync` paths, relative to the current directory; each keeps its own base name beside the script.

    Raises InventoryError for a path that does not exist, or two that would come to lie at the same place.
    """
    found = sources(job)
    return JobFiles(script=Path(job.script or "").name, files=tuple(_job_file(source, name) for name, source in found.items()))


def sources(job: Job) -> dict[str, Path]:
    """What `collect` reads, by its name beside the script; raises as that does."""
    if job.script is None:
        raise InventoryError(
            "there is no training script",
            advice="name one: `job: {script: train.py}`, or `cluster-train up INVENTORY -- train.py ARGS`",
        )
    script = Path(job.script)
    found: dict[str, Path] = {}
    for path in (script, *map(Path, job.sync)):
        for source, name in _walk(path.expanduser()):
            if found.setdefault(name, source) != source:
                raise InventoryError(f"job.sync: {source} and {found[name]} would both arrive as {name}")
    if not script.expanduser().is_file():
        raise InventoryError(f"job.script: {job.script} is not a file")
    return found


def sync(fleet: Fleet, nodes: Sequence[NodeFacts], files: JobFiles, emit: Emit) -> str:
    """Put the job's directory below every root that lacks it; its absolute path, the same on all nodes."""
    lacking = [node for node in nodes if files.digest not in node.state.jobs]
    places = {first.name: first for first, *_ in by_root(fleet, lacking)}

    def sync_one(transport: Transport) -> None:
        sent = _send(transport, places[transport.node], files)
        emit(Step(node=transport.node, text=f"{len(sent)} of {len(files.files)} files sent, {sum(sent) / 1e6:.1f} MB"))

    fleet.each(sync_one, places)
    return job_dir(nodes[0].root, files)


def job_dir(root: str, files: JobFiles) -> str:
    """Where a job's files lie on every node."""
    return f"{root}/jobs/{files.digest}"


def _send(transport: Transport, node: NodeFacts, files: JobFiles) -> list[int]:
    """Send what the node lacks and let it build the directory; the sizes of what was sent, in bytes."""
    manifest = json.dumps(files.manifest()).encode()
    answer = agent.call(transport, node.root, node.python.executable, "stage.py", ["missing", node.root], stdin=manifest)
    missing = set(answer["missing"])
    blobs = {file.sha256: file for file in files.files if file.sha256 in missing}
    argv = agent.command(node.root, node.python.executable, "stage.py", ["build", node.root, files.digest])
    entries = [Entry(name="manifest.json", source=manifest, size_bytes=len(manifest))]
    entries += [Entry(name=f"blobs/{sha}", source=file.source, size_bytes=file.size_bytes) for sha, file in blobs.items()]
    completed = check(transport, argv, run(transport, argv, stdin=archive(entries), idle_timeout_s=COPY_IDLE_TIMEOUT_S))
    parse_json(transport, argv, completed.stdout)
    return [file.size_bytes for file in blobs.values()]


def _walk(path: Path) -> Iterator[tuple[Path, str]]:
    """(file, name beside the script) of a file or of everything below a directory."""
    if path.is_file():
        yield path, path.name
        return
    if not path.is_dir():
        raise InventoryError(
            f"no such file or directory: {path}",
            advice=f"paths of `job` are relative to the current directory, which is {Path.cwd()}",
        )
    base = path.resolve()
    for directory, subdirectories, names in os.walk(base):
        subdirectories[:] = sorted(set(subdirectories) - LEFT_OUT)
        for name in sorted(names):
            source = Path(directory, name)
            if source.is_file():
                yield source, f"{base.name}/{source.relative_to(base).as_posix()}"


def _job_file(source: Path, name: str) -> JobFile:
    status = source.stat()
    return JobFile(
        source=source, path=name, sha256=sha256_of(source), mode=stat.S_IMODE(status.st_mode), size_bytes=status.st_size
    )
