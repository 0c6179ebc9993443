"""The table, the coloured text, and the console script."""

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hf_specstate import SpecSequence, SpecStates
from hf_specstate.cli import app
from hf_specstate.reporting.terminal import show
from tests.made_states import (
    byte_level_tokenizer,
    long_states,
    made_round,
    made_states,
    shared_states,
    states_of_tokens,
)

# ---------------------------------------------------------------------- table


def test_table_of_one_row():
    assert str(made_states()) == (
        "row  new tokens  forwards  tokens/forward*  drafted  accepted  acceptance  stopped by\n"
        "  0           9         5             2.00        8         5         62%  eos\n"
        "* tokens that a forward gave a row, the prefill left out"
    )


def test_table_of_many_rows_is_short():
    states = SpecStates.concatenate([made_states()] * 22 + [long_states(1_000)])
    states.num_left_out = 3
    lines = str(states).splitlines()
    assert len(lines) == 1 + 20 + 4
    assert lines[20].split()[0] == "19"
    assert lines[21] == "… 3 more"
    assert lines[22].split() == ["all", "1,198", "444", "2.79", "1,841", "776", "42%"]
    assert lines[24].startswith("The logits of 3 forwards were left out")


def test_table_of_nothing():
    assert str(SpecStates()) == "No rows."
    alone = SpecStates([SpecSequence([0], [made_round(0, 0, added=1)])])
    assert str(alone).splitlines()[1].split() == ["0", "1", "1", "–", "0", "0", "–", "–"]


# ---------------------------------------------------------------------- terminal


def shown(states: SpecStates, **options) -> str:
    """What a console prints, with the escapes of its styles."""
    file = io.StringIO()
    show(states, Console(file=file, width=100, **options))
    return file.getvalue()


def test_colours_and_cues():
    printed = shown(made_states(), force_terminal=True, color_system="truecolor")
    assert "\x1b[4;38;2;34;136;204m sky is\x1b[0m blue" in printed  # underlined and blue
    assert "\x1b[1;38;2;213;94;0m.⏎" in printed  # bold and red
    assert "added by the target: 4; accepted/drafted: \x1b[4;38;2;34;136;204massistant\x1b[0m 2/5" in printed


def test_cues_without_colour(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    printed = shown(made_states(), force_terminal=True, color_system="truecolor")
    assert "\x1b[4m sky is\x1b[0m blue" in printed
    assert "38;2" not in printed


def test_brackets_where_there_are_no_styles():
    printed = shown(made_states())
    assert "The⟦ sky is⟧ blue⟪.⏎\n [red]⟫</script><em>&lt; [b]$title⟪<|end|>⟫\n" in printed
    assert "added by the target: 4; accepted/drafted: ⟦assistant⟧ 2/5  ⟪prompt_lookup⟫ 3/3" in printed
    numbers = "9 tokens in 5 forwards, 2.00 per forward after the prefill, 5 of 8 (62%) drafted tokens accepted"
    assert f"{numbers}, ended by itself, 1.59 s" in " ".join(printed.split())


def test_tokens_of_several_sources():
    printed = shown(shared_states())
    assert "The⟮ sky is⟯⦃ blue⦄\n" in printed
    assert "⟮history⟯ 3/3  ⦃recycling⦄ 2/2" in printed
    note = "Several sources often draft the same token"
    assert note in printed
    assert note not in shown(made_states())


def test_rows_are_told_apart():
    printed = shown(SpecStates.concatenate([made_states(), made_states()]))
    assert [line.split()[:2] for line in printed.splitlines() if "──" in line] == [
        ["row", "0"],
        ["row", "1"],
        ["all", "rows"],
    ]
    assert "18 tokens in 10 forwards" in printed


def test_ids_without_texts():
    states = made_states()
    states[0].text_pieces = states.token_texts = None
    assert "‹0›⟦‹1›‹2›⟧‹3›⟪‹4›‹5›⟫" in shown(states)


def test_control_characters_do_not_reach_the_terminal():
    states = made_states()
    states[0].text_pieces[0] = "\x1b]0;title\x07\r\x9b"
    printed = shown(states)
    assert "␛]0;title␇␍\ufffd" in printed
    assert not set("\x1b\x07\r\x9b") & set(printed)


# ---------------------------------------------------------------------- console script


def inspect(*arguments):
    """Runs `hf-specstate inspect`."""
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "states.safetensors"
    made_states().save(path)
    return path


def test_inspect_shows_and_writes(saved, tmp_path):
    page = tmp_path / "new" / "page.html"
    result = inspect(saved, "--html", page)
    assert result.exit_code == 0, result.output
    assert str(made_states()) in result.output
    assert "The⟦ sky is⟧ blue" in result.output
    assert str(page) in result.output.replace("\n", "")
    assert page.read_text(encoding="utf-8") == made_states().to_html()


def test_inspect_decodes(tmp_path):
    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    states_of_tokens(tokenizer.encode("hello 🙂"), []).save(tmp_path / "states.safetensors")
    assert "hello" not in inspect(tmp_path / "states.safetensors").output
    result = inspect(tmp_path / "states.safetensors", "--tokenizer", tmp_path / "tokenizer")
    assert result.exit_code == 0, result.output
    assert "hello 🙂" in result.output


def assert_fails(result, sentence: str) -> None:
    assert result.exit_code == 1
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1
    assert isinstance(result.exception, SystemExit)


def test_inspect_fails_in_one_sentence(saved, tmp_path):
    missing = tmp_path / "missing.safetensors"
    assert_fails(inspect(missing), f"There is no file {missing}.")
    assert_fails(inspect(tmp_path), f"{tmp_path} could not be read: Is a directory.")
    assert_fails(inspect(saved, "--tokenizer", missing), f"The tokenizer {missing} could not be loaded: ")
    assert_fails(inspect(saved, "--html", saved / "page.html"), f"{saved / 'page.html'} could not be written: ")
    saved.write_bytes(saved.read_bytes()[:-1])
    assert_fails(inspect(saved), f"{saved} is damaged")


def test_help_names_the_command():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "inspect" in result.output
