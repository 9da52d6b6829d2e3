"""oneCCL against gloo: all-reduce by size, the step of an 11 M parameter BERT, and how often a start and an end go well.

    python tests/bench/ccl.py --inventory inventories/docker.yml [--ranks 2 4] [--repeat 5]     on the nodes of an inventory
    python tests/bench/ccl.py --python INTERPRETER [--ranks 2 4] [--repeat 5] [--starts 0]      on this machine

On an inventory's nodes the ranks are started by `cluster-train up`, with `backend: ccl` in its stack; on this machine by the
mpiexec of Intel MPI beside the interpreter, which has torch, transformers and cluster_train_oneccl (or $CLUSTER_TRAIN_ONECCL
names the directory of its libraries). The two backends take turns, so that a noisy machine is noisy for both. Each rank has one
core where there are enough; the table says where there are not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))

from one_machine import BOOTSTRAP, rank_environment  # noqa: E402

COMMAND = Path(sys.executable).with_name("cluster-train")
RANK = "tests/bench/ccl_rank.py"
LIMIT_S = 300
BACKENDS = ("gloo", "ccl")


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inventory", type=Path, help="measure on the nodes of this inventory, not on this machine")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="interpreter with the training stack")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeat", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--starts", type=int, default=0, help="only start, do 20 collectives and end, this often")
    options = parser.parse_args()
    if options.starts:
        starts(options.python, options.starts)
        return
    for ranks in options.ranks:
        if options.inventory:
            on_nodes(options.inventory, ranks, options.repeat)
        else:
            crowded = f"; more ranks than the {os.cpu_count()} cores" if ranks > (os.cpu_count() or 1) else ""
            print(f"{ranks} ranks on one host{crowded}")
            table(partial(here, options.python, ranks), options.repeat)


def table(run: Callable[[str], str], repeat: int) -> None:
    """Median and range per backend, and their ratio, for each size and for the step.

    Args:
        run: starts the ranks on a backend; what they printed.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(repeat):
        for backend in BACKENDS:
            measured = next((line for line in run(backend).splitlines() if line.startswith("{")), None)
            if measured is None:
                raise SystemExit(f"{backend} failed")
            for name, milliseconds in json.loads(measured).items():
                found.setdefault(name, {}).setdefault(backend, []).append(milliseconds)
    for name, times in found.items():
        label = name if name == "step" else f"{int(name):,} B"
        shown = "   ".join(
            f"{backend} {statistics.median(times[backend]):9.3f} ms ({min(times[backend]):.3f} to {max(times[backend]):.3f})"
            for backend in BACKENDS
        )
        ratio = statistics.median(times["gloo"]) / statistics.median(times["ccl"])
        print(f"{label:>14}   {shown}   gloo / ccl = {ratio:.2f}", flush=True)


def starts(python: Path, count: int) -> None:
    """Start, 20 collectives, end, `count` times: all must end with 0."""
    codes: dict[int, int] = {}
    for _ in range(count):
        code = launch(python, 2, "ccl", "start").returncode
        codes[code] = codes.get(code, 0) + 1
    print(f"{count} starts: " + ", ".join(f"{times} ended with {code}" for code, times in sorted(codes.items())))
    sys.exit(set(codes) != {0})


def on_nodes(inventory: Path, ranks: int, repeat: int) -> None:
    """The table, by `cluster-train up` on the nodes of an inventory."""
    content: dict[str, Any] = yaml.safe_load(inventory.read_text())
    nodes = len(content["nodes"])
    content["stack"]["backend"] = "ccl"
    content["job"] = {"ppn": ranks // nodes}
    print(f"{ranks} ranks on {nodes} node{'s' if nodes > 1 else ''} of {inventory}")
    with tempfile.TemporaryDirectory(prefix="cluster-train-bench-") as scratch:
        path = Path(scratch) / inventory.name
        path.write_text(yaml.safe_dump(content))

        def run(backend: str) -> str:
            command = [COMMAND, "up", path, "--json", "--", RANK, backend, "both"]
            done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
            events = [json.loads(line) for line in done.stdout.splitlines()]
            if done.returncode:
                raise SystemExit(f"{backend} failed: {events[-1]}")
            return "\n".join(event["text"] for event in events if event["event"] == "logtext" and event["rank"] == 0)

        table(run, repeat)


def here(python: Path, ranks: int, backend: str) -> str:
    """What the ranks printed on this machine; ends the bench where they failed."""
    done = launch(python, ranks, backend, "both")
    if done.returncode:
        raise SystemExit(f"{backend} failed:\n{done.stdout[-2000:]}")
    return done.stdout


def launch(python: Path, ranks: int, backend: str, what: str) -> subprocess.CompletedProcess[str]:
    """The ranks, as one mpiexec."""
    hydra = ["timeout", str(LIMIT_S), python.with_name("mpiexec.hydra"), "-n", str(ranks)]
    return subprocess.run(
        [*hydra, python, BOOTSTRAP, REPOSITORY / RANK, backend, what],
        env={**os.environ, **rank_environment()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


if __name__ == "__main__":
    main()
