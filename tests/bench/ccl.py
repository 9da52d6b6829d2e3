"""oneCCL against gloo: all-reduce by size, the step of an 11 M parameter BERT, and how often a start and an end go well.

    python tests/bench/ccl.py [--python INTERPRETER] [--ranks 2 4] [--repeat 5] [--starts 0]

All ranks run on this machine, under the mpiexec of Intel MPI beside the interpreter, which has torch, transformers and
cluster_train_oneccl (or $CLUSTER_TRAIN_ONECCL names the directory of its libraries). The two backends take turns, so that a
noisy machine is noisy for both. Each rank has one core where there are enough; with more ranks than cores oneCCL, whose ranks
spin, is not at home, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 300
BACKENDS = ("gloo", "ccl")


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="interpreter with the training stack")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeat", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--starts", type=int, default=0, help="only start, do 20 collectives and end, this often")
    options = parser.parse_args()
    if options.starts:
        starts(options.python, options.starts)
        return
    for ranks in options.ranks:
        crowded = f"; more ranks than the {os.cpu_count()} cores" if ranks > (os.cpu_count() or 1) else ""
        print(f"{ranks} ranks on one host{crowded}")
        table(options.python, ranks, options.repeat)


def table(python: Path, ranks: int, repeat: int) -> None:
    """Median and range per backend, and their ratio, for each size and for the step."""
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(repeat):
        for what in ("all_reduce", "step"):
            for backend in BACKENDS:
                for name, milliseconds in run(python, ranks, backend, what).items():
                    found.setdefault(name, {}).setdefault(backend, []).append(milliseconds)
    for name, times in found.items():
        label = name if name == "step" else f"{int(name):,} B"
        shown = "   ".join(
            f"{backend} {statistics.median(times[backend]):9.3f} ms ({min(times[backend]):.3f} to {max(times[backend]):.3f})"
            for backend in BACKENDS
        )
        ratio = statistics.median(times["gloo"]) / statistics.median(times["ccl"])
        print(f"{label:>14}   {shown}   gloo / ccl = {ratio:.2f}")


def starts(python: Path, count: int) -> None:
    """Start, 20 collectives, end, `count` times: all must end with 0."""
    codes: dict[int, int] = {}
    for _ in range(count):
        code = launch(python, 2, "ccl", "start").returncode
        codes[code] = codes.get(code, 0) + 1
    print(f"{count} starts: " + ", ".join(f"{times} ended with {code}" for code, times in sorted(codes.items())))
    sys.exit(set(codes) != {0})


def run(python: Path, ranks: int, backend: str, what: str) -> dict[str, float]:
    """What rank 0 printed; ends the bench where the ranks failed."""
    done = launch(python, ranks, backend, what)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{backend} {what} failed:\n{done.stdout[-2000:]}")
    measured: dict[str, float] = json.loads(lines[0])
    return measured


def launch(python: Path, ranks: int, backend: str, what: str) -> subprocess.CompletedProcess[str]:
    """The ranks, as one mpiexec."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY / "remote"),
        "PYTHONWARNINGS": "ignore",
        "I_MPI_PIN": "0",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    rank = REPOSITORY / "tests" / "bench" / "ccl_rank.py"
    command = ["timeout", str(LIMIT_S), python.with_name("mpiexec.hydra"), "-n", str(ranks), python, rank, backend, what]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


if __name__ == "__main__":
    main()
