"""What keeps people from training, made on purpose in a lab of namespaces, and found by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jobs import write_model
from netlab import Machine, NetworkLab, can_isolate
from sshd import SSHD, make_key

pytestmark = pytest.mark.skipif(not can_isolate(), reason="needs root, namespaces and iptables")

Finding = Mapping[str, str]
FIREWALL = ("iptables", "-w", "-A", "INPUT", "-p", "tcp")
ANSWERS_PASS = ("iptables", "-w", "-A", "INPUT", "-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT")
HIGH_PORTS = ("--dport", "1024:65535")
# An interpreter whose clock is so many seconds ahead, for our own scripts.
OF_ANOTHER_TIME = """#!/usr/bin/python3
import os, runpy, sys, time
if "-c" in sys.argv or not os.path.exists(sys.argv[3]):
    os.execv("/usr/bin/python3", sys.argv)
true_time = time.time
time.time = lambda: true_time() + {}
sys.argv = sys.argv[3:]  # behind -S -E
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PLAIN = (Machine(cards={"eth0": "10.77.0.10/24"}), Machine(cards={"ens3": "10.77.0.11/24"}))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkLab]:
    """Two machines in one network, whose cards have different names; what a test changes there it puts back."""
    lab = NetworkLab(tmp_path_factory.mktemp("lab"), PLAIN)
    yield lab
    lab.close()


@contextmanager
def firewall(lab: NetworkLab, node: str, *rules: tuple[str, ...]) -> Iterator[None]:
    for rule in rules:
        lab.on(node, *rule)
    try:
        yield
    finally:
        lab.on(node, "iptables", "-w", "-F", "INPUT")


def of(found: list[dict[str, str]], node: str, what: str) -> Finding:
    """The finding of that name on that node."""
    return next((one for one in found if (one["node"], one["what"]) == (node, what)), {"missing": str(found)})


def errors(found: list[dict[str, str]]) -> set[tuple[str, str]]:
    return {(one["node"], one["what"]) for one in found if one["severity"] == "error"}


class TestWhatIsInOrder:
    def test_two_machines_with_cards_of_different_names(self, plain: NetworkLab) -> None:
        """Nothing stops `up`: each node's own card is named, all ways are open and measured, the cost of a step is told."""
        ran, found = plain.doctor()
        assert errors(found) == set() and ran.exit_code == 0
        result = ran.result
        assert [one["interface"] for one in result["network"]["endpoints"]] == ["eth0", "ens3"]
        uses = {(way["source"], way["target"], way["use"]) for way in result["ways"] if way["state"] == "open"}
        assert uses == {
            ("node0", "node1", "gloo"),
            ("node1", "node0", "gloo"),
            ("node1", "node0", "MASTER_PORT"),
            ("node1", "node0", "launcher"),
        }
        assert all(way["bytes_per_s"] > 1e6 for way in result["ways"] if way["use"] == "gloo")
        assert {way["seen_as"] for way in result["ways"]} == {"10.77.0.10", "10.77.0.11"}
        assert result["cost"]["is_example"] and result["cost"]["allreduce_s"] > 0
        assert [(way["target"], way["is_authorized"]) for way in result["ssh"]] == [("node1", False)]

    def test_the_table_is_red_first_and_says_what_to_do(self, plain: NetworkLab) -> None:
        """The same on a terminal: errors above warnings above notes, a remedy under each."""
        with firewall(plain, "node1", (*FIREWALL, *HIGH_PORTS, "-j", "REJECT")):
            ran = plain.cluster_train("doctor", plain.inventory())
        kinds = re.findall(r"^(error|warning|note) ", ran.stdout, re.MULTILINE)
        assert ran.exit_code == 5 and kinds == sorted(kinds, key=["error", "warning", "note"].index) and kinds[0] == "error"
        assert ran.stdout.count("    do: ") >= len(kinds) and "`cluster-train up` would fail" in ran.stdout


