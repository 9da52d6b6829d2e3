"""How long provisioning takes, against what one would use by hand.

    make bench                       or: python tests/bench/provision.py [cold] [second] [many] [doctor] [fan-out]

cold     two containers with nothing on them, all wheels in the cache here: `cluster-train provision` carries, installs and
         imports them; then once more with the wheels in place and the environments gone. Against both: `pip install --no-index
         --find-links` on both containers at once, wheels in place. The containers have neither pip nor venv: pip is run from
         its own wheel, into a directory (--target). The containers' homes are in memory: how fast a disk takes 4 GB, and
         whether ext4 has just freed as many inodes (it then creates files three times slower for some minutes), is not asked.
second   the same command when there is nothing to do.
many     32 sshd's on loopback, nothing to do, against a program that runs `nproc` on them with Fabric's ThreadingGroup;
         both are whole processes, in turns.
doctor   `cluster-train doctor` on the two containers and on the 32 sshd's, every way between them tried.
fan-out  100 MB of wheels for 8 sshd's, all from here and by our own rule, over loopback and behind a link of 20 MB/s.

All nodes are on this one machine and share its processors.
"""

from __future__ import annotations

import argparse
import ensurepip
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests" / "ssh"))

import yaml  # noqa: E402
from slow_link import SlowLink, SlowTransport  # noqa: E402
from sshd import SshdNode, SshdNodes  # noqa: E402

from orchestrator.actions import agent  # noqa: E402
from orchestrator.actions.carry import Carrier, cargo_of  # noqa: E402
from orchestrator.actions.inventory_file import load_inventory  # noqa: E402
from orchestrator.actions.probe import probe  # noqa: E402
from orchestrator.actions.provision import choose  # noqa: E402
from orchestrator.actions.resolve import wheel_path  # noqa: E402
from orchestrator.actions.trust import authorize_head  # noqa: E402
from orchestrator.engine.reach import connected  # noqa: E402
from orchestrator.nodes.fleet import Fleet  # noqa: E402
from orchestrator.nodes.transport import Transport  # noqa: E402
from orchestrator.specs.facts import NodeFacts  # noqa: E402
from orchestrator.specs.lock import LockedWheel  # noqa: E402
from orchestrator.specs.run import Endpoint  # noqa: E402

COMMAND = Path(sys.executable).with_name("cluster-train")
PROJECT = "cluster-train-bench"
SUBNET = "172.30.89.0/24"
STACK = yaml.safe_load((REPOSITORY / "inventories" / "docker.yml").read_text())["stack"]
ROUNDS = 5
MANY = 32
FAN_OUT = 8
FAN_OUT_BYTES = 100_000_000
SLOW_BYTES_S = 20e6
FABRIC = """
import json, sys
from fabric import Connection, ThreadingGroup
nodes, key = json.loads(sys.argv[1]), sys.argv[2]
kwargs = {"key_filename": key, "look_for_keys": False, "allow_agent": False}
group = ThreadingGroup.from_connections([Connection(host, port=port, connect_kwargs=kwargs) for host, port in nodes])
assert len(group.run("nproc", hide=True)) == len(nodes)
"""


