"""What a node's shell prints, and what it is asked to run: neither is ever taken for something else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ClusterTrain
from logins import make_key_of, reach
from ssh_agents import running_agent
from sshd import SshdNode, SshdNodes

from orchestrator.actions import agent
from orchestrator.actions.launch import system_mpi
from orchestrator.errors import CommandError, PreflightError, ProvisionError
from orchestrator.nodes.ssh import SshTransport
from orchestrator.nodes.transport import check, parse_json, run

# Of a shell that reads its start-up files for every command, as bash does under sshd, and which print.
NOISES = {
    "a greeting": "echo 'Welcome to the lab!'",
    "half a line": "printf 'Loading modules...'",
    "something like our answers": """echo '{"error": "not ours"}'""",
    "escape sequences and bytes": r"printf '\033[2J\000\377\r\n'",
    "much": "head -c 300000 /dev/zero | tr '\\0' 'x'",
    "both streams": "echo out; echo 'unpack: err' >&2",
}


def noisy(sshd_factory: SshdNodes, rc: str, tmp_path: Path) -> SshdNode:
    """A node whose login shell says all this before it runs a command."""
    (tmp_path / "rc").write_text(rc + "\n")
    command = f'. {tmp_path}/rc; cd "$HOME" && exec "$SHELL" ${{SSH_ORIGINAL_COMMAND+-c "$SSH_ORIGINAL_COMMAND"}}'
    return sshd_factory(1, ForceCommand=command)[0]


@pytest.mark.parametrize("noise", NOISES)
def test_what_start_up_files_print_is_not_output(sshd_factory: SshdNodes, tmp_path: Path, noise: str) -> None:
    """stdout is the command's own, to the byte: JSON answers, megabytes, exit codes, and our scripts' whole way there."""
    node = noisy(sshd_factory, NOISES[noise], tmp_path)
    reached = reach(node)
    data = bytes(range(256)) * 4000
    assert run(reached, ["cat"], stdin=data, idle_timeout_s=60).stdout == data
    assert run(reached, ["sh", "-c", "exit 7"], idle_timeout_s=60).exit_code == 7
    assert run(reached, ["no-such-program-at-all"], idle_timeout_s=60).exit_code == 127
    answer = agent.call(reached, "~/root", "python3", "probe.py", ["--root", "~/root"])
    assert answer["ssh_connection"]["server_port"] == node.port
    reached.close()


def test_the_whole_command_works_on_a_noisy_node(sshd_factory: SshdNodes, tmp_path: Path, cluster_train: ClusterTrain) -> None:
    """`doctor --json` on it prints JSON lines; the noise is a finding, and nowhere else."""
    node = noisy(sshd_factory, "echo Welcome; echo Welcome >&2", tmp_path)
    inventory = tmp_path / "lab.yml"
    content = {
        "root": str(tmp_path / "root"),
        "ssh": {"key": str(node.key), "known_hosts": str(node.known_hosts), "user": node.user},
        "nodes": [{"host": node.host, "port": node.port}],
    }
    inventory.write_text(json.dumps(content))
    ran = cluster_train("doctor", str(inventory), "--json")
    assert all("Welcome" not in json.dumps(event) for event in ran.events[:-1])
    noise = [found for found in ran.result["findings"] if "Welcome" in json.dumps(found)]
    assert [found["what"] for found in noise] == ["shell start-up is noisy"]


def test_a_banner_is_nobodys_output(sshd_factory: SshdNodes, tmp_path: Path, cluster_train: ClusterTrain) -> None:
    """What sshd says before the login, escape sequences and all, is in no answer and on no terminal, nor in an error."""
    (tmp_path / "banner").write_bytes(b"\x1b]0;owned\x07AUTHORISED USE ONLY \x1b[2J\xff\n" * 20)
    (node,) = sshd_factory(1, Banner=str(tmp_path / "banner"))
    reached = reach(node)
    assert run(reached, ["echo", "ours"], idle_timeout_s=60).stdout == b"ours\n"
    reached.close()
    inventory = tmp_path / "lab.yml"
    ssh = {"key": str(node.key), "known_hosts": str(node.known_hosts), "user": node.user}
    for key in (node.key, make_key_of("ed25519", tmp_path / "wrong")):
        content = {
            "root": str(tmp_path / "root"),
            "ssh": {**ssh, "key": str(key)},
            "nodes": [{"host": node.host, "port": node.port}],
        }
        inventory.write_text(json.dumps(content))
        ran = cluster_train("doctor", str(inventory))
        assert ran.stdout and "AUTHORISED" not in ran.stdout + ran.stderr and "\x1b" not in ran.stdout + ran.stderr


def test_the_agent_is_never_forwarded(sshd_factory: SshdNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although ~/.ssh/config says so, and sshd would: no agent's socket on the node."""
    (node,) = sshd_factory(1, AllowAgentForwarding="yes")
    config = tmp_path / "config"
    config.write_text("ForwardAgent yes\nForwardX11 yes\nPort 22\n")
    with running_agent(tmp_path / "agent") as socket:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        reached = reach(node, config=str(config))
        said = run(reached, ["sh", "-c", "echo [$SSH_AUTH_SOCK] [$DISPLAY]"], idle_timeout_s=60).stdout
        reached.close()
        command = [*node.ssh()[:-1], "-A", node.ssh()[-1], "echo [$SSH_AUTH_SOCK]"]
        assert subprocess.run(command, capture_output=True, timeout=60).stdout != b"[]\n"  # sshd does forward it
    assert said == b"[] []\n"


