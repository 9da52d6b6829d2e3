"""Logs in pieces become lines."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.planning.loglines import LONGEST_LINE, LineSplitter, Piece


def pieces_of(*portions: bytes) -> list[Piece]:
    """Every line as a piece of its own."""
    splitter = LineSplitter()
    pieces = [piece for portion in portions for piece in splitter.feed(portion)] + splitter.finish()
    return [Piece(line, piece.transient) for piece in pieces for line in piece.text.split("\n")]


def test_the_lines_of_a_portion_are_one_piece() -> None:
    """A job that prints fast costs one event for each portion, not for each line."""
    assert LineSplitter().feed(b"one\ntwo\n\nfour\nfi") == [Piece("one\ntwo\n\nfour", False)]


def test_lines_end_with_newlines() -> None:
    """Every line is a piece, the last one also without its newline."""
    assert pieces_of(b"one\ntwo\r\nthree") == [Piece("one", False), Piece("two", False), Piece("three", False)]


def test_a_progress_bar_is_transient_until_its_newline() -> None:
    """What a carriage return ends will be written over; what a newline ends stays."""
    assert pieces_of(b" 10%\r 50%\r100%\n") == [Piece(" 10%", True), Piece(" 50%", True), Piece("100%", False)]


def test_a_carriage_return_at_the_end_of_a_portion_waits_for_what_follows() -> None:
    r"""A \r\n that was cut in two is one end of line."""
    assert pieces_of(b"one\r", b"\ntwo\r", b"three") == [Piece("one", False), Piece("two", True), Piece("three", False)]


def test_a_character_that_was_cut_in_two_is_whole() -> None:
    """Bytes of one character that come in two portions make one character."""
    word = "é€😀".encode()
    assert pieces_of(*(word[i : i + 1] for i in range(len(word)))) == [Piece("é€😀", False)]


def test_an_endless_line_is_shown_in_pieces() -> None:
    """A line without an end does not grow in memory."""
    assert [len(piece.text) for piece in pieces_of(b"x" * (2 * LONGEST_LINE + 5))] == [LONGEST_LINE, LONGEST_LINE, 5]


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=8))
def test_portions_do_not_matter(data: bytes, cuts: list[int]) -> None:
    """Whatever the portions in which bytes come, the pieces are the same."""
    borders = [0, *sorted(cut for cut in cuts if cut <= len(data)), len(data)]
    portions = [data[start:end] for start, end in pairwise(borders)]
    assert pieces_of(*portions) == pieces_of(data)
