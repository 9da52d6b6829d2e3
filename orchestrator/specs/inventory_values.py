"""The values an inventory holds: what each accepts, said in words that an error message can repeat.

Every type takes text, because an inventory's scalars arrive as they were written; none touches a file or the network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?\.?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+\\-]*\$?")
_ADDRESS = re.compile(r"(?:(?P<user>[^\s:]+)@)?(?:\[(?P<v6>[^\[\]\s]+)\]|(?P<host>[^:@\[\]\s]+))(?::(?P<port>[0-9]{1,5}))?")
_PORTS = re.compile(r"([0-9]{1,5}) *- *([0-9]{1,5})")
_SCOPE = re.compile(r"[A-Za-z0-9._-]+")

FEWEST_PORTS = 32


@dataclass(frozen=True, slots=True)
class Expected:
    """Marks a type with what it accepts; whatever goes wrong inside it is reported as "expected <text>"."""

    text: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._check, handler(source))

    def _check(self, value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValueError:
            raise expected(self.text) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where SSH goes, as far as it was said; `host` is a name or an IP address without brackets."""

    user: str | None
    host: str
    port: int | None


def expected(text: str) -> PydanticCustomError:
    """The error of a value that is not `text`."""
    return PydanticCustomError("expected", "expected {text}", {"text": text})


def one_of(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def parse_address(text: str) -> Address:
    """Read `host`, `user@host`, `host:port`, an IPv6 address, or `[IPv6]:port`.

    Raises:
        ValueError: the text is none of these.
    """
    user, at, rest = text.rpartition("@")
    if _is_ipv6(rest):
        return Address(user=_user(user) if at else None, host=rest, port=None)
    match = _ADDRESS.fullmatch(text)
    if match is None or (match["v6"] and not _is_ipv6(match["v6"])):
        raise ValueError(text)
    port = int(match["port"]) if match["port"] else None
    if port is not None and not 1 <= port <= 65535:
        raise ValueError(text)
    return Address(user=match["user"] and _user(match["user"]), host=_host(match["v6"] or match["host"]), port=port)


def _user(text: str) -> str:
    # No leading dash and no shell characters: the name becomes an argument and a line of an ssh_config.
    if not _USER.fullmatch(text) or text.endswith("\\"):
        raise ValueError(text)
    return text


def _host(text: str) -> str:
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if _is_ipv6(bare):
        return bare
    if not _HOST_NAME.fullmatch(text):
        raise ValueError(text)
    if not text.strip("0123456789.") and ip_address(text).is_unspecified:  # digits and dots alone are meant as an address
        raise ValueError(text)
    return text


def _is_ipv6(text: str) -> bool:
    address, percent, scope = text.partition("%")
    if percent and not _SCOPE.fullmatch(scope):
        return False
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    return parsed.version == 6 and not parsed.is_unspecified


def _jump(text: str) -> str:
    hops = [hop.strip() for hop in text.split(",")]
    for hop in hops:
        parse_address(hop)
    return ",".join(hops)


def network(text: str) -> str:
    """A network in CIDR notation, its host bits cleared; raises ValueError."""
    if "/" not in text:
        raise ValueError(text)
    return str(ip_network(text, strict=False))


def _port_range(value: object) -> tuple[int, int]:
    match = _PORTS.fullmatch(value) if isinstance(value, str) else None
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    # Below 1024 root alone may listen; a handful would not do: each rank and each helper listens on one.
    if not 1024 <= first <= last <= 65535 or last - first + 1 < FEWEST_PORTS:
        raise ValueError(value)
    return first, last


def _portable(text: str) -> str:
    # A NUL byte ends arguments, variables and paths in the kernel: what follows it would be lost in silence. Half a
    # surrogate pair, which is how Python shows bytes that are no text, cannot be written down.
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise expected("text that UTF-8 can write, without NUL characters")
    return text


def _root(text: str) -> str:
    # The whole root is removed by `teardown`, so it must be a directory of its own.
    path = PurePosixPath(text)
    own = path.is_absolute() or path.parts[0] == "~"
    if not own or len(path.parts) < 2 or ".." in path.parts or not text.isprintable():
        raise ValueError(text)
    return text


def _below(text: str) -> str:
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(text)
    return text


def _heartbeat(limit_s: float) -> float:
    # Ranks are heard once a second: a shorter limit would take a busy node for a lost one.
    if limit_s != 0 and limit_s < 5:
        raise ValueError(limit_s)
    return limit_s


def _version_or_range(text: str) -> str:
    try:
        Version(text)
    except InvalidVersion:
        SpecifierSet(text)
    return text


def _requirement(text: str) -> str:
    try:
        Requirement(text)
    except RecursionError:  # a marker of a thousand brackets
        raise ValueError(text) from None
    return text


Backend = Literal["auto", "ccl", "gloo", "mpi"]
Flavour = Literal["impi", "mpich", "openmpi", "system"]
StallAction = Literal["report", "stop"]
HostKeys = Literal["strict", "accept-new"]

Text = Annotated[str, Expected("text"), AfterValidator(_portable)]
PathText = Annotated[str, Field(min_length=1), Expected("a path"), AfterValidator(_portable)]
# A script that begins with a dash is an option whose script was forgotten; Python would take it for its own.
Script = Annotated[str, Field(pattern=r"^[^-]"), Expected("the path of a script"), AfterValidator(_portable)]
Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=64),
    Expected("a name of letters, digits, '.', '_', '-'"),
]
Host = Annotated[str, AfterValidator(_host), Expected("a host name or an IP address")]
User = Annotated[str, AfterValidator(_user), Expected("a login name")]
JumpText = Annotated[str, AfterValidator(_jump), Expected("host, user@host or user@host:port, or several with commas")]
Port = Annotated[int, Field(ge=1, le=65535), Expected("a number from 1 to 65535")]
Network = Annotated[str, AfterValidator(network), Expected("a network such as 10.0.0.0/24")]
PortRange = Annotated[
    tuple[int, int],
    BeforeValidator(_port_range),
    Expected("a range of at least 32 ports from 1024 to 65535, such as 29500-29600"),
]
Root = Annotated[str, AfterValidator(_root), Expected("a directory of its own, absolute or below ~/")]
PathBelow = Annotated[
    str,
    Field(min_length=1),
    AfterValidator(_below),
    Expected("a path below the run's directory"),
    AfterValidator(_portable),
]
Url = Annotated[str, Field(pattern=r"^(https?|file)://[^\s\x00-\x1f]+$"), Expected("a URL (https://…)")]

