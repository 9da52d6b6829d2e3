"""The fault table, third part: what a script may print. The record here equals what the script wrote, to the byte."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
from faulty import FaultLab, Up

FAST = """
import os, sys
rank, lines = int(os.environ["RANK"]), {lines}
out = os.fdopen(1, "wb", 1 << 16)
for number in range(lines):
    out.write(b"rank %d line %08d of a script that prints as fast as it can\\n" % (rank, number))
"""
LONG_LINES = """
import os
rank = int(os.environ["RANK"])
for number in range(5):
    print(chr(97 + rank) * 1_000_000)
print("no end of line", end="")
"""
BINARY = """
import os, random
os.write(1, random.Random(int(os.environ["RANK"])).randbytes(300_000))
os.write(2, bytes(range(256)) * 40)
"""
BARS = r"""
import sys, time
for percent in range(0, 101, 5):
    sys.stderr.write("\r%3d%%|%s" % (percent, "#" * (percent // 5)))
    time.sleep(0.02)
sys.stderr.write("\n")
print("done")
"""
ESCAPES = r"""
print("\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[2J\x1b[H \x07 bell")
print("caf\u00e9 \u20ac \U0001f600")
"""
LINES = 150_000


@pytest.fixture
def ran(fault_lab: FaultLab, request: pytest.FixtureRequest) -> Up:
    """The run of a script, ended."""
    return fault_lab.up(request.param).wait()


def records(up: Up, stream: str = "out") -> Iterator[bytes]:
    """The record of each rank's stream, compared with the file on the rank's node."""
    for rank in range(4):
        name = f"rank-{rank}.{stream}"
        here = (up.record / name).read_bytes() if (up.record / name).exists() else b""
        there = up.lab.sh(f"node{rank // 2}", 'sha256sum "$1"', f"{up.run_dir}/{name}").split()[0]
        assert hashlib.sha256(here).hexdigest() == there, f"{name}: not what is on its node"
        yield here


def check(up: Up) -> None:
    up.check("succeeded", code=0, has_ticks=False)


@pytest.mark.parametrize("ran", [FAST.format(lines=LINES)], ids=["lines"], indirect=True)
def test_a_script_prints_as_fast_as_it_can(ran: Up) -> None:
    check(ran)
    for rank, record in enumerate(records(ran)):
        assert record == b"".join(
            b"rank %d line %08d of a script that prints as fast as it can\n" % (rank, number) for number in range(LINES)
        )
    shown = [event["text"] for event in ran.events() if event["event"] == "logtext" and event["rank"] == 3]
    assert len(shown) == LINES and shown == sorted(shown)


@pytest.mark.parametrize("ran", [LONG_LINES], ids=["lines"], indirect=True)
def test_lines_of_a_megabyte_and_one_without_an_end(ran: Up) -> None:
    check(ran)
    for rank, record in enumerate(records(ran)):
        letter = chr(97 + rank)
        assert record == (letter * 1_000_000 + "\n").encode() * 5 + b"no end of line"
        shown = "".join(event["text"] for event in ran.events() if event["event"] == "logtext" and event["rank"] == rank)
        assert shown == letter * 5_000_000 + "no end of line"


@pytest.mark.parametrize("ran", [BINARY], ids=["bytes"], indirect=True)
def test_bytes_that_are_no_text(ran: Up) -> None:
    check(ran)
    assert [len(record) for record in records(ran)] == [300_000] * 4
    assert list(records(ran, "err")) == [bytes(range(256)) * 40] * 4


@pytest.mark.parametrize("ran", [BARS], ids=["bars"], indirect=True)
def test_progress_bars(ran: Up) -> None:
    """What is written over is told as such, what stays as a line."""
    check(ran)
    bar = b"".join(b"\r%3d%%|%s" % (percent, b"#" * (percent // 5)) for percent in range(0, 101, 5)) + b"\n"
    assert list(records(ran, "err")) == [bar] * 4
    events = [event for event in ran.events() if event["event"] == "logtext" and event["rank"] == 2 and event["stream"] == "err"]
    assert [event["text"] for event in events if not event["transient"]] == ["100%|" + "#" * 20]
    assert "  0%|" in [event["text"] for event in events if event["transient"]]


@pytest.mark.parametrize("ran", [ESCAPES], ids=["sequences"], indirect=True)
def test_escape_sequences_and_other_alphabets(ran: Up) -> None:
    check(ran)
    text = "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[2J\x1b[H \x07 bell\ncafé € 😀\n"
    assert list(records(ran)) == [text.encode()] * 4


@pytest.mark.parametrize("ran", ["pass"], ids=["nothing"], indirect=True)
def test_a_script_that_prints_nothing(ran: Up) -> None:
    check(ran)
    assert list(records(ran)) == list(records(ran, "err")) == [b""] * 4
