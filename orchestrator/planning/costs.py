"""What a step costs in time and a rank in memory, estimated before anything runs. Pure.

Rules of thumb, good to a factor of two: they are to tell beforehand that two nodes will be slower than one, not by how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.planning.preflight import Finding, warning
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.health import Way

EXAMPLE_GRADIENT_BYTES = 100_000_000
BYTES_PER_GRADIENT = 4  # float32, also under bf16 autocast
BYTES_PER_PARAMETER = 16  # weights, gradients and the two moments of Adam, float32 each
FLOPS_PER_PARAMETER_AND_TOKEN = 6  # forwards 2, backwards 4
# Of one core: two units of fused multiply-add on 8 or 16 float32 numbers, at 2.5 GHz, of which matrix products reach about 40 %.
FLOPS_AVX2, FLOPS_AVX512 = 32 * 2.5e9 * 0.4, 64 * 2.5e9 * 0.4
DEFAULT_BATCH, DEFAULT_LENGTH = 8, 384  # of the Trainer, and of the question-answering example


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """One training step.

    Args:
        gradient_bytes: what is summed over all nodes in each step.
        is_example: of no known model.
        allreduce_s: how long that takes over the slowest measured way.
        compute_s: of the slowest node; None where the model is not known.
    """

    gradient_bytes: int
    is_example: bool
    allreduce_s: float
    compute_s: float | None

    def text(self) -> str:
        """One sentence for the person."""
        size = f"{self.gradient_bytes / 1e6:.0f} MB of gradients"
        what = f"{size} (an example: the model is not known)" if self.is_example else f"this model's {size}"
        computing = "" if self.compute_s is None else f", computing about {_shown(self.compute_s)}"
        return f"all-reduce of {what} takes about {_shown(self.allreduce_s)} per step{computing}"


def step_cost(nodes: Sequence[NodeFacts], ways: Sequence[Way], parameters: int | None, args: Sequence[str]) -> StepCost | None:
    """The cost of a step as far as it follows from what was measured; None where no bandwidth was.

    Args:
        args: the script's arguments, of which batch size and sequence length are read.
    """
    measured = [way for way in ways if way.bytes_per_s]
    if not measured:
        return None
    slowest = min(way.bytes_per_s or 0.0 for way in measured)
    latency_s = max(way.latency_s or 0.0 for way in measured)
    count = len(nodes)
    size = EXAMPLE_GRADIENT_BYTES if parameters is None else parameters * BYTES_PER_GRADIENT
    steps = 2 * (count - 1)  # of a ring: scatter and gather, each node passing on 1/count of all
    return StepCost(
        gradient_bytes=size,
        is_example=parameters is None,
        allreduce_s=steps * (size / count / slowest + latency_s),
        compute_s=None if parameters is None else max(_compute_s(node, parameters, args) for node in nodes),
    )


def cost_findings(head: NodeFacts, cost: StepCost | None) -> tuple[Finding, ...]:
    """A warning where the nodes would wait for the network longer than they compute."""
    if cost is None or cost.compute_s is None or cost.allreduce_s < cost.compute_s:
        return ()
    remedy = (
        "more work per step: a larger --per_device_train_batch_size or --gradient_accumulation_steps; or a faster network; "
        "or fewer nodes"
    )
    return (warning(head, "several nodes may be slower than one", cost.text(), remedy),)


def memory_findings(node: NodeFacts, ranks: int, parameters: int | None) -> tuple[Finding, ...]:
    """A warning where the ranks of a node need more memory than there is, activations not counted."""
    if parameters is None:
        return ()
    limit = node.memory.cgroup_limit_bytes
    there = node.memory.available_bytes if limit is None else min(limit, node.memory.available_bytes)
    needed = ranks * parameters * BYTES_PER_PARAMETER
    if needed < there:
        return ()
    shown = f"{ranks} ranks need about {needed / 1e9:.1f} GB and activations, {there / 1e9:.1f} GB are available"
    return (warning(node, "too little memory for the model", shown, "fewer ranks: `ppn` or `slots`; or a smaller model"),)


def option(args: Sequence[str], name: str, default: int) -> int:
    """The whole number that an option of the script has, written `--name 8` or `--name=8`."""
    for index, word in enumerate(args):
        value = args[index + 1] if word == name and index + 1 < len(args) else word.removeprefix(f"{name}=")
        if (word == name or word.startswith(f"{name}=")) and value.isdigit():
            return int(value)
    return default


def _compute_s(node: NodeFacts, parameters: int, args: Sequence[str]) -> float:
    tokens = option(args, "--per_device_train_batch_size", DEFAULT_BATCH) * option(args, "--max_seq_length", DEFAULT_LENGTH)
    tokens *= option(args, "--gradient_accumulation_steps", 1)
    sockets = len({cpu.socket for cpu in node.cpu.logical})
    cores = len({cpu.core for cpu in node.cpu.logical}) / sockets  # one rank per socket, each with a batch of its own
    per_core = FLOPS_AVX512 if "avx512f" in node.cpu.flags else FLOPS_AVX2
    return FLOPS_PER_PARAMETER_AND_TOKEN * parameters * tokens / (max(1.0, cores) * per_core)


def _shown(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.0f} s"
