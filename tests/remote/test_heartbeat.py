"""Ranks and supervisor hear each other: what dies or falls silent is noticed and named, and what is well is left alone."""

from __future__ import annotations

import os
import queue
import re
import secrets
import select
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from supervised import LIMIT_S, MpiNode, Node, environment, records, tagged, until

import listener  # isort: skip  (remote/ is on the path since supervised was imported)
import pulse  # isort: skip
import wire  # isort: skip

WAITS = "import time; print('ready')\nwhile True: time.sleep(0.1)\n"
TICKS = "import time\nwhile True: print('tick'); time.sleep(0.2)\n"
ALONE = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "root")
    yield made
    end_all(made)


@pytest.fixture
def mpi_node(tmp_path: Path, training_python: Path) -> Iterator[MpiNode]:
    made = MpiNode(tmp_path / "root", str(training_python))
    yield made
    end_all(made)


def end_all(node: Node) -> None:
    for run_dir in node.root.glob("runs/*"):
        for pid in pids_of(node, run_dir.name):
            try_kill(pid, signal.SIGCONT)
        node.stop(run_dir.name, "--now")
        node.sweep(run_dir.name, "--patience-s", "0")


def try_kill(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass


def two_nodes(launch: dict[str, Any]) -> dict[str, Any]:
    """The launch with its ranks as if on two nodes, the first half of them on node0."""
    for plan in launch["ranks"]:
        plan["node"] = f"node{2 * plan['rank'] // len(launch['ranks'])}"
    return launch


def pids_of(node: Node, run_id: str, ranks: tuple[int, ...] | None = None) -> list[int]:
    """Guard, keeper and script of these ranks, outermost first."""
    found = [rank for rank in node.status(run_id)["ranks"] if "pid" in rank and (ranks is None or rank["rank"] in ranks)]
    return [pid for rank in found for pid in (rank["pid"], rank["keeper"]["pid"], rank["child"]["pid"])]


def until_running(node: Node, run_id: str) -> None:
    until(lambda: node.status(run_id)["state"] == "running", f"{run_id} is running")


@pytest.mark.stack
def test_a_run_runs_once_every_rank_has_reported(mpi_node: MpiNode) -> None:
    """`starting` until then; the status names the nodes that are heard; the secret is in no file."""
    mpi_node.start_mpi(two_nodes(mpi_node.launch("heard", WAITS)))
    until_running(mpi_node, "heard")
    until(lambda: mpi_node.status("heard")["nodes"] == {"node0": "heard", "node1": "heard"}, "both nodes")
    for path in mpi_node.run_dir("heard").iterdir():
        assert path.is_dir() or '"secret"' not in path.read_text(), path
    assert mpi_node.stop("heard")[1]["verdict"] is None


@pytest.mark.stack
def test_a_rank_whose_every_process_was_killed_is_named(mpi_node: MpiNode) -> None:
    """Nobody is left to tell of it, and Intel MPI does not notice: its silence does; the others are ended."""
    mpi_node.start_mpi(two_nodes(mpi_node.launch("gone", WAITS)))
    until_running(mpi_node, "gone")
    until(lambda: mpi_node.status("gone")["nodes"].get("node1") == "heard", "node1")
    for signum in (signal.SIGSTOP, signal.SIGKILL):  # none of them may see another one die
        for pid in pids_of(mpi_node, "gone", (2,)):
            try_kill(pid, signum)
    status = mpi_node.until_final("gone")
    verdict = status["verdict"]
    assert (status["state"], verdict["kind"], verdict["rank"], verdict["node"]) == ("failed", "vanished", 2, "node1")
    assert [other["summary"] for other in verdict["others"]] == ["ended with the others"] * 3
    assert tagged("gone") == []


@pytest.mark.stack
def test_a_node_that_falls_silent_is_lost(mpi_node: MpiNode) -> None:
    """All ranks of node1 are frozen for longer than the limit: that is the verdict, and the ranks of node0 are ended."""
    launch = two_nodes(mpi_node.launch("frozen", TICKS, beat={"address": "127.0.0.1", "timeout_s": 6.0}))
    mpi_node.start_mpi(launch)
    until_running(mpi_node, "frozen")
    for pid in pids_of(mpi_node, "frozen", (2, 3)):
        os.kill(pid, signal.SIGSTOP)
    frozen_s = time.monotonic()
    status = mpi_node.until_final("frozen")
    assert time.monotonic() - frozen_s > 5
    assert (status["state"], status["verdict"]["kind"], status["verdict"]["node"]) == ("failed", "node_lost", "node1")
    assert status["reason"] == "node1 was lost: nothing is heard of its ranks 2, 3"
    assert [(rank["exit"]["signal"], rank["exit"]["ended_by"]) for rank in status["ranks"][:2]] == [("SIGTERM", "abort")] * 2
    assert tagged("frozen") == []


@pytest.mark.stack
def test_a_rank_that_was_silent_too_long_is_named(mpi_node: MpiNode) -> None:
    """It ran all the time and is ended with the others: not that is the verdict, but whose silence has ended them."""
    mpi_node.start_mpi(two_nodes(mpi_node.launch("silent", TICKS, beat={"address": "127.0.0.1", "timeout_s": 6.0})))
    until_running(mpi_node, "silent")
    keeper = pids_of(mpi_node, "silent", (2,))[1]
    os.kill(keeper, signal.SIGSTOP)
    until(lambda: (mpi_node.run_dir("silent") / "rank-0.exit.json").exists(), "the end of the others")
    os.kill(keeper, signal.SIGCONT)
    status = mpi_node.until_final("silent")
    verdict = status["verdict"]
    assert (status["state"], verdict["kind"], verdict["rank"], verdict["node"]) == ("failed", "silent", 2, "node1"), verdict
    assert re.match(r"rank 2 on node1 was not heard of for \d+ s although it ran", verdict["summary"])
    assert tagged("silent") == []


@pytest.mark.stack
def test_a_node_that_is_frozen_for_less_than_the_limit_goes_on(mpi_node: MpiNode) -> None:
    """It is told to be quiet meanwhile, and the run ends as if nothing had been."""
    source = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.1)\n"
    mpi_node.start_mpi(two_nodes(mpi_node.launch("paused", source, beat={"address": "127.0.0.1", "timeout_s": 120.0})))
    until_running(mpi_node, "paused")
    pids = pids_of(mpi_node, "paused", (2, 3))
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: mpi_node.status("paused")["nodes"]["node1"] == "quiet", "the silence to be seen")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    until(lambda: mpi_node.status("paused")["nodes"]["node1"] == "heard", "the end of the silence")
    (mpi_node.run_dir("paused") / "work" / "go").touch()
    assert mpi_node.until_final("paused")["state"] == "succeeded"


