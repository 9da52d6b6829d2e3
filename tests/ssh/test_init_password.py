"""`init` on machines that know no key yet: it asks for the password, puts the person's key there, and all is as everywhere."""

from __future__ import annotations

import getpass
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from commands import COMMAND, ClusterTrain
from logins import make_key_of, public
from sshd import SshdNode, SshdNodes, can_mount
from terminal import at_terminal

pytestmark = pytest.mark.skipif(not can_mount(), reason="accounts with passwords need mount namespaces, which only root may make")

PASSWORD = "corréct $horse; 'battery'"
BY_PAM = {"UsePAM": "yes", "PasswordAuthentication": "no", "KbdInteractiveAuthentication": "yes"}
QUESTION = f"password of {getpass.getuser()} on "
Nodes = Callable[..., list[SshdNode]]


@pytest.fixture
def nodes(sshd_factory: SshdNodes) -> Nodes:
    """Starts nodes that know a password and no key, and are as strict as sshd is by default."""

    def start(count: int, **config: str) -> list[SshdNode]:
        settings = {"PasswordAuthentication": "yes", "PermitRootLogin": "yes", "StrictModes": "yes", **config}
        made = sshd_factory(count, password=PASSWORD, **settings)
        for node in made:
            shutil.rmtree(node.home / ".ssh")
        return made

    return start


class Person:
    """Somebody with a home, a key and the host keys of some nodes, who sits at a terminal."""

    def __init__(self, home: Path, nodes: list[SshdNode]) -> None:
        self.ssh = home / ".ssh"
        self.ssh.mkdir(mode=0o700, parents=True)
        shutil.copy(nodes[0].known_hosts, self.ssh / "known_hosts")
        self.key = make_key_of("ed25519", self.ssh / "id_ed25519")
        self.inventory = home / "lab.yml"
        plain = {name: value for name, value in os.environ.items() if name != "SSH_AUTH_SOCK"}
        self.env = {**plain, "HOME": str(home), "NO_COLOR": "1", "COLUMNS": "500"}
        self.hosts = [f"{node.user}@{node.host}:{node.port}" for node in nodes]

    def init(self, *answers: tuple[str, str], options: tuple[str, ...] = (), **how: bool) -> tuple[int, str]:
        command = [COMMAND, "init", *self.hosts, "-o", self.inventory, "--yes", *options]
        return at_terminal(command, answers, env=self.env, **how)


def lines_of(node: SshdNode) -> list[str]:
    path = node.home / ".ssh" / "authorized_keys"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("config", [{}, BY_PAM], ids=["password", "keyboard-interactive"])
def test_one_password_for_all_and_the_key_is_there(
    nodes: Nodes, tmp_path: Path, cluster_train: ClusterTrain, config: dict[str, str]
) -> None:
    """Asked once for both, the key put there after a yes, with modes that sshd accepts; the next command needs neither."""
    made = nodes(2, **config)
    person = Person(tmp_path / "me", made)
    code, shown = person.init(("): ", PASSWORD), ("[Y/n]: ", "y"))
    assert code == 0, shown
    assert shown.count(QUESTION) == 1 and f"node0 ({made[0].host}), node1 ({made[1].host})" in shown
    assert PASSWORD not in shown and f"{person.key}.pub" in shown and shown.count("accepts your key now") == 2
    for node in made:
        (line,) = lines_of(node)
        assert line.startswith(f"{public(person.key)} cluster-train:") and line.endswith(":login")
        assert (node.home / ".ssh").stat().st_mode & 0o777 == 0o700
        assert (node.home / ".ssh" / "authorized_keys").stat().st_mode & 0o777 == 0o600
    told = cluster_train("doctor", person.inventory, env=person.env)
    assert told.exit_code in (0, 5) and "a person's key may log in" in told.stdout, told.stderr
    assert person.init()[0] == 0 and all(len(lines_of(node)) == 1 for node in made)  # asks nothing any more
    gone = cluster_train("teardown", person.inventory, "--yes", env=person.env)
    assert gone.exit_code == 0 and "need the password again" in gone.stderr + gone.stdout, gone.stderr
    assert not any(lines_of(node) for node in made)
    assert not leaks(PASSWORD, tmp_path / "me", *(node.home for node in made))