class TestFirewalls:
    """MASTER_PORT open is not enough: gloo connects back on random ports."""

    @pytest.mark.parametrize(
        ("target", "verb", "said"), [("DROP", "drops", "no answer within 3 s"), ("REJECT", "rejects", "refused")]
    )
    def test_only_master_port_is_open(self, plain: NetworkLab, target: str, verb: str, said: str) -> None:
        """Dropped and rejected are told apart, by name, with both ends and the port."""
        open_ports = (*FIREWALL, "--dport", "29500:29999", "-j", "ACCEPT")
        with firewall(plain, "node0", ANSWERS_PASS, open_ports, (*FIREWALL, *HIGH_PORTS, "-j", target)):
            ran, found = plain.doctor()
        assert ran.exit_code == 5
        assert errors(found) == {("node0", f"a firewall {verb} {use}") for use in ("random ports (gloo)", "the launcher's port")}
        one = of(found, "node0", f"a firewall {verb} random ports (gloo)")
        assert re.match(r"node1 -> 10\.77\.0\.10:\d+: ", one["evidence"]) and said in one["evidence"]
        assert "ip_local_port_range" in one["remedy"] and "10.77.0.0/24" in one["remedy"]

    def test_the_head_is_shut(self, plain: NetworkLab) -> None:
        """MASTER_PORT and the launcher's port are named, and a range is offered."""
        with firewall(plain, "node0", ANSWERS_PASS, (*FIREWALL, *HIGH_PORTS, "-j", "DROP")):
            _, found = plain.doctor()
        assert {what for _, what in errors(found)} == {
            f"a firewall drops {use}" for use in ("MASTER_PORT", "the launcher's port", "random ports (gloo)")
        }
        assert "network: {ports: 29500-29600}" in of(found, "node0", "a firewall drops MASTER_PORT")["remedy"]

    def test_the_other_way_is_shut(self, plain: NetworkLab) -> None:
        """A worker that the head cannot call back: the direction is named."""
        with firewall(plain, "node1", ANSWERS_PASS, (*FIREWALL, *HIGH_PORTS, "-j", "DROP")):
            _, found = plain.doctor()
        assert errors(found) == {("node1", "a firewall drops random ports (gloo)")}
        assert of(found, "node1", "a firewall drops random ports (gloo)")["evidence"].startswith("node0 -> 10.77.0.11:")

    def test_a_range_that_is_open(self, plain: NetworkLab) -> None:
        """With network.ports MASTER_PORT and the launcher are tried in that range, which the firewall lets in."""
        open_ports = (*FIREWALL, "--dport", "30100:30199", "-j", "ACCEPT")
        rules = (ANSWERS_PASS, open_ports, (*FIREWALL, *HIGH_PORTS, "-j", "DROP"))
        with firewall(plain, "node0", *rules):
            ran, found = plain.doctor(network={"ports": "30100-30199"})
        assert errors(found) == {("node0", "a firewall drops random ports (gloo)")}
        ports = [way["port"] for way in ran.result["ways"] if way["use"] in ("MASTER_PORT", "launcher")]
        assert len(ports) == 2 and all(30100 <= port <= 30199 for port in ports)

    def test_node0_may_not_use_ssh(self, plain: NetworkLab) -> None:
        """mpirun would hang or say "unable to run bstrap_proxy"; here the way is named. The person's own SSH still passes."""
        shut = (*FIREWALL, "--dport", "22", "-s", "10.77.0.10")
        with firewall(plain, "node1", (*shut, "-j", "DROP")):
            _, dropped = plain.doctor()
        with firewall(plain, "node1", (*shut, "-j", "REJECT")):
            _, rejected = plain.doctor()
        assert ("node1", "a firewall drops node0's SSH there") in errors(dropped)
        assert errors(rejected) == {("node1", "node0's SSH is rejected there")}

    def test_all_ports_of_the_range_are_taken(self, plain: NetworkLab) -> None:
        """Another program in the whole range: told before anything starts."""
        script = (
            "import socket, time\nkept = [socket.socket() for _ in range(8)]\n"
            "for number, one in enumerate(kept): one.bind(('0.0.0.0', 30024 + number)); one.listen()\n"
            "open('/dev/shm/ready', 'w').close(); time.sleep(60)"
        )
        taker = plain.start_on("node0", "python3", "-c", script)
        try:
            plain.on("node0", "sh", "-c", "while [ ! -e /dev/shm/ready ]; do sleep 0.05; done")
            _, found = plain.doctor(network={"ports": "30000-30031"})
        finally:
            taker.kill()
            taker.wait()
        assert of(found, "node0", "no free port")["evidence"] == "all of 30024-30031 are taken"


