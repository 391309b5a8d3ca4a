"""How answers look: a table or a few lines for people, one JSON document with ``--json``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

__all__ = [
    "JsonOption",
    "age_text",
    "bytes_text",
    "json_out",
    "lane_text",
    "rtt_text",
    "table",
    "time_text",
]

JsonOption = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]
"""On every verb that reads."""

PIPE_WIDTH = 200
"""Columns when the output is no terminal: wide enough that no id is cut."""


def json_out(document: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print one JSON document, indented and with sorted keys."""
    print(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str) -> None:
    """Print a table, or the line `empty` when there are no rows."""
    lines = list(rows)
    if not lines:
        print(empty)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        grid.add_column(column, overflow="fold")
    for line in lines:
        grid.add_row(*(Text(cell) for cell in line))  # as text: peers' words hold no markup
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(grid)


def rtt_text(seconds: float | None) -> str:
    """Write a round trip as people do: ``0.42 ms``."""
    return "-" if seconds is None else f"{seconds * 1000:.2f} ms"


def lane_text(answer: Mapping[str, Any]) -> str:
    """Write the lane of a peer, and why it is none that is faster: ``quic: another host``."""
    lane, reason = answer.get("lane"), answer.get("lane_reason")
    if lane is None:
        return "-"
    return str(lane) if reason is None else f"{lane}: {reason}"


def bytes_text(count: int | None) -> str:
    """Write a number of bytes with a binary unit: ``1.5 MiB``."""
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def time_text(unix: float | None) -> str:
    """Write a moment in local time, to the minute."""
    return "-" if unix is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(unix))


def age_text(seconds: float) -> str:
    """Write how long something has been there: ``12 s``, ``3 min``, ``5.1 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
