"""Which ways between nodes a launch will use, and what it means when one of them is shut. Pure.

Not all pairs are tried: everybody talks to the head (MASTER_PORT, the launcher's call back, SSH), and gloo's rings are as good
as the ways between neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from orchestrator.planning.network import NetworkChoice
from orchestrator.planning.preflight import NAMES_HANDLED, Finding, note
from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.health import SshWay, Way
from orchestrator.specs.inventory import NetworkOptions
from orchestrator.specs.run import Endpoint

MASTER, LAUNCHER, GLOO = "MASTER_PORT", "launcher", "gloo"
PORTS_OF = {MASTER: MASTER, LAUNCHER: "the launcher's port", GLOO: "random ports (gloo)"}
WAIT_S = 3.0  # a node of one's own network answers within milliseconds, or after a lost packet within a second
SLOW_LATENCY_S = 0.002


def gloo_pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Ordered pairs of nodes: from and to the first, and both ways along the ring of all."""
    head, *others = names
    ring = ring_pairs(names)
    star = [pair for other in others for pair in ((head, other), (other, head))]
    return list(dict.fromkeys([*star, *ring, *((target, source) for source, target in ring)]))


def ring_pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Each node and the next one; the last and the first."""
    return [(name, names[(index + 1) % len(names)]) for index, name in enumerate(names)] if len(names) > 1 else []


def way_findings(ways: Sequence[Way], choice: NetworkChoice, options: NetworkOptions) -> Iterator[Finding]:
    """What is wrong with the ways between nodes: one finding per target, use and kind of obstacle."""
    shut = [way for way in ways if way.state != "open"]

    def kind(way: Way) -> tuple[str, str, str]:
        return way.target, way.use, way.state

    for (target, use, state), group in groupby(sorted(shut, key=kind), key=kind):
        yield _shut(target, use, state, list(group), choice, options)
    yield from _translated(ways, choice)
    yield from _slow(ways)


def ssh_findings(head: str, ways: Sequence[SshWay], choice: NetworkChoice) -> Iterator[Finding]:
    """What is wrong with the head's SSH to the other nodes. A login that is refused before `up` gives its key there is none."""
    addresses = {endpoint.node: endpoint.address for endpoint in choice.endpoints}
    for way in ways:
        if way.code == 0 or ("Permission denied" in way.stderr and not way.is_authorized):
            continue
        what, remedy = _ssh_obstacle(head, way)
        silent = f"no end within {way.seconds:.0f} s" if way.code is None else f"exit code {way.code}"
        shown = f"{head} -> {addresses[way.target]}: {(way.stderr.strip().splitlines() or [silent])[-1]}"
        yield Finding(severity="error", node=way.target, what=what, evidence=shown, remedy=remedy)


def name_findings(nodes: Sequence[NodeFacts], resolved: Mapping[str, Mapping[str, Sequence[str]]]) -> Iterator[Finding]:
    """Names of nodes that mean other machines elsewhere.

    Args:
        resolved: by node, what it finds for the names that the nodes call themselves.
    """
    for node in nodes:
        own = {address.partition("/")[0] for card in node.interfaces for address in card.addresses}
        for observer, found in resolved.items():
            addresses = [address.partition("%")[0] for address in found.get(node.hostname, ())]
            if observer != node.name and addresses and not own.intersection(addresses):
                shown = f"on {observer} {node.hostname} is {', '.join(addresses)}, none of its addresses"
                yield note(node, "its name means another machine", shown, NAMES_HANDLED)
                break


def _ssh_obstacle(head: str, way: SshWay) -> tuple[str, str]:
    said = way.stderr
    if "Host key verification failed" in said or "IDENTIFICATION HAS CHANGED" in said:
        return (
            f"{head} meets another host key there",
            "two machines may have this address: see `ip neigh` on node0, and `network:`",
        )
    if "Permission denied" in said:
        return (
            f"{head} may not log in there",
            "see ~/.ssh/authorized_keys and sshd_config (AllowUsers, PubkeyAuthentication) there",
        )
    if "refused" in said:
        return f"{head}'s SSH is rejected there", "let sshd listen on this address (ListenAddress), and open its port for node0"
    if "No such file" in said:
        return f"{head} has no ssh", "install OpenSSH's client there (Debian: apt-get install openssh-client)"
    if way.code is None or "timed out" in said:
        return f"a firewall drops {head}'s SSH there", "open sshd's port there for the address of node0 on this network"
    return f"{head} cannot use SSH there", "run on node0 what mpirun would: `cluster-train up --dry-run` prints it"


def _shut(target: str, use: str, state: str, ways: Sequence[Way], choice: NetworkChoice, options: NetworkOptions) -> Finding:
    address = _address(choice.endpoints, target)
    callers = ", ".join(way.source for way in ways)
    shown = f"{callers} -> {address}:{ways[0].port}: {ways[0].error}"
    if state == "stuck":
        what, remedy = (
            "large packets are lost",
            "give the cards of all nodes one MTU (ip link set dev CARD mtu 1500), and the switch too",
        )
        return Finding(severity="error", node=target, what=what, evidence=shown, remedy=remedy)
    verbs = {"dropped": "a firewall drops", "rejected": "a firewall rejects", "stranger": "another program answers"}
    what = f"{verbs.get(state, 'cannot connect to')} {PORTS_OF[use]}"
    return Finding(severity="error", node=target, what=what, evidence=shown, remedy=_opening(use, choice, options))


def _opening(use: str, choice: NetworkChoice, options: NetworkOptions) -> str:
    """How to open what is shut: gloo takes its ports from the kernel's range, the others can be told theirs."""
    network = choice.network or "the other nodes"
    everything = f"let TCP from {network} in there: iptables -I INPUT -p tcp -s {network} -j ACCEPT (or the firewall's own tool)"
    if use == GLOO:
        return f"{everything}; gloo's ports cannot be chosen, they come from net.ipv4.ip_local_port_range"
    if options.ports:
        return f"open TCP {options.ports[0]}-{options.ports[1]} from {network} there, as `network.ports` says"
    return f"{everything}; or open a range, and name it: `network: {{ports: 29500-29600}}`"


def _translated(ways: Sequence[Way], choice: NetworkChoice) -> Iterator[Finding]:
    """Connections that arrive from an address that is not the caller's on the network: NAT, or another card."""
    seen: set[str] = set()
    for way in ways:
        own = _address(choice.endpoints, way.source)
        if way.seen_as in (None, own) or own.startswith("127.") or way.source in seen:
            continue
        seen.add(way.source)
        yield Finding(
            severity="warning",
            node=way.source,
            what="calls from another address",
            evidence=f"{way.target} sees {way.seen_as}, not {own}",
            remedy="its route leads over another card or NAT: see `ip route get` there, or name the network with `network:`",
        )


def _slow(ways: Sequence[Way]) -> Iterator[Finding]:
    far = [way for way in ways if way.use == GLOO and (way.latency_s or 0) > SLOW_LATENCY_S]
    for target, group in groupby(sorted(far, key=lambda way: way.target), key=lambda way: way.target):
        worst = max(group, key=lambda way: way.latency_s or 0)
        shown = f"{worst.source} -> {target}: {1000 * (worst.latency_s or 0):.1f} ms there and back"
        remedy = "nodes of one room have 0.1 to 0.5 ms: see whether a VPN, Wi-Fi or a busy node is in between"
        yield Finding(severity="warning", node=target, what="network is slow to answer", evidence=shown, remedy=remedy)


def _address(endpoints: Sequence[Endpoint], node: str) -> str:
    return next(endpoint.address for endpoint in endpoints if endpoint.node == node)