def test_a_wrong_password_is_asked_again_for_whoever_refused_it(nodes: Nodes, sshd_factory: SshdNodes, tmp_path: Path) -> None:
    """Three times, then exit 3 with what to do; a node that took it is not asked for again."""
    made = nodes(1)
    code, shown = Person(tmp_path / "me", made).init(("): ", "wrong"), ("): ", "wrong too"), ("): ", "no"))
    assert code == 3 and shown.count(QUESTION) == 3 and "did not take the password" in shown, shown
    assert f"ssh-copy-id -p {made[0].port}" in shown and not (tmp_path / "me" / "lab.yml").exists()
    other = sshd_factory(1, password="another one", PasswordAuthentication="yes", PermitRootLogin="yes")
    (other[0].home / ".ssh" / "authorized_keys").write_text("")
    person = Person(tmp_path / "you", other)
    with (person.ssh / "known_hosts").open("a") as known:
        known.write(made[0].known_hosts.read_text())
    person.hosts += [f"{made[0].user}@{made[0].host}:{made[0].port}"]
    code, shown = person.init(("): ", PASSWORD), (f"it was refused; {QUESTION}", "another one"), options=("--copy-key",))
    assert code == 0 and shown.count(QUESTION) == 2 and len(lines_of(made[0])) == len(lines_of(other[0])) == 1, shown


def test_without_a_terminal_it_is_said_what_to_do(nodes: Nodes, tmp_path: Path, cluster_train: ClusterTrain) -> None:
    """Exit 3, at once; and `doctor` says the same of such a node."""
    made = nodes(1)
    person = Person(tmp_path / "me", made)
    ran = cluster_train("init", *person.hosts, "-o", person.inventory, env=person.env)
    assert ran.exit_code == 3 and "it would take a password" in ran.stderr and "ssh-copy-id" in ran.stderr, ran.stderr
    person.inventory.write_text(yaml.safe_dump({"nodes": person.hosts}))
    told = cluster_train("doctor", person.inventory, env=person.env)
    assert told.exit_code == 5 and "it would take a password" in told.stdout and "ssh-copy-id" in told.stdout
    code, shown = at_terminal([COMMAND, "doctor", person.inventory], [], env=person.env)
    assert code == 5 and "password of" not in shown  # no other command asks


@pytest.mark.parametrize("answer", ["", "\x04", "\x03"], ids=["Return", "Ctrl-D", "Ctrl-C"])
def test_whoever_has_no_password_gives_up_at_once(nodes: Nodes, tmp_path: Path, answer: str) -> None:
    """One question, no stack trace."""
    code, shown = Person(tmp_path / "me", nodes(1)).init(("): ", answer))
    assert code == (130 if answer == "\x03" else 3) and shown.count(QUESTION) == 1 and "Traceback" not in shown, shown


def test_a_no_is_respected(nodes: Nodes, tmp_path: Path) -> None:
    """The inventory is written, nothing is put there, and it is said what that means; --no-copy-key does not even ask."""
    made = nodes(1)
    person = Person(tmp_path / "me", made)
    for answers, options in (([("): ", PASSWORD), ("[Y/n]: ", "n")], ()), ([("): ", PASSWORD)], ("--no-copy-key",))):
        code, shown = person.init(*answers, options=options)
        assert code == 0 and person.inventory.exists() and not lines_of(made[0]), shown
        assert "only `init` can log in" in shown
        person.inventory.unlink()


def test_a_person_without_any_key_is_told_how_to_make_one(nodes: Nodes, tmp_path: Path) -> None:
    """The inventory is written all the same."""
    made = nodes(1)
    person = Person(tmp_path / "me", made)
    person.key.unlink()
    Path(f"{person.key}.pub").unlink()
    code, shown = person.init(("): ", PASSWORD), options=("--copy-key",))
    assert code == 0 and "ssh-keygen -t ed25519" in shown and not lines_of(made[0]), shown


