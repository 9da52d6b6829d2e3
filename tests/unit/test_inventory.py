"""Inventories: what is read, what is refused, and that a refusal names the place and the remedy."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.actions.inventory_file import load_inventory
from orchestrator.errors import InventoryError
from orchestrator.planning.inventory_text import parse_inventory
from orchestrator.specs.inventory import (
    SECTIONS,
    Inventory,
    Job,
    Login,
    NetworkOptions,
    Node,
    SshOptions,
    apply_overrides,
    describe,
    is_secret_name,
)
from orchestrator.specs.inventory_values import Address, parse_address


def read(text: str, file: str = "lab.yml", **environment: str) -> Inventory:
    return parse_inventory(text, file=file, environment=environment)


def refused(text: str, file: str = "lab.yml", **environment: str) -> list[str]:
    with pytest.raises(InventoryError) as caught:
        read(text, file, **environment)
    return caught.value.message.split("\n")


class TestWhatIsRead:
    def test_two_addresses_are_a_whole_inventory(self) -> None:
        """Everything but the nodes has a default; the cluster is called like the file."""
        inventory = read("nodes: [10.0.0.10, 10.0.0.11]\n", "inventories/lab.yml")
        assert inventory == Inventory(cluster="lab", nodes=(Node(host="10.0.0.10"), Node(host="10.0.0.11")))
        assert [node.name for node in inventory.nodes] == ["10.0.0.10", "10.0.0.11"]
        assert (inventory.root, inventory.parallel, inventory.network) == ("~/.cluster-train", 16, NetworkOptions())
        assert (inventory.stack.torch, inventory.stack.transformers) == ("2.13.0", "5.24.0")
        assert (inventory.job.ppn, inventory.job.grace_s, inventory.ssh.host_keys) == ("auto", 30.0, "strict")

    def test_every_key_is_read(self) -> None:
        """Each value arrives in its own type."""
        inventory = read(
            """
cluster: c1
root: /scratch/train
ssh: {user: ci, port: 2200, key: ~/k, known_hosts: kh, host_keys: accept-new, connect_timeout: 2.5}
network: 10.0.0.7/24
nodes: [{name: a, host: h1, port: 22, user: u, key: k2, via: "x@bastion:22", slots: 3}]
stack: {python: 3.10, torch: 2.10, transformers: ">=5,<6", accelerate: 1.15.0, datasets: ==5.2.*, backend: ccl,
        mpi: mpich, ipex: no, extra: [evaluate, "seqeval>=1.2"], find_links: [wheels/], extra_index: ["https://x/simple"]}
job: {script: a b.py, args: [--x, 1], ppn: numa, omp_threads: 4, ccl_workers: 0, bf16: true, env: {A: 1},
      sync: [data/], fetch: [out/], grace_s: 1.5}