# Upper bounds keep a slip of the finger from asking for a billion ranks, or for more seconds than a socket can wait.
Count = Annotated[int, Field(ge=1, le=9999), Expected("a whole number from 1 to 9999")]
CountFromZero = Annotated[int, Field(ge=0, le=9999), Expected("a whole number from 0 to 9999")]
Seconds = Annotated[float, Field(ge=0, le=86400), Expected("a number of seconds from 0 to 86400")]
LongSeconds = Annotated[float, Field(ge=0, le=31_622_400), Expected("a number of seconds from 0 to 31622400")]
HeartbeatSeconds = Annotated[
    float, AfterValidator(_heartbeat), Field(le=86400), Expected("0 or a number of seconds from 5 to 86400")
]
PositiveSeconds = Annotated[float, Field(gt=0, le=86400), Expected("a number of seconds above 0, up to 86400")]
Ppn = Annotated[Literal["auto", "numa"] | Count, Expected("auto, numa or a whole number from 1 to 9999")]
AutoOrCount = Annotated[Literal["auto"] | Count, Expected("auto or a whole number from 1 to 9999")]
AutoOrBool = Annotated[Literal["auto"] | bool, Expected("auto, true or false")]

VersionText = Annotated[str, AfterValidator(_version_or_range), Expected("a version (2.13.0) or a range ('>=2.8,<3')")]
RequirementText = Annotated[
    str, AfterValidator(_requirement), Expected("a requirement as pip reads it (evaluate, 'seqeval>=1.2')")
]
PythonText = Annotated[
    str, Field(pattern=r"^[^-\s\x00-\x1f][^\x00-\x1f]*$"), Expected("a version (3.11), a name (python3.11) or a path")
]
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), Expected("a variable name of letters, digits and '_'")]
