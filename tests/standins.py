"""Stand-in wheels: real names, versions and module layouts, but content made for the tests of cluster-train.

The wheels of the retired Intel stack lie on indexes that cannot be reached from everywhere, and torch is large. What a test
wants to know of them is how they are chosen, installed, imported and sourced; for that these do. Nothing in them computes,
and each says in its summary and in its modules that it is a stand-in.

    retired_stack(tmp_path / "wheels", "2.8.0")                  # everything that `backend: ccl` asks for, but uv
    build(broken(bindings("2.8.0")), tmp_path / "wheels")        # raises at import
    build_sdist("evaluate", "0.4.0", tmp_path / "wheels")        # only a source package

The real uv and the real Intel MPI are taken from a wheelhouse that has them: `borrow(wheelhouse, "uv", directory)`.
"""

from __future__ import annotations

import base64
import hashlib
import io
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

THIS_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
SUMMARY = "STAND-IN made for the tests of cluster-train; not the real package"
IMPI_VERSION = "2021.18.1"

SETVARS = """\
# {summary}.
# Like the real one it takes options, is written for bash, talks on stdout, and finds its directory by itself.
for option in "$@"; do echo "unknown option $option" >&2; return 1; done
prefix=$(cd "$(dirname "${{BASH_SOURCE[0]}}")/.." && pwd -P)
echo ":: initializing the stand-in in $prefix"
export CCL_ROOT="$prefix"
export CCL_CONFIGURATION=cpu
export FI_PROVIDER_PATH="$prefix/lib/prov"
export LD_LIBRARY_PATH="$prefix/lib${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
export PATH="$prefix/bin:$PATH"
"""

MPIEXEC = """\
#!/bin/sh
# {summary}.
case "$1" in
  -V | --version | -version) echo "Intel(R) MPI Library for Linux* OS, Version {version} (STAND-IN made for tests)" ;;
  *) echo "this mpiexec.hydra is a stand-in made for tests: it starts nothing" >&2; exit 1 ;;
esac
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """A wheel to be built.

    Args:
        name, version: as the real package calls itself; a local version such as "2.8.0+cpu" is kept.
        files: path inside the wheel to text.
        scripts: name below the environment's bin/ to text.
        requires: Requires-Dist lines; those of an extra end in `; extra == "torch"`.
        extras: the extras it provides.
        tag: wheel tag.
    """

    name: str
    version: str
    files: Mapping[str, str]
    scripts: Mapping[str, str] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    tag: str = "py3-none-any"


def package(name: str, version: str, module: str | None = None, code: str = "", **more: object) -> StandIn:
    """Any package with one module, whose `__version__` is its version."""
    module = module or name.replace("-", "_")
    source = f'"""{SUMMARY}."""\n\n__version__ = "{version}"\n{code}'
    return StandIn(name=name, version=version, files={f"{module}/__init__.py": source}, **more)  # type: ignore[arg-type]


def torch(version: str = "2.8.0+cpu") -> StandIn:
    """A torch with the module tree that is imported for checks: torch, torch.distributed."""
    made = package("torch", version, code="from torch import distributed as distributed\n")
    distributed = f'"""{SUMMARY}."""\n\n\ndef is_available():\n    return True\n'
    return replace(made, files={**made.files, "torch/distributed/__init__.py": distributed})


def cuda_torch(version: str = "2.8.0") -> tuple[StandIn, StandIn]:
    """A torch as the main index serves it for x86-64, and the CUDA library that it drags in."""
    return replace(torch(version), requires=("nvidia-cublas-cu12",)), package("nvidia_cublas_cu12", "12.8.4.1")


NEEDS_SETVARS = """
if os.environ.get("CCL_ROOT") != os.path.dirname(os.path.abspath(__file__)):
    raise ImportError("libccl.so.1: cannot open shared object file (stand-in that needs its setvars.sh)")
"""


def bindings(
    version: str = "2.8.0", *, python: str = THIS_PYTHON, module: str | None = None, needs_setvars: bool = False
) -> StandIn:
    """oneccl_bind_pt: its module (torch_ccl before 1.12), `cwd` (since 1.12) and env/setvars.sh.

    Args:
        version: "2.8.0", or with a local part as on Intel's index, "2.8.0+cpu".
        python: the one CPython that the wheel is for, "3.11".
        needs_setvars: raises ImportError unless its setvars.sh has been sourced.
    """
    old = tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < (1, 12)
    module = module or ("torch_ccl" if old else "oneccl_bindings_for_pytorch")
    code = "import os\n\nimport torch\n" + ("" if old else "\ncwd = os.path.dirname(os.path.abspath(__file__))\n")
    code += NEEDS_SETVARS if needs_setvars else ""
    tag = "cp" + python.replace(".", "")
    made = package(
        "oneccl_bind_pt", version, module, code, tag=f"{tag}-{tag}{'m' if tag in ('cp36', 'cp37') else ''}-linux_x86_64"
    )
    return replace(made, files={**made.files, f"{module}/env/setvars.sh": SETVARS.format(summary=SUMMARY)})


def ipex(version: str = "2.8.0") -> StandIn:
    """intel_extension_for_pytorch, which like the real one refuses a torch of another major.minor at import."""
    code = (
        "import torch\n\n"
        'if torch.__version__.split(".")[:2] != __version__.split(".")[:2]:\n'
        '    raise ImportError("intel_extension_for_pytorch " + __version__ + " does not fit torch " + torch.__version__)\n'
    )
    return package("intel_extension_for_pytorch", version, code=code)


def transformers(version: str = "5.0.0", *, torch_from: str = "2.2") -> StandIn:
    """transformers; its extra `torch` tells the oldest torch that it works with, as the real one's does."""
    return package("transformers", version, requires=(f'torch>={torch_from}; extra == "torch"',), extras=("torch",))


