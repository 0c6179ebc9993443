"""The page as a file, and its charts. What it does in a browser is in `test_report_page.py`."""

import io
import json
import re
import sys
from collections import Counter
from html.parser import HTMLParser

import pytest

from hf_specstate import SpecSequence, SpecStates
from hf_specstate.reporting.plots import MOST_STEPS
from tests.made_states import long_states, made_round, made_states, shared_states

UNPAIRED = {"meta", "link", "br"}


class Page(HTMLParser):
    """The parts of a page that tests look at; fails on tags that do not match."""

    def __init__(self, source: str):
        super().__init__()
        self.open: list[tuple[str, dict]] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.texts: list[str] = []  # of each row
        self.rounds: list[str] = []
        self.contents: dict[str, str] = {}  # element with an id -> text directly inside
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in UNPAIRED:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] += 1
        attributes = dict(attrs)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.texts += [""] if attributes.get("class") == "text" else []
        self.rounds += [""] if attributes.get("class") == "r" else []

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        classes = {attributes.get("class") for _, attributes in self.open}
        if "text" in classes:
            self.texts[-1] += data
        if "r" in classes:
            self.rounds[-1] += data
        if self.open and "id" in self.open[-1][1]:
            self.contents[self.open[-1][1]["id"]] = data

    @property
    def data(self) -> dict:
        return json.loads(self.contents["data"])


def test_texts_are_texts():
    page = Page(made_states().to_html())
    assert page.texts == ["".join(made_states()[0].text_pieces)]
    assert page.rounds == ["The", " sky is blue", ".\n [red]</script><em>&lt;", " [b]$title", "<|end|>"]
    assert page.tags["em"] == 0
    assert page.data["texts"]["6"] == "</script><em>&lt;"
    assert page.data["texts"]["4"] == ".⏎"


def test_names_of_drafters_are_texts():
    name = '</script><em title="$data">\u2028'
    states = SpecStates([SpecSequence([0], [made_round(1, 0, [1], sources=name, accepted=[0])], [" sky"])])
    page = Page(states.to_html())
    assert page.tags["em"] == 0
    assert page.data["sources"] == [name]


def test_data_of_rounds():
    states = made_states()
    rounds = Page(states.to_html()).data["rows"][0]
    assert rounds[0] == {
        "round": 0,
        "best": [0],
        "added": 0,
        "rows": 1,
        "width": 1,
        "time": ["0.0 ms", "1.50 s", "0.0 ms"],
    }
    assert rounds[1] == {
        "round": 1, "ids": [1, 2, 8], "parents": [-1, 0, 1], "by": [0, 0, 0], "draft": [0.9, 0.8, 0.25],
        "target": [0.95, 1.0, 0.0004], "best": [1, 2, 3, 4], "taken": [0, 1], "added": 3, "next": [[3, 0.61], [8, 0.3]],
        "planned": 5, "rows": 1, "width": 4, "time": ["1.0 ms", "20 ms", "0.5 ms"],
    }  # fmt: skip
    assert rounds[2]["by"] == [1, 0, 1, 0]
    assert rounds[2]["draft"] == [None] * 4
    assert rounds[4]["stop"] == "by itself"
    assert "added" not in rounds[4]


def test_tokens_of_several_sources():
    source = shared_states().to_html()
    data = Page(source).data
    assert data["sources"] == ["history", "history + recycling", "recycling + history"]
    assert data["looks"] == [0, 0, 1]
    assert data["rows"][0][1]["by"] == [0, 1, 2]
    assert re.findall(r'<span class="d (s.)">( .*?)</span>', source) == [("s0", " sky"), ("s0", " is"), ("s1", " blue")]
    assert "Several sources often" in source
    assert "Several sources often" not in made_states().to_html()


def test_the_page_needs_nothing_else():
    source = made_states().to_html()
    assert not re.search(r"https?:|//[a-z]|@import", source)
    assert set(re.findall(r'(?:href|src)="([^#])', source)) == {"d"}  # the empty icon
    assert set(re.findall(r"url\((.)", source)) <= {"#"}


def test_ids_are_unique_and_references_lead_somewhere():
    source = made_states().to_html()
    ids = Page(source).ids
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(|href=")#([^")]+)', source)) <= set(ids)


def test_charts_take_the_colour_of_the_text():
    source = made_states().to_html()
    assert source.count("<svg ") == 3
    assert "currentColor" in source
    assert "#010203" not in source
    assert "fill: #ffffff" not in source


def test_the_same_states_give_the_same_page():
    assert made_states().to_html() == made_states().to_html()


