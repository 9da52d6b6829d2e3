"""Two nodes try each other's ports: one listens, the other connects, and both say what they saw.

A connection carries a line of JSON from the caller, {"token", "bytes"}, that many bytes, and a line back, {"peer": the
caller's address as the listener sees it}. The token keeps strangers from being taken for the other node, and the other node
from taking a stranger for us.
"""

import errno
import json
import select
import socket
import threading
import time

CHUNK = b"\0" * (1 << 16)
LISTEN_S = 60.0  # for how long a listener answers at most
TALK_TIMEOUT_S = 8.0  # without any progress
PINGS = 5
# What a firewall that rejects answers with, by its kind: a reset or an ICMP message. One that drops answers nothing.
REJECTED = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM, errno.ECONNRESET)


class Listener:
    """Listens on some ports of one address until it is closed; `ports` are those it got, None in place of those it did not."""

    def __init__(self, address, ports, token):
        self.token = token
        self.sockets, self.ports = [], []
        for port in ports:
            try:
                listening = listen(address, port)
            except OSError:
                self.ports.append(None)
                continue
            self.sockets.append(listening)
            self.ports.append(listening.getsockname()[1])
        self.thread = threading.Thread(target=self.serve)
        self.thread.daemon = True
        self.thread.start()

    def serve(self):
        deadline = time.monotonic() + LISTEN_S
        while self.sockets and time.monotonic() < deadline:
            try:
                ready = select.select(self.sockets, [], [], 0.2)[0]
                callers = [listening.accept() for listening in ready]
            except (OSError, ValueError):
                continue  # closed meanwhile
            for connection, peer in callers:
                answering = threading.Thread(target=self.answer, args=(connection, peer[0]))
                answering.daemon = True
                answering.start()

    def answer(self, connection, peer):
        """Pings are sent back one by one, the bytes are taken, the peer's address is told."""
        try:
            with connection:
                connection.settimeout(TALK_TIMEOUT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                stream = connection.makefile("rb", 1 << 16)
                asked = json.loads(stream.readline(1000).decode())
                if asked.get("token") != self.token:
                    return
                send(connection, {"token": self.token, "peer": peer})
                for _ in range(PINGS):
                    connection.sendall(stream.read(1))
                left = asked["bytes"]
                while left > 0:
                    taken = len(stream.read1(min(left, 1 << 16)))
                    if not taken:
                        return
                    left -= taken
                send(connection, {"done": True})
        except (OSError, ValueError, KeyError, AttributeError):
            return  # a stranger, or gone

    def close(self):
        sockets, self.sockets = self.sockets, []
        for listening in sockets:
            listening.close()


def listen(address, port):
    """A listening socket on one address; OSError where it cannot be had."""
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, 0, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(128)
    except OSError:
        listening.close()
        raise
    return listening


def meet_all(targets, token, timeout_s):
    """Call every target at the same time; in their order what came of it: see `meet`."""
    results = [None] * len(targets)

    def call(index):
        results[index] = meet(targets[index], token, timeout_s)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(len(targets))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    return results


def meet(target, token, timeout_s):
    """Call one {"address", "port", "bytes"}, over the way that the kernel takes by itself.

    The answer's `state` is "open", "dropped" (no answer at all), "rejected", "failed", "stranger" (somebody else answers, or
    cuts the connection) or "stuck" (connected, but what is sent does not arrive).
    """
    result = {"state": "open", "error": "", "latency_s": None, "bytes_per_s": None, "seen_as": None}
    try:
        connection = connect(target, timeout_s)
    except socket.timeout:
        result.update(state="dropped", error="no answer within %g s" % timeout_s)
        return result
    except OSError as error:
        result.update(state=state_of(error), error=error.strerror or str(error))
        return result
    try:
        with connection:
            talk(connection, target["bytes"], token, result)
    except socket.timeout:
        result.update(state="stuck", error="connected, but what is sent does not arrive")
    except (OSError, ValueError, KeyError, AttributeError):
        result.update(state="stranger", error="something else answers there")
    return result


def state_of(error):
    if error.errno == errno.ETIMEDOUT:
        return "dropped"
    return "rejected" if error.errno in REJECTED else "failed"


def connect(target, timeout_s):
    address = (target["address"], target["port"])
    family, kind, protocol, _, where = socket.getaddrinfo(*(address + (0, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)))[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.settimeout(timeout_s)
        connection.connect(where)
    except OSError:
        connection.close()
        raise
    return connection


def talk(connection, size_bytes, token, result):
    """Say who we are, measure the way there and back, and how fast the bytes go."""
    connection.settimeout(TALK_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream = connection.makefile("rb")
    send(connection, {"token": token, "bytes": size_bytes})
    told = json.loads(stream.readline(1000).decode())
    if told["token"] != token:
        raise ValueError("a stranger")
    result["seen_as"] = told["peer"]
    ways = []
    for _ in range(PINGS):
        started = time.monotonic()
        connection.sendall(b".")
        stream.read(1)
        ways.append(time.monotonic() - started)
    result["latency_s"] = min(ways)
    if size_bytes:
        started = time.monotonic()
        for start in range(0, size_bytes, len(CHUNK)):
            connection.sendall(CHUNK[: min(len(CHUNK), size_bytes - start)])
        stream.readline(1000)
        result["bytes_per_s"] = size_bytes / max(1e-9, time.monotonic() - started)


def send(connection, message):
    connection.sendall(json.dumps(message).encode() + b"\n")
