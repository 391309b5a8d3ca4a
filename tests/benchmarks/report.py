"""How figures are shown: a table and ratios for people, a line of JSON for each, a picture."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.benchmarks.compare import Row, Shown

__all__ = ["plot", "show", "show_json"]

PIPE_WIDTH = 160


def show(rows: list[Row], ratios: list[Shown]) -> None:
    """Print a table of `rows`, and the ratios below it."""
    table = Table(
        "part",
        "figure",
        "contender",
        "median",
        "least",
        "most",
        "p99",
        "CPU s/GB send",
        "recv",
        "others",
    )
    before = None
    for row in rows:
        if before not in (None, (row.part, row.figure)):
            table.add_section()
        before = (row.part, row.figure)
        table.add_row(
            row.part,
            row.figure,
            row.contender,
            f"{_number(row.median)} {row.unit}",
            _number(row.least),
            _number(row.most),
            *(_number(value) for value in (row.p99, row.send_cpu, row.receive_cpu)),
            "" if row.others is None else f"{row.others:.0%}",
        )
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(table)
    for shown in ratios:
        if shown.ratio is not None:
            console.print(f"{shown.what}: {shown.ratio:.2f}{_goal(shown)}", highlight=False)


def show_json(rows: list[Row], ratios: list[Shown]) -> None:
    """Print a line for each figure and each ratio."""
    for row in rows:
        print(json.dumps(dataclasses.asdict(row)))
    for shown in ratios:
        print(json.dumps(dataclasses.asdict(shown) | {"holds": shown.holds}))


def plot(rows: list[Row], path: Path) -> None:
    """Draw bars, one picture of them for each figure."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figures = list(dict.fromkeys((row.part, row.figure) for row in rows))
    heights = [1 + sum((row.part, row.figure) == each for row in rows) for each in figures]
    drawing, axes = pyplot.subplots(
        len(figures),
        1,
        figsize=(9, 0.32 * sum(heights) + 0.6 * len(figures)),
        squeeze=False,
        height_ratios=heights,
        layout="constrained",
    )
    for axis, each in zip(axes[:, 0], figures, strict=True):
        shown = [row for row in rows if (row.part, row.figure) == each][::-1]
        medians = [row.median for row in shown]
        errors = [
            [row.median - row.least for row in shown],
            [row.most - row.median for row in shown],
        ]
        colours = ["#1f6f8b" if "quicmesh" in row.contender else "#b8b8b8" for row in shown]
        bars = axis.barh([row.contender for row in shown], medians, xerr=errors, color=colours)
        axis.bar_label(bars, labels=[_number(value) for value in medians], padding=4, fontsize=8)
        axis.set_title(f"{each[0]}: {each[1]}, {shown[0].unit}", loc="left", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    drawing.savefig(path, dpi=130)
    pyplot.close(drawing)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _goal(shown: Shown) -> str:
    if shown.goal is None:
        return ""
    word = "at most" if shown.at_most else "at least"
    return f"  ({word} {shown.goal:g}: {'yes' if shown.holds else 'NO'})"