def main() -> None:
    """Measure what was asked for, everything by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["cold", "second", "many", "doctor", "fan-out"])
    parts = parser.parse_args().parts
    with tempfile.TemporaryDirectory(prefix="cluster-train-bench-") as scratch:
        if {"cold", "second", "doctor"} & {*parts}:
            with containers(Path(scratch)) as inventory:
                if {"cold", "second"} & {*parts}:
                    cold(inventory, Path(scratch), against_pip="cold" in parts)
                    second(inventory)
                if "doctor" in parts:
                    doctor(inventory, "2 containers", should_be_s=3.0)
        if "many" in parts:
            with sshds(Path(scratch) / "many", MANY) as nodes:
                many(nodes, Path(scratch))
        if "doctor" in parts:
            with sshds(Path(scratch) / "doctor", MANY) as nodes:
                inventory = write_inventory(Path(scratch) / "doctor.yml", nodes, root=str(Path(scratch) / "doctor-root"))
                doctor(inventory, f"{MANY} sshd's on loopback", should_be_s=6.0)
        if "fan-out" in parts:
            with sshds(Path(scratch) / "fan-out", FAN_OUT) as nodes:
                fan_out(nodes, Path(scratch))


def cold(inventory: Path, scratch: Path, *, against_pip: bool) -> None:
    """From nothing to a verified environment on both containers."""
    carried, out = timed([COMMAND, "provision", inventory, "--json"])
    versions = json.loads(out.splitlines()[-1])["versions"]
    print(f"cold provision of 2 containers, {len(versions)} packages carried from here: {carried:.1f} s")
    if not against_pip:
        return
    logins = [ssh(inventory, node["host"]) for node in yaml.safe_load(inventory.read_text())["nodes"]]
    for login in logins:
        call([*login, "cd .cluster-train && rm -rf envs cache"])
    in_place, _ = timed([COMMAND, "provision", inventory])
    print(f"  with the wheels in place there: {in_place:.1f} s")
    (pip,) = Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl")
    (scratch / "wanted.txt").write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
    for login in logins:
        call([*login, "mkdir links tmp && ln .cluster-train/wheelhouse/*/*.whl links/"])
        for source, name in ((pip, pip.name), (scratch / "wanted.txt", "wanted.txt")):
            with source.open("rb") as content:
                subprocess.run([*login, f"cat > {name}"], stdin=content, check=True)
    # pip moves what it installed from its temporary directory to the target: a rename within one file system, as ours.
    install = f"TMPDIR=~/tmp python3 {pip.name}/pip install --quiet --no-index --find-links links --target by-pip -r wanted.txt"
    started = time.perf_counter()
    running = [subprocess.Popen([*login, install], stderr=subprocess.PIPE, text=True) for login in logins]
    for process in running:
        _, errors = process.communicate()
        if process.returncode:
            raise SystemExit(f"pip failed:\n{errors}")
    by_pip = time.perf_counter() - started
    print(f"  pip install --no-index --find-links on both at once, wheels in place: {by_pip:.1f} s")
    print(f"  cluster-train / pip, wheels in place on both sides = {in_place / by_pip:.2f} (should be at most 0.25)")
    print(f"  cluster-train / pip, ours carried from here = {carried / by_pip:.2f}")


def second(inventory: Path) -> None:
    """Nothing to do."""
    seconds = [timed([COMMAND, "provision", inventory])[0] for _ in range(ROUNDS)]
    print(f"second provision of 2 containers: {told(seconds)} (should be at most 1.0 s)")


def many(nodes: Sequence[SshdNode], scratch: Path) -> None:
    """Nothing to do, on many nodes; the environment is a stand-in, as only its presence is looked at."""
    root = scratch / "root"
    inventory = write_inventory(scratch / "many.yml", nodes, root=str(root))
    loaded = load_inventory(inventory)
    with connected(loaded) as fleet:
        lock, _ = choose(loaded, probe(fleet, loaded), lambda event: None, fetch=False)
    environment = root / "envs" / lock.digest
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(sys.executable)
    (environment / "complete.json").write_text(json.dumps({"versions": {}}))
    fabric = [sys.executable, "-c", FABRIC, json.dumps([(node.host, node.port) for node in nodes]), str(nodes[0].key)]
    ours: list[float] = []
    theirs: list[float] = []
    memory = 0
    for _ in range(ROUNDS):
        theirs.append(timed(fabric)[0])
        spent, peak = with_memory([str(COMMAND), "provision", str(inventory)])
        ours.append(spent)
        memory = max(memory, peak)
    print(f"second provision of {len(nodes)} sshd's on loopback: {told(ours)}")
    print(f"  a program with Fabric's ThreadingGroup(...).run('nproc'): {told(theirs)}")
    ratio = statistics.median(ours) / statistics.median(theirs)
    print(f"  cluster-train / Fabric = {ratio:.2f} (should be at most 1.3)")
    print(f"  peak memory of cluster-train: {memory / 1e6:.0f} MB (should be below 150 MB)")


def doctor(inventory: Path, what: str, *, should_be_s: float) -> None:
    """Once to bring our scripts, then as often as all else."""
    seconds = [timed([COMMAND, "doctor", inventory])[0] for _ in range(ROUNDS + 1)][1:]
    print(f"doctor of {what}: {told(seconds)} (should be at most {should_be_s} s)")


def fan_out(nodes: Sequence[SshdNode], scratch: Path) -> None:
    """The same wheels for many nodes, each with a home and a root of its own."""
    inventory = load_inventory(write_inventory(scratch / "fan-out.yml", nodes))
    endpoints = [Endpoint(node=f"node{index}", address=node.host, interface="lo") for index, node in enumerate(nodes)]
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(scratch / "cache")}), connected(inventory) as real:
        for rate, label in ((None, "over loopback"), (SLOW_BYTES_S, f"behind {SLOW_BYTES_S / 1e6:.0f} MB/s")):
            link = SlowLink(rate) if rate else None
            transports = real.transports.items()
            fleet = Fleet({name: SlowTransport(node, link) if link else node for name, node in transports}, FAN_OUT)
            authorize_head(fleet, facts(fleet), endpoints, lambda event: None)
            from_here = deliver(fleet, inventory, (), scratch)
            by_rule = deliver(fleet, inventory, endpoints, scratch)
            print(
                f"fan-out of {FAN_OUT_BYTES / 1e6:.0f} MB to {len(nodes)} sshd's {label}: all from here {from_here:.1f} s, "
                f"by the rule {by_rule:.1f} s, ratio {by_rule / from_here:.2f}"
            )


def deliver(fleet: Fleet, inventory: object, endpoints: Sequence[Endpoint], scratch: Path) -> float:
    """Seconds to bring wheels that nobody has yet to every node."""
    wheels = [random_wheel(index) for index in range(5)]
    nodes = facts(fleet)
    cargo = {node.name: cargo_of(node, wheels) for node in nodes}
    started = time.perf_counter()
    carrier = Carrier(fleet, inventory, nodes, endpoints, cargo, lambda event: None)  # type: ignore[arg-type]
    fleet.each(carrier.bring)
    spent = time.perf_counter() - started
    if not all({wheel.sha256 for wheel in wheels} <= {*node.state.wheels} for node in facts(fleet)):
        raise SystemExit("not every wheel arrived")
    return spent


def facts(fleet: Fleet) -> list[NodeFacts]:
    """Of nodes whose roots differ: each has its own home."""
    root = "~/.cluster-train"

    def ask(transport: Transport) -> NodeFacts:
        return NodeFacts.from_json(transport.node, agent.call(transport, root, "python3", "probe.py", ["--root", root]))

    return list(fleet.each(ask).values())


def random_wheel(index: int) -> LockedWheel:
    """A wheel as far as carrying is concerned, in the cache."""
    content = os.urandom(FAN_OUT_BYTES // 5)
    sha256 = hashlib.sha256(content).hexdigest()
    wheel = LockedWheel(name=f"w{index}", version="1", filename=f"w{index}-1-py3-none-any.whl", sha256=sha256, source="")
    wheel_path(wheel).parent.mkdir(parents=True)
    wheel_path(wheel).write_bytes(content)
    return wheel


@contextmanager
def containers(scratch: Path) -> Iterator[Path]:
    """An inventory of two containers of this run's own, removed at the end."""
    where = ["--project", PROJECT, "--state", str(scratch / "state")]
    in_memory = ["--lay-over", REPOSITORY / "tests" / "bench" / "in-memory.yaml"]
    call([sys.executable, "docker/cluster.py", "up", "--subnet", SUBNET, *in_memory, *where])
    try:
        state = scratch / "state"
        content = {
            "ssh": {"user": "trainer", "key": str(state / "id_ed25519"), "known_hosts": str(state / "known_hosts")},
            "nodes": [{"name": f"node{index}", "host": SUBNET.replace(".0/24", f".{10 + index}")} for index in range(2)],
            "stack": STACK,
        }
        path = scratch / "containers.yml"
        path.write_text(yaml.safe_dump(content))
        yield path
    finally:
        call([sys.executable, "docker/cluster.py", "down", *where])


