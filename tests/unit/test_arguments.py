"""The script's own arguments are passed in the words that the installed Transformers knows, and otherwise untouched."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from orchestrator.planning.arguments import CCL_REFUSED_SINCE, FLAGS, Flag, Translation, translate

TRAINER = "from transformers import HfArgumentParser, TrainingArguments\n"
NEW, OLD = "5.24.0", "4.28.1"


def translated(*argv: str, **context: Any) -> tuple[str, ...]:
    return translation(*argv, **context).argv


def told(*argv: str, **context: Any) -> tuple[str, ...]:
    return translation(*argv, **context).notes


def translation(
    *argv: str, transformers: str = NEW, backend: str = "gloo", script: str = TRAINER, installed: Sequence[str] = ()
) -> Translation:
    versions = {"transformers": transformers, **dict.fromkeys(installed, "1.0")}
    return translate(argv, script_text=script, versions=versions, backend=backend)


def test_the_guides_command_line_on_a_new_stack() -> None:
    """The documented CPU flags become what they meant, each with a line; the others stay where they are."""
    argv = ["--no_cuda", "--ddp_backend", "ccl", "--use_ipex", "--bf16", "--learning_rate", "3e-5", "--overwrite_output_dir"]

    translation = translate(argv, script_text=TRAINER, versions={"transformers": NEW}, backend="gloo")

    assert translation.argv == ("--use_cpu", "--ddp_backend", "gloo", "--bf16", "--learning_rate", "3e-5")
    assert translation.notes == (
        "--no_cuda: transformers 5.24.0 no longer knows it; passed --use_cpu instead",
        "--ddp_backend ccl: the backend of this run is gloo; passed --ddp_backend gloo instead",
        "--use_ipex: transformers 5.24.0 no longer knows it; left out: the model trains on PyTorch's own CPU kernels",
        "--overwrite_output_dir: transformers 5.24.0 no longer knows it; left out: the output directory is written to as it is",
    )


def test_a_new_command_line_on_an_old_stack() -> None:
    """Flags that came later become the older words for the same."""
    argv = ["--use_cpu", "--ddp_backend", "gloo", "--eval_strategy", "steps"]

    assert translated(*argv, transformers=OLD) == ("--no_cuda", "--xpu_backend", "gloo", "--evaluation_strategy", "steps")
    assert told(*argv, transformers=OLD)[0] == ("--use_cpu: transformers 4.28.1 does not know it yet; passed --no_cuda instead")


@pytest.mark.parametrize(
    ("written", "passed"),
    [
        ("--no_cuda True", "--use_cpu"),
        ("--no_cuda=yes", "--use_cpu"),
        ("--no-cuda", "--use_cpu"),
        ("--no_cuda False", ""),
        ("--no_cuda=0 --bf16", "--bf16"),
        ("--use_ipex=True", ""),
        ("--use_ipex False --fp16", "--fp16"),
        ("--no_cuda --no_cuda", "--use_cpu --use_cpu"),
        ("--ddp_backend=ccl", "--ddp_backend gloo"),
        ("--ddp-backend ccl", "--ddp_backend gloo"),
        ("--ddp_backend mpi", "--ddp_backend gloo"),
        ("--xpu_backend ccl", "--ddp_backend gloo"),
        ("--xpu_backend gloo", "--ddp_backend gloo"),
        ("--evaluation_strategy epoch", "--eval_strategy epoch"),
        ("--jit_mode_eval --use_mps_device", ""),
        ("--per_gpu_train_batch_size 8", "--per_device_train_batch_size 8"),
        ("--warmup_ratio 0.1", "--warmup_steps 0.1"),
        ("--warmup_ratio=-0.1", "--warmup_steps=-0.1"),
        ("--adafactor --group_by_length", "--optim adafactor --train_sampling_strategy group_by_length"),
        ("--adafactor False", ""),
        ("--include_inputs_for_metrics", "--include_for_metrics inputs"),
        ("--logging_dir logs --half_precision_backend cpu_amp", ""),
    ],
)
def test_every_way_to_write_a_flag(written: str, passed: str) -> None:
    """Values with or without "=", dashes for underscores, switches with a value: all are understood, and all are told."""
    assert translated(*written.split()) == tuple(passed.split())
    assert told(*written.split())


@pytest.mark.parametrize(
    "written",
    [
        "--use_cpu --ddp_backend gloo --bf16",  # known as they are
        "--use_cpu False",  # known; whatever it says, bootstrap.py trains on the CPU
        "--ddp_backend nccl",  # nothing that this run could stand in for
        "--ddp_backend",  # incomplete: for the script to complain of
        "--evaluation_strategy --bf16",
        "--no_cuda=maybe",
        "--run_name=--no_cuda",
        "--no_cud --ddp_back ccl",  # abbreviated: what for, only the script's parser knows
        "no_cuda -no_cuda",
        "-- --no_cuda --ddp_backend ccl",
    ],
)
def test_what_is_not_understood_or_needs_nothing_passes(written: str) -> None:
    """These pass word for word, without a line."""
    assert translated(*written.split()) == tuple(written.split())
    assert told(*written.split()) == ()


def test_a_switch_takes_no_other_word_as_its_value() -> None:
    """A word after a switch that is no truth value stays where it is."""
    assert translated("--no_cuda", "data.json", "--use_ipex", "2") == ("--use_cpu", "data.json", "2")


def test_equal_replacements_are_told_once() -> None:
    """A flag that is written twice is replaced twice and told once."""
    assert len(told("--no_cuda", "--bf16", "--no_cuda")) == 1


def test_ipex_is_left_to_a_stack_that_has_it() -> None:
    """--use_ipex stays where both Transformers and IPEX know it, and goes where IPEX is not installed."""
    assert translated("--use_ipex", transformers="4.50.0", installed=("intel_extension_for_pytorch",)) == ("--use_ipex",)
    assert translated("--use_ipex", transformers="4.50.0") == ()
    assert "intel-extension-for-pytorch is not installed" in told("--use_ipex", transformers="4.50.0")[0]


def test_ipex_is_not_promised_by_a_release_that_ignores_it() -> None:
    """From 4.53 on the Trainer takes --use_ipex and does nothing: that is told, not passed on."""
    ipex = ("intel_extension_for_pytorch",)
    assert translated("--use_ipex", transformers="4.52.4", installed=ipex) == ("--use_ipex",)
    assert translated("--use_ipex", transformers="4.53.0", installed=ipex) == ()
    assert told("--use_ipex", transformers="4.56.2", installed=ipex) == (
        "--use_ipex: transformers 4.56.2 takes it and does nothing; left out: the model trains on PyTorch's own CPU kernels",
    )


def test_ccl_stays_where_the_run_has_it() -> None:
    """With ccl as the run's backend the flag passes, or is left out where the parser would refuse its value."""
    assert translated("--ddp_backend", "ccl", transformers="4.50.0", backend="ccl") == ("--ddp_backend", "ccl")
    assert translated("--xpu_backend", "ccl", transformers="4.50.0", backend="ccl") == ("--ddp_backend", "ccl")
    assert translated("--ddp_backend", "ccl", backend="ccl") == ()
    assert told("--ddp_backend", "ccl", backend="ccl") == (
        "--ddp_backend ccl: transformers 5.24.0 refuses the value; left out: this run's backend is ccl all the same",
    )


