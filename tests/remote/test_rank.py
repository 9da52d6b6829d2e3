"""One rank: it runs as planned or says why not, the script gets exactly what was meant, and its end is on record."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from supervised import LIMIT_S, MpiNode, Node, environment, exits, processes, records, tagged, until

ALONE = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
Begin = Callable[..., "subprocess.Popen[str]"]

# Bytes as Linux takes them in arguments and variables, among them what shells and formats trip over.
awkward = st.one_of(
    st.binary(max_size=20).map(lambda data: data.replace(b"\0", b"")),
    st.text("\n\t\r \"'`$*?\\{}[]()<>|&;!#~%=,é日\U0001f600", max_size=12).map(str.encode),
    st.sampled_from([b"", b"-n", b"--", b"$HOME", b"$(id)", b"*", b"a b", b"%r", b"\xff\xfe", b"x" * 3000]),
)
# A script that keeps what it was given, as bytes.
KEEP = (
    "import json, os, sys\n"
    "given = {'argv': [os.fsencode(word).hex() for word in sys.argv[1:]],\n"
    "         'environ': {name.hex(): value.hex() for name, value in os.environb.items()},\n"
    "         'cwd': os.getcwd(), 'cores': sorted(os.sched_getaffinity(0)), 'script': os.path.abspath(sys.argv[0])}\n"
    "json.dump(given, open('given-%s.json' % os.environ['RANK'], 'w'))\n"
)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "root")


@pytest.fixture
def begin(node: Node) -> Iterator[Begin]:
    """Starts rank.py by itself, as MPI would, and ends what is left of it after the test."""
    started: list[tuple[str, subprocess.Popen[str]]] = []

    def start(launch: dict[str, Any], mpi: dict[str, str] = ALONE, **popen: Any) -> subprocess.Popen[str]:
        argv = [node.python, str(node.agent_dir / "rank.py")]
        env = environment(**mpi, **{records.LAUNCH_VARIABLE: records.encode_launch(launch)})
        process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen)
        started.append((launch["run_id"], process))
        return process

    yield start
    for run_id, process in started:
        process.kill()
        process.communicate()
        node.sweep(run_id, "--patience-s", "0")


def exit_record(node: Node, run_id: str, rank: int = 0) -> dict[str, Any] | None:
    record: dict[str, Any] | None = records.read_record(str(node.run_dir(run_id) / f"rank-{rank}.exit.json"))
    return record


def given_to(node: Node, run_id: str, rank: int = 0) -> dict[str, Any]:
    given: dict[str, Any] = json.loads((node.run_dir(run_id) / "work" / f"given-{rank}.json").read_text())
    return given


def variables(given: dict[str, Any]) -> dict[bytes, bytes]:
    return {bytes.fromhex(name): bytes.fromhex(value) for name, value in given["environ"].items()}


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_a_launch_document_survives_its_way_through_a_variable(value: Any) -> None:
    """Decoding gives what was encoded, whatever text it holds; the word is plain ASCII."""
    document = dict.fromkeys(records.LAUNCH_KEYS, value) | {"schema": 1}
    word = records.encode_launch(document)
    assert word.isascii()
    assert records.decode_launch(word) == document


def test_a_launch_document_too_long_for_linux_is_refused() -> None:
    """The kernel takes 128 KiB in one variable: what is larger is an error that says what to do instead."""
    with pytest.raises(ValueError, match=r"put long values into a file under job\.sync"):
        records.encode_launch({"schema": 1, "env": {"NOISE": os.urandom(120_000).hex()}})


@pytest.mark.parametrize(
    ("mpi", "message"),
    [
        ({}, "no MPI tells this process its rank"),
        ({**ALONE, "PMI_SIZE": "2"}, "ranks in all: 2 instead of 1"),
        ({**ALONE, "MPI_LOCALRANKID": "1"}, "local rank: 1 instead of 0"),
        ({**ALONE, "MPI_LOCALNRANKS": "2"}, "ranks on this node: 2 instead of 1"),
        ({**ALONE, "PMI_RANK": "5"}, "it has no such rank"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"}, "ranks in all: 3 instead of 1"),
        ({"PMIX_RANK": "x"}, "are no numbers"),
    ],
)
def test_a_rank_that_mpirun_misplaced_refuses(node: Node, begin: Begin, mpi: dict[str, str], message: str) -> None:
    """Two ranks on the wrong node, or none that knows its rank: one line, exit code 97, and a record of it."""
    process = begin(node.launch("lost", "raise SystemExit('it ran')", size=1), mpi)
    _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 97
    assert stderr.count("\n") == 1
    assert message in stderr
    if mpi.get("PMI_RANK", "0").isdigit() and mpi and "PMIX_RANK" not in mpi:
        record = exit_record(node, "lost", int(mpi.get("PMI_RANK", "0")))
        assert record is not None
        assert (record["exit_code"], record["stopped"]) == (97, False)
        assert message in record["error"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"argv": ["none.py"]}, "there is no .*none.py on this node: copy the job to it again"),
        ({"agent_dir": "/nowhere"}, "there is no /nowhere/bootstrap.py on this node"),
        ({"python": "/nowhere/bin/python"}, "/nowhere/bin/python could not be started: .*No such file"),
        ({"env": {"A=B": "c"}}, "the environment variable 'A=B' cannot have the value 'c'"),
        ({"env": {"A": 1}}, "the environment variable 'A' cannot have the value 1"),
        ({"env": {"A": "b\0c"}}, "the environment variable 'A' cannot have the value"),
    ],
)
def test_a_rank_that_cannot_start_refuses(node: Node, begin: Begin, change: dict[str, Any], message: str) -> None:
    """What is missing or impossible is named, with exit code 97 and a record of it."""
    process = begin({**node.launch("unable", "", size=1), **change})
    _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 97
    record = exit_record(node, "unable")
    assert record is not None
    assert re.search(message, record["error"])
    assert record["error"] in stderr


def with_rank(launch: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A launch of one rank, that rank changed."""
    return {**launch, "ranks": [{**launch["ranks"][0], **changes}]}