def test_a_shell_that_never_comes_to_the_command_is_quoted(sshd_factory: SshdNodes) -> None:
    """nologin says why on stdout: that is what the error shows."""
    (node,) = sshd_factory(1, ForceCommand="echo This account is currently not available.; exit 1")
    reached = reach(node)
    with pytest.raises(CommandError, match="currently not available"):
        check(reached, ["true"], run(reached, ["true"], idle_timeout_s=60))
    reached.close()


def test_start_up_files_without_end_are_given_up(sshd_factory: SshdNodes) -> None:
    """An endless rc is an error that says so, not memory without end."""
    (node,) = sshd_factory(1, ForceCommand="exec cat /dev/zero")
    reached = reach(node)
    with pytest.raises(CommandError, match="start-up files print without end"):
        run(reached, ["true"], idle_timeout_s=60)
    reached.close()


def test_a_root_that_cannot_be_written_is_told_through_the_noise(sshd_factory: SshdNodes, tmp_path: Path) -> None:
    """stderr has no beginning that could be marked: our own line is found among the others."""
    reached = reach(noisy(sshd_factory, "echo motd >&2", tmp_path))
    with pytest.raises(ProvisionError, match="cannot be written: "):
        agent.ship(reached, "/proc/nowhere", "python3")
    reached.close()


@pytest.fixture(scope="module")
def quiet(session_sshd_factory: SshdNodes) -> SshTransport:
    return reach(session_sshd_factory(1)[0])


@pytest.mark.parametrize(
    "hostile",
    ["$(touch {0})", "`touch {0}`", "; touch {0}", "& touch {0} &", "| touch {0}", "\ntouch {0}\n", "'; touch {0}; '",
     '"$(touch {0})"', "${{IFS}}", "~", "*", "!!", "-n", "\\", "\x1b]0;x\x07"],
)  # fmt: skip
def test_names_and_arguments_are_data(quiet: SshTransport, tmp_path: Path, hostile: str) -> None:
    """In an argument, in a program's name, in a path: nothing of it runs."""
    trap = tmp_path / "trap"
    word = hostile.format(trap)
    said = run(quiet, [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))", word], idle_timeout_s=60)
    assert parse_json(quiet, ["python"], b'{"argv": ' + said.stdout + b"}") == {"argv": [word]}
    run(quiet, [f"./{word}"], idle_timeout_s=60)
    run(quiet, ["test", "-e", f"{tmp_path}/{word}"], idle_timeout_s=60)
    assert not trap.exists()


def test_an_mpirun_that_only_the_persons_shell_finds_is_named(sshd_factory: SshdNodes, tmp_path: Path) -> None:
    """A non-interactive login has another PATH (ompi 599): `mpi: system` is refused, and the cure told."""
    (node,) = sshd_factory(1, SetEnv=f"HOME={tmp_path} PATH=/usr/bin:/bin")
    mpirun = tmp_path / "opt" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.write_text("#!/bin/sh\necho mpirun '(Open MPI) 5.0.11'\n")
    mpirun.chmod(0o755)
    (tmp_path / ".profile").write_text(f"PATH={mpirun.parent}:$PATH\n")
    reached = reach(node)
    assert b"Open MPI" in run(reached, ["sh", "-lc", "mpirun --version"], idle_timeout_s=60).stdout
    with pytest.raises(PreflightError, match="no mpirun on the PATH of a non-interactive login") as refused:
        system_mpi(reached)
    assert "start-up file that non-interactive shells read" in refused.value.advice
    reached.close()
