"""Events on a terminal, in a file, and as JSON."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys

import pytest

from orchestrator.console import Console
from orchestrator.errors import FleetError, HostKeyError, UnreachableError
from orchestrator.specs.events import LogText, Notice, Result, Step, Transfer


def log(text: str, *, transient: bool = False, rank: int | None = 3) -> LogText:
    return LogText(node="node1", rank=rank, stream="out", text=text, transient=transient)


def test_logs_bear_node_and_rank_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks' output and answers go to stdout; what is being done goes to stderr."""
    console = Console()
    for event in (Step(text="connecting", node="node0"), log("loss 0.1"), log("ssh: refused", rank=None), Notice(text="odd")):
        console.emit(event)
    console.emit(Result(document={}, text="done"))
    out, err = capsys.readouterr()
    assert out == "[node1 r3] loss 0.1\n[node1 mpirun] ssh: refused\ndone\n"
    assert err == "[node0] connecting\nnote: odd\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_every_line_of_a_piece_is_shown_by_itself(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    """Several lines come in one event; people and programs see them as if each had come alone, empty ones too."""
    together, alone = Console(as_json=as_json), Console(as_json=as_json)
    together.emit(log('one\n\n"three"'))
    shown = capsys.readouterr().out
    for text in ("one", "", '"three"'):
        alone.emit(log(text))
    assert shown == capsys.readouterr().out and len(shown.splitlines()) == 3


def test_a_progress_bar_does_not_fill_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a thousand updates within a second a file gets one, and the final line always."""
    console = Console()
    for percent in range(1000):
        console.emit(log(f"{percent / 10} %", transient=True))
    console.emit(log("100 %"))
    assert capsys.readouterr().out == "[node1 r3] 0.0 %\n[node1 r3] 100 %\n"


def test_json_is_one_object_per_line_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    """--json keeps every log piece, progress bars too, and nothing else is on stdout or stderr."""
    console = Console(as_json=True)
    console.emit(log("50 %", transient=True))
    console.emit(log("60 %", transient=True))
    console.emit(Result(document={"state": "succeeded"}, text="not shown"))
    out, err = capsys.readouterr()
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in events] == ["logtext", "logtext", "result"]
    assert events[0] == {"event": "logtext", "node": "node1", "rank": 3, "stream": "out", "text": "50 %", "transient": True}
    assert err == ""


@pytest.mark.parametrize("as_json", [False, True])
def test_secrets_are_never_shown(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    """Wherever a secret stands, in a log, a step or an error, it is shown as ***; the longest is masked first."""
    console = Console(as_json=as_json, secrets=["secret", "secret-and-more"])
    console.emit(log("it is secret-and-more, or secret"))
    console.error(UnreachableError("secret refused", node="n", advice="secret"))
    out, err = capsys.readouterr()
    assert "secret" not in out + err and "it is ***, or ***" in out


@pytest.mark.parametrize("as_json", [False, True])
def test_a_secret_is_found_in_every_form(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    """Escaped for JSON, quoted for a shell, or one line of several: a private key is not shown piece by piece."""
    secret = "pass\"wo\\rd's é"
    key = "-----BEGIN KEY-----\nMIIEpAIBAAKCAQEA\nshort\n"
    console = Console(as_json=as_json, secrets=[secret, key])
    for text in (secret, shlex.join(["--token", secret]), "MIIEpAIBAAKCAQEA", json.dumps(secret)):
        console.emit(log(f"it is {text}!"))
        console.emit(Result(document={"value": text}, text=text))
    out, err = capsys.readouterr()
    assert "wo" not in out + err and "MIIE" not in out and out.count("***") == 8


HOSTILE = "a\x1b[2J\x1b]0;owned\x07b\x08c\x9b31m\u202ed\x7f\tend"
SHOWN = "a^[[2J^[]0;owned^Gb^Hc\\x9b31m\\u202ed^?\tend"


def test_escape_sequences_do_not_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """In a rank's output, a node's words in a step or note, an error and its advice: shown, not sent."""
    console = Console()
    events = (log(HOSTILE), Step(text=HOSTILE), Notice(text=HOSTILE), Result(document={}, text=f"{HOSTILE}\n{HOSTILE}"))
    for event in events:
        console.emit(event)
    console.error(UnreachableError(HOSTILE, node="n", advice=HOSTILE))
    out, err = capsys.readouterr()
    assert not set("\x1b\x07\x08\x9b\u202e\x7f") & set(out + err)
    assert (out + err).count(SHOWN) == 7


def test_raw_output_is_the_ranks_own(capsys: pytest.CaptureFixture[str]) -> None:
    """--raw is for the ranks' lines alone: colours there, no orders from anywhere else."""
    console = Console(raw=True)
    console.emit(log("\x1b[31mred\x1b[0m"))
    console.emit(Notice(text="\x1b[2J"))
    out, err = capsys.readouterr()
    assert out == "[node1 r3] \x1b[31mred\x1b[0m\n" and err == "note: ^[[2J\n"


def test_errors_name_every_node_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """The failures of many nodes are shown together, each advice once."""
    failures = {
        "a": UnreachableError("a: no answer", node="a", advice="is it up?"),
        "b": UnreachableError("b: no answer", node="b", advice="is it up?"),
        "c": HostKeyError("c: unknown key", node="c", advice="accept it"),
    }
    Console().error(FleetError("\n".join(error.message for error in failures.values()), failures))
    assert capsys.readouterr().err == ("error: a: no answer\nb: no answer\nc: unknown key\n   do: accept it\n   do: is it up?\n")


def test_transfers_tell_how_far_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """The first sign of a long copy comes at once, and not with every block."""
    console = Console()
    for sent in range(0, 100_000_000, 1_000_000):
        console.emit(Transfer(node="node1", what="wheels", sent_bytes=sent, total_bytes=200_000_000))
    assert capsys.readouterr().err == "[node1] wheels 0 of 200 MB (0 %)\n"


def screen(written: str) -> list[str]:
    """The lines that a terminal shows in the end."""
    lines: list[str] = []
    for up, text in re.findall(r"(?:\x1b\[(\d+)A\r\x1b\[J)?([^\x1b]*)", written):
        lines = lines[: len(lines) - int(up or 0)] + text.splitlines()
    return lines


def test_a_terminal_has_a_bar_for_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars stay below what is told meanwhile, are drawn over themselves, and a node's bar goes when its copy is done."""
    for name, value in {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "100", "LINES": "30"}.items():
        monkeypatch.setenv(name, value)
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    console = Console()
    for node, sent in (("node0", 2), ("node1", 0)):
        size = {"sent_bytes": sent * 25_000_000, "total_bytes": 100_000_000, "sent_items": sent, "total_items": 4}
        console.emit(Transfer(node=node, what="wheels", **size))
    console.emit(Step(text="install: 57 wheels with uv", node="node2"))
    told = "[node2] install: 57 wheels with uv"
    half = "[node0] ############------------ 2 of 4 wheels, 50 of 100 MB (50 %)"
    none = "[node1] ------------------------ 0 of 4 wheels, 0 of 100 MB (0 %)"
    assert screen(terminal.getvalue()) == [told, half, none]
    console.emit(Transfer(node="node0", what="wheels", sent_bytes=100_000_000, total_bytes=100_000_000))
    assert screen(terminal.getvalue()) == [told, none]
