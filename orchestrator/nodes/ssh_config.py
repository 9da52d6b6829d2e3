"""What ~/.ssh/config says of a node, as OpenSSH itself reads it (`ssh -G`), and the way to the node that follows from it.

Paramiko's own parser knows neither Include nor all of Match, so it serves only where there is no `ssh` program. OpenSSH is
not asked at all where no configuration names anything that matters here. What weakens the check of host keys
(StrictHostKeyChecking, VerifyHostKeyDNS, …) is not taken from there: the inventory alone decides that.
"""

from __future__ import annotations

import getpass
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.errors import NodeError
from orchestrator.specs.inventory import Login, SshOptions

CONFIG_TIMEOUT_S = 20.0  # `Match exec` runs commands
SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
MOST_JUMPS = 8
_KEYWORD = re.compile(r"\s*([A-Za-z]+)(?:\s*=\s*|\s+)(.*)")
# As `ssh -G` writes it: brackets around addresses of either kind.
_JUMP = re.compile(
    r"(?:ssh://)?(?:(?P<user>.+)@)?(?:\[(?P<bracketed>[^]]+)\]|(?P<host>[^:\[\]]+|[^\[\]]*::[^\[\]]*))(?::(?P<port>\d+))?/?"
)
_HONOURED = frozenset(
    {
        "hostname",
        "port",
        "user",
        "identityfile",
        "identitiesonly",
        "identityagent",
        "certificatefile",
        "proxyjump",
        "proxycommand",
        "hostkeyalias",
        "userknownhostsfile",
        "globalknownhostsfile",
        "revokedhostkeys",
        "canonicalizehostname",
    }
)

