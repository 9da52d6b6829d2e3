"""Certificates made by ssh-keygen: of hosts, for which an authority vouches, and of users; OpenSSH judges beside us."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from logins import make_key_of, options, public, reach, sign
from ssh_agents import add_to_agent, running_agent
from sshd import SshdNode, SshdNodes

from orchestrator.errors import AuthenticationError, HostKeyError
from orchestrator.nodes.ssh import SshTransport
from orchestrator.planning.hops import Hop, known_hosts, ssh_config
from orchestrator.specs.inventory import Login

KINDS = ("ed25519", "ecdsa", "rsa")
ALWAYS = "19990101:20990101"


class CertifiedHost:
    """A server whose host key, of one kind, is certified; its authority's key may be of another kind."""

    def __init__(self, start: SshdNodes, directory: Path, kind: str = "ed25519", authority: str = "ed25519") -> None:
        self.authority = make_key_of(authority, directory / "ca")
        self.key = make_key_of(kind, directory / "host")
        self.certificate = Path(f"{self.key}-cert.pub")
        self.known = directory / "known"
        self.certify("-h", "-V", ALWAYS, name="127.0.0.2")
        self._start = start
        self.node = start(1, HostKey=str(self.key), HostCertificate=str(self.certificate))[0]

    def certify(self, *options: str, name: str = "") -> None:
        sign(self.authority, self.key, *options, name=name)

    def again(self) -> None:
        """The server reads its certificate when it starts."""
        self._start.stop(self.node)
        self.node = self._start.start_again(self.node)

    @property
    def name(self) -> str:
        return f"[{self.node.host}]:{self.node.port}"

    def knows(self, *lines: str) -> None:
        self.known.write_text("".join(f"{line}\n" for line in lines))

    def openssh_comes_in(self) -> bool:
        command = [word.replace(str(self.node.known_hosts), str(self.known)) for word in self.node.ssh("true")]
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0

    def fault(self) -> str:
        """Why we refuse it, which OpenSSH does as well."""
        assert not self.openssh_comes_in()
        with pytest.raises(HostKeyError) as refused:
            reach(self.node, self.known, host_keys="accept-new")
        assert "ssh-keyscan" in refused.value.advice or "REVOKED" in refused.value.message
        return refused.value.message


@pytest.fixture
def host(sshd_factory: SshdNodes, tmp_path: Path) -> CertifiedHost:
    return CertifiedHost(sshd_factory, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("authority", KINDS)
def test_an_authority_vouches_for_a_host(sshd_factory: SshdNodes, tmp_path: Path, kind: str, authority: str) -> None:
    """Whatever kinds the keys are of; by pattern, by `[host]:port`, and by the host for any port. What we verified is the key."""
    host = CertifiedHost(sshd_factory, tmp_path, kind, authority)
    for names in ("*", host.name, host.node.host):
        host.knows(f"@cert-authority {names} {public(host.authority)}")
        reached = reach(host.node, host.known)
        assert reached.host_key == public(host.key)
        reached.close()
        assert host.openssh_comes_in()


def test_the_head_then_knows_the_certified_key_itself(host: CertifiedHost, tmp_path: Path) -> None:
    """Its known_hosts has the key that the authority vouched for, and OpenSSH gets in with it; there is no authority in it."""
    host.knows(f"@cert-authority * {public(host.authority)}")
    reached = reach(host.node, host.known)
    node = host.node
    hop = Hop(
        node="node1", address=node.host, port=node.port, user=node.user, host_key=str(reached.host_key), identity=str(node.key)
    )
    reached.close()
    (tmp_path / "ssh_config").write_text(ssh_config([hop], str(tmp_path), "127.0.0.1", 10))
    (tmp_path / "known_hosts").write_text(known_hosts([hop]))
    assert (tmp_path / "known_hosts").read_text() == f"node1 {public(host.key)}\n"
    command = ["ssh", "-F", tmp_path / "ssh_config", node.host, "true"]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("name", "made", "why"),
    [
        ("127.0.0.2", ("-h", "-V", "20000101:20010101"), "it expired on 2001-01-01"),
        ("127.0.0.2", ("-h", "-V", "20800101:20900101"), "it is not valid before 2080-01-01"),
        ("127.0.0.3,other", ("-h",), "it is for 127.0.0.3, other, not for 127.0.0.2"),
        ("127.0.0.*", ("-h",), "it is for 127.0.0.*, not for 127.0.0.2"),
    ],
)
def test_a_certificate_that_is_not_good_is_named_with_its_fault(
    host: CertifiedHost, name: str, made: tuple[str, ...], why: str
) -> None:
    """Refused, under accept-new as well; the plain key, where it is known besides, still counts, as with OpenSSH."""
    host.certify(*made, name=name)
    host.again()
    host.knows(f"@cert-authority * {public(host.authority)}")
    before = host.known.read_text()
    assert f"whose certificate is not good: {why}" in host.fault()
    assert host.known.read_text() == before
    host.knows(f"@cert-authority * {public(host.authority)}", f"{host.name} {public(host.key)}")
    assert host.openssh_comes_in()
    reach(host.node, host.known).close()