@pytest.mark.stack
def test_a_frozen_supervisor_ends_nothing(mpi_node: MpiNode) -> None:
    """When it goes on, it does not take the time it has slept for silence of the ranks."""
    launch = mpi_node.launch("slept", TICKS, beat={"address": "127.0.0.1", "timeout_s": 8.0})
    mpi_node.start_mpi(launch)
    until_running(mpi_node, "slept")
    supervisor = mpi_node.status("slept")["supervisor"]["pid"]
    os.kill(supervisor, signal.SIGSTOP)
    stopped_s = time.monotonic()
    until(lambda: time.monotonic() - stopped_s > 6, "a pause that is shorter than the limit")
    os.kill(supervisor, signal.SIGCONT)
    woke_s = time.monotonic()
    until(lambda: time.monotonic() - woke_s > 3, "some beats")
    assert mpi_node.status("slept")["state"] == "running"


class Head:
    """A listener as the supervisor has one, served by a thread until it is `frozen`."""

    def __init__(self, timeout_s: float, ranks: int = 1) -> None:
        self.selector = selectors.DefaultSelector()
        beat = {"address": "127.0.0.1", "timeout_s": timeout_s}
        self.listener = listener.Listener(beat, [(rank, "node0") for rank in range(ranks)], self.selector)
        self._end, self.is_frozen = threading.Event(), False
        self._words: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._end.is_set():
            for key, _ in self.selector.select(0.02):
                if not self.is_frozen:
                    key.data()
            self.listener.look()
            while not self._words.empty():
                self.listener.send(self._words.get(), self.listener.living())

    def tell(self, word: dict[str, Any]) -> None:
        """Send the living ranks a word: by the one thread that serves them, as in the supervisor."""
        self._words.put(word)

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self.listener.close()
        self.selector.close()


@pytest.fixture
def head() -> Iterator[Callable[..., Head]]:
    made: list[Head] = []

    def start(*arguments: Any) -> Head:
        made.append(Head(*arguments))
        return made[-1]

    yield start
    for one in made:
        one.close()


