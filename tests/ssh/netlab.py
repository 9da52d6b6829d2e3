"""A lab of machines in namespaces: each node has its own network, cards, names, processes and sshd on port 22.

    lab = NetworkLab(directory, [Machine(cards={"eth0": "10.77.0.10/24"}), Machine(cards={"ens3": "10.77.0.11/24"})])
    lab.on("node1", "iptables", "-A", "INPUT", …)
    lab.cluster_train("doctor", lab.inventory())

Each machine sees its own home at /srv, which every Linux has. The cards hang on switches (bridges) in one more namespace, in
which commands of a person run too. Nothing outside sees any of it, and all of it is gone with its processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

import yaml
from commands import COMMAND, REPOSITORY, Ran
from sshd import SSHD, make_key

LIMIT_S = 120.0
ISOLATED = ("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
SETTINGS = {
    "Port": "22",
    "StrictModes": "no",
    "UsePAM": "no",
    "PasswordAuthentication": "no",
    "KbdInteractiveAuthentication": "no",
    "PermitRootLogin": "prohibit-password",
    "PidFile": "none",
    "UseDNS": "no",
}
START_AT_HOME = 'cd "$HOME" && exec "$SHELL" ${SSH_ORIGINAL_COMMAND+-c "$SSH_ORIGINAL_COMMAND"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine of the lab.

    Args:
        cards: card name to address with prefix length. Cards with addresses of one network hang on one switch.
        hosts: the text of its /etc/hosts.
        bashrc: the text of its ~/.bashrc, which the login shell reads for commands too.
        sshd: further settings of its sshd.
        before: shell commands of root before sshd starts, such as a limit.
    """

    cards: Mapping[str, str]
    hosts: str = "127.0.0.1 localhost\n"
    bashrc: str = ""
    sshd: Mapping[str, str] = field(default_factory=dict)
    before: str = "true"