class TestNodesThatFail:
    def test_one_node_does_not_hide_the_others(self, make_lab: Callable[..., NetworkLab]) -> None:
        """A black hole, a changed key, a refused login and a healthy node: a finding each, and the healthy ones are examined."""
        cards = [{"eth0": f"10.77.0.{10 + number}/24"} for number in range(4)]
        lab = make_lab(*(Machine(cards=card) for card in cards))
        lab.on("node1", "iptables", "-w", "-A", "INPUT", "-j", "DROP")
        (lab.home("node2") / ".ssh" / "authorized_keys").write_text("")
        known = lab.directory / "known_hosts"
        keys = [line.split(maxsplit=1)[1] for line in known.read_text().splitlines()]
        known.write_text(known.read_text().replace(keys[3], keys[0]))
        ran, found = lab.doctor(ssh={**SSH(lab), "connect_timeout": 3})
        assert ran.exit_code == 5
        assert errors(found) == {("node1", "cannot be reached"), ("node2", "login refused"), ("node3", "host key has changed")}
        assert list(ran.result["nodes"]) == ["node0"] and all(one["remedy"] for one in found)

    def test_an_unknown_host_key(self, plain: NetworkLab) -> None:
        """Its fingerprint and the command that accepts it."""
        (plain.directory / "empty").write_text("")
        _, found = plain.doctor(ssh={**SSH(plain), "known_hosts": str(plain.directory / "empty")})
        one = of(found, "node1", "host key not trusted")
        assert "SHA256:" in one["evidence"] and "ssh-keyscan -p 22 10.77.0.11" in one["remedy"]

    def test_no_python(self, plain: NetworkLab) -> None:
        """An interpreter that a node does not have is named."""
        _, found = plain.doctor(stack={"python": "python3.99"})
        assert errors(found) == {("node0", "cannot be asked"), ("node1", "cannot be asked")}
        assert "there is no python3.99" in of(found, "node0", "cannot be asked")["evidence"]


class TestSshFromNode0:
    """With the configuration, the key and the host keys that mpirun will have."""

    def test_its_key_is_let_in_from_its_address_only(self, make_lab: Callable[..., NetworkLab]) -> None:
        """Before `up` has given the key there is nothing to try; then the login works, or it is said that it does not."""
        lab = make_lab(*PLAIN)
        ran, found = lab.doctor()
        assert errors(found) == set() and not ran.result["ssh"][0]["is_authorized"]
        with lab.authorized("10.77.0.10"):
            ran, found = lab.doctor()
            assert errors(found) == set()
            assert [(way["code"], way["is_authorized"]) for way in ran.result["ssh"]] == [(0, True)]
            keys = lab.home("node1") / ".ssh" / "authorized_keys"
            keys.write_text(keys.read_text().replace('from="10.77.0.10"', 'from="10.77.0.99"'))
            _, found = lab.doctor()
            assert errors(found) == {("node1", "node0 may not log in there")}

    def test_another_machine_at_that_address(self, make_lab: Callable[..., NetworkLab]) -> None:
        """The person reaches node1 through a router, node0 meets somebody else at the address: its key is not the one that we
        verified."""
        lab = make_lab(*PLAIN)
        other = lab.directory / "other_key"
        make_key(other)
        script = f"exec {SSHD} -D -f {lab.home('node1')}/sshd_config -h {other} -o Port=2222"
        settings = lab.home("node1") / "sshd_config"
        kept = [line for line in settings.read_text().splitlines() if not line.startswith(("HostKey", "Port"))]
        settings.write_text("\n".join(kept) + "\n")
        impostor = lab.start_on("node1", "sh", "-c", script)
        to_impostor = ("-p", "tcp", "-s", "10.77.0.10", "--dport", "22", "-j", "REDIRECT", "--to-ports", "2222")
        lab.on("node1", "iptables", "-w", "-t", "nat", "-A", "PREROUTING", *to_impostor)
        lab.on("node1", "sh", "-c", "until ss -tln | grep -q :2222; do sleep 0.05; done")
        _, found = lab.doctor()
        impostor.kill()
        impostor.wait()
        assert errors(found) == {("node1", "node0 meets another host key there")}


