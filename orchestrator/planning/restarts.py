"""How a run is attempted again after it failed: from which checkpoints, and what its script can be told. Pure.

`remote/restart.py` carries it out on the head, without the orchestrator.
"""

from __future__ import annotations

import ast
import glob
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.planning.arguments import reads_training_arguments
from orchestrator.specs.inventory import Inventory
from orchestrator.specs.run import Endpoint

RESUME = "resume_from_checkpoint"
ACCUMULATION = "gradient_accumulation_steps"
_TRAINER_DIRECTORY = "checkpoint-*"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPlan:
    """What the head needs to attempt a run again.

    Args:
        restarts: how often, after the first attempt.
        min_nodes: with how many nodes at least.
        patterns: where checkpoints are, relative to the ranks' working directory; none: it starts from the beginning.
        is_trainer: a directory `checkpoint-<step>` is one of Transformers' Trainer.
        resume_option: the script's option that takes a checkpoint's path, None where it would refuse it.
        accumulates: the script takes --gradient_accumulation_steps.
        addresses: every node but the head, and its address on the cluster network.
    """

    restarts: int
    min_nodes: int
    patterns: tuple[str, ...]
    is_trainer: bool
    resume_option: str | None
    accumulates: bool
    addresses: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """The plan as `remote/restart.py` and `remote/resume.py` read it."""
        return {
            "restarts": self.restarts,
            "min_nodes": self.min_nodes,
            "patterns": list(self.patterns),
            "is_trainer": self.is_trainer,
            "resume_option": self.resume_option,
            "accumulates": self.accumulates,
            "addresses": dict(self.addresses),
        }


def plan_restarts(
    inventory: Inventory, script_text: str, argv: Sequence[str], endpoints: Sequence[Endpoint], nodes: Sequence[str]
) -> RestartPlan:
    """The plan for a script with these arguments; `nodes` are those that have ranks, the head first."""
    job = inventory.job
    is_trainer = reads_training_arguments(script_text)
    parses = is_trainer and _takes_options(script_text, argv)
    return RestartPlan(
        restarts=job.restarts,
        min_nodes=min(job.min_nodes or len(nodes), len(nodes)),
        patterns=(job.checkpoints,) if job.checkpoints else _trainer_patterns(argv) if is_trainer else (),
        is_trainer=is_trainer,
        resume_option=f"--{RESUME}" if parses else _own_option(script_text, RESUME),
        accumulates=parses,
        addresses=tuple((endpoint.node, endpoint.address) for endpoint in endpoints if endpoint.node in nodes[1:]),
    )


def _takes_options(script_text: str, argv: Sequence[str]) -> bool:
    """Whether all fields of TrainingArguments are options: a parser made of them reads the command line.

    Given a single file of settings, such scripts read that instead.
    """
    has_parser = "HfArgumentParser" in script_text or "TrlParser" in script_text
    return has_parser and not (len(argv) == 1 and argv[0].endswith((".json", ".yaml", ".yml")))


def _own_option(script_text: str, name: str) -> str | None:
    """The option of this name that a script spells out itself, as with argparse."""
    try:
        nodes = tuple(ast.walk(ast.parse(script_text)))
    except (SyntaxError, ValueError):  # written for another Python
        return None
    words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return next((option for option in (f"--{name}", f"--{name.replace('_', '-')}") if option in words), None)


def _trainer_patterns(argv: Sequence[str]) -> tuple[str, ...]:
    """Below --output_dir where it is said, else in the working directory or one below it."""
    end = argv.index("--") if "--" in argv else len(argv)
    directory = None
    for position, word in enumerate(argv[:end]):
        name, attached, value = word.partition("=")
        if name in ("--output_dir", "--output-dir"):
            directory = value if attached else argv[position + 1] if position + 1 < end else None
    if directory is None:
        return (_TRAINER_DIRECTORY, f"*/{_TRAINER_DIRECTORY}")
    return (f"{glob.escape(directory.rstrip('/') or '/')}/{_TRAINER_DIRECTORY}",)
