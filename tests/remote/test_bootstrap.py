"""`remote/bootstrap.py` runs a script as `python` would, and makes CPU training scripts one job without editing them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from interpreters import every_interpreter
from one_machine import BOOTSTRAP, REPOSITORY, free_ports

from orchestrator.planning.arguments import translate

SCRIPTS = REPOSITORY / "tests" / "scripts"

GUIDE_IMPORTS = """
import intel_extension_for_pytorch as ipex
import oneccl_bindings_for_pytorch
import torch_ccl
"""

# Scripts whose whole behaviour must be that of `python SCRIPT`: exit code, stdout, stderr.
ORDINARY = {
    "what the script sees of itself": """
        import sys, inspect
        print(sys.argv, sys.path, __name__, __file__, __spec__, __package__, __doc__, type(__loader__).__name__)
        print(sorted(globals()), __builtins__, sys.modules["__main__"].__dict__ is globals())
        def function(): pass
        print(inspect.getsource(function), function.__module__, inspect.getfile(function))
    """,
    "a docstring and annotations": '''
        """What it does."""
        number: int = 3
        print(__doc__, __annotations__)
    ''',
    "an import from its own directory": "import beside; print(beside.__file__)",
    "exit 0": "raise SystemExit",
    "exit 3": "import sys; sys.exit(3)",
    "exit with a text": "import sys; sys.exit('nothing to do')",
    "exit without cleaning up": "import os; print('so far'); os._exit(5)",
    "an exception": """
        def fail():
            raise ValueError("wrong")
        fail()
    """,
    "a chain of exceptions": """
        try:
            {}["key"]
        except KeyError as error:
            raise RuntimeError("worse") from error
    """,
    "an exception from an import": "import beside_broken",
    "a module that is missing": "import no_such_module_anywhere",
    "a syntax error": "print('never')\nif True print(1)",
    "another encoding": "# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))",
    "an interrupt": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(10)",
    "its own excepthook": """
        import sys, traceback
        sys.excepthook = lambda kind, error, trace: print("mine", kind, error, traceback.extract_tb(trace))
        raise ValueError("wrong")
    """,
    "threads and atexit after the exception": """
        import atexit, threading
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: print("thread")).start()
        raise ValueError("wrong")
    """,
    "classes that pickle": """
        import pickle
        class Thing: pass
        print(type(pickle.loads(pickle.dumps(Thing()))) is Thing, Thing.__module__)
    """,
}

PROCESSES = (
    GUIDE_IMPORTS
    + """
import multiprocessing, sys

class Thing:
    pass

def work(thing):
    return type(thing).__name__, __name__, sys.argv[1:], sys.path[0]

if __name__ == "__main__":
    for method in "fork", "spawn", "forkserver":
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, *pool.apply(work, [Thing()]))
"""
)


def write(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text), encoding="latin-1")
    return path


def run(
    *command: object, interpreter: Path = Path(sys.executable), cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [interpreter, "-u", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **env},
        stdin=subprocess.DEVNULL,
    )


# A script runs as if python had been given it.


@pytest.mark.parametrize("text", ORDINARY.values(), ids=ORDINARY.keys())
def test_a_script_runs_as_python_runs_it(text: str, tmp_path: Path) -> None:
    """Exit code, stdout and stderr are those of `python SCRIPT`, to the byte."""
    script = write(tmp_path / "script.py", text)
    write(tmp_path / "beside.py", "")
    write(tmp_path / "beside_broken.py", "def f(): raise OSError('broken')\nf()")
    arguments = [script, "--flag", "two words", "*", "é", ""]

    plain, booted = run(*arguments, cwd=tmp_path), run(BOOTSTRAP, *arguments, cwd=tmp_path)

    assert (booted.returncode, booted.stdout, booted.stderr) == (plain.returncode, plain.stdout, plain.stderr)


@every_interpreter
def test_every_supported_python_runs_a_script(interpreter: Path, tmp_path: Path) -> None:
    """What a script sees of itself, its traceback and its exit code are the same under each Python from 3.6."""
    text = ORDINARY["what the script sees of itself"] + ORDINARY["an exception"]
    script = write(tmp_path / "script.py", text)

    plain, booted = (run(*words, script, "one", interpreter=interpreter) for words in ([], [BOOTSTRAP]))

    assert plain.returncode == 1
    assert (booted.returncode, booted.stdout, booted.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_an_interrupt_ends_the_process_by_its_signal(tmp_path: Path) -> None:
    """An interrupted script dies of SIGINT, so that its parent can tell."""
    script = write(tmp_path / "script.py", ORDINARY["an interrupt"])

    assert run(BOOTSTRAP, script).returncode == -signal.SIGINT


def test_a_linked_script_finds_the_modules_beside_its_target(tmp_path: Path) -> None:
    """As with `python LINK`, sys.path starts with the directory of the file that the link leads to."""
    (tmp_path / "real").mkdir()
    write(tmp_path / "real" / "beside.py", GUIDE_IMPORTS)
    write(tmp_path / "real" / "script.py", "import beside; print(__file__)")
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "script.py")

    answer = run(BOOTSTRAP, tmp_path / "link.py")

    assert (answer.returncode, answer.stdout) == (0, f"{tmp_path / 'link.py'}\n")


def test_a_safe_path_stays_safe(tmp_path: Path) -> None:
    """With PYTHONSAFEPATH the script's directory is not put on sys.path, as python itself does not."""
    script = write(tmp_path / "script.py", "import sys; print(sys.path)")

    assert run(BOOTSTRAP, script, PYTHONSAFEPATH="1").stdout == run(script, PYTHONSAFEPATH="1").stdout


