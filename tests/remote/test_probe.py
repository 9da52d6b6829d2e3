"""What `remote/probe.py` tells about this machine, about machines this test makes up, and about real ones kept as files."""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from interpreters import every_interpreter
from packaging.markers import default_environment

from orchestrator.specs.facts import NodeFacts

REPOSITORY = Path(__file__).resolve().parents[2]
PROBE = REPOSITORY / "remote" / "probe.py"
KEPT_FACTS = REPOSITORY / "tests" / "data" / "facts"
REAL_MACHINES = sorted((REPOSITORY.parent / "shared" / "topologies").glob("*.tar.gz"))

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"


def run_probe(
    *options: str | Path, interpreter: str | Path = sys.executable, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What the probe prints; it must say nothing else on stdout, in ASCII."""
    answer = subprocess.run(
        [interpreter, PROBE, *options],
        capture_output=True,
        check=True,
        timeout=30,
        env={**os.environ, **(env or {})},
    )
    document: dict[str, Any] = json.loads(answer.stdout.decode("ascii"))
    return document


def write_files(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def cpu_files(cpu: int, *, socket: int, core_id: int, siblings: str, name: str = "thread_siblings_list") -> dict[str, str]:
    topology = f"{CPU}/cpu{cpu}/topology"
    return {
        f"{topology}/physical_package_id": str(socket),
        f"{topology}/core_id": str(core_id),
        f"{topology}/{name}": siblings,
    }


def merged(parts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {name: text for part in parts for name, text in part.items()}


def one_socket(cpus: int) -> dict[str, str]:
    """A machine of one socket whose cores have one thread each."""
    each = (cpu_files(cpu, socket=0, core_id=cpu, siblings=str(cpu)) for cpu in range(cpus))
    return {f"{CPU}/online": f"0-{cpus - 1}", **merged(each)}


def places(facts: Mapping[str, Any], *fields: str) -> dict[int, tuple[int, ...]]:
    """{CPU: the named fields}."""
    return {entry["cpu"]: tuple(entry[field] for field in fields) for entry in facts["cpu"]["logical"]}


def groups(facts: Mapping[str, Any], *fields: str) -> set[frozenset[int]]:
    """The sets of CPUs that agree in the named fields."""
    by_place: dict[tuple[int, ...], set[int]] = {}
    for cpu, place in places(facts, *fields).items():
        by_place.setdefault(place, set()).add(cpu)
    return {frozenset(cpus) for cpus in by_place.values()}


@pytest.fixture
def remote_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules beside the probe, imported as the probe imports them."""
    monkeypatch.syspath_prepend(str(PROBE.parent))
    yield {name: importlib.import_module(name) for name in ("addresses", "topology", "probe")}
    for name in ("addresses", "topology", "probe"):
        monkeypatch.delitem(sys.modules, name)


# ---------------------------------------------------------------------------------------------------------------------
# This machine


@every_interpreter
def test_every_python_tells_facts_that_the_orchestrator_believes(interpreter: Path, tmp_path: Path) -> None:
    """Each Python from 3.6 prints one ASCII JSON object that NodeFacts accepts, about itself and about this machine."""
    facts = NodeFacts.from_json("node0", run_probe("--root", tmp_path / "root", interpreter=interpreter))
    assert facts.root == str(tmp_path / "root")
    assert (facts.hostname, facts.arch, facts.kernel) == (os.uname().nodename, os.uname().machine, os.uname().release)
    assert {cpu.cpu for cpu in facts.cpu.logical} == os.sched_getaffinity(0)
    assert facts.machine.identifies
    assert facts.memory.total_bytes > facts.memory.available_bytes > 0
    assert facts.disk.writable and facts.disk.free_bytes > 0
    assert len(facts.free_ports) == 3 and all(29500 <= port <= 29999 for port in facts.free_ports)


@every_interpreter
def test_markers_are_those_of_the_platform_module(interpreter: Path) -> None:
    """The environment markers are what the slower `platform` module says in the same interpreter."""
    tell = """
import json, os, platform, sys
print(json.dumps({
    "implementation_name": sys.implementation.name, "os_name": os.name, "platform_machine": platform.machine(),
    "platform_python_implementation": platform.python_implementation(), "platform_release": platform.release(),
    "platform_system": platform.system(), "platform_version": platform.version(), "sys_platform": sys.platform,
    "python_full_version": platform.python_version(), "python_version": ".".join(platform.python_version_tuple()[:2]),
    "implementation_version": platform.python_version()}))
"""
    expected = json.loads(subprocess.check_output([interpreter, "-c", tell]))
    assert run_probe(interpreter=interpreter)["python"]["markers"] == expected


def test_markers_are_all_that_requirements_may_ask_for() -> None:
    """`packaging`, which evaluates the markers, finds the same names and values in this interpreter."""
    expected = {name: value for name, value in default_environment().items() if name != "extra"}
    assert run_probe()["python"]["markers"] == expected


def test_the_interpreters_on_path_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs called pythonX.Y that may be run, each once, in order; no other names."""
    for place, names in (("a", ("python3.11", "python3.9", "python3.9-config")), ("b", ("python3.9", "python3"))):
        (tmp_path / place).mkdir()
        for name in names:
            (tmp_path / place / name).symlink_to("/bin/sh")
    (tmp_path / "b" / "python3.12").write_text("may not be run")
    monkeypatch.setenv("PATH", f"{tmp_path}/a:{tmp_path}/b:{tmp_path}/none")
    assert run_probe()["python"]["others"] == ["3.9", "3.11"]


@every_interpreter
def test_has_venv_tells_whether_venv_works(interpreter: Path) -> None:
    """`python -m venv` needs both its own module and ensurepip."""
    answer = subprocess.run([interpreter, "-c", "import ensurepip, venv"], capture_output=True, check=False)
    assert run_probe(interpreter=interpreter)["python"]["has_venv"] == (answer.returncode == 0)


def test_the_probe_changes_nothing(tmp_path: Path) -> None:
    """The root directory is not made by asking about it; free space is that of the nearest directory that exists."""
    root = tmp_path / "a" / "b"
    facts = run_probe("--root", root)
    assert list(tmp_path.iterdir()) == []
    assert facts["state"] == {
        "agents": [],
        "envs": [],
        "jobs": [],
        "nonce_dir_id": None,
        "runs": [],
        "unusable": [],
        "uv": False,
        "wheels": [],
    }
    assert facts["disk"]["free_bytes"] > 0


def test_the_root_may_start_with_a_tilde(tmp_path: Path) -> None:
    """`~` is the home directory of the user on the node, and the root that is reported is absolute."""
    facts = run_probe("--root", "~/train", env={"HOME": str(tmp_path)})
    assert (facts["home"], facts["root"]) == (str(tmp_path), f"{tmp_path}/train")


def test_only_allowed_cpus_count() -> None:
    """A process that is bound to one CPU reports that one, and how many the machine has."""
    chosen = max(os.sched_getaffinity(0))
    bind = f"import os, sys; os.sched_setaffinity(0, [{chosen}]); os.execv(sys.executable, [sys.executable, sys.argv[1]])"
    answer = subprocess.run([sys.executable, "-c", bind, PROBE], capture_output=True, check=True)
    cpu = json.loads(answer.stdout)["cpu"]
    assert [entry["cpu"] for entry in cpu["logical"]] == [chosen]
    assert cpu["online"] == os.sysconf("SC_NPROCESSORS_ONLN")


def test_state_lists_what_is_finished(tmp_path: Path) -> None:
    """Left out: names that begin with a dot or end in .part, unfinished or broken environments, odd wheel directories."""
    write_files(
        tmp_path,
        {
            "agent/a1/probe.py": "",
            "agent/.a2/probe.py": "",
            "agent/a3.part/probe.py": "",
            "envs/e1/complete.json": "{}",
            "envs/e1/bin/python": "#!/bin/sh",
            "envs/e1/unusable.json": '{"some_module": "OSError: no such library"}',
            "envs/e2/bin/python": "#!/bin/sh",
            "envs/e3/complete.json": "{}",
            "envs/e3/bin/python": "may not be run",
            "wheelhouse/w1/x-1-py3-none-any.whl": "",
            "wheelhouse/w2/x-1-py3-none-any.whl.part": "",
            "wheelhouse/w3/x-1-py3-none-any.whl": "",
            "wheelhouse/w3/y-1-py3-none-any.whl": "",
            "jobs/j1/script.py": "",
            "jobs/.j2/script.py": "",
            "runs/20261130-1/run.json": "{}",
            "runs/not-a-directory": "",
            "bin/uv": "#!/bin/sh",
            "ssh/id_ed25519.pub": "ssh-ed25519 AAAAC3 cluster-train:lab",
        },
    )
    for environment in ("e1", "e2"):
        (tmp_path / "envs" / environment / "bin" / "python").chmod(0o755)
    (tmp_path / "bin" / "uv").chmod(0o755)
    facts = run_probe("--root", tmp_path)
    found = tmp_path.stat()
    assert facts["state"] == {
        "agents": ["a1"],
        "envs": ["e1"],
        "unusable": [{"env": "e1", "module": "some_module", "why": "OSError: no such library"}],
        "wheels": ["w1"],
        "jobs": ["j1"],
        "runs": ["20261130-1"],
        "uv": True,
        "nonce_dir_id": f"{found.st_dev}:{found.st_ino}",
    }
    assert facts["cluster_key"] == "ssh-ed25519 AAAAC3 cluster-train:lab"


def test_a_uv_that_cannot_be_run_does_not_count(tmp_path: Path) -> None:
    """bin/uv without permission to execute is not there."""
    write_files(tmp_path, {"bin/uv": ""})
    (tmp_path / "bin" / "uv").chmod(0o644)
    assert run_probe("--root", tmp_path)["state"]["uv"] is False


def test_authorized_keys_of_clusters_are_told_by_their_comments(tmp_path: Path) -> None:
    """Keys with options are found too; a person's own keys, commented-out lines and options that look alike are not."""
    lines = [
        "# cluster-train:commented AAAA cluster-train:commented",
        "ssh-ed25519 AAAAC3Nz1 someone@laptop",
        "ssh-ed25519 AAAAC3Nz2 cluster-train:lab",
        'restrict,pty,command="echo cluster-train:option" ssh-rsa AAAAB3Nz3 cluster-train:other',
        'command="echo cluster-train:option" ssh-rsa AAAAB3Nz4 me',
        "ssh-ed25519 AAAAC3Nz5",
    ]
    write_files(tmp_path, {".ssh/authorized_keys": "\n".join(lines)})
    assert run_probe(env={"HOME": str(tmp_path)})["authorized"] == ["cluster-train:lab", "cluster-train:other"]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (
            "10.0.0.1 50022 10.0.0.10 2222",
            {"client": "10.0.0.1", "client_port": 50022, "server": "10.0.0.10", "server_port": 2222},
        ),
        (
            "fd00::1 50022 fd00::10 22",
            {"client": "fd00::1", "client_port": 50022, "server": "fd00::10", "server_port": 22},
        ),
        ("", None),
        ("something else", None),
    ],
)
def test_the_ssh_connection_is_sshds_own_view(variable: str, expected: dict[str, Any] | None) -> None:
    """$SSH_CONNECTION tells to which address and port the connection came, behind whatever forwards it."""
    assert run_probe(env={"SSH_CONNECTION": variable})["ssh_connection"] == expected


