"""Reaching the throw-away sshd's as the orchestrator does."""

from __future__ import annotations

import subprocess
from pathlib import Path

from sshd import SshdNode

from orchestrator.nodes.ssh import SshTransport
from orchestrator.nodes.transport import run
from orchestrator.specs.inventory import Login, SshOptions


def login(node: SshdNode, **changes: object) -> Login:
    """The whole login of a node, but for what is changed; None leaves a part to the configuration."""
    values = {"user": node.user, "host": node.host, "port": node.port, "key": str(node.key), "via": None, **changes}
    return Login(**values)  # type: ignore[arg-type]


def options(**values: object) -> SshOptions:
    """Short time limits: what is asked of loopback answers at once or never."""
    return SshOptions.model_validate({"connect_timeout": 5, **values})


def reach(
    node: SshdNode, known_hosts: Path | None = None, *, changes: dict[str, object] | None = None, **values: object
) -> SshTransport:
    """Connect with these options; `changes` are made to the login."""
    known = {"known_hosts": str(known_hosts or node.known_hosts)}
    return SshTransport("node1", login(node, **(changes or {})), options(**{**known, **values}))


def address_of(transport: SshTransport) -> str:
    """The address at which the server that was reached took the connection."""
    done = run(transport, ["sh", "-c", "echo $SSH_CONNECTION"], idle_timeout_s=20)
    return done.stdout.split()[2].decode()


def make_key_of(kind: str, path: Path, passphrase: str = "") -> Path:
    """A key pair such as ssh-keygen makes."""
    command = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", path.name, "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=60)
    return path


def public(path: Path) -> str:
    """The public half of a key file, as `TYPE BASE64`."""
    return " ".join(Path(f"{path}.pub").read_text().split()[:2])


def sign(authority: Path, key: Path, *options: str, name: str = "") -> Path:
    """A certificate of a public key, beside it; `-h` makes it a host's."""
    command = ["ssh-keygen", "-q", "-s", authority, "-I", "test", *(["-n", name] if name else []), *options, f"{key}.pub"]
    subprocess.run(command, check=True, timeout=60, stderr=subprocess.DEVNULL)
    return Path(f"{key}-cert.pub")