parallel: 4
"""
        )
        assert inventory.network == NetworkOptions(cidr="10.0.0.0/24")
        assert inventory.ssh == SshOptions(
            user="ci", port=2200, key="~/k", known_hosts="kh", host_keys="accept-new", connect_timeout=2.5
        )
        assert inventory.nodes == (Node(name="a", host="h1", port=22, user="u", key="k2", via="x@bastion:22", slots=3),)
        stack, job = inventory.stack, inventory.job
        assert (stack.python, stack.torch, stack.backend, stack.mpi, stack.ipex) == (
            "3.10",
            "2.10",
            "ccl",
            "mpich",
            False,
        )
        assert (stack.extra, stack.find_links) == (("evaluate", "seqeval>=1.2"), ("wheels/",))
        assert (job.ppn, job.omp_threads, job.ccl_workers, job.bf16, job.grace_s) == ("numa", 4, 0, True, 1.5)
        assert (job.sync, job.fetch, dict(job.env), inventory.parallel) == (("data/",), ("out/",), {"A": "1"}, 4)

    def test_scalars_of_the_job_stay_as_written(self) -> None:
        """No spelling is interpreted on its way to the script."""
        written = [
            "3e-5",
            "5e-05",
            "1_000",
            "yes",
            "0o7",
            "010",
            "1:30",
            "2026-01-01",
            "~",
            "null",
            "1.0",
            "$HOME",
            "=",
        ]
        items = "".join(f"    - {word}\n" for word in written)
        entries = "".join(f"    V{index}: {word}\n" for index, word in enumerate(written))
        job = read(f"nodes: [a]\njob:\n  args:\n{items}    - ''\n  env:\n{entries}").job
        assert job.args == (*written, "")
        assert list(job.env.values()) == written

    @given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))))
    def test_any_text_reaches_the_arguments_unchanged(self, words: list[str]) -> None:
        """Quotes, newlines, dollar signs (doubled, as the rule is) and all scripts survive."""
        text = yaml.safe_dump({"nodes": ["a"], "job": {"args": [word.replace("$", "$$") for word in words]}})
        # A leading byte-order mark or a lone NEL is YAML's own business; safe_dump escapes both.
        assert read(text).job.args == tuple(words)

    def test_a_key_without_a_value_takes_its_default(self) -> None:
        """A section whose entries are all commented out is as good as none."""
        assert read("nodes: [a]\nssh:\njob:\n  script:\n  args:\nstack: ~\n") == read("nodes: [a]\n")

    def test_anchors_and_merge_keys(self) -> None:
        """A node may be written in terms of another; its own keys win."""
        text = "nodes:\n  - &n {host: a, user: u, port: 7}\n  - {<<: *n, host: b}\n  - {host: c, <<: [{port: 8}, *n]}\n"
        assert [(node.host, node.user, node.port) for node in read(text).nodes] == [
            ("a", "u", 7),
            ("b", "u", 7),
            ("c", "u", 8),
        ]

    def test_a_record_can_be_written_and_read_again(self) -> None:
        """What `model_dump` gives is an inventory again."""
        inventory = read("nodes: [u@a:7, {host: b, slots: 2}]\nstack: {ipex: off}\njob: {ppn: 2, env: {A: b}, args: [x]}\n")
        assert Inventory.model_validate(inventory.model_dump()) == inventory

    def test_a_heartbeat_may_be_off_but_not_hasty(self) -> None:
        """Ranks are heard once a second: a limit of a second or two would take a busy node for a lost one."""
        assert read("nodes: [a]\njob: {heartbeat_timeout_s: 0}\n").job.heartbeat_timeout_s == 0
        assert "0 or a number of seconds from 5 to 86400" in refused("nodes: [a]\njob: {heartbeat_timeout_s: 2}\n")[0]

    def test_values_cannot_be_changed(self) -> None:
        """The records are frozen."""
        with pytest.raises(ValueError, match="frozen"):
            read("nodes: [a]\n").nodes[0].host = "b"


class TestAddresses:
    @pytest.mark.parametrize(
        ("text", "address"),
        [
            ("node0", (None, "node0", None)),
            ("ci@10.0.0.10:2222", ("ci", "10.0.0.10", 2222)),
            ("fe80::1", (None, "fe80::1", None)),
            ("ci@fe80::1%eth0", ("ci", "fe80::1%eth0", None)),
            ("[fe80::1]:22", (None, "fe80::1", 22)),
            ("ci@[::1]", ("ci", "::1", None)),
            ("a@b.org@node0", ("a@b.org", "node0", None)),
        ],
    )
    def test_short_forms(self, text: str, address: tuple[str | None, str, int | None]) -> None:
        """User, host and port are found in each form, alone and as a node of an inventory."""
        assert parse_address(text) == Address(user=address[0], host=address[1], port=address[2])
        node = read(yaml.safe_dump({"nodes": [text]})).nodes[0]
        assert (node.user, node.host, node.port) == address
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", node.name)

    @pytest.mark.parametrize(
        "text",
        ["", "a b", "-oProxyCommand=x", "-l@a", "a@-b", "a:0", "a:65536", "a:b", "10.0.0.256", "10", "[a]:1", "[::1", "é",
         "a;b@c", "$(x)@a", "a@`x`", "fe80::1%$(x)", "a" * 300, "a/b", "u@", "@a", "a\n", "::1:", "::", "0.0.0.0"],
    )  # fmt: skip
    def test_what_is_no_address_is_refused(self, text: str) -> None:
        """Above all nothing that ssh would take for an option or a shell for a command."""
        with pytest.raises(ValueError):
            parse_address(text)
        if text:
            assert "nodes[0]" in refused(yaml.safe_dump({"nodes": [text]}))[0]

    def test_a_login_prefers_the_nodes_own_options(self) -> None:
        """What the node does not say, `ssh` says."""
        inventory = read("ssh: {user: ci, port: 2200, key: k}\nnodes: [a, {host: b, user: u, port: 7, key: k2, via: j}]\n")
        assert [inventory.login(node) for node in inventory.nodes] == [
            Login(user="ci", host="a", port=2200, key="k", via=None),
            Login(user="u", host="b", port=7, key="k2", via="j"),
        ]


class TestVariables:
    def test_expansion(self) -> None:
        """`${NAME}`, a default for an unset or empty one, and `$$` are replaced; a bare `$NAME` is not."""
        text = 'nodes: ["${H}"]\nssh: {port: "${P:-2222}"}\njob: {args: ["${E:-a b}", "$H", "$$H", "$${H}", "x${H}y"]}\n'
        inventory = read(text, H="node0", E="")
        assert (inventory.nodes[0].host, inventory.ssh.port) == ("node0", 2222)
        assert inventory.job.args == ("a b", "$H", "$H", "${H}", "xnode0y")

    def test_a_value_cannot_become_structure(self) -> None:
        """Variables are expanded after YAML was parsed, and only once."""
        inventory = read('nodes: [a]\njob: {args: ["${X}"]}\n', X="[1, 2]\nroot: /tmp ${X} $$")
        assert inventory.job.args == ("[1, 2]\nroot: /tmp ${X} $$",)

    def test_an_option_that_expands_to_nothing_is_not_given(self) -> None:
        """`key: ${KEY:-}` means: the default where KEY is not set."""
        assert read('nodes: [a]\nssh: {key: "${KEY:-}", port: "${PORT:-}"}\n').ssh == SshOptions()

    def test_what_is_wrong_with_a_variable_is_said_with_its_line(self) -> None:
        """A missing one, and each malformed one, once and at its own line."""
        rows = refused("nodes:\n  - a\n  - ${NOPE}\njob:\n  args:\n    - ${1}\n    - ${A:?b}\n    - ${A\n", A="x")
        assert [row.partition(": ${")[0].partition(": expected")[0] for row in rows] == [
            "lab.yml:3: nodes[1]", "lab.yml:6: job.args[0]", "lab.yml:7: job.args[1]", "lab.yml:8: job.args[2]",
        ]  # fmt: skip
        assert "${NOPE} is not set in the environment" in rows[0]


class TestSecrets:
    def test_what_came_from_the_environment_into_the_jobs_environment_is_secret(self) -> None:
        """Also inside a longer value; not what merely says where one is."""
        text = 'nodes: [a]\njob: {env: {A: "pre-${SEED}", B: "${HOME}/x"}, args: ["${PLAIN}"]}\n'
        inventory = read(text, SEED="s3cr3t", HOME="/home/me", PLAIN="visible")
        assert inventory.secrets == {"s3cr3t"}
        assert inventory.job.env == {"A": "pre-s3cr3t", "B": "/home/me/x"}

    def test_names_that_say_so_are_secret_wherever_they_stand(self) -> None:
        """A token in the arguments or in an index's URL, and a password that is written down."""
        text = 'nodes: [a]\nstack: {extra_index: ["https://u:${PIP_TOKEN}@x/"]}\njob: {env: {DB_PASSWORD: hunter2}}\n'
        assert read(text, PIP_TOKEN="tok-123").secrets == {"tok-123", "hunter2"}

    @pytest.mark.parametrize(
        ("name", "secret"),
        [("HF_TOKEN", True), ("WANDB_API_KEY", True), ("aws_secret_access_key", True), ("KEY", True), ("DB_PASSWORD", True),
         ("GOOGLE_CREDENTIALS", True), ("TOKENIZERS_PARALLELISM", False), ("MAX_TOKENS", False), ("MONKEY", False),
         ("KEYBOARD", False), ("OMP_NUM_THREADS", False)],
    )  # fmt: skip
    def test_names(self, name: str, secret: bool) -> None:
        """KEY and TOKEN count as words, not as letters inside one."""
        assert is_secret_name(name) is secret

    def test_a_job_names_further_ones(self) -> None:
        """`job.secrets` hides what no name tells; a name that job.env does not have is a slip, and told."""
        text = 'nodes: [a]\njob: {env: {DB_URL: "postgres://u:p@h", X: visible}, secrets: [DB_URL]}\n'
        assert read(text).secrets == {"postgres://u:p@h"}
        assert "which has no DB_URI" in str(refused('nodes: [a]\njob: {env: {DB_URL: "x"}, secrets: [DB_URI]}\n'))

    def test_a_value_too_short_to_mask_is_not_listed(self) -> None:
        """Masking every "1" or "" would leave no readable message."""
        assert read('nodes: [a]\njob: {env: {A_KEY: "1", B: "${X}", C: "${E}"}}\n', X="2", E="").secrets == frozenset()

    def test_secrets_survive_the_command_lines_arguments(self) -> None:
        """A copy with another script still knows what to hide."""
        inventory = read('nodes: [a]\njob: {env: {A: "${X}"}}\n', X="abcdef")
        assert apply_overrides(inventory, script="s.py", args=()).secrets == {"abcdef"}

    def test_messages_do_not_show_them(self) -> None:
        """Neither a refused variable of the job nor a refused value made of a token appears in the error."""
        text = 'nodes: [a]\nstack: {extra_index: ["${MY_TOKEN}"]}\njob: {env: {A: "x\\0hunter2"}}\n'
        rows = refused(text, MY_TOKEN="tok-123")
        assert len(rows) == 2
        assert not any("tok-123" in row or "hunter2" in row for row in rows)
        assert "hunter2" not in repr(Job(env={"A": "hunter2"}))


