"""The files that carry the inventory's ports, users, keys and host keys to mpirun's own SSH."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.planning.hops import Hop, known_hosts, ssh_config, wrapper

HOP = Hop(
    node="node1",
    address="10.0.0.11",
    port=2222,
    user="ci",
    host_key="ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKq1",
    identity="/home/a b/%key",
)


@pytest.mark.ssh
def test_openssh_reads_what_was_meant(tmp_path: Path) -> None:
    """`ssh -G`, OpenSSH's own reading of the file, gives back port, user, key and a strict check of the one host key."""
    config = tmp_path / "ssh_config"
    config.write_text(ssh_config([HOP, replace(HOP, node="node2", address="fd00::2", port=22)], "/r/runs/1", "10.0.0.10", 10))
    read = dict(
        line.split(" ", 1)
        for line in subprocess.run(
            ["ssh", "-F", config, "-G", "10.0.0.11"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        if " " in line
    )
    assert (read["port"], read["user"], read["hostkeyalias"], read["hostname"]) == ("2222", "ci", "node1", "10.0.0.11")
    assert read["identityfile"].strip('"') == "/home/a b/%%key"
    assert read["stricthostkeychecking"] == "true" and read["userknownhostsfile"] == "/r/runs/1/known_hosts"
    assert read["hostkeyalgorithms"] == "ssh-ed25519" and read["batchmode"] == "yes" and read["forwardagent"] == "no"
    assert read["bindaddress"] == "10.0.0.10"


def test_known_hosts_names_nodes() -> None:
    """Each verified key stands under the node's name, which HostKeyAlias looks up."""
    assert known_hosts([HOP]) == "node1 ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKq1\n"


def test_an_rsa_key_is_asked_for_with_its_modern_signatures() -> None:
    """The key type ssh-rsa is not a signature algorithm that current servers accept."""
    assert "HostKeyAlgorithms rsa-sha2-512,rsa-sha2-256" in ssh_config(
        [replace(HOP, host_key="ssh-rsa AAAA")], "/r", "10.0.0.10", 10
    )


def test_the_wrapper_survives_any_directory(tmp_path: Path) -> None:
    """Blanks and quotes in the root reach ssh as one argument, and hydra's -q, which hides reasons, is dropped."""
    directory = tmp_path / "it's a root"
    directory.mkdir()
    fake_ssh = tmp_path / "ssh"
    fake_ssh.write_text('#!/bin/sh\nfor a; do echo "$a"; done\n')
    fake_ssh.chmod(0o755)
    script = directory / "wrapper"
    script.write_text(wrapper(str(directory), "10.0.0.10"))
    said = subprocess.run(
        ["sh", script, "-q", "-x", "10.0.0.11", "true"], env={"PATH": f"{tmp_path}:/bin:/usr/bin"}, capture_output=True, text=True
    )
    assert said.stdout.splitlines() == ["-F", f"{directory}/ssh_config", "-x", "10.0.0.11", "true"]


def test_the_wrapper_tells_the_other_node_its_variables(tmp_path: Path) -> None:
    """They come before the command there; the host stays where ssh expects it."""
    (fake_ssh := tmp_path / "ssh").write_text('#!/bin/sh\nfor a; do echo "$a"; done\n')
    fake_ssh.chmod(0o755)
    (script := tmp_path / "wrapper").write_text(wrapper("/r", "10.0.0.10", {"A": "1", "B": "2"}))
    said = subprocess.run(
        ["sh", script, "-q", "-x", "10.0.0.11", "true", "1"],
        env={"PATH": f"{tmp_path}:/bin:/usr/bin"},
        capture_output=True,
        text=True,
    )
    assert said.stdout.splitlines() == ["-F", "/r/ssh_config", "-x", "10.0.0.11", "env", "A=1", "B=2", "true", "1"]


def test_the_head_is_not_reached_by_ssh(tmp_path: Path) -> None:
    """mpirun's command for the head's own address runs in a shell there, put together as sshd puts it together."""
    script = tmp_path / "wrapper"
    script.write_text(wrapper(str(tmp_path), "127.0.0.2"))
    said = subprocess.run(
        ["sh", script, "-q", "-x", "127.0.0.2", "echo", "'two  words';", "echo", "$((1+1))"], capture_output=True, text=True
    )
    assert said.stdout == "two  words\n2\n"