class NetworkLab:
    """Starts the machines, node0 first."""

    def __init__(self, directory: Path, machines: Sequence[Machine]) -> None:
        self.directory = directory
        self.machines = {f"node{index}": machine for index, machine in enumerate(machines)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._pids: dict[str, int] = {}
        make_key(directory / "user_key")
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        try:
            self._start("switch", "sleep infinity")
            self.on("switch", "ip", "link", "set", "lo", "up")
            for name, machine in self.machines.items():
                self._start(name, self._boot(name, machine))
            self._wire()
            self._wait_for_sshd()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all machines and what runs on them."""
        for process in self._processes.values():
            process.kill()
            process.wait(timeout=30)

    def on(self, name: str, *command: str) -> str:
        """Run a command of root on a machine (or on the "switch"), past SSH."""
        done = self.run_on(name, *command)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def run_on(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        """The same, whatever its exit code."""
        return subprocess.run(self.into(name, *command), capture_output=True, text=True, timeout=60)

    def start_on(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a command on a machine; it ends with the machine at the latest."""
        return subprocess.Popen(self.into(name, *command), env={**os.environ, **(env or {})}, stdout=subprocess.DEVNULL)

    @contextmanager
    def authorized(self, address: str) -> Iterator[None]:
        """node0 has a key of ours that node1 lets in from an address, as after `up`; the agent must have been shipped."""
        (agent,) = (self.home("node0") / ".cluster-train" / "agent").iterdir()
        script = f"/srv/.cluster-train/agent/{agent.name}/authorize.py"
        home = ("env", "HOME=/srv", "python3", script)
        public = json.loads(self.on("node0", *home, "key", "/srv/.cluster-train"))["public"]
        comment = f"cluster-train:{hashlib.sha256(public.encode()).hexdigest()[:16]}:{address}"
        allow = self.into("node1", *home, "allow", comment, address)
        subprocess.run(allow, input=public, text=True, check=True, stdout=subprocess.DEVNULL, timeout=60)
        yield
        self.on("node1", *home, "revoke")

    def address(self, name: str, card: int = 0) -> str:
        return str(ip_interface(list(self.machines[name].cards.values())[card]).ip)

    def home(self, name: str) -> Path:
        return self.directory / name

    def inventory(self, **overrides: Any) -> Path:
        """An inventory of all machines at their first addresses."""
        content: dict[str, Any] = {
            "cluster": "lab",
            "root": "/srv/.cluster-train",
            "ssh": {"key": str(self.directory / "user_key"), "known_hosts": str(self.directory / "known_hosts"), "user": "root"},
            "nodes": [{"name": name, "host": self.address(name)} for name in self.machines],
        }
        path = self.directory / "lab.yml"
        path.write_text(yaml.safe_dump({**content, **overrides}, sort_keys=False))
        return path

    def cluster_train(self, *arguments: str | Path) -> Ran:
        """The command as a person types it, on a machine that hangs on the lab's switches."""
        environment = {**os.environ, "XDG_STATE_HOME": str(self.directory / "state"), "NO_COLOR": "1"}
        command = self.into("switch", str(COMMAND), *map(str, arguments))
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        return Ran(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    def doctor(self, **overrides: Any) -> tuple[Ran, list[dict[str, str]]]:
        """What `doctor --json` answered, and its findings."""
        ran = self.cluster_train("doctor", self.inventory(**overrides), "--json")
        assert ran.exit_code in (0, 5), ran.stdout + ran.stderr
        return ran, ran.result["findings"]

    def into(self, name: str, *command: str) -> tuple[str, ...]:
        """The command line that runs a command on a machine (or on the "switch")."""
        spaces = ("--net",) if name == "switch" else ("--net", "--mount", "--uts", "--ipc", "--pid")
        return ("nsenter", "--target", str(self._pids[name]), *spaces, "--", *command)

    def _start(self, name: str, script: str) -> None:
        process = subprocess.Popen((*ISOLATED, "sh", "-c", script), stdin=subprocess.DEVNULL, cwd="/", start_new_session=True)
        self._processes[name] = process
        deadline = time.monotonic() + 30
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not children.read_text():  # `unshare` forks once all namespaces are there
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.005)
        self._pids[name] = int(children.read_text())

    def _boot(self, name: str, machine: Machine) -> str:
        """The shell script of one machine: its disk at one place for all, its names, its sshd."""
        home = self.home(name)
        (home / ".ssh").mkdir(parents=True)
        (home / ".ssh" / "authorized_keys").write_text((self.directory / "user_key.pub").read_text())
        (home / ".bashrc").write_text(machine.bashrc)
        (home / "hosts").write_text(machine.hosts)
        make_key(home / "host_key")
        settings = {
            **SETTINGS,
            "HostKey": home / "host_key",
            "AuthorizedKeysFile": "/srv/.ssh/authorized_keys",
            "SetEnv": "HOME=/srv CLUSTER_TRAIN_LOCKS=/srv/locks",
            "ForceCommand": START_AT_HOME,
            **machine.sshd,
        }
        (home / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        return (
            f"mount --make-rprivate / && mount --bind {home} /srv && mount --bind {home}/hosts /etc/hosts"
            f" && mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /dev/shm && hostname {name} && {machine.before}"
            f" && exec {SSHD} -D -f {home}/sshd_config -E {home}/sshd.log"
        )

    def _wire(self) -> None:
        switches: dict[str, str] = {}
        known = []
        for number, (name, machine) in enumerate(self.machines.items()):
            self.on(name, "ip", "link", "set", "lo", "up")
            for index, (card, address) in enumerate(machine.cards.items()):
                network = str(ip_interface(address).network)
                if network not in switches:
                    switches[network] = f"sw{len(switches)}"
                    self.on("switch", "ip", "link", "add", switches[network], "type", "bridge")
                    self.on("switch", "ip", "address", "add", _of_switch(address), "dev", switches[network], "nodad")
                    self.on("switch", "ip", "link", "set", switches[network], "up")
                port, pid = f"p{number}x{index}", str(self._pids[name])
                self.on("switch", "ip", "link", "add", port, "type", "veth", "peer", "name", card, "netns", pid)
                self.on("switch", "ip", "link", "set", port, "master", switches[network], "up")
                self.on(name, "ip", "address", "add", address, "dev", card, *(["nodad"] if ":" in address else []))
                self.on(name, "ip", "link", "set", card, "up")
                key = " ".join((self.home(name) / "host_key.pub").read_text().split()[:2])
                known.append(f"{ip_interface(address).ip} {key}\n")
        (self.directory / "known_hosts").write_text("".join(known))

    def _wait_for_sshd(self) -> None:
        deadline = time.monotonic() + 30
        for name in self.machines:
            log = self.home(name) / "sshd.log"
            while not (log.exists() and "Server listening on" in log.read_text()):
                assert time.monotonic() < deadline and self._processes[name].poll() is None, name
                time.sleep(0.01)


def can_isolate() -> bool:
    """Whether this process may give its children namespaces of all these kinds, with cards and firewalls in them."""
    script = "ip link add one type veth peer name two && iptables -w -A INPUT -i one -j DROP"
    made = subprocess.run((*ISOLATED, "sh", "-c", script), capture_output=True, check=False)
    return SSHD is not None and made.returncode == 0


def _of_switch(address: str) -> str:
    """The last address but one of the same network, for the switch and the person."""
    interface = ip_interface(address)
    network = interface.network
    return f"{network.network_address + min(network.num_addresses, 65536) - 2}/{network.prefixlen}"
