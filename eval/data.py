"""Questions to generate from: the repository's own sample, JSONL files, and well-known sets by name from the hub."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub.utils import logging

SAMPLE = Path(__file__).with_name("data") / "sample.jsonl"
FIELDS = ("question_id", "category", "turns")
# Spec-Bench gives MT-Bench's eight categories by name; its own tables show them as one.
MT_BENCH_CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass
class Question:
    """
    Args:
        question_id (`str`): Unique within its data set.
        category (`str`): What kind of task it is.
        turns (`list[str]`): What the user says, one text a turn.
    """

    question_id: str
    category: str
    turns: list[str]


def _spec_bench(row: Mapping[str, Any], _: int) -> Question:
    missing = [name for name in FIELDS if row.get(name) is None]
    if missing:
        raise ValueError(f"A question has no {' and no '.join(missing)}; every line needs {', '.join(FIELDS)}.")
    category = "mt_bench" if row["category"] in MT_BENCH_CATEGORIES else row["category"]
    return Question(str(row["question_id"]), category, [str(turn) for turn in row["turns"]])


def _humaneval(row: Mapping[str, Any], _: int) -> Question:
    return Question(row["task_id"], "humaneval", [f"Complete this Python function:\n\n{row['prompt']}"])


def _gsm8k(row: Mapping[str, Any], place: int) -> Question:
    return Question(str(place), "gsm8k", [row["question"]])


def _mt_bench(row: Mapping[str, Any], _: int) -> Question:
    return Question(str(row["prompt_id"]), row["category"], list(row["prompt"]))


def _cnn_dailymail(row: Mapping[str, Any], _: int) -> Question:
    return Question(row["id"], "cnn_dailymail", [f"Summarize: {row['article']}"])


@dataclass
class Source:
    """
    A set that is loaded by name.

    Args:
        arguments (`dict`): Of `datasets.load_dataset`.
        to_question (`Callable[[Mapping, int], Question]`): Makes a question of a row and its place.
    """

    arguments: dict[str, Any]
    to_question: Callable[[Mapping[str, Any], int], Question]


SPEC_BENCH_FILE = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
SOURCES = {
    "spec_bench": Source({"path": "json", "data_files": SPEC_BENCH_FILE, "split": "train"}, _spec_bench),
    "humaneval": Source({"path": "openai/openai_humaneval", "split": "test"}, _humaneval),
    "gsm8k": Source({"path": "openai/gsm8k", "name": "main", "split": "test"}, _gsm8k),
    "mt_bench": Source({"path": "HuggingFaceH4/mt_bench_prompts", "split": "train"}, _mt_bench),
    "cnn_dailymail": Source({"path": "abisee/cnn_dailymail", "name": "3.0.0", "split": "test"}, _cnn_dailymail),
}


def load_questions(name_or_path: str | Path, limit_per_category: int | None = None) -> list[Question]:
    """
    Loads questions through the `datasets` library.

    Args:
        name_or_path (`str`):
            `"sample"` (the repository's own), a name in `SOURCES`, or the path of a JSONL file in the form of
            Spec-Bench: `question_id`, `category` and `turns` on every line.
        limit_per_category (`int`, *optional*): Keep the first questions of every category only.

    Returns:
        `list[Question]`: In the order of the set.

    Raises:
        ValueError: an unknown name, a line without the three fields, or an id that occurs twice.
        ConnectionError: a set on the hub that cannot be fetched; the message says what to do.
        ModuleNotFoundError: a package that fetches it is missing.
    """
    path = SAMPLE if name_or_path == "sample" else Path(name_or_path)
    if path.is_file():
        source = Source({"path": "json", "data_files": str(path), "split": "train"}, _spec_bench)
    elif str(name_or_path) in SOURCES:
        source = SOURCES[str(name_or_path)]
    else:
        raise ValueError(f"{name_or_path} is neither a JSONL file nor one of sample, {', '.join(SOURCES)}.")
    rows = _load(str(name_or_path), source, is_local=path.is_file())
    return select([source.to_question(row, place) for place, row in enumerate(rows)], limit_per_category)


def select(questions: Iterable[Question], limit_per_category: int | None) -> list[Question]:
    """The first `limit_per_category` questions of every category, in order."""
    kept: list[Question] = []
    seen: Counter[str] = Counter()
    ids = set()
    for question in questions:
        if question.question_id in ids:
            raise ValueError(f"Two questions have the id {question.question_id}.")
        ids.add(question.question_id)
        seen[question.category] += 1
        if limit_per_category is None or seen[question.category] <= limit_per_category:
            kept.append(question)
    return kept


def _load(name: str, source: Source, is_local: bool) -> Iterable[Mapping[str, Any]]:
    datasets.disable_progress_bars()
    logging.set_verbosity_error()  # of the hub's client, which would announce every one of its attempts
    try:
        return datasets.load_dataset(**source.arguments)
    except ImportError as error:
        raise ModuleNotFoundError(f"{error}: `pip install 'hf-specstate[eval]'` brings what {name} needs.") from error
    except Exception as error:  # the library raises a dozen kinds when it cannot reach a set
        if is_local:
            raise ValueError(f"{name} cannot be read as JSON lines: {error}") from error
        raise ConnectionError(
            f"The data set {name} could not be fetched ({type(error).__name__}): connect to the network, or fetch it "
            f"elsewhere, write it as JSON lines with {', '.join(FIELDS)}, and pass that file's path instead."
        ) from error
