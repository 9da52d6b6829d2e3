"""The `ccl` backend, operation by operation and type by type, against gloo and against what the result must be."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ccl_cases import OPERATIONS, SIZES, complaints, dtypes
from ccl_ranks import SCRIPTS, start

pytestmark = pytest.mark.stack

Reports = list[dict[str, dict[str, str | None]]]
CASES = [(size, dtype, operation) for size in SIZES for dtype in dtypes(size) for operation in OPERATIONS]


@pytest.fixture(scope="module")
def reports(training_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Reports]:
    """What each rank of a world of this size found; a world is started once, and tries all cases."""

    @cache
    def of(size: int) -> Reports:
        directory = tmp_path_factory.mktemp(f"world{size}")
        ended = start(training_python, size, SCRIPTS / "ccl_conformance.py", directory)
        assert ended.exit_code == 0, ended.output[-3000:]
        return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(size)]

    return of


@pytest.mark.parametrize("backend", ["gloo", "ccl"])
@pytest.mark.parametrize(("size", "dtype", "operation"), CASES)
def test_every_rank_has_the_right_values(
    reports: Callable[[int], Any], backend: str, size: int, dtype: str, operation: str
) -> None:
    """ccl has every operation that means anything, and the values of gloo; where gloo fails, ccl need not."""
    for found in [{f"{operation} {dtype}": report[f"{operation} {dtype}"]} for report in reports(size)]:
        if backend == "ccl":
            assert complaints(found, size) == []
        else:
            verdict = found[f"{operation} {dtype}"]["gloo"].partition(":")[0]
            assert verdict in ("equal", "close", "failed", "refused") or operation.endswith("strided"), found
