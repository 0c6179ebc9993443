"""The charts as SVG inside a page, whose text colour they take."""

import re

from ..states import SpecStates
from .plots import as_svg, draw

# A colour that nothing else has, to be found again in the file.
_INK = "#010203"


def charts(states: SpecStates) -> str:
    """The figures of [`~plots.plot`] as HTML."""
    figures = draw(states, _INK)
    return "\n".join(f"<figure>{_inline(as_svg(figure, name), name)}</figure>" for name, figure in figures.items())


def _inline(svg: str, name: str) -> str:
    """One `<svg>` element out of a file. Its ids begin with `name`, as another chart of the page has the same ones."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # it would hold for the whole page
    svg = re.sub(r"<[^>]+>", lambda tag: _adapted(tag[0], name), svg)
    title = name.replace("_", " ")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1).strip()


def _adapted(tag: str, name: str) -> str:
    tag = tag.replace(_INK, "currentColor")
    tag = re.sub(r' (xmlns(:xlink)?|version)="[^"]*"', "", tag)
    if tag.startswith("<svg"):
        tag = re.sub(r' (width|height)="[^"]*"', "", tag)
    tag = re.sub(r'\bid="', f'id="{name}-', tag)
    tag = re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', tag)
    return tag.replace("url(#", f"url(#{name}-")