def test_ports_in_use_are_not_free() -> None:
    """A port that someone listens on, with IPv4 or IPv6, is not offered; three different ones are where there are enough."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert run_probe("--ports", f"{port}-{port}")["free_ports"] == []
    offered = run_probe("--ports", "29500-29999")["free_ports"]
    assert len(set(offered)) == 3


@pytest.mark.parametrize("ports", ["29500", "0-10", "20-10", "1-70000", "a-b"])
def test_an_impossible_range_of_ports_is_refused(ports: str) -> None:
    """A range that is none ends with code 2 and a message that shows a right one."""
    answer = subprocess.run([sys.executable, PROBE, "--ports", ports], capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert "is not a range of ports such as 29500-29999" in answer.stderr


def test_the_machines_own_name_is_resolved() -> None:
    """What the resolver says of the host name is reported, nothing where it does not know it."""
    try:
        expected = sorted({str(answer[4][0]) for answer in socket.getaddrinfo(os.uname().nodename, None)})
    except socket.gaierror:
        expected = []
    assert run_probe()["hostname_resolves_to"] == expected


def test_a_name_server_that_does_not_answer_holds_nobody_up(
    remote_modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lookup that does not end in time is given up, said on stderr, and leaves the list empty."""
    addresses, answered = remote_modules["addresses"], threading.Event()
    monkeypatch.setattr(addresses.Resolution, "look_up", lambda self: answered.wait(30))
    monkeypatch.setattr(addresses, "RESOLVE_TIMEOUT_S", 0.05)
    assert addresses.Resolution("node0").wait() == []
    answered.set()
    assert "'node0' did not resolve within 0.05 s" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Network cards


