"""The connection between a rank and the supervisor: JSON lines over TCP that nobody without the run's secret can write.

Each end sends a random nonce in clear; both and the secret give this connection's key. Every line after that is sealed:
64 hex digits of HMAC-SHA256 over sender, line number and text, a blank, the text. So each end knows whom it talks to from
the first line on, and nothing can be forged, replayed or left out in between. Nothing here ever blocks.
"""

import hashlib
import hmac
import json
import secrets
import socket

LONGEST_LINE_BYTES = 512 * 1024
FIRST_LINE_BYTES = 4 * 1024  # of somebody who has not shown yet that he has the secret
READ_BYTES = 64 * 1024
NONCE_DIGITS = 32
HEAD, RANK = b"head", b"rank"


class Forged(OSError):
    """What came is not from somebody who has the run's secret."""


class Link:
    """One end of a connection; `me` is HEAD or RANK. Once broken or at its end, it stays so (`is_over`)."""

    def __init__(self, connection: socket.socket, secret: str, me: bytes) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_over = False
        self._connection = connection
        self._secret = secret.encode("ascii")
        self._me, self._peer = (HEAD, RANK) if me == HEAD else (RANK, HEAD)
        self._nonce = secrets.token_hex(NONCE_DIGITS // 2).encode("ascii")
        self._key = None
        self._sent = self._received = 0
        self._in, self._out, self._unsealed = b"", self._nonce + b"\n", []

    @property
    def is_known(self) -> bool:
        """Whether the other end has shown that it has the secret."""
        return self._received > 0

    @property
    def has_unsent(self) -> bool:
        """Whether the network has not taken all of it yet."""
        return bool(self._out or self._unsealed)

    def fileno(self) -> int:
        """For select and its kin."""
        return self._connection.fileno()

    def send(self, message: dict) -> None:
        """Queue a message; `pump` sends it."""
        self._unsealed.append(message)

    def pump(self) -> list:
        """Send what the network takes, and return the messages that have come.

        Raises OSError (Forged among them) where the connection is broken; what came before its end was returned by then.
        """
        if self.is_over:
            raise ConnectionResetError("the connection has ended")
        try:
            self._write()
            messages = self._read()
            self._write()  # the other end's nonce may have made that possible
        except OSError:
            self.is_over = True
            raise
        return messages

    def close(self) -> None:
        """Let go of it."""
        self.is_over = True
        self._connection.close()

    def _write(self) -> None:
        if self._key is not None:
            for message in self._unsealed:
                text = json.dumps(message).encode("ascii")
                self._out += self._seal(self._me, self._sent, text) + b" " + text + b"\n"
                self._sent += 1
            self._unsealed = []
        try:
            while self._out:
                self._out = self._out[self._connection.send(self._out) :]
        except (BlockingIOError, InterruptedError):
            pass

    def _read(self) -> list:
        messages = []
        try:
            while True:
                data = self._connection.recv(READ_BYTES)
                if not data:
                    self.is_over = True
                    return messages
                *lines, self._in = (self._in + data).split(b"\n")
                messages += [message for message in map(self._open, lines) if message is not None]
                if len(self._in) > (LONGEST_LINE_BYTES if self.is_known else FIRST_LINE_BYTES):
                    raise Forged("a line without an end")
        except (BlockingIOError, InterruptedError):
            return messages

    def _open(self, line: bytes) -> dict:
        """The message in a line; None for the nonce, which comes first."""
        if self._key is None:
            if len(line) != NONCE_DIGITS:
                raise Forged("no nonce")
            nonces = (self._nonce, line) if self._me == HEAD else (line, self._nonce)
            self._key = hmac.new(self._secret, b" ".join(nonces), hashlib.sha256).digest()
            return None
        seal, _, text = line.partition(b" ")
        if not hmac.compare_digest(seal, self._seal(self._peer, self._received, text)):
            raise Forged("a line that does not bear the run's seal")
        self._received += 1
        return json.loads(text.decode("ascii"))

    def _seal(self, sender: bytes, number: int, text: bytes) -> bytes:
        return hmac.new(self._key, b"%s %d %s" % (sender, number, text), hashlib.sha256).hexdigest().encode("ascii")
