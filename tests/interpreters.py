"""The Pythons on this machine that scripts for the nodes are tried with."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def find_interpreters() -> list[Path]:
    """One interpreter per minor version from 3.6: pyenv's, those on PATH, and the one that runs the tests."""
    in_pyenv = (Path.home() / ".pyenv" / "versions").glob("3.*/bin/python3")
    on_path = (Path(found) for minor in range(6, 20) if (found := shutil.which(f"python3.{minor}")))
    versions: dict[str, Path] = {}
    for candidate in (Path(sys.executable), *sorted(in_pyenv), *on_path):
        tell = "import sys; print('%d.%d' % sys.version_info[:2])"
        answer = subprocess.run([candidate, "-c", tell], capture_output=True, text=True, check=False)
        if answer.returncode == 0:  # pyenv puts names on PATH that it then refuses to run
            versions.setdefault(answer.stdout.strip(), candidate)
    return [versions[version] for version in sorted(versions, key=lambda text: int(text.split(".")[1]))]


INTERPRETERS = find_interpreters()
every_interpreter = pytest.mark.parametrize("interpreter", INTERPRETERS, ids=lambda path: str(path))


def minor_version(interpreter: Path) -> tuple[int, int]:
    """(3, 6) and so on."""
    tell = "import sys; print(*sys.version_info[:2])"
    major, minor = subprocess.run([interpreter, "-c", tell], capture_output=True, text=True, check=True).stdout.split()
    return int(major), int(minor)
