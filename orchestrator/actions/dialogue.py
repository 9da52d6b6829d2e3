"""A conversation with `remote/doctor.py` on one node: questions and answers over one channel."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from orchestrator.actions import agent
from orchestrator.errors import CommandError, NodeError, UnreachableError
from orchestrator.nodes.transport import Channel, Transport

T = TypeVar("T")

ANSWER_TIMEOUT_S = 30.0
SESSION_ENDS_S = 1.0
CLOCK_QUESTIONS = 3


class Dialogue:
    """Starts the script, and ships it first where it is not there; raises NodeError.

    Args:
        ports: the range in which free ports are looked for; None for the probe's own.
    """

    def __init__(self, transport: Transport, root: str, python: str, ports: tuple[int, int] | None) -> None:
        self.node = transport.node
        self._transport = transport
        self._argv = agent.command(root, python, "doctor.py", [root, *(["-".join(map(str, ports))] if ports else [])])
        self._asked = 0
        self._rest = b""
        self._channel = _patiently(partial(transport.open, self._argv))
        if self._is_missing():
            _patiently(partial(agent.ship, transport, root, python))
            self._rest = b""
            self._channel = _patiently(partial(transport.open, self._argv))

    @property
    def noise(self) -> str:
        """What the login shell's start-up files print first."""
        return self._channel.preamble().strip()[:100]

    def ask(self, question: str, timeout_s: float = ANSWER_TIMEOUT_S, **details: Any) -> Any:
        """The answer to one question; raises CommandError where there is none in time."""
        self._asked += 1
        line = json.dumps({"id": self._asked, "ask": question, **details}) + "\n"
        try:
            self._channel.write(line.encode())
            answer = self._answer(self._channel, timeout_s)
        except (TimeoutError, OSError, EOFError) as error:
            said = self._channel.stderr().strip().splitlines()[-1:]
            raise self._failure(question, said[0] if said else str(error) or type(error).__name__) from error
        if "error" in answer:
            raise self._failure(question, answer["error"])
        return answer["answer"]

    def clock(self) -> tuple[float, float]:
        """How far the node's clock is ahead of ours, and how wrong that may be: half of the quickest way there and back."""
        found = []
        for _ in range(CLOCK_QUESTIONS):
            before, started = time.time(), time.monotonic()
            theirs = self.ask("clock")
            way_s = time.monotonic() - started
            found.append((way_s / 2, theirs - before - way_s / 2))
        error_s, ahead_s = min(found)
        return ahead_s, error_s

    def close(self) -> None:
        """End the script."""
        self._channel.close()

    def __enter__(self) -> Dialogue:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _is_missing(self) -> bool:
        """Whether the script ended at once because it, or the interpreter, is not there. Whoever is there tells the time."""
        try:
            self.ask("clock")
        except CommandError:
            code, said = self._ended()
            if code == 127 or (code == 2 and "can't open file" in said):
                return True
            last = said.strip().splitlines()[-1:] or [f"exit code {code}"]
            raise self._failure("clock", last[0]) from None
        return False

    def _ended(self) -> tuple[int, str]:
        """The exit code of the script that gave no answer, and what it said; raises CommandError where it has not ended."""
        try:
            code = self._channel.wait(ANSWER_TIMEOUT_S)
        except (TimeoutError, OSError) as error:
            raise self._failure("clock", str(error) or "it does not end either") from error
        self._channel.close()
        return code, self._channel.stderr()

    def _answer(self, channel: Channel, timeout_s: float) -> dict[str, Any]:
        """The next line that answers the newest question."""
        deadline = time.monotonic() + timeout_s
        while True:
            while b"\n" in self._rest:
                line, self._rest = self._rest.split(b"\n", 1)
                answer = _parsed(line)
                if answer and answer.get("id") == self._asked:
                    return answer
            data = channel.read(max(0.001, deadline - time.monotonic()))
            if not data:
                raise EOFError("it ended")
            self._rest += data

    def _failure(self, question: str, reason: str) -> NodeError:
        return CommandError(
            f"{self.node}: no answer to the doctor's question `{question}`: {reason}",
            node=self.node,
            command="doctor.py",
            advice="look at the node's load and network, then try again",
        )


def _patiently(action: Callable[[], T]) -> T:
    """Where sshd allows one session only, the next one has to wait until it has seen the end of the last."""
    deadline = time.monotonic() + SESSION_ENDS_S
    while True:
        try:
            return action()
        except UnreachableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _parsed(line: bytes) -> dict[str, Any] | None:
    start = line.find(b'{"id"')  # behind what was printed without an end of line
    try:
        found = json.loads(line[start:]) if start >= 0 else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
