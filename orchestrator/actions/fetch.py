"""Bring the job's outputs back into the run's record."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from orchestrator.actions import agent
from orchestrator.errors import CommandError
from orchestrator.nodes.transport import Channel, Transport

IDLE_TIMEOUT_S = 120


def fetch(transport: Transport, root: str, python: str, work_dir: str, paths: Sequence[str], into: Path) -> list[str]:
    """Copy `paths`, relative to the ranks' working directory on a node, into a directory here; those that were not there.

    Raises CommandError when the stream breaks; what had arrived whole stays.
    """
    argv = agent.command(root, python, "pack.py", [work_dir, *paths])
    channel = transport.open(argv)
    try:
        channel.close_stdin()
        with tarfile.open(fileobj=io.BufferedReader(_Reading(channel)), mode="r|") as archive:
            for member in archive:
                _extract(archive, member, into)
        code = channel.wait(IDLE_TIMEOUT_S)
    except (OSError, EOFError, tarfile.TarError, TimeoutError) as error:
        raise CommandError(f"{transport.node}: fetching {', '.join(paths)} failed: {error}", node=transport.node) from error
    finally:
        channel.close()
    if code != 0:
        raise CommandError(f"{transport.node}: fetching failed: {channel.stderr().strip()}", node=transport.node)
    return channel.stderr().splitlines()


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, into: Path) -> None:
    """Write one file or directory; by hand, since tarfile's own filters came only with Python 3.10.12 and 3.11.4."""
    parts = PurePosixPath(member.name).parts
    if member.name.startswith("/") or ".." in parts or not (member.isfile() or member.isdir()):
        raise tarfile.TarError(f"refused: {member.name!r}")
    target = into.joinpath(*parts)
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    content = archive.extractfile(member)
    assert content is not None  # only a link or a device has none
    half = target.with_name(f".{target.name}.part")
    try:
        with half.open("wb") as out:
            shutil.copyfileobj(content, out, 1 << 20)
        half.replace(target)
    finally:
        half.unlink(missing_ok=True)


class _Reading(io.RawIOBase):
    """A channel's stdout as a file."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = self._rest or self._channel.read(IDLE_TIMEOUT_S)
        size = min(len(buffer), len(data))
        buffer[:size], self._rest = data[:size], data[size:]
        return size
