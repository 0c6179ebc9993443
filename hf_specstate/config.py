"""How a call speculates."""

import json
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral, Real
from typing import Any

ACCEPTANCE = ("match", "rejection")
SCHEDULES = ("goodput", "constant", "heuristic", "heuristic_transient")
RECORD_LEVELS = ("ids", "topk", "full")


@dataclass
class SpecStateConfig:
    """
    How one `generate()` call drafts and verifies. Pass it (or a dict of its fields) as `spec_config=`, or keep a dict
    in `model.generation_config.spec_config`, where beam search and other modes, and calls without a cache or with an
    offloaded or quantized one, pass over it. None of the fields changes which text comes out, except that
    `acceptance="rejection"` keeps the distribution but not the sample of a seed.

    Args:
        drafters (`list[str | Drafter]`, *optional*):
            Who proposes, by name (see `hf_specstate.DRAFTERS`) or as an object. Defaults to `["assistant"]` with an
            assistant model (or early exit), `["stock"]` with an assistant of another tokenizer (with `"history"` first
            if there is a draft history), `["prompt_lookup"]` with `prompt_lookup_num_tokens`, and `["history",
            "previous_drafts", "recycling"]` otherwise. The proposals of several drafters are merged into one tree of
            the tokens that are most likely accepted; under `"rejection"` the first drafter that has something to
            propose is used.
        max_nodes (`int`, *optional*, defaults to 15):
            Most tokens drafted for a row in one round: the length of a chain, the size of a tree; to begin with, under
            `"heuristic"` and `"heuristic_transient"`. The call arguments `num_assistant_tokens` and
            `prompt_lookup_num_tokens` go before it.
        tree_width (`int`, *optional*):
            Most alternatives drafted for one position; 1 drafts a chain. Defaults to 1 for an assistant, which has to
            run each alternative, and for prompt lookup; otherwise there is no limit. Models that cannot verify a tree
            get a chain.
        acceptance (`str`, *optional*, defaults to `"match"`):
            `"match"` accepts a drafted token if the target, decoding as usual, chose the same one. `"rejection"` is
            speculative sampling (https://huggingface.co/papers/2211.17192) of chains drawn from an assistant; it
            accepts more at high temperatures, and gives the same distribution but not the same sample for a seed.
        schedule (`str`, *optional*):
            How the number of drafted tokens changes between rounds. Defaults to `"constant"` if a number of them was
            given as `num_assistant_tokens` or `prompt_lookup_num_tokens`, else to `"goodput"`, which drafts what is
            expected to give the most tokens per second, by measured acceptance and measured time, at most `max_nodes`
            and often nothing. The others are transformers' `num_assistant_tokens_schedule`: `"constant"`, `"heuristic"`
            (two more after a full match, one fewer otherwise, remembered by the enabled model) and
            `"heuristic_transient"` (the same, forgotten after the call).
        confidence_threshold (`float`, *optional*):
            An assistant stops drafting after a token to which it gave less than this probability
            (`assistant_confidence_threshold`). Unset drafts on regardless.
        lockstep (`bool`, *optional*, defaults to `False`):
            In a batch, let all rows advance by the same number of tokens: slower, but a seed then gives the same
            sample as without speculation at any batch size. Needed rarely; chosen automatically where rows must not
            diverge.
        record (`str`, *optional*, defaults to `"ids"`):
            How much [`SpecStates`] hold of what the target answered to every drafted token: `"ids"`, its own choice and
            the log-probability of the drafted token; `"topk"`, also its `record_top_k` likeliest tokens; `"full"`, also
            its logits (and, with `output_hidden_states=True`, its last hidden state).
        record_top_k (`int`, *optional*, defaults to 8):
            Tokens to keep at `"topk"` and `"full"`.
        record_max_bytes (`int`, *optional*, defaults to 2**30):
            Most bytes of logits and hidden states that `"full"` records in one call, streamed or not. Rounds after that
            are recorded as at `"topk"`, with a warning, and counted in [`SpecStates`].
        few_rows (`bool`, *optional*, defaults to `True`):
            On the CPU, multiply the few rows of a forward in the way that a measurement finds fastest; see
            `hf_specstate/few_rows.py`. Logits change in their last bits.
        strict (`bool`, *optional*, defaults to `False`):
            Raise the errors of drafters instead of dropping the drafter with a warning.
    """

    drafters: list[Any] | None = None
    max_nodes: int | None = field(
        default=None, metadata={"least": 0, "argument": "`num_assistant_tokens` or `prompt_lookup_num_tokens`"}
    )
    tree_width: int | None = field(default=None, metadata={"least": 1})
    acceptance: str = field(default="match", metadata={"choices": ACCEPTANCE})
    schedule: str | None = field(
        default=None, metadata={"choices": SCHEDULES, "argument": "`num_assistant_tokens_schedule`"}
    )
    confidence_threshold: float | None = field(default=None, metadata={"argument": "`assistant_confidence_threshold`"})
    lockstep: bool = False
    record: str = field(default="ids", metadata={"choices": RECORD_LEVELS})
    record_top_k: int = field(default=8, metadata={"least": 1})
    record_max_bytes: int = field(default=2**30, metadata={"least": 0})
    few_rows: bool = True
    strict: bool = False

    def __post_init__(self):
        for spec in fields(self):
            value = getattr(self, spec.name)
            if value is None and spec.default is None:
                continue  # left open
            argument = spec.metadata.get("argument")  # of `generate()`, which ends up in the field
            name = f"`spec_config.{spec.name}`" + (f" ({argument})" if argument else "")
            least, choices = spec.metadata.get("least"), spec.metadata.get("choices")
            if least is not None:
                if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                    raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")
                setattr(self, spec.name, int(value))  # NumPy's integers have no JSON form
            if choices and value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}.")
            if isinstance(spec.default, bool) and not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}.")
            if spec.name == "confidence_threshold":
                if not isinstance(value, Real) or not 0 <= float(value) <= 1:
                    raise ValueError(f"{name} must lie between 0 and 1, got {value!r}.")
                self.confidence_threshold = float(value)
        self._check_drafters()

    def _check_drafters(self) -> None:
        from .drafting import DRAFTERS, Drafter

        if self.drafters is None:
            return
        if not isinstance(self.drafters, list | tuple) or not self.drafters:
            raise ValueError(f"`spec_config.drafters` must be a list with at least one entry, got {self.drafters!r}.")
        for drafter in self.drafters:
            if not isinstance(drafter, Drafter) and not (isinstance(drafter, str) and drafter in DRAFTERS):
                names = ", ".join(DRAFTERS)
                raise ValueError(
                    f"`spec_config.drafters` takes `Drafter` objects or the names {names}; got {drafter!r}."
                )

    @classmethod
    def from_any(cls, value: "SpecStateConfig | dict | None") -> "SpecStateConfig":
        """
        The config that a user meant by `value`.

        Raises:
            ValueError: an unknown field, or a value that its field does not take. The message names the field.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise ValueError(f"`spec_config` must be a SpecStateConfig or a dict, got {type(value).__name__}.")
        names = [spec.name for spec in fields(cls)]
        for key in value:
            if key not in names:
                raise ValueError(f"`spec_config` has no field {key!r}; the fields are {', '.join(names)}.")
        return cls(**value)

    def to_dict(self) -> dict[str, Any]:
        """
        The fields as a JSON-ready dict.

        Raises:
            ValueError: a drafter was given as an object, which has no JSON form.
        """
        for drafter in self.drafters or []:
            if not isinstance(drafter, str):
                raise ValueError(f"`spec_config.drafters` holds the object {drafter!r}; only names can be saved.")
        return asdict(self)

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json_string(cls, text: str) -> "SpecStateConfig":
        return cls.from_any(json.loads(text))
