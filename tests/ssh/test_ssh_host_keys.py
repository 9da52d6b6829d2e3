"""known_hosts as OpenSSH means it, against servers with host keys of every kind; ssh-keygen and ssh judge the files."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from logins import make_key_of, public, reach
from sshd import SshdNode, SshdNodes

from orchestrator.errors import HostKeyError
from orchestrator.nodes.known_hosts import KnownHosts
from orchestrator.planning.hops import Hop, known_hosts, ssh_config

KINDS = ("ed25519", "ecdsa", "rsa")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("keys")
    return {kind: make_key_of(kind, directory / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def node(session_sshd_factory: SshdNodes, keys: dict[str, Path]) -> SshdNode:
    """A server that has a key of each kind."""
    return session_sshd_factory(1, HostKey="\nHostKey ".join(str(keys[kind]) for kind in KINDS))[0]


def name_of(node: SshdNode) -> str:
    return f"[{node.host}]:{node.port}"


def write(tmp_path: Path, *lines: str) -> Path:
    known = tmp_path / "known_hosts"
    known.write_text("".join(f"{line}\n" for line in lines))
    return known


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_hashed", [False, True])
def test_the_kind_that_is_known_is_asked_for(
    node: SshdNode, keys: dict[str, Path], tmp_path: Path, kind: str, is_hashed: bool
) -> None:
    """Of a server's several keys the one on record serves, whichever it is, plain or hashed (paramiko 1517 and 993)."""
    known = write(tmp_path, f"{name_of(node)} {public(keys[kind])}")
    if is_hashed:
        subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
        assert node.host not in known.read_text()
    reached = reach(node, known)
    assert reached.host_key == public(keys[kind])
    reached.close()


def test_several_keys_of_one_host_are_all_good(node: SshdNode, keys: dict[str, Path], tmp_path: Path) -> None:
    """An old key beside the new one is no change, in the same file or in another."""
    other = make_key_of("ed25519", tmp_path / "old")
    known = write(tmp_path, f"{name_of(node)} {public(other)}", f"other,{name_of(node)} {public(keys['ed25519'])}")
    reach(node, known).close()
    known = write(tmp_path, f"{name_of(node)} {public(other)}")
    with pytest.raises(HostKeyError, match="CHANGED"):
        reach(node, known)


def test_a_kind_that_the_host_never_had_is_a_change(node: SshdNode, keys: dict[str, Path], tmp_path: Path) -> None:
    """Known by a key that it no longer has, it is refused with any other, under both policies; nothing is stored."""
    for policy in ("strict", "accept-new"):
        known = write(tmp_path, f"{name_of(node)} {public(make_key_of('rsa', tmp_path / f'was-{policy}'))}")
        before = known.read_text()
        with pytest.raises(HostKeyError, match=r"CHANGED: it is now .*known was ssh-rsa SHA256"):
            reach(node, known, host_keys=policy)
        assert known.read_text() == before


def test_a_revoked_key_is_refused(node: SshdNode, keys: dict[str, Path], tmp_path: Path) -> None:
    """Also where another line knows it, and under accept-new."""
    for policy in ("strict", "accept-new"):
        known = write(tmp_path, f"{name_of(node)} {public(keys['rsa'])}", f"@revoked * {public(keys['rsa'])}")
        with pytest.raises(HostKeyError, match="REVOKED"):
            reach(node, known, host_keys=policy)


@pytest.mark.parametrize("policy", ["strict", "accept-new"])
def test_a_certificate_authority_makes_no_key_known(node: SshdNode, keys: dict[str, Path], tmp_path: Path, policy: str) -> None:
    """Not even when the server's own key is called the authority; a host under one is not taken for a new one."""
    known = write(tmp_path, f"@cert-authority *,{name_of(node)} {public(keys['ed25519'])}")
    before = known.read_text()
    with pytest.raises(HostKeyError, match="certificate authority"):
        reach(node, known, host_keys=policy)
    assert known.read_text() == before


