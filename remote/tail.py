"""Follow the logs and records of ranks on this node, as ASCII JSON lines on stdout.

    {"file": "rank-0.out", "offset": 123, "data": "bytes as latin-1 text"}     offset: where in the file the data begins
    {"rank": {...}}      rank-<n>.json, once for each attempt at the run, before the rank's data
    {"exit": {...}}      rank-<n>.exit.json, once for each attempt, after all of the rank's data until then
    {"status": {...}}    with --head: status.json whenever it changes; a final one comes last
    {"alive": true}      the answer to a line `alive` on stdin

Without --follow it tells what is there and ends. With it, it ends when its ranks have ended (with --head: when the run
has; with --until-drained: not by itself, for there may be another attempt) and everything was told; at a line `drain`
on stdin it tells what is there and ends; at stdin's end, whoever listened has gone, and it ends at once, as it does after
--silence-s without a word on stdin (`caller.py`). To go on after a broken connection, give the offsets that were reached.
--since-unix-s, --age-s, --lines and --last-bytes say where to begin in files of which no offset is given; it is always a
line's beginning.
"""

import argparse
import json
import os
import sys
import time

import caller
import marks
import records
import runs

CHUNK_BYTES = 64 * 1024
SHORTEST_WAIT_S = 0.025
LONGEST_WAIT_S = 0.25
ENDED = runs.FINAL + ("lost",)
HEAD_FILES = ("mpirun.out", "mpirun.err")
ALIVE = b'{"alive": true}\n'


class Log:
    """One growing file, read from an offset; it may not exist yet."""

    def __init__(self, run_dir: str, name: str, offset: int) -> None:
        self.path = os.path.join(run_dir, name)
        self.name = name
        self.offset = offset
        self.descriptor = None

    def begin(self, start: "Start") -> None:
        """Go to where `start` says, or back to the beginning of the line there."""
        size = self.size_bytes()
        if size:
            self.offset = line_start(self.descriptor, min(size, start.offset(self, size)))

    def size_bytes(self) -> int:
        """How much there is by now."""
        if self.descriptor is None:
            try:
                self.descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return 0
        return os.fstat(self.descriptor).st_size

    def read(self, end: int) -> dict:
        """The next chunk, from before `end`; None where all of that was read."""
        wanted = min(CHUNK_BYTES, end - self.offset)
        data = os.pread(self.descriptor, wanted, self.offset) if wanted > 0 else b""
        if not data:
            return None
        chunk = {"file": self.name, "offset": self.offset, "data": data.decode("latin-1")}
        self.offset += len(data)
        return chunk


class Start:
    """Where in a log to begin: at the last so many lines, or bytes, or at what was written after a time."""

    def __init__(self, run_dir: str, options: argparse.Namespace) -> None:
        self.run_dir = run_dir
        self.lines = options.lines
        self.last_bytes = options.last_bytes
        self.since_unix_s = options.since_unix_s
        if options.age_s is not None:
            self.since_unix_s = time.time() - options.age_s

    def offset(self, log: Log, size: int) -> int:
        """The first byte that is wanted; of several bounds the narrowest holds."""
        bounds = [0]
        if self.last_bytes is not None:
            bounds.append(size - self.last_bytes)
        if self.lines is not None:
            bounds.append(last_lines(log.descriptor, size, self.lines))
        if self.since_unix_s is not None:
            bounds.append(self.at_time(log, size))
        return max(bounds)

    def at_time(self, log: Log, size: int) -> int:
        """Ranks mark the sizes of their logs; of mpirun's own output only the last change is known."""
        stem, stream = log.name.rsplit(".", 1)
        if stem.startswith("rank-"):
            return marks.offset_at(self.run_dir, int(stem[len("rank-") :]), stream, self.since_unix_s)
        return size if os.fstat(log.descriptor).st_mtime < self.since_unix_s else 0


def line_start(descriptor: int, offset: int) -> int:
    """The beginning of the line that `offset` lies in."""
    while offset > 0:
        step = min(CHUNK_BYTES, offset)
        data = os.pread(descriptor, step, offset - step)
        found = data.rfind(b"\n")
        if found >= 0:
            return offset - step + found + 1
        offset -= step
    return 0


def last_lines(descriptor: int, size: int, count: int) -> int:
    """Where the last `count` lines begin; one without an end counts too."""
    offset = size
    if size and os.pread(descriptor, 1, size - 1) == b"\n":
        offset -= 1
    for number in range(count):
        if number and offset:
            offset -= 1
        offset = line_start(descriptor, offset)
    return offset if count else size


