"""What a setvars.sh does is told as its effect: for both names of the bindings, on every Python, whatever the script is like."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import standins
from interpreters import every_interpreter

REMOTE = Path(__file__).resolve().parent.parent.parent / "remote"
SCRIPT = "oneccl_bindings_for_pytorch/env/setvars.sh"
ASK = """
import json, sys
sys.path.insert(0, sys.argv[1])
import setvars
print(json.dumps(setvars.effect_in(sys.argv[2], sys.argv[3:])))
"""


def environment(directory: Path, *parts: standins.StandIn, interpreter: str | Path = sys.executable) -> Path:
    """An environment as far as this matters: wheels unpacked, and a bin/python that finds them."""
    site = directory / "site"
    for part in parts:
        with zipfile.ZipFile(standins.build(part, directory / "wheels")) as wheel:
            wheel.extractall(site)
    python = directory / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{interpreter}" "$@"\n')
    python.chmod(0o755)
    return directory


def asked(at: Path, *modules: str, interpreter: str | Path = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run([interpreter, "-c", ASK, REMOTE, at, *modules], capture_output=True, text=True, check=False)


def effect_of(at: Path, *modules: str, interpreter: str | Path = sys.executable) -> Any:
    done = asked(at, *modules, interpreter=interpreter)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def with_script(script: str) -> standins.StandIn:
    """Bindings with another setvars.sh."""
    made = standins.bindings()
    return replace(made, files={**made.files, SCRIPT: script})


@every_interpreter
@pytest.mark.parametrize(("version", "module"), [("2.8.0", "oneccl_bindings_for_pytorch"), ("1.10.0", "torch_ccl")])
def test_the_script_is_found_by_both_names_and_its_effect_told(
    tmp_path: Path, interpreter: Path, version: str, module: str
) -> None:
    """`cwd` tells the directory since 1.12, the module's own before; lists are told as what is added, all else as values."""
    made = environment(tmp_path / "two words", standins.torch(), standins.bindings(version), interpreter=interpreter)
    here = f"{made}/site/{module}"
    assert effect_of(made, "torch", module, interpreter=interpreter) == {
        "module": module,
        "file": f"{here}/env/setvars.sh",
        "set": {"CCL_ROOT": here, "CCL_CONFIGURATION": "cpu", "FI_PROVIDER_PATH": f"{here}/lib/prov"},
        "prepended": {"LD_LIBRARY_PATH": f"{here}/lib", "PATH": f"{here}/bin"},
    }


def test_nothing_is_told_where_there_is_nothing(tmp_path: Path) -> None:
    """A stack without the bindings, bindings that are not meant, and bindings without the script have no effect."""
    bare = standins.bindings()
    bare = replace(bare, files={name: text for name, text in bare.files.items() if not name.endswith(".sh")})
    assert effect_of(environment(tmp_path / "a", standins.torch()), "torch", "oneccl_bindings_for_pytorch") is None
    assert effect_of(environment(tmp_path / "b", standins.torch(), standins.bindings()), "torch") is None
    assert effect_of(environment(tmp_path / "c", standins.torch(), bare), "oneccl_bindings_for_pytorch") is None


def test_bindings_that_import_only_once_sourced_are_found_all_the_same(tmp_path: Path) -> None:
    """Libraries are looked for on LD_LIBRARY_PATH, which is what the script is for."""
    made = environment(tmp_path / "e", standins.torch(), standins.bindings(needs_setvars=True))
    assert effect_of(made, "oneccl_bindings_for_pytorch")["set"]["CCL_ROOT"].endswith("site/oneccl_bindings_for_pytorch")