class TestNames:
    def test_debian_and_no_names_at_all(self, make_lab: Callable[..., NetworkLab]) -> None:
        """127.0.1.1, and a name that does not resolve: both are told, and neither stops a run, which uses addresses."""
        debian = "127.0.0.1 localhost\n127.0.1.1 node0\n"
        lab = make_lab(Machine(cards={"eth0": "10.77.0.10/24"}, hosts=debian), Machine(cards={"eth0": "10.77.0.11/24"}))
        ran, found = lab.doctor()
        assert of(found, "node0", "its name means itself only")["evidence"] == "node0 is 127.0.1.1"
        assert of(found, "node1", "its name does not resolve")["severity"] == "note"
        assert ran.exit_code == 0 and "handled" in of(found, "node1", "its name does not resolve")["remedy"]

    def test_a_name_that_means_another_machine(self, make_lab: Callable[..., NetworkLab]) -> None:
        """A stale line in /etc/hosts of another node."""
        stale = "127.0.0.1 localhost\n10.77.0.11 node1\n"
        hosts = "127.0.0.1 localhost\n10.77.0.10 node0\n10.77.0.99 node1\n"
        lab = make_lab(
            Machine(cards={"eth0": "10.77.0.10/24"}, hosts=hosts), Machine(cards={"eth0": "10.77.0.11/24"}, hosts=stale)
        )
        _, found = lab.doctor()
        told = of(found, "node1", "its name means another machine")
        assert told["evidence"] == "on node0 node1 is 10.77.0.99, none of its addresses" and errors(found) == set()
        assert not {what["what"] for what in found} & {"its name means itself only", "its name does not resolve"}