@pytest.mark.parametrize(
    "script",
    [
        "import argparse\nparser.add_argument('--no_cuda')",
        TRAINER + "parser.add_argument('--no_cuda', action='store_true')",
        TRAINER + "parser.add_argument('--no-cuda', action='store_true')",
        TRAINER + "@dataclass\nclass Arguments:\n    no_cuda: bool = field(default=False)",
        TRAINER + "print 'for another Python', args.no_cuda",
    ],
)
def test_a_scripts_own_flag_is_left_alone(script: str) -> None:
    """A plain argparse script, or a flag that the script defines itself, is none of our business."""
    assert translated("--no_cuda", script=script) == ("--no_cuda",)


def test_reading_a_flag_is_not_defining_it() -> None:
    """A script that reads `training_args.no_cuda` still gets the flag from TrainingArguments."""
    script = TRAINER + "print('see --no_cuda', training_args.no_cuda, training_args.overwrite_output_dir)"

    assert translated("--no_cuda", script=script) == ("--use_cpu",)


def test_a_stack_without_transformers_translates_nothing() -> None:
    """Without Transformers there is nothing to translate for."""
    assert translate(["--no_cuda"], script_text=TRAINER, versions={"torch": "2.13.0"}, backend="gloo").notes == ()


WORDS = st.text(max_size=12)
OPTIONS = [option for flag in FLAGS for option in (f"--{flag.name}", f"--{flag.name.replace('_', '-')}")]