@pytest.mark.parametrize(
    ("script", "variables", "prepended"),
    [
        ("export A='x=1\n y'\n", {"A": "x=1\n y"}, {}),
        ("export LD_LIBRARY_PATH=$LD_LIBRARY_PATH:/last\n", {}, {"LD_LIBRARY_PATH": "/last"}),
        ("export LD_LIBRARY_PATH=/first:$LD_LIBRARY_PATH:/last\n", {}, {"LD_LIBRARY_PATH": "/first:/last"}),
        ("export CPATH=/only\n", {"CPATH": "/only"}, {}),
        ("unset CPATH HOME; B=2; export C=3\n", {"C": "3"}, {}),
        ("cd /tmp; export A=1; [ -n '' ] && export B=2\n", {"A": "1"}, {}),
        ("export PATH=\n", {"PATH": ""}, {}),
        ("", {}, {}),
        ("[ $# = 0 ] && export GOT_NO_OPTIONS=1; echo noise\n", {"GOT_NO_OPTIONS": "1"}, {}),
    ],
)
def test_scripts_of_any_kind(tmp_path: Path, script: str, variables: dict[str, str], prepended: dict[str, str]) -> None:
    """Only what is exported counts; what the shell sets for itself does not; the last command may fail."""
    made = environment(tmp_path / "e", standins.torch(), with_script(script))
    effect = effect_of(made, "oneccl_bindings_for_pytorch")
    assert (effect["set"], effect["prepended"]) == (variables, prepended)


@pytest.mark.parametrize("end", ["exit 3", "return 1", "if then"])
def test_a_script_that_cannot_be_sourced_is_an_error_in_its_own_words(tmp_path: Path, end: str) -> None:
    """One that ends the shell, that gives up before it sets anything, or that is no shell script."""
    made = environment(tmp_path / "e", standins.torch(), with_script(f"echo no such compiler >&2\n{end}\n"))
    done = asked(made, "oneccl_bindings_for_pytorch")
    assert "SetvarsError" in done.stderr and f"{SCRIPT} cannot be sourced: " in done.stderr, done.stderr
    assert ("syntax error" if end == "if then" else "no such compiler") in done.stderr


def test_the_record_of_an_environment_is_told(tmp_path: Path) -> None:
    """By the command that a launch runs: null where nothing is recorded or installed, an error where it cannot be read."""

    def told(digest: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, REMOTE / "setvars.py", tmp_path, digest]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    effect = {"module": "m", "file": "f", "set": {}, "prepended": {}}
    for digest, record in (("new", json.dumps({"environment": effect})), ("old", "{}"), ("bad", "{")):
        (tmp_path / "envs" / digest).mkdir(parents=True)
        (tmp_path / "envs" / digest / "complete.json").write_text(record)
    assert json.loads(told("new").stdout) == {"effect": effect}
    assert json.loads(told("old").stdout) == json.loads(told("none").stdout) == {"effect": None}
    assert told("bad").returncode == 1 and told("bad").stderr.startswith("setvars: ")


def test_the_installer_records_the_effect_under_the_final_name(tmp_path: Path) -> None:
    """The script runs where the environment is built, and modules are imported with its effect; no path of the making is kept."""
    wheels = []
    for part in (standins.torch(), standins.bindings(needs_setvars=True)):
        built = standins.build(part, tmp_path)
        sha256 = hashlib.sha256(built.read_bytes()).hexdigest()
        place = tmp_path / "root" / "wheelhouse" / sha256 / built.name
        place.parent.mkdir(parents=True)
        built.rename(place)
        wheels.append({"name": part.name, "version": part.version, "sha256": sha256, "filename": built.name})
    plan = {"root": str(tmp_path / "root"), "digest": "d1", "python": sys.executable, "wheels": wheels, "uv": None}
    order = json.dumps({**plan, "verify": ["torch", "oneccl_bindings_for_pytorch"]})
    done = subprocess.run([sys.executable, REMOTE / "install.py"], input=order, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = (tmp_path / "root/envs/d1/complete.json").read_text()
    effect = json.loads(record)["environment"]
    assert Path(effect["file"]).is_file() and effect["set"]["CCL_ROOT"] == str(Path(effect["file"]).parent.parent)
    assert ".building" not in record