class TestCards:
    def test_two_networks(self, make_lab: Callable[..., NetworkLab]) -> None:
        """Machines with several cards in different orders: one network for all, each node's own card in it; a bridge like
        Docker's, of the same address everywhere, is never taken."""
        lab = make_lab(
            Machine(cards={"eth0": "10.77.0.10/24", "ib0": "10.88.0.10/24"}),
            Machine(cards={"ens3": "10.88.0.11/24", "ens4": "10.77.0.11/24"}),
        )
        for node in ("node0", "node1"):
            lab.on(node, "ip", "link", "add", "docker0", "type", "bridge")
            lab.on(node, "ip", "address", "add", "172.17.0.1/16", "dev", "docker0")
            lab.on(node, "ip", "link", "set", "docker0", "up")
        nodes = [{"name": "node0", "host": "10.77.0.10"}, {"name": "node1", "host": "10.77.0.11"}]
        keys = {line.split()[0]: line.split(maxsplit=1)[1] for line in (lab.directory / "known_hosts").read_text().splitlines()}
        (lab.directory / "known_hosts").write_text(f"10.77.0.10 {keys['10.77.0.10']}\n10.77.0.11 {keys['10.88.0.11']}\n")
        assert endpoints(lab, nodes=nodes) == [("10.77.0.10", "eth0"), ("10.77.0.11", "ens4")]
        assert endpoints(lab, nodes=nodes, network="10.88.0.0/24") == [("10.88.0.10", "ib0"), ("10.88.0.11", "ens3")]

    def test_ipv6_only(self, make_lab: Callable[..., NetworkLab]) -> None:
        """A lab without IPv4."""
        lab = make_lab(Machine(cards={"eth0": "fd77::10/64"}), Machine(cards={"eth0": "fd77::11/64"}))
        ran, found = lab.doctor()
        assert errors(found) == set() and ran.exit_code == 0
        assert {way["state"] for way in ran.result["ways"]} == {"open"}
        assert endpoints(lab) == [("fd77::10", "eth0"), ("fd77::11", "eth0")]

    def test_no_network_in_common(self, plain: NetworkLab) -> None:
        """A network in which no node has an address: told with what each node has."""
        _, found = plain.doctor(network="192.168.7.0/24")
        assert "node1: 10.77.0.11/24 (ens3)" in of(found, "node0", "no network")["evidence"]

    def test_a_node_that_calls_from_another_address(self, plain: NetworkLab) -> None:
        """NAT between nodes: what one calls itself is not what the other sees."""
        nat = ("-t", "nat", "-A", "POSTROUTING", "-d", "10.77.0.10", "-j", "SNAT", "--to-source", "10.77.0.99")
        plain.on("node1", "ip", "address", "add", "10.77.0.99/24", "dev", "ens3")
        plain.on("node1", "iptables", "-w", *nat)
        try:
            _, found = plain.doctor()
        finally:
            plain.on("node1", "iptables", "-w", "-t", "nat", "-F")
            plain.on("node1", "ip", "address", "del", "10.77.0.99/24", "dev", "ens3")
        assert of(found, "node1", "calls from another address")["evidence"] == "node0 sees 10.77.0.99, not 10.77.0.11"

    def test_large_packets_are_lost(self, plain: NetworkLab) -> None:
        """Cards of unequal MTU with a switch that says nothing: connections are made, and hang with the first gradients."""
        lost = ("iptables", "-w", "-A", "INPUT", "-p", "tcp", *HIGH_PORTS, "-m", "length", "--length", "1200:65535", "-j", "DROP")
        with firewall(plain, "node1", lost):
            _, found = plain.doctor()
        assert errors(found) == {("node1", "large packets are lost")}
        assert "MTU" in of(found, "node1", "large packets are lost")["remedy"]

    def test_a_slow_network(self, plain: NetworkLab, tmp_path: Path) -> None:
        """Two nodes slower than one: 10 Mbit/s, and a model whose gradients need longer than the computing."""
        shaped = ("tc", "qdisc", "add", "dev", "ens3", "root", "tbf", "rate", "10mbit", "burst", "16kb", "latency", "50ms")
        write_model(tmp_path, parameters=1_000_000)
        job = {"script": "train.py", "args": ["--model_name_or_path", str(tmp_path)]}
        plain.on("node1", *shaped)
        try:
            ran, found = plain.doctor(job=job)
        finally:
            plain.on("node1", "tc", "qdisc", "del", "dev", "ens3", "root")
        cost = ran.result["cost"]
        assert cost["gradient_bytes"] == 4_000_000 and not cost["is_example"] and cost["allreduce_s"] > 2
        assert "all-reduce of this model's 4 MB" in of(found, "node0", "several nodes may be slower than one")["evidence"]


