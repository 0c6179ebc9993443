"""Turning speculation on and off for a model: the subclass swap and the extra arguments of `generate()`."""

from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import GenerationMode

from .calls import ARGUMENTS, SpecCall, decode
from .draft_history import DraftHistory, TenantHistory
from .outputs import with_sums
from .states import SpecStates

OURS = ", ".join(f"`{name}`" for name in ARGUMENTS)
# assistants that live inside transformers' own loop: they draft from the target's hidden states
IN_STOCK_LOOP = f"drafts from the target's hidden states inside transformers' own loop; leave out {OURS}."
STOCK_ONLY_ASSISTANTS = ("Gemma4Assistant", "Gemma4UnifiedAssistant")

_Base: Any = GenerationMixin if TYPE_CHECKING else object  # what the class will stand before
_classes: dict[type, type] = {}
_histories: "WeakKeyDictionary[PreTrainedModel, Any]" = WeakKeyDictionary()  # given to `enable`
_lock = Lock()


class SpecStateMixin(_Base):
    """
    Sits before a model's own class. Calls that neither speculate nor use this package's arguments run the stock code.
    """

    _hf_specstate_base: ClassVar[type]  # the model's own class

    def _prepare_generation_config(self, generation_config: GenerationConfig | None, **kwargs: Any):
        asked = {name: kwargs.pop(name) for name in ARGUMENTS if name in kwargs}
        # Whisper prepares its config before it calls `generate()`: by then transformers' defaults have been filled in
        call = getattr(generation_config, "_spec_call", None)
        if call is None:
            call = SpecCall.read(asked, kwargs, generation_config, self.generation_config)
            if "draft_history" not in asked:  # used by a call that speculates; alone it makes no call do so
                call.draft_history = _histories.get(self)
            # ... and only then is an assistant among these arguments. It is kept from Whisper, which would do without
            # `begin_suppress_tokens` to get along with transformers' assisted loop.
            call.assistant_model = kwargs.pop("assistant_model", None)
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        for name in ARGUMENTS:  # so that an assistant which is handed this config does not speculate in its turn
            prepared.__dict__.pop(name, None)
        prepared._spec_call = None if prepared.is_assistant else call
        if call.is_explicit and not prepared.is_assistant:
            reason = _other_mode(prepared)
            if call.is_default and (reason is not None or _has_unsuitable_cache(prepared)):
                prepared._spec_call = None
                return prepared, model_kwargs
            if reason is not None:
                raise ValueError(reason)
            prepared.return_dict_in_generate = prepared.return_dict_in_generate or call.return_spec_states
        return prepared, model_kwargs

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        if assisted and _takes_over(generation_config, generation_mode_kwargs.get("assistant_model")):
            return  # batches, several return sequences and other vocabularies are checked by `decode`
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)

    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, inputs_tensor=None, **kwargs):
        arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
        call = getattr(generation_config, "_spec_call", None)
        if call is None or not (call.is_explicit or call.assistant_model is not None):
            return super()._sample(*arguments, **kwargs)
        kwargs |= {"inputs_tensor": inputs_tensor, "assistant_model": call.assistant_model}
        return decode(self, call, *arguments, **kwargs)

    def _assisted_decoding(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        inputs_tensor=None,
        assistant_model=None,
        **kwargs,
    ):
        arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
        kwargs |= {"inputs_tensor": inputs_tensor, "assistant_model": assistant_model}
        if not _takes_over(generation_config, assistant_model):
            return super()._assisted_decoding(*arguments, **kwargs)
        return decode(self, generation_config._spec_call, *arguments, **kwargs)

    def _stack_split_outputs(self, seek_outputs, *args, **kwargs):
        """Whisper takes its outputs apart by row and puts back together the fields that it knows."""
        outputs = super()._stack_split_outputs(seek_outputs, *args, **kwargs)
        if seek_outputs[0].get("spec_states") is not None:
            states = SpecStates([row["spec_states"] for row in seek_outputs])
            for name, value in with_sums(states, outputs["sequences"].device).items():
                outputs[name] = value
        return outputs

    def __reduce_ex__(self, protocol):
        """Pickle and deepcopy by the model's own class, which an importer can find."""
        _, _, *state = tuple(super().__reduce_ex__(protocol))
        return (_new_enabled, (self._hf_specstate_base,), *state)