class TestRefusals:
    def test_more_nodes_cannot_be_needed_than_there_are(self) -> None:
        """At the line of the key, wherever the nodes stand; as many as there are is legal, and other errors are told besides."""
        text = "job:\n  restarts: 1\n  min_nodes: {}\nnodes: [a, b]\n"
        assert read(text.format(2)).job.min_nodes == 2
        assert refused(text.format(3)) == ["lab.yml:3: job.min_nodes: expected at most 2, the number of nodes, got 3"]
        rows = refused(text.format(3) + "root: x\n")
        assert [row.split(": ")[1] for row in rows] == ["job.min_nodes", "root"]

    def test_the_example_of_the_design(self) -> None:
        """File, line, key path, and the nearest legal key."""
        text = "nodes:\n  - host: a\n  - host: b\n    prot: 2222\n"
        assert refused(text, "inventories/lab.yml") == [
            'inventories/lab.yml:4: nodes[1].prot: unknown key "prot"; did you mean "port"?'
        ]

    def test_all_problems_at_once_in_the_files_order(self) -> None:
        """Like a compiler: every mistake with its own line, the first one first."""
        rows = refused(
            """cluster: a b
ssh:
  port: abc
  host_keys: strct
nodes:
  - x y
  - [a]
  - host: ${NOPE}
  - user: u
network: 10.0.0.0
stack:
  backend: cll
  ipex: maybe
  torch: latest
  extra: [foo bar]
job:
  env: {1X: a,
        A: [b],
        B: ,
        A: c}
  sync:
    - a/data
    - b/data/
  ppn: 0
  args: x
  fetch: [../x]
ppn: 3
wat: 1
"""
        )
        assert [row.removeprefix("lab.yml:") for row in rows] == [
            "1: cluster: expected a name of letters, digits, '.', '_', '-', got 'a b'",
            "3: ssh.port: expected a number from 1 to 65535, got 'abc'",
            "4: ssh.host_keys: expected strict or accept-new, got 'strct'; did you mean \"strict\"?",
            "6: nodes[0]: expected host, user@host, host:port, or a mapping with a host, got 'x y'",
            "7: nodes[1]: expected a mapping (lines of `key: value`), got a list",
            "8: nodes[2].host: ${NOPE} is not set in the environment (${NOPE:-…} gives a default)",
            "9: nodes[3].host: missing (host name or IP address)",
            "10: network: expected a network such as 10.0.0.0/24, or a mapping with cidr and ports, got '10.0.0.0'",
            "12: stack.backend: expected auto, ccl, gloo or mpi, got 'cll'; did you mean \"ccl\"?",
            "13: stack.ipex: expected auto, true or false, got 'maybe'",
            "14: stack.torch: expected a version (2.13.0) or a range ('>=2.8,<3'), got 'latest'",
            "15: stack.extra[0]: expected a requirement as pip reads it (evaluate, 'seqeval>=1.2'), got 'foo bar'",
            "17: job.env.1X: expected a variable name of letters, digits and '_', got '1X'",
            "18: job.env.A: expected text, got a list",
            '19: job.env.B: no value; write "" for an empty one',
            "20: job.env.A: written twice; the first is on line 18",
            "23: job.sync[1]: arrives beside the script under the same name as job.sync[0] (line 22)",
            "24: job.ppn: expected auto, numa or a whole number from 1 to 9999, got '0'",
            "25: job.args: expected a list, got 'x'",
            "26: job.fetch[0]: expected a path below the run's directory, got '../x'",
            '27: ppn: unknown key "ppn"; did you mean "job.ppn"?',
            '28: wat: unknown key "wat"; legal here: cluster, root, ssh, network, nodes, stack, job, parallel',
        ]

    @pytest.mark.parametrize(
        ("second", "says"),
        [
            ("{name: x, host: 10.0.0.1}", "nodes[1]: the same host and port as nodes[0] (line 3)"),
            ("{name: x, host: 10.0.0.1, port: 7}", "nodes[1]: the same host and port as nodes[0] (line 3)"),
            ("{host: 10.0.0.1, port: 8}", "nodes[1]: the same name as nodes[0] (line 3)"),
        ],
    )
    def test_nodes_that_repeat_name_both_lines(self, second: str, says: str) -> None:
        """The port that counts is the effective one; two sshds on one host are two nodes, but need names."""
        (row,) = refused(f"ssh: {{port: 7}}\nnodes:\n  - 10.0.0.1\n  - {second}\n")
        assert row.startswith(f"lab.yml:4: {says}")
        assert len(read("nodes: [{name: a, host: h, port: 1}, {name: b, host: h, port: 2}]\n").nodes) == 2

    def test_the_same_address_in_another_spelling_is_a_repeat(self) -> None:
        """Host names ignore case, and an IPv6 address has many spellings."""
        assert len(refused('nodes: [a, A, fe80::1, "FE80:0::1"]\n')) == 2

    @pytest.mark.parametrize(
        ("text", "line", "says"),
        [
            ("a: b: c\n", 1, 'a value that holds ": " needs quotes'),
            ("nodes:\n\t- a\n", 2, "indent with spaces"),
            ("stack:\n  torch: >=2.8\n", 2, "needs quotes"),
            ("nodes:\n  - {host: ${A}}\n", 2, 'write "${NAME}" in quotes'),
            ("nodes: [a\n\n\n", 4, "(line 1)"),
            ("--- {nodes: [a]}\n--- b\n", 2, "single document"),
            ("nodes: *x\n", 1, "undefined alias"),
            ("nodes: [a]\nx: \x07\n", 2, "'\\x07' is not allowed"),
            ('nodes: [a]\nx: "\\U99999999"\n', 2, "out of range"),
            ("? [a]\n: b\n", 1, "a key must be text"),
            ("nodes: !!python/object:os.system [a]\n", 1, "means nothing here"),
            ("nodes: [a]\njob: {<<: x}\n", 2, "only a mapping can be merged"),
            ("", 1, "nothing in it"),
            ("# nothing\n", 1, "nothing in it"),
            ("- a\n- b\n", 1, "expected a mapping"),
            ("node0:2\nnode1:2\n", 1, "a hostfile must not be called .yml"),
            ("nodes: []\n", 1, "expected at least one node, got an empty list"),
            ("cluster: x\n", 1, "nodes: missing"),
            ("[" * 100_000, 1, "too deeply"),
            ("{a: " * 100_000, 1, "too deeply"),
            ("nodes: &a [*a]\n", 1, "alias contain itself"),
            ("nodes: [a]\njob: &j\n  <<: *j\n", 2, "alias contain itself"),
        ],
    )
    def test_what_is_no_inventory_at_all(self, text: str, line: int, says: str) -> None:
        """Broken YAML, too, is a refusal with a line and a hint."""
        rows = refused(text)
        assert any(row.startswith(f"lab.yml:{line}: ") and says in row for row in rows), rows

    def test_aliases_cannot_blow_up_the_memory(self) -> None:
        """Nine aliases of nine aliases of nine … end at a limit, early."""
        levels = "".join(f"b{n + 1}: &b{n + 1} [{', '.join([f'*b{n}'] * 9)}]\n" for n in range(12))
        assert "too large" in refused(f"b0: &b0 [x]\n{levels}")[-1]

    def test_a_thousand_problems_are_cut_short(self) -> None:
        """The first forty are shown, the others counted."""
        rows = refused("nodes: [a]\n" + "".join(f"k{n}: 1\n" for n in range(1000)))
        assert len(rows) == 41
        assert rows[-1] == "lab.yml: and 960 more problems"

    def test_a_terminal_is_not_driven_by_what_is_shown(self) -> None:
        """Escape sequences in keys and values are shown as text."""
        rows = refused('nodes: ["\\e[31m"]\n"\\e[2J": 1\nroot: "x\\u202e"\n')
        assert len(rows) == 3
        assert all(row.isprintable() for row in rows)

    @pytest.mark.parametrize("root", ["/", "'~'", "~/", "~/..", "relative", "~other/x", '"/a\\nb"'])
    def test_the_root_is_a_directory_of_its_own(self, root: str) -> None:
        """It is removed as a whole by `teardown`: never a home, never everything."""
        assert "root: expected a directory of its own" in refused(f"nodes: [a]\nroot: {root}\n")[0]


