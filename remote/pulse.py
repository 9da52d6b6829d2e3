"""A rank's end of the heartbeat: it tells the supervisor about once a second that it lives, and hears that the head does.

The supervisor's address, port and secret are in the launch document under `beat`. Where they are not, or the port cannot
be reached from the start, there are no heartbeats, and the rank runs on without. What was `kept` (the rank's records) is
told again on every new connection, until the supervisor has noted it.
"""

import errno
import select
import socket
import time

import wire

EVERY_S = 1.0
CONNECT_S = 10.0  # for a first connection, before it is said that there is none; and for each later one
RETRY_S = 1.0
REFUSED_S = 10.0  # a port that was open and refuses for so long has lost its supervisor
ASLEEP_S = 5.0  # between two ticks: this process was stopped, and what it has not heard meanwhile counts for nothing


class Pulse:
    """The rank's connection to the supervisor; nothing but `part` ever waits.

    beat: {"address", "port", "secret", "timeout_s"} or None. hello: what introduces this rank, `rank` in it.
    """

    def __init__(self, beat: dict, hello: dict) -> None:
        self.beat = beat if beat and beat.get("port") else None
        self.problem = None  # why there is no connection, from the time that one should have been made
        self._kept = [dict(hello, kind="hello")]
        self._link = None
        self._was_known = False
        self._noted = 0
        self._began_s = self._ticked_s = self._heard_s = self._tried_s = time.monotonic()
        self._retry_s = self._refused_s = None
        if self.beat:
            self._connect()

    def tick(self, report: dict) -> list:
        """Tell the supervisor `report` where it can be told now; what it says meanwhile."""
        now = time.monotonic()
        if now - self._ticked_s > ASLEEP_S:
            self._heard_s = self._tried_s = now
        self._ticked_s = now
        if self.beat is None:
            return []
        if self._link is None and now >= self._retry_s:
            self._connect()
        if self._link and self._link.is_known and not self._link.has_unsent:
            self._link.send(dict(report, kind="beat"))
        return self._pump()

    @property
    def connection(self) -> wire.Link:
        """What to wait for with `select` before `hear`; None while there is none."""
        return self._link

    def hear(self) -> list:
        """What the supervisor says; to be asked when its connection can be read."""
        return self._pump()

    def keep(self, message: dict) -> None:
        """Tell the supervisor this, now or as soon as there is a connection."""
        self._kept.append(message)
        if self._link:
            self._link.send(message)
            self._pump()

    def tell(self, message: dict) -> None:
        """Tell the supervisor this, if there is a connection."""
        if self._link:
            self._link.send(message)
            self._pump()

    def part(self, limit_s: float) -> None:
        """Wait until the supervisor has noted all that was kept, or cannot within the limit."""
        deadline = time.monotonic() + limit_s
        while self.beat and self._noted < len(self._kept) and time.monotonic() < deadline:
            if self._link is None:
                self._connect()
            select.select([self._link] if self._link else [], [], [], 0.02)
            self._pump()
            if self._link is None and self._refused_s is not None:
                break
        self._drop()
        self.beat = None

    @property
    def is_cut_off(self) -> bool:
        """Whether the head was there and has not been heard of for the limit, or its supervisor is certainly gone."""
        if not self._was_known or not self.beat:
            return False
        now = time.monotonic()
        is_refused = self._refused_s is not None and now - self._refused_s > REFUSED_S
        return is_refused or 0 < self.beat["timeout_s"] < now - self._heard_s

    def _connect(self) -> None:
        self._tried_s = time.monotonic()
        try:
            address = (self.beat["address"], self.beat["port"])
            found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
            connection = socket.socket(found[0], socket.SOCK_STREAM)
            self._link = wire.Link(connection, self.beat["secret"], wire.RANK)
            self._noted = 0
            for message in self._kept:
                self._link.send(message)
            code = connection.connect_ex(found[4])
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, "connect")
        except OSError as error:
            self._fail(error)

    def _pump(self) -> list:
        """Move the connection on; what has come."""
        if self._link is None:
            return []
        now = time.monotonic()
        try:
            said = self._link.pump()
            if not self._link.is_known and now - self._tried_s > CONNECT_S:
                raise socket.timeout("no answer within %d s" % CONNECT_S)
        except (OSError, ValueError) as error:
            self._make_again(error)
            return []
        if said:
            self._was_known, self._heard_s, self._refused_s = True, now, None
        for message in said:
            self._noted = max(self._noted, message.get("noted", 0))
        if self._link.is_over:
            self._make_again(ConnectionResetError("the other end closed the connection"))
        return said

    def _make_again(self, error: Exception) -> None:
        """At once after a connection that has worked for a while, as the head waits but a moment; else at a later tick."""
        has_worked = self._link.is_known and time.monotonic() - self._tried_s > RETRY_S
        self._fail(error)
        if has_worked:
            self._connect()

    def _fail(self, error: Exception) -> None:
        self._drop()
        now = time.monotonic()
        self._retry_s = now + RETRY_S
        if getattr(error, "errno", None) == errno.ECONNREFUSED:
            self._refused_s = self._refused_s or now
        else:
            self._refused_s = None
        if not self._was_known and now - self._began_s > CONNECT_S - RETRY_S:
            self.problem = "%s port %d: %s" % (self.beat["address"], self.beat["port"], getattr(error, "strerror", None) or error)

    def _drop(self) -> None:
        if self._link:
            self._link.close()
        self._link = None
