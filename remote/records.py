"""The files of a run and the launch document: how they are written, read and named.

Records are JSON objects, private to their owner (0600), written beside and renamed: a reader sees the old one or the
new one, never half of one. Text from JSON may hold lone surrogates (`surrogateescape`): they stand for bytes that are
not UTF-8 and reach files, arguments and environments as those very bytes, whatever the locale.
"""

import base64
import binascii
import json
import os
import signal
import zlib

LAUNCH_VARIABLE = "CLUSTER_TRAIN_LAUNCH"
RUN_VARIABLE = "CLUSTER_TRAIN_RUN_ID"
RANK_VARIABLE = "CLUSTER_TRAIN_RANK"

LAUNCH_KEYS = frozenset(
    [
        "run_id",
        "run_dir",
        "agent_dir",
        "python",
        "job_dir",
        "argv",
        "env",
        "world_size",
        "grace_s",
        "bootstrap",
        "ranks",
    ]
)

# What mpirun passes on to the ranks without ending them itself: SIGTERM, but Open MPI only SIGUSR1 and SIGUSR2.
STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")

# Linux takes no string above 128 KiB in an environment (MAX_ARG_STRLEN); the variable's name is part of that string.
LAUNCH_LIMIT_BYTES = 128 * 1024 - 64


def encode_launch(document: dict) -> str:
    """The launch document as one ASCII word for an environment variable.

    Raises ValueError where it is larger than Linux allows.
    """
    text = json.dumps(document, separators=(",", ":"), sort_keys=True)
    word = base64.urlsafe_b64encode(zlib.compress(text.encode("ascii"), 9)).decode("ascii")
    if len(word) > LAUNCH_LIMIT_BYTES:
        raise ValueError(
            "arguments and environment of this run take %d bytes (compressed), and Linux carries %d in one variable: "
            "put long values into a file under job.sync" % (len(word), LAUNCH_LIMIT_BYTES)
        )
    return word


def decode_launch(word: str) -> dict:
    """The launch document from `encode_launch`'s word; ValueError where it is not one."""
    try:
        document = json.loads(zlib.decompress(base64.urlsafe_b64decode(word.encode("ascii"))).decode("ascii"))
    except (UnicodeError, binascii.Error, zlib.error, ValueError) as error:
        raise ValueError("%s is damaged: %s" % (LAUNCH_VARIABLE, error))
    if not isinstance(document, dict) or document.get("schema") != 1:
        raise ValueError("%s is no launch document of schema 1" % LAUNCH_VARIABLE)
    missing = LAUNCH_KEYS - set(document)
    if missing:
        raise ValueError("%s lacks %s" % (LAUNCH_VARIABLE, ", ".join(sorted(missing))))
    if document.get("stop_signal", "SIGTERM") not in STOP_SIGNALS:
        raise ValueError("stop_signal is %r, not one of %s" % (document["stop_signal"], ", ".join(STOP_SIGNALS)))
    return document


def stop_signal(launch: dict) -> int:
    """The signal that tells mpirun, and through it every rank, to stop."""
    return getattr(signal, launch.get("stop_signal", "SIGTERM"))


def to_bytes(text: str) -> bytes:
    """Text from JSON as the bytes it stands for."""
    return text.encode("utf-8", "surrogateescape")


def to_text(data: bytes) -> str:
    """Bytes as text for JSON; `to_bytes` gives the same bytes back."""
    return data.decode("utf-8", "surrogateescape")


def to_path(text: str) -> str:
    """A path from JSON as Python's own functions want it, also where the locale is not UTF-8."""
    return os.fsdecode(to_bytes(text))


def rank_file(run_dir: str, rank: int, suffix: str) -> str:
    """The path of one of a rank's files; suffix: `json`, `exit.json`, `out` or `err`."""
    return os.path.join(run_dir, "rank-%d.%s" % (rank, suffix))


def attempt_file(run_dir: str, attempt: int) -> str:
    """The path of the record of one attempt at a run, which `resume.py` makes."""
    return os.path.join(run_dir, "attempt-%d.json" % attempt)


def complain(text: str) -> None:
    """Tell people, on stderr, what could not be done; unbuffered, as that may be a file on the very disk that is full."""
    try:
        os.write(2, to_bytes("%s\n" % text))
    except OSError:
        pass


def make_private_dir(path: str) -> None:
    """A directory only its owner can enter, with its parents; fine if it is there already."""
    old_mask = os.umask(0o077)
    try:
        os.makedirs(path, exist_ok=True)
    finally:
        os.umask(old_mask)


def write_text(path: str, text: str, mode: int = 0o600) -> None:
    """Write a whole file: beside, then renamed."""
    beside = "%s.%d.new" % (path, os.getpid())
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as stream:
            stream.write(to_bytes(text))
            os.fchmod(stream.fileno(), mode)
        os.rename(beside, path)
    except OSError:
        os.unlink(beside)
        raise


def private(path: str, flags: int) -> int:
    """An opener for `open` that makes files which only their owner can read."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def put_away(path: str) -> None:
    """Rename one rank's record after its attempt; another rank, or another node on a shared disk, may be faster."""
    record = read_record(path) or {}
    name = "attempt-%d.%s" % (record.get("attempt", 1), os.path.basename(path))
    try:
        os.rename(path, os.path.join(os.path.dirname(path), name))
    except FileNotFoundError:
        pass


def write_record(path: str, record: dict) -> None:
    """Write one record."""
    write_text(path, json.dumps(record, sort_keys=True) + "\n")


def read_record(path: str) -> dict:
    """One record, or None where there is none (yet)."""
    try:
        with open(path, "rb") as stream:
            return json.loads(stream.read().decode("ascii"))
    except FileNotFoundError:
        return None