class TestFiles:
    def test_what_cannot_be_read_is_said_with_advice(self, tmp_path: Path) -> None:
        """A missing file, a directory, bytes that are no text, a checkpoint by mistake, an impossible name."""
        latin = tmp_path / "latin.yml"
        latin.write_bytes(b"cluster: x\nnodes: [caf\xe9]\n")
        huge = tmp_path / "huge.bin"
        huge.touch()
        os.truncate(huge, 1 << 31)
        said = {}
        for path in (tmp_path / "none.yml", tmp_path, latin, huge, Path("a\0b")):
            with pytest.raises(InventoryError) as caught:
                load_inventory(path, {})
            said[path.name] = caught.value.message.removeprefix(str(path))
            assert caught.value.advice
        assert said["none.yml"] == ": no such file"
        assert said[tmp_path.name] == ": a directory, not an inventory"
        assert said["latin.yml"] == ":2: not UTF-8 text (byte 0xe9)"
        assert "larger than any inventory" in said["huge.bin"]
        assert "cannot be read" in said["a\0b"]

    def test_a_byte_order_mark_and_carriage_returns_do_no_harm(self, tmp_path: Path) -> None:
        """Files from editors of other systems are read, in both forms."""
        for name, content in (("a.yml", b"\xef\xbb\xbfnodes:\r\n  - a\r\n"), ("hosts", b"\xef\xbb\xbfa\r\n")):
            (tmp_path / name).write_bytes(content)
            assert [node.host for node in load_inventory(tmp_path / name, {}).nodes] == ["a"]

    def test_the_process_environment_is_the_default(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without another mapping, variables come from where the command was typed."""
        monkeypatch.setenv("CLUSTER_TRAIN_TEST_HOST", "node7")
        file = tmp_path / "my lab.yml"
        file.write_text("nodes:\n  - ${CLUSTER_TRAIN_TEST_HOST}\n")
        inventory = load_inventory(file)
        assert (inventory.cluster, inventory.nodes[0].host) == ("my-lab", "node7")

    @pytest.mark.parametrize("name", ["local", "lab", "docker"])
    def test_the_inventories_of_the_project_load(self, repository: Path, name: str) -> None:
        """Each shipped inventory is valid, names its script, and its sync paths exist."""
        file = repository / "inventories" / f"{name}.yml"
        if name == "docker" and not file.exists():
            pytest.skip("inventories/docker.yml is not there")
        inventory = load_inventory(file, {})
        assert inventory.cluster == name
        assert inventory.job.script is not None
        missing = [path for path in (inventory.job.script, *inventory.job.sync) if not (repository / path).exists()]
        assert missing == []

    def test_the_lab_inventory_explains_every_key(self, repository: Path) -> None:
        """A newcomer finds each key of the schema in the commented example, with the default it really has."""
        text = (repository / "inventories" / "lab.yml").read_text(encoding="utf-8")
        keys = {key for model in SECTIONS.values() for key in model.model_fields}
        assert {key for key in keys if not re.search(rf"\b{key}:", text)} == set()


class TestHostfiles:
    def test_the_dialects(self) -> None:
        """hydra, Open MPI and DeepSpeed write slots each in their own way."""
        text = """# the lab
node0
ci@node1:2   # hydra
node2 slots=3
node3 slots = 4 max-slots=8

[fe80::1]:2
fe80::2
"""
        inventory = read(text, "clusters/hosts.txt")
        assert inventory.cluster == "hosts"
        assert [(node.user, node.host, node.slots, node.port) for node in inventory.nodes] == [
            (None, "node0", None, None), ("ci", "node1", 2, None), (None, "node2", 3, None), (None, "node3", 4, None),
            (None, "fe80::1", 2, None), (None, "fe80::2", None, None),
        ]  # fmt: skip

    def test_a_host_on_several_lines_adds_its_slots(self) -> None:
        """As mpirun counts; a line without a number is one slot."""
        inventory = read("a\nb:2\na\nci@b slots=3\nA\n", "hosts")
        assert [(node.host, node.user, node.slots) for node in inventory.nodes] == [("a", None, 3), ("b", "ci", 5)]

    @pytest.mark.parametrize(
        ("text", "is_yaml"),
        [("nodes: [a]\n", True), ("# x\n---\nnodes: [a]\n", True), ("{nodes: [a]}\n", True), ("nodes:\n- a\n", True),
         ("node0:2\n", False), ("\n# x\nnode0\n", False), ("10.0.0.1:2\n", False), ("[::1]:2\n", False)],
    )  # fmt: skip
    def test_the_content_tells_which_it_is(self, text: str, is_yaml: bool) -> None:
        """Without a telling suffix, the first line with a meaning decides."""
        inventory = read(text, "cluster")
        assert (inventory.nodes[0].host == "a") is is_yaml

    def test_mistakes_are_named_with_their_lines(self) -> None:
        """All of them, also below a good line."""
        rows = refused("node0\nnode1:0\nnode2 slot=1\n!!\na slots=3 max_slots=2\nb:1 slots=1\nu@c\nw@c\n", "hosts")
        assert [row.split(": ")[0] for row in rows] == [f"hosts:{line}" for line in (2, 3, 4, 5, 6, 8)]
        assert "expected `host`" in rows[0]
        assert rows[-1] == "hosts:8: c has another user on line 7"


class TestOverrides:
    def test_a_script_takes_the_place_of_the_inventorys(self) -> None:
        """With its arguments, even if there are none; the rest of the job stays."""
        inventory = read("nodes: [a]\njob: {script: x.py, args: [--y], ppn: 2, env: {A: b}}\n")
        job = apply_overrides(inventory, script="my train.py", args=["--lr", "3e-5", ""]).job
        assert (job.script, job.args, job.ppn, job.env) == ("my train.py", ("--lr", "3e-5", ""), 2, {"A": "b"})
        assert apply_overrides(inventory, script="z.py", args=[]).job.args == ()
        assert apply_overrides(inventory, script=None, args=[]) is inventory

    def test_what_no_program_can_receive_is_refused(self) -> None:
        """A NUL character, or bytes that are no text, would arrive as something else."""
        with pytest.raises(InventoryError) as caught:
            apply_overrides(read("nodes: [a]\n"), script="s.py", args=["a\0b", "c", "\udcff"])
        assert [row.rpartition(", got ")[2] for row in caught.value.message.split("\n")] == [r"'a\x00b'", r"'\udcff'"]

    def test_an_option_is_no_script(self) -> None:
        """Arguments without their script are refused, not handed to Python."""
        with pytest.raises(InventoryError, match="expected the path of a script, got '--lr'"):
            apply_overrides(read("nodes: [a]\n"), script="--lr", args=["3e-5"])


class TestReference:
    def test_every_key_is_described(self) -> None:
        """The README's table can be derived: path, what is accepted, default and meaning of each key."""
        rows = {path: rest for path, *rest in describe()}
        assert rows["ssh.port"] == [
            "a number from 1 to 65535",
            "",
            "port of sshd; without it ~/.ssh/config decides, else it is 22",
        ]
        assert rows["stack.extra"][0].startswith("a list of: a requirement")
        assert rows["stack.backend"][:2] == ["auto, ccl, gloo or mpi", "auto"]
        assert all(meaning and accepts for accepts, _, meaning in rows.values())


# Pieces that together make nearly-inventories: what a person's slips look like, and what an attacker would try.
_PIECES = [
    *("nodes", "ssh", "job", "stack", "env", "args", "sync", "host", "name", "port", "slots", "ppn", "slots=2"),
    *("10.0.0.1", "a@b:22", "fe80::1", "0", "-1", "1e999", "nan", "9" * 5000, "x" * 300, "(" * 2000, "a; " + "(" * 500),
    *(
        ": ",
        ":",
        "- ",
        "\n",
        "\n  ",
        "\n    ",
        "\t",
        "[",
        "]",
        "{",
        "}",
        ", ",
        "'",
        '"',
        "#",
        ">",
        "|",
        "? ",
        "---",
        "...",
    ),
    *("&a ", "*a", "<<: ", "%YAML 1.1", "!!int ", "!x ", "~", "=", "${A}", "${B}", "${", "$$"),
    *("\\", "\\U99999999", "\0", "\ud800", "\u2028", "é"),
]
_TEXTS = st.lists(st.sampled_from(_PIECES), max_size=40).map("".join) | st.text(max_size=80)
_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(_PIECES) | st.text(max_size=20)
_KEYS = st.sampled_from(sorted({key for model in SECTIONS.values() for key in model.model_fields})) | st.text(max_size=8)
_STRUCTURES = st.dictionaries(
    _KEYS,
    st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=4)),
    max_size=8,
)
_WORDS = st.sampled_from(["a", "b:2", "u@a", "v@a", "[::1]:2", "::1", "slots=1", "max_slots=2", "#", ":", "=", "é", "a:99999"])
_HOSTFILES = st.lists(st.lists(_WORDS, max_size=4).map(" ".join), max_size=6).map("\n".join)