def test_the_agent_directory_is_not_importable(tmp_path: Path) -> None:
    """What is shipped to the nodes does not shadow a script's own modules."""
    script = write(tmp_path / "script.py", "import probe")

    assert "No module named 'probe'" in run(BOOTSTRAP, script).stderr


def test_a_missing_script_is_named() -> None:
    """A script that is not there ends with python's own code, 2, and its path."""
    answer = run(BOOTSTRAP, "/nowhere/train.py")

    assert answer.returncode == 2
    assert "there is no script /nowhere/train.py" in answer.stderr


@every_interpreter
def test_new_processes_run_the_script_with_the_same_hooks(interpreter: Path, tmp_path: Path) -> None:
    """fork, spawn and forkserver all work in a script whose imports are answered by stand-ins; the notes come once."""
    script = write(tmp_path / "script.py", PROCESSES)

    answer = run(BOOTSTRAP, script, "one", interpreter=interpreter)

    names = {"fork": "__main__", "spawn": "__mp_main__", "forkserver": "__mp_main__"}
    expected = [f"{method} Thing {name} ['one'] {tmp_path}" for method, name in names.items()]
    assert answer.stdout.splitlines() == expected, answer.stderr
    assert answer.stderr.count("is not installed") == 3


def test_a_script_without_torch_starts_fast(tmp_path: Path) -> None:
    """Less than 0.1 s more than python needs, and nothing of the training stack is loaded."""
    heavy = ["torch", "transformers", "accelerate", "numpy", "multiprocessing"]
    script = write(tmp_path / "script.py", f"import sys; print([name for name in {heavy} if name in sys.modules])")

    def fastest(*words: object) -> float:
        return min(timed(*words) for _ in range(5))

    def timed(*words: object) -> float:
        start = time.perf_counter()
        assert run(*words, script).stdout == "[]\n"
        return time.perf_counter() - start

    assert fastest(BOOTSTRAP) - fastest() < 0.1


# Stand-ins for the retired packages.


def test_stand_ins_answer_the_scripts_imports(tmp_path: Path) -> None:
    """The guides' imports work in the script and in the modules beside it; each is told once, on rank 0."""
    write(tmp_path / "beside.py", GUIDE_IMPORTS)
    script = write(tmp_path / "script.py", GUIDE_IMPORTS + "import beside, importlib; importlib.reload(beside)")

    first, second = (run(BOOTSTRAP, script, RANK=rank) for rank in "01")

    assert (first.returncode, second.returncode, second.stderr) == (0, 0, "")
    assert first.stderr.splitlines() == [
        "cluster-train: intel_extension_for_pytorch is not installed: its optimize() leaves the model as it is",
        "cluster-train: oneccl_bindings_for_pytorch is not installed: the script trains on gloo without it",
        "cluster-train: torch_ccl is not installed: the script trains on gloo without it",
    ]


