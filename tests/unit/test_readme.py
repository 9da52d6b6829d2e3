"""README says what is true: every inventory key, every command, every file it names."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.cli import MODULE_OF
from orchestrator.planning.ways import PORTS_OF
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


def test_findings_that_it_names_exist(repository: Path) -> None:
    """Each finding in the table of symptoms is one that the doctor makes, word by word."""
    section = (repository / "README.md").read_text().split("## When it does not work")[1].split("\n## ")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")][1:]
    named = {name for row in rows for name in re.findall(r'"([^"]+)"', row)}
    rooms = [repository / "orchestrator" / room for room in ("planning", "actions")]
    source = "".join(path.read_text() for room in rooms for path in room.glob("*.py"))
    made = {name.replace("{head}", "node0") for name in re.findall(r'f?"([^"\n]+)"', source)}
    verbs = {f"a firewall {verb} {use}" for verb in ("drops", "rejects") for use in PORTS_OF.values()}
    assert len(named) > 25 and named - made - verbs == set()


def test_files_that_it_names_exist(repository: Path) -> None:
    """Paths in the text are paths in the checkout."""
    named = set(re.findall(r"`((?:inventories|remote|docker|nodes|tests)/[\w./-]+)`", (repository / "README.md").read_text()))
    assert named
    for name in named:
        assert (repository / name).exists() or (repository / "orchestrator" / name).exists(), name
