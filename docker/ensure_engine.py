#!/usr/bin/env python3
"""Have on this machine what the ssh and cluster tests need: sshd, ssh-keygen, a Docker engine that answers, compose.

What is there already is used as it is. What is missing is installed from Debian's packages, and an engine is started,
where that can be done: as root, with apt-get. Elsewhere the message says what to install. No system service is started
or enabled to run now; `dockerd` runs on its own until the machine stops.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from docker_engine import DockerError, ensure_base_image, find_compose, find_docker, last_lines, run, say

POLICY = Path("/usr/sbin/policy-rc.d")  # asked by every package that wants to start its service; 101 is "no"


def main() -> int:
    os.environ["PATH"] += os.pathsep + "/usr/sbin:/sbin"  # where sshd, dockerd and debootstrap lie
    try:
        _install(_missing_packages())
        docker = _ensure_engine()
        compose = find_compose(docker)
        _ensure_base_image(docker)
    except DockerError as error:
        print(f"ensure_engine.py: {error}", file=sys.stderr)  # noqa: T201
        return 1
    say(f"ready: {shutil.which('sshd')}, {docker}, {' '.join(compose)}")
    return 0


def _missing_packages() -> list[str]:
    missing = []
    if shutil.which("sshd") is None or shutil.which("ssh-keygen") is None:
        missing.append("openssh-server")
    docker = shutil.which("docker")
    if docker is None:
        missing.append("docker.io")
    if not _has_compose(docker):
        missing.append("docker-compose")
    return missing


def _has_compose(docker: str | None) -> bool:
    try:
        find_compose(docker or "docker")
    except DockerError:
        return False
    return True


def _ensure_engine() -> str:
    """The client of an engine that answers; one is started where none does and we are allowed to."""
    try:
        return find_docker()
    except DockerError:
        if os.environ.get("DOCKER_HOST") or os.geteuid() != 0:
            raise  # another machine's engine, or another user's to start
    if shutil.which("dockerd") is None:
        _install(["docker.io"])
    return _start_engine()


def _start_engine(limit_s: float = 60) -> str:
    place = Path(tempfile.mkdtemp(prefix="cluster-train-dockerd-"))
    log = place / "dockerd.log"
    with log.open("wb") as output:
        # Its own pid file: that of an engine which was killed may name a process that now is something else.
        argv = ("dockerd", "--pidfile", str(place / "dockerd.pid"))
        engine = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd="/", start_new_session=True
        )
    say(f"started dockerd, process {engine.pid}, log {log}")
    deadline = time.monotonic() + limit_s
    while engine.poll() is None and time.monotonic() < deadline:
        try:
            return find_docker()
        except DockerError:
            time.sleep(0.2)
    engine.terminate()
    raise DockerError(f"dockerd does not start on this machine; {log} ends with: {last_lines(log.read_text())}")


def _ensure_base_image(docker: str) -> None:
    try:
        ensure_base_image(docker)
    except DockerError:
        if shutil.which("debootstrap") is not None:
            raise
        _install(["debootstrap"])
        ensure_base_image(docker)


def _install(packages: Sequence[str]) -> None:
    """Install Debian packages without starting what they bring. Nothing to do for none."""
    if not packages:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise DockerError(f"missing here: {' '.join(packages)} (Debian's names); install them, then run this again")
    say(f"installing {' '.join(packages)}")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    run(("apt-get", "update", "-q"), environment=quiet, limit_s=300)
    wanted = [name for package in packages for name in _spelled_today(package)]
    with _no_service_starts():
        run(("apt-get", "install", "-y", "-q", "--no-install-recommends", *wanted), environment=quiet, limit_s=900)


def _spelled_today(package: str) -> tuple[str, ...]:
    """The package under the names that later releases split or renamed it to."""
    if package == "docker.io" and _apt_knows("docker-cli"):
        return ("docker.io", "docker-cli")
    if package == "docker-compose" and _apt_knows("docker-compose-v2"):
        return ("docker-compose-v2",)
    return (package,)


def _apt_knows(package: str) -> bool:
    try:
        run(("apt-cache", "show", "--no-all-versions", package), limit_s=60)
    except DockerError:
        return False
    return True


@contextmanager
def _no_service_starts() -> Iterator[None]:
    if POLICY.exists():
        yield  # this machine has a policy of its own
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()


if __name__ == "__main__":
    sys.exit(main())
