"""What ranks wrote arrives whole, in order and once, however it was written and however often the connection broke."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from supervised import LIMIT_S, REMOTE, processes, records, tail, until

FILES = ("rank-0.out", "rank-0.err", "rank-3.out")
Follow = Callable[..., "Follower"]


class Follower:
    """A `tail.py` of its own, and what it has told so far."""

    def __init__(self, run_dir: Path, told: Path, *options: str) -> None:
        argv = [sys.executable, str(REMOTE / "tail.py"), "--run-dir", str(run_dir), *options]
        self._told = told
        with told.open("wb") as stdout:
            self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE)

    def messages(self) -> list[dict[str, Any]]:
        """Everything told so far; each line is one whole JSON object in ASCII."""
        lines = self._told.read_text("ascii").split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def kinds(self) -> list[str]:
        return [message.get("file", next(iter(message))) for message in self.messages()]

    def say(self, word: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word)
        self.process.stdin.flush()

    def end(self) -> list[dict[str, Any]]:
        """Wait until it ends by itself; all it told."""
        assert self.process.wait(LIMIT_S) == 0
        assert self.process.stderr is not None
        assert self.process.stderr.read() == b""
        return self.messages()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def follow(run_dir: Path, tmp_path: Path) -> Iterator[Follow]:
    started: list[Follower] = []

    def begin(*options: str) -> Follower:
        started.append(Follower(run_dir, tmp_path / f"told-{len(started)}", *options))
        return started[-1]

    yield begin
    for follower in started:
        follower.close()


def contents(messages: list[dict[str, Any]]) -> dict[str, bytes]:
    """Each file put together from its chunks, which must follow one another without gap or overlap."""
    files: dict[str, bytes] = {}
    for message in messages:
        if "file" in message:
            before = files.get(message["file"], b"")
            assert message["offset"] == len(before), message["file"]
            files[message["file"]] = before + message["data"].encode("latin-1")
    return files


def write_record(run_dir: Path, name: str, **record: Any) -> None:
    run_dir.mkdir(exist_ok=True)
    records.write_record(str(run_dir / name), record)


def running(**changes: Any) -> dict[str, Any]:
    """A status whose supervisor lives: this process."""
    here = {"machine": processes.machine(), "boot": processes.boot(), "supervisor": processes.identity(os.getpid())}
    return {"state": "running", **here, **changes}


written = st.one_of(st.binary(max_size=50), st.sampled_from([b"\r 50%|#  |", b"line\n", b"\x1b[31m\xff\0", b"x" * 70_000]))
steps = st.lists(
    st.one_of(st.tuples(st.sampled_from(FILES), written), st.sampled_from(["look", "resume", "record", "exit"])), max_size=30
)


@settings(deadline=None)
@given(steps)
def test_any_interleaving_reproduces_the_files(story: list[Any]) -> None:
    """Writing, looking, breaking off and going on again, in any order: every byte once, in order, before its exit record."""
    with tempfile.TemporaryDirectory() as directory:
        expected: dict[str, bytes] = {}
        told: list[dict[str, Any]] = []

        def look(follower: tail.Tail) -> None:
            told.extend(message for batch in follower.look() for message in batch)

        current = tail.Tail(directory, [0, 3], {}, False)
        for step in story:
            if isinstance(step, tuple):
                with (Path(directory) / step[0]).open("ab") as log:
                    log.write(step[1])
                expected[step[0]] = expected.get(step[0], b"") + step[1]
            elif step == "look":
                look(current)
            elif step == "resume":
                reached = {name: len(data) for name, data in contents(told).items()}
                current = tail.Tail(directory, [0, 3], reached, False)
            else:
                write_record(Path(directory), "rank-0.json" if step == "record" else "rank-0.exit.json", rank=0)
        look(current)
        assert contents(told) == {name: data for name, data in expected.items() if data}
        assert current.has_ended is False, "rank 3 never ends here"
        last_data = max((n for n, message in enumerate(told) if message.get("file", "").startswith("rank-0")), default=-1)
        if "exit" in story and not any(isinstance(step, tuple) for step in story[story.index("exit") :]):
            assert {"exit": {"rank": 0}} in told[last_data + 1 :]


def test_without_follow_it_tells_what_is_there(run_dir: Path, follow: Follow) -> None:
    """Records and files so far, of the ranks asked for; nothing for a run that is not there."""
    assert follow("--ranks", "0").end() == []
    write_record(run_dir, "rank-1.json", rank=1, pid=5)
    (run_dir / "rank-1.out").write_bytes(b"half a li")
    (run_dir / "rank-2.out").write_bytes(b"another's")
    (run_dir / "mpirun.err").write_bytes(b"for the head only")
    assert follow("--ranks", "0,1").end() == [
        {"rank": {"rank": 1, "pid": 5}},
        {"file": "rank-1.out", "offset": 0, "data": "half a li"},
    ]
    assert follow("--ranks", "1", "--offsets", '{"rank-1.out": 5}').end()[1:] == [
        {"file": "rank-1.out", "offset": 5, "data": "a li"}
    ]


def test_it_waits_for_the_run_and_ends_with_its_ranks(run_dir: Path, follow: Follow) -> None:
    """Started before there is a directory, it ends when each of its ranks has ended and all was told."""
    follower = follow("--ranks", "0,1", "--follow")
    write_record(run_dir, "rank-0.json", rank=0)
    until(lambda: follower.kinds() == ["rank"], "the first record")
    (run_dir / "rank-0.out").write_bytes(b"a")
    until(lambda: follower.kinds() == ["rank", "rank-0.out"], "the first data")
    write_record(run_dir, "rank-0.exit.json", rank=0, exit_code=0)
    until(lambda: follower.kinds() == ["rank", "rank-0.out", "exit"], "the first exit")
    assert follower.process.poll() is None
    (run_dir / "rank-1.err").write_bytes(b"b")
    write_record(run_dir, "rank-1.exit.json", rank=1, exit_code=97)
    assert follower.end()[3:] == [
        {"file": "rank-1.err", "offset": 0, "data": "b"},
        {"exit": {"rank": 1, "exit_code": 97}},
    ]


def test_the_head_ends_with_the_run(run_dir: Path, follow: Follow) -> None:
    """Every change of state is told; the final one comes last, after mpirun's own words and the ranks' records."""
    write_record(run_dir, "status.json", **running())
    follower = follow("--ranks", "0", "--follow", "--head")
    until(lambda: follower.kinds() == ["status"], "the first state")
    write_record(run_dir, "rank-0.exit.json", rank=0)
    until(lambda: follower.kinds() == ["status", "exit"], "the exit record")
    (run_dir / "mpirun.err").write_bytes(b"last words")
    write_record(run_dir, "status.json", **running(state="stopping"))
    until(lambda: len(follower.messages()) == 4, "the next state")
    write_record(run_dir, "status.json", **running(state="failed"))
    told = follower.end()
    assert [message["status"]["state"] for message in told if "status" in message] == ["running", "stopping", "failed"]
    assert told[2] == {"file": "mpirun.err", "offset": 0, "data": "last words"}
    assert list(told[-1]) == ["status"]


def test_a_run_without_a_supervisor_is_told_as_lost(run_dir: Path, follow: Follow) -> None:
    """Nobody will write a final state then: waiting for one would be for ever."""
    gone = processes.identity(os.getpid())
    write_record(run_dir, "status.json", **running(supervisor={**gone, "start_ticks": gone["start_ticks"] - 1}))
    told = follow("--ranks", "0", "--follow", "--head").end()
    assert [message["status"]["state"] for message in told] == ["lost"]


def test_drain_means_tell_what_is_there_and_end(run_dir: Path, follow: Follow) -> None:
    """When the head knows that the run is over, ranks without an exit record do not hold their node's tail."""
    follower = follow("--ranks", "0", "--follow")
    run_dir.mkdir()
    (run_dir / "rank-0.out").write_bytes(b"killed in the mid")
    follower.say(b"dra")
    follower.say(b"in\n")
    assert contents(follower.end()) == {"rank-0.out": b"killed in the mid"}


