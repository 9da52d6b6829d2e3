"""Resolve a stack with pip into a lock, and keep its wheels in the cache of the machine that we run on.

pip is asked, not replaced: its own configuration, certificate authorities, indexes and constraints hold. It resolves for
the nodes' interpreter and platform, which need not be ours.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name

from orchestrator.actions import oneccl
from orchestrator.errors import ResolveError
from orchestrator.planning.compat import BINDINGS, facts, oneccl_requirement
from orchestrator.planning.wheels import INSTALLER, StackRequest, refuse_cuda, requirements_of
from orchestrator.specs.lock import Lock, LockedWheel, Target

RESOLVE_TIMEOUT_S = 1800

# pip evaluates environment markers for the interpreter it runs on even when told of another (pypa/pip issue 11664), so the
# target's own marker values are put in their place.
PIP_FOR_TARGET = """
import json, sys
from pip._vendor.packaging import markers
environment = json.loads(sys.argv.pop(1))
markers.default_environment = lambda: dict(environment)
from pip._internal.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


class OneCCLMissingError(ResolveError):
    """The wheels that oneCCL's is made of cannot be had; `why` in one line."""

    def __init__(self, error: ResolveError) -> None:
        super().__init__(
            f"backend ccl: oneCCL cannot be had: {error.message}",
            advice="`backend: gloo` needs nothing of it; or put its wheels into a directory and name that in "
            f"`stack.find_links`: {', '.join(facts()['oneccl']['files'])}",
        )
        self.why = " ".join(error.message.split())


def cache_dir() -> Path:
    """Where wheels and locks are kept: $XDG_CACHE_HOME/cluster-train."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cluster-train"


def wheel_path(wheel: LockedWheel) -> Path:
    """A wheel's place in the cache, by its hash."""
    return cache_dir() / "wheels" / wheel.sha256 / wheel.filename


def write_cached(path: Path, text: str) -> None:
    """Replace a file of the cache as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.part")
    temporary.write_text(text)
    temporary.replace(path)


def lock_for(request: StackRequest, say: Callable[[str], None], *, fetch: bool = True) -> Lock:
    """The lock that answers a request, with `fetch` its wheels in the cache; resolved anew only when there is none yet.

    Raises ResolveError when there is no solution, a CUDA build was picked, or the indexes cannot be reached.
    """
    path = _lock_path(request)
    stored = lock = _stored(path)
    if lock is None or (fetch and not _can_be_had(lock, request, say)):
        say(f"resolving {len(request.choice.requirements)} requirements for {request.target.label}")
        lock = _resolve(request)
    if fetch:
        have_wheels(lock, request, say)
    if lock != stored:
        write_cached(path, json.dumps(lock.to_json(), indent=1))
    return lock


def known_lock(request: StackRequest) -> Lock | None:
    """The lock that answers a request, where it was resolved before and all its wheels are in the cache."""
    lock = _stored(_lock_path(request))
    return lock if lock and all(wheel_path(wheel).exists() for wheel in lock.all_wheels) else None


def have_wheels(lock: Lock, request: StackRequest, say: Callable[[str], None]) -> None:
    """Bring a lock's wheels that the cache lacks into it, by exact version and hash; raises ResolveError where one is gone."""
    missing = [wheel for wheel in lock.all_wheels if not wheel_path(wheel).exists()]
    if missing:
        say(f"fetching {len(missing)} wheels")
        _fetch(request, missing)


def sound_wheels(wheels: Sequence[LockedWheel], request: StackRequest, say: Callable[[str], None]) -> None:
    """Read those wheels in the cache that are about to be sent, and fetch again what is not what its hash says.

    Costs a second for 600 MB: not to be called for what nobody needs. Raises ResolveError where a wheel cannot be had again.
    """
    with ThreadPoolExecutor() as pool:  # hashing frees the interpreter for another thread
        hashes = pool.map(sha256_of, [wheel_path(wheel) for wheel in wheels])
        damaged = [wheel for wheel, found in zip(wheels, hashes, strict=True) if found != wheel.sha256]
    if damaged:
        say(f"damaged in the cache, fetched again: {', '.join(wheel.filename for wheel in damaged)}")
        _fetch(request, damaged)


