"""What is copied to a node: a tar stream, written as it is sent, without ever holding a file in memory."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import ProvisionError
from orchestrator.nodes.transport import CHUNK_BYTES

PADDING = b"\0" * tarfile.BLOCKSIZE
END = 2 * PADDING


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file of a stream: its name there, and its content, or where that lies here.

    Args:
        size_bytes: as it was known when the stream was announced; more than that is not sent.
    """

    name: str
    source: Path | bytes
    size_bytes: int
    mode: int = 0o644


def archive(entries: Iterable[Entry]) -> Iterator[bytes]:
    """The stream; raises ProvisionError for a file that has become shorter, and then lacks its end, so that it is refused."""
    for entry in entries:
        header = tarfile.TarInfo(entry.name)
        header.size, header.mode = entry.size_bytes, entry.mode
        yield header.tobuf(tarfile.PAX_FORMAT)
        yield from _content(entry)
        yield PADDING[: -entry.size_bytes % tarfile.BLOCKSIZE]
    yield END


def _content(entry: Entry) -> Iterator[bytes]:
    if isinstance(entry.source, bytes):
        yield entry.source
        return
    left = entry.size_bytes
    with entry.source.open("rb") as content:
        while left and (chunk := content.read(min(CHUNK_BYTES, left))):
            left -= len(chunk)
            yield chunk
    if left:
        raise ProvisionError(
            f"{entry.source} became shorter while it was being sent", advice="wait until nobody writes to it, then try again"
        )