class TestOneNode:
    """What is wrong with a machine itself."""

    def test_sshd_allows_one_session(self, make_lab: Callable[..., NetworkLab]) -> None:
        """MaxSessions 1: everything that needs a second channel would fail."""
        lab = make_lab(PLAIN[0], Machine(cards={"eth0": "10.77.0.11/24"}, sshd={"MaxSessions": "1"}))
        _, found = lab.doctor()
        assert errors(found) == {("node1", "sshd allows few sessions")}
        assert "MaxSessions 10" in of(found, "node1", "sshd allows few sessions")["remedy"]

    def test_limits_memory_and_a_shell_that_talks(self, make_lab: Callable[..., NetworkLab]) -> None:
        """Few open files, a /dev/shm of 64 MB, a ~/.bashrc that prints, and a single core allowed."""
        shm = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
        before = f"prlimit --pid $$ --nofile=512 --nproc=500 && {shm} && taskset -p -c 0 $$ >/dev/null"
        lab = make_lab(PLAIN[0], Machine(cards={"eth0": "10.77.0.11/24"}, before=before, bashrc="echo Welcome to node1\n"))
        _, found = lab.doctor()
        assert {one["what"] for one in found if one["node"] == "node1"} >= {
            "few open files allowed",
            "few processes allowed",
            "little shared memory",
            "shell start-up is noisy",
            "some CPUs are not ours",
        }
        assert "Welcome to node1" in of(found, "node1", "shell start-up is noisy")["evidence"]

    def test_a_root_that_cannot_be_written(self, make_lab: Callable[..., NetworkLab]) -> None:
        """Rights are not all: a file system may be mounted read-only."""
        before = "mount -t tmpfs tmpfs /mnt && mount -o remount,ro /mnt"
        lab = make_lab(PLAIN[0], Machine(cards={"eth0": "10.77.0.11/24"}, before=before))
        _, found = lab.doctor(root="/mnt/ct")
        assert ("node1", "cannot be asked") in errors(found)
        assert "Read-only" in of(found, "node1", "cannot be asked")["evidence"]

    def test_no_mpirun_on_the_path_of_a_login_without_terminal(self, plain: NetworkLab) -> None:
        """`mpi: system`: "orted: command not found" is told with the PATH that such a login has."""
        _, found = plain.doctor(stack={"mpi": "system"})
        assert errors(found) == {("node0", "mpirun not found"), ("node1", "mpirun not found")}
        assert "PATH is /" in of(found, "node1", "mpirun not found")["evidence"]

    def test_an_mpi_that_other_nodes_do_not_have_at_its_place(self, make_lab: Callable[..., NetworkLab]) -> None:
        """What mpirun starts on the other nodes is looked for where node0's own lies, and nowhere else."""
        lab = make_lab(
            Machine(cards={"eth0": "10.77.0.10/24"}, bashrc="PATH=/srv/mpi/bin:$PATH\n"),
            Machine(cards={"eth0": "10.77.0.11/24"}, bashrc="PATH=/srv/other/bin:$PATH\n"),
        )
        for node, place in (("node0", "mpi"), ("node1", "other")):
            lab.on(node, "mkdir", "-p", f"/srv/{place}/bin")
            lab.on(node, "cp", "/bin/true", f"/srv/{place}/bin/mpirun")  # never run here
            lab.on(node, "cp", "/bin/true", f"/srv/{place}/bin/prted")
        _, found = lab.doctor(stack={"mpi": "system"})
        assert errors(found) == {("node1", "MPI's helper not found")}
        assert "/srv/mpi/bin, where node0 has its mpirun" in of(found, "node1", "MPI's helper not found")["evidence"]
        lab.on("node1", "cp", "-r", "/srv/other", "/srv/mpi")
        assert errors(lab.doctor(stack={"mpi": "system"})[1]) == set()

    def test_ranks_of_another_run_and_keys_of_ours(self, plain: NetworkLab) -> None:
        """A rank that outlived its launcher, and keys that may log in: named, with what ends or removes them."""
        keys = plain.home("node1") / ".ssh" / "authorized_keys"
        before = keys.read_text()
        public = (plain.directory / "user_key.pub").read_text().split()[1]
        keys.write_text(f'{before}restrict,from="10.77.0.10" ssh-ed25519 {public} cluster-train:aa:10.77.0.10\n')
        rank = plain.start_on("node1", "sleep", "600", env={"CLUSTER_TRAIN_RUN_ID": "20260101-lab-dead"})
        try:
            _, found = plain.doctor()
        finally:
            rank.kill()
            rank.wait()
            keys.write_text(before)
        assert "cluster-train stop --run 20260101-lab-dead" in of(found, "node1", "a run is alive here")["remedy"]
        assert of(found, "node1", "a cluster key may log in")["evidence"] == "cluster-train:aa:10.77.0.10, from 10.77.0.10"

    def test_what_others_do_there(self, make_lab: Callable[..., NetworkLab]) -> None:
        """Whose process keeps the cores busy. The load is a stand-in: a real one needs a minute, and is that of all machines of
        a lab; the process is real."""
        lab = make_lab(PLAIN[0], Machine(cards={"eth0": "10.77.0.11/24"}, before=instead("/proc/loadavg", "37.50 9 5 40/200 99")))
        busy = lab.start_on("node1", "sh", "-c", "while :; do :; done")
        try:
            _, found = lab.doctor()
        finally:
            busy.kill()
            busy.wait()
        one = of(found, "node1", "others use this node")
        assert (
            "load 37.5 on" in one["evidence"] and "root: sh -c while :; do :; done" in one["evidence"] and "top" in one["remedy"]
        )

    def test_a_clock_that_differs(self, make_lab: Callable[..., NetworkLab]) -> None:
        """All machines of a kernel have one clock (namespaces give others for uptime alone): the interpreter is a stand-in that
        tells node1's time two minutes ahead. A warning for minutes, an error for days."""
        lab = make_lab(*PLAIN)
        for node, ahead_s in (("node0", 0), ("node1", 120)):
            interpreter = lab.home(node) / "python"
            interpreter.write_text(OF_ANOTHER_TIME.format(ahead_s))
            interpreter.chmod(0o755)
        _, found = lab.doctor(stack={"python": "/srv/python"})
        assert of(found, "node1", "clock differs").get("evidence") == "+120 s from node0's", found
        assert "timedatectl" in of(found, "node1", "clock differs")["remedy"]
        (lab.home("node1") / "python").write_text(OF_ANOTHER_TIME.format(-3 * 86_400))
        _, found = lab.doctor(stack={"python": "/srv/python"})
        assert errors(found) == {("node1", "clock is wrong")}

    def test_governor_and_locked_memory(self, make_lab: Callable[..., NetworkLab]) -> None:
        """Stand-ins for files below /sys, which virtual machines do not have: a governor that saves power, two threads per core,
        an InfiniBand card. The limit of locked memory is real."""
        cpus, kinds = "/sys/devices/system/cpu", "/sys/class"
        before = (
            f"cp -r {cpus} /srv/cpu 2>/dev/null; mkdir -p /srv/cpu/cpu0/cpufreq /srv/cpu/smt; "
            f"echo powersave > /srv/cpu/cpu0/cpufreq/scaling_governor; rm -f /srv/cpu/smt/active; echo 1 > /srv/cpu/smt/active; "
            f"cp -r {kinds} /srv/class 2>/dev/null; rm -rf /srv/class/net; mkdir -p /srv/class/net /srv/class/infiniband/mlx5_0; "
            f"mount --bind {kinds}/net /srv/class/net && mount --rbind /srv/class {kinds} && mount --bind /srv/cpu {cpus} && "
            "prlimit --pid $$ --memlock=65536"
        )
        lab = make_lab(PLAIN[0], Machine(cards={"eth0": "10.77.0.11/24"}, before=before))
        ran, found = lab.doctor()
        assert ran.exit_code == 0 and ran.result["nodes"]["node1"]["has_smt"]
        assert of(found, "node1", "processors are throttled")["evidence"] == "governor powersave"
        assert "cpupower" in of(found, "node1", "processors are throttled")["remedy"]
        assert of(found, "node1", "little memory may be locked")["evidence"] == "0.1 MB, with an InfiniBand card"
        assert "memlock" in of(found, "node1", "little memory may be locked")["remedy"]


def instead(path: str, text: str) -> str:
    """Shell commands with which a machine has this text in the place of a file of its kernel's."""
    name = f"/srv/instead-of-{path.rpartition('/')[2]}"
    return f"echo '{text}' > {name} && mount --bind {name} {path}"


def SSH(lab: NetworkLab) -> dict[str, Any]:
    return {"key": str(lab.directory / "user_key"), "known_hosts": str(lab.directory / "known_hosts"), "user": "root"}


def endpoints(lab: NetworkLab, **overrides: Any) -> list[tuple[str, str]]:
    ran, _ = lab.doctor(**overrides)
    return [(one["address"], one["interface"]) for one in ran.result["network"]["endpoints"]]
