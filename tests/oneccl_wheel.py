"""The small wheel of oneCCL, made from the wheels that the package index has, and kept in the user's cache."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from orchestrator.actions import oneccl
from orchestrator.planning.compat import facts

DOWNLOAD_LIMIT_S = 600


def libraries() -> Path:
    """The directory of the wheel's libraries; skips, with the reason, where the index does not give them."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cluster-train" / "tests"
    unpacked = cache / oneccl.filename().removesuffix(".whl")
    if not unpacked.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(oneccl.make_wheel(sources(cache), cache)) as wheel:
            temporary = cache / f"{unpacked.name}.{os.getpid()}"
            wheel.extractall(temporary)
        temporary.replace(unpacked)
    return unpacked / oneccl.PACKAGE / "lib"


def sources(directory: Path) -> dict[str, Path]:
    """The pinned wheels, downloaded as pip is configured."""
    found = {}
    for requirement in facts()["oneccl"]["files"]:
        stem = requirement.replace("-", "_").replace("==", "-")
        if not list(directory.glob(f"{stem}-*.whl")):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), requirement]
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S)
            if done.returncode:
                pytest.skip(f"{requirement} cannot be had here: {done.stderr.strip().splitlines()[-1:]}")
        found[requirement] = next(directory.glob(f"{stem}-*.whl"))
    return found
