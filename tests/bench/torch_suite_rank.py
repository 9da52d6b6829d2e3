"""One rank of tests/bench/torch_suite.py: runs PyTorch's own tests of a backend; one JSON line for each into a file.

Usage: torch_suite_rank.py BACKEND DIRECTORY [TEST...], under mpirun, with remote/ in the path; without a test it lists them

The tests decide by the name of the backend, when they are imported, whether they are for it: they are imported as gloo's, which
knows the same tensors and operations, and run on the one that is named. Each gets a group of its own, as upstream's runner makes
it; the processes are not new each time. A test that fails ends them: what it left behind would be in the way of the next.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

RANK, SIZE = int(os.environ.get("PMI_RANK", "0")), int(os.environ.get("PMI_SIZE", "1"))
GROUP_LIMIT_S = 30  # of one operation
MEET_LIMIT_S = 90  # until the others have ended the same test
ALSO_FOR_CCL = "Only MPI supports"  # CPU tensors of all_to_all and the like
SHOWN_FRAMES, SHOWN_CHARACTERS = 4, 400

backend, directory, tests = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
scratch = directory / "scratch" if tests else Path(tempfile.mkdtemp())
for name in ("barrier", "test_dir"):
    (scratch / name).mkdir(parents=True, exist_ok=True)
os.environ.update(BACKEND="gloo", TEMP_DIR=str(scratch), RANK=str(RANK), WORLD_SIZE=str(SIZE), LOCAL_RANK=str(RANK))

import torch  # noqa: E402  its tests read the environment when they are imported

torch.manual_seed(1)  # of the tensors that are made at import, and are the same on all ranks
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed import distributed_test as upstream  # noqa: E402


class BackendName(str):
    """What the tests take for the backend's name: the right one, which they take for gloo's wherever they compare."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other


upstream.BACKEND = BackendName(backend)
for feature in upstream.DistTestCases.backend_feature.values():
    if "gloo" in feature:
        feature.add(backend)


class TestBackend(upstream.TestDistBackend, upstream.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
    """All tests; `rank` and `file_name` are set by who runs one."""


def main() -> None:
    """Print the names, or run the tests that are named."""
    names = unittest.TestLoader().getTestCaseNames(TestBackend)
    if not tests:
        print(json.dumps(list(names)))
        os._exit(0)
    if backend == "ccl":
        import ccl_group
        import ccl_line

        ccl_group.register()
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), SIZE, RANK == 0, timedelta(seconds=MEET_LIMIT_S))
    with (directory / f"rank-{RANK}.jsonl").open("a") as report:

        def tell(*said: Any) -> None:
            report.write(json.dumps(said) + "\n")
            report.flush()

        for name in tests:
            tell(name, "begun", "")
            verdict, why = attempt(name)
            tell(name, verdict, why)
            # A time limit that passed on purpose leaves ccl's line broken for good, in this process.
            is_last = backend == "ccl" and ccl_line.LINE.broken is not None
            said = meet(store, name, f"{verdict} last" if is_last else verdict)
            if "failed" in said or "last" in said:
                tell(name, "others", said)
                os._exit(1)
            if dist.is_initialized():
                dist.destroy_process_group()


def attempt(name: str) -> tuple[str, str]:
    """(passed, skipped or failed, why) of one test in a group of its own."""
    case = TestBackend(name)
    case.rank, case.file_name = RANK, str(scratch / name)
    test = getattr(case, name)
    reason = getattr(test, "__unittest_skip_why__", "")
    if reason and not (backend == "ccl" and reason.startswith(ALSO_FOR_CCL)):
        return "skipped", reason
    try:
        dist.init_process_group(
            backend, init_method=case.init_method, world_size=SIZE, rank=RANK, timeout=timedelta(seconds=GROUP_LIMIT_S)
        )
        torch.manual_seed(1)
        random.seed(1)
        test()
    except unittest.SkipTest as error:
        return "skipped", str(error)
    except SystemExit as error:
        reasons = [skip.message for skip in upstream.TEST_SKIPS.values() if skip.exit_code == error.code]
        return ("skipped", reasons[0]) if reasons else ("failed", f"exit {error.code}")
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)[-SHOWN_FRAMES:]
        where = " ".join(f"{frame.name}:{frame.lineno}" for frame in frames)
        what = " ".join(str(error).partition("\n\nTo execute this test")[0].split())
        return "failed", f"{type(error).__name__}: {what[:SHOWN_CHARACTERS]} @ {where}"
    return "passed", ""


def meet(store: dist.Store, name: str, verdict: str) -> str:
    """The verdicts of all ranks on a test; "failed" where one does not come."""
    try:
        store.set(f"{name}/{RANK}", verdict)
        return " ".join(store.get(f"{name}/{rank}").decode() for rank in range(SIZE))
    except RuntimeError as error:
        return f"failed: not all ended it within {MEET_LIMIT_S} s ({time.strftime('%X')}, {str(error)[:80]})"


main()
