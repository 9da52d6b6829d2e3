"""What a run that fails is attempted again with: patterns, options, nodes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.planning.inventory_text import parse_inventory
from orchestrator.planning.restarts import RestartPlan, plan_restarts
from orchestrator.specs.run import Endpoint

PARSES = "from transformers import HfArgumentParser, TrainingArguments"
IN_CODE = "args = TrainingArguments('out')\nparser = argparse.ArgumentParser()"
OWN = "parser.add_argument('--resume_from_checkpoint')"
PLAIN = "import torch"


def plan(script_text: str, *argv: str, **job: Any) -> RestartPlan:
    inventory = parse_inventory(json.dumps({"nodes": ["a", "b", "c"], "job": job}), file="x.yml", environment={})
    endpoints = [Endpoint(node=name, address=f"10.0.0.{place}", interface="eth0") for place, name in enumerate("abc")]
    return plan_restarts(inventory, script_text, argv, endpoints, ("a", "b"))


@pytest.mark.parametrize(
    ("argv", "patterns"),
    [
        (("--output_dir", "out/"), ("out/checkpoint-*",)),
        (("--x", "--output_dir=o[1]"), ("o[[]1]/checkpoint-*",)),
        (("--output-dir", "a", "--output_dir", "/b"), ("/b/checkpoint-*",)),
        ((), ("checkpoint-*", "*/checkpoint-*")),
        (("--", "--output_dir", "x"), ("checkpoint-*", "*/checkpoint-*")),
    ],
)
def test_trainers_checkpoints_are_found_below_its_output_directory(argv: tuple[str, ...], patterns: tuple[str, ...]) -> None:
    """The last --output_dir counts, as argparse has it, and its name is no pattern."""
    assert plan(PARSES, *argv).patterns == patterns
    assert plan(PARSES, *argv, checkpoints="my/*").patterns == ("my/*",)
    assert plan(PLAIN, *argv).patterns == ()


def test_options_go_to_scripts_that_know_them() -> None:
    """A parser made of TrainingArguments knows both; a script that spells one out knows that; the rest are left alone."""
    assert (plan(PARSES).resume_option, plan(PARSES).accumulates) == ("--resume_from_checkpoint", True)
    assert (plan(PARSES, "settings.json").resume_option, plan(PARSES, "settings.json").accumulates) == (None, False)
    assert (plan(IN_CODE).resume_option, plan(IN_CODE).accumulates, plan(IN_CODE).is_trainer) == (None, False, True)
    assert (plan(OWN).resume_option, plan(OWN).accumulates) == ("--resume_from_checkpoint", False)
    assert plan(PLAIN).resume_option is None


def test_nodes_without_ranks_do_not_count() -> None:
    """All nodes that have ranks are needed unless the job says otherwise; the head is not reached by SSH."""
    found = plan(PLAIN, restarts=2)
    assert (found.restarts, found.min_nodes, dict(found.addresses)) == (2, 2, {"b": "10.0.0.1"})
    assert plan(PLAIN, min_nodes=1).min_nodes == 1