def _only_inventory_errors(text: str, file: str) -> None:
    try:
        inventory = parse_inventory(text, file=file, environment={"A": "x", "B": "\udcff"})
    except InventoryError as error:
        where = re.escape(file)
        assert all(re.match(rf"{where}(:[1-9][0-9]*)?: .", row) for row in error.message.split("\n"))
        lines = [int(line) for line in re.findall(rf"^{where}:(\d+):", error.message, re.MULTILINE)]
        assert lines == sorted(lines)
    else:
        assert Inventory.model_validate(inventory.model_dump()).nodes == inventory.nodes


class TestFuzz:
    """Whatever the file holds, the outcome is an inventory or an InventoryError with file and line."""

    @settings(deadline=None, max_examples=400)
    @given(_TEXTS, st.sampled_from(["lab.yml", "hosts", "-", ""]))
    def test_texts(self, text: str, file: str) -> None:
        """Loose pieces of YAML and hostfiles in any order."""
        _only_inventory_errors(text, file)

    @settings(deadline=None, max_examples=150)
    @given(_STRUCTURES, st.booleans())
    def test_structures(self, structure: dict[str, object], flow: bool) -> None:
        """Well-formed YAML whose keys are mostly ours and whose values are not."""
        _only_inventory_errors(yaml.safe_dump(structure, default_flow_style=flow, sort_keys=False), "lab.yml")

    @settings(deadline=None, max_examples=200)
    @given(_HOSTFILES)
    def test_hostfiles(self, text: str) -> None:
        """Words of hostfiles in any order."""
        _only_inventory_errors(text, "hosts")
