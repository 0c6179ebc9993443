"""
Measures methods side by side on the same questions, and checks every text.

    python -m eval.run --data sample --assistant layer-skip
    python -m eval.run --config FILE.yaml --output RUN.jsonl

Repeating a command continues where it was stopped. The exit status is 1 if a text differed from plain decoding by more
than a near tie, or a method of this repository failed; 2 if nothing could be measured; 130 after Ctrl-C.
"""

import copy
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, logging

from .config import RunConfig, read_config
from .conversation import Conversation, Decoding, Turn
from .cost_curve import cost_curve
from .data import Question, load_questions
from .environment import header
from .methods import METHODS, Method
from .models import load_models
from .plan import BASELINE, Batch, MethodPlan, batches, order, plan_methods
from .reference import REFERENCE, Referee, Text, Verdict
from .results import ResultFile, measurement_line, rounds_lines


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    logging.set_verbosity_error()  # warnings would tear the progress bar
    try:
        config = read_config(words)
        plans = plan_methods(config.methods, METHODS)
        questions = chosen_questions(config)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        model, tokenizer, assistant = load_models(config)
        results = ResultFile.open(config.output_path)
        results.start(header(config, model, words))
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"eval.run: {error}", file=sys.stderr)
        return 2
    run = Run(config, plans, questions, model, tokenizer, assistant, results)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as would those about outdated calls of the peers
            run.measure()
    except KeyboardInterrupt:
        print(f"\nStopped. The same command goes on from what {results.path} holds.", file=sys.stderr)
        return 130
    return conclude(results, run.failed)


def chosen_questions(config: RunConfig) -> list[Question]:
    """
    Raises:
        ValueError: none is left.
    """
    questions = load_questions(config.data, config.per_category)
    chosen = [question for question in questions if config.categories is None or question.category in config.categories]
    if not chosen:
        known = ", ".join(dict.fromkeys(question.category for question in questions))
        raise ValueError(f"{config.data} has no question of these categories; it has {known}.")
    return chosen


def conclude(results: ResultFile, failed: Sequence[str]) -> int:
    """Says what went wrong, in this run or in one that it continued; the exit status."""
    own_errors = [text for method, text in results.errors if method not in METHODS or not METHODS[method].is_peer]
    for text in results.faults:
        print(f"FAULT {text}")
    for _, text in results.errors:
        print(f"ERROR {text}")
    for text in failed:
        print(f"ERROR {text}")
    print(f"{len(results.done)} measurements in {results.path}; python -m eval.report {results.path}")
    return 1 if results.faults or own_errors or failed else 0


@dataclass
class Waiting:
    """Measurements that cannot be judged before plain decoding has had its turn."""

    plan: MethodPlan
    position: int
    turns: list[list[Turn]]


