"""Events as text for a terminal or a file, or as JSON lines. The only module that prints.

Logs and answers go to stdout; what is being done, and what is worth knowing, goes to stderr.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, TextIO

import click

from orchestrator.errors import ClusterTrainError, FleetError
from orchestrator.specs.events import Event, LogText, Notice, Result, Step, Transfer

RANK_COLORS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")
TRANSIENT_EVERY_S = 1.0
TRANSFER_EVERY_S = 2.0
BARS_EVERY_S = 0.1
BAR_WIDTH = 24
LONG_LINE = 8
CLEAR_LINE = "\r\x1b[K"


class Console:
    """Shows events as they come, from any thread.

    Args:
        as_json: one JSON object per line on stdout, nothing else.
        secrets: values that are shown as *** wherever they occur.
        raw: the ranks' output goes to the terminal with its escape sequences, which may do there what they like.
    """

    def __init__(self, *, as_json: bool = False, secrets: Collection[str] = (), raw: bool = False) -> None:
        self._as_json = as_json
        self._raw = raw
        self._secrets: list[str] = []
        self.hide(secrets)
        self._lock = threading.Lock()
        self._color = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._live = sys.stdout.isatty()
        self._has_live_line = False
        self._has_bars = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._bars: dict[str, str] = {}  # by node, of the copies that are going on
        self._drawn_bars = 0
        self._last_shown: dict[object, float] = {}

    def hide(self, secrets: Collection[str]) -> None:
        """Add values that must not be shown."""
        forms = {form for secret in secrets for form in _forms(secret)}
        self._secrets = sorted({*self._secrets, *forms}, key=len, reverse=True)

    def colored(self, text: str, color: str) -> str:
        """A piece of a result's text in a color, where stdout shows any."""
        return self._styled(text, sys.stdout, fg=color)

    def emit(self, event: Event) -> None:
        """Show one event."""
        with self._lock:
            if self._as_json:
                self._emit_json(event)
            elif isinstance(event, LogText):
                self._log(event)
            elif isinstance(event, Transfer):
                self._transfer(event)
            elif isinstance(event, Result):
                self._line(inert(event.text), sys.stdout)
            elif isinstance(event, Notice):
                self._line(self._styled("note: ", sys.stderr, fg="yellow") + inert(event.text), sys.stderr)
            elif isinstance(event, Step):
                prefix = self._styled(f"[{event.node}] ", sys.stderr, bold=True) if event.node else ""
                self._line(prefix + inert(event.text), sys.stderr)

    def error(self, error: ClusterTrainError) -> None:
        """Show an error with its advice."""
        with self._lock:
            self._bars.clear()
            if self._as_json:
                print(json.dumps(self._without_secrets(_error_document(error))), flush=True)
                return
            self._line(self._styled("error: ", sys.stderr, fg="red", bold=True) + inert(error.message), sys.stderr)
            for line in error.advice.splitlines():
                self._line(self._styled("   do: ", sys.stderr, fg="green") + inert(line), sys.stderr)

    def _emit_json(self, event: Event) -> None:
        if isinstance(event, LogText):
            print("\n".join(_log_documents(replace(event, text=self._masked(event.text)))), flush=True)
            return
        if isinstance(event, Result):
            document = {"event": "result", **event.document}
        else:
            document = {"event": type(event).__name__.lower(), **asdict(event)}
        if isinstance(event, Transfer) and not self._is_due(("transfer", event.node), TRANSFER_EVERY_S):
            return
        print(json.dumps(self._without_secrets(document)), flush=True)

    def _log(self, event: LogText) -> None:
        who = f"{event.node} r{event.rank}" if event.rank is not None else f"{event.node} mpirun"
        color = RANK_COLORS[event.rank % len(RANK_COLORS)] if event.rank is not None else "red"
        prefix = self._styled(f"[{who}]", sys.stdout, fg=color) + " "
        text = event.text if self._raw else inert(event.text)
        if not event.transient:
            self._line(prefix + text.replace("\n", "\n" + prefix), sys.stdout)
        elif event.text.strip():
            self._transient(prefix + text, (who, event.stream))

    def _transient(self, line: str, key: object) -> None:
        """A progress bar: in place on a terminal, now and then elsewhere."""
        if self._live:
            sys.stdout.write(CLEAR_LINE + self._masked(line))
            sys.stdout.flush()
            self._has_live_line = True
        elif self._is_due(key, TRANSIENT_EVERY_S):
            self._line(line, sys.stdout)

    def _transfer(self, event: Transfer) -> None:
        """A bar per node on a terminal, a line now and then elsewhere; what is done is told by the step that follows."""
        done = event.sent_bytes >= event.total_bytes
        if not self._has_bars:
            if not done and self._is_due(("transfer", event.node), TRANSFER_EVERY_S):
                self._line(f"[{event.node}] {_progress(event)}", sys.stderr)
            return
        if done:
            self._bars.pop(event.node, None)
        else:
            self._bars[event.node] = f"[{event.node}] {_bar(event)} {_progress(event)}"
        if done or self._is_due("bars", BARS_EVERY_S):
            self._erase_bars()
            self._draw_bars()

    def _draw_bars(self) -> None:
        """One line each, none so long that it breaks, and no more than the terminal is high: they are to be erased again."""
        columns, rows = shutil.get_terminal_size()
        shown = [text[: columns - 1] for text in self._bars.values()][: max(1, rows - 2)]
        sys.stderr.write("".join(f"{self._masked(text)}\n" for text in shown))
        sys.stderr.flush()
        self._drawn_bars = len(shown)

    def _erase_bars(self) -> None:
        if self._drawn_bars:
            sys.stderr.write(f"\x1b[{self._drawn_bars}A\r\x1b[J")
            sys.stderr.flush()
            self._drawn_bars = 0

    def _line(self, text: str, stream: TextIO) -> None:
        self._erase_bars()
        if self._has_live_line:
            sys.stdout.write(CLEAR_LINE)
            sys.stdout.flush()
            self._has_live_line = False
        print(self._masked(text), file=stream, flush=True)
        if self._bars:
            self._draw_bars()

    def _is_due(self, key: object, every_s: float) -> bool:
        now = time.monotonic()
        if now - self._last_shown.get(key, -every_s) < every_s:
            return False
        self._last_shown[key] = now
        return True

    def _styled(self, text: str, stream: TextIO, *, fg: str | None = None, bold: bool | None = None) -> str:
        if not (self._color and stream.isatty()):
            return text
        return click.style(text, fg=fg, bold=bold)

    def _without_secrets(self, value: Any) -> Any:
        """A document in whose texts secrets are masked: once they are encoded, nobody would know them again."""
        if not self._secrets:
            return value
        if isinstance(value, Mapping):
            return {key: self._without_secrets(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._without_secrets(one) for one in value]
        return self._masked(value) if isinstance(value, str) else value

    def _masked(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _log_documents(event: LogText) -> Iterator[str]:
    """One JSON object for each line."""
    same = json.dumps({"event": "logtext", "node": event.node, "rank": event.rank, "stream": event.stream}).removesuffix("}")
    transient = json.dumps(event.transient)
    for line in event.text.split("\n"):
        yield f'{same}, "text": {json.dumps(line)}, "transient": {transient}}}'


def inert(text: str) -> str:
    """Text from elsewhere as a terminal cannot take it for orders: control characters are shown (^[ for escape), not sent."""
    return text.translate(_SHOWN) if _ORDERS.search(text) else text


# C0 but for newline and tab, delete, C1, and what turns the direction of writing around.
_SHOWN = {
    **{code: f"^{chr(code ^ 64)}" for code in (*range(32), 127) if chr(code) not in "\n\t"},
    **{code: f"\\x{code:02x}" for code in range(128, 160)},
    **{code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))},
}
_ORDERS = re.compile("[" + re.escape("".join(map(chr, _SHOWN))) + "]")


def _forms(secret: str) -> set[str]:
    """A secret as it is, as JSON and as a shell write it, and each line of it that is long enough to tell something."""
    lines = [line for line in secret.splitlines() if len(line) >= LONG_LINE]
    whole = [secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], secret.replace("'", "'\"'\"'")]
    return {form for form in (*whole, *lines) if form}


def _bar(event: Transfer) -> str:
    filled = BAR_WIDTH * event.sent_bytes // max(1, event.total_bytes)
    return "#" * filled + "-" * (BAR_WIDTH - filled)


def _progress(event: Transfer) -> str:
    percent = 100 * event.sent_bytes // max(1, event.total_bytes)
    what = f"{event.sent_items} of {event.total_items} {event.what}," if event.total_items else event.what
    return f"{what} {event.sent_bytes / 1e6:.0f} of {event.total_bytes / 1e6:.0f} MB ({percent} %)"


def _error_document(error: ClusterTrainError) -> dict[str, object]:
    document: dict[str, object] = {
        "event": "error",
        "kind": type(error).__name__,
        "message": error.message,
        "advice": error.advice,
        "exit_code": error.exit_code,
    }
    if isinstance(error, FleetError):
        document["nodes"] = {node: failure.message for node, failure in error.failures.items()}
    return document
