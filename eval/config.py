"""What a run measures: from the command line, a YAML file, or both."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

# What the numbers of one file must have in common; the rest may grow when a run is resumed.
FIXED = "model assistant dtype device_map quantization new_tokens sample temperature seed".split()
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("nf4", "int8")


@dataclass
class RunConfig:
    """
    A run. Every field is also an option of the command line, with dashes for underscores.

    Args:
        model (`str`): Hub or local name of the target; `embedded` for SmolLM2-135M-Instruct, `tiny-random` for tests.
        assistant (`str`, *optional*):
            Hub or local name; `layer-skip` for the target without a layer, `noisy-copy` for a disturbed copy of it.
        dtype (`str`): `auto`, `float32`, `bfloat16` or `float16`.
        device_map (`str`, *optional*): As of `from_pretrained`, for instance `cuda` or `auto`.
        quantization (`str`, *optional*): `nf4` or `int8` (without outlier threshold), by bitsandbytes.
        data (`str`): `sample`, a set from the hub, or a JSONL file; see `eval.data`.
        categories (`list[str]`, *optional*): Leave out the others.
        per_category (`int`, *optional*): Questions of every category.
        methods (`list[str]`): `NAME[:REPEATS][@QUESTIONS]`: how often each question, and how many of a category. Names
            may hold `*`. Plain decoding always takes part.
        new_tokens (`int`): Most new tokens of a turn.
        batch_sizes (`list[int]`): Rows that are generated together.
        sample (`bool`): Sample instead of decoding greedily.
        temperature (`float`), seed (`int`): For sampling.
        threads (`int`, *optional*): Of torch on the CPU; defaults to torch's choice.
        cost_curve (`bool`): First of all, for a minute or two, measure what forwards of 1 to 32 tokens cost.
        output (`str`, *optional*): Defaults to `eval/results/MODEL-DATA.jsonl`.
    """

    model: str = "embedded"
    assistant: str | None = None
    dtype: str = field(default="auto", metadata={"choices": DTYPES})
    device_map: str | None = None
    quantization: str | None = field(default=None, metadata={"choices": QUANTIZATIONS})
    data: str = "sample"
    categories: list[str] | None = None
    per_category: int | None = None
    methods: list[str] = field(default_factory=lambda: ["*"])
    new_tokens: int = 128
    batch_sizes: list[int] = field(default_factory=lambda: [1])
    sample: bool = False
    temperature: float = 1.0
    seed: int = 0
    threads: int | None = None
    cost_curve: bool = True
    output: str | None = None

    def __post_init__(self):
        for spec in fields(self):
            value, choices = getattr(self, spec.name), spec.metadata.get("choices")
            if choices and value is not None and value not in choices:
                raise ValueError(f"{spec.name} must be one of {', '.join(choices)}; got {value!r}.")
        for name in ("per_category", "new_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes must be at least 1, got {self.batch_sizes}.")

    @property
    def output_path(self) -> Path:
        if self.output is not None:
            return Path(self.output)
        return Path(__file__).with_name("results") / f"{Path(self.model).name}-{Path(self.data).stem}.jsonl"

    def public_dict(self) -> dict[str, Any]:
        """The fields for a header, without the folders of this machine."""
        return {name: without_folders(value) for name, value in asdict(self).items() if name != "output"}


def without_folders(value: Any) -> Any:
    """A path that leads out of the repository is reduced to its last part: results are shared, folders are private."""
    if not isinstance(value, str):
        return value
    option, equals, path = value.partition("=") if value.startswith("--") else ("", "", value)
    leads_out = Path(path).is_absolute() or path.startswith("..")
    return option + equals + (Path(path).name if leads_out else path)


def read_config(arguments: Sequence[str] | None = None) -> RunConfig:
    """
    Reads the command line; its options go before those of the YAML file that `--config` names.

    Raises:
        ValueError: an unknown field in the file, or a value that a field does not take.
    """
    given = vars(_parser().parse_args(arguments))
    path = given.pop("config", None)
    from_file = (yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}) if path is not None else {}
    names = [spec.name for spec in fields(RunConfig)]
    for name in from_file:
        if name not in names:
            raise ValueError(f"{path}: there is no field {name!r}; the fields are {', '.join(names)}.")
    return RunConfig(**(from_file | given))


def _parser() -> argparse.ArgumentParser:
    """Options that are not given are absent, so that defaults do not override the file."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.run",
        description="Measures methods side by side; see eval/README.md.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="a file with any of the options below")
    parser.add_argument("--model", help="target: embedded (default), tiny-random, or a hub or local name")
    parser.add_argument("--assistant", help="layer-skip, noisy-copy, or a hub or local name")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--device-map", help="cpu, cuda, auto ...")
    parser.add_argument("--quantization", choices=QUANTIZATIONS)
    parser.add_argument("--data", help="sample (default), a JSONL file, or a set on the hub (see eval/data.py)")
    parser.add_argument("--categories", nargs="+", metavar="NAME", help="leave out the others")
    parser.add_argument("--per-category", type=int, metavar="N", help="questions of every category")
    parser.add_argument("--methods", nargs="+", metavar="NAME[:REPEATS][@QUESTIONS]", help="default: all, once")
    parser.add_argument("--new-tokens", type=int, metavar="N")
    parser.add_argument("--batch-sizes", type=int, nargs="+", metavar="N")
    parser.add_argument("--sample", action=argparse.BooleanOptionalAction, help="sample instead of greedy decoding")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--threads", type=int, help="of torch on the CPU")
    parser.add_argument("--cost-curve", action=argparse.BooleanOptionalAction, help="measure forwards of 1-32 tokens")
    parser.add_argument("--output", metavar="FILE.jsonl", help="an existing file is continued")
    return parser