Settings = Mapping[str, Sequence[str]]  # keyword in small letters to its values


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How one SSH server is reached and logged in to.

    Args:
        host, port: where it listens, seen from the last of `jumps`.
        known_as: the name under which its host key is looked up and stored.
        known_hosts: files of known host keys; the first is where a new one is stored.
        revoked_keys: a list of host keys that are refused (RevokedHostKeys), None for none.
        hashes_hosts: whether a new known_hosts file is written with hashed names.
        key_files: private keys to try, in order.
        key_is_named: whether the first of them was asked for by name, and so must be there.
        certificate_files: certificates of those keys, besides those that lie beside them.
        agent: the socket of the agent whose keys are tried; None for none.
        only_key_files: of the agent's keys only those that are among `key_files`.
        proxy_command: what carries the connection instead of TCP.
        jumps: servers to go through, the nearest first; they have none themselves.
    """

    host: str
    port: int
    user: str
    known_as: str
    known_hosts: tuple[str, ...]
    revoked_keys: str | None
    hashes_hosts: bool
    key_files: tuple[str, ...]
    key_is_named: bool
    certificate_files: tuple[str, ...]
    agent: str | None
    only_key_files: bool
    proxy_command: str | None
    jumps: tuple[Route, ...]

    @property
    def is_direct(self) -> bool:
        """Whether nothing stands between us and the server."""
        return not self.jumps and self.proxy_command is None


def find_route(node: str, login: Login, options: SshOptions) -> Route:
    """The way to a node: what the inventory says, then what ~/.ssh/config says, then OpenSSH's defaults.

    Raises NodeError when the configuration cannot be read, takes too long, or leads through a host to itself.
    """
    return _route(node, login, options, ())


def unread_config(options: SshOptions) -> str | None:
    """What is lost where a configuration matters and there is no `ssh` to read it; None where nothing is."""
    if shutil.which("ssh") or not any(_matters(path) for path in _files(options)):
        return None
    return "there is no `ssh` program here: of ~/.ssh/config, Include and `Match exec` are not followed (install openssh-client)"


def _route(node: str, login: Login, options: SshOptions, behind: tuple[str, ...]) -> Route:
    if login.host in behind or len(behind) > MOST_JUMPS:
        raise NodeError(
            f"{node}: the way leads in a circle: {' -> '.join([*behind, login.host])}",
            node=node,
            advice="see ProxyJump in ~/.ssh/config: the jump host needs `ProxyJump none`",
        )
    settings = _settings(node, login, options)
    host = _first(settings, "hostname", login.host)
    port = login.port or int(_first(settings, "port", "22"))
    user = login.user or _first(settings, "user", "") or getpass.getuser()
    alias = _first(settings, "hostkeyalias", "")
    tokens = _tokens(host, login.host, alias, port, user)
    command = _first(settings, "proxycommand", "none")
    chain = login.via or _first(settings, "proxyjump", "none")
    jumps = () if chain == "none" else _chain(node, chain, login, options, (*behind, login.host))
    named = [_at_home(login.key)] if login.key else []
    files = _paths(settings.get("identityfile", ()), tokens) or (() if named else tuple(map(_at_home, DEFAULT_KEYS)))
    return Route(
        host=host,
        port=port,
        user=user,
        known_as=(alias or (host if port == 22 else f"[{host}]:{port}")).lower(),
        known_hosts=_known_hosts(settings, options, tokens),
        revoked_keys=next(iter(_paths(settings.get("revokedhostkeys", ()), tokens)), None),
        hashes_hosts=_first(settings, "hashknownhosts", "no") == "yes",
        key_files=tuple(dict.fromkeys([*named, *files])),
        key_is_named=login.key is not None,
        certificate_files=_paths(settings.get("certificatefile", ()), tokens),
        agent=_agent(settings, tokens),
        only_key_files=_first(settings, "identitiesonly", "no") == "yes",
        proxy_command=None if command == "none" or jumps else _filled(command, tokens),
        jumps=jumps,
    )


def _chain(node: str, chain: str, login: Login, options: SshOptions, behind: tuple[str, ...]) -> tuple[Route, ...]:
    """The jump hosts of `a,b`, the nearest first. As with `ssh -J`, only the first goes its own way."""
    hops: list[Route] = []
    for text in chain.split(","):
        match = _JUMP.fullmatch(text.strip())
        if match is None:
            raise NodeError(f"{node}: ProxyJump {text!r} is no [user@]host[:port]", node=node, advice="see ~/.ssh/config")
        host = match["bracketed"] or match["host"]
        port = int(match["port"]) if match["port"] else None
        hop_login = Login(user=match["user"], host=host, port=port, key=login.key, via=None)
        found = _route(node, hop_login, options, behind)
        hops += [replace(found, jumps=(), proxy_command=None)] if hops else [*found.jumps, replace(found, jumps=())]
    return tuple(hops)


def _settings(node: str, login: Login, options: SshOptions) -> Settings:
    files = _files(options)
    if not any(_matters(path) for path in files):
        return {}
    program = shutil.which("ssh")
    if program is None:
        return _by_paramiko(node, login.host, files)
    # OpenSSH goes by the password database's home; we go by $HOME, as everywhere.
    own = options.config is not None or _account_home() != str(Path.home())
    argv = [program, "-G", *(["-F", str(files[0])] if own else [])]
    argv += ["-p", str(login.port)] if login.port else []
    argv += ["-l", login.user] if login.user else []
    argv += ["-i", _at_home(login.key)] if login.key else []
    settings: dict[str, list[str]] = {}
    for line in _output(node, [*argv, "--", login.host]).splitlines():
        keyword, _, value = line.partition(" ")
        settings.setdefault(keyword.lower(), []).append(value)
    return settings


def _output(node: str, argv: Sequence[str]) -> str:
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=CONFIG_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with what `Match exec` started
        process.communicate()
        raise NodeError(
            f"{node}: `ssh -G {argv[-1]}` did not end within {CONFIG_TIMEOUT_S:g} s",
            node=node,
            advice="see the commands of `Match exec` in ~/.ssh/config",
        ) from None
    if process.returncode != 0:
        said = err.decode(errors="replace").strip() or f"exit code {process.returncode}"
        raise NodeError(
            f"{node}: ssh cannot read its configuration: {said}", node=node, advice=f"this must work first: ssh -G {argv[-1]}"
        )
    return out.decode(errors="surrogateescape")


def _by_paramiko(node: str, host: str, files: Sequence[Path]) -> Settings:
    import paramiko

    config = paramiko.SSHConfig()
    for path in files:
        try:
            with path.open() as stream:
                config.parse(stream)
        except FileNotFoundError:
            continue
        except paramiko.SSHException as error:
            raise NodeError(f"{node}: {path}: {error}", node=node, advice="install openssh-client here") from None
    found: dict[str, object] = dict(config.lookup(host))
    return {name: [str(one) for one in value] if isinstance(value, list) else [str(value)] for name, value in found.items()}


def _files(options: SshOptions) -> list[Path]:
    """The configuration files that count, the person's first."""
    if options.config is not None:
        return [Path(options.config).expanduser()]
    own = Path("~/.ssh/config").expanduser()
    if _account_home() != str(Path.home()):
        return [own if own.exists() else SYSTEM_CONFIG]
    return [own, SYSTEM_CONFIG]