def test_a_certificate_for_every_host_is_one(host: CertifiedHost) -> None:
    """Without names it is for all: so says PROTOCOL.certkeys."""
    host.certify("-h")
    host.again()
    host.knows(f"@cert-authority * {public(host.authority)}")
    reach(host.node, host.known).close()


def test_the_name_is_that_under_which_the_host_is_known(host: CertifiedHost, tmp_path: Path) -> None:
    """HostKeyAlias: the certificate must be for the alias, and is not for the address any more."""
    config = tmp_path / "config"
    config.write_text("Host *\n  HostKeyAlias the-machine\n")
    host.knows(f"@cert-authority the-* {public(host.authority)}")
    with pytest.raises(HostKeyError, match=r"it is for 127\.0\.0\.2, not for the-machine"):
        reach(host.node, host.known, config=str(config))
    host.certify("-h", name="the-machine")
    host.again()
    reach(host.node, host.known, config=str(config)).close()


def test_another_authority_vouches_for_nothing(host: CertifiedHost, tmp_path: Path) -> None:
    """Nor does one that is named for other hosts, nor the host's own key called an authority."""
    other = make_key_of("ed25519", tmp_path / "other")
    host.knows(f"@cert-authority * {public(other)}")
    assert "its certificate is of another one (ssh-ed25519 SHA256:" in host.fault()
    host.knows(f"@cert-authority * {public(host.key)}")
    assert "its certificate is of another one" in host.fault()
    host.knows(f"@cert-authority elsewhere {public(host.authority)}")
    with pytest.raises(HostKeyError, match="not known: "):
        reach(host.node, host.known)


def test_what_is_revoked_is_refused_always(host: CertifiedHost) -> None:
    """The authority, or the key that it certified; by any of the host's names; whatever else is known of it."""
    authority = f"@cert-authority * {public(host.authority)}"
    for revoked in (host.authority, host.key):
        for names in ("*", host.name):
            host.knows(authority, f"{host.name} {public(host.key)}", f"@revoked {names} {public(revoked)}")
            assert "REVOKED" in host.fault()
    host.knows(authority, f"{host.name} {public(host.key)}", f"@revoked {host.node.host} {public(host.key)}")
    with pytest.raises(HostKeyError, match="REVOKED"):
        reach(host.node, host.known)


@pytest.mark.parametrize("is_krl", [False, True])
def test_a_list_of_revoked_keys_is_asked(host: CertifiedHost, tmp_path: Path, is_krl: bool) -> None:
    """RevokedHostKeys, lines of keys or a KRL: the key, its authority, in a KRL the certificate; and a list that is lost."""
    listed = tmp_path / "revoked"
    (tmp_path / "config").write_text(f"RevokedHostKeys {listed}\n")
    host.knows(f"@cert-authority * {public(host.authority)}", f"{host.name} {public(host.key)}")

    def revoke(key: Path) -> None:
        if is_krl:
            subprocess.run(["ssh-keygen", "-q", "-k", "-f", listed, key], check=True, timeout=60)
        else:
            listed.write_text(key.read_text())

    harmless, key, authority = (Path(f"{one}.pub") for one in (make_key_of("rsa", tmp_path / "x"), host.key, host.authority))
    revoke(harmless)
    reach(host.node, host.known, config=str(tmp_path / "config")).close()
    for bad in (key, authority, *([host.certificate] if is_krl else [])):
        revoke(bad)
        with pytest.raises(HostKeyError, match="REVOKED"):
            reach(host.node, host.known, config=str(tmp_path / "config"))
    listed.unlink()
    with pytest.raises(HostKeyError, match="REVOKED") as refused:
        reach(host.node, host.known, config=str(tmp_path / "config"))
    assert f"where {listed} cannot be read" in refused.value.advice


def test_a_host_without_a_certificate_is_told_how_to_get_one(sshd_factory: SshdNodes, tmp_path: Path) -> None:
    """Where only an authority is known."""
    node = sshd_factory(1)[0]
    authority = make_key_of("ed25519", tmp_path / "ca")
    (tmp_path / "known").write_text(f"@cert-authority * {public(authority)}\n")
    with pytest.raises(HostKeyError, match="it shows no certificate of it") as refused:
        reach(node, tmp_path / "known")
    assert "ssh-keygen -s CA_KEY" in refused.value.advice and "HostCertificate" in refused.value.advice


def test_a_users_certificate_is_no_hosts(host: CertifiedHost) -> None:
    """sshd itself refuses to show one, so it is judged alone."""
    from orchestrator.nodes.certificates import host_fault

    host.certify(name="127.0.0.2")
    written = " ".join(host.certificate.read_text().split()[:2])
    assert host_fault(written, "127.0.0.2") == "it is a user's, not a host's"


