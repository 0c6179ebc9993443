"""One `generate()` call: what the user asked for, and the decoding that it becomes."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import BaseStreamer
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.utils import ModelOutput

from .candidate_generator import SpecStateCandidateGenerator
from .clock import Clock, StoppedClock, make_clock
from .compat import CACHE_NAME
from .config import SpecStateConfig
from .decoding import SpeculativeDecoding
from .draft_history import HistoryOfRows
from .drafting import DRAFTERS, DraftContext, Drafter
from .drafting.early_exit import early_exit_view
from .model_support import ModelSupport, probe
from .recording import Recorder, SpecStreamer
from .row_cache import has_fixed_slots
from .scheduling import (
    Acceptance,
    GoodputSchedule,
    Place,
    RoundCost,
    Schedule,
    SpecProfile,
    make_schedule,
    place_of,
    recall_cost,
    remember_cost,
)
from .selection import is_stateless
from .sequences import Sequences
from .stopping import STATELESS_CRITERIA
from .validation import (
    check_assistant,
    check_config,
    check_generation,
    check_history_of_segments,
    check_positions,
    check_spec_profile,
    check_spec_streamer,
    check_support,
    speak_alike,
)
from .verification import CachedModel

# arguments of `generate()` beside transformers' own, and those of them that a generation config may hold
ARGUMENTS = ("return_spec_states", "spec_config", "spec_streamer", "draft_history", "spec_profile")
SETTINGS = ("return_spec_states", "spec_config")
DEFAULTS = {"max_nodes": 15, "schedule": "goodput"}
WITHOUT_ASSISTANT = ["history", "previous_drafts", "recycling"]  # drafters
# field of SpecStateConfig -> generation arguments of transformers with the same meaning
TRANSFORMERS_ARGUMENTS = {
    "max_nodes": ("prompt_lookup_num_tokens", "num_assistant_tokens"),
    "schedule": ("num_assistant_tokens_schedule",),
    "confidence_threshold": ("assistant_confidence_threshold",),
}


@dataclass
class SpecCall:
    """
    What one call asked for.

    Args:
        config ([`SpecStateConfig`]): As the user gave it.
        resolved (`dict`): Its fields that have an equivalent among transformers' arguments; None where nothing is set.
        bounds (`bool`): The number of tokens is the configuration's, an upper bound. In transformers' arguments it is
            exact, unless a schedule is named.
        return_spec_states (`bool`): Record the states.
        spec_streamer ([`SpecStreamer`], *optional*): Gets every round as it ends.
        draft_history (*optional*): See [`HistoryOfRows`].
        spec_profile ([`SpecProfile`], *optional*): What the schedule begins with, and leaves behind.
        is_explicit (`bool`): One of this package's own arguments was used, rather than an assistant alone.
        is_default (`bool`): They stand in the model's generation config only, and hold where they can.
        assistant_model (`PreTrainedModel`, *optional*): Of models that do not hand it to the decoding method (Whisper).
    """

    config: SpecStateConfig
    resolved: dict[str, Any]
    bounds: bool
    return_spec_states: bool
    is_explicit: bool
    is_default: bool = False
    spec_streamer: SpecStreamer | None = None
    draft_history: Any = None
    spec_profile: SpecProfile | None = None
    assistant_model: PreTrainedModel | None = None

    def __deepcopy__(self, memo) -> "SpecCall":
        return self  # it travels in a generation config, which is copied on its way, and holds models

    @classmethod
    def read(
        cls,
        asked: dict[str, Any],
        call_kwargs: dict[str, Any],
        passed: GenerationConfig | None,
        model_defaults: GenerationConfig,
    ) -> "SpecCall":
        """
        Collects the arguments before transformers fills in its defaults, in the order: call arguments, `spec_config`,
        the passed generation config, the model's. (The assistant's comes last, when it is known.)

        Args:
            asked (`dict`): This package's arguments of the call.
            call_kwargs (`dict`): The other arguments of the call.
            passed, model_defaults (`GenerationConfig`): The one of the call and the model's.
        """
        configs = [config for config in (passed, model_defaults) if config is not None]
        chosen = {
            name: asked[name] if name in asked else _first(getattr(config, name, None) for config in configs)
            for name in SETTINGS
        }
        spec_streamer = asked.get("spec_streamer")
        check_spec_streamer(spec_streamer)
        config = SpecStateConfig.from_any(chosen["spec_config"])
        check_config(config)
        resolved: dict[str, Any] = {}
        for name, arguments in TRANSFORMERS_ARGUMENTS.items():
            in_call = [call_kwargs.get(argument) for argument in arguments]
            in_configs = [getattr(known, argument, None) for known in configs for argument in arguments]
            resolved[name] = _first([*in_call, getattr(config, name), *in_configs])
            if name == "max_nodes":
                bounds = config.max_nodes is not None and _first(in_call) is None
        returns = bool(chosen["return_spec_states"])
        draft_history, spec_profile = asked.get("draft_history"), asked.get("spec_profile")
        check_spec_profile(spec_profile)
        of_call = {name: asked[name] if name in asked else getattr(passed, name, None) for name in SETTINGS}
        used = (
            of_call["return_spec_states"] or None,
            of_call["spec_config"],
            spec_streamer,
            draft_history,
            spec_profile,
        )
        by_call = any(value is not None for value in used)
        explicit = by_call or returns or chosen["spec_config"] is not None
        return cls(
            config=config,
            resolved=resolved,
            bounds=bounds,
            return_spec_states=returns,
            is_explicit=explicit,
            is_default=explicit and not by_call,
            spec_streamer=spec_streamer,
            draft_history=draft_history,
            spec_profile=spec_profile,
        )

    def with_assistant(self, assistant: PreTrainedModel | None) -> SpecStateConfig:
        """The complete configuration: what is open comes from the assistant's generation config, then from defaults."""
        theirs = getattr(assistant, "generation_config", None)
        completed: dict[str, Any] = {}
        for name, arguments in TRANSFORMERS_ARGUMENTS.items():
            of_assistant = [getattr(theirs, argument, None) for argument in arguments]
            completed[name] = _first([self.resolved[name], *of_assistant])
        if completed["max_nodes"] is not None and not self.bounds:
            completed["schedule"] = completed["schedule"] or "constant"
        completed = {name: _first([value, DEFAULTS.get(name)]) for name, value in completed.items()}
        if isinstance(completed["max_nodes"], float):  # transformers takes 5.0 for 5
            completed["max_nodes"] = int(completed["max_nodes"])
        return replace(self.config, **completed)


