"""DistributedDataParallel in all its forms, FSDP2 and torch.distributed.checkpoint on the `ccl` backend, against gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ccl_ranks import SCRIPTS, start
from one_machine import BOOTSTRAP

pytestmark = pytest.mark.stack

WAYS = ("plain", "buckets are views", "static graph", "no_sync", "unused parameters", "bf16 hook", "fp16 hook", "sharded")


@pytest.fixture(scope="module")
def ends(training_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, list[str]]]]:
    """The weights that two ranks end with, per backend and rank."""
    directory = tmp_path_factory.mktemp("training")
    for backend in ("gloo", "ccl"):
        ended = start(training_python, 2, BOOTSTRAP, SCRIPTS / "ccl_training.py", directory, backend)
        assert ended.exit_code == 0, ended.output[-3000:]
    return {b: [json.loads((directory / f"{b}-{rank}.json").read_text()) for rank in range(2)] for b in ("gloo", "ccl")}


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_to_the_bit_as_with_gloo(ends: dict[str, list[dict[str, list[str]]]], way: str) -> None:
    """And both ranks have the same model."""
    first, second = (rank[way] for rank in ends["ccl"])
    assert first == second == ends["gloo"][0][way]
    assert len(set(first)) > 50
