"""Passwords of nodes that take no key yet: asked for once per login name, on the terminal, in the main thread.

They are kept in this object's memory only, and it lives no longer than the connections are being made. No child process, no
file and no message ever holds one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from orchestrator.errors import PasswordNeededError
from orchestrator.nodes.terminal import ask_hidden

ATTEMPTS = 3  # as ssh: NumberOfPasswordPrompts
MOST_SHOWN = 6


class Passwords:
    """What a person typed, for each node."""

    def __init__(self) -> None:
        self._typed: dict[str, str] = {}
        self._asked: Counter[str] = Counter()

    def of(self, node: str) -> str | None:
        """The password for a node, None before one was typed."""
        return self._typed.get(node)

    def ask(self, failures: Mapping[str, PasswordNeededError]) -> set[str]:
        """Ask for what these nodes want, one question for all that know the person by one name.

        Returns the nodes that are worth another attempt: not those whose password was wrong too often, nor any once the person
        gave up, or where there is no terminal.
        """
        again: set[str] = set()
        by_user: dict[str, list[PasswordNeededError]] = {}
        for failure in failures.values():
            if self._asked[failure.node] < ATTEMPTS:
                by_user.setdefault(failure.user, []).append(failure)
        for user, asking in by_user.items():
            typed = ask_hidden(_question(user, asking, again=any(self._asked[failure.node] for failure in asking)))
            for failure in asking:
                self._typed[failure.node] = typed
                self._asked[failure.node] += 1
            again |= {failure.node for failure in asking if typed}
        return again

    def used(self, connected: Iterable[str]) -> list[str]:
        """Of the nodes that are connected now those that a password let in. All passwords are forgotten."""
        nodes = [node for node in connected if self._typed.get(node)]
        self._typed.clear()
        return nodes


def _question(user: str, asking: list[PasswordNeededError], *, again: bool) -> str:
    shown = ", ".join(f"{failure.node} ({failure.address})" for failure in asking[:MOST_SHOWN])
    more = f" and {len(asking) - MOST_SHOWN} more" if len(asking) > MOST_SHOWN else ""
    return f"{'it was refused; ' if again else ''}password of {user} on {shown}{more}: "