def decode(
    model: PreTrainedModel,
    call: SpecCall,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    inputs_tensor: torch.Tensor | None = None,
    assistant_model: PreTrainedModel | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **model_kwargs,
) -> ModelOutput | torch.Tensor:
    """The decoding method of an enabled model; arguments and result as of `GenerationMixin._assisted_decoding`."""
    support = _support(model, input_ids, generation_config, model_kwargs)
    assistant_model = _assistant(model, generation_config, assistant_model)
    check_assistant(model, assistant_model, tokenizer, assistant_tokenizer, synced_gpus)
    config = call.with_assistant(assistant_model)
    batch_size = input_ids.shape[0]
    place = place_of(model, batch_size, config.few_rows, has_fixed_slots(model_kwargs[CACHE_NAME]))
    acceptance, cost = _known(call, model, assistant_model, place)
    context = DraftContext(
        model=model,
        sequences=_sequences(model, input_ids, generation_config, model_kwargs),
        config=config,
        generation_config=generation_config,
        logits_processor=LogitsProcessorList(filter(is_stateless, logits_processor)),
        input_ids=input_ids,
        model_kwargs={name: value for name, value in model_kwargs.items() if name != CACHE_NAME},
        inputs_tensor=inputs_tensor,
        assistant_model=assistant_model,
        tokenizer=tokenizer,
        assistant_tokenizer=_other(assistant_tokenizer, tokenizer, assistant_model),
        draft_history=_history(model, call, generation_config, batch_size),
        acceptance=acceptance,
    )
    drafters = _make_drafters(context)  # all are asked whether they need lockstep, as any may refuse the call
    needs_lockstep = [config.lockstep, support.rows == "lockstep", *(d.needs_lockstep(context) for d in drafters)]
    together = batch_size == 1 or any(needs_lockstep) or _needs_lockstep(logits_processor, stopping_criteria)
    schedule = make_schedule(context, together, place.fixed_slots, cost)
    clock, recorder = _recorder(call, config, context.sequences, schedule.wants_times)
    in_trees = support.tree and config.acceptance == "match"
    output = SpeculativeDecoding(
        target=CachedModel(model, model_kwargs, generation_config, support, config.few_rows),
        candidates=SpecStateCandidateGenerator(context, drafters, schedule, config.tree_width if in_trees else 1),
        sequences=context.sequences,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        streamer=streamer,
        synced_gpus=synced_gpus,
        together=together,
        rejection=config.acceptance == "rejection",
        clock=clock,
        recorder=recorder,
    ).run(input_ids)
    _remember(call, context, place, schedule)
    return output


