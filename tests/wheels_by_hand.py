"""Wheels made by hand, small or large, and the plan that install.py reads for them."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SAYS = "__version__ = '1.0'\ndef say(): print('said')\n"


def write_wheel(directory: Path, name: str, source: str = SAYS, *, requires: Sequence[str] = (), ballast_bytes: int = 0) -> Path:
    """A real wheel with one module and a console script; `ballast_bytes` of noise make it as large as wanted."""
    path, info = directory / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    directory.mkdir(parents=True, exist_ok=True)
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", source)
        if ballast_bytes:
            wheel.writestr(f"{name}_ballast.bin", os.urandom(ballast_bytes))
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/entry_points.txt", f"[console_scripts]\nsay-{name} = {name}:say\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def make_wheel(wheelhouse: Path, name: str, source: str = SAYS) -> dict[str, str]:
    """A wheel in its place in a wheelhouse, by its hash; the entry of a plan."""
    path = write_wheel(wheelhouse, name, source)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    place = wheelhouse / digest / path.name
    place.parent.mkdir()
    path.rename(place)
    return {"name": name, "version": "1.0", "sha256": digest, "filename": path.name}


def install_plan_for(root: str | Path, python: str, *wheels: dict[str, str]) -> dict[str, Any]:
    """What install.py reads, to make environment d1 with pip."""
    names = [wheel["name"] for wheel in wheels]
    return {"root": str(root), "digest": "d1", "python": python, "wheels": list(wheels), "uv": None, "verify": names}