def test_a_rank_on_another_host_refuses(node: Node, begin: Begin) -> None:
    """The plan names the host of each rank; a rank that finds itself elsewhere does not run."""
    process = begin(with_rank(node.launch("astray", "", size=1), hostname="another"))
    assert f"host: {socket.gethostname()} instead of another" in process.communicate(timeout=LIMIT_S)[1]


def test_cores_that_may_not_be_used_are_named(node: Node, begin: Begin) -> None:
    """A core list from another machine is an error, not a rank that runs on other cores than planned."""
    allowed = min(os.sched_getaffinity(0))
    process = begin(with_rank(node.launch("foreign", "", size=1), cores=[allowed, 1000]))
    assert "CPUs [1000], which it may not use here" in process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 97


def test_a_rank_is_bound_to_its_cores(node: Node, begin: Begin) -> None:
    """The script may use the planned cores and no others."""
    core = max(os.sched_getaffinity(0))
    process = begin(with_rank(node.launch("bound", KEEP, size=1), cores=[core]))
    assert process.wait(LIMIT_S) == 0
    assert given_to(node, "bound")["cores"] == [core]


def test_the_environment_is_built_in_order(node: Node, begin: Begin) -> None:
    """The job's variables, then the rank's, then what makes it a rank; MPI's own stay, the launch document goes."""
    launch = node.launch("env", KEEP, size=1, env={"A": "job", "B": "job", "RANK": "7", "PATH": "/job/bin"})
    process = begin(with_rank(launch, env={"B": "rank"}))
    assert process.wait(LIMIT_S) == 0
    found = variables(given_to(node, "env"))
    python_bin = str(Path(node.python).parent)
    expected = {
        "A": "job",
        "B": "rank",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "PATH": f"{python_bin}:/job/bin",
        "VIRTUAL_ENV": str(Path(node.python).parent.parent),
        "PYTHONUNBUFFERED": "1",
        "CLUSTER_TRAIN_RUN_ID": "env",
        "CLUSTER_TRAIN_BOOTSTRAP": '{"backend": "gloo"}',
        "PMI_RANK": "0",
        "HOME": os.environ["HOME"],
    }
    assert {name: found[name.encode()].decode() for name in expected} == expected
    assert records.LAUNCH_VARIABLE.encode() not in found