@contextmanager
def sshds(directory: Path, count: int) -> Iterator[list[SshdNode]]:
    """Throw-away sshd's on loopback."""
    made = SshdNodes(directory)
    try:
        yield made(count)
    finally:
        made.close()


def write_inventory(path: Path, nodes: Sequence[SshdNode], **keys: str) -> Path:
    """An inventory of sshd's on loopback."""
    first = nodes[0]
    content = {
        "ssh": {"user": first.user, "key": str(first.key), "known_hosts": str(first.known_hosts), "port": first.port},
        "nodes": [{"name": f"node{index}", "host": node.host} for index, node in enumerate(nodes)],
        "stack": STACK,
        **keys,
    }
    path.write_text(yaml.safe_dump(content))
    return path


def ssh(inventory: Path, host: str) -> list[str]:
    """The command line that runs a command on a container."""
    options = yaml.safe_load(inventory.read_text())["ssh"]
    known = f"UserKnownHostsFile={options['known_hosts']}"
    return ["ssh", "-F", "none", "-i", options["key"], "-o", known, "-o", "BatchMode=yes", f"{options['user']}@{host}"]


def timed(argv: Sequence[str | Path]) -> tuple[float, str]:
    """(seconds, standard output) of a command; ends the program where it fails."""
    started = time.perf_counter()
    out = call(argv)
    return time.perf_counter() - started, out


def with_memory(argv: Sequence[str]) -> tuple[float, int]:
    """(seconds, largest resident set in bytes) of a command."""
    started = time.perf_counter()
    silent = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_WRONLY, 0) for descriptor in (1, 2)]
    child = os.posix_spawn(argv[0], argv, os.environ, file_actions=silent)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"{' '.join(argv)} failed")
    return time.perf_counter() - started, usage.ru_maxrss * 1024


def call(argv: Sequence[str | Path]) -> str:
    """Run a command at the root of the checkout; ends the program with what it said where it fails."""
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, argv))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def told(seconds: Sequence[float]) -> str:
    return f"median {statistics.median(seconds):.2f} s (min {min(seconds):.2f}, max {max(seconds):.2f})"


if __name__ == "__main__":
    main()