def begin(node: Node, launch: dict[str, Any]) -> subprocess.Popen[str]:
    argv = [node.python, str(node.agent_dir / "rank.py")]
    env = environment(**ALONE, **{records.LAUNCH_VARIABLE: records.encode_launch(launch)})
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_rank_that_has_lost_the_head_ends_itself(node: Node, head: Callable[..., Head]) -> None:
    """No answer for the limit, though the connection stands: as when the network is cut."""
    there = head(5.0)
    process = begin(node, node.launch("cut", WAITS, size=1, beat=there.listener.beat))
    until(lambda: there.listener.living(), "its first beat")
    there.is_frozen = True
    assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    record = records.read_record(str(node.run_dir("cut") / "rank-0.exit.json"))
    assert (record["ended_by"], record["stopped"]) == ("cut_off", True)
    process.communicate()


def test_a_rank_is_told_that_the_job_is_lost(node: Node, head: Callable[..., Head]) -> None:
    """A word from the head ends it, under any MPI; its end is known there before it has gone."""
    there = head(60.0)
    process = begin(node, node.launch("told", WAITS, size=1, beat=there.listener.beat))
    node.until_all_say("told", "ready", size=1)
    until(lambda: there.listener.living(), "its first beat")
    there.tell({"end": "abort"})
    assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert there.listener.ranks[0].ended["ended_by"] == "abort"
    process.communicate()


def test_a_rank_runs_on_where_the_port_cannot_be_reached(node: Node) -> None:
    """A firewall must not end a run: it is said once, with address and reason, and nothing else happens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        beat = {"address": "127.0.0.1", "port": unused.getsockname()[1], "secret": "00", "timeout_s": 5.0}
        source = "import time\nfor _ in range(130): time.sleep(0.1)\n"
        process = begin(node, node.launch("firewall", source, size=1, beat=beat))
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0
    expected = (
        f"cluster-train: rank 0 on node0: no heartbeat to 127.0.0.1 port {beat['port']}: Connection refused; it runs on without\n"
    )
    assert stderr == expected


def test_the_head_knows_of_a_rank_that_cannot_be_heard(node: Node) -> None:
    """It says so through mpirun: the run counts as started, and the status names why there is no heartbeat."""
    text = "cluster-train: rank 0 on node0: no heartbeat to 10.0.0.1 port 9: No route to host; it runs on without"
    launch = node.launch("unheard", "", size=1)
    argv = ["/bin/sh", "-c", f"echo '{text}' >&2; exec sleep 60"]
    node.limits = {"start_timeout_s": 30.0}
    assert node.start(launch, argv)[0] == 0
    until_running(node, "unheard")
    expected = {"node0": "no heartbeat: 10.0.0.1 port 9: No route to host"}
    until(lambda: node.status("unheard")["nodes"] == expected, "the reason")


@pytest.mark.parametrize(
    "stranger", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 2_000_000, b"0" * 32 + b"\n" + b"f" * 64 + b' {"kind": "hello", "rank": 0}\n']
)
def test_a_stranger_at_the_port_is_not_believed(head: Callable[..., Head], stranger: bytes) -> None:
    """Whatever it sends, it is no rank, it is dropped, and a real rank is heard beside it."""
    there = head(60.0)
    with socket.create_connection(("127.0.0.1", there.listener.beat["port"])) as connection:
        connection.settimeout(LIMIT_S)
        try:
            connection.sendall(stranger)
            while connection.recv(100):
                pass
        except ConnectionError:
            pass
    assert not there.listener.living()
    real = pulse.Pulse(there.listener.beat, {"rank": 0})
    until(lambda: (real.tick({"cpu_s": 0.0, "log_bytes": 0}), there.listener.living())[1], "the rank")
    real.part(5.0)


def test_a_broken_connection_is_made_again_at_once(head: Callable[..., Head]) -> None:
    """The head waits a second for the rank to return, which is also the time between two ticks: it must not wait for one."""
    there = head(60.0)
    one = pulse.Pulse(there.listener.beat, {"rank": 0})
    until(lambda: (one.tick({"cpu_s": 0.0, "log_bytes": 0}), one.connection.is_known)[1], "the first connection")
    first, began_s = one.connection, time.monotonic()
    until(lambda: time.monotonic() - began_s > pulse.RETRY_S, "one that has worked for a while")
    with socket.socket(fileno=os.dup(first.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)  # as when something between the two ends it

    def hear() -> bool:
        if select.select([one.connection], [], [], 0.05)[0]:
            one.hear()
        return one.connection is not first and one.connection.is_known

    until(hear, "the next connection, without a tick")
    assert there.listener.ranks[0].gone_s is None and there.listener.living()
    one.part(5.0)


def test_a_rank_does_not_believe_a_false_head(head: Callable[..., Head]) -> None:
    """Another program at the port, without the run's secret, cannot end a rank."""
    there = head(60.0)
    fooled = pulse.Pulse(dict(there.listener.beat, secret=secrets.token_hex(32)), {"rank": 0})
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        assert fooled.tick({"cpu_s": 0.0, "log_bytes": 0}) == []
        time.sleep(0.05)
    assert not there.listener.living() and not fooled.is_cut_off