def _remember(call: SpecCall, context: DraftContext, place: Place, schedule: Schedule) -> None:
    """What outlives the generation: what its forwards cost, and, where the user asked for it, what was learned."""
    if isinstance(schedule, GoodputSchedule):
        remember_cost(context.model, place, schedule.cost)
        if call.spec_profile is not None:
            learned = (context.acceptance, schedule.cost)
            call.spec_profile.learn(context.model, context.assistant_model, place, *learned)
    if context.draft_history is not None:
        rows = range(context.sequences.batch_size)
        context.draft_history.add([context.draftable(context.sequences.unpadded(row)) for row in rows])


def _known(
    call: SpecCall, model: PreTrainedModel, assistant_model: PreTrainedModel | None, place: Place
) -> tuple[Acceptance, RoundCost]:
    """What earlier generations have shown: the profile's, or of costs the model's own."""
    acceptance, cost = Acceptance(), None
    if call.spec_profile is not None:
        acceptance, cost = call.spec_profile.begin(model, assistant_model, place)
    return acceptance, cost or recall_cost(model, place)


def _assistant(
    model: PreTrainedModel, generation_config: GenerationConfig, assistant_model: PreTrainedModel | None
) -> PreTrainedModel | None:
    """The user's, or the model's own first layers."""
    layers = generation_config.assistant_early_exit
    return assistant_model if layers is None else early_exit_view(model, layers)


def _other(
    assistant_tokenizer: PreTrainedTokenizerBase | None,
    tokenizer: PreTrainedTokenizerBase | None,
    assistant_model: PreTrainedModel | None,
) -> PreTrainedTokenizerBase | None:
    """The assistant's tokenizer, if it is another one."""
    alike = assistant_model is None or speak_alike(tokenizer, assistant_tokenizer)
    return None if alike else assistant_tokenizer


def _support(
    model: PreTrainedModel, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> ModelSupport:
    """What the model can do for this call; refuses it if that is nothing."""
    check_generation(model, generation_config, model_kwargs)
    check_positions(model, generation_config, input_ids.shape[1])
    support = probe(model, static=has_fixed_slots(model_kwargs[CACHE_NAME]))
    check_support(model, support, "model")
    return support


def _history(
    model: PreTrainedModel, call: SpecCall, generation_config: GenerationConfig, batch_size: int
) -> HistoryOfRows | None:
    if call.draft_history is None:
        return None
    check_history_of_segments(model, call.draft_history)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    return HistoryOfRows(call.draft_history, batch_size, generation_config.num_return_sequences or 1, vocab_size)


def _recorder(
    call: SpecCall, config: SpecStateConfig, sequences: Sequences, wants_times: bool
) -> tuple[Clock, Recorder | None]:
    """Both do nothing unless somebody asks."""
    records = call.return_spec_states or call.spec_streamer is not None
    clock = make_clock(sequences.device) if records or wants_times else StoppedClock()
    if not records:
        return clock, None
    prompts = [sequences.prompt(row) for row in range(sequences.batch_size)]
    return clock, Recorder(config, prompts, clock, call.return_spec_states, call.spec_streamer)


def _sequences(
    model: PreTrainedModel, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> Sequences:
    mask = model_kwargs.get("decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask")
    pad = generation_config._pad_token_tensor
    return Sequences(input_ids, mask, 0 if pad is None else int(pad))


def _make_drafters(context: DraftContext) -> list[Drafter]:
    """A copy of its own of every drafter that the call asks for, so that calls share nothing."""
    named = context.config.drafters
    if named is None:
        if context.generation_config.prompt_lookup_num_tokens is not None:
            named = ["prompt_lookup"]
        elif context.assistant_model is None:
            named = WITHOUT_ASSISTANT
        else:
            # under "rejection" the first drafter has a row for itself, and that is the assistant
            mixes = context.draft_history is not None and context.config.acceptance == "match"
            earlier = ["history"] if mixes else []
            named = [*earlier, "assistant" if context.assistant_tokenizer is None else "stock"]
    return [copy.copy(drafter) if isinstance(drafter, Drafter) else DRAFTERS[drafter]() for drafter in named]


def _needs_lockstep(logits_processor: LogitsProcessorList, stopping_criteria: StoppingCriteriaList) -> bool:
    """
    Whether something would notice that rows diverge: a processor or criterion that may keep state, or the rule that
    without an EOS criterion ended rows go on until all have ended.
    """
    if not all(map(is_stateless, logits_processor)):
        return True
    if not all(type(criterion) in STATELESS_CRITERIA for criterion in stopping_criteria):
        return True
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    return not has_eos and any(type(criterion) is not MaxLengthCriteria for criterion in stopping_criteria)


def _first(values):
    return next((value for value in values if value is not None), None)
