"""A job's directory: built of what was sent and of what earlier jobs had."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any


def manifest(files: dict[str, bytes]) -> dict[str, Any]:
    return {
        "files": [
            {"path": path, "sha256": hashlib.sha256(content).hexdigest(), "mode": 0o755, "size_bytes": len(content)}
            for path, content in files.items()
        ]
    }


def stream(described: dict[str, Any], blobs: list[bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        entries = [("manifest.json", json.dumps(described).encode())]
        entries += [(f"blobs/{hashlib.sha256(blob).hexdigest()}", blob) for blob in blobs]
        for name, content in entries:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return out.getvalue()


def stage(repository: Path, *arguments: str | Path, data: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, repository / "remote" / "stage.py", *arguments], input=data, capture_output=True)


def test_only_what_changed_is_asked_for(repository: Path, tmp_path: Path) -> None:
    """After one job, a second that changes one file of two lacks only that one, and shares the other's content."""
    first, second = {"train.py": b"1", "data/big": b"same"}, {"train.py": b"2", "data/big": b"same"}
    built = stage(repository, "build", tmp_path, "one", data=stream(manifest(first), list(first.values())))
    assert json.loads(built.stdout) == {"job_dir": str(tmp_path / "jobs/one")}
    asked = stage(repository, "missing", tmp_path, data=json.dumps(manifest(second)).encode())
    assert json.loads(asked.stdout) == {"missing": [hashlib.sha256(b"2").hexdigest()]}
    stage(repository, "build", tmp_path, "two", data=stream(manifest(second), [b"2"]))
    assert (tmp_path / "jobs/two/train.py").read_bytes() == b"2"
    assert (tmp_path / "jobs/one/data/big").samefile(tmp_path / "jobs/two/data/big")
    assert (tmp_path / "jobs/two/train.py").stat().st_mode & 0o777 == 0o555


def test_a_broken_stream_leaves_no_job(repository: Path, tmp_path: Path) -> None:
    """Half a transfer is an error, and neither a directory nor a manifest is left."""
    files = {"train.py": b"x" * 100_000}
    whole = stream(manifest(files), list(files.values()))
    done = stage(repository, "build", tmp_path, "one", data=whole[:50_000])
    assert done.returncode == 1 and done.stderr.startswith(b"stage: ")
    assert [path.name for path in (tmp_path / "jobs").rglob("*")] == [".manifests"]


def test_a_damaged_file_is_refused(repository: Path, tmp_path: Path) -> None:
    """Content that does not have the hash it is named by is never staged."""
    described = manifest({"train.py": b"right"})
    data = stream(described, [b"right"]).replace(b"right", b"wrong")
    done = stage(repository, "build", tmp_path, "one", data=data)
    assert done.returncode == 1 and b"damaged" in done.stderr


def test_a_path_that_leads_outside_is_refused(repository: Path, tmp_path: Path) -> None:
    """A manifest cannot place a file anywhere but in its job."""
    done = stage(repository, "build", tmp_path / "root", "one", data=stream(manifest({"../../evil": b"x"}), [b"x"]))
    assert done.returncode == 1 and b"leads outside" in done.stderr
    assert not (tmp_path / "evil").exists()