def accelerate(version: str = "1.12.0", *, torch_from: str = "2.0.0") -> StandIn:
    """accelerate, which requires a torch."""
    return package("accelerate", version, requires=(f"torch>={torch_from}",))


def datasets(version: str = "4.0.0") -> StandIn:
    """datasets, with the one dependency that torch has an opinion on."""
    return package("datasets", version, requires=("numpy>=1.17",))


def impi(version: str = IMPI_VERSION) -> StandIn:
    """impi-rt with an mpiexec.hydra that tells a version and starts nothing."""
    script = MPIEXEC.format(summary=SUMMARY, version=version.rpartition(".")[0])
    return StandIn(name="impi_rt", version=version, files={}, scripts={"mpiexec.hydra": script})


def broken(standin: StandIn, error: str = "undefined symbol: _ZN3c10 (stand-in that is meant to be broken)") -> StandIn:
    """The same wheel, but its module raises ImportError."""
    spoilt = {
        path: f'"""{SUMMARY}."""\n\nraise ImportError({error!r})\n' if path.endswith("/__init__.py") else text
        for path, text in standin.files.items()
    }
    return replace(standin, files=spoilt)


def retired_stack(
    directory: Path, torch_version: str = "2.8.0", *, python: str = THIS_PYTHON, mpi: bool = True
) -> tuple[Path, ...]:
    """All that `backend: ccl` asks for with this torch, too new releases beside the fitting ones; without uv.

    Args:
        mpi: False leaves Intel MPI out, for a test that borrows the real one.
    """
    bindings_version = {"1.12.1": "1.12.100", "2.0.1": "2.0.100"}.get(torch_version, torch_version)
    standins = [
        *(torch(f"{torch_version}+cpu"), bindings(f"{bindings_version}+cpu", python=python), ipex(f"{torch_version}+cpu")),
        *(
            transformers("4.20.1", torch_from="1.0"),
            transformers("4.52.4", torch_from="2.1"),
            transformers("5.0.0"),
            transformers("5.24.0", torch_from="2.4"),
        ),
        *(accelerate("0.20.3", torch_from="1.6.0"), accelerate("1.12.0"), accelerate("1.15.0")),
        *(datasets(), package("numpy", "1.21.6"), package("numpy", "2.2.0"), *((impi(),) if mpi else ())),
    ]
    if torch_version == "1.12.1":
        standins.append(bindings("1.12.0+cpu", python=python))  # which must never be taken
    return tuple(build(standin, directory) for standin in standins)


def build(standin: StandIn, directory: Path) -> Path:
    """Write the wheel into a directory, which is made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{standin.name.replace('-', '_')}-{standin.version}"
    path = directory / f"{stem}-{standin.tag}.whl"
    info, data = f"{stem}.dist-info", f"{stem}.data"
    members = dict(standin.files)
    members |= {f"{data}/scripts/{name}": text for name, text in standin.scripts.items()}
    members[f"{info}/METADATA"] = _metadata(standin)
    members[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: standins\nRoot-Is-Purelib: true\nTag: {standin.tag}\n"
    members[f"{info}/RECORD"] = "".join(_recorded(name, text) for name, text in members.items()) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in members.items():
            member = zipfile.ZipInfo(name)  # a fixed date: the same content is the same wheel
            member.external_attr = (0o100755 if "/scripts/" in name else 0o100644) << 16
            wheel.writestr(member, text)
    return path


def build_sdist(name: str, version: str, directory: Path) -> Path:
    """A source package, for which no wheel is made."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{version}.tar.gz"
    content = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {SUMMARY}\n".encode()
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo(f"{name}-{version}/PKG-INFO")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return path


def borrow(wheelhouse: Path, name: str, directory: Path) -> Path | None:
    """The real wheel of a package, linked from a wheelhouse (`<sha256>/<file>.whl`) into a directory; None where it has none."""
    found = sorted(wheelhouse.glob(f"*/{name.replace('-', '_')}-*.whl"))
    if not found:
        return None
    directory.mkdir(parents=True, exist_ok=True)
    place = directory / found[-1].name
    if not place.exists():
        place.symlink_to(found[-1])
    return place


def _metadata(standin: StandIn) -> str:
    lines = ["Metadata-Version: 2.1", f"Name: {standin.name}", f"Version: {standin.version}", f"Summary: {SUMMARY}"]
    lines += [f"Requires-Dist: {one}" for one in standin.requires]
    lines += [f"Provides-Extra: {one}" for one in standin.extras]
    return "\n".join(lines) + "\n"


def _recorded(name: str, text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(text.encode())}\n"