def test_patterns_and_negation(tmp_path: Path) -> None:
    """`*` and `?` match, `!` excludes, brackets are letters, case does not count; a key of the usual port serves at others."""
    known = KnownHosts([str(write(tmp_path, "!bad.lab,*.LAB,[10.0.0.?]:22?? ssh-ed25519 AAAA", "h1 ssh-ed25519 BBBB"))])
    judged = {name: known.judge(name, "ssh-ed25519 AAAA") for name in ("good.lab", "bad.lab", "[10.0.0.7]:2222", "10.0.0.7")}
    assert judged == {"good.lab": "known", "bad.lab": "unknown", "[10.0.0.7]:2222": "known", "10.0.0.7": "unknown"}
    assert known.judge("[h1]:2222", "ssh-ed25519 BBBB") == "known"
    assert known.judge("[h1]:2222", "ssh-ed25519 AAAA") == "unknown"


def test_damaged_lines_harm_nothing(node: SshdNode, keys: dict[str, Path], tmp_path: Path) -> None:
    """Rubbish, half a line, a bad hash, a kind that nobody knows: passed over, as OpenSSH does."""
    rubbish = (
        "|1|x|y ssh-rsa AAAA",
        "lonely",
        "\x00\xff",
        "# comment",
        "h ssh-unknown !!!",
        f"{name_of(node)} ssh-nonsense AAAA",
    )
    known = write(tmp_path, *rubbish[:-1], f"{name_of(node)} {public(keys['ecdsa'])}")
    reach(node, known).close()


@pytest.mark.parametrize("style", ["plain", "hashed", "new", "new hashed"])
def test_accept_new_from_many_threads_loses_nothing(tmp_path: Path, style: str) -> None:
    """16 at once, each another host: every line is there, whole, written as the file is; ssh-keygen finds each of them."""
    known = tmp_path / "sub" / "known_hosts"
    if not style.startswith("new"):
        known.parent.mkdir()
        known.write_text("old ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKq1")  # without a newline at its end
    if style == "hashed":
        known.write_text("|1|c2FsdHNhbHRzYWx0c2FsdHNhbHQ=|aGFzaGhhc2hoYXNoaGFzaGhhc2g= ssh-ed25519 AAAA")
    key = public(make_key_of("ed25519", tmp_path / "key"))
    names = [f"[10.0.0.{index}]:2222" for index in range(64)]

    def accept(name: str) -> str:
        return KnownHosts([str(known)]).accept(name, key, hashed=style == "new hashed")

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(accept, names * 2)) == {"known"}
    lines = known.read_text().splitlines()
    assert len(lines) == 64 + (not style.startswith("new")) and known.stat().st_mode & 0o777 in (0o600, 0o644)
    assert ("10.0.0.7" in known.read_text()) is (style in ("plain", "new"))
    for name in names[:4]:
        assert subprocess.run(["ssh-keygen", "-F", name, "-f", known], capture_output=True).returncode == 0


def test_two_who_accept_different_keys_for_one_host_do_not_both_win(tmp_path: Path) -> None:
    """The second sees what the first stored, and refuses."""
    known = KnownHosts([str(tmp_path / "known_hosts")])
    assert known.accept("h", "ssh-ed25519 AAAA", hashed=False) == "known"
    assert known.accept("h", "ssh-ed25519 BBBB", hashed=False) == "changed"
    assert len((tmp_path / "known_hosts").read_text().splitlines()) == 1


def test_accept_new_over_ssh_is_what_openssh_then_trusts(node: SshdNode, tmp_path: Path) -> None:
    """OpenSSH itself logs in with the file that we wrote, strictly."""
    known = tmp_path / "known_hosts"
    reach(node, known, host_keys="accept-new").close()
    command = [word.replace(str(node.known_hosts), str(known)) for word in node.ssh("true")]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_heads_ssh_config_carries_exactly_the_key_that_was_verified(
    node: SshdNode, keys: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """With the files made from it OpenSSH reaches the node; with another of the node's own keys it does not."""
    reached = reach(node, write(tmp_path, f"{name_of(node)} {public(keys[kind])}"))
    verified = reached.host_key
    reached.close()
    assert verified == public(keys[kind])
    for given, code in ((verified, 0), (public(make_key_of(kind, tmp_path / "other")), 255)):
        hop = Hop(node="node1", address=node.host, port=node.port, user=node.user, host_key=str(given), identity=str(node.key))
        (tmp_path / "ssh_config").write_text(ssh_config([hop], str(tmp_path), "127.0.0.1", 10))
        (tmp_path / "known_hosts").write_text(known_hosts([hop]))
        command = ["ssh", "-F", str(tmp_path / "ssh_config"), node.host, "true"]
        assert subprocess.run(command, capture_output=True, timeout=60).returncode == code
