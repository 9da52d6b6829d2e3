"""Two machines with a disk each, on which runs fail and go on, and what is read out of what `up --json` told."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from commands import REPOSITORY, ClusterTrain, Ran
from running import Running
from sshd import SshdNode


class Pair:
    """Two nodes with homes and disks of their own, and what is typed for them."""

    def __init__(self, nodes: list[SshdNode], root: Path, file: Path, cluster_train: ClusterTrain) -> None:
        self.nodes = nodes
        self.root = root
        self.file = file
        self.cluster_train = cluster_train
        self.stack: dict[str, Any] = yaml.safe_load((REPOSITORY / "inventories" / "local.yml").read_text())["stack"]
        self.settings: dict[str, str] = {}  # environment variables of each `up`

    def up(self, *command: str, options: Sequence[str] = (), **job: Any) -> Ran:
        return self.cluster_train("up", self.inventory(**job), "--json", *options, "--", *command, env=self.settings)

    def starting(self, *command: str, **job: Any) -> Running:
        """The same without waiting for its end."""
        return Running(self.file.parent, "up", self.inventory(**job), "--json", "--", *command)

    def inventory(self, *, count: int = 2, **job: Any) -> Path:
        first = self.nodes[0]
        content = {
            "cluster": "restarts",
            "root": str(self.root),
            "ssh": {"key": str(first.key), "known_hosts": str(first.known_hosts), "port": first.port},
            "nodes": [{"name": f"node{index}", "host": node.host} for index, node in enumerate(self.nodes[:count])],
            "stack": self.stack,
            "job": {"ppn": 1, "grace_s": 3, "omp_threads": 1, "ccl_workers": 0, **job},
        }
        self.file.write_text(yaml.safe_dump(content))
        return self.file

    def run_dir(self, ran: Ran, node: int) -> Path:
        return self.nodes[node].disk / "runs" / ran.result["run_id"]


def weights(ran: Ran) -> list[str]:
    """The final weights of each rank, as the ranks printed them."""
    said = [event for event in ran.events if event["event"] == "logtext" and event["text"].startswith("weights ")]
    return [event["text"].split()[1] for event in sorted(said, key=lambda event: event["rank"])]


def notices(ran: Ran) -> str:
    return "\n".join(event["text"] for event in ran.events if event["event"] == "notice")


def steps_of(ran: Ran, rank: int) -> list[int]:
    texts = (event["text"] for event in ran.events if event["event"] == "logtext" and event["rank"] == rank)
    return [int(match.group(1)) for text in texts if (match := re.match(r"step (\d+)", text))]
