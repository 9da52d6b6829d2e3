"""From where a Trainer goes on after a restart, whatever its script asks for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from supervised import REMOTE

sys.path.insert(0, str(REMOTE))

import bootstrap


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The checkpoint of this attempt, in a process in which nothing has gone on from it yet."""
    monkeypatch.chdir(tmp_path)
    path = str(tmp_path / "out" / "checkpoint-20")
    monkeypatch.setenv("CLUSTER_TRAIN_RESUME", path)
    monkeypatch.setattr(bootstrap, "_resumed", [])
    monkeypatch.setattr(bootstrap, "_told", set())
    return path


@pytest.mark.parametrize("asked", [None, True, "out/checkpoint-30", "out/checkpoint-20"])
def test_it_goes_on_from_the_complete_checkpoint(chosen: str, asked: object, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the script asks for nothing, for the last one, or names one that may be half-written; that is told."""
    assert bootstrap.checkpoint_for("out", asked) == chosen
    assert ("training goes on from" in capsys.readouterr().err) == (asked != "out/checkpoint-20")
    assert bootstrap.checkpoint_for("out", None) is None  # a second training of the same process begins afresh


def test_other_trainings_are_left_alone(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that writes elsewhere, one that wants to start afresh, and any in the first attempt."""
    assert bootstrap.checkpoint_for("elsewhere", None) is None
    assert bootstrap.checkpoint_for("out", False) is False
    monkeypatch.delenv("CLUSTER_TRAIN_RESUME")
    assert bootstrap.checkpoint_for("out", True) is True