@every_interpreter
def test_netlink_and_the_older_interfaces_agree(interpreter: Path) -> None:
    """Without netlink the same cards are found, up or down alike, and no address that netlink does not know."""
    tell = "import addresses, json; print(json.dumps([addresses.ask_netlink(), addresses.ask_ioctl()]))"
    answer = subprocess.check_output([interpreter, "-c", tell], env={**os.environ, "PYTHONPATH": str(PROBE.parent)})
    new, old = ({name: (flags & 0xFFFF, found) for name, flags, found in cards} for cards in json.loads(answer))
    assert new.keys() == old.keys()
    assert "127.0.0.1/8" in new["lo"][1] and "127.0.0.1/8" in old["lo"][1]
    for name, (flags, found) in old.items():
        assert flags == new[name][0]
        assert set(found) <= set(new[name][1])


def test_where_netlink_is_refused_the_older_interfaces_serve(
    remote_modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A netlink question that the kernel refuses is said on stderr, and the addresses are read another way."""
    addresses = remote_modules["addresses"]
    monkeypatch.setattr(addresses, "RTM_GETLINK", 4095)  # a question no kernel knows
    assert "127.0.0.1/8" in next(card["addresses"] for card in addresses.read_interfaces() if card["loopback"])
    assert "netlink does not answer" in capsys.readouterr().err


def test_a_cards_kind_is_what_it_stands_on(remote_modules: dict[str, ModuleType], tmp_path: Path) -> None:
    """Bridges of containers are told from a host's own bridge; bonds and VLANs count as the real cards below them."""
    for entry in (
        "eth0/device",
        "bond0/lower_eth0",
        "eth0.100/lower_eth0",
        "br0/bridge",
        "br0/brif/eth0",
        "br0/lower_eth0",
        "docker0/bridge",
        "docker0/brif/veth1",
        "docker0/lower_veth1",
        "virbr0/bridge",
        "veth1/queues",
        "wg0/queues",
    ):
        (tmp_path / entry).mkdir(parents=True, exist_ok=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    kinds = {name: remote_modules["addresses"].read_kind(name, str(tmp_path)) for name in names}
    assert kinds == {
        "bond0": "physical",
        "br0": "physical",
        "docker0": "bridge",
        "eth0": "physical",
        "eth0.100": "physical",
        "veth1": "virtual",
        "virbr0": "bridge",
        "wg0": "virtual",
    }


def test_the_loopback_card_is_known(tmp_path: Path) -> None:
    """The loopback card is up, is marked as loopback, and is the only one of its kind."""
    cards = run_probe()["interfaces"]
    loopback = [card for card in cards if card["loopback"]]
    assert [(card["up"], card["kind"]) for card in loopback] == [(True, "loopback")]
    assert all(card["kind"] != "loopback" for card in cards if not card["loopback"])


def test_musls_version_is_read_from_its_loader(remote_modules: dict[str, ModuleType]) -> None:
    """musl tells its version only in the text of its loader."""
    text = "musl libc (x86_64)\nVersion 1.2.4\nDynamic Program Loader\nUsage: ld.so [options] [--] pathname\n"
    assert remote_modules["probe"].musl_version(text) == "1.2.4"


# ---------------------------------------------------------------------------------------------------------------------
# Made-up machines


@every_interpreter
def test_hardware_threads_and_interleaved_numbers(interpreter: Path, tmp_path: Path) -> None:
    """CPU numbers alternate between two sockets and core ids repeat in each: cores and sockets are told apart all the same."""
    each = (cpu_files(cpu, socket=cpu % 2, core_id=cpu // 2 % 2, siblings=f"{cpu % 4},{cpu % 4 + 4}") for cpu in range(8))
    facts = run_probe("--sys-root", write_files(tmp_path, {f"{CPU}/online": "0-7", **merged(each)}), interpreter=interpreter)
    assert groups(facts, "socket") == {frozenset({0, 2, 4, 6}), frozenset({1, 3, 5, 7})}
    assert groups(facts, "core") == {frozenset({cpu, cpu + 4}) for cpu in range(4)}
    assert facts["cpu"]["online"] == 8


def test_core_ids_that_repeat_in_every_die_are_different_cores(tmp_path: Path) -> None:
    """Two dies of one package both have a core 0; the newer file name for hardware threads is read too."""
    each = (cpu_files(cpu, socket=0, core_id=0, siblings=str(cpu), name="core_cpus_list") for cpu in range(2))
    facts = run_probe("--sys-root", write_files(tmp_path, {f"{CPU}/online": "0-1", **merged(each)}))
    assert groups(facts, "socket", "core") == {frozenset({0}), frozenset({1})}


@pytest.mark.parametrize("online", ["0-2,4", None])
def test_offline_cpus_do_not_exist(tmp_path: Path, online: str | None) -> None:
    """An offline CPU keeps its directory but loses its topology; it is left out whether or not `online` can be read."""
    files = merged(cpu_files(cpu, socket=0, core_id=cpu, siblings=str(cpu)) for cpu in (0, 1, 2, 4))
    files |= {f"{CPU}/cpu3/online": "0"} | ({f"{CPU}/online": online} if online else {})
    facts = run_probe("--sys-root", write_files(tmp_path, files))
    assert sorted(places(facts)) == [0, 1, 2, 4]


def test_numa_nodes_without_memory_or_cpus_are_listed(tmp_path: Path) -> None:
    """A node without memory keeps its CPUs, a node without CPUs (memory on an expander) its memory; offline CPUs are in none."""
    files = one_socket(4) | {
        f"{NODE}/node0/cpulist": "0-1",
        f"{NODE}/node0/meminfo": "Node 0 MemTotal:       1024 kB\nNode 0 MemFree:  512 kB",
        f"{NODE}/node2/cpulist": "2-3,8",
        f"{NODE}/node2/meminfo": "Node 2 MemTotal:       0 kB",
        f"{NODE}/node3/cpulist": "",
        f"{NODE}/node3/meminfo": "Node 3 MemTotal:       2048 kB",
    }
    facts = run_probe("--sys-root", write_files(tmp_path, files))
    assert facts["numa"] == [
        {"node": 0, "cpus": [0, 1], "memory_bytes": 1024 * 1024},
        {"node": 2, "cpus": [2, 3], "memory_bytes": 0},
        {"node": 3, "cpus": [], "memory_bytes": 2048 * 1024},
    ]
    assert places(facts, "numa") == {0: (0,), 1: (0,), 2: (2,), 3: (2,)}


def test_numa_nodes_are_read_from_masks_where_there_are_no_lists(tmp_path: Path) -> None:
    """Where only cpumap exists its groups of 32 bits are read from the right."""
    files = one_socket(40) | {f"{NODE}/node0/cpumap": "000000aa,0000ffff", f"{NODE}/node1/cpumap": "00000055,ffff0000"}
    facts = run_probe("--sys-root", write_files(tmp_path, files))
    assert [node["cpus"] for node in facts["numa"]] == [
        [*range(16), 33, 35, 37, 39],
        [*range(16, 32), 32, 34, 36, 38],
    ]


def test_a_machine_without_numa_information_is_one_node(tmp_path: Path) -> None:
    """Everything, memory included, is in node 0."""
    files = one_socket(2) | {"proc/meminfo": "MemTotal:  4096 kB\nMemAvailable: 1024 kB"}
    facts = run_probe("--sys-root", write_files(tmp_path, files))
    assert facts["numa"] == [{"node": 0, "cpus": [0, 1], "memory_bytes": 4096 * 1024}]
    assert facts["memory"] == {"total_bytes": 4096 * 1024, "available_bytes": 1024 * 1024, "cgroup_limit_bytes": None}


@pytest.mark.parametrize(("second_capacity", "sockets"), [(1024, 1), (446, 2)])
def test_clusters_of_unequal_cores_are_one_socket(tmp_path: Path, second_capacity: int, sockets: int) -> None:
    """Packages of unequal cores are the clusters of one chip; packages of equal cores are sockets."""
    files = merged(cpu_files(cpu, socket=cpu // 2, core_id=cpu % 2, siblings=str(cpu)) for cpu in range(4))
    files |= {f"{CPU}/cpu{cpu}/cpu_capacity": str(446 if cpu < 2 else second_capacity) for cpu in range(4)}
    facts = run_probe("--sys-root", write_files(tmp_path, files | {f"{CPU}/online": "0-3"}))
    assert len(groups(facts, "socket")) == sockets
    assert len(groups(facts, "core")) == 4


def test_unequal_sockets_are_told_as_they_are(tmp_path: Path) -> None:
    """One socket with three cores beside one with a single core, one of them with two threads."""
    rows = [(0, 0, "0,4"), (1, 0, "1"), (2, 0, "2"), (3, 1, "3"), (4, 0, "0,4")]
    files = merged(cpu_files(cpu, socket=socket, core_id=cpu % 4, siblings=siblings) for cpu, socket, siblings in rows)
    facts = run_probe("--sys-root", write_files(tmp_path, files | {f"{CPU}/online": "0-4"}))
    assert groups(facts, "socket") == {frozenset({0, 1, 2, 4}), frozenset({3})}
    assert groups(facts, "core") == {frozenset({0, 4}), frozenset({1}), frozenset({2}), frozenset({3})}


def test_packages_without_a_number_are_one_socket(tmp_path: Path) -> None:
    """Firmware that does not describe packages makes the kernel say -1."""
    files = merged(cpu_files(cpu, socket=-1, core_id=cpu, siblings=str(cpu)) for cpu in range(2))
    facts = run_probe("--sys-root", write_files(tmp_path, files | {f"{CPU}/online": "0-1"}))
    assert places(facts, "socket") == {0: (0,), 1: (0,)}


def test_without_sys_the_processors_are_read_from_cpuinfo(tmp_path: Path) -> None:
    """x86 tells sockets and cores in /proc/cpuinfo."""
    blocks = [f"processor\t: {cpu}\nphysical id\t: {cpu % 2}\ncore id\t\t: {cpu // 2 % 2}" for cpu in range(8)]
    facts = run_probe("--sys-root", write_files(tmp_path, {"proc/cpuinfo": "\n\n".join(blocks) + "\n"}))
    assert groups(facts, "socket") == {frozenset({0, 2, 4, 6}), frozenset({1, 3, 5, 7})}
    assert groups(facts, "core") == {frozenset({cpu, cpu + 4}) for cpu in range(4)}


def test_without_sys_and_topology_there_is_one_socket(tmp_path: Path) -> None:
    """Arm's /proc/cpuinfo only counts: one socket, one core per CPU; the model is told in the numbers it gives."""
    blocks = [f"processor\t: {cpu}\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c" for cpu in range(3)]
    facts = run_probe("--sys-root", write_files(tmp_path, {"proc/cpuinfo": "\n\n".join(blocks)}))
    assert places(facts, "socket", "core") == {0: (0, 0), 1: (0, 1), 2: (0, 2)}
    assert facts["cpu"]["model"] == "implementer 0x41 part 0xd0c"


def test_a_tree_with_nothing_in_it_is_one_cpu(tmp_path: Path) -> None:
    """Where no file tells anything there is still the CPU that the probe runs on."""
    facts = run_probe("--sys-root", tmp_path)
    assert facts["cpu"] == {
        "model": "",
        "flags": [],
        "logical": [{"cpu": 0, "socket": 0, "core": 0, "numa": 0}],
        "online": 1,
        "cgroup_cpu_limit": None,
    }


def test_only_the_instruction_sets_that_matter_are_told(tmp_path: Path) -> None:
    """Whole words of the first processor's flags count."""
    first = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R)\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile xavx512_vnni"
    second = "processor\t: 1\nmodel name\t: Another\nflags\t\t: amx_int8"
    facts = run_probe("--sys-root", write_files(tmp_path, {"proc/cpuinfo": f"{first}\n\n{second}"}))
    assert facts["cpu"]["model"] == "Intel(R) Xeon(R)"
    assert facts["cpu"]["flags"] == ["avx2", "avx512f", "avx512_bf16", "amx_tile"]


# ---------------------------------------------------------------------------------------------------------------------
# Control groups

V2_MOUNT = "30 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"


def v1_mounts(mount_root: str) -> str:
    """The mountinfo of the controllers that matter."""
    return "\n".join(
        f"3{index} 31 0:2{index} {mount_root} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}"
        for index, name in enumerate(("cpu,cpuacct", "cpuset", "memory"))
    )


def test_the_smallest_limit_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    """cgroup v2: our group, its parent and the root each limit something; other groups do not matter."""
    group = "sys/fs/cgroup/system.slice/job"
    files = one_socket(8) | {
        "proc/self/cgroup": "0::/system.slice/job",
        "proc/self/mountinfo": V2_MOUNT,
        f"{group}/cpu.max": "max 100000",
        f"{group}/cpuset.cpus.effective": "2-5",
        f"{group}/memory.max": "8589934592",
        "sys/fs/cgroup/system.slice/cpu.max": "350000 100000",
        "sys/fs/cgroup/system.slice/memory.max": "4294967296",
        "sys/fs/cgroup/cpuset.cpus.effective": "0-7",
        "sys/fs/cgroup/other.slice/cpu.max": "10000 100000",
    }
    facts = run_probe("--sys-root", write_files(tmp_path, files))
    assert facts["cpu"]["cgroup_cpu_limit"] == 3.5
    assert sorted(places(facts)) == [2, 3, 4, 5]
    assert facts["cpu"]["online"] == 8
    assert facts["memory"]["cgroup_limit_bytes"] == 4 << 30


@pytest.mark.parametrize("mountinfo", [V2_MOUNT, None])
def test_a_container_with_its_own_namespace_sees_its_group_as_the_root(tmp_path: Path, mountinfo: str | None) -> None:
    """cgroup v2 in a container: the group is "/"; where mountinfo is missing the usual place is tried."""
    files = one_socket(4) | {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "200000 100000"}
    files |= {"proc/self/mountinfo": mountinfo} if mountinfo else {}
    assert run_probe("--sys-root", write_files(tmp_path, files))["cpu"]["cgroup_cpu_limit"] == 2.0


@pytest.mark.parametrize("mount_root", ["/", "/docker/c0ffee"])
def test_limits_of_the_old_hierarchies(tmp_path: Path, mount_root: str) -> None:
    """cgroup v1: each controller has its own tree; a container without a namespace has only its part of it mounted."""
    inside = "" if mount_root != "/" else "/docker/c0ffee"
    files = one_socket(4) | {
        "proc/self/cgroup": "3:memory:/docker/c0ffee\n2:cpuset:/docker/c0ffee\n1:cpu,cpuacct:/docker/c0ffee",
        "proc/self/mountinfo": v1_mounts(mount_root),
        f"sys/fs/cgroup/cpu,cpuacct{inside}/cpu.cfs_quota_us": "150000",
        f"sys/fs/cgroup/cpu,cpuacct{inside}/cpu.cfs_period_us": "50000",
        f"sys/fs/cgroup/cpuset{inside}/cpuset.cpus": "1,3",
        f"sys/fs/cgroup/memory{inside}/memory.limit_in_bytes": "1073741824",
    }
    facts = run_probe("--sys-root", write_files(tmp_path, files))
    assert facts["cpu"]["cgroup_cpu_limit"] == 3.0
    assert sorted(places(facts)) == [1, 3]
    assert facts["memory"]["cgroup_limit_bytes"] == 1 << 30


def test_groups_without_limits_limit_nothing(tmp_path: Path) -> None:
    """-1, "max", an empty cpuset and v1's largest number all mean that there is no limit."""
    files = one_socket(2) | {
        "proc/self/cgroup": "3:memory:/\n2:cpuset:/\n1:cpu,cpuacct:/\n0::/a",
        "proc/self/mountinfo": v1_mounts("/") + "\n" + V2_MOUNT.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpuset/cpuset.cpus": "",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/unified/a/cpu.max": "max 100000",
        "sys/fs/cgroup/unified/a/memory.max": "max",
    }
    facts = run_probe("--sys-root", write_files(tmp_path, files))
    assert facts["cpu"]["cgroup_cpu_limit"] is None
    assert sorted(places(facts)) == [0, 1]
    assert facts["memory"]["cgroup_limit_bytes"] is None


# ---------------------------------------------------------------------------------------------------------------------
# Real machines


@pytest.mark.parametrize(
    ("name", "sockets", "cores", "threads", "numa_nodes"),
    [
        ("x86_64-64cpu", 4, 32, 64, 3),
        ("x86_64-epyc_7451", 2, 48, 96, 8),
        ("arm-A510-A710-A715-X3", 1, 8, 8, 1),
    ],
)
def test_kept_facts_are_what_lscpu_says(name: str, sockets: int, cores: int, threads: int, numa_nodes: int) -> None:
    """The facts kept of real machines have the sockets, cores, threads and NUMA nodes that lscpu counts there."""
    facts = json.loads((KEPT_FACTS / f"{name}.json").read_text())
    assert len(groups(facts, "socket")) == sockets
    assert len(groups(facts, "core")) == len(groups(facts, "socket", "core")) == cores
    assert len(facts["cpu"]["logical"]) == facts["cpu"]["online"] == threads
    assert len(facts["numa"]) == numa_nodes
    assert places(facts, "numa") == {cpu: (node["node"],) for node in facts["numa"] for cpu in node["cpus"]}


if REAL_MACHINES:  # their own files lie beside the checkout, not in it: the tests exist where the files do

    @pytest.fixture(scope="module", params=REAL_MACHINES, ids=lambda path: path.name.removesuffix(".tar.gz"))
    def real_machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The unpacked /proc and /sys of a real machine."""
        directory = tmp_path_factory.mktemp("machine")
        with tarfile.open(request.param) as archive:
            archive.extractall(directory, **({"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}))
        return directory / request.param.name.removesuffix(".tar.gz")

    def test_real_machines_are_read_as_kept(real_machine: Path) -> None:
        """The probe still reads from a real machine's files what tests/data/facts holds of it."""
        kept = json.loads((KEPT_FACTS / f"{real_machine.name}.json").read_text())
        assert run_probe("--sys-root", real_machine) == kept

    def test_real_machines_are_read_as_lscpu_reads_them(real_machine: Path) -> None:
        """Sockets, cores and NUMA nodes are those that lscpu finds in the same files."""
        text = subprocess.check_output(["lscpu", "-s", real_machine], text=True, env={**os.environ, "LC_ALL": "C"})
        cores_per_socket, sockets = (
            [int(number) for number in re.findall(rf"^{re.escape(field)}: +(\d+)$", text, re.MULTILINE)]
            for field in ("Core(s) per socket", "Socket(s)")  # one of each for every type of core
        )
        node_lists = re.findall(r"^NUMA node(\d+) CPU\(s\): +(\S+)$", text, re.MULTILINE)
        facts = run_probe("--sys-root", real_machine)
        assert len(groups(facts, "socket")) == max(sockets)
        assert len(groups(facts, "core")) == sum(a * b for a, b in zip(cores_per_socket, sockets, strict=True))
        if node_lists:
            assert places(facts, "numa") == {cpu: (int(node),) for node, listed in node_lists for cpu in expand_cpu_list(listed)}


def expand_cpu_list(text: str) -> list[int]:
    """The CPUs of a list such as "0-5,48-53"."""
    ranges = [part.split("-") for part in text.split(",")]
    return [cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)]
