"""Our own scripts on the nodes: shipped once per content, then called by their path."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.errors import CommandError, NodeError, ProvisionError
from orchestrator.nodes.archive import Entry, archive
from orchestrator.nodes.transport import Completed, Transport, check, parse_json, run

COMMAND_TIMEOUT_S = 60
# What a script that stays is promised (remote/caller.py): the word ALIVE every BEAT_S. After SILENCE_S without one it ends, and
# so does whoever waits for it in vain: a cut network tells neither side that it is, and TCP alone would do so after hours.
ALIVE = b"alive\n"
BEAT_S = 5.0
SILENCE_S = 30.0
GIVEN_UP = 75  # its exit code then
NOT_SHIPPED = frozenset({"run_qa.py"})  # an example job, not part of the agent


@cache
def sources() -> Path:
    """The directory `remote/`: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parent.parent
    for place in (package.parent / "remote", package / "_remote"):
        if (place / "probe.py").exists():
            return place
    raise FileNotFoundError(f"the node scripts are neither beside nor inside {package}: is the installation whole?")


@cache
def digest() -> str:
    """Names this version of the agent on the nodes."""
    content = hashlib.sha256()
    for path in _files():
        content.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return content.hexdigest()[:16]


def call(
    transport: Transport,
    root: str,
    python: str,
    script: str,
    arguments: Sequence[str],
    *,
    stdin: bytes = b"",
    idle_timeout_s: float = COMMAND_TIMEOUT_S,
) -> dict[str, Any]:
    """The JSON object that one of our scripts prints on a node; ships the agent first where it is not there yet.

    Raises CommandError when the script fails, NodeError when there is no Python.
    """
    argv = command(root, python, script, arguments)
    completed = run(transport, argv, stdin=stdin, idle_timeout_s=idle_timeout_s)
    if is_not_there(completed):
        ship(transport, root, python)
        completed = run(transport, argv, stdin=stdin, idle_timeout_s=idle_timeout_s)
    if completed.exit_code == 1 and completed.stdout.startswith(b'{"error"'):
        said = parse_json(transport, argv, completed.stdout)["error"]
        raise CommandError(f"{transport.node}: {said}", node=transport.node, command=script, stderr=completed.stderr)
    return parse_json(transport, argv, check(transport, argv, completed).stdout)


def command(root: str, python: str, script: str, arguments: Sequence[str]) -> list[str]:
    """The command line of one of our scripts on a node.

    They need the standard library only: without site-packages and PYTHON… variables (-S -E) Python starts with a third
    less work, and nothing that lies there can disturb them.
    """
    return [python, "-S", "-E", f"{home_relative(root)}/agent/{digest()}/{script}", *arguments]


def home_relative(path: str) -> str:
    """A path that may begin with `~/` as one that works in a command: those start in the home directory."""
    return path.removeprefix("~/")


def ship(transport: Transport, root: str, python: str) -> None:
    """Put the agent on a node; raises NodeError when the node has no Python, ProvisionError when it cannot be written."""
    unpack = (sources() / "unpack.py").read_text()
    argv = [python, "-c", unpack, f"{home_relative(root)}/agent"]
    completed = run(transport, argv, stdin=archive(map(_entry, _files())), idle_timeout_s=COMMAND_TIMEOUT_S)
    if completed.exit_code == 127:
        raise NodeError(
            f"{transport.node}: there is no {python}",
            node=transport.node,
            advice="install Python 3.6 or newer there (Debian: apt-get install python3), or name one with `stack.python`",
        )
    said = [line for line in completed.stderr.splitlines() if line.startswith("unpack: ")]  # after what start-up files say
    if completed.exit_code == 1 and said:
        raise ProvisionError(
            f"{transport.node}: root {root} cannot be written: {said[-1].removeprefix('unpack: ')}",
            advice="name another `root`, or make this one writable and see that it is not full",
        )
    check(transport, [python, "unpack.py", argv[-1]], completed)


def is_not_there(completed: Completed) -> bool:
    """Whether a command of ours failed because our scripts (or their Python) are not on the node."""
    return completed.exit_code == 127 or (completed.exit_code == 2 and "can't open file" in completed.stderr)


def _files() -> list[Path]:
    return sorted(path for path in sources().glob("*.py") if path.name not in NOT_SHIPPED)


def _entry(path: Path) -> Entry:
    content = path.read_bytes()
    return Entry(name=f"{digest()}/{path.name}", source=content, size_bytes=len(content))