def _can_be_had(lock: Lock, request: StackRequest, say: Callable[[str], None]) -> bool:
    """Whether all wheels of an earlier resolution are in the cache or can still be fetched, which is then done."""
    try:
        have_wheels(lock, request, say)
    except ResolveError as error:
        say(f"the wheels resolved earlier are not to be had any more: {error.message}")
        return False
    return True


def _lock_path(request: StackRequest) -> Path:
    return cache_dir() / "locks" / f"{request.digest}.json"


def _stored(path: Path) -> Lock | None:
    try:
        return Lock.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none yet, or of another version: it is resolved anew


def _resolve(request: StackRequest) -> Lock:
    request = _with_oneccl(request)
    with tempfile.TemporaryDirectory(prefix="cluster-train-") as scratch:
        report = Path(scratch) / "report.json"
        arguments = ["install", "--dry-run", "--ignore-installed", "--report", str(report), "--target", scratch]
        _pip(request, [*arguments, *requirements_of(request)])
        items = json.loads(report.read_text())["install"]
    wheels = tuple(sorted((_locked(item) for item in items), key=lambda wheel: wheel.name))
    refuse_cuda(wheels)
    return Lock(
        requirements=request.choice.requirements,
        target=request.target.label,
        wheels=tuple(wheel for wheel in wheels if wheel.name != INSTALLER),
        installer=next((wheel for wheel in wheels if wheel.name == INSTALLER), None),
    )


def has_made_oneccl() -> bool:
    """Whether our own wheel of oneCCL is in the cache."""
    return (_made() / oneccl.filename()).exists()


def _with_oneccl(request: StackRequest) -> StackRequest:
    """The request, with a directory in which our own wheel of oneCCL is found; it is made there when it is asked for first.

    Raises OneCCLMissingError.
    """
    if oneccl_requirement() not in request.choice.requirements:
        return request
    made = _made()
    if not has_made_oneccl():
        made.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made, prefix=".sources-") as scratch:
            pins = Path(scratch) / "requirements.txt"
            pins.write_text(oneccl.pins())
            try:
                _pip(request, ["download", "--no-deps", "--dest", scratch, "--require-hashes", "-r", str(pins)])
                oneccl.make_wheel(oneccl.sources_in(Path(scratch)), made)
            except ResolveError as error:
                raise OneCCLMissingError(error) from None
    return replace(request, find_links=(*request.find_links, str(made)))


def _made() -> Path:
    return cache_dir() / "made"


def _locked(item: Mapping[str, Any]) -> LockedWheel:
    url: str = item["download_info"]["url"]
    metadata = item["metadata"]
    return LockedWheel(
        name=canonicalize_name(metadata["name"]),
        version=metadata["version"],
        filename=_filename(url),
        sha256=item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256") or _hash_of_url(url),
        source=re.sub(r"//[^/@]*@", "//", url),
    )


def _filename(url: str) -> str:
    return unquote(urlsplit(url).path.rsplit("/", 1)[-1])


def _hash_of_url(url: str) -> str:
    """A `find_links` directory gives no hash: the file is at hand and is read."""
    parts = urlsplit(url)
    if parts.scheme != "file":
        raise ResolveError(
            f"the index gives no SHA-256 for {url}", advice="download it into a directory and name that in `find_links`"
        )
    return sha256_of(Path(unquote(parts.path)))


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as content:
        for block in iter(lambda: content.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def _fetch(request: StackRequest, wheels: Iterable[LockedWheel]) -> None:
    """Bring wheels into the cache, each checked against its hash by pip and moved to its place when whole."""
    wheels = list(wheels)
    request = _with_oneccl(request)
    root = cache_dir() / "wheels"
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".fetch-") as scratch:
        pins = Path(scratch) / "requirements.txt"
        pins.write_text("".join(f"{w.name}=={w.version} --hash=sha256:{w.sha256}\n" for w in wheels))
        downloads = Path(scratch) / "downloads"
        _pip(request, ["download", "--no-deps", "--dest", str(downloads), "--require-hashes", "-r", str(pins)])
        for wheel in wheels:
            place = wheel_path(wheel)
            place.parent.mkdir(exist_ok=True)
            (downloads / wheel.filename).replace(place)