class Run:
    """
    One run.

    Args:
        config ([`RunConfig`]), plans (`list[MethodPlan]`), questions (`list[Question]`): What to measure.
        model (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`), assistant (`PreTrainedModel`, *optional*):
            With what.
        results ([`ResultFile`]): What there is already, and where the rest goes.
    """

    def __init__(
        self,
        config: RunConfig,
        plans: Sequence[MethodPlan],
        questions: Sequence[Question],
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        assistant: PreTrainedModel | None,
        results: ResultFile,
    ):
        self.config = config
        self.questions = questions
        self.model = model
        self.results = results
        self.failed: list[str] = []  # methods of this repository that could not be prepared
        decoding = Decoding(config.new_tokens, config.sample, config.seed)
        self.conversation = Conversation(model, tokenizer, decoding)
        self.referee = Referee(model, tokenizer.pad_token_id, decoding)
        self.has_assistant = assistant is not None
        self.methods: dict[str, Method] = {}
        for plan in plans:
            method = copy.copy(METHODS[plan.name])
            reason = method.available()
            if reason is None:
                reason = self._attempt(method, lambda method=method: method.prepare(model, tokenizer, assistant))
            if reason is None:
                self.methods[plan.name] = method
            else:
                results.add_unavailable(plan.name, reason)
        self.plans = [plan for plan in plans if plan.name in self.methods]

    def measure(self) -> None:
        """Everything that the file lacks."""
        if self.config.cost_curve:
            try:
                rows = sorted({1, *self.config.batch_sizes})
                for record in cost_curve(self.model, self.results.cost_curve, all_rows=rows):
                    self.results.add(record)
            except Exception as error:  # a cache that cannot be cut back, say; the rest can be measured
                self.results.add_unavailable("cost_curve", f"{type(error).__name__}: {error}")
        for batch_size in self.config.batch_sizes:
            todo = batches(self.questions, batch_size)
            plans = self._ready(todo[0])
            repeats = range(max((plan.repeats for plan in plans), default=0))
            # every question once before any twice: the repeats lie far apart, and a run that is cut short has them all
            passes = [(batch, repeat, order(plans, batch, repeat)) for repeat in repeats for batch in todo]
            total = sum(
                not self._is_done(plan, batch, repeat) for batch, repeat, in_order in passes for plan in in_order
            )
            with tqdm(total=total, desc=f"batch size {batch_size}", unit="text", smoothing=0.05, mininterval=1) as bar:
                for batch, repeat, in_order in passes:
                    self._pass(batch, repeat, in_order, bar)

    def _ready(self, first: Batch) -> list[MethodPlan]:
        """The methods that can measure batches of this size, warmed up."""
        ready = []
        for plan in tqdm(self.plans, desc="warming up", leave=False):
            method = self.methods[plan.name]
            reason = method.refusal(first.batch_size, self.config.sample, self.has_assistant)
            if reason is None:
                reason = self._attempt(method, lambda method=method: self.conversation.warm_up(method, first.questions))
            if reason is None:
                ready.append(plan)
            else:
                self.results.add_unavailable(plan.name, reason)
        return ready

    def _attempt(self, method: Method, call) -> str | None:
        """Why `call` failed, if it did. That is a failure of the run unless the method is a peer."""
        try:
            call()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if not method.is_peer:
                self.failed.append(f"{method.name}: {reason}")
            return reason
        return None

    def _is_done(self, plan: MethodPlan, batch: Batch, repeat: int) -> bool:
        return all(
            (question.question_id, plan.name, repeat, batch.batch_size) in self.results.done
            for question in batch.questions
        )

    def _pass(self, batch: Batch, repeat: int, plans: Sequence[MethodPlan], bar: tqdm) -> None:
        """The methods one after the other on one batch; a result is written once plain decoding's text is known."""
        waiting: list[Waiting] = []
        for position, plan in enumerate(plans):
            if self._is_done(plan, batch, repeat):
                continue
            bar.set_postfix_str(f"question {batch.questions[0].question_id}, {plan.name}", refresh=False)
            try:
                turns = self.conversation.hold(self.methods[plan.name], batch.questions)
            except Exception as error:
                self._write_error(batch, repeat, position, plan.name, f"{type(error).__name__}: {error}")
            else:
                waiting.append(Waiting(plan, position, turns))
            if self._reference(batch, waiting) is not None:
                self._write(batch, repeat, waiting)
            bar.update()
        if waiting:  # plain decoding failed here
            self._write(batch, repeat, waiting)

    def _reference(self, batch: Batch, waiting: Sequence[Waiting]) -> list[list[Text]] | None:
        """Plain decoding's texts of this batch: just measured, or from the file."""
        for measured in waiting:
            if measured.plan.name == BASELINE:
                return [_texts(turns) for turns in measured.turns]
        known = [self.results.plain.get((question.question_id, batch.batch_size)) for question in batch.questions]
        return None if None in known else [texts for texts in known if texts is not None]

    def _write(self, batch: Batch, repeat: int, waiting: list[Waiting]) -> None:
        """Judges and writes what is waiting."""
        reference = self._reference(batch, waiting)
        for measured in waiting:
            name = measured.plan.name
            verdicts = self._verdicts(name, repeat, batch, reference, measured.turns)
            lines = []
            for question, turns, judged in zip(batch.questions, measured.turns, verdicts, strict=True):
                if repeat == 0 and (name == BASELINE or turns[0].rounds is not None):
                    lines += rounds_lines(question, name, batch.batch_size, turns)
                lines.append(
                    measurement_line(question, name, repeat, measured.position, batch.batch_size, turns, judged)
                )
            self.results.add(*lines)
        waiting.clear()

    def _verdicts(
        self,
        name: str,
        repeat: int,
        batch: Batch,
        reference: list[list[Text]] | None,
        turns: list[list[Turn]],
    ) -> list[list[Verdict]]:
        if name == BASELINE and repeat == 0:
            return [[Verdict(REFERENCE) for _ in row] for row in turns]
        reason = None
        if reference is None:
            reason = "plain decoding failed on this question"
        elif self.config.sample and not self.methods[name].keeps_sample:
            reason = "not compared: it draws its random numbers in another order than plain decoding"
        elif self.config.sample and batch.batch_size > 1 and name != BASELINE:
            reason = "not compared: sampled rows of a batch draw their random numbers in another order"
        if reference is None or reason is not None:
            return [[Verdict(None, reason) for _ in row] for row in turns]
        return self.referee.judge(reference, [_texts(row) for row in turns])

    def _write_error(self, batch: Batch, repeat: int, position: int, name: str, error: str) -> None:
        self.results.add(
            *[
                measurement_line(question, name, repeat, position, batch.batch_size, [], [], error)
                for question in batch.questions
            ]
        )


def _texts(turns: Sequence[Turn]) -> list[Text]:
    return [Text(turn.prompt_ids, turn.output_ids) for turn in turns]


if __name__ == "__main__":
    sys.exit(main())
