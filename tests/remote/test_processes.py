"""Processes are known by pid and start time; what is ended is exactly what was meant."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from supervised import REMOTE, processes, until

Start = Callable[..., "subprocess.Popen[str]"]
SLEEP = "import time; print('ready', flush=True); time.sleep(60)"


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Python program, waits until it says `ready`, and ends it after the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(source: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env={**os.environ, **env})
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_a_process_is_alive_until_it_ends(start: Start) -> None:
    """An identity holds while the process runs, not while it waits as a zombie, and not after."""
    process = start(SLEEP)
    who = processes.identity(process.pid)
    assert processes.is_alive(who)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not processes.is_alive(who), "a zombie counts as dead"
    process.wait()
    assert not processes.is_alive(who)
    assert processes.identity(process.pid) is None
    assert not processes.is_alive(None)


def test_a_number_used_again_is_another_process(start: Start) -> None:
    """A process with the recorded pid but another start time gets no signal."""
    process = start(SLEEP)
    who = processes.identity(process.pid)
    earlier = dict(who, start_ticks=who["start_ticks"] - 1)
    assert not processes.is_alive(earlier)
    assert not processes.send(earlier, signal.SIGKILL)
    assert processes.is_alive(who)
    assert processes.send(who, signal.SIGKILL)
    until(lambda: not processes.is_alive(who), "its death")


@pytest.mark.parametrize("name", ["a b", ") Z 1 (", "((", "x) S 1"])
def test_a_name_with_parentheses_is_no_trap(start: Start, name: str) -> None:
    """The kernel puts the command's name, whatever it is, in the middle of the numbers."""
    process = start(f"open('/proc/self/comm', 'w').write({name!r}); {SLEEP}")
    assert processes.is_alive(processes.identity(process.pid))
    assert process.pid in [who["pid"] for who in processes.descendants(os.getpid())]


def test_a_process_lives_while_one_of_its_threads_does(start: Start) -> None:
    """A main thread that has ended shows as a zombie, though the process works on."""
    source = (
        "import ctypes, threading, time\n"
        "def work():\n"
        "    while open('/proc/self/stat').read().rsplit(')', 1)[1].split()[0] != 'Z': time.sleep(0.01)\n"
        "    print('ready', flush=True); time.sleep(60)\n"
        "threading.Thread(target=work).start()\n"
        "ctypes.CDLL(None).syscall(60, 0)\n"
    )
    process = start(source)
    who = processes.identity(process.pid)
    assert processes.is_alive(who)
    processes.send(who, signal.SIGKILL)
    until(lambda: not processes.is_alive(who), "its death")


def test_descendants_are_found_across_sessions(start: Start) -> None:
    """Children of children count, also those in a session of their own; the caller does not."""
    nested = f"import os, sys; os.setsid(); os.execv(sys.executable, [sys.executable, '-c', {SLEEP!r}])"
    outer = start(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {nested!r}]).wait()")
    below = [who["pid"] for who in processes.descendants(outer.pid)]
    assert len(below) == 1
    mine = [who["pid"] for who in processes.descendants(os.getpid())]
    assert {outer.pid, *below} <= set(mine)
    assert os.getpid() not in mine
    assert os.getpid() not in [who["pid"] for who in processes.descendants(os.getppid())]
    os.kill(below[0], signal.SIGKILL)


def test_a_tag_is_matched_whole(start: Start) -> None:
    """Only processes started with exactly these values are found, not those whose value merely begins so."""
    wanted = start(SLEEP, RUN="a-1", RANK="0")
    start(SLEEP, RUN="a-12", RANK="0")
    start(SLEEP, RUN="a-1", RANK="1")
    start(SLEEP, RUN="b-1", RANK="0")
    assert processes.tagged({"RUN": "a-1", "RANK": "0"}) == [processes.identity(wanted.pid)]
    assert len(processes.tagged({"RUN": "a-1"})) == 2


def test_the_searcher_does_not_find_itself(start: Start) -> None:
    """A process that carries the tag, and its ancestors, are spared by its own search."""
    look = "import sys; sys.path.insert(0, sys.argv[1])\nimport processes; print(processes.tagged({'RUN': 'self'}))"
    outer = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[2], sys.argv[1]])"
    directory = str(REMOTE)
    done = subprocess.run(
        [sys.executable, "-c", outer, directory, look],
        env={**os.environ, "RUN": "self"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[]\n", done.stderr


def test_ending_asks_first_and_kills_what_does_not_listen(start: Start) -> None:
    """A process that ends at SIGTERM is never killed; one that ignores it is, after the patience."""
    polite = start(f"import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); {SLEEP}", RUN="end-1")
    deaf = start(f"import signal; signal.signal(15, signal.SIG_IGN); {SLEEP}", RUN="end-1")
    other = start(SLEEP, RUN="end-2")
    both = [processes.identity(process.pid) for process in (polite, deaf)]

    found, left = processes.end(lambda: processes.tagged({"RUN": "end-1"}), both, 1.0)

    assert sorted(who["pid"] for who in found) == sorted([polite.pid, deaf.pid])
    assert left == []
    assert (polite.wait(), deaf.wait()) == (7, -signal.SIGKILL)
    assert other.poll() is None


def test_what_starts_others_while_it_is_killed_does_not_get_away(start: Start) -> None:
    """The list is made again until nothing is on it: a program that replaces its dead children loses."""
    source = (
        "import os, time\n"
        "print('ready', flush=True)\n"
        "os.close(1)\n"
        "while True:\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        os.setsid()\n"
        "        if os.fork(): time.sleep(60)\n"
        "        time.sleep(60)\n"
        "    os.waitpid(pid, 0)\n"
    )
    start(source, RUN="hydra-heads")
    tag = {"RUN": "hydra-heads"}
    until(lambda: len(processes.tagged(tag)) >= 3, "children")
    _, left = processes.kill_all(lambda: processes.tagged(tag))
    assert left == []
    assert processes.tagged(tag) == []
