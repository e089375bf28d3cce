"""Plots as SVG text that takes the page's own colour for axes and words, so that it reads in print and in the dark.

Owns the figures' style. Runs in the process of `loadtests.report`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from loadtests.bench.ledger import number

INK = "#010203"  # stands for the colour of the page's text
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#9467bd", "#888888")
MARKS = "os^Dv*PX"
KNOWN = (  # the same colour and mark in every plot
    *("concatenate", "contiguous", "step", "rotating", "quantised", "batched", "marathon", "marathon beside"),
)
POINTS = 40  # of a fitted line, which is bent on logarithmic axes
WIDE = 26  # letters of a legend's name
NO_LINE = " (no line)"
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
    "axes.axisbelow": True,
    "grid.alpha": 0.2,
    "grid.color": INK,
}


@dataclass(frozen=True, slots=True)
class Series:
    """Points with a name. `line` (intercept, slope) is drawn through them instead of joining them; `loose` points
    aren't joined at all, or, with `dashed`, by a broken line."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    line: tuple[float, float] | None = None
    loose: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """What is drawn. Axes name their units."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    log: str = ""  # the logarithmic axes: "y", "xy" or none; others begin at 0


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars: for each of `names` one bar a group. nan: not measured."""

    title: str
    x: str
    names: Sequence[str]
    groups: Sequence[tuple[str, Sequence[float]]]


def curves(plot: Plot) -> str:
    """Lines with marks, as one SVG element."""
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.6, 4.2), layout="constrained")
        for series, (colour, mark) in zip(plot.series, looks([series.name for series in plot.series]), strict=True):
            _draw(axes, series, colour, mark)
        axes.set(title=plot.title, xlabel=plot.x, ylabel=plot.y)
        _scale(axes, plot)
        _legend(figure, axes)
        return _svg(figure)


def looks(names: Sequence[str]) -> list[tuple[str, str]]:
    """Colour and mark of each series."""
    places = [_place(number, name.removesuffix(NO_LINE)) for number, name in enumerate(names)]
    return [(COLOURS[place % len(COLOURS)], MARKS[place % len(MARKS)]) for place in places]


def _place(number: int, name: str) -> int:
    return KNOWN.index(name) if name in KNOWN else number


def _scale(axes: plt.Axes, plot: Plot) -> None:
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if name in plot.log:
            axes.set(**{f"{name}scale": "log"})
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        else:
            axes.set(**{f"{name}lim": (0, None)})
            axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def _draw(axes: plt.Axes, series: Series, colour: str, mark: str) -> None:
    style = {"color": colour, "marker": mark, "markersize": 5, "label": series.name}
    joined = {(False, False): "-", (False, True): "--"}.get((series.loose or bool(series.line), series.dashed), "none")
    axes.plot(series.xs, series.ys, linestyle=joined, linewidth=1.4, **style)
    if series.line is not None:
        intercept, slope = series.line
        first, last = min(series.xs), max(series.xs)
        between = [first * (last / first) ** (n / POINTS) for n in range(POINTS + 1)]
        axes.plot(between, [intercept + slope * x for x in between], color=colour, linewidth=1)


def bars(plot: Bars) -> str:
    """Horizontal bars with their values, a cluster for each name; as one SVG element."""
    tall = 0.9 + len(plot.names) * (0.12 + 0.16 * len(plot.groups))
    with mpl.rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure, axes = plt.subplots(figsize=(7.6, tall), layout="constrained")
        height = 0.84 / len(plot.groups)
        colours = [colour for colour, _ in looks([label for label, _ in plot.groups])]
        for number, ((label, values), colour) in enumerate(zip(plot.groups, colours, strict=True)):
            places = [place + number * height for place in range(len(plot.names))]
            drawn = axes.barh(places, values, height, label=label, color=colour)
            axes.bar_label(drawn, [_figure(value) for value in values], padding=3, fontsize=7.5, color=INK)
        axes.set_yticks([place + 0.42 - height / 2 for place in range(len(plot.names))], plot.names)
        axes.invert_yaxis()
        axes.margins(x=0.12, y=0.4 / len(plot.names) / len(plot.groups))
        axes.set(title=plot.title, xlabel=plot.x)
        _legend(figure, axes)
        return _svg(figure)


def _figure(value: float) -> str:
    return "" if value != value else number(value)


def _legend(figure: plt.Figure, axes: plt.Axes) -> None:
    """Under the axes, so that they have the whole width."""
    handles, names = axes.get_legend_handles_labels()
    columns = 3 if max(map(len, names)) < WIDE else 2
    figure.legend(handles, names, loc="outside lower center", ncols=columns, fontsize=8.5)


def _svg(figure: plt.Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    plt.close(figure)
    found = text.getvalue()
    found = found[found.index("<svg") :].replace(INK, "currentColor")
    return re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.DOTALL)
