"""What all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def training_python() -> Path:
    """An interpreter with the whole training stack; `mpiexec.hydra` lies beside it."""
    chosen = os.environ.get("CLUSTER_TRAIN_TEST_PYTHON")
    if not chosen:
        pytest.skip("no training stack: set CLUSTER_TRAIN_TEST_PYTHON, or run `make test`")
    return Path(chosen)