def test_many_ranks_are_heard_by_one_thread(head: Callable[..., Head]) -> None:
    """256 ranks: each is heard, each end arrives and is noted."""
    there = head(60.0, 256)
    ranks = [pulse.Pulse(there.listener.beat, {"rank": rank}) for rank in range(256)]

    def tick() -> bool:
        for one in ranks:
            one.tick({"cpu_s": 1.0, "log_bytes": 5})
        return all(rank.log_bytes == 5 for rank in there.listener.ranks.values())

    until(tick, "all of them")
    for number, one in enumerate(ranks):
        one.keep({"kind": "ended", "record": {"rank": number, "ended_unix_s": 1.0}})
    for one in ranks:
        one.part(LIMIT_S)
    assert all(rank.is_over and rank.ended["rank"] == number for number, rank in there.listener.ranks.items())


@settings(deadline=None)
@given(
    messages=st.lists(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=50), max_size=4), max_size=8),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30),
)
def test_messages_arrive_whatever_way_the_network_cuts_them(messages: list[dict[str, Any]], sizes: list[int]) -> None:
    """Each once, in order, both ways, however the bytes come."""
    with Between() as between:
        for message in messages:
            between.head.send(message)
            between.rank.send(message)
        seen = between.carry(sizes)
    assert seen == {"head": messages, "rank": messages}


@settings(deadline=None)
@given(position=st.integers(0, 400), flip=st.integers(1, 255))
def test_no_byte_can_be_changed_under_way(position: int, flip: int) -> None:
    """A changed byte never gives another message: what arrives is what was sent up to there, then the connection is broken."""
    sent = [{"n": n, "text": "x" * 20} for n in range(3)]
    with Between() as between:
        for message in sent:
            between.rank.send(message)
        between.change = (position, flip)
        seen = between.carry([64])["head"]
    assert seen == sent[: len(seen)]
    assert len(seen) < len(sent) or between.changed is False


class Between:
    """Two links and a middle man who hands their bytes on."""

    def __init__(self) -> None:
        pairs = [tcp_pair() for _ in range(2)]
        (mine, self._near_head), (theirs, self._near_rank) = pairs
        self.head, self.rank = wire.Link(mine, "secret", wire.HEAD), wire.Link(theirs, "secret", wire.RANK)
        self.change: tuple[int, int] | None = None
        self.changed = False
        self._passed = 0

    def __enter__(self) -> Between:
        return self

    def __exit__(self, *_: object) -> None:
        for end in (self.head, self.rank, self._near_head, self._near_rank):
            end.close()

    def carry(self, sizes: list[int], wanted: int = 0) -> dict[str, list[Any]]:
        """Hand bytes on until a connection breaks, or so many messages have come; without a number, until no byte comes."""
        seen: dict[str, list[Any]] = {"head": [], "rank": []}
        idle, deadline = 0, time.monotonic() + LIMIT_S
        while (idle < 30 if not wanted else len(seen["head"] + seen["rank"]) < wanted) and time.monotonic() < deadline:
            before = self._passed
            time.sleep(0.0002 * min(idle, 30))  # loopback hands bytes on in its own time
            for name, link in (("head", self.head), ("rank", self.rank)):
                try:
                    seen[name] += link.pump()
                except OSError:
                    return seen
            for size in sizes:
                self._pass(self._near_rank, self._near_head, size, is_to_head=True)
                self._pass(self._near_head, self._near_rank, size, is_to_head=False)
            idle = 0 if self._passed != before else idle + 1
        return seen

    def _pass(self, source: socket.socket, target: socket.socket, size: int, is_to_head: bool) -> None:
        try:
            data = bytearray(source.recv(size))
        except BlockingIOError:
            return
        if self.change and is_to_head and not self.changed:
            position, flip = self.change
            if position < len(data):
                data[position] ^= flip
                self.changed = True
            self.change = (position - len(data), flip)
        self._passed += len(data)
        try:
            target.sendall(bytes(data))
        except OSError:
            pass


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    far.setblocking(False)
    return near, far


def test_the_listener_takes_the_first_free_port_of_its_range() -> None:
    """A port that another run has is passed over; where all are taken it says so."""
    first = listener.listen("127.0.0.1", [0])
    taken = first.getsockname()[1]
    with first, listener.listen("127.0.0.1", [taken, 0]) as second:
        assert second.getsockname()[1] != taken
        with pytest.raises(OSError, match="in use"):
            listener.listen("127.0.0.1", [taken])
