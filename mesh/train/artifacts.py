"""What a training leaves in its directory: metrics as a table (CSV) and as a plot (SVG)."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

__all__ = ["write_metrics"]

WIDTH, HEIGHT, MARGIN, LEGEND = 640, 240, 48, 110
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")


def write_metrics(directory: Path, records: Sequence[Mapping[str, float]]) -> None:
    """Write ``metrics.csv``, a line for each record, and ``metrics.svg``, a plot for each metric.

    Args:
        directory: is there.
        records: of the epochs, in order; each has its number as ``"epoch"``.
    """
    names = list(dict.fromkeys(name for record in records for name in record))
    with (directory / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(records)
    (directory / "metrics.svg").write_text(_plots(records, names))


def _plots(records: Sequence[Mapping[str, float]], names: Sequence[str]) -> str:
    """Return plots below each other: what is of training and of validation goes into one."""
    panels: dict[str, list[str]] = {}
    for name in names:
        if name != "epoch":
            panels.setdefault(name.partition("_")[2] or name, []).append(name)
    parts = [
        _panel(records, title, shown, number * HEIGHT)
        for number, (title, shown) in enumerate(panels.items())
    ]
    height = max(1, len(parts)) * HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{"".join(parts)}</svg>\n'
    )


def _panel(
    records: Sequence[Mapping[str, float]], title: str, names: Sequence[str], top: float
) -> str:
    lines = {
        name: [
            (record["epoch"], record[name])
            for record in records
            if name in record and math.isfinite(record[name])
        ]
        for name in names
    }
    points = [point for line in lines.values() for point in line]
    left, right = MARGIN, WIDTH - LEGEND
    upper, lower = top + 28, top + HEIGHT - 32
    low_x, high_x = _span([x for x, _ in points])
    low_y, high_y = _span([y for _, y in points])

    def at(x: float, y: float) -> str:
        across = left + (x - low_x) / (high_x - low_x) * (right - left)
        down = lower - (y - low_y) / (high_y - low_y) * (lower - upper)
        return f"{across:.1f},{down:.1f}"

    drawn = [
        f'<text x="{left}" y="{top + 18}" font-size="13">{escape(title)}</text>\n',
        f'<polyline fill="none" stroke="#888" points="{left},{upper} {left},{lower} '
        f'{right},{lower}"/>\n',
        f'<text x="{left - 4}" y="{upper + 4}" text-anchor="end">{high_y:.3g}</text>\n',
        f'<text x="{left - 4}" y="{lower}" text-anchor="end">{low_y:.3g}</text>\n',
        f'<text x="{left}" y="{lower + 16}">{low_x:g}</text>\n',
        f'<text x="{right}" y="{lower + 16}" text-anchor="end">epoch {high_x:g}</text>\n',
    ]
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        drawn.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" '
            f'points="{" ".join(at(*point) for point in line)}"/>\n'
            f'<text x="{right + 8}" y="{upper + 14 * (number + 1)}" fill="{colour}">'
            f"{escape(name)}</text>\n"
        )
    return "".join(drawn)


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Return bounds that are apart."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 0.5, low + 0.5)
