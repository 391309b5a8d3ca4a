"""``make bench``: quicmesh beside what one would use instead, in the same run.

Each figure is the median of several rounds in which the contenders take turns, so that a change in
the machine's mood meets them all; what counts are the ratios. ``--json`` prints one line a figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from tests.benchmarks import gloo, ours, stock_aioquic
from tests.benchmarks.harness import QUIET_SHARE, other_load
from tests.benchmarks.ours import Quicmesh
from tests.benchmarks.qh3_peer import Qh3
from tests.benchmarks.tcp import Tcp

SMALL = {
    "quicmesh": Quicmesh(),
    "quicmesh on trio": Quicmesh("trio"),
    "stock aioquic": stock_aioquic,
    "qh3": Qh3(),
    "gloo (plain TCP)": gloo,
    "TCP": Tcp(is_tls=False),
}
"""Who takes part in round trips."""

BULK = {
    "quicmesh": Quicmesh(),
    "quicmesh at 8952": Quicmesh(datagram=8952),
    "quicmesh at 1452": Quicmesh(datagram=1452),
    "quicmesh at 1452 on trio": Quicmesh("trio", 1452),
    "stock aioquic": stock_aioquic,
    "qh3 at 1452": Qh3(1452),
    "gloo (plain TCP)": gloo,
    "TCP": Tcp(is_tls=False),
    "TLS over TCP": Tcp(is_tls=True),
}
"""Who takes part in bulk transfers. A number is the size of datagrams, in bytes."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=1000, help="small messages per round")
    parser.add_argument("--bytes", type=int, default=64 << 20, help="one-way bytes per round")
    parser.add_argument("--flat-calls", type=int, default=20_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if (load := other_load()) > QUIET_SHARE:
        print(f"warning: others use {load:.0%} of this machine", file=sys.stderr)
    rows = [
        *compare(
            SMALL, "64 B round trip, p50, us", options.rounds, lambda it: p50(it, options.calls)
        ),
        *compare(
            BULK, "one way, MB/s", options.rounds, lambda it: it.throughput(options.bytes) / 1e6
        ),
    ]
    if options.json:
        for row in rows:
            print(json.dumps(row))
    else:
        show(rows)
    first, last, growth = ours.flatness(options.flat_calls)
    flat = {
        "figure": f"{options.flat_calls} calls on one connection",
        "first_thousand_us": first * 1e6,
        "last_thousand_us": last * 1e6,
        "ratio": last / first,
        "memory_growth_bytes": growth,
    }
    print(json.dumps(flat))
    return 0


def p50(contender: object, calls: int) -> float:
    return statistics.median(contender.latencies(calls)) * 1e6


def compare(
    contenders: dict[str, object], figure: str, rounds: int, measure: Callable[[object], float]
) -> list[dict]:
    """Return a row for each contender, with its ratio to ours."""
    values: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            values[name].append(measure(contender))
    base = statistics.median(values["quicmesh"])
    return [
        {
            "figure": figure,
            "contender": name,
            "median": statistics.median(measured),
            "least": min(measured),
            "most": max(measured),
            "ours_over_theirs": base / statistics.median(measured),
        }
        for name, measured in values.items()
    ]


def show(rows: list[dict]) -> None:
    table = Table("figure", "contender", "median", "least", "most", "quicmesh / it")
    for row in rows:
        numbers = [f"{row[key]:.1f}" for key in ("median", "least", "most")]
        table.add_row(row["figure"], row["contender"], *numbers, f"{row['ours_over_theirs']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
