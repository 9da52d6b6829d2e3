"""What it costs to follow a run, and whether `up` keeps up with ranks that print fast.

    make bench                       or: python tests/bench/logs.py [--seconds 10]

4 ranks on two sshd's on loopback print numbered lines of 70 bytes at a given rate. Told are: how long after the last rank's
last line `up` returned, whether its record holds every line once and in order, and the CPU seconds of the orchestrator and of
the tails on the nodes, as a part of one core. The ranks themselves share the same cores.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from loopback import Loopback, loopback

PRINTS = """
import os, time
rank, rate, seconds = int(os.environ["RANK"]), {rate}, {seconds}
begun, said = time.monotonic(), 0
while said < rate * seconds:
    due = min(int((time.monotonic() - begun) * rate), rate * seconds)
    os.write(1, b"".join(b"rank %d line %08d %s\\n" % (rank, number, b"." * 48) for number in range(said, due)))
    said = due
    time.sleep(0.01)
with open("ended-%d" % rank, "w") as note:
    note.write(repr(time.time()))
"""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure at the highest rate, and at the everyday one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=10, help="how long the ranks print (default 10)")
    seconds = parser.parse_args().seconds
    with loopback() as lab:
        lab.provision(lab.inventory())
        print(f"load average of this machine before: {os.getloadavg()[0]:.1f}")
        late, share = follow(lab, 50_000, seconds)
        print(
            f"4 ranks x 50000 lines/s for {seconds} s: every line once, in order; `up` returned {late:.1f} s after the end "
            f"(should be at most 2); orchestrator and tails took {100 * share:.0f} % of one core"
        )
        for rate in (250, 1000):
            late, share = follow(lab, rate, seconds)
            print(
                f"4 ranks x {rate} lines/s: orchestrator and tails took {100 * share:.0f} % of one core "
                f"(should be below 25 for 1000 lines/s)"
            )


def follow(lab: Loopback, rate: int, seconds: int) -> tuple[float, float]:
    """One run: seconds from the last rank's last line to the end of `up`, and the CPU it took as a part of one core."""
    script = lab.directory / "prints.py"
    script.write_text(PRINTS.format(rate=rate, seconds=seconds))
    earlier = set(lab.records.glob("*")) if lab.records.exists() else set()
    with (lab.directory / "out").open("wb") as out:
        up = lab.start("up", lab.inventory(), "--", script, stdout=out)
    used: dict[int, float] = {}
    while (ended := os.wait4(up.pid, os.WNOHANG))[0] == 0:
        used.update(tails(lab))
        time.sleep(0.05)
    now, usage = time.time(), ended[2]
    up.returncode = os.waitstatus_to_exitcode(ended[1])
    if up.returncode:
        raise SystemExit(f"`up` ended with {up.returncode}")
    (record,) = set(lab.records.glob("*")) - earlier
    last = max(float(path.read_text()) for path in (lab.runs / record.name / "work").glob("ended-*"))
    check(lab.directory / "out", record, rate * seconds)
    return now - last, (usage.ru_utime + usage.ru_stime + sum(used.values())) / seconds


def check(shown: Path, record: Path, lines: int) -> None:
    """Ends the program where a line is missing, doubled or out of order, in the record or in what was shown."""
    wanted = {rank: [f"rank {rank} line {number:08d} {'.' * 48}" for number in range(lines)] for rank in range(4)}
    found: dict[int, list[str]] = {rank: [] for rank in wanted}
    for line in shown.read_text().splitlines():
        if line.startswith("[node"):
            found[int(line.partition("]")[0][-1])].append(line.partition("] ")[2])
    for rank, expected in wanted.items():
        if (record / f"rank-{rank}.out").read_text().splitlines() != expected or found[rank] != expected:
            raise SystemExit(f"rank {rank}: not every line once and in order")


def tails(lab: Loopback) -> dict[int, float]:
    """CPU seconds of the tails that run now, by process."""
    found = {}
    for node in lab.nodes:
        for process in node.processes():
            if any(word.endswith("tail.py") for word in process.argv[:4]):
                try:
                    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                found[process.pid] = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return found


if __name__ == "__main__":
    sys.exit(main())
