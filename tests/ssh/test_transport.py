"""The seam's contract: the local twin and a real SSH connection keep the same promises."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sshd import SshdNodes

from orchestrator.errors import CommandError, ProvisionError
from orchestrator.nodes.local import LocalTransport
from orchestrator.nodes.ssh import SshTransport
from orchestrator.nodes.transport import Transport, check, run
from orchestrator.specs.inventory import Login, SshOptions

ECHO_ARGUMENTS = "import json, sys; print(json.dumps(sys.argv[1:]))"


@pytest.fixture(scope="module", params=["local", "ssh"])
def transport(request: pytest.FixtureRequest, session_sshd_factory: SshdNodes) -> Iterator[Transport]:
    made: Transport
    if request.param == "local":
        made = LocalTransport("here")
    else:
        (node,) = session_sshd_factory(1)
        made = SshTransport(
            "there",
            Login(user=node.user, host=node.host, port=node.port, key=str(node.key), via=None),
            SshOptions(known_hosts=str(node.known_hosts)),
        )
    yield made
    made.close()


def test_output_and_exit_code_come_back(transport: Transport) -> None:
    """stdout is bytes as they were, stderr is text, the exit code is the command's own."""
    done = run(transport, ["sh", "-c", "printf 'a\\303\\251\\000b'; echo oops >&2; exit 7"], idle_timeout_s=10)
    assert (done.exit_code, done.stdout, done.stderr) == (7, b"a\xc3\xa9\0b", "oops\n")


def test_a_failure_shows_what_the_command_said(transport: Transport) -> None:
    """`check` turns a bad exit code into an error with node, command and the end of stderr."""
    argv = ["sh", "-c", "echo no such thing >&2; exit 3"]
    with pytest.raises(CommandError, match="exit code 3") as refused:
        check(transport, argv, run(transport, argv, idle_timeout_s=10))
    assert "no such thing" in refused.value.message and refused.value.node == transport.node


def test_megabytes_pass_both_ways_at_once(transport: Transport) -> None:
    """Input larger than any buffer, echoed while it is being sent, neither blocks nor changes."""
    data = bytes(range(256)) * 40_000
    done = run(transport, ["cat"], stdin=(data[i : i + 100_000] for i in range(0, len(data), 100_000)), idle_timeout_s=20)
    assert done.stdout == data


def test_a_command_that_ends_without_reading_is_no_hang(transport: Transport) -> None:
    """Input that nobody takes does not keep us from the exit code."""
    assert run(transport, ["sh", "-c", "exit 5"], stdin=b"x" * 5_000_000, idle_timeout_s=20).exit_code == 5


def test_what_goes_wrong_with_the_input_is_told_at_once(transport: Transport) -> None:
    """The stream cannot be produced to its end: the command reads where it breaks off, and we are told why, not after a limit."""

    def stream() -> Iterator[bytes]:
        yield b"x" * 1_000_000
        raise ProvisionError("the file became shorter")

    with pytest.raises(ProvisionError, match="the file became shorter"):
        run(transport, ["cat"], stdin=stream(), idle_timeout_s=3600)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20), max_size=5))
def test_arguments_arrive_byte_for_byte(transport: Transport, arguments: list[str]) -> None:
    """Blanks, quotes, newlines, $, * and any letter: what is passed is what arrives."""
    done = run(transport, [sys.executable, "-c", ECHO_ARGUMENTS, *arguments], idle_timeout_s=20)
    assert json.loads(done.stdout) == arguments


def test_silence_has_a_time_limit(transport: Transport) -> None:
    """A command that neither takes nor gives anything is given up, and the error names it."""
    started = time.monotonic()
    with pytest.raises(CommandError, match="no sign of life"):
        run(transport, ["sleep", "60"], idle_timeout_s=0.5)
    assert time.monotonic() - started < 10


def test_giving_up_a_local_command_ends_what_it_started() -> None:
    """Closing the local twin leaves no child of a child behind."""
    here = LocalTransport("here")
    channel = here.open(["sh", "-c", "sleep 300 & echo $!; wait"])
    pid = int(channel.read(10))
    here.close()
    deadline = time.monotonic() + 10
    while runs(pid):
        assert time.monotonic() < deadline


def runs(pid: int) -> bool:
    """Whether the process lives; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it went between any look before and this one
        return False


def test_lines_come_one_by_one(transport: Transport) -> None:
    """`on_line` sees every line without its newline, also the last one without any."""
    seen: list[bytes] = []
    run(transport, ["printf", "one\\ntwo\\nthree"], idle_timeout_s=10, on_line=seen.append)
    assert seen == [b"one", b"two", b"three"]


def test_commands_start_in_the_home_directory(transport: Transport) -> None:
    """Relative paths mean the same over SSH and here."""
    done = run(transport, ["sh", "-c", 'test "$(pwd -P)" = "$(cd; pwd -P)" && echo same'], idle_timeout_s=10)
    assert done.stdout == b"same\n"


def test_an_unknown_program_is_told(transport: Transport) -> None:
    """A program that is not there is an exit code 127 over SSH and an error here; never a hang."""
    try:
        assert run(transport, ["no-such-program-at-all"], idle_timeout_s=10).exit_code == 127
    except CommandError as error:
        assert "no-such-program-at-all" in error.message