def test_a_forged_certificate_is_seen(host: CertifiedHost, tmp_path: Path) -> None:
    """One bit of what was signed, or of the signature, is another; SHA-1 under an RSA authority; rubbish."""
    import base64

    from orchestrator.nodes.certificates import host_fault

    kind, content = host.certificate.read_text().split()[:2]
    assert host_fault(f"{kind} {content}", "127.0.0.2") is None
    good = base64.b64decode(content)
    for place in (good.index(b"127.0.0.2") + 8, len(good) - 5):
        bad = bytearray(good)
        bad[place] ^= 1
        assert host_fault(
            f"{kind} {base64.b64encode(bytes(bad)).decode()}", "127.0.0.3" if place < len(good) - 5 else "127.0.0.2"
        )
    old = make_key_of("rsa", tmp_path / "old")
    for algorithm, fault in (("ssh-rsa", "its signature is not its authority's"), ("rsa-sha2-512", None)):
        sign(old, host.key, "-h", "-t", algorithm, name="h")
        assert host_fault(" ".join(host.certificate.read_text().split()[:2]), "h") == fault
    assert host_fault(f"{kind} AAAA", "h") == host_fault("", "h") == host_fault("x y z", "h") == "it cannot be read"


@pytest.fixture
def trusting(sshd_factory: SshdNodes, tmp_path: Path) -> tuple[SshdNode, Path]:
    """A server that lets in whomever an authority vouches for, and no plain key."""
    authority = make_key_of("ed25519", tmp_path / "user_ca")
    (node,) = sshd_factory(1, TrustedUserCAKeys=f"{authority}.pub")
    (node.home / ".ssh" / "authorized_keys").write_text("")
    return node, authority


def by_config(node: SshdNode, tmp_path: Path, *lines: str) -> SshTransport:
    """A login for which the inventory names no key."""
    config = tmp_path / "config"
    config.write_text("".join(f"{line}\n" for line in lines))
    login = Login(user=node.user, host=node.host, port=node.port, key=None, via=None)
    return SshTransport("node1", login, options(config=str(config), known_hosts=str(node.known_hosts)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_users_certificate_lets_in(trusting: tuple[SshdNode, Path], tmp_path: Path, kind: str) -> None:
    """Beside the key, or named by CertificateFile; without it the same key is refused; of another key it does not serve."""
    node, authority = trusting
    key = make_key_of(kind, tmp_path / "mine")
    with pytest.raises(AuthenticationError, match="accepted none of"):
        reach(node, changes={"key": str(key)})
    beside = sign(authority, key, name=node.user)
    reached = reach(node, changes={"key": str(key)})
    assert reached.key_file == str(key)
    reached.close()
    elsewhere = beside.rename(tmp_path / "elsewhere.pub")
    lines = f"IdentityFile {key}", "IdentitiesOnly yes"
    with pytest.raises(AuthenticationError):
        by_config(node, tmp_path, *lines)
    by_config(node, tmp_path, *lines, f"CertificateFile {elsewhere}").close()
    other = make_key_of(kind, tmp_path / "other")
    with pytest.raises(AuthenticationError):
        by_config(node, tmp_path, f"IdentityFile {other}", f"CertificateFile {elsewhere}", "IdentitiesOnly yes")


def test_a_certificate_that_expired_is_named_and_the_plain_key_serves(trusting: tuple[SshdNode, Path], tmp_path: Path) -> None:
    """A stale certificate beside a key that is authorised by itself does no harm."""
    node, authority = trusting
    key = make_key_of("ed25519", tmp_path / "mine")
    sign(authority, key, "-V", "20000101:20010101", name=node.user)
    with pytest.raises(AuthenticationError, match=r"mine-cert.pub \(expired on 2001-01-01 .*\), .*mine"):
        reach(node, changes={"key": str(key)})
    (node.home / ".ssh" / "authorized_keys").write_text(Path(f"{key}.pub").read_text())
    reach(node, changes={"key": str(key)}).close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Path]:
    with running_agent(tmp_path / "agent") as socket:
        yield socket


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_holds_a_certificate(trusting: tuple[SshdNode, Path], tmp_path: Path, agent: Path, kind: str) -> None:
    """`ssh-add` takes it with the key; or the agent has the key, and the certificate is a file."""
    node, authority = trusting
    key = make_key_of(kind, tmp_path / "mine")
    add_to_agent(key, agent)
    only = f"IdentityAgent {agent}", f"IdentityFile {key}.pub", "IdentitiesOnly yes"
    with pytest.raises(AuthenticationError):
        by_config(node, tmp_path, *only)
    certificate = sign(authority, key, name=node.user)
    hidden = key.rename(tmp_path / "hidden")
    by_config(node, tmp_path, *only).close()
    hidden.rename(key)
    add_to_agent(key, agent)
    certificate.unlink()
    key.unlink()
    by_config(node, tmp_path, *only).close()
    reached = by_config(node, tmp_path, f"IdentityAgent {agent}")
    assert reached.key_file is None
    reached.close()
