"""Reach a Docker engine with the standard library: its client, its compose command, the base image of the nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BASE_IMAGE = "debian:bookworm-slim"  # the FROM line of Dockerfile
BASE_SUITE = "bookworm"


class DockerError(Exception):
    """What went wrong, and what to do next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A Docker client that reaches its engine, and the compose command that goes with it."""

    docker: str
    compose: tuple[str, ...]


def find_engine() -> Engine:
    docker = find_docker()
    return Engine(docker=docker, compose=find_compose(docker))


def find_docker() -> str:
    """The first `docker` on PATH that gets an answer: a newer client may lie before the one that fits the engine."""
    clients = [path for directory in os.get_exec_path() if (path := shutil.which("docker", path=directory))]
    if not clients:
        raise DockerError("no `docker` on PATH; run `make system` as root on Debian, or install docker.io")
    complaint = ""
    for client in clients:
        try:
            run((client, "version"), limit_s=20)
            return client
        except DockerError as error:
            complaint = complaint or str(error)
    raise DockerError(
        f"no Docker engine answers ({complaint}); run `make system` as root on Debian, start Docker, "
        "or, where permission is denied, add yourself to the group `docker` and log in again"
    )


def find_compose(docker: str) -> tuple[str, ...]:
    """`docker compose` where that client has it, else `docker-compose`."""
    for command in ((docker, "compose"), ("docker-compose",)):
        try:
            run((*command, "version"), limit_s=30)
            return command
        except DockerError:
            continue  # not installed, or broken: the next one
    raise DockerError("neither `docker compose` nor `docker-compose` works; run `make system` as root on Debian, or install one")


def ensure_base_image(docker: str) -> None:
    """Have `BASE_IMAGE` on the engine: there already, or pulled, or made by debootstrap where no registry answers."""
    if _succeeds((docker, "image", "inspect", BASE_IMAGE)):
        return
    say(f"fetching {BASE_IMAGE}")
    try:
        run((docker, "pull", "--quiet", BASE_IMAGE), limit_s=300)
    except DockerError as error:
        if os.geteuid() != 0 or shutil.which("debootstrap") is None:
            raise DockerError(
                f"{error}; where no image registry answers, {BASE_IMAGE} is made from Debian's packages, "
                "which takes root and debootstrap: run `make system` as root on Debian"
            ) from error
        _debootstrap(docker)


def run(argv: Sequence[str], *, environment: Mapping[str, str] | None = None, limit_s: float) -> str:
    """The command's stdout; DockerError with the end of its stderr where it fails or takes longer than `limit_s`."""
    try:
        done = subprocess.run(
            argv,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except OSError as error:
        raise DockerError(f"{argv[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise DockerError(f"{_name(argv)} took longer than {limit_s:g} s") from error
    if done.returncode != 0:
        raise DockerError(f"{_name(argv)} failed: {last_lines(done.stderr or done.stdout)}")
    return done.stdout


def last_lines(text: str, count: int = 5) -> str:
    return " | ".join(line.strip() for line in text.strip().splitlines()[-count:]) or "it printed nothing"


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def _debootstrap(docker: str) -> None:
    say(f"no image registry answers: making {BASE_IMAGE} from Debian's packages (about half a minute)")
    with tempfile.TemporaryDirectory(prefix="cluster-train-base-") as place:
        root, archive = f"{place}/root", f"{place}/root.tar"
        run(("debootstrap", "--variant=minbase", BASE_SUITE, root), limit_s=900)
        run(("tar", "--create", "--file", archive, "--directory", root, "."), limit_s=120)
        run((docker, "import", archive, BASE_IMAGE), limit_s=120)


def _succeeds(argv: Sequence[str]) -> bool:
    try:
        run(argv, limit_s=30)
    except DockerError:
        return False
    return True


def _name(argv: Sequence[str]) -> str:
    """Enough of a command to recognise it in a message."""
    words = [word for word in argv[1:] if not word.startswith("-") and "/" not in word]
    return " ".join((Path(argv[0]).name, *words[:3]))
