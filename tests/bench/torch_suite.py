"""PyTorch's own tests of a distributed backend, as they ship inside the installed torch, run on `ccl` or on gloo.

    python tests/bench/torch_suite.py --python INTERPRETER [--backend ccl] [--ranks 3] [--limit-s 540] [--record DIR] [TEST...]

The interpreter has torch, Intel MPI (mpiexec.hydra beside it), expecttest and hypothesis (or PYTHONPATH has these two), and
cluster_train_oneccl (or $CLUSTER_TRAIN_ONECCL names the directory of its libraries). What was tried is kept in the record's
directory: called again with the same one it goes on where the time limit ended it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))

from one_machine import rank_environment  # noqa: E402

RANK = REPOSITORY / "tests" / "bench" / "torch_suite_rank.py"
ROUND_LIMIT_S = 300


def main() -> None:
    """Run what is not yet in the record; print how all of it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="interpreter with the training stack")
    parser.add_argument("--backend", choices=["ccl", "gloo"], default="ccl")
    parser.add_argument("--ranks", type=int, default=3, help="3 are what upstream's CI takes for gloo")
    parser.add_argument("--limit-s", type=float, default=540, help="begin nothing after this many seconds")
    parser.add_argument("--record", type=Path, help="directory of what was tried (default: a new one)")
    parser.add_argument("tests", nargs="*", metavar="TEST")
    options = parser.parse_args()
    record: Path = options.record or Path(tempfile.mkdtemp(prefix="cluster-train-torch-suite-"))
    record.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.limit_s
    names = options.tests or json.loads(launch(options.python, 1, options.backend, record).stdout.splitlines()[-1])
    while (left := [name for name in names if name not in verdicts(record)]) and time.monotonic() < deadline:
        shutil.rmtree(record / "scratch", ignore_errors=True)
        ended = launch(
            options.python, options.ranks, options.backend, record, left, min(ROUND_LIMIT_S, deadline - time.monotonic())
        )
        if not any(name in verdicts(record) for name in left):
            raise SystemExit(f"no test began:\n{ended.stdout[-2000:]}")
    show(record, left, options)


def launch(
    python: Path, ranks: int, backend: str, record: Path, tests: list[str] | None = None, limit_s: float = ROUND_LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """The ranks, as one mpiexec, which ends at the first test that fails or at the time limit."""
    environment = {
        **os.environ,
        **rank_environment(),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "remote"), os.environ.get("PYTHONPATH", "")]),
        "CCL_KVS_IFACE": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    hydra = ["timeout", str(max(1, round(limit_s))), python.with_name("mpiexec.hydra"), "-n", str(ranks)]
    return subprocess.run(
        [*hydra, python, RANK, backend, record, *(tests or [])],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def verdicts(record: Path) -> dict[str, dict[str, tuple[str, str]]]:
    """By test and rank: the verdict and its reason; "begun" where the rank never came to one."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for path in sorted(record.glob("rank-*.jsonl")):
        for line in path.read_text().splitlines():
            name, verdict, why = json.loads(line)
            if verdict != "others":
                found.setdefault(name, {})[path.stem] = (verdict, why)
    return found


def show(record: Path, left: list[str], options: argparse.Namespace) -> None:
    """Every failure with its reason, the reasons for skipping, the counts."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for name, by_rank in verdicts(record).items():
        said = list(by_rank.values())
        failures = [why for verdict, why in said if verdict == "failed"]
        if failures or any(verdict == "begun" for verdict, _ in said):
            counts["failed"] += 1
            print(f"FAILED {name}: {failures[0] if failures else 'a rank ended, or waited for ever'}")
        else:
            skipped = [why for verdict, why in said if verdict == "skipped"]
            counts["skipped" if skipped else "passed"] += 1
            reasons.update(skipped[:1])
    for reason, count in reasons.most_common():
        print(f"skipped {count}: {reason}")
    print(
        f"{options.backend}, {options.ranks} ranks: "
        + ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "skipped", "failed"))
    )
    if left:
        print(f"{len(left)} not tried yet; go on: --record {record}")


if __name__ == "__main__":
    main()