def test_directories_are_put_before_the_ranks_own(node: Node, begin: Begin) -> None:
    """What a setvars.sh puts into PATH or LD_LIBRARY_PATH goes before what the rank has, not in its place; python stays first."""
    launch = node.launch("prepend", KEEP, size=1, env={"LD_LIBRARY_PATH": "/job/lib", "PATH": "/job/bin"})
    launch["prepend"] = {"LD_LIBRARY_PATH": "/ccl/lib", "PATH": "/ccl/bin", "CCL_ONLY_PATH": "/a:/b"}
    assert begin(launch).wait(LIMIT_S) == 0
    found = variables(given_to(node, "prepend"))
    assert found[b"LD_LIBRARY_PATH"] == b"/ccl/lib:/job/lib" and found[b"CCL_ONLY_PATH"] == b"/a:/b"
    assert found[b"PATH"].decode() == f"{Path(node.python).parent}:/ccl/bin:/job/bin"


def test_the_script_finds_the_jobs_files_and_writes_into_the_run(node: Node, begin: Begin) -> None:
    """Relative paths reach what was synced; what the script writes stays out of the job's directory."""
    source = "print(open('data/train.txt').read()); open('result.txt', 'w').write('done'); print(__file__)"
    launch = node.launch("files", source, size=1)
    job_dir = Path(launch["job_dir"])
    (job_dir / "data").mkdir()
    (job_dir / "data" / "train.txt").write_text("some text")
    process = begin(launch)
    assert process.wait(LIMIT_S) == 0
    assert node.output("files", 0) == f"some text\n{job_dir}/script.py\n"
    assert (node.run_dir("files") / "work" / "result.txt").read_text() == "done"
    assert sorted(path.name for path in job_dir.iterdir()) == ["data", "script.py"]
    assert node.run_dir("files").stat().st_mode & 0o777 == 0o700
    for name in ("rank-0.out", "rank-0.err", "rank-0.json", "rank-0.exit.json"):
        assert (node.run_dir("files") / name).stat().st_mode & 0o777 == 0o600, name


def test_records_tell_who_ran_and_how_it_ended(node: Node, begin: Begin) -> None:
    """Pids, start times, exit code, times, peak memory and CPU seconds are on record."""
    source = "import sys, time\nx = bytearray(80_000_000)\nt = time.process_time()\n"
    source += "while time.process_time() - t < 0.3: pass\nprint('ready'); sys.stdin.read(); time.sleep(0.1); sys.exit(5)"
    process = begin(node.launch("told", source, size=1))
    path = node.run_dir("told") / "rank-0.json"
    until(path.exists, "rank-0.json")
    started = json.loads(path.read_text())
    assert (started["rank"], started["node"], started["hostname"]) == (0, "node0", socket.gethostname())
    assert (started["pid"], started["launcher"]) == (process.pid, None)
    assert processes.is_alive(started["keeper"])
    assert process.wait(LIMIT_S) == 5
    record = exit_record(node, "told")
    assert record is not None
    assert (record["exit_code"], record["signal"], record["ended_by"], record["stopped"]) == (5, None, None, False)
    assert record["pid"] == started["child"]["pid"]
    assert record["started_unix_s"] + 0.3 < record["ended_unix_s"]
    assert record["max_rss_bytes"] > 80_000_000
    assert 0.3 < record["cpu_s"] < 10


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_users_signal_reaches_the_script(node: Node, begin: Begin, number: signal.Signals) -> None:
    """SIGUSR1 and SIGUSR2 are for the script and end nothing by themselves."""
    source = f"import signal\nsignal.signal({int(number)}, lambda *_: print('got it'))\nprint('ready'); signal.pause()"
    process = begin(node.launch("user", source, size=1))
    node.until_all_say("user", "ready", size=1)
    process.send_signal(number)
    assert process.wait(LIMIT_S) == 0
    assert node.output("user", 0) == "ready\ngot it\n"


