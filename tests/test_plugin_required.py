"""With CLUSTER_TRAIN_REQUIRE_ALL=1 a skipped test of a real component fails the run; other skips stay skips."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

def test_ordinary():
    pytest.skip("nothing to do")

@pytest.mark.{marker}
def test_real_component():
    pytest.skip("no such thing on this machine")
"""


def run_pytest(directory: Path, required: str) -> subprocess.CompletedProcess[str]:
    markers = "\n    ".join(("ssh", "cluster", "stack", "slow"))
    (directory / "pytest.ini").write_text(f"[pytest]\nmarkers =\n    {markers}\n")
    plugins = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": plugins, "CLUSTER_TRAIN_REQUIRE_ALL": required}
    argv = (sys.executable, "-m", "pytest", "-p", "plugin_required", "-p", "no:cacheprovider", "-rs", str(directory))
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("marker", ["ssh", "cluster", "stack"])
def test_a_skip_fails_where_all_is_required(tmp_path: Path, marker: str) -> None:
    """The run fails and shows the reason of the skip; without the variable it passes."""
    (tmp_path / "test_it.py").write_text(TESTS.format(marker=marker))
    required = run_pytest(tmp_path, "1")
    assert required.returncode == 1, required.stdout
    assert "no such thing on this machine" in required.stdout
    assert "1 failed, 1 skipped" in required.stdout
    assert run_pytest(tmp_path, "").returncode == 0


def test_other_skips_stay_skips(tmp_path: Path) -> None:
    """A test that needs no real component may skip in CI too."""
    (tmp_path / "test_it.py").write_text(TESTS.format(marker="slow"))
    assert run_pytest(tmp_path, "1").returncode == 0


def test_a_skip_in_a_fixture_fails_too(tmp_path: Path) -> None:
    """Most skips for want of a component come from a fixture, before the test runs."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n@pytest.fixture\ndef node():\n    pytest.skip('no sshd')\n\n"
        "@pytest.mark.ssh\ndef test_it(node):\n    pass\n"
    )
    required = run_pytest(tmp_path, "1")
    assert required.returncode == 1
    assert "no sshd" in required.stdout


@pytest.mark.parametrize("folder", ["ssh", "cluster"])
def test_a_skipped_module_fails_too(tmp_path: Path, folder: str) -> None:
    """A module of tests/ssh or tests/cluster that skips itself as a whole fails the run."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "test_it.py").write_text("import pytest\npytest.skip('not here', allow_module_level=True)\n")
    required = run_pytest(tmp_path, "1")
    assert required.returncode == 2  # pytest's own code for errors during collection
    assert "not here" in required.stdout
