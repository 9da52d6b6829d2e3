"""A launch as text: the table that a person reads, and the shell script that does the same by hand. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

from orchestrator.planning.launch import LaunchPlan, encode_launch
from orchestrator.planning.mpirun import LAUNCH_VARIABLE
from orchestrator.planning.tables import table


def placement_table(plan: LaunchPlan) -> str:
    """One line per rank: node, cores, threads and its own variables."""
    rows = [("rank", "node", "local", "cores", "OMP", "environment of this rank")]
    rows += [
        (
            str(rank.rank),
            rank.node,
            str(rank.local_rank),
            ranges(rank.cores),
            str(rank.omp_num_threads),
            " ".join(f"{name}={shlex.quote(value)}" for name, value in rank.env.items() if name != "OMP_NUM_THREADS"),
        )
        for rank in plan.ranks
    ]
    return table(rows)


def mpirun_line(plan: LaunchPlan) -> str:
    """The exact command, quoted for a shell."""
    return shlex.join(plan.command.argv)


def by_hand(plan: LaunchPlan, secret_names: Collection[str], secrets: Collection[str]) -> str:
    """A shell script for the head that writes the run's files and starts mpirun; ranks log into the run's directory.

    Args:
        secret_names: variables of the job that are left out; the script says that they must be exported first.
        secrets: values that stand in arguments or other variables; *** takes their place, as the launch document is encoded
            where the script shows it, and nobody would find them there to mask them.
    """
    shown = {**plan.document, "env": {k: v for k, v in plan.document["env"].items() if k not in secret_names}}
    document = _masked(shown, sorted(secrets, key=len, reverse=True))
    lines = [] if document == shown else ["# NOT COMPLETE: values that must not be shown are *** in the launch document"]
    lines += [f"mkdir -p -m 700 {shlex.quote(plan.run_dir)} && cd {shlex.quote(plan.run_dir)}"]
    for name, (text, mode) in plan.files.items():
        lines += [f"cat > {name} <<'END'", text.rstrip("\n"), "END", f"chmod {mode:o} {name}"]
    lines += [f": ${{{name}:?export it first, it is not printed}}; export {name}" for name in sorted(secret_names)]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in plan.command.env.items()]
    lines += [f"export CLUSTER_TRAIN_RUN_ID={shlex.quote(plan.run_id)}"]
    lines += [f"export {LAUNCH_VARIABLE}={encode_launch(document)}", mpirun_line(plan)]
    return "\n".join(lines) + "\n"


def _masked(value: Any, secrets: Sequence[str]) -> Any:
    """A document in whose texts each secret is ***."""
    if isinstance(value, Mapping):
        return {key: _masked(one, secrets) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(one, secrets) for one in value]
    if not isinstance(value, str):
        return value
    return reduce(lambda text, secret: text.replace(secret, "***"), secrets, value)


def ranges(numbers: Iterable[int]) -> str:
    """CPU numbers as the kernel writes them: "0-3,8"."""
    groups: list[list[int]] = []
    for number in sorted(numbers):
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ",".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)