def _matters(path: Path, depth: int = 0) -> bool:
    """Whether a file, or one that it includes, sets anything that is honoured here."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return False
    for keyword, value in ((match[1].lower(), match[2]) for line in lines if (match := _KEYWORD.match(line))):
        if keyword in _HONOURED:
            return True
        if keyword == "include" and depth < 16 and any(_matters(one, depth + 1) for one in _included(path, value)):
            return True
    return False


def _included(path: Path, value: str) -> Iterator[Path]:
    base = path.parent if path.is_relative_to("/etc/ssh") else Path("~/.ssh").expanduser()
    for pattern in value.replace('"', "").split():
        whole = base / Path(pattern).expanduser()
        yield from Path(whole.anchor).glob(str(whole.relative_to(whole.anchor)))


def _known_hosts(settings: Settings, options: SshOptions, tokens: Mapping[str, str]) -> tuple[str, ...]:
    """The inventory's file first, then the person's, then the system's."""
    user = _words(settings, "userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2")
    system = _words(settings, "globalknownhostsfile", f"{SYSTEM_KNOWN_HOSTS} {SYSTEM_KNOWN_HOSTS}2")
    own = [options.known_hosts] if options.known_hosts else []
    return tuple(_at_home(path) for path in own) + _paths([*user, *system], tokens)


def _words(settings: Settings, keyword: str, default: str) -> list[str]:
    return _first(settings, keyword, default).replace('"', "").split()


def _first(settings: Settings, keyword: str, default: str) -> str:
    return next(iter(settings.get(keyword, ())), default)


def _paths(texts: Sequence[str], tokens: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(_path(text, tokens) for text in texts if text.lower() != "none")


def _path(text: str, tokens: Mapping[str, str]) -> str:
    """A path with its tokens and `${NAME}`; a name that is not set stays, as a path that is not there."""
    expanded = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], match[0]), text.strip('"'))
    return _at_home(_filled(expanded, tokens))


def _agent(settings: Settings, tokens: Mapping[str, str]) -> str | None:
    """See IdentityAgent in ssh_config(5): a path, `$NAME` for an environment variable that holds it, SSH_AUTH_SOCK, or none."""
    said = _first(settings, "identityagent", "SSH_AUTH_SOCK")
    if said.lower() == "none":
        return None
    if said == "SSH_AUTH_SOCK" or (said.startswith("$") and not said.startswith("${")):
        return os.environ.get(said.removeprefix("$")) or None
    return _path(said, tokens)


def _at_home(path: str) -> str:
    account = _account_home()
    if path.startswith(f"{account}/"):
        path = "~" + path.removeprefix(account)
    return str(Path(path).expanduser())


def _account_home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a user id without a name, as containers have
        return str(Path.home())


def _tokens(host: str, typed: str, alias: str, port: int, user: str) -> dict[str, str]:
    """What %h, %p, … stand for: see TOKENS in ssh_config(5)."""
    name = socket.gethostname()
    here = {"d": str(Path.home()), "u": getpass.getuser(), "i": str(os.getuid()), "l": name, "L": name.partition(".")[0]}
    return {"%": "%", "h": host, "n": typed, "k": alias or typed, "p": str(port), "r": user, **here}


def _filled(text: str, tokens: Mapping[str, str]) -> str:
    return re.sub(r"%(.)", lambda match: tokens.get(match[1], match[0]), text)
