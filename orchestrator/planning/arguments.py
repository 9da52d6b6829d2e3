"""The script's own arguments, in the words that the installed Transformers knows.

The public guides' command lines name flags that came and went. Where a script builds its arguments from
`TrainingArguments`, each flag of FLAGS that the installed release does not know is replaced by what it meant, and each
replacement is told in one line. Everything else passes byte for byte: other flags, abbreviated ones (what they stand for
depends on all options of the script), whatever follows a bare `--`, and all arguments of other scripts.

What is not on the command line (a backend named in the script's code, a missing CPU flag) is remote/bootstrap.py's part.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.utils import canonicalize_name
from packaging.version import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of TrainingArguments that not every release knows.

    Args:
        name: the field's name, without dashes.
        since: the first Transformers release that knows it; None: all that are supported.
        until: the last one; None: the newest too.
        switch: takes no value, or one of yes/true/t/y/1/no/false/f/n/0; other flags take exactly one value.
        successor: the flag that means the same to the releases which do not know this one; "" where there is none.
        value: what the successor of a switch is given.
        needs: the distribution without which the flag cannot work.
        idle_since: the first release that takes the flag and does nothing for it.
        meaning: why nothing is passed where there is no successor.
    """

    name: str
    since: Version | None = None
    until: Version | None = None
    switch: bool = False
    successor: str = ""
    value: str = ""
    needs: str = ""
    idle_since: Version | None = None
    meaning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """The arguments to pass to the script, and one line for each that was replaced."""

    argv: tuple[str, ...]
    notes: tuple[str, ...]


_V4 = Version("4.57.6")  # the last release before 5.0.0
_ON_CPU = "the nodes train on their CPUs"
_AUTOCAST = "PyTorch's own autocast is the only one"

# Read from the wheels: the fields of `TrainingArguments` in 4.28.1, 4.29.0, 4.31.0, 4.32.0, 4.36.2, 4.40.2, 4.41.0, 4.45.2,
# 4.46.0, 4.46.3, 4.47.0, 4.50.3, 4.56.2, 4.57.0, 4.57.6, 5.0.0, 5.1.0, 5.2.0, 5.3.0 and 5.24.0. Three rows end at the last
# release that was seen to have the flag (4.50.3 before 4.56.2, 5.3.0 before 5.24.0); in between the successor is right as well.
FLAGS: tuple[Flag, ...] = (
    # Which device, which backend.
    Flag(name="no_cuda", until=_V4, switch=True, successor="use_cpu", meaning=_ON_CPU),
    Flag(name="use_cpu", since=Version("4.32.0"), switch=True, successor="no_cuda", meaning=_ON_CPU),
    Flag(name="use_mps_device", until=_V4, switch=True, meaning=_ON_CPU),
    Flag(name="xpu_backend", until=Version("4.31.0"), successor="ddp_backend"),
    Flag(name="ddp_backend", since=Version("4.29.0"), successor="xpu_backend"),
    # Speed.
    Flag(
        name="use_ipex",
        until=Version("4.56.2"),
        switch=True,
        needs="intel-extension-for-pytorch",
        idle_since=Version("4.53.0"),  # see `ipex_limits` in compat.yaml
        meaning="the model trains on PyTorch's own CPU kernels",
    ),
    Flag(name="jit_mode_eval", until=_V4, switch=True, meaning="evaluation runs without TorchScript"),
    Flag(name="half_precision_backend", until=_V4, meaning=_AUTOCAST),
    Flag(name="fp16_backend", until=_V4, meaning=_AUTOCAST),
    Flag(name="fp16_opt_level", until=_V4, meaning=_AUTOCAST),
    # Data, schedule and optimizer.
    Flag(name="per_gpu_train_batch_size", until=_V4, successor="per_device_train_batch_size"),
    Flag(name="per_gpu_eval_batch_size", until=_V4, successor="per_device_eval_batch_size"),
    Flag(
        name="group_by_length",
        until=Version("5.1.0"),
        switch=True,
        successor="train_sampling_strategy",
        value="group_by_length",
    ),
    Flag(name="warmup_ratio", until=Version("5.3.0"), successor="warmup_steps"),  # since 5.0.0 a ratio where below 1
    Flag(name="adafactor", until=_V4, switch=True, successor="optim", value="adafactor"),
    # Evaluation and output.
    Flag(name="evaluation_strategy", until=Version("4.50.3"), successor="eval_strategy"),
    Flag(name="eval_strategy", since=Version("4.41.0"), successor="evaluation_strategy"),
    Flag(name="include_inputs_for_metrics", until=_V4, switch=True, successor="include_for_metrics", value="inputs"),
    Flag(name="overwrite_output_dir", until=_V4, switch=True, meaning="the output directory is written to as it is"),
    Flag(name="save_safetensors", until=_V4, switch=True, meaning="weights are always saved as safetensors"),
    Flag(name="logging_dir", until=Version("5.3.0"), meaning="set TENSORBOARD_LOGGING_DIR in job.env for that"),
)
CCL_REFUSED_SINCE = Version("5.1.0")  # the choices of --ddp_backend no longer list ccl

