"""matplotlib figures as SVG that lives inside a page: its colours are the page's own, so they follow light and dark.

A figure is drawn in marker colours that nothing else uses, and each is then replaced by a CSS variable.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, replace
from typing import Any

from stochflow.errors import one_line
from stochflow.files.shield import plain_matplotlib

MARKERS = {  # drawn in this -> shown as that variable of the page
    "#010203": "--ink",
    "#020304": "--faint",
    "#030405": "--rule",
    "#110011": "--c1",
    "#220022": "--c2",
    "#330033": "--c3",
    "#440044": "--c4",
}
INK, FAINT, RULE, *SERIES = MARKERS
WIDTH, HEIGHT = 4.4, 2.9  # inches; a page shows them about 400 pixels wide, so 9 points stay readable on a phone


@dataclass(frozen=True)
class Panel:
    """A figure of the report with its words."""

    key: str
    title: str
    svg: str
    caption: str


def axes(width: float = WIDTH, height: float = HEIGHT, x: str = "", y: str = "", grid: bool = True) -> tuple[Any, Any]:
    """An empty figure and its axes, in the page's colours. No pyplot: nothing global, so it may be drawn in any thread."""
    plain_matplotlib()
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    figure.patch.set_alpha(0)
    ax = figure.add_subplot()
    ax.patch.set_alpha(0)
    for name, spine in ax.spines.items():
        spine.set_color(RULE)
        spine.set_visible(name in ("left", "bottom"))
    ax.tick_params(colors=FAINT, which="both", labelsize=9, width=0.6, length=3)
    ax.tick_params(which="minor", length=0, labelsize=8)
    ax.ticklabel_format(useOffset=False)  # a tick says its number, not what is to be added to another
    ax.set_xlabel(told(x), color=INK, fontsize=10)
    ax.set_ylabel(told(y), color=INK, fontsize=10)
    if grid:
        ax.grid(color=RULE, linewidth=0.5)
        ax.set_axisbelow(True)
    return figure, ax


def legend(ax: Any, columns: int = 2) -> None:
    """Above the axes, where it can cover nothing."""
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        made = ax.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=columns,
            frameon=False,
            fontsize=9,
            handlelength=1.6,
            borderaxespad=0,
        )
        for text in made.get_texts():
            text.set_color(INK)


def told(text: str) -> str:
    """A name from outside as a label: on one line, and its dollar signs begin no formula."""
    return one_line(text, 80).replace("$", r"\$")


def svg(figure: Any, title: str) -> str:
    """The figure as inline SVG: text stays text, no name from outside, nothing to fetch."""
    import matplotlib as mpl

    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"\sxmlns(:\w+)?=\"[^\"]*\"", "", text).replace("xlink:href", "href")
    text = re.sub(
        r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text
    )  # the page's own font, whatever the machine has
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    for colour, name in MARKERS.items():
        text = text.replace(colour, f"var({name})")
    size = re.search(r'viewBox="[\d.]+ [\d.]+ ([\d.]+) ([\d.]+)"', text)
    assert size is not None
    first = figure.axes[0]
    names = f'data-x="{_attribute(first.get_xlabel())}" data-y="{_attribute(first.get_ylabel())}"'  # so that a test can ask for them
    head = f'<svg viewBox="0 0 {size[1]} {size[2]}" role="img" aria-label="{_attribute(title)}" {names}>'
    text = re.sub(r"<svg [^>]*>", lambda _: head, text, count=1)
    used = set(re.findall(r"(?:href=\"#|url\(#)([^\")]+)", text))
    return re.sub(r'\s?\bid="([^"]+)"', lambda m: m[0] if m[1] in used else "", text).strip()


def owned(panel: Panel, prefix: str) -> Panel:
    """The panel with its ids under a prefix: ids are the page's, and two figures must not borrow each other's clip paths."""
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-{panel.key}-\1"', panel.svg)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-{panel.key}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-{panel.key}-\1)", text)
    return replace(panel, svg=text)


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
