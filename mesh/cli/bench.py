"""``bench``: how fast bytes and small messages go to a peer and come back."""

from __future__ import annotations

import dataclasses
import json as json_text
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mesh.cli.output import bytes_text, rtt_text, table
from mesh.cli.signals import run
from mesh.home import Home

if TYPE_CHECKING:
    from mesh.bench import Plan, Result

__all__ = ["add_to", "size_in_bytes"]

DEFAULT_SIZES = "64K,1M,16M,256M"
CONNECT_SECONDS = 10.0

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MAX_SIZE = 64 << 30


def add_to(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(bench)


def bench(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="PEER", help="Petname, node id or ticket.")],
    sizes: Annotated[
        str, typer.Option(metavar="SIZE,...", help="Sizes of tensors to move, as in 64K,1M,2G.")
    ] = DEFAULT_SIZES,
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="Moves of each size each way, at least.")
    ] = 5,
    calls: Annotated[
        int, typer.Option(min=0, max=100_000, help="Small messages to send, each answered.")
    ] = 200,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=600.0, help="Seconds for all moves of a size one way.")
    ] = 10.0,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="Seconds for each move and each answer.")
    ] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="A line of JSON for each figure.")] = False,
) -> None:
    """Measure throughput and round trips to a peer.

    Tensors go there and come back, and so do small messages. The command is a program of this
    machine's own: it needs no daemon here, and at the peer what any program needs that puts tensors
    there and reads them.
    """
    numbers = [size_in_bytes(text) for text in sizes.split(",")]
    from mesh.bench import Plan  # and with it what knows of tensors

    plan = Plan(sizes=numbers, rounds=rounds, calls=calls, seconds=seconds, timeout=timeout)
    results: list[Result] = []

    def found(result: Result) -> None:
        results.append(result)
        _warn(result)
        if json:
            print(json_text.dumps(_as_line(result)), flush=True)

    with _progress() as moved:
        run(_bench, context.obj, target, plan, found, moved)
    if not json:
        _show(results)


def size_in_bytes(text: str) -> int:
    """Return a number of bytes: ``"64K"`` is 65536, and so are ``"64KiB"`` and ``"65536"``.

    Raises:
        typer.BadParameter: it is none, or out of bounds.
    """
    match = re.fullmatch(r"\s*(\d{1,12})\s*([KMG]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size: a number, and K, M or G, as in 16M")
    size = int(match[1]) * _UNITS[match[2].upper()]
    if not 1 <= size <= MAX_SIZE:
        raise typer.BadParameter(f"{text!r} is not between 1 and {MAX_SIZE >> 30}G")
    return size


async def _bench(
    home: Home,
    target: str,
    plan: Plan,
    found: Callable[[Result], object],
    moved: Callable[[str, float], object],
) -> None:
    from mesh.bench import measure
    from mesh.node import Node

    moved("connecting", 0.0)
    async with Node.client(home=home) as node:
        peer = await node.connect(target, timeout=min(plan.timeout, CONNECT_SECONDS))
        await measure(peer, plan, found=found, moved=moved)


@contextmanager
def _progress() -> Iterator[Callable[[str, float], object]]:
    """Show what is done meanwhile, where somebody looks; the result is not mixed with it."""
    if not sys.stderr.isatty():
        yield lambda what, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    # By itself it would write to the terminal what is printed meanwhile, and belongs elsewhere.
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as shown:
        task = shown.add_task("", total=1.0)
        yield lambda what, share: shown.update(task, description=what, completed=share)


def _warn(result: Result) -> None:
    for noise in getattr(result, "noise", ()):
        print(f"mesh: warning: {noise} with other things; figures will be low", file=sys.stderr)


def _as_line(result: Result) -> dict[str, Any]:
    return {"figure": type(result).__name__.lower()} | dataclasses.asdict(result)


def _show(results: list[Result]) -> None:
    from mesh.bench import Link, Transfer, Trips, Way

    rows = []
    for result in results:
        match result:
            case Link():
                print(f"peer       {result.label} at {result.path}, lane {result.lane}")
                print(f"datagrams  {result.datagram_there} B there, {result.datagram_back} B back")
            case Trips():
                print(
                    f"messages   {result.nbytes} B each way: {rtt_text(result.p50)} median, "
                    f"{rtt_text(result.p99)} p99 of {result.count}"
                )
            case Transfer():
                way = "there" if result.way is Way.PUT else "back"
                rows.append((bytes_text(result.nbytes), way, *_figures(result)))
    table(
        ("tensor", "way", "rate", "range", "moves", "CPU here", "CPU there"),
        rows,
        empty="no tensor was moved",
    )


def _figures(result: Any) -> tuple[str, ...]:
    if result.why is not None:
        return (f"left out: {result.why}", "", "", "", "")
    return (
        f"{_rate(result.rate)} MB/s",
        f"{_rate(result.least)} - {_rate(result.most)}",
        str(result.rounds),
        f"{result.cpu_here:.2f} s/GB",
        f"{result.cpu_there:.2f} s/GB",
    )


def _rate(rate: float) -> str:
    """Write bytes a second in megabytes, of 10^6 bytes as rates are."""
    return f"{rate / 1e6:.3g}" if rate < 1e8 else f"{rate / 1e6:.0f}"
