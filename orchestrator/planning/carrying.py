"""Which nodes get their wheels from here, and which from the head. Pure.

What we send to many nodes goes many times over our own link; the head could send it over the cluster network instead. Where
our link is as fast that gains nothing (measured over loopback: from here is then quicker by a third, as there is no first leg
to wait for); behind a slow link it divides the time by almost the number of nodes. So the head is filled first, and the rate
at which that begins decides for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.specs.facts import NodeFacts
from orchestrator.specs.run import Endpoint

LEAST_FED_BYTES = 32_000_000  # less is there before the head could have been asked
BUFFERED_BYTES = 4_000_000  # goes into the buffers of SSH and the kernel at once, and says nothing of the link
SAMPLE_BYTES = 24_000_000
SAMPLE_S = 1.0
GIGABIT_MBPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrying:
    """`direct`: from here, all at once. `perhaps_fed`: by the head, if `feeding_pays`, else from here too."""

    direct: tuple[str, ...]
    perhaps_fed: tuple[str, ...]


def plan_carrying(lacking_bytes: Mapping[str, int], head: str, *, head_can_feed: bool) -> Carrying:
    """Who may have to wait for the head: every other node that lacks more than a few megabytes.

    Args:
        lacking_bytes: what each node lacks.
        head: the first node of the inventory.
        head_can_feed: the head is another machine than ours, and has or gets every wheel. Where we sit on the head, our link
            is the cluster network.
    """
    fed = [node for node, size_bytes in lacking_bytes.items() if node != head and size_bytes >= LEAST_FED_BYTES]
    fed = fed if head_can_feed else []
    return Carrying(direct=tuple(node for node in lacking_bytes if node not in fed), perhaps_fed=tuple(fed))


def is_sampled(sent_bytes: int, elapsed_s: float) -> bool:
    """Whether enough went to the head to know the rate."""
    return sent_bytes >= SAMPLE_BYTES or elapsed_s >= SAMPLE_S


def feeding_pays(uplink_bytes_s: float, cluster_mbps: int) -> bool:
    """Whether the head's network is so much quicker than our link that the detour over the head is worth its first leg.

    n nodes take n/uplink from here and 1/uplink + (n - 1)/cluster through the head: at a ratio of 2 that is a gain of a
    quarter for two nodes and of nearly half for many.
    """
    return uplink_bytes_s * 2 < cluster_mbps * 1e6 / 8


def cluster_speed(nodes: Sequence[NodeFacts], endpoints: Sequence[Endpoint]) -> int:
    """The slowest card of the nodes on the cluster network, in Mbit/s.

    A card that does not tell counts as gigabit; so does a virtual one, whose driver names a figure that means nothing.
    """
    physical = [(node.name, card) for node in nodes for card in node.interfaces if card.kind == "physical"]
    cards = {(name, card.name): card.speed_mbps for name, card in physical}
    return min((cards.get((at.node, at.interface)) or GIGABIT_MBPS for at in endpoints), default=GIGABIT_MBPS)
