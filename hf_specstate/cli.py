"""The console script `hf-specstate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .states import SpecStates

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def commands() -> None:
    """Looks into the speculative states of generations."""


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="What `SpecStates.save()` wrote.", show_default=False)],
    html: Annotated[Path | None, typer.Option(help="Write a page for a browser to this file.", metavar="OUT")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Hub name or folder, for states that were saved without texts.", metavar="NAME")
    ] = None,
) -> None:
    """Shows saved states: a table, and the texts coloured by who wrote which token."""
    states = _load(file)
    if tokenizer is not None:
        states.decode(_load_tokenizer(tokenizer))
    typer.echo(f"{states}\n")
    states.show()
    if html is not None:
        _write(states, html)


def main() -> None:
    app()


def _load(file: Path) -> "SpecStates":
    from .states import SpecStates

    try:
        return SpecStates.load(file)
    except FileNotFoundError:
        _fail(f"There is no file {file}.")
    except OSError as error:
        _fail(f"{file} could not be read: {error.strerror or error}.")
    except ValueError as error:
        _fail(str(error))


def _load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        _fail(f"The tokenizer {name} could not be loaded: {reason}")


def _write(states: "SpecStates", path: Path) -> None:
    try:
        page = states.to_html()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except ModuleNotFoundError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{path} could not be written: {error.strerror or error}.")
    typer.echo(f"\nPage: {path}")


def _fail(sentence: str) -> NoReturn:
    typer.echo(sentence, err=True)
    raise typer.Exit(1)
