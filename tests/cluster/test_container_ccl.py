"""The `ccl` backend across the two containers: its operations, and a training that gives the weights that gloo gives."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ccl_cases import OPERATIONS, complaints
from commands import REPOSITORY, ClusterTrain, Ran
from containers import ContainerCluster
from test_container_runs import QA_SCRIPT, TINY_TRAINING, by_rank

pytestmark = pytest.mark.stack

PROMPT_S = 60.0  # what a start takes on a loaded machine, and a few seconds; far below the limit of a collective
ROUNDING = 5e-5  # one step of Adam at TrainingArguments' learning rate: it moves a weight so far however small its gradient is
DTYPES = ("int64", "bfloat16", "float32")
DIES_IN_A_COLLECTIVE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group()
assert dist.get_backend() == "ccl"
dist.all_reduce(torch.ones(1))
if os.environ["RANK"] == "1":
    raise ValueError("rank 1 is broken")
dist.all_reduce(torch.ones(1))
"""

WriteInventory = Callable[..., Path]


@pytest.fixture
def inventory(container_cluster: ContainerCluster, tmp_path: Path) -> WriteInventory:
    """Writes an inventory of the two containers with the backend ccl, and the test's job keys."""
    stack = yaml.safe_load((REPOSITORY / "inventories" / "docker.yml").read_text())["stack"]

    def write(**job: Any) -> Path:
        return container_cluster.inventory(tmp_path, stack={**stack, "backend": "ccl"}, job={"grace_s": 3, **job})

    return write


@pytest.mark.parametrize("ppn", [1, 2])
def test_every_operation_is_right_across_the_containers(cluster_train: ClusterTrain, inventory: WriteInventory, ppn: int) -> None:
    """As on one machine: to the bit where nothing is rounded, and as gloo has it."""
    path = inventory(ppn=ppn, sync=["tests/ccl_cases.py"])
    ran = cluster_train("up", path, "--json", "--", "tests/scripts/ccl_conformance.py", *DTYPES)
    assert ran.exit_code == 0, ran.stdout[-3000:]
    size = 2 * ppn
    for rank in range(size):
        printed = (Path(ran.result["record"]) / f"rank-{rank}.out").read_text()
        report = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
        assert len(report) == len(OPERATIONS) * len(DTYPES)
        assert complaints(report, size) == []


@pytest.mark.parametrize("ppn", [1, 2])
def test_an_unedited_trainer_ends_with_the_weights_of_gloo(
    cluster_train: ClusterTrain, inventory: WriteInventory, container_cluster: ContainerCluster, ppn: int
) -> None:
    """Two ranks to the bit, four within rounding: a sum of four numbers depends on their order."""
    path = inventory(ppn=ppn, sync=["inventories/squad"], fetch=["output/model.safetensors"])
    training = [*TINY_TRAINING, "--do_train", "--log_weight_checksum", "true", "--per_device_train_batch_size", "1"]

    def train(backend: str) -> Ran:
        ran = cluster_train("up", path, "--json", "--", QA_SCRIPT, *training, "--ddp_backend", backend)
        assert ran.exit_code == 0, ran.stdout[-3000:]
        return ran

    runs = [train("ccl"), train("gloo")]
    assert container_cluster.ours() == []
    steps = [by_rank(ran, r"step \d+ weights sha256:(\w+)") for ran in runs]
    assert all(of_rank == steps[0][0] and len(set(of_rank)) == 3 for of_rank in steps[0].values()) and len(steps[0]) == 2 * ppn
    on_ccl, on_gloo = (weights(Path(ran.result["record"]) / "output" / "model.safetensors") for ran in runs)
    assert on_ccl.keys() == on_gloo.keys()
    if ppn == 1:
        assert steps[0] == steps[1] and on_ccl == on_gloo
    for name, values in on_ccl.items():
        assert max(abs(ours - theirs) for ours, theirs in zip(values, on_gloo[name], strict=True)) <= ROUNDING, name


def test_a_rank_that_raises_ends_the_job_at_once(
    cluster_train: ClusterTrain, inventory: WriteInventory, container_cluster: ContainerCluster, tmp_path: Path
) -> None:
    """The others wait in a collective of half an hour; the rank is named, and nothing is left on either node."""
    script = tmp_path / "breaks.py"
    script.write_text(DIES_IN_A_COLLECTIVE)
    path = inventory(ppn=2)
    assert cluster_train("provision", path).exit_code == 0
    started = time.monotonic()
    ran = cluster_train("up", path, "--json", "--", script)
    assert time.monotonic() - started < PROMPT_S
    assert ran.exit_code == 1 and (ran.result["rank"], ran.result["exit_code"]) == (1, 1), ran.stdout[-3000:]
    assert container_cluster.ours() == []


def weights(path: Path) -> dict[str, array[float]]:
    """The tensors of a safetensors file, all of them float32: a header in JSON, then the numbers."""
    content = path.read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    found = {}
    for name, tensor in json.loads(content[8:header_end]).items():
        if name != "__metadata__":
            assert tensor["dtype"] == "F32"
            begin, end = tensor["data_offsets"]
            found[name] = array("f", content[header_end + begin : header_end + end])
    return found