def test_the_optimizer_of_the_stand_in_returns_what_it_was_given(tmp_path: Path) -> None:
    """`ipex.optimize` has ipex's two shapes: the model, or the model and its optimizer."""
    calls = "ipex.optimize('m'), ipex.optimize('m', optimizer='o', dtype=None, level='O1'), optimize('m', inplace=True)"
    imports = "import intel_extension_for_pytorch as ipex\nfrom intel_extension_for_pytorch import optimize\n"
    script = write(tmp_path / "script.py", f"{imports}print({calls})")

    assert run(BOOTSTRAP, script).stdout == "m ('m', 'o') m\n"


def test_what_a_stand_in_lacks_is_explained(tmp_path: Path) -> None:
    """Any other attribute raises an AttributeError that says why."""
    script = write(tmp_path / "script.py", "import intel_extension_for_pytorch as ipex; ipex.llm.optimize('m')")

    assert run(BOOTSTRAP, script).stderr.splitlines()[-1] == (
        "AttributeError: intel_extension_for_pytorch is not installed, and cluster-train's stand-in has no llm"
    )


def test_libraries_are_not_fooled(tmp_path: Path) -> None:
    """A library that tries the import, or anybody who only looks for the package, is told that it is not there."""
    (tmp_path / "site").mkdir()
    write(tmp_path / "site" / "library.py", "try: import torch_ccl\nexcept ImportError: print('not there')")
    looking = "import importlib.util, library; print(importlib.util.find_spec('oneccl_bindings_for_pytorch'))"
    (tmp_path / "job").mkdir()
    script = write(tmp_path / "job" / "script.py", looking)

    answer = run(BOOTSTRAP, script, PYTHONPATH=str(tmp_path / "site"))

    assert (answer.stdout, answer.stderr) == ("not there\nNone\n", "")


def test_an_installed_package_is_used(tmp_path: Path) -> None:
    """Where the package is installed, nothing stands in for it."""
    (tmp_path / "site").mkdir()
    write(tmp_path / "site" / "torch_ccl.py", "print('the real one')")
    (tmp_path / "job").mkdir()
    script = write(tmp_path / "job" / "script.py", "import torch_ccl")

    answer = run(BOOTSTRAP, script, PYTHONPATH=str(tmp_path / "site"))

    assert (answer.stdout, answer.stderr) == ("the real one\n", "")


def test_a_library_of_an_unknown_version_is_left_alone(tmp_path: Path) -> None:
    """A library without the place that is to be changed still loads, and a line says that it was left as it is."""
    package = tmp_path / "site" / "accelerate"
    package.mkdir(parents=True)
    write(package / "__init__.py", "")
    write(package / "state.py", "answer = 42")
    (tmp_path / "job").mkdir()
    script = write(tmp_path / "job" / "script.py", "import accelerate.state; print(accelerate.state.answer)")

    answer = run(BOOTSTRAP, script, PYTHONPATH=str(tmp_path / "site"))

    assert answer.stdout == "42\n"
    assert answer.stderr.startswith("cluster-train: accelerate.state is left as it is, this version is not known (")


# Two ranks under a real mpiexec train as one job.

SHIM = """
    import os, sys
    os.environ.update(
        RANK=os.environ["PMI_RANK"],
        WORLD_SIZE=os.environ["PMI_SIZE"],
        LOCAL_RANK=os.environ["MPI_LOCALRANKID"],
        LOCAL_WORLD_SIZE=os.environ["MPI_LOCALNRANKS"],
    )
    out = os.open(os.path.join(os.environ["OUTPUT"], os.environ["RANK"] + ".out"), os.O_CREAT | os.O_WRONLY)
    os.dup2(out, 1)
    os.execv(sys.executable, [sys.executable, "-u"] + sys.argv[1:])
"""


