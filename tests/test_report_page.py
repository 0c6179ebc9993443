"""The page in a browser."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

from hf_specstate import SpecStates
from tests.made_states import long_states, made_states

pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1400,1000"
).split()

# Runs before anything of the page: what goes wrong in it is gathered.
WATCH = """<script>
window.problems = [];
addEventListener("error", event => problems.push(String(event.message)));
addEventListener("securitypolicyviolation", event => problems.push(event.violatedDirective));
for (const level of ["error", "warn"]) console[level] = (...parts) => problems.push(parts.join(" "));
</script>"""

# Runs after it: uses the page, and leaves behind what was seen.
USE = """<script>
(() => {
  const seen = {};
  const rounds = document.querySelectorAll(".r");
  const panel = document.getElementById("panel");
  const fire = (target, type, more) => target.dispatchEvent(new Event(type, {bubbles: true}));
  const key = name => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key: name, bubbles: true}));
  const title = () => panel.querySelector("h2").textContent;
  const rows = () => [...panel.querySelectorAll("tbody tr")].map(row => [...row.cells].map(cell => cell.textContent));
  const held = () => document.body.classList.contains("held");

  fire(rounds[1].children[0], "mouseover");
  seen.hovered = {title: title(), text: panel.querySelector(".outcome").textContent, rows: rows(),
    facts: panel.querySelector("dl").innerText, here: panel.querySelector(".here .token").textContent,
    marked: [...document.querySelectorAll(".r.on")].map(round => round.textContent)};
  fire(rounds[2].children[0], "mouseover");
  seen.tree = {title: title(), rows: rows(), indents: [...panel.querySelectorAll("tbody td:nth-child(3)")].map(
    cell => cell.style.paddingLeft)};

  rounds[1].children[1].click();
  seen.clicked = [title(), held()];
  fire(rounds[2].children[0], "mouseover");
  seen.stays = title();
  panel.click();
  seen.afterPanel = held();
  document.body.click();
  seen.elsewhere = held();
  rounds[1].click();
  key("Escape");
  seen.escaped = held();
  rounds[1].click();
  rounds[1].click();
  seen.twice = held();
  rounds[1].click();
  rounds[0].tabIndex = 0;
  rounds[0].focus();  // as the press of a button does before the click
  rounds[0].click();
  seen.moved = [title(), held()];
  rounds[0].click();

  document.querySelector(".text [tabindex]").focus();
  key("Home");
  seen.home = title();
  key("ArrowRight");
  key("ArrowRight");
  key("Enter");
  seen.keyboard = [title(), held(), document.querySelectorAll(".text [tabindex]").length];
  key("End");
  seen.end = [title(), panel.innerText.includes("the text ended here, by itself")];
  key("Escape");

  seen.text = document.querySelector(".text").textContent;
  seen.em = document.querySelectorAll("em").length;
  seen.dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const style = getComputedStyle(document.body);
  seen.colours = [style.backgroundColor, style.color];
  seen.chart = getComputedStyle(document.querySelector("svg text")).fill;
  seen.cues = ["s0", "s1"].map(name => getComputedStyle(document.querySelector(".text ." + name)).textDecorationStyle);
  seen.wider = document.documentElement.scrollWidth > innerWidth || panel.scrollWidth > panel.clientWidth;
  seen.requests = performance.getEntriesByType("resource").map(entry => entry.name);
  seen.problems = problems;
  const result = document.createElement("pre");
  result.id = "seen";
  result.textContent = JSON.stringify(seen);
  document.body.append(result);
})();
</script>"""


@pytest.fixture
def browse(tmp_path):
    """Opens the page of some states in a browser, and returns what it prints."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no browser here")

    def run(source: str, *options: str) -> str:
        page = tmp_path / "page.html"
        page.write_text(source, encoding="utf-8")
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        done = subprocess.run(
            [browser, *OPTIONS, profile, *options, page.as_uri()], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def use(browse, states: SpecStates, *options: str) -> dict:
    source = states.to_html().replace("<head>", "<head>" + WATCH, 1).replace("</body>", USE + "</body>")
    document = browse(source, "--virtual-time-budget=10000", "--dump-dom", *options)
    return json.loads(unescape(re.search(r'<pre id="seen">(.*?)</pre>', document, flags=re.DOTALL)[1]))


def test_the_page_in_use(browse):
    seen = use(browse, made_states())
    assert seen["problems"] == []
    assert seen["requests"] == []
    assert not seen["wider"]

    hovered = seen["hovered"]
    assert hovered["title"] == "Round 1"
    assert hovered["text"] == "2 of 3 drafted tokens accepted, the target added one token."
    assert hovered["marked"] == [" sky is blue"]
    assert hovered["here"] == "␣sky"
    assert hovered["rows"] == [
        ["✓", "1", "␣sky", "assistant", "90%", "95%", ""],
        ["✓", "2", "␣is", "assistant", "80%", "100%", ""],
        ["", "3", "␣green", "assistant", "25%", "<0.1%", "␣blue"],
        ["+", "3", "␣blue", "target", "", "61%", ""],
    ]
    for fact in (
        "␣blue 61%, ␣green 30%",
        "up to 5 drafted tokens",
        "drafting 1.0 ms, the target 20 ms, the rest 0.5 ms",
    ):
        assert fact in hovered["facts"]

    assert [row[:4] for row in seen["tree"]["rows"]] == [
        ["✓", "1", ".⏎", "prompt_lookup"],
        ["✓", "2", "␣[red]", "prompt_lookup"],
        ["+", "3", "</script><em>&lt;", "target"],
        ["", "1", "␣green", "assistant"],
        ["", "2", "</script><em>&lt;", "assistant"],
    ]
    assert len(set(seen["tree"]["indents"])) == 1  # both branches of the only fork are as far in

    assert (seen["clicked"], seen["stays"]) == (["Round 1", True], "Round 1")
    assert (seen["afterPanel"], seen["elsewhere"], seen["escaped"], seen["twice"]) == (True, False, False, False)
    assert seen["moved"] == ["Round 0", True]
    assert seen["home"] == "Round 0"
    assert seen["keyboard"] == ["Round 2", True, 1]
    assert seen["end"] == ["Round 4", True]

    assert seen["text"] == "".join(made_states()[0].text_pieces)
    assert seen["em"] == 0
    assert seen["cues"] == ["solid", "dashed"]


def luminance(colour: str) -> float:
    return sum(map(float, re.findall(r"\d+", colour)[:3])) / 3


@pytest.mark.parametrize(("scheme", "dark"), [("1", False), ("0", True)])
def test_light_and_dark(browse, scheme, dark):
    seen = use(browse, made_states(), f"--blink-settings=preferredColorScheme={scheme}")
    assert seen["dark"] is dark
    page, ink = map(luminance, seen["colours"])
    assert (page < 60 and ink > 200) if dark else (page > 230 and ink < 60)
    assert luminance(seen["chart"]) == ink


def test_ten_thousand_tokens(browse):
    seen = use(browse, SpecStates.concatenate([made_states(), long_states(10_000)]))
    assert seen["problems"] == []
    assert seen["hovered"]["title"] == "Round 1 of row 0"


@pytest.mark.parametrize("width", [500, 1000, 1200])
def test_everything_fits_into_the_window(browse, width):
    assert not use(browse, made_states(), f"--window-size={width},900")["wider"]


def test_print(browse, tmp_path):
    pdf = tmp_path / "page.pdf"
    browse(made_states().to_html(), f"--print-to-pdf={pdf}", "--no-pdf-header-footer")
    assert pdf.read_bytes().startswith(b"%PDF")
