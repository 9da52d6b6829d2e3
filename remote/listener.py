"""The supervisor's end of the heartbeat: what every rank has said of itself, and since when nothing was heard of it.

It serves as many ranks as there are from the supervisor's one thread. Times are this machine's monotonic clock at arrival:
the clocks of other nodes may differ, so what happened first is what was heard of first.
"""

import resource
import secrets
import selectors
import socket
import time

import records
import wire

RETURN_S = 1.0  # for a rank whose connection has broken: to come back, or for its guard to speak for it
QUIET_S = 10.0  # without a beat: worth telling, long before the limit
STRANGER_S = 10.0  # for a new connection to prove that it is a rank
ASLEEP_S = 5.0  # between two looks: this process was stopped, and so were all clocks that it goes by
SPARE_DESCRIPTORS = 128


class Rank:
    """What is known of one rank."""

    def __init__(self, number: int, node: str, now_s: float) -> None:
        self.number = number
        self.node = node
        self.link = None
        self.hello = None
        self.cpu_s = 0.0
        self.log_bytes = 0
        self.cpu_at_log_s = 0.0  # of its CPU time, when it last wrote something
        self.heard_s = self.logged_s = now_s
        self.gone_s = None  # when its connection broke; None while it has one
        self.lost_s = None  # since when it was missing, where the run is ended because of that
        self.ended = None  # its exit record; at first the short one, from before its processes were all ended
        self.ended_s = None
        self.stacks = None
        self.launched = None  # how many living processes MPI's daemon on its node has, as it said last
        self.without = None  # why there is no heartbeat from it

    @property
    def has_reported(self) -> bool:
        """Whether it is known to have started."""
        return bool(self.hello or self.without or self.ended)

    @property
    def is_over(self) -> bool:
        """Whether its exit record is complete."""
        return bool(self.ended and "ended_unix_s" in self.ended)

    def missing_since(self, now_s: float, timeout_s: float) -> float:
        """Since when it is lost, without a word about its end; None where it is not."""
        if self.ended or not self.hello:
            return None
        if self.gone_s is not None and now_s - self.gone_s > RETURN_S:
            return self.gone_s
        return self.heard_s if 0 < timeout_s < now_s - self.heard_s else None