class Job:
    """What two ranks of a script printed: `ranks` as parsed JSON, in rank order; `notes`, all of them."""

    def __init__(self, python: Path, directory: Path, words: Sequence[object], settings: Mapping[str, Any]) -> None:
        ports = ",".join(map(str, free_ports(len(words))))
        ended = subprocess.run(
            [python.parent / "mpiexec.hydra", "-n", "2", python, write(directory / "shim.py", SHIM), BOOTSTRAP]
            + [str(word) for word in words],
            capture_output=True,
            text=True,
            timeout=120,
            env={
                "PATH": "/usr/bin:/bin",
                "HOME": os.environ["HOME"],
                "PYTHONPATH": str(directory / "site"),
                "MASTER_ADDR": "127.0.0.1",
                "FORM_PORTS": ports,
                "OUTPUT": str(directory),
                "OMP_NUM_THREADS": "1",
                "CCL_WORKER_COUNT": "1",
                "I_MPI_PIN": "0",
                "CLUSTER_TRAIN_BOOTSTRAP": json.dumps(settings),
            },
        )
        assert ended.returncode == 0, ended.stderr
        self.ranks = [json.loads((directory / f"{rank}.out").read_text().splitlines()[-1]) for rank in (0, 1)]
        self.notes = [line for line in ended.stderr.splitlines() if line.startswith("cluster-train: ")]


GLOO = {"backend": "gloo", "asked_backend": "ccl"}
CCL_REPLACED = "cluster-train: the script asks for the backend ccl, which this stack does not have: using gloo"


@pytest.mark.stack
def test_a_plain_ddp_script_trains_with_any_backend_name(training_python: Path, tmp_path: Path) -> None:
    """ "ccl" and "mpi" become gloo with a line, no name is gloo, all ranks end with the same weights, workers spawn."""
    forms = ["ccl", "default", "gloo", "cpu:gloo", "cpu:ccl", "mpi"]

    job = Job(training_python, tmp_path, [SCRIPTS / "plain_ddp.py", *forms], GLOO)

    assert [rank["rank"] for rank in job.ranks] == [0, 1]
    for rank in job.ranks:
        assert rank["size"] == 2
        assert rank["backends"] == ["gloo", "gloo", "gloo", "cpu:gloo", "cpu:gloo", "gloo"]
    assert job.ranks[0]["weights"] == job.ranks[1]["weights"]
    assert job.notes[2:] == [
        CCL_REPLACED,
        CCL_REPLACED.replace("ccl,", "cpu:ccl,").replace("using gloo", "using cpu:gloo"),
        CCL_REPLACED.replace("ccl,", "mpi,"),
    ]


@pytest.mark.stack
def test_accelerate_joins_the_job_without_a_cpu_flag(training_python: Path, tmp_path: Path) -> None:
    """Accelerator and PartialState are distributed, on the CPU, with the script's time limit, whatever was asked."""
    forms = ["accelerator", "accelerator ccl", "accelerator timeout", "accelerator bf16", "state", "group first"]

    job = Job(training_python, tmp_path, [SCRIPTS / "accelerate_forms.py", *forms], GLOO)

    for rank, results in enumerate(job.ranks):
        assert [result["form"] for result in results] == forms
        for result in results:
            assert (result["size"], result["rank"], result["type"]) == (2, rank, "MULTI_CPU")
            assert (result["device"], result["backend"]) == ("cpu", "gloo")
            assert result["timeout_s"] == (77 if result["form"] == "accelerator timeout" else 1800)
    assert [result["weight"] for result in job.ranks[0]] == [result["weight"] for result in job.ranks[1]]
    assert job.notes == [CCL_REPLACED]


@pytest.mark.stack
def test_trainer_joins_the_job_in_every_form(training_python: Path, tmp_path: Path) -> None:
    """No flag, one flag, ccl in the script's code, bf16, and the guides' own command line: always one job of two."""
    script = SCRIPTS / "trainer_forms.py"
    guide = ["--no_cuda", "--ddp_backend", "ccl", "--use_ipex", "--bf16", "--overwrite_output_dir"]
    tell = "import importlib.metadata as m; print(m.version('transformers'))"
    versions = {"transformers": run("-c", tell, interpreter=training_python).stdout.strip()}
    translated = translate(guide, script_text=script.read_text(), versions=versions, backend="gloo")
    forms = [
        {},
        {"use_cpu": True},
        {"ddp_backend": "gloo", "bf16": True},
        {"ddp_backend": "ccl", "ddp_timeout": 77},
        translated.argv,
    ]

    job = Job(training_python, tmp_path, [script, *map(json.dumps, forms)], GLOO)

    for rank, results in enumerate(job.ranks):
        assert [result["timeout_s"] for result in results] == [1800, 1800, 1800, 77, 1800]
        for result in results:
            assert (result["size"], result["rank"], result["mode"]) == (2, rank, "distributed")
            assert result["backend"] == "gloo"
            assert result["eval_loss"] > 0
    assert [result["checksum"] for result in job.ranks[0]] == [result["checksum"] for result in job.ranks[1]]
    assert job.notes == [CCL_REPLACED]


