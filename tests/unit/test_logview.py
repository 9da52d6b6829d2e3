"""Which lines of the logs are wanted, and since when."""

from __future__ import annotations

import re
from datetime import datetime, timezone

import pytest

from orchestrator.planning.loglines import Piece
from orchestrator.planning.logview import LogView, parse_since


@pytest.mark.parametrize(
    ("text", "age_s"), [("90s", 90), ("10m", 600), ("2h", 7200), ("1h30m", 5400), ("1d", 86400), ("0.5s", 0.5), ("0s", 0)]
)
def test_ages(text: str, age_s: float) -> None:
    """As docker and journalctl users write them."""
    assert parse_since(text) == (age_s, None)


def test_times() -> None:
    """With a zone as it says, without one in the local zone."""
    noon = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)
    assert parse_since("2026-11-30T12:00:00Z") == (None, noon.timestamp())
    assert parse_since("2026-11-30T13:00+01:00") == (None, noon.timestamp())
    assert parse_since("2026-11-30 12:00") == (None, datetime(2026, 11, 30, 12).timestamp())


@pytest.mark.parametrize("text", ["", "10", "m", "10 m", "-5m", "10mm", "yesterday", "2026-13-01"])
def test_no_times(text: str) -> None:
    """Anything else is refused."""
    with pytest.raises(ValueError):
        parse_since(text)


def test_choices_combine() -> None:
    """Rank, node and pattern must all fit; bars that are written over match no pattern; mpirun's own lines have no rank."""
    view = LogView(ranks=frozenset({1}), nodes=frozenset({"a"}), pattern=re.compile("los+"))
    assert view.has("a", 1) and not view.has("b", 1) and not view.has("a", 2) and not view.has("a", None)
    assert view.chosen(Piece("the loss", False)) == "the loss" and view.chosen(Piece("the loss", True)) is None
    assert view.chosen(Piece("a loss\nnone\nloss", False)) == "a loss\nloss" and view.chosen(Piece("none", False)) is None
    assert not view.is_everything and LogView().is_everything and LogView().has("a", None)
    assert not LogView(last_lines=0).is_everything


def test_where_the_nodes_begin() -> None:
    """What remote/tail.py is told."""
    assert LogView().start_arguments() == []
    assert LogView(age_s=600.0, last_lines=5).start_arguments() == ["--age-s", "600.0", "--lines", "5"]
