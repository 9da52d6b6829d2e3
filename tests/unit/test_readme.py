"""README says what is true: every inventory key, every command, every file it names."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.cli import MODULE_OF
from orchestrator.specs.inventory import describe


def test_the_inventory_reference_is_the_schema(repository: Path) -> None:
    """Each key stands in the table with what it accepts, its default and its meaning, and no key is there that is not."""
    rows = [line for line in (repository / "README.md").read_text().splitlines() if line.startswith("| `")]
    for key, accepts, default, meaning in describe():
        assert f"| `{key}` | {accepts} | {f'`{default}`' if default else ''} | {meaning} |" in rows


def test_every_command_is_listed(repository: Path) -> None:
    """The table of commands names each, and only those that there are."""
    listed = re.findall(r"^\| `(\w+)[ `][^|]*\|", (repository / "README.md").read_text().split("## Commands")[1], re.MULTILINE)
    assert [name for name in listed if name in MODULE_OF] == [
        *("up", "provision", "doctor", "status", "logs", "stop", "runs", "init", "teardown")
    ]
    assert set(MODULE_OF) <= set(listed)


def test_files_that_it_names_exist(repository: Path) -> None:
    """Paths in the text are paths in the checkout."""
    named = set(re.findall(r"`((?:inventories|remote|docker|nodes|tests)/[\w./-]+)`", (repository / "README.md").read_text()))
    assert named
    for name in named:
        assert (repository / name).exists() or (repository / "orchestrator" / name).exists(), name