@pytest.mark.parametrize("options", [[], ["--head"]])
def test_it_ends_when_nobody_listens_any_more(follow: Follow, options: list[str]) -> None:
    """The end of its stdin is the end of the connection."""
    follower = follow("--ranks", "0", "--follow", *options)
    assert follower.process.stdin is not None
    follower.process.stdin.close()
    assert follower.end() == []


def test_a_listener_that_goes_away_is_no_error(run_dir: Path) -> None:
    """A broken pipe ends it quietly."""
    run_dir.mkdir()
    (run_dir / "rank-0.out").write_bytes(b"x" * 1_000_000)
    argv = [sys.executable, REMOTE / "tail.py", "--run-dir", run_dir, "--ranks", "0", "--follow"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(LIMIT_S) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.stdin is not None
    process.stdin.close()


def test_a_flood_is_followed_to_the_last_byte(run_dir: Path, follow: Follow) -> None:
    """200,000 lines, bars drawn with carriage returns, bytes that are no text, written in pieces of all sizes."""
    run_dir.mkdir()
    follower = follow("--ranks", "0,1", "--follow")
    lines = b"".join(b"step %06d " % number + b"x" * 80 + b"\n" for number in range(200_000))
    noise = bytes(range(256)) * 2000 + b"".join(b"\r%3d%%|%-50s|" % (n, b"#" * (n // 2)) for n in range(101)) * 50
    out_path, err_path = run_dir / "rank-0.out", run_dir / "rank-1.err"
    with out_path.open("wb", buffering=0) as out, err_path.open("wb", buffering=0) as err:
        source, other = io.BytesIO(lines), io.BytesIO(noise)
        for size in (1, 10, 100, 7919, 65_536, 65_537, 1_000_000) * 20:
            out.write(source.read(size))
            err.write(other.read(size // 10))
        out.write(source.read())
        err.write(other.read())
    for rank in (0, 1):
        write_record(run_dir, f"rank-{rank}.exit.json", rank=rank)
    told = follower.end()
    assert contents(told) == {"rank-0.out": lines, "rank-1.err": noise}
    assert max(len(message.get("data", "")) for message in told) <= 64 * 1024
    assert [next(iter(message)) for message in told[-2:]] == ["exit", "exit"]


def test_waiting_costs_next_to_nothing(run_dir: Path, follow: Follow) -> None:
    """A quiet hour must not cost a core: less than 5 % of one while there is nothing to tell."""
    write_record(run_dir, "status.json", **running())
    follower = follow("--ranks", "0,1,2,3", "--follow", "--head")
    until(lambda: follower.kinds() == ["status"], "the first look")

    def cpu_s() -> float:
        fields = Path(f"/proc/{follower.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before, started = cpu_s(), time.monotonic()
    until(lambda: time.monotonic() - started > 2.0, "two seconds of quiet")
    assert (cpu_s() - before) / (time.monotonic() - started) < 0.05


def told(run_dir: Path, *options: str) -> dict[str, bytes]:
    """What tail.py tells of rank 0 with these options."""
    argv = [sys.executable, str(REMOTE / "tail.py"), "--run-dir", str(run_dir), "--ranks", "0", *options]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    found: dict[str, bytes] = {}
    for message in map(json.loads, done.stdout.splitlines()):
        if "data" in message:
            found[message["file"]] = found.get(message["file"], b"") + message["data"].encode("latin-1")
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--lines", "1"], b"last\n"),
        (["--lines", "2"], b"x" * 200_000 + b"\nlast\n"),
        (["--lines", "9"], None),
        (["--lines", "0"], b""),
        (["--last-bytes", "5"], b"last\n"),
        (["--last-bytes", "7"], b"x" * 200_000 + b"\nlast\n"),  # a line is not cut
        (["--last-bytes", "999999"], None),
        (["--since-unix-s", "99"], None),
        (["--since-unix-s", "100"], b"two\n" + b"x" * 200_000 + b"\nlast\n"),
        (["--since-unix-s", "107"], b"two\n" + b"x" * 200_000 + b"\nlast\n"),  # nothing was written from 101 to 108
        (["--since-unix-s", "108.5", "--lines", "9"], b"x" * 200_000 + b"\nlast\n"),  # the mark lies within that line
        (["--since-unix-s", "200"], b""),
        (["--age-s", "1"], b""),
        (["--since-unix-s", "200", "--offsets", '{"rank-0.out": 4}'], b"two\n" + b"x" * 200_000 + b"\nlast\n"),
    ],
)
def test_where_to_begin(run_dir: Path, options: list[str], expected: bytes | None) -> None:
    """At the last lines or bytes, or at what was written after a time, and always at the beginning of a line."""
    run_dir.mkdir(exist_ok=True)
    text = b"one\ntwo\n" + b"x" * 200_000 + b"\nlast\n"
    (run_dir / "rank-0.out").write_bytes(text)
    (run_dir / "rank-0.marks").write_text(f"100.0 4 0\n108.0 5000 0\n150.0 {len(text)} 0\n")
    assert told(run_dir, *options).get("rank-0.out", b"") == (text if expected is None else expected)


def test_a_silent_listener_is_not_waited_for(run_dir: Path) -> None:
    """Its link is cut: nothing is said, nothing is read, and the tail stands in a write. It ends all the same."""
    write_record(run_dir, "status.json", **running())
    (run_dir / "rank-0.out").write_bytes(b"x" * 5_000_000)
    argv = [sys.executable, str(REMOTE / "tail.py"), "--run-dir", str(run_dir), "--ranks", "0", "--head", "--follow"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*argv, "--silence-s", "1"], **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.wait(LIMIT_S) == 75
            assert b"nothing was heard" in process.stderr.read()
        finally:
            process.kill()


def test_a_listener_that_speaks_is_answered(run_dir: Path, follow: Follow) -> None:
    """Both ends know of each other, however quiet the job is."""
    write_record(run_dir, "status.json", **running())
    follower = follow("--head", "--follow", "--silence-s", "2")
    for count in range(1, 6):
        follower.say(b"alive\n")
        until(lambda: follower.kinds().count("alive") == count, "an answer")  # noqa: B023  called at once
        time.sleep(0.6)
    write_record(run_dir, "status.json", **running(state="succeeded"))
    assert follower.end()[-1]["status"]["state"] == "succeeded"