def test_a_second_interrupt_does_not_wait(node: Node, begin: Begin) -> None:
    """SIGINT gives the script its grace; a second one ends it at once."""
    source = "import signal, time\nsignal.signal(2, lambda *_: print('not yet'))\nprint('ready')\ntime.sleep(60)"
    process = begin(node.launch("interrupted", source, size=1, grace_s=60.0))
    node.until_all_say("interrupted", "ready", size=1)
    process.send_signal(signal.SIGINT)
    node.until_all_say("interrupted", "not yet", size=1)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 128 + signal.SIGKILL
    record = exit_record(node, "interrupted")
    assert record is not None
    assert (record["signal"], record["ended_by"]) == ("SIGKILL", "interrupt")


def test_the_launch_may_name_another_signal_for_a_stop(node: Node, begin: Begin) -> None:
    """Where mpirun ends the ranks itself at SIGTERM (Open MPI), a stop comes as SIGUSR1, and SIGTERM means: it is lost."""
    save = "import signal, sys, time\nsignal.signal(15, lambda *_: (time.sleep(1.5), print('saved'), sys.exit(0)))\n"
    for run_id, number, code in (("asked", signal.SIGUSR1, 0), ("torn", signal.SIGTERM, 128 + signal.SIGKILL)):
        launch = node.launch(run_id, save + "print('ready'); time.sleep(60)", size=1, stop_signal="SIGUSR1")
        process = begin(launch)
        node.until_all_say(run_id, "ready", size=1)
        process.send_signal(number)
        assert process.wait(LIMIT_S) == code
    assert node.output("asked", 0) == "ready\nsaved\n"
    asked, torn = exit_record(node, "asked"), exit_record(node, "torn")
    assert asked is not None
    assert torn is not None
    assert (asked["ended_by"], torn["ended_by"]) == ("stop", "abort")


def test_a_rank_ends_with_its_parent(node: Node, begin: Begin) -> None:
    """Where whatever started rank.py dies, the script is ended and its end recorded."""
    launch = node.launch("orphan", "import time; print('ready'); time.sleep(60)", size=1)
    env = environment(**ALONE, **{records.LAUNCH_VARIABLE: records.encode_launch(launch)})
    outer = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    rank = [node.python, str(node.agent_dir / "rank.py")]
    parent = subprocess.Popen([sys.executable, "-c", outer, *rank], env=env)
    node.until_all_say("orphan", "ready", size=1)
    parent.kill()
    parent.wait()
    until(lambda: exit_record(node, "orphan"), "its record")
    until(lambda: not tagged("orphan"), "its end")
    record = exit_record(node, "orphan")
    assert record is not None
    assert (record["ended_by"], record["stopped"]) == ("orphaned", True)


def test_nothing_that_a_rank_started_outlives_it(node: Node, begin: Begin) -> None:
    """Not even a daemon in a session of its own, without the run's variables and without a parent."""
    daemon = (
        "import os\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork(): os._exit(0)\n"
        "    print(os.getpid())\n"
        "    os.execve('/bin/sleep', ['sleep', '60'], {})\n"
        "os.wait()\n"
        "while not open('../rank-0.out').read(): pass\n"
    )
    process = begin(node.launch("daemon", daemon, size=1))
    assert process.wait(LIMIT_S) == 0
    assert processes.identity(int(node.output("daemon", 0))) is None


