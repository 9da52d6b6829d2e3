"""A slow link between us and the nodes: what we send to all of them together goes through at its rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from orchestrator.nodes.transport import Channel, Transport


class SlowTransport:
    """A node behind a link that all nodes share."""

    is_local = False

    def __init__(self, transport: Transport, link: SlowLink) -> None:
        self.node, self.host_key, self.key_file = transport.node, transport.host_key, transport.key_file
        self._transport, self._link = transport, link

    def open(self, argv: Sequence[str]) -> Channel:
        return SlowChannel(self._transport.open(argv), self._link)

    def close(self) -> None:
        self._transport.close()


class SlowChannel:
    def __init__(self, channel: Channel, link: SlowLink) -> None:
        self._channel, self._link = channel, link

    def write(self, data: bytes) -> None:
        self._link.take(len(data))
        self._channel.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


class SlowLink:
    """A link of so many bytes a second, kept by a token bucket."""

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self._lock, self._free_at, self.carried_bytes = threading.Lock(), time.monotonic(), 0

    def take(self, size_bytes: int) -> None:
        with self._lock:
            self.carried_bytes += size_bytes
            self._free_at = max(self._free_at, time.monotonic()) + size_bytes / self._bytes_s
            wait_s = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait_s))
