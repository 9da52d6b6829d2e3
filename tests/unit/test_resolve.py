"""Real pip, real (tiny) wheels in a find_links directory, no index: what becomes the lock, and what is refused."""

from __future__ import annotations

import hashlib
import socket
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import standins

from orchestrator.actions import backend, oneccl, resolve
from orchestrator.actions.lockfile import LockFile
from orchestrator.errors import ProvisionError, ResolveError
from orchestrator.planning.compat import ONECCL, StackChoice, choose_stack, oneccl_requirement
from orchestrator.planning.wheels import StackRequest, refuse_other_lock
from orchestrator.specs.inventory import Stack
from orchestrator.specs.lock import Target

NO_PYTHON_UV = "3.7"  # for which uv is not asked: the test's directory need not hold it


def make_wheel(directory: Path, name: str, version: str = "1.0", requires: Sequence[str] = (), tag: str = "py3-none-any") -> Path:
    path = directory / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as made:
        needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
        made.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        made.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n")
        made.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of wheels, and a cache of this test's own; no index is asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


def request(wheels: Path, *requirements: str, python: str = NO_PYTHON_UV) -> StackRequest:
    return StackRequest(
        choice=StackChoice(backend="gloo", asked_backend=None, requirements=requirements, modules=(), notes=()),
        target=Target(
            python_version=python,
            implementation="cp",
            platforms=("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "linux_x86_64"),
            markers={
                "python_version": python,
                "python_full_version": f"{python}.0",
                "platform_machine": "x86_64",
                "sys_platform": "linux",
                "platform_system": "Linux",
                "os_name": "posix",
                "implementation_name": "cpython",
                "implementation_version": f"{python}.0",
                "platform_python_implementation": "CPython",
                "platform_release": "",
                "platform_version": "",
            },
        ),
        find_links=(str(wheels),),
        extra_index=(),
    )


def test_a_lock_holds_versions_hashes_and_sources_and_the_wheels_are_cached(wheels: Path) -> None:
    """Dependencies are followed; every wheel lies in the cache by its hash; the second time pip is not asked."""
    app = make_wheel(wheels, "app", requires=["lib>=1"])
    make_wheel(wheels, "lib", "1.0")
    newest = make_wheel(wheels, "lib", "2.0")
    said: list[str] = []
    lock = resolve.lock_for(request(wheels, "app"), said.append)
    assert lock.versions == {"app": "1.0", "lib": "2.0"}
    assert [wheel.sha256 for wheel in lock.wheels] == [hashlib.sha256(p.read_bytes()).hexdigest() for p in (app, newest)]
    assert all(resolve.wheel_path(wheel).exists() for wheel in lock.wheels)
    for path in (app, newest):
        path.unlink()  # so that pip would fail if it were asked
    said.clear()
    assert resolve.lock_for(request(wheels, "app"), said.append) == lock and said == []


def test_markers_are_those_of_the_nodes_interpreter(wheels: Path) -> None:
    """A dependency for old Pythons only is taken for a node with an old Python, whatever runs here."""
    make_wheel(wheels, "app", requires=['backport; python_version < "3.8"'])
    make_wheel(wheels, "backport")
    assert sys.version_info >= (3, 10)
    assert "backport" in resolve.lock_for(request(wheels, "app"), print).versions


def test_wheels_fit_the_nodes_platform(wheels: Path) -> None:
    """Of two builds the one that runs on the node's older glibc is taken."""
    make_wheel(wheels, "native", "1.0", tag="cp37-cp37m-manylinux_2_17_x86_64")
    make_wheel(wheels, "native", "2.0", tag="cp37-cp37m-manylinux_2_39_x86_64")
    assert resolve.lock_for(request(wheels, "native"), print).versions["native"] == "1.0"


def test_a_cuda_build_is_refused_before_anything_is_cached(wheels: Path, tmp_path: Path) -> None:
    """What the main index serves as torch for x86-64 needs nvidia-*: refused, with nothing kept."""
    make_wheel(wheels, "torch", "2.13.0", requires=["nvidia-cublas"])
    make_wheel(wheels, "nvidia_cublas")
    with pytest.raises(ResolveError, match="CUDA"):
        resolve.lock_for(request(wheels, "torch==2.13.0"), print)
    assert not (tmp_path / "cache").exists()


def test_a_local_cpu_build_satisfies_the_plain_version(wheels: Path) -> None:
    """torch 2.13.0 in the inventory takes 2.13.0+cpu where there is one."""
    make_wheel(wheels, "torch", "2.13.0+cpu")
    assert resolve.lock_for(request(wheels, "torch==2.13.0"), print).versions == {"torch": "2.13.0+cpu"}


def test_contradictions_are_told_in_pips_words(wheels: Path) -> None:
    """Pins that exclude each other, and a package that only has sources, are errors with what to do."""
    make_wheel(wheels, "lib", "1.0")
    with pytest.raises(ResolveError, match="lib") as refused:
        resolve.lock_for(request(wheels, "lib==1.0", "lib==2.0"), print)
    assert "versions in the inventory" in refused.value.advice
    (wheels / "sourceonly-1.0.tar.gz").write_bytes(b"not opened")
    with pytest.raises(ResolveError, match="sourceonly"):
        resolve.lock_for(request(wheels, "sourceonly"), print)


def test_a_wheel_lost_from_the_cache_is_fetched_again(wheels: Path) -> None:
    """The lock stays; only what is missing is brought back, with the same hash."""
    make_wheel(wheels, "app")
    lock = resolve.lock_for(request(wheels, "app"), print)
    resolve.wheel_path(lock.wheels[0]).unlink()
    assert resolve.lock_for(request(wheels, "app"), print) == lock
    assert resolve.sha256_of(resolve.wheel_path(lock.wheels[0])) == lock.wheels[0].sha256


def test_another_request_is_another_lock(wheels: Path) -> None:
    """What is asked, for which interpreter and from where, names the lock."""
    base = request(wheels, "app")
    assert len({base.digest, request(wheels, "app", "lib").digest, replace(base, extra_index=("https://x/simple",)).digest}) == 3


@pytest.mark.parametrize("damage", [lambda content: content[:50], lambda content: b"x" + content[1:], lambda content: b""])
def test_a_wheel_damaged_in_the_cache_is_named_and_fetched_again(wheels: Path, damage: Callable[[bytes], bytes]) -> None:
    """Cut short, altered or emptied: noticed before it is sent; a sound one beside it is left as it is."""
    for name in ("app", "lib"):
        make_wheel(wheels, name)
    asked = request(wheels, "app", "lib")
    lock = resolve.lock_for(asked, print)
    bad, good = (resolve.wheel_path(wheel) for wheel in lock.wheels)
    bad.write_bytes(damage(bad.read_bytes()))
    before, said = good.stat().st_ino, []
    resolve.sound_wheels(lock.wheels, asked, said.append)
    assert said == ["damaged in the cache, fetched again: app-1.0-py3-none-any.whl"]
    assert [resolve.sha256_of(resolve.wheel_path(wheel)) for wheel in lock.wheels] == [wheel.sha256 for wheel in lock.wheels]
    assert good.stat().st_ino == before
    said.clear()
    resolve.sound_wheels(lock.wheels, asked, said.append)
    assert said == []


def test_a_wheel_that_is_damaged_at_its_source_too_is_never_taken(wheels: Path) -> None:
    """What comes back must have the lock's hash: else it is refused with its name, and nothing takes its place in the cache."""
    source = make_wheel(wheels, "app")
    asked = request(wheels, "app")
    lock = resolve.lock_for(asked, print)
    source.write_bytes(source.read_bytes() + b"x")
    resolve.wheel_path(lock.wheels[0]).unlink()
    with pytest.raises(ResolveError, match="not what was locked") as refused:
        resolve.have_wheels(lock, asked, print)
    assert "app-1.0-py3-none-any.whl" in refused.value.message and lock.wheels[0].sha256 in refused.value.message
    assert not resolve.wheel_path(lock.wheels[0]).exists()


def test_a_wheel_that_was_replaced_is_resolved_anew(wheels: Path) -> None:
    """Without a lock file the last resolution binds nobody: where its wheels are gone, that is said, and pip is asked again."""
    source = make_wheel(wheels, "app")
    asked = request(wheels, "app")
    old = resolve.lock_for(asked, print)
    resolve.wheel_path(old.wheels[0]).unlink()
    source.write_bytes(make_wheel(wheels, "app", requires=["lib"]).read_bytes())
    make_wheel(wheels, "lib")
    said: list[str] = []
    lock = resolve.lock_for(asked, said.append)
    assert set(lock.versions) == {"app", "lib"} and any("not to be had any more" in text for text in said)
    said.clear()
    assert resolve.lock_for(asked, said.append) == lock and said == []


def test_a_lock_brings_its_own_versions_however_new_the_index_is(wheels: Path) -> None:
    """With a lock nothing is resolved: its wheels come by exact version and hash, though newer ones lie beside them."""
    make_wheel(wheels, "app")
    asked = request(wheels, "app")
    lock = resolve.lock_for(asked, print)
    make_wheel(wheels, "app", "2.0")
    resolve.wheel_path(lock.wheels[0]).unlink()
    said: list[str] = []
    resolve.have_wheels(lock, asked, said.append)
    assert said == ["fetching 1 wheels"] and resolve.sha256_of(resolve.wheel_path(lock.wheels[0])) == lock.wheels[0].sha256


def test_the_retired_stack_is_resolved_to_the_patch_version(wheels: Path) -> None:
    """torch 1.12.1 takes oneccl_bind_pt 1.12.100 and never 1.12.0, and a Transformers that works with so old a torch."""
    standins.retired_stack(wheels, "1.12.1", python="3.7")
    choice = choose_stack(Stack(torch="1.12.1", backend="ccl"), python_version="3.7", machine="x86_64")
    versions = resolve.lock_for(replace(request(wheels), choice=choice), print).versions
    assert versions["torch"] == "1.12.1+cpu" and versions["oneccl-bind-pt"] == "1.12.100+cpu"
    assert (versions["transformers"], versions["accelerate"], versions["numpy"]) == ("4.20.1", "0.20.3", "1.21.6")


def test_a_find_links_directory_that_is_not_there_is_refused_before_pip_runs(wheels: Path) -> None:
    """pip would only warn, and then say that there are no such wheels; the path is named instead."""
    for place in (f"{wheels}/typo", f"file://{wheels}/typo"):
        with pytest.raises(ResolveError, match=f"find_links: {wheels}/typo does not exist"):
            resolve.lock_for(replace(request(wheels, "app"), find_links=(str(wheels), place)), print)


def test_an_index_that_cannot_be_reached_is_named_with_the_remedy(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place of the inventory, and one of pip's own configuration; passwords are not shown."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        host = f"127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("PIP_INDEX_URL", f"http://{host}/own/simple")
    places = {"find_links": (f"http://{host}/page/",), "extra_index": (f"http://me:secret@{host}/extra",)}
    with pytest.raises(ResolveError) as refused:
        resolve.lock_for(replace(request(wheels, "app"), **places), print)
    for place in ("own/simple", "page", "extra"):
        assert f"http://{host}/{place} (Connection refused)" in refused.value.message
    assert "find_links: [DIR]" in refused.value.advice and "secret" not in refused.value.message


def test_bindings_that_no_reachable_place_has_are_explained(wheels: Path) -> None:
    """oneccl_bind_pt is not on the main index, which is the likely reason."""
    with pytest.raises(ResolveError, match=r"oneccl_bind_pt==2\.8\.0") as refused:
        resolve.lock_for(request(wheels, "oneccl_bind_pt==2.8.0"), print)
    assert "Intel's indexes" in refused.value.advice and "stack.find_links" in refused.value.advice


def test_oneccl_that_no_reachable_place_has_is_explained(wheels: Path) -> None:
    """Its own wheel is made of three others: which they are is told, and what needs none of them."""
    with pytest.raises(ResolveError, match="backend ccl: oneCCL cannot be had") as refused:
        resolve.lock_for(request(wheels, "cluster-train-oneccl==2022.1.2"), print)
    assert "backend: gloo" in refused.value.advice and "oneccl-cpu==2022.1.2" in refused.value.advice
    assert list((resolve.cache_dir() / "made").iterdir()) == []


def with_oneccl(wheels: Path, asked: str | None) -> StackRequest:
    """A request for one small package and oneCCL, by name or by `backend: auto`."""
    choice = StackChoice(
        backend="ccl", asked_backend=asked, requirements=("app", oneccl_requirement()), modules=("app", ONECCL), notes=()
    )
    make_wheel(wheels, "app")
    return replace(request(wheels), choice=choice)


def put_oneccl_into_cache(directory: Path) -> None:
    """In place of what `oneccl.make_wheel` makes: a wheel of its name with nothing inside."""
    name, version, tag = oneccl.filename().removesuffix(".whl").split("-", 2)
    directory.mkdir(parents=True, exist_ok=True)
    make_wheel(directory, name, version, tag=tag)


def test_where_oneccl_cannot_be_had_auto_is_gloo_and_stays_so(wheels: Path, tmp_path: Path) -> None:
    """Asked for by name that is an error with a remedy; auto says why and goes on, the second time without asking pip."""
    with pytest.raises(ResolveError, match="oneCCL cannot be had") as refused:
        backend.lock_of(with_oneccl(wheels, "ccl"), print, fetch=True)
    assert "oneccl==2022.1.2, oneccl-cpu==2022.1.2, impi-rt==2021.18.1" in refused.value.advice
    auto = with_oneccl(wheels, None)
    lock, met = backend.lock_of(auto, print, fetch=True)
    assert (met.choice.backend, met.choice.modules, list(lock.versions)) == ("gloo", ("app",), ["app"])
    (note,) = met.choice.notes
    assert note.startswith("backend auto: oneCCL cannot be had: ") and "oneccl==2022.1.2" in note and "\n" not in note
    said: list[str] = []
    again = backend.lock_of(auto, said.append, fetch=True)
    assert (again[0], again[1].choice.notes, said) == (lock, (note,), [])
    put_oneccl_into_cache(tmp_path / "cache" / "cluster-train" / "made")  # as `backend: ccl` does once it can
    lock, met = backend.lock_of(auto, print, fetch=True)
    assert met.choice.backend == "ccl" and ONECCL.replace("_", "-") in lock.versions


def test_a_lock_from_before_gives_what_it_says(wheels: Path, tmp_path: Path) -> None:
    """One without oneCCL is followed by auto, on gloo and with the reason; `backend: ccl` is refused with it."""
    auto, asked = with_oneccl(wheels, None), with_oneccl(wheels, "ccl")
    old = LockFile(path=Path("lab.lock"), lock=resolve.lock_for(replace(auto, choice=auto.choice.without_oneccl("")), print))
    followed = backend.as_locked(auto, old)
    refuse_other_lock(old.lock, followed, "lab.lock")
    assert followed.choice.notes == ("backend auto: lab.lock was written without oneCCL; gloo is used instead",)
    with pytest.raises(ProvisionError, match=r"asks for cluster-train-oneccl==2022\.1\.2, the lock does not"):
        refuse_other_lock(old.lock, backend.as_locked(asked, old), "lab.lock")
    put_oneccl_into_cache(tmp_path / "cache" / "cluster-train" / "made")
    new = LockFile(path=Path("lab.lock"), lock=resolve.lock_for(auto, print))
    assert backend.as_locked(auto, new) == auto