def test_a_failing_rank_asks_hydra_to_end_the_job(node: Node, begin: Begin) -> None:
    """The end is on disk before the others are ended; a rank that ends well, or was told to, says nothing to PMI."""
    for run_id, source, message in (
        ("bad", "import sys; sys.exit(3)", b"cmd=abort exitcode=3\n"),
        ("good", "pass", b""),
    ):
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                descriptor = theirs.fileno()
                process = begin(node.launch(run_id, source, size=1), {**ALONE, "PMI_FD": str(descriptor)}, pass_fds=[descriptor])
            assert ours.recv(100) == message
            assert exit_record(node, run_id) is not None
            process.wait(LIMIT_S)


def test_a_rank_whose_mpirun_is_gone_does_not_begin(node: Node, begin: Begin) -> None:
    """hydra may be killed while the rank's interpreter starts: nobody would ever end such a rank."""
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        mpi = {**ALONE, "PMI_FD": str(theirs.fileno())}
        process = begin(node.launch("late", "raise SystemExit('it ran')", size=1), mpi, pass_fds=[theirs.fileno()])
    assert "mpirun has gone already" in process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 97
    (told,) = node.status("late")["ranks"]
    assert (told["rank"], told["node"], told["exit"]["exit_code"]) == (0, "node0", 97)
    record = exit_record(node, "late")
    assert record is not None and (record["ended_by"], record["error"]) == ("orphaned", None)  # it has not failed by itself


def test_pmi_reaches_the_script(node: Node, begin: Begin) -> None:
    """The descriptor that PMI speaks through is open in the script: it may use MPI itself."""
    source = "import os; os.write(int(os.environ['PMI_FD']), b'cmd=init\\n')"
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            descriptor = theirs.fileno()
            begin(node.launch("pmi", source, size=1), {**ALONE, "PMI_FD": str(descriptor)}, pass_fds=[descriptor])
        assert ours.recv(100) == b"cmd=init\n"


def test_a_second_start_is_not_judged_by_the_first(node: Node, begin: Begin) -> None:
    """The printed command may be pasted twice: the first end's record does not stand for the second."""
    launch = node.launch("again", "import os, sys; sys.exit(os.path.exists('been') or open('been', 'w').close() or 4)", size=1)
    assert begin(launch).wait(LIMIT_S) == 4
    assert begin(launch).wait(LIMIT_S) == 1
    record = exit_record(node, "again")
    assert record is not None
    assert record["exit_code"] == 1


@pytest.mark.stack
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(arguments=st.lists(awkward, min_size=20, max_size=40), values=st.lists(awkward, min_size=20, max_size=40))
def test_every_byte_of_arguments_and_environment_reaches_every_rank(
    tmp_path_factory: pytest.TempPathFactory, training_python: Path, arguments: list[bytes], values: list[bytes]
) -> None:
    """Blanks, quotes, newlines, `$`, `*`, non-ASCII and bytes that are no text arrive as they were, also in paths."""
    node = MpiNode(tmp_path_factory.mktemp("bytes") / "a 'b' \"c\" $HOME *\n\u00e9", str(training_python))
    job = {f"JOB_{n}": records.to_text(value) for n, value in enumerate(values)}
    launch = node.launch("bytes", KEEP, *map(records.to_text, arguments), size=2, env=job)
    for plan in launch["ranks"]:
        plan["env"] = {f"RANK_{n}": records.to_text(value) for n, value in enumerate(values)}
    node.start_mpi(launch)
    status = node.until_final("bytes")
    assert exits(status) == [(0, None, None)] * 2, node.output("bytes", 0, "err")
    for rank in range(2):
        given_here = given_to(node, "bytes", rank)
        assert [bytes.fromhex(word) for word in given_here["argv"]] == arguments
        found = variables(given_here)
        for prefix in ("JOB", "RANK"):
            assert [found[f"{prefix}_{n}".encode()] for n in range(len(values))] == values
        assert given_here["cwd"] == str(node.run_dir("bytes") / "work")
        assert given_here["script"] == str(Path(launch["job_dir"]) / "script.py")
