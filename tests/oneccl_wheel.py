"""The small wheel of oneCCL, made from the wheels that the package index has, and kept in the user's cache."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from orchestrator.actions import oneccl
from orchestrator.planning.compat import ONECCL

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
    return unpacked / ONECCL / "lib"


def sources(directory: Path) -> dict[str, Path]:
    """The pinned wheels, downloaded as pip is configured."""
    try:
        return oneccl.sources_in(directory)
    except StopIteration:
        pass  # not there yet
    pins = directory / "requirements.txt"
    pins.write_text(oneccl.pins())
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"),
        "--dest",
        directory,
        "-r",
        pins,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S)
    if done.returncode:
        pytest.skip(f"the wheels of oneCCL cannot be had here: {done.stderr.strip().splitlines()[-1:]}")
    return oneccl.sources_in(directory)
