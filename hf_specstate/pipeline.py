"""`pipeline("speculative-text-generation")`: text generation whose records carry the speculative states."""

from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel, TextGenerationPipeline
from transformers.pipelines import PIPELINE_REGISTRY

from .config import SpecStateConfig
from .enabling import enable, is_enabled
from .recording import SpecStreamer
from .states import SpecRound, SpecSequence, SpecStates

TASK = "speculative-text-generation"


class SpeculativeTextGenerationPipeline(TextGenerationPipeline):
    """
    A `TextGenerationPipeline` that enables its model and gives every record one more entry, `"spec_states"`: the
    [`SpecStates`] of that text, one row. Takes what the stock pipeline takes, `assistant_model` and `spec_config`
    included.

    ```python
    pipe = pipeline("speculative-text-generation", model=name)
    pipe("The capital of France is", max_new_tokens=32)[0]["spec_states"].show(pipe.tokenizer)
    ```
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not is_enabled(self.model):
            enable(self.model)

    def _forward(self, model_inputs, spec_streamer: SpecStreamer | None = None, **generate_kwargs):
        collector = _Collector(spec_streamer)
        outputs = super()._forward(model_inputs, spec_streamer=collector, **generate_kwargs)
        input_ids, mask = model_inputs["input_ids"], model_inputs.get("attention_mask")
        in_batch, each = outputs["generated_sequence"].shape[:2]
        prompts = input_ids.tolist()
        if mask is not None:
            prompts = [
                [token for token, seen in zip(prompt, row, strict=True) if seen]
                for prompt, row in zip(prompts, mask.tolist(), strict=True)
            ]
        # a list, one entry a prompt, is what the batch iterator of pipelines takes apart
        outputs["spec_states"] = [
            SpecStates(
                [SpecSequence(prompt, collector.rounds.get(row, [])) for row in range(start, start + each)],
                collector.num_left_out if _records_everything(self.model, generate_kwargs) else 0,
            )
            for start, prompt in zip(range(0, each * in_batch, each), prompts, strict=True)
        ]
        return outputs

    def postprocess(self, model_outputs, *args: Any, **kwargs: Any):
        states = model_outputs.pop("spec_states")
        [states] = states if isinstance(states, list) else [states]  # a list unless a batch was taken apart
        records = super().postprocess(model_outputs, *args, **kwargs)
        for record, sequence in zip(records, states, strict=True):
            record["spec_states"] = SpecStates([sequence], states.num_left_out)
        return records


class _Collector:
    """A spec streamer that keeps the rounds: pipelines drop what is no tensor from the outputs of their models."""

    def __init__(self, forward_to: SpecStreamer | None):
        self.rounds: dict[int, list[SpecRound]] = {}
        self._without_logits: set[int] = set()  # forwards
        self._forward_to = forward_to

    def put_round(self, row: int, spec_round: SpecRound) -> None:
        self.rounds.setdefault(row, []).append(spec_round)
        if spec_round.logits is None:
            self._without_logits.add(spec_round.index)
        if self._forward_to is not None:
            self._forward_to.put_round(row, spec_round)

    @property
    def num_left_out(self) -> int:
        """Forwards without logits, at a level that records them."""
        return len(self._without_logits)

    def end(self) -> None:
        if self._forward_to is not None:
            self._forward_to.end()


def _records_everything(model: PreTrainedModel, generate_kwargs: dict[str, Any]) -> bool:
    configs = (generate_kwargs.get("generation_config"), model.generation_config)
    asked = [generate_kwargs.get("spec_config"), *(getattr(config, "spec_config", None) for config in configs)]
    return SpecStateConfig.from_any(next((config for config in asked if config is not None), None)).record == "full"


PIPELINE_REGISTRY.register_pipeline(TASK, SpeculativeTextGenerationPipeline, pt_model=AutoModelForCausalLM)
