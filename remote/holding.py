"""On the head: hold the locks of a run's other nodes over SSH. Started by the supervisor, see `outposts.py`.

Usage: holding.py RUN_DIR       ends at SIGTERM, and with the supervisor

On every other node it has a `locks.py hold`, which ends when this process does, and when nothing is heard from here for a
while (`caller.py`): so a node that is cut off is free for others after that. A connection that broke is made again.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time

import caller
import children
import locks
import outposts
import records
import resume
import runs

AGAIN_S = (1.0, 5.0, 15.0)  # between two tries to reach a node; the last one again and again
LEAVE_LIMIT_S = 3.0
# Sooner than ssh_config's own: a node that was cut off is to be asked again as soon as it is back.
KEEP_ALIVE = ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]


class Leave(Exception):
    """SIGTERM came."""


class Holder:
    """One node's `locks.py hold`, by SSH."""

    def __init__(self, node: str, argv: list, owner: dict, selector: selectors.BaseSelector) -> None:
        self.node = node
        self.is_asked = True  # it has not answered yet
        self.busy = None  # who has it
        self._argv = argv[:1] + KEEP_ALIVE + argv[1:]
        self._owner = json.dumps(owner).encode("ascii") + b"\n"
        self._selector = selector
        self._process = None
        self._rest = b""
        self._tries = 0
        self._again_s = 0.0

    def tick(self) -> None:
        """To be called every few seconds: tells the node that we live, or tries to reach it."""
        if self._process:
            self._say(caller.ALIVE)
        elif time.monotonic() >= self._again_s:
            self._open()

    def hear(self) -> None:
        """Take in what the node says; to be called when there is something."""
        data = os.read(self._process.stdout.fileno(), 65536)
        whole = (self._rest + data).split(b"\n")
        self._rest = whole.pop()
        for line in whole:
            self._take(line)
        if not data:
            self._closed()

    def leave(self, deadline: float) -> None:
        """See it end until then, or end it. All are let go (`let_go`) before the first is waited for."""
        try:
            if self._process:
                self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()

    def let_go(self) -> None:
        """Have the node give the lock up."""
        try:
            if self._process:
                self._process.stdin.close()
        except OSError:
            pass  # it has ended

    def _open(self) -> None:
        parent = os.getpid()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(self._argv, preexec_fn=lambda: children.die_with(parent, signal.SIGKILL), **pipes)
        self._rest = b""
        self._selector.register(self._process.stdout, selectors.EVENT_READ, self.hear)
        self._say(self._owner)

    def _say(self, word: bytes) -> None:
        try:
            self._process.stdin.write(word)
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended, which its stdout tells

    def _take(self, line: bytes) -> None:
        try:
            said = json.loads(line.decode("ascii"))
        except ValueError:
            return  # a login shell's greeting
        if "held" in said or "busy" in said or "error" in said:
            self.is_asked, self._tries = False, 0
            self.busy = ", ".join("run %s of %s" % (lock["run_id"], lock["user"]) for lock in said.get("busy", [])) or None

    def _closed(self) -> None:
        self._selector.unregister(self._process.stdout)
        self._process.stdout.close()
        self.let_go()
        self._process.wait()
        self._process, self.busy, self.is_asked = None, None, False
        self._again_s = time.monotonic() + AGAIN_S[min(self._tries, len(AGAIN_S) - 1)]
        self._tries += 1


def main(arguments: list) -> int:
    """Hold the locks until SIGTERM."""
    signal.signal(signal.SIGTERM, leave)
    run_dir = arguments[0]
    order = records.read_record(os.path.join(run_dir, "run.json"))
    selector = selectors.DefaultSelector()
    place, owner = resume.Place(run_dir, order, run_dir), owner_of(run_dir, order["launch"]["run_id"])
    words = ["hold"]
    holders = [Holder(node, place.argv(node, "locks.py", words), owner, selector) for node in sorted(place.addresses)]
    try:
        hold(holders, selector, os.path.join(run_dir, outposts.RECORD))
    except Leave:
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for holder in holders:
        holder.let_go()
    deadline = time.monotonic() + LEAVE_LIMIT_S
    for holder in holders:
        holder.leave(deadline)
    return 0


def leave(*_: object) -> None:
    """What SIGTERM does."""
    raise Leave


def owner_of(run_dir: str, run_id: str) -> dict:
    """What the other nodes are told: what the lock of this machine says of the run, if it has one."""
    found = None
    try:
        if os.path.isdir(locks.path()):
            with locks.Directory(is_to_be_made=False) as directory:
                found = directory.read(run_id + ".json")
    except runs.Problem as problem:
        records.complain(str(problem))
    told = {name: found[name] for name in found if name not in ("state", "user", "is_own", "since_unix_s")} if found else {}
    root = os.path.dirname(os.path.dirname(run_dir))
    return dict({"root": root}, **dict(told, run_id=run_id, silence_s=caller.SILENCE_S))


def hold(holders: list, selector: selectors.BaseSelector, record: str) -> None:
    """Hold, and write down what is known whenever it changes; until Leave."""
    told, tick_s = None, 0.0
    while True:
        if time.monotonic() >= tick_s:
            tick_s = time.monotonic() + (caller.BEAT_S if all(not holder.is_asked for holder in holders) else AGAIN_S[0])
            for holder in holders:
                holder.tick()
        for key, _ in selector.select(max(0.0, tick_s - time.monotonic())):
            key.data()
        known = {
            "asked": [holder.node for holder in holders if holder.is_asked],
            "busy": {holder.node: holder.busy for holder in holders if holder.busy},
        }
        if known != told:
            told = known
            write(record, known)


def write(path: str, document: dict) -> None:
    """Write a record; a full disk must not end the locks."""
    try:
        records.write_record(path, document)
    except OSError as error:
        records.complain("%s could not be written: %s" % (os.path.basename(path), error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
