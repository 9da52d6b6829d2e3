"""Whole runs between machines as labs have them: names that mean loopback, cards of different names, bridges of containers."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import yaml
from commands import REPOSITORY, LocalStack
from netlab import Machine, NetworkLab, can_isolate

pytestmark = [
    pytest.mark.skipif(not can_isolate(), reason="needs root, namespaces and iptables"),
    pytest.mark.stack,
]
ALL_REDUCE = """
import os, sys
from datetime import timedelta
if "by-hand" in sys.argv:
    del os.environ["GLOO_SOCKET_IFNAME"]
import torch
import torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
total = torch.ones(1000) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("sum", total.sum().item(), "over", *(os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "CCL_KVS_IFACE", "FI_TCP_IFACE")))
"""


@pytest.fixture
def debians(make_lab: Callable[..., NetworkLab], local_stack: LocalStack) -> NetworkLab:
    """Two machines with Debian's /etc/hosts, two networks on cards in different orders, and Docker's bridge; torch is there."""
    cards = ({"ib0": "10.88.0.10/24", "eth0": "10.77.0.10/24"}, {"ens3": "10.77.0.11/24", "ens4": "10.88.0.11/24"})
    hosts = "127.0.0.1 localhost\n127.0.1.1 node{}\n"
    lab = make_lab(*(Machine(cards=own, hosts=hosts.format(index)) for index, own in enumerate(cards)))
    for name in lab.machines:
        lab.on(name, "ip", "link", "add", "docker0", "type", "bridge")
        lab.on(name, "ip", "address", "add", "172.17.0.1/16", "dev", "docker0")
        lab.on(name, "ip", "link", "set", "docker0", "up")
        local_stack.borrowed(lab.home(name) / ".cluster-train")
    return lab


def test_gloo_between_machines_whose_names_mean_loopback(debians: NetworkLab) -> None:
    """Each rank gets the card that its own node has in the network of all, and gradients are summed over it. The same script by
    hand, with MASTER_ADDR alone, is told to call 127.0.1.1."""
    script = debians.directory / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    stack = yaml.safe_load((REPOSITORY / "inventories" / "local.yml").read_text())["stack"]
    inventory = debians.inventory(stack=stack, network="10.88.0.0/24", job={"script": str(script)})
    ran = debians.cluster_train("up", inventory)
    assert ran.exit_code == 0, ran.stdout + ran.stderr
    assert sorted(re.findall(r"r(\d)\] sum 3000.0 over (.*)", ran.stdout)) == [("0", "ib0 ib0 ib0"), ("1", "ens4 ens4 ens4")]
    by_hand = debians.cluster_train("up", inventory, "--", str(script), "by-hand")
    assert by_hand.exit_code == 1 and "127.0.1.1" in by_hand.stdout