class Tail:
    """What was told so far about some ranks (and their run), and what is new."""

    def __init__(self, run_dir: str, ranks: list, offsets: dict, is_head: bool, until_drained: bool = False) -> None:
        self.run_dir = run_dir
        self.is_head = is_head
        self.until_drained = until_drained
        self.status = None
        self.ranks = list(ranks)
        self.versions = {}  # which file it was, of each record that was told
        self.ended = set()
        names = [os.path.basename(records.rank_file("", rank, suffix)) for rank in ranks for suffix in ("out", "err")]
        self.logs = [Log(run_dir, name, offsets.get(name, 0)) for name in names + list(HEAD_FILES if is_head else ())]

    @property
    def has_ended(self) -> bool:
        """Whether nothing will be written that was not there at the last look."""
        if self.is_head:
            return self.status is not None and self.status["state"] in ENDED
        return not self.until_drained and self.ended == set(self.ranks)

    def look(self):
        """Yield batches of what is new by now, in the order that the module promises."""
        # The status before the exit records, these before the data: each is written after what follows it here.
        status = self.new_status()
        ended = self.new_records("exit.json")
        started = self.new_records("json")
        self.ended |= set(ended)
        yield [{"rank": started[rank]} for rank in sorted(started)]
        ends = [(log, log.size_bytes()) for log in self.logs]
        while True:
            chunks = [chunk for chunk in (log.read(end) for log, end in ends) if chunk]
            if not chunks:
                break
            yield chunks
        yield [{"exit": ended[rank]} for rank in sorted(ended)]
        yield [{"status": status}] if status else []

    def new_records(self, suffix: str) -> dict:
        """The records that have appeared since the last look, by rank; each attempt at the run has its own."""
        found = {}
        for rank in self.ranks:
            path = records.rank_file(self.run_dir, rank, suffix)
            version = version_of(path)
            if version and version != self.versions.get(path):
                self.versions[path] = version
                found[rank] = records.read_record(path)
        return {rank: found[rank] for rank in found if found[rank]}

    def new_status(self) -> dict:
        """The run's status where it has changed, else None."""
        status = runs.read_status(self.run_dir) if self.is_head else None
        if status == self.status:
            return None
        self.status = status
        return status


def version_of(path: str) -> tuple:
    """What changes when a record is written anew; None where there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def main() -> int:
    """Tell what is there, and with --follow what comes."""
    options = parse(sys.argv[1:])
    tail = Tail(options.run_dir, options.ranks, options.offsets, options.head, options.until_drained)
    start = Start(options.run_dir, options)
    for log in tail.logs:
        if log.name not in options.offsets:
            log.begin(start)
    try:
        if options.follow:
            follow(tail, options.silence_s)
        else:
            tell(tail)
    except BrokenPipeError:
        pass  # whoever listened has gone
    except caller.Gone as gone:
        sys.stderr.write("%s\n" % gone)
        return caller.EXIT_CODE
    return 0


def parse(arguments: list) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tail.py")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--ranks", type=rank_numbers, default=[], help="0,1,...: the ranks on this node")
    parser.add_argument("--offsets", type=json.loads, default={}, help='{"rank-0.out": 123}: where to go on')
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--head", action="store_true", help="tell the run's status and mpirun's own output too")
    parser.add_argument("--until-drained", action="store_true", help="do not end when the ranks have")
    parser.add_argument("--silence-s", type=float, default=0.0, help="end when stdin says nothing for so long")
    parser.add_argument("--since-unix-s", type=float, help="begin at what was written after this time")
    parser.add_argument("--age-s", type=float, help="the same, so long before now by this node's clock")
    parser.add_argument("--lines", type=int, help="begin at the last so many lines of each file")
    parser.add_argument("--last-bytes", type=int, help="begin at the last so many bytes of each file")
    return parser.parse_args(arguments)


def rank_numbers(text: str) -> list:
    """Rank numbers from `0,1,5`."""
    return [int(word) for word in text.split(",") if word]


def follow(tail: Tail, silence_s: float) -> None:
    """Tell what comes until it has ended, or until stdin says so. Raises caller.Gone."""
    wait_s, listener = SHORTEST_WAIT_S, caller.Caller(silence_s)
    while True:
        is_news = tell(tail)
        if tail.has_ended or b"drain\n" in listener.heard:
            return
        wait_s = SHORTEST_WAIT_S if is_news else min(LONGEST_WAIT_S, wait_s * 1.05)
        if listener.hears(wait_s):
            return
        if listener.was_alive:
            listener.was_alive = False
            write(ALIVE)


def tell(tail: Tail) -> bool:
    """Write what is new; whether there was anything."""
    is_news = False
    for batch in tail.look():
        if batch:
            is_news = True
            write("".join(json.dumps(message) + "\n" for message in batch).encode("ascii"))
    return is_news


def write(data: bytes) -> None:
    """Write all of it to stdout at once."""
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(main())
