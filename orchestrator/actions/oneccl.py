"""The small wheel of oneCCL for CPUs, put together from the files of its pinned wheels that a rank loads.

`pip install oneccl` brings 1.8 GB, most of it for GPUs. What is taken from it stays as it is, with the licences of each
package; the result is the same to the byte wherever it is made, so that a lock can name it by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from orchestrator.errors import ResolveError
from orchestrator.planning.compat import ONECCL, facts

LICENCES = ("LICENSE.txt", "license.txt", "third-party-programs.txt")

# To import it is to load all libraries: what is missing on a node shows when its environment is verified.
INIT = '''"""The libraries of oneCCL for CPUs, unchanged files of {sources}."""

import ctypes
import os

__version__ = "{version}"

directory = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib")
loaded = {{
    name: ctypes.CDLL(os.path.join(directory, name), mode=ctypes.RTLD_GLOBAL)
    for name in ("libfabric.so.1", "libmpi.so.12", "libccl.so.2", "libccl.so.1", "libccl_legacy_cpu.so")
}}
'''
METADATA = """Metadata-Version: 2.1
Name: cluster-train-oneccl
Version: {version}
Summary: The part of {sources} that a CPU rank loads; unchanged files
License: see the licenses directory of this package's metadata
"""
WHEEL = """Wheel-Version: 1.0
Generator: cluster-train
Root-Is-Purelib: false
Tag: py3-none-{platform}
"""


def filename() -> str:
    """The wheel's name."""
    row = facts()["oneccl"]
    return f"{ONECCL}-{row['version']}-py3-none-{row['platform']}.whl"


def pins() -> str:
    """The sources as lines of a requirements file, each with its hash."""
    return "".join(f"{one} --hash=sha256:{row['sha256']}\n" for one, row in facts()["oneccl"]["files"].items())


def sources_in(directory: Path) -> dict[str, Path]:
    """The wheel of each source that pip downloaded into a directory."""
    stems = {one: one.replace("-", "_").replace("==", "-") for one in facts()["oneccl"]["files"]}
    return {one: next(directory.glob(f"{stem}-*.whl")) for one, stem in stems.items()}


def make_wheel(sources: Mapping[str, Path], directory: Path) -> Path:
    """Write the wheel into a directory; its path.

    Args:
        sources: the pinned wheels by their requirement, "oneccl==2022.1.2", as compat.yaml names them.

    Raises ResolveError where one of them lacks a file that is needed.
    """
    path = directory / filename()
    temporary = path.with_suffix(".part")
    record = []
    with zipfile.ZipFile(temporary, "w") as made:
        for name, content in _content(sources):
            _put(made, name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            record.append(f"{name},sha256={digest},{len(content)}")
        _put(made, f"{_info()}/RECORD", "\n".join([*record, f"{_info()}/RECORD,,", ""]).encode())
    temporary.replace(path)
    return path


def _put(made: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name)  # dated 1980 and not compressed: each zlib compresses in its own way
    entry.external_attr = 0o644 << 16
    made.writestr(entry, content)


def _info() -> str:
    return f"{ONECCL}-{facts()['oneccl']['version']}.dist-info"


def _content(sources: Mapping[str, Path]) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each file of the wheel, in a fixed order."""
    row = facts()["oneccl"]
    words = {"version": row["version"], "platform": row["platform"], "sources": ", ".join(row["files"])}
    yield f"{ONECCL}/__init__.py", INIT.format(**words).encode()
    for requirement, wanted in row["files"].items():
        with zipfile.ZipFile(sources[requirement]) as wheel:
            yield from _taken(wheel, requirement, wanted["libraries"])
    yield f"{_info()}/METADATA", METADATA.format(**words).encode()
    yield f"{_info()}/WHEEL", WHEEL.format(**words).encode()


def _taken(wheel: zipfile.ZipFile, requirement: str, wanted: list[str]) -> Iterator[tuple[str, bytes]]:
    members = {PurePosixPath(name): name for name in wheel.namelist()}
    for library in wanted:
        found = [name for path, name in members.items() if path.name == library and path.parent.name == "lib"]
        if not found:
            raise ResolveError(f"the wheel of {requirement} has no {library}", advice="use `backend: gloo`")
        yield f"{ONECCL}/lib/{library}", wheel.read(found[0])
    for path, name in sorted(members.items()):
        if path.name in LICENCES:
            yield f"{_info()}/licenses/{requirement.partition('==')[0]}/{path.name}", wheel.read(name)