@pytest.mark.stack
@pytest.mark.parametrize(
    ("name", "forms", "limits_s"),
    [
        ("accelerate_forms.py", ["accelerator", "accelerator timeout", "state"], [55, 77, 55]),
        ("trainer_forms.py", ["{}", '{"ddp_timeout": 77}'], [55, 77]),
    ],
)
def test_the_jobs_time_limit_holds_where_the_script_names_none(
    training_python: Path, tmp_path: Path, name: str, forms: list[str], limits_s: list[int]
) -> None:
    """`ddp_timeout_s` reaches the process group through Accelerate and Transformers; the script's own limit wins."""
    job = Job(training_python, tmp_path, [SCRIPTS / name, *forms], {**GLOO, "ddp_timeout_s": 55.0})
    for results in job.ranks:
        assert [result["timeout_s"] for result in results] == limits_s


@pytest.mark.stack
@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit(-1)", 255, ""),
        ("sys.exit('wrong')", 1, "wrong\n"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
    ],
)
def test_libraries_cannot_abort_a_script_that_has_ended(
    training_python: Path, tmp_path: Path, end: str, code: int, said: str
) -> None:
    """What Python does at its end is done; what a C++ library does after that, which may be to abort, is not."""
    script = write(
        tmp_path / "script.py",
        f"""
        import atexit, ctypes, sys, threading, time
        import torch
        libc = ctypes.CDLL(None)
        libc.on_exit(ctypes.cast(libc.abort, ctypes.c_void_p), None)
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
        print("done")
        {end}
        """,
    )

    answer = run(BOOTSTRAP, script, interpreter=training_python)

    assert (answer.returncode, answer.stdout) == (code, "done\nthread\nat exit\n"), answer.stderr
    assert answer.stderr.endswith(said) and answer.stderr.count("wrong\n") == bool(said)
    assert run(script, interpreter=training_python).returncode == -signal.SIGABRT


@pytest.mark.stack
def test_an_installed_ccl_is_used_by_all(training_python: Path, tmp_path: Path) -> None:
    """Where something installed provides "ccl" and it is the run's backend, scripts that know nothing of it use it."""
    (tmp_path / "site").mkdir()
    write(
        tmp_path / "site" / "oneccl_bindings_for_pytorch.py",
        """
        import torch.distributed as dist
        dist.Backend.register_backend("ccl", lambda *args: dist.ProcessGroupGloo(*args), devices=["cpu"])
        """,
    )
    forms = ["accelerator", "accelerator ccl", "group first"]

    job = Job(training_python, tmp_path, [SCRIPTS / "accelerate_forms.py", *forms], {"backend": "ccl", "asked_backend": "ccl"})

    assert all([result["backend"] for result in results] == ["ccl"] * 3 for results in job.ranks)
    assert job.notes == []


@pytest.mark.stack
def test_a_broken_ccl_says_what_is_missing(training_python: Path, tmp_path: Path) -> None:
    """Bindings that are installed but lack something fail by that name, rather than being passed over."""
    (tmp_path / "site").mkdir()
    write(tmp_path / "site" / "oneccl_bindings_for_pytorch.py", "import something_they_need")
    script = write(tmp_path / "script.py", "import torch.distributed as dist; dist.init_process_group()")

    answer = run(
        BOOTSTRAP,
        script,
        interpreter=training_python,
        PYTHONPATH=str(tmp_path / "site"),
        CLUSTER_TRAIN_BOOTSTRAP='{"backend": "ccl"}',
    )

    assert answer.returncode == 1
    assert answer.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'something_they_need'"