@given(st.lists(WORDS.filter(lambda word: word.partition("=")[0] not in OPTIONS)))
def test_all_other_words_pass_unchanged(argv: list[str]) -> None:
    """Whatever is none of the flags reaches the script byte for byte, in its order, without a line."""
    assert translated(*argv) == tuple(argv)
    assert told(*argv) == ()


@given(st.lists(WORDS | st.sampled_from(OPTIONS)))
def test_scripts_of_others_get_their_words_unchanged(argv: list[str]) -> None:
    """A script that does not use TrainingArguments gets every word as it was."""
    assert translated(*argv, script="import argparse") == tuple(argv)


def known(flag: Flag, version: Version) -> bool:
    return (flag.since is None or version >= flag.since) and (flag.until is None or version <= flag.until)


def parser_of(version: Version) -> argparse.ArgumentParser:
    """A parser with the options of that release, as HfArgumentParser makes them, and one that is no flag of ours."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    later = {flag.successor for flag in FLAGS if flag.successor} - {flag.name for flag in FLAGS}
    for name in [*(flag.name for flag in FLAGS if known(flag, version)), *later, "run_name", "bf16"]:
        switch = name == "bf16" or any(flag.switch for flag in FLAGS if flag.name == name)
        option = parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="?" if switch else None)
        option.const = "True" if switch else None
        if name in ("ddp_backend", "xpu_backend"):
            option.choices = ["gloo", "mpi"] if name == "ddp_backend" and version >= CCL_REFUSED_SINCE else ["gloo", "ccl"]
    return parser


@st.composite
def settings(draw: st.DrawFn) -> list[str]:
    flag = draw(st.sampled_from([*FLAGS, Flag(name="run_name"), Flag(name="bf16", switch=True)]))
    option = draw(st.sampled_from([f"--{flag.name}", f"--{flag.name.replace('_', '-')}"]))
    values = ["ccl", "gloo"] if flag.name.endswith(("ddp_backend", "xpu_backend")) else ["0.5", "name with spaces", "=x"]
    value = draw(st.sampled_from(["True", "no", "1"] if flag.switch else values))
    forms = [[option, value], [f"{option}={value}"], *([[option]] if flag.switch else [])]
    return draw(st.sampled_from(forms))


@given(
    st.lists(settings()),
    st.sampled_from(["4.26.0", "4.28.1", "4.31.0", "4.36.2", "4.50.3", "4.56.2", "4.57.6", "5.0.0", "5.1.0", "5.24.0"]),
    st.sampled_from(["gloo", "ccl"]),
)
def test_every_release_accepts_the_translation(parts: list[list[str]], version: str, backend: str) -> None:
    """Any command line of these flags parses with the options of any release, and a second translation changes nothing."""
    argv = [word for part in parts for word in part]

    passed = translated(*argv, transformers=version, backend=backend)

    parser = parser_of(Version(version))
    others = parser.parse_args([word for part in parts if part[0].startswith(("--run", "--bf16")) for word in part])
    assert parser.parse_args(passed).run_name == others.run_name
    assert parser.parse_args(passed).bf16 == others.bf16
    assert translated(*passed, transformers=version, backend=backend) == passed


@pytest.mark.stack
def test_the_table_agrees_with_the_installed_release(training_python: Path) -> None:
    """The flags that the table says are known are the fields of the installed TrainingArguments, and so are successors."""
    program = """if True:
        import dataclasses, json, transformers
        fields = {field.name: field for field in dataclasses.fields(transformers.TrainingArguments)}
        choices = fields["ddp_backend"].metadata["choices"]
        print(json.dumps([transformers.__version__, list(fields), choices]))
    """
    output = subprocess.run([training_python, "-c", program], capture_output=True, check=True, text=True).stdout
    release, fields, choices = json.loads(output)
    version = Version(release)

    assert {flag.name: known(flag, version) for flag in FLAGS} == {flag.name: flag.name in fields for flag in FLAGS}
    assert {flag.successor for flag in FLAGS if flag.successor and not known(flag, version)} <= set(fields)
    assert ("ccl" in choices) == (version < CCL_REFUSED_SINCE)
