"""Scripts that know nothing of our `ccl` backend, under bootstrap.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ccl_ranks import SCRIPTS, Ended, start
from one_machine import BOOTSTRAP, free_ports

pytestmark = pytest.mark.stack


def run(python: Path, script: Path, *arguments: str) -> Ended:
    ports = ",".join(map(str, free_ports(3)))
    return start(python, 2, SCRIPTS / "ccl_under_bootstrap.py", BOOTSTRAP, script, *arguments, FORM_PORTS=ports)


def said(ended: Ended) -> list[Any]:
    """The JSON line of each rank."""
    assert ended.exit_code == 0, ended.output[-3000:]
    return [json.loads(line) for line in ended.output.splitlines() if line.startswith(('{"rank', '[{"form'))]


def test_a_plain_script_makes_groups_with_it_one_after_the_other(training_python: Path) -> None:
    """By name, by default, and then with gloo: the same model each time; the retired bindings' import is answered."""
    ranks = said(run(training_python, SCRIPTS / "plain_ddp.py", "ccl", "default", "gloo"))
    assert [rank["backends"] for rank in ranks] == [["ccl", "ccl", "gloo"]] * 2
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert ranks[0]["weights"][1] == ranks[0]["weights"][2]


def test_an_unedited_trainer_trains_on_it(training_python: Path) -> None:
    """No flag, and gloo by name: the same model to the bit, and the time limit of --ddp_timeout holds."""
    ranks = said(run(training_python, SCRIPTS / "trainer_forms.py", '{"ddp_timeout": 77}', '{"ddp_backend": "gloo"}'))
    for on_ccl, on_gloo in ranks:
        assert (on_ccl["backend"], on_ccl["size"], on_ccl["timeout_s"]) == ("ccl", 2, 77)
        assert (on_gloo["backend"], on_gloo["checksum"]) == ("gloo", on_ccl["checksum"])


def test_an_exit_code_ends_the_job_at_once_and_is_kept(training_python: Path, tmp_path: Path) -> None:
    """The other rank waits for half an hour otherwise."""
    script = tmp_path / "exits.py"
    script.write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "dist.all_reduce(torch.ones(1))\n"
        "sys.exit(3) if os.environ['RANK'] == '1' else dist.all_reduce(torch.ones(1))\n"
    )
    ended = run(training_python, script)
    assert ended.exit_code != 0 and ended.duration_s < 60