def enable(model: PreTrainedModel, draft_history: DraftHistory | TenantHistory | None = None) -> PreTrainedModel:
    """
    Lets `model.generate()` speculate: with an assistant (`assistant_model=`, `assistant_early_exit=`,
    `prompt_lookup_num_tokens=`), or without one when `return_spec_states=True`, `spec_config=`, `spec_streamer=` or
    `draft_history=` is given. Works in place, by putting a class before the model's own; weights, config, hooks and
    `isinstance` are untouched.

    Args:
        model (`PreTrainedModel`): A model that can generate. A `torch.compile`d one is enabled inside its wrapper.
        draft_history ([`DraftHistory`], *optional*):
            Used and extended by all calls that speculate, until the model is enabled anew or disabled. Without it
            nothing outlives a call.

    Returns:
        `PreTrainedModel`: The same object.

    Raises:
        TypeError: something else than a generating transformers model; the message says what to pass.
        ValueError: `draft_history` is something else.
    """
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(draft_history, DraftHistory | TenantHistory | None):
        raise ValueError(
            f"`draft_history` takes a DraftHistory or a part of one, got a {type(draft_history).__name__}."
        )
    if not (isinstance(inner, PreTrainedModel) and isinstance(inner, GenerationMixin)):
        raise TypeError(_what_to_enable(inner))
    if not is_enabled(inner):
        inner.__class__ = _enabled_class(type(inner))
    _histories.pop(inner, None)
    if draft_history is not None:
        _histories[inner] = draft_history
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undoes [`enable`], in place; returns the same object."""
    inner = getattr(model, "_orig_mod", model)
    if is_enabled(inner):
        inner.__class__ = type(inner)._hf_specstate_base
        _histories.pop(inner, None)
    return model


def is_enabled(model: PreTrainedModel) -> bool:
    """Whether [`enable`] was called on `model`."""
    return isinstance(getattr(model, "_orig_mod", model), SpecStateMixin)


def _enabled_class(base: type) -> type:
    """One class per model class. It keeps the name and module, which configs and pipelines read."""
    with _lock:
        if base not in _classes:
            names = ("__module__", "__qualname__", "__doc__")
            namespace = {name: getattr(base, name) for name in names} | {"_hf_specstate_base": base}
            _classes[base] = type(base)(base.__name__, (SpecStateMixin, base), namespace)
    return _classes[base]


def _new_enabled(base: type) -> torch.nn.Module:
    return object.__new__(_enabled_class(base))


def _what_to_enable(model) -> str:
    kind = type(model).__name__
    if hasattr(model, "get_base_model"):
        return f"A {kind} only wraps a model: enable its base, `hf_specstate.enable(model.get_base_model())`."
    if isinstance(getattr(model, "module", None), torch.nn.Module):
        return f"A {kind} only wraps a model: enable `model.module`."
    return f"`enable` takes a transformers model that can generate, got {kind}."


def _takes_over(generation_config: GenerationConfig, assistant_model: PreTrainedModel | None) -> bool:
    """
    Whether this package decodes an assisted call.

    Raises:
        ValueError: its arguments were used with an assistant that works in transformers' own loop only.
    """
    call = getattr(generation_config, "_spec_call", None)
    if call is None:
        return False
    if _stock_only(generation_config) is not None:
        return False
    kind = type(assistant_model).__name__
    if not kind.startswith(STOCK_ONLY_ASSISTANTS):
        return True
    if call.is_explicit and not call.is_default:
        raise ValueError(f"A {kind} {IN_STOCK_LOOP}")
    return False


def _stock_only(generation_config: GenerationConfig) -> str | None:
    """The argument that asks for drafts which only transformers' own loop can make."""
    if generation_config.use_mtp:
        return "`use_mtp=True`"
    if getattr(generation_config, "speculation_type", None) == "dflash":
        return "`speculation_type='dflash'`"
    return None


def _other_mode(generation_config: GenerationConfig) -> str | None:
    """What is wrong with beam search, contrastive search or another mode that this package does not decode."""
    if (kind := _stock_only(generation_config)) is not None:
        return f"{kind} {IN_STOCK_LOOP}"
    if generation_config.cache_implementation == "paged":
        return (
            f"{OURS} cannot be combined with `cache_implementation='paged'`, which switches to continuous batching; "
            "leave it out."
        )
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION):
        return f"{OURS} work with greedy decoding and sampling; these arguments ask for {mode.value.replace('_', ' ')}."
    return None


def _has_unsuitable_cache(generation_config: GenerationConfig) -> bool:
    """Whether the call will have no cache, or one from which drafts cannot be taken back."""
    kind = generation_config.cache_implementation or ""
    return not generation_config.use_cache or kind.startswith(("offloaded", "quantized"))