def _pip(request: StackRequest, arguments: list[str]) -> None:
    """Run pip for the request's target; raises ResolveError with what pip said."""
    with tempfile.TemporaryDirectory(prefix="cluster-train-pip-") as scratch:
        log = Path(scratch) / "log"
        command = [
            *[sys.executable, "-c", PIP_FOR_TARGET, json.dumps(dict(request.target.markers))],
            *[arguments[0], "--quiet", "--log", str(log), "--no-input", "--disable-pip-version-check"],
            *["--only-binary", ":all:", *_target_options(request.target)],
            *[word for place in request.find_links for word in ("--find-links", _find_links(place))],
            *[word for index in request.extra_index for word in ("--extra-index-url", index)],
            *arguments[1:],
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=RESOLVE_TIMEOUT_S, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            raise ResolveError(
                f"pip found no answer in {RESOLVE_TIMEOUT_S} s",
                advice="can this machine reach its package index? `find_links` needs none",
            ) from None
        if done.returncode != 0:
            raise _explained(done.stderr, _unreachable(log, request), request.target)


def _find_links(place: str) -> str:
    """A place as pip is given it; raises ResolveError for a directory that is not there, which pip would only warn of."""
    if "://" in place and not place.startswith("file://"):
        return place
    path = Path(unquote(urlsplit(place).path) if "://" in place else place).expanduser().absolute()
    if not path.exists():
        raise ResolveError(f"find_links: {path} does not exist", advice="correct `stack.find_links` in the inventory")
    return str(path)


def _unreachable(log: Path, request: StackRequest) -> list[str]:
    """The indexes and pages that pip could not connect to, each with the reason, from its own log."""
    found: dict[str, str] = {}
    for url, why in re.findall(r"Could not fetch URL (\S+): (.*)", log.read_text(errors="replace") if log.exists() else ""):
        if "connection error" in why or "SSL" in why:
            plain = re.sub(r"//[^/@]*@", "//", url)
            places = [re.sub(r"//[^/@]*@", "//", place).rstrip("/") for place in (*request.find_links, *request.extra_index)]
            index = plain.rstrip("/").rpartition("/")[0]
            reason = re.search(r"\[Errno -?\d+\] ([^')\"]+)", why)
            place = next((place for place in places if f"{plain}/".startswith(f"{place}/")), index)
            found.setdefault(place, (reason.group(1) if reason else why[:100]).removesuffix(" - skipping"))
    return [f"{place} ({why})" for place, why in found.items()]


def _target_options(target: Target) -> list[str]:
    version = target.python_version.replace(".", "")
    options = ["--python-version", target.python_version, "--implementation", target.implementation]
    own_abi = f"cp{version}m" if version in ("36", "37") else f"cp{version}"
    options += ["--abi", own_abi, "--abi", "abi3", "--abi", "none"]
    return options + [word for platform in target.platforms for word in ("--platform", platform)]


def _explained(stderr: str, unreachable: Sequence[str], target: Target) -> ResolveError:
    """pip's refusal as an error: its own words, less its noise, and what to do."""
    _, changed, which = stderr.partition("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES")
    if changed:
        named = [re.sub(r" \(from .*?\)", "", line).rstrip(":") for line in which.splitlines()[1:] if line.strip()]
        return ResolveError(
            "what lies at its source is not what was locked:\n" + "\n".join(named[:12]),
            advice="it is damaged, or was replaced under the same version: put the right file there, or write a new lock",
        )
    said = [line for line in stderr.splitlines() if line.strip() and not line.startswith(("WARNING: Location", "[notice]"))]
    errors = [line for line in said if line.startswith("ERROR:")] or said[-5:]
    told = f"pip found no set of wheels for {target.label}:\n    " + "\n    ".join(errors[:12])
    if unreachable:
        return ResolveError(
            f"cannot be reached from here: {', '.join(unreachable)}; {told}",
            advice="put the wheels into a directory and name it in the inventory: `stack: {find_links: [DIR]}`",
        )
    if any(BINDINGS in line for line in errors):
        advice = (
            f"{BINDINGS} lies on Intel's indexes, not on the main one: name one of them in `stack.extra_index`, or a "
            "directory that holds the wheel in `stack.find_links`; `backend: gloo` needs neither"
        )
    else:
        advice = "relax or correct the versions in the inventory's `stack`; only wheels are taken, never source packages"
    return ResolveError(told, advice=advice)