def test_a_key_that_is_there_already_but_unread_needs_modes_only(nodes: Nodes, tmp_path: Path) -> None:
    """~/.ssh that others may write is closed to them, the file stays as it was; a home that others may write is named."""
    made = nodes(1)
    person = Person(tmp_path / "me", made)
    (made[0].home / ".ssh").mkdir(mode=0o700)
    (made[0].home / ".ssh").chmod(0o777)
    before = f"no-pty {public(person.key)} mine\n# last line, without an end"
    (made[0].home / ".ssh" / "authorized_keys").write_text(before)
    code, shown = person.init(("): ", PASSWORD), options=("--copy-key",))
    assert code == 0 and "has your key already" in shown, shown
    assert (made[0].home / ".ssh" / "authorized_keys").read_text() == before
    assert (made[0].home / ".ssh").stat().st_mode & 0o777 == 0o755
    made[0].home.chmod(0o777)
    code, shown = person.init(("): ", PASSWORD), options=("--copy-key",))
    assert code == 3 and f"chmod go-w {made[0].home}" in shown and "StrictModes" in shown, shown


def test_more_keys_than_the_server_looks_at_do_not_hide_its_password(nodes: Nodes, tmp_path: Path) -> None:
    """It closes the connection after two; the password is tried without them."""
    made = nodes(1, MaxAuthTries="2")
    person = Person(tmp_path / "me", made)
    for kind in ("ecdsa", "rsa"):
        make_key_of(kind, person.ssh / f"id_{kind}")
    code, shown = person.init(("): ", PASSWORD), options=("--copy-key",))
    assert code == 0 and len(lines_of(made[0])) == 1, shown


def test_a_jump_host_that_wants_a_password_is_not_asked_for(nodes: Nodes, tmp_path: Path) -> None:
    """Its key is another matter: the way to give it one is told."""
    gate, made = nodes(2)
    person = Person(tmp_path / "me", [gate, made])
    (person.ssh / "config").write_text(f"Host {made.host}\n  ProxyJump {gate.user}@{gate.host}:{gate.port}\n")
    person.hosts = [f"{made.user}@{made.host}:{made.port}"]
    code, shown = person.init()
    assert code == 3 and f"ssh-copy-id -p {gate.port} {gate.user}@{gate.host}" in shown and "jump host" in shown, shown


def test_a_login_that_wants_more_than_a_password_is_named(nodes: Nodes, tmp_path: Path) -> None:
    """A second factor, in either order, or a password that has expired, is a person's affair: nobody is asked in vain."""
    made = nodes(1, **{**BY_PAM, "AuthenticationMethods": "keyboard-interactive,publickey"})
    code, shown = Person(tmp_path / "me", made).init(("): ", PASSWORD))
    assert code == 3 and "after the password it also wants publickey" in shown, shown
    (node,) = nodes(1, AuthenticationMethods="publickey,password")
    person = Person(tmp_path / "you", [node])
    (node.home / ".ssh").mkdir(mode=0o700)
    shutil.copy(f"{person.key}.pub", node.home / ".ssh" / "authorized_keys")
    code, shown = person.init()
    assert code == 3 and "after the key it also wants password, which needs a person" in shown, shown
    (node,) = nodes(1, **BY_PAM)
    shadow = node.home.parent / f"{node.home.name}-shadow"
    shadow.write_text(shadow.read_text().replace(":20000:", ":0:"))
    code, shown = Person(tmp_path / "them", [node]).init(("): ", PASSWORD))
    assert code == 3 and "it asks '" in shown and "log in there once with ssh" in shown, shown


def leaks(password: str, *places: Path) -> list[Path]:
    """Files below these places that hold a password."""
    files = (path for place in places for path in place.rglob("*") if path.is_file())
    return [path for path in files if password.encode() in path.read_bytes()]
