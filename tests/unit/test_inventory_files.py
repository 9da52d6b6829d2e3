"""Files that somebody damaged, as the command meets them: exit code 2 with file and line, never a stack trace."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator import cli
from orchestrator.actions.hosts import nodes_named
from orchestrator.actions.inventory_file import load_inventory
from orchestrator.errors import InventoryError
from orchestrator.planning.inventory_text import parse_inventory
from orchestrator.planning.inventory_writing import named

HOSTFILE = b"node0 slots=2\ntrainer@node1:2\n[fe80::1]:2  # the third\nnode2 slots=2 max_slots=4\n"
SAMPLES = [
    *(path.read_bytes() for path in sorted((Path(__file__).parents[2] / "inventories").glob("*.yml"))),
    HOSTFILE,
    b"nodes: [a, b]\nnetwork: {cidr: 10.0.0.0/24, ports: 29500-29600}\n",
]
BYTES = st.sampled_from(
    [b"\0", b"\xff", b"\t", b"\n", b":", b"{", b"]", b"'", b"&a ", b"*a", b"${", b"- ", b"#", b"\xe2\x80\xa8", b"="]
)
CHANGES = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 30), BYTES), min_size=1, max_size=5)


def damaged(sample: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    """The sample with pieces cut out and others put in."""
    for place, cut, put in changes:
        at = place % (len(sample) + 1)
        sample = sample[:at] + put + sample[at + cut :]
    return sample


def told_by_the_command(*words: str) -> tuple[int, str]:
    """Exit code and stderr of a `cluster-train` command, in this process."""
    stderr = io.StringIO()
    with patch("sys.argv", ["cluster-train", *words]), contextlib.redirect_stderr(stderr):
        return cli._run(cli.cli), stderr.getvalue()


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(SAMPLES), CHANGES, st.sampled_from(["lab.yml", "hosts"]))
def test_a_damaged_file_is_refused_with_file_and_line(
    tmp_path: Path, sample: bytes, changes: list[tuple[int, int, bytes]], name: str
) -> None:
    """Cut, overwritten, not UTF-8: an inventory, or one message that says where."""
    path = tmp_path / name
    path.write_bytes(damaged(sample, changes))
    try:
        load_inventory(path, {})
    except InventoryError:
        with patch.dict("os.environ", clear=True):
            code, said = told_by_the_command("status", str(path))
        assert code == 2 and "Traceback" not in said
        assert re.search(rf"{re.escape(str(path))}:[1-9][0-9]*: ", said), said


PIECES = st.sampled_from(
    [
        *(
            "Host",
            "Include",
            "Match",
            "=",
            " ",
            "\t",
            "\n",
            '"',
            "'",
            "#",
            "node1",
            "node*",
            "!node2",
            "a/b",
            "é",
            "\0",
            "config",
        ),
        *("~", "~nobody/x", "/", "..", "**", "a**b", "[", "lab.d/*", "/dev/zero", "user@node3:22", "node 4", "\x1b[2J"),
    ]
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PIECES, max_size=25).map("".join), st.sampled_from(["*", "node?", "?*?", "no*one", "*é"]))
def test_any_ssh_config_gives_nodes_or_one_message(tmp_path: Path, text: str, pattern: str) -> None:
    """Files that include themselves and what is no file, names that are no hosts, quotes that do not end."""
    (tmp_path / ".ssh" / "lab.d").mkdir(parents=True, exist_ok=True)
    for name in ("config", "lab.d/one", "lab.d/two"):
        (tmp_path / ".ssh" / name).write_text(f"{text}\nInclude lab.d/* config\n")
    with patch.dict("os.environ", {"HOME": str(tmp_path)}):
        try:
            assert nodes_named([pattern])
        except InventoryError:
            code, said = told_by_the_command("init", pattern, "-o", str(tmp_path / "new.yml"))
            assert code == 2 and "Traceback" not in said and "\x1b" not in said
            assert re.search(r"/\.ssh/\S+:[1-9][0-9]*: .* is no host|no host of \S+config matches", said), said


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CHANGES)
def test_a_damaged_hostfile_is_refused_by_init_with_file_and_line(tmp_path: Path, changes: list[tuple[int, int, bytes]]) -> None:
    """What `init` is given instead of hosts."""
    path = tmp_path / "hosts"
    path.write_bytes(damaged(HOSTFILE, changes))
    try:
        nodes = named(nodes_named([str(path)]))
        parse_inventory(json.dumps({"nodes": nodes}), file="made.yml", environment={})
    except InventoryError:
        with patch.dict("os.environ", clear=True):
            code, said = told_by_the_command("init", str(path), "-o", str(tmp_path / "new.yml"))
        assert code == 2 and "Traceback" not in said
        assert re.search(rf"{re.escape(str(path))}:[1-9][0-9]*: ", said), said


def test_nodes_get_names_of_their_own() -> None:
    """Addresses are numbered past hosts that are called so, and one host on two ports is two nodes."""
    nodes = nodes_named(["10.0.0.1", "node0", "NODE1", "10.0.0.2", "lab:22", "lab:23"])
    assert [one["name"] for one in named(nodes)] == ["node2", "node0", "NODE1", "node3", "lab", "lab-2"]


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=30) | st.sampled_from(["node?", "u@h:22", "[::1]:2", "-", "a/b", "*", "[x", "\0", "~/x"]))
def test_words_of_init_are_nodes_or_refused(word: str) -> None:
    """Whatever is typed."""
    with contextlib.suppress(InventoryError):
        assert nodes_named([word])


@pytest.mark.parametrize("ports", ["29500", "29500-29510", "80-300", "65000-70000", "29600-29500", "a-b", "29500-29600-29700"])
def test_ranges_of_ports_that_cannot_serve(ports: str) -> None:
    """Too few, privileged, beyond the last, backwards, or no range at all."""
    with pytest.raises(InventoryError, match=r"lab.yml:3: network\.ports: expected a range of at least 32 ports"):
        parse_inventory(f"nodes: [a]\nnetwork:\n  ports: {ports}\n", file="lab.yml", environment={})


def test_a_range_of_ports() -> None:
    """First and last, with or without blanks; the short form of a network has none."""
    options = parse_inventory("nodes: [a]\nnetwork: {ports: 29500 - 29600}\n", file="lab.yml", environment={}).network
    assert (options.cidr, options.ports) == (None, (29500, 29600))
    assert parse_inventory("nodes: [a]\nnetwork: 10.0.0.0/8\n", file="lab.yml", environment={}).network.ports is None