_BACKEND_FLAGS = frozenset({"ddp_backend", "xpu_backend"})
_REPLACEABLE_BACKENDS = frozenset({"ccl", "mpi"})  # the CPU backends that a stack may lack; every torch has gloo
_BY_OPTION = {option: flag for flag in FLAGS for option in (f"--{flag.name}", f"--{flag.name.replace('_', '-')}")}
_PARSERS = ("TrainingArguments", "HfArgumentParser", "TrlParser")  # TRL's is built on HfArgumentParser
_ON = frozenset({"yes", "true", "t", "y", "1"})  # HfArgumentParser's words
_OFF = frozenset({"no", "false", "f", "n", "0"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stack:
    """What a translation depends on."""

    transformers: Version
    distributions: frozenset[str]
    backend: str


@dataclass(frozen=True, slots=True)
class _Part:
    """Words of the command line that belong together: an option with its value if it has one, or any other word."""

    written: tuple[str, ...]
    flag: Flag | None = None
    value: str | None = None


@dataclass(frozen=True, slots=True)
class _Replacement:
    """What is passed instead, and why."""

    given: tuple[str, ...]
    why: str


def translate(argv: Sequence[str], *, script_text: str, versions: Mapping[str, str], backend: str) -> Translation:
    """Replace the flags that the installed Transformers does not know by what they meant.

    Args:
        argv: the script's own arguments, without its path.
        script_text: the script's source; flags that it defines itself are its own business.
        versions: distribution name -> version, of all that the ranks' environment holds.
        backend: the torch.distributed backend of this run: "gloo", "ccl" or "mpi".
    """
    installed: dict[str, str] = {canonicalize_name(name): version for name, version in versions.items()}
    if "transformers" not in installed or not reads_training_arguments(script_text):
        return Translation(argv=tuple(argv), notes=())
    stack = _Stack(transformers=Version(installed["transformers"]), distributions=frozenset(installed), backend=backend)
    own = _own_flags(script_text)
    given: list[str] = []
    notes: list[str] = []
    for part in _parts(argv):
        replacement = _replace(part.flag, part.value, stack) if part.flag and part.flag.name not in own else None
        given += replacement.given if replacement else part.written
        if replacement:
            notes.append(f"{' '.join(part.written)}: {replacement.why}")
    return Translation(argv=tuple(given), notes=tuple(dict.fromkeys(notes)))


def with_precision(argv: Sequence[str], *, bf16: bool, script_text: str) -> Translation:
    """Arguments that train in bfloat16 or not, whatever was written: `job.bf16: true` or `false`.

    Other scripts than Transformers' are left as they are: what their options mean is not known.
    """
    written = any(word == "--bf16" or word.startswith("--bf16=") for word in argv)
    if written == bf16 or not reads_training_arguments(script_text):
        return Translation(argv=tuple(argv), notes=())
    if bf16:
        return Translation(argv=("--bf16", *argv), notes=("job.bf16 is true: passed --bf16",))
    kept = [word for index, word in enumerate(argv) if not _belongs_to_bf16(argv, index)]
    return Translation(argv=tuple(kept), notes=("job.bf16 is false: left out --bf16",))


def reads_training_arguments(script_text: str) -> bool:
    """Whether a script builds its command line from Transformers' TrainingArguments."""
    return any(parser in script_text for parser in _PARSERS)


def _belongs_to_bf16(argv: Sequence[str], index: int) -> bool:
    word = argv[index]
    follows = index > 0 and argv[index - 1] == "--bf16" and word.lower() in _ON | _OFF
    return follows or word == "--bf16" or word.startswith("--bf16=")


def _own_flags(script_text: str) -> frozenset[str]:
    """The names in FLAGS that the script itself defines: as an annotated field, or spelled out as an option."""
    try:
        nodes = tuple(ast.walk(ast.parse(script_text)))
    except (SyntaxError, ValueError):  # written for another Python: then a mere mention counts
        return frozenset(flag.name for option, flag in _BY_OPTION.items() if option.lstrip("-") in script_text)
    fields = {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return frozenset(fields) | {flag.name for option, flag in _BY_OPTION.items() if option in words}


def _parts(argv: Sequence[str]) -> Iterator[_Part]:
    """Cut `argv` into parts.

    To argparse a word that is exactly an option is that option wherever it stands before a bare `--`, never a value.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    position = 0
    while position < end:
        word = argv[position]
        option, attached, value = word.partition("=")
        flag = _BY_OPTION.get(option)
        position += 1
        if flag is None or attached:
            yield _Part((word,), flag, value)
        elif position < end and _is_value(argv[position], flag):
            yield _Part((word, argv[position]), flag, argv[position])
            position += 1
        else:
            yield _Part((word,), flag)
    yield _Part(tuple(argv[end:]))


def _is_value(word: str, flag: Flag) -> bool:
    return word.lower() in _ON | _OFF if flag.switch else not word.startswith("-")


def _replace(flag: Flag, value: str | None, stack: _Stack) -> _Replacement | None:
    """What takes the flag's place; None where it passes as written."""
    if value is None and not flag.switch:
        return None  # the value is missing: for the script to complain of
    if value is not None and flag.name in _BACKEND_FLAGS:
        return _replace_backend(flag, value, stack)
    if not _knows(stack, flag):
        reason = _unknown(stack, flag)
    elif flag.needs and flag.needs not in stack.distributions:
        reason = f"{flag.needs} is not installed"
    elif flag.idle_since and stack.transformers >= flag.idle_since:
        reason = f"transformers {stack.transformers} takes it and does nothing"
    else:
        return None
    if flag.switch:
        return _replace_switch(flag, "true" if value is None else value.lower(), reason)
    if not flag.successor:
        return _Replacement((), f"{reason}; left out: {flag.meaning}")
    return _instead(reason, *_option(flag.successor, value or ""))


def _replace_backend(flag: Flag, value: str, stack: _Stack) -> _Replacement | None:
    name = flag.name if _knows(stack, flag) else flag.successor
    backend = stack.backend if value in _REPLACEABLE_BACKENDS else value
    if backend == "ccl" and stack.transformers >= CCL_REFUSED_SINCE:
        why = f"transformers {stack.transformers} refuses the value; left out: this run's backend is ccl all the same"
        return _Replacement((), why)
    unknown = [_unknown(stack, flag)] if name != flag.name else []
    other = [f"the backend of this run is {backend}"] if backend != value else []
    return _instead(" and ".join(unknown + other), *_option(name, backend)) if unknown or other else None


def _replace_switch(flag: Flag, state: str, reason: str) -> _Replacement | None:
    if state not in _ON | _OFF:
        return None
    if state in _ON and flag.successor:
        return _instead(reason, f"--{flag.successor}", *([flag.value] if flag.value else []))
    return _Replacement((), f"{reason}; left out: {flag.meaning or 'it is off without it'}")


def _instead(reason: str, *given: str) -> _Replacement:
    return _Replacement(given, f"{reason}; passed {' '.join(given)} instead")


def _option(name: str, value: str) -> tuple[str, ...]:
    """An option and its value, as one word where argparse would take the value for another option."""
    return (f"--{name}={value}",) if value.startswith("-") else (f"--{name}", value)


def _knows(stack: _Stack, flag: Flag) -> bool:
    return (flag.since or stack.transformers) <= stack.transformers <= (flag.until or stack.transformers)


def _unknown(stack: _Stack, flag: Flag) -> str:
    gone = flag.until is not None and stack.transformers > flag.until
    return f"transformers {stack.transformers} {'no longer knows it' if gone else 'does not know it yet'}"
