"""What setvars.sh does must be the same on all nodes, for the ranks are given it once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.errors import ProvisionError
from orchestrator.planning.setvars import agreed_effect
from orchestrator.specs.setvars import SetvarsEffect

EFFECT = SetvarsEffect.from_json({"module": "m", "file": "/e/env/setvars.sh", "set": {"A": "1"}, "prepended": {"PATH": "/e"}})


def test_nodes_that_agree_have_one_effect() -> None:
    """A node that has no environment yet does not disagree."""
    assert agreed_effect({"a": EFFECT, "b": None, "c": replace(EFFECT)}) == EFFECT
    assert agreed_effect({"a": None}) is None and agreed_effect({}) is None


def test_nodes_that_differ_are_named() -> None:
    """All of them, with the one that they differ from, and the file."""
    other = replace(EFFECT, variables={"A": "2"})
    with pytest.raises(ProvisionError, match="on b, c than on a") as refused:
        agreed_effect({"a": EFFECT, "b": other, "c": replace(EFFECT, prepended={}), "d": EFFECT})
    assert EFFECT.file in refused.value.advice
