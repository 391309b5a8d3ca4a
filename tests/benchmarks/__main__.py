"""``make bench``: quicmesh beside what one would use instead, in the same run.

Each figure is the median of several rounds in which the contenders take turns, so that a change in
the machine's mood meets them all; what counts are the ratios.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from tests.benchmarks import (
    collectives,
    delay,
    device,
    host,
    memory,
    namespaces,
    report,
    rpc,
    train,
)
from tests.benchmarks.compare import Options, Row, Shown
from tests.benchmarks.loopback import Bulk, Small

PARTS = {
    "small": Small(),
    "bulk": Bulk(),
    "host": host,
    "rpc": rpc,
    "collectives": collectives,
    "namespaces": namespaces,
    "delay": delay,
    "memory": memory,
    "device": device,
    "train": train,
}


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    chosen = Options(
        rounds=options.rounds,
        calls=options.calls,
        sizes=tuple(size << 20 for size in options.mib),
        scale=options.scale,
        losses=tuple(options.loss),
        only=tuple(options.only),
    )
    rows: list[Row] = []
    ratios: list[Shown] = []
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    for name in options.parts or PARTS:
        part = PARTS[name]
        why = part.missing()
        if why is not None:
            print(f"left out: {name}: {why}", file=sys.stderr)
            continue
        found, shown = part.run(chosen)
        rows += found
        ratios += shown
        (report.show_json if options.json else report.show)(found, shown)
    if options.plot is not None and rows:
        report.plot(rows, options.plot)
    return 1 if chosen.failed else 0


def _parser() -> argparse.ArgumentParser:
    default = Options()
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"what to measure, of {', '.join(PARTS)}; by default all",
    )
    parser.add_argument("--rounds", type=int, default=default.rounds, help="turns of each")
    parser.add_argument(
        "--calls", type=int, default=default.calls, help="round trips in one turn of `small`"
    )
    parser.add_argument(
        "--mib",
        type=int,
        nargs="+",
        default=[size >> 20 for size in default.sizes],
        help="sizes for `bulk`, in MiB",
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=default.scale,
        help="part of their bytes that `host`, `namespaces`, `delay` and `memory` move",
    )
    parser.add_argument(
        "--loss",
        type=float,
        nargs="+",
        default=list(default.losses),
        help="shares of packets lost, for `delay`",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=list(default.only),
        metavar="NAME",
        help="contenders to let take part, as in 'quicmesh*' TCP",
    )
    parser.add_argument("--json", action="store_true", help="a line of JSON for each figure")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the figures")
    return parser


if __name__ == "__main__":
    # Namespaces and processes are to go, too, when a time limit ends it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
