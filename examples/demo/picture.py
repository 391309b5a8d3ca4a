"""The picture the tour ends with: loss and accuracy over time, and who sent what to whom."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

Traffic = dict[tuple[str, str], int]
"""Bytes by sender and receiver."""


def draw(epochs: Sequence[dict[str, Any]], move: Traffic, training: Traffic, path: Path) -> None:
    """Write the picture to `path` as PNG."""
    figure, (curves, moved, trained) = plt.subplots(
        1, 3, figsize=(16, 5), width_ratios=(1.5, 1, 0.8), layout="constrained"
    )
    figure.suptitle("quicmesh: a direct tensor move and a DDP training over QUIC", fontsize=14)
    _draw_curves(curves, epochs)
    _draw_traffic(moved, move, "64 MiB from A to B, ordered by the client")
    _draw_traffic(trained, training, "gradients between the ranks")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_curves(axes: Any, epochs: Sequence[dict[str, Any]]) -> None:
    seconds = [epoch["seconds"] for epoch in epochs]
    axes.plot(seconds, [epoch["loss"] for epoch in epochs], "o-", color="tab:red", label="loss")
    axes.set(xlabel="seconds", ylabel="training loss", title="handwritten digits, two processes")
    axes.set_ylim(bottom=0)
    right = axes.twinx()
    percent = [100 * epoch["accuracy"] for epoch in epochs]
    right.plot(seconds, percent, "s-", color="tab:blue", label="test accuracy")
    right.set(ylabel="test accuracy, %", ylim=(0, 100))
    right.axhline(95, color="tab:blue", linewidth=0.8, linestyle=":")
    right.text(seconds[0], 93, "95 %", color="tab:blue", va="top")
    lines = axes.get_lines() + right.get_lines()[:1]
    axes.legend(lines, [line.get_label() for line in lines], loc="center right")
    axes.grid(alpha=0.3)


def _draw_traffic(axes: Any, traffic: Traffic, title: str) -> None:
    names = sorted({name for pair in traffic for name in pair})
    largest = max(traffic.values(), default=1) or 1
    grid = [[traffic.get((row, column), 0) / largest for column in names] for row in names]
    axes.imshow(grid, cmap="Blues", vmin=0, vmax=1.3)
    for y, row in enumerate(names):
        for x, column in enumerate(names):
            if row != column:
                size = traffic.get((row, column), 0)
                ink = "white" if size > largest / 2 else "black"
                axes.text(x, y, human(size), ha="center", va="center", fontsize=11, color=ink)
    axes.set_xticks(range(len(names)), [f"to {name}" for name in names])
    axes.set_yticks(range(len(names)), [f"from {name}" for name in names])
    axes.set_title(title)


def human(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
