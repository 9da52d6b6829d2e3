"""How long a launch takes: `cluster-train up`, `accelerate launch` and bare mpirun, of the same script, on the two containers.

    make bench                       or: python tests/bench/launch.py [--repeat 7]

All three start 4 ranks on 2 nodes with everything installed. `up` also looks at the nodes, compares environment and files,
plans, streams every rank's log and records the run; the other two start from node0 and do none of that. The three take turns
within one run, so that a noisy machine is noisy for all; the medians and their ratio are printed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = Path(sys.executable).with_name("cluster-train")
INVENTORY = "inventories/docker.yml"
SCRIPT = "tests/bench/rank_hello.py"
SHOULD_BE = 0.8


def main() -> None:
    """Prepare the containers, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7, help="rounds (default 7)")
    options = parser.parse_args()
    call([sys.executable, "docker/cluster.py", "up"])
    node0 = prepare()
    contestants: dict[str, Callable[[], None]] = {
        "cluster-train up": lambda: up(),
        "accelerate launch": lambda: node0.run(node0.accelerate),
        "bare mpirun": lambda: node0.run(node0.mpirun),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(options.repeat):
        for name, action in contestants.items():
            started = time.perf_counter()
            action()
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name:18} median {medians[name]:5.2f} s   min {min(values):5.2f}   max {max(values):5.2f}")
    ratio = medians["cluster-train up"] / medians["accelerate launch"]
    print(f"cluster-train up / accelerate launch = {ratio:.2f} (should be at most {SHOULD_BE})")


class Node0:
    """The head container: commands typed there as its user."""

    def __init__(self, run_dir: str, env_dir: str, address: str) -> None:
        self._address = address
        place = f"{env_dir}/bin"
        hydra = f"HYDRA_LAUNCHER=ssh HYDRA_LAUNCHER_EXEC={run_dir}/ssh HYDRA_IFACE=eth0 PATH={place}:$PATH"
        hosts = f"{run_dir}/hostfile"
        script = "rank_hello.py"
        self.mpirun = f"cd {run_dir}/work && {hydra} mpiexec.hydra -f {hosts} -n 4 -ppn 2 {place}/python {script}"
        self.accelerate = (
            f"cd {run_dir}/work && {hydra} accelerate launch --cpu --num_machines 2 --num_processes 4 "
            f"--num_cpu_threads_per_process 1 --machine_rank 0 --main_process_ip {address} --main_process_port 29500 "
            f"--mpirun_hostfile {hosts} {script}"
        )

    def run(self, command: str) -> None:
        """Run a command on node0; raises where it fails or not all 4 ranks speak."""
        state = REPOSITORY / "docker" / ".state"
        options = ["-i", state / "id_ed25519", "-o", f"UserKnownHostsFile={state / 'known_hosts'}", "-o", "BatchMode=yes"]
        check(call(["ssh", *options, f"trainer@{self._address}", command]))


def prepare() -> Node0:
    """Install everything, and leave a run whose hostfile and ssh wrapper the other two can use."""
    out = up()
    run_id = out.rsplit("run ", 1)[1].split()[0]
    plan = call([COMMAND, "up", INVENTORY, "--dry-run", "--", SCRIPT])
    head = next(line for line in plan.splitlines() if line.startswith("MASTER_ADDR=")).split("=")[1]
    launcher = next(line for line in plan.splitlines() if "/bin/mpiexec.hydra " in line).split()[0]
    env_dir = launcher.removesuffix("/bin/mpiexec.hydra")
    root = env_dir.rsplit("/envs/", 1)[0]
    node0 = Node0(f"{root}/runs/{run_id}", env_dir, head)
    for command in (node0.accelerate, node0.mpirun):
        node0.run(command)
    return node0


def up() -> str:
    """One `cluster-train up`; its standard output."""
    return check(call([COMMAND, "up", INVENTORY, "--", SCRIPT]))


def check(out: str) -> str:
    """The output itself; raises where not every rank spoke."""
    ranks = sorted(line.rsplit("rank ", 1)[1] for line in out.splitlines() if "rank " in line and line[-1].isdigit())
    if ranks != ["0", "1", "2", "3"]:
        raise SystemExit(f"not every rank spoke:\n{out}")
    return out


def call(argv: Sequence[str | Path]) -> str:
    """Run a command at the root of the checkout; raises with what it said where it fails."""
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, argv))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