def test_states_that_were_never_decoded():
    states = made_states()
    states[0].text_pieces = states.token_texts = None
    page = Page(states.to_html())
    assert page.texts == ["‹0›‹1›‹2›‹3›‹4›‹5›‹6›‹7›‹9›"]
    assert page.data["texts"] == {}


def test_several_rows_and_none():
    page = Page(SpecStates.concatenate([made_states(), long_states(30)]).to_html())
    assert [len(rounds) for rounds in page.data["rows"]] == [5, 11]
    assert len(page.texts) == 2
    assert "No rows." in SpecStates().to_html()


def test_ten_thousand_tokens():
    states = long_states(10_000)
    source = states.to_html()
    page = Page(source)
    assert page.texts == ["".join(states[0].text_pieces)]
    assert len(page.data["rows"][0]) == len(states[0])
    assert len(source) < 250 * 10_000


def test_notebooks_get_the_page_in_a_frame():
    states = made_states()

    class Frame(HTMLParser):
        def handle_starttag(self, tag, attrs):
            self.tag, self.attributes = tag, dict(attrs)

    frame = Frame()
    frame.feed(states._repr_html_())
    assert frame.tag == "iframe"
    assert frame.attributes["srcdoc"] == states.to_html()


def test_without_matplotlib(monkeypatch):
    for name in ("plots", "charts"):
        monkeypatch.delitem(sys.modules, f"hf_specstate.reporting.{name}", raising=False)
    for name in ("matplotlib", "matplotlib.axes", "matplotlib.figure", "matplotlib.ticker"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"^Charts need matplotlib: `pip install matplotlib`\.$"):
        made_states().plot()
    page = made_states().to_html()
    assert "Install matplotlib" in page and "<figure>" not in page
    assert "srcdoc" in made_states()._repr_html_()


# ---------------------------------------------------------------------- charts


def panel(states: SpecStates, name: str):
    figure = states.plot()[name]
    figure.savefig(io.BytesIO())  # what cannot be drawn fails here
    return figure.axes[0]


def steps(axes) -> list[list[float]]:
    return [patch.get_data().values.tolist() for patch in axes.patches]


def test_acceptance_by_depth():
    axes = panel(made_states(), "acceptance_by_depth")
    # depth 1: all three rounds that drafted; depth 2: both that went so deep; depth 3: one that accepted nothing there
    assert [bar.get_height() for bar in axes.patches] == [1, 1, 0]
    assert [text.get_text() for text in axes.texts] == ["100%\nof 3", "100%\nof 2", "0%\nof 1"]
    ticks = [tick for tick in axes.get_xticks() if 0.4 < tick < 3.6]
    assert ticks == [1, 2, 3]
    assert axes.get_xlabel() and axes.get_ylabel()


def test_acceptance_by_source():
    axes = panel(made_states(), "acceptance_by_source")
    assert [round(bar.get_width(), 6) for bar in axes.patches] == [0.4, 1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["assistant", "prompt_lookup"]
    assert [text.get_text() for text in axes.texts] == ["40% of 5", "100% of 3"]


def test_names_of_drafters_are_no_formulas():
    states = SpecStates([SpecSequence([0], [made_round(1, 0, [1], sources="$\\frac$ & <b>", accepted=[0])])])
    panel(states, "acceptance_by_source")
    assert "$\\frac$ &amp; &lt;b&gt;" in states.to_html()


def test_draft_size():
    axes = panel(made_states(), "draft_size")
    assert steps(axes) == [[3, 4, 0, 1], [2, 2, 0, 1]]
    assert axes.patches[0].get_data().edges.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert axes.get_xlabel() == "round"
    assert axes.get_ylabel() == "tokens a round"


def test_thousands_of_rounds_are_averaged():
    states = SpecStates.concatenate([long_states(10_000), long_states(4_000)])
    axes = panel(states, "draft_size")
    drafted, accepted = steps(axes)
    assert MOST_STEPS / 2 < len(drafted) <= MOST_STEPS
    assert (set(drafted), set(accepted)) == ({5}, {2})
    assert axes.get_xlabel() == "round, 56 in a step"


@pytest.mark.parametrize("name", ["acceptance_by_depth", "acceptance_by_source", "draft_size"])
@pytest.mark.parametrize("states", [SpecStates(), SpecStates([SpecSequence([0], [made_round(0, 0, added=1)])])])
def test_nothing_was_drafted(name, states):
    assert [text.get_text() for text in panel(states, name).texts] == ["nothing was drafted"]