class Listener:
    """Listens on the cluster network; OSError where it cannot.

    beat: {"address", "timeout_s", "ports"} of the launch document; without ports the system chooses one.
    places: (rank, node) of all ranks. selector: where connections are registered, with a callable as their data.
    """

    def __init__(self, beat: dict, places: list, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        self.ranks = {number: Rank(number, node, now) for number, node in places}
        self.timeout_s = beat["timeout_s"]
        self.has_news = False  # about an end, a start, or a stack, since it was last set to False
        self._selector = selector
        self._secret = secrets.token_hex(32)
        self._strangers = {}  # link -> since when
        self._owners = {}  # link -> [rank, how many of its kept messages came]
        self._looked_s = now
        self._socket = listen(beat["address"], beat.get("ports") or [0])
        make_room(2 * len(places) + SPARE_DESCRIPTORS)
        selector.register(self._socket, selectors.EVENT_READ, self._accept)
        self.beat = dict(beat, port=self._socket.getsockname()[1], secret=self._secret)

    def look(self) -> None:
        """To be called a few times a second: moves on what waits, forgets strangers, notices that we ourselves slept."""
        now = time.monotonic()
        if now - self._looked_s > ASLEEP_S:
            for rank in self.ranks.values():
                rank.heard_s = rank.logged_s = now
                rank.gone_s = now if rank.gone_s is not None else None
        self._looked_s = now
        for link in [link for link in self._owners if link.has_unsent]:
            self._serve(link)
        for link in [link for link, since in self._strangers.items() if now - since > STRANGER_S]:
            self._drop(link)

    def send(self, message: dict, ranks: list) -> None:
        """Tell these ranks something, as far as there are connections."""
        for rank in ranks:
            if rank.link:
                rank.link.send(message)
                self._serve(rank.link)

    def living(self) -> list:
        """The ranks that have started and of whose end nothing is known."""
        return [rank for rank in self.ranks.values() if rank.hello and not rank.ended]

    def unbegun(self) -> list:
        """The ranks that can never begin: the others on their node say that MPI's daemon there has too few processes left.

        hydra starts all ranks of a node before the first of them can say anything.
        """
        found = []
        for node in sorted({rank.node for rank in self.ranks.values()}):
            those = [rank for rank in self.ranks.values() if rank.node == node and not rank.ended]
            unheard = [rank for rank in those if not rank.has_reported]
            told = [rank.launched for rank in those if rank.launched is not None]
            if told and max(told) <= len(those) - len(unheard):
                found += unheard
        return found

    def close(self) -> None:
        """Stop listening, and let all connections go."""
        self._selector.unregister(self._socket)
        self._socket.close()
        for link in list(self._owners) + list(self._strangers):
            self._drop(link)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return  # it has gone already
        link = wire.Link(connection, self._secret, wire.HEAD)
        self._strangers[link] = time.monotonic()
        self._selector.register(link, selectors.EVENT_READ, lambda: self._serve(link))
        self._serve(link)

    def _serve(self, link: wire.Link) -> None:
        why = "it was closed"
        try:
            for message in link.pump():
                self._take(link, message)
            if link.has_unsent and not link.is_over:
                link.pump()
        except (OSError, ValueError, KeyError, TypeError) as error:
            link.is_over, why = True, error
        if link.is_over:
            self._drop(link, why)

    def _take(self, link: wire.Link, message: dict) -> None:
        if message["kind"] == "hello":
            self._welcome(link, self.ranks[message["rank"]], message)
        owner = self._owners[link]
        rank, now = owner[0], time.monotonic()
        rank.heard_s = now
        if message["kind"] == "beat":
            rank.cpu_s, rank.launched = message["cpu_s"], message.get("launched")
            if message["log_bytes"] != rank.log_bytes:
                rank.log_bytes, rank.logged_s, rank.cpu_at_log_s = message["log_bytes"], now, rank.cpu_s
        elif message["kind"] == "stacks":
            rank.stacks, self.has_news = message, True
        else:
            owner[1] += 1
        if message["kind"] == "ended":
            rank.ended, rank.ended_s, self.has_news = message["record"], rank.ended_s or now, True
        link.send({"noted": owner[1]})

    def _welcome(self, link: wire.Link, rank: Rank, hello: dict) -> None:
        self._strangers.pop(link, None)
        if rank.link and rank.link is not link:
            self._owners.pop(rank.link, None)
            self._let_go(rank.link)
        self._owners[link] = [rank, 0]
        if not rank.hello:
            rank.logged_s = time.monotonic()
        rank.link, rank.hello, rank.gone_s, rank.without, self.has_news = link, hello, None, None, True

    def _drop(self, link: wire.Link, why: object = "it was let go") -> None:
        self._strangers.pop(link, None)
        rank = self._owners.pop(link, [None])[0]
        if rank:
            if not rank.ended:
                records.complain("the connection of rank %d on %s broke: %s" % (rank.number, rank.node, why))
            rank.link, rank.gone_s, self.has_news = None, time.monotonic(), True
        self._let_go(link)

    def _let_go(self, link: wire.Link) -> None:
        try:
            self._selector.unregister(link)
        except (KeyError, ValueError):
            pass  # let go before
        link.close()


def listen(address: str, ports: list) -> socket.socket:
    """A socket that listens on the first of these ports that is free (0: any); OSError where none is."""
    for port in ports:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
        listening = socket.socket(found[0], socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last run's may still be in TIME_WAIT
            listening.bind(found[4])
            listening.listen(1024)
        except OSError:
            listening.close()
            if port == ports[-1]:
                raise
            continue
        listening.setblocking(False)
        return listening
    raise OSError("no port to listen on")


def make_room(descriptors: int) -> None:
    """Be allowed this many open files, where the hard limit lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < descriptors:
        wanted = descriptors if hard == resource.RLIM_INFINITY else min(hard, descriptors)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
