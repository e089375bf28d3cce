"""Plots as SVG text that takes the page's own colour for axes and words, so that it reads in print and in the dark.

Owns the figures' style. Runs in the process of `loadtests.report`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt

INK = "#010203"  # stands for the colour of the page's text
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#7a5195", "#888888")
MARKS = "os^Dv*PX"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "laboratory",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "axes.grid": True,
    "grid.alpha": 0.2,
    "grid.color": INK,
}


@dataclass(frozen=True, slots=True)
class Series:
    """Points with a name; `line` (intercept, slope) is drawn through them instead of joining them."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    line: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Plot:
    """What is drawn. Axes name their units."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    zero: bool = True  # the y axis begins at 0
    log: bool = False  # both axes are logarithmic


def curves(plot: Plot) -> str:
    """Lines with marks, as one SVG element."""
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 3.9), layout="constrained")
        for series, colour, mark in zip(plot.series, cycle(COLOURS), cycle(MARKS)):
            _draw(axes, series, colour, mark)
        if plot.log:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        elif plot.zero:
            axes.set_ylim(bottom=0)
        axes.set(title=plot.title, xlabel=plot.x, ylabel=plot.y)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8.5)
        return _svg(figure)


def _draw(axes: plt.Axes, series: Series, colour: str, mark: str) -> None:
    style = {"color": colour, "marker": mark, "markersize": 4.5}
    if series.line is None:
        axes.plot(series.xs, series.ys, label=series.name, linewidth=1.4, **style)
        return
    intercept, slope = series.line
    axes.plot(series.xs, series.ys, label=series.name, linestyle="none", **style)
    axes.plot(series.xs, [intercept + slope * x for x in series.xs], color=colour, linewidth=1)


def bars(title: str, x: str, names: Sequence[str], groups: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Horizontal bars, a group for each name; as one SVG element."""
    with mpl.rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure, axes = plt.subplots(figsize=(7.2, 0.8 + 0.34 * len(names)), layout="constrained")
        height = 0.8 / len(groups)
        for number, ((label, values), colour) in enumerate(zip(groups, cycle(COLOURS))):
            places = [place + number * height for place in range(len(names))]
            axes.barh(places, values, height, label=label, color=colour)
        axes.set_yticks([place + 0.4 - height / 2 for place in range(len(names))], names)
        axes.invert_yaxis()
        axes.set(title=title, xlabel=x)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8.5)
        return _svg(figure)


def _svg(figure: plt.Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    plt.close(figure)
    found = text.getvalue()
    found = found[found.index("<svg") :].replace(INK, "currentColor")
    return re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.DOTALL)
