"""``small`` and ``bulk``: round trips of 64 bytes and transfers one way, on one host."""

from __future__ import annotations

from typing import ClassVar

from tests.benchmarks.compare import Options, Row, Shown, compare, ratio, ready
from tests.benchmarks.gloo import Gloo
from tests.benchmarks.harness import Contender
from tests.benchmarks.ours import Quicmesh
from tests.benchmarks.poll_loop import PollLoop
from tests.benchmarks.qh3_peer import Qh3
from tests.benchmarks.stock_aioquic import StockAioquic
from tests.benchmarks.tcp import Tcp
from tests.benchmarks.tensorpipe import TensorPipe

__all__ = ["Bulk", "Small"]

STOCK, STOCK_STREAM = "stock aioquic", "stock aioquic, one stream"
CALL, STREAM = "quicmesh call", "quicmesh, one stream"
TRIP = "64 B round trip"

OTHERS: dict[str, Contender] = {
    "gloo (plain TCP)": Gloo(),
    "TensorPipe": TensorPipe(over_tcp=False),
    "TensorPipe over TCP": TensorPipe(over_tcp=True),
    "TCP": Tcp(),
    "TLS over TCP": Tcp(is_tls=True),
}


class Small:
    """Round trips of small messages, each way of sending them beside its like."""

    contenders: ClassVar[dict[str, Contender]] = {
        CALL: Quicmesh(),
        f"{CALL}, uvloop": Quicmesh("uvloop"),
        f"{CALL}, trio": Quicmesh("trio"),
        "quicmesh, poll loop": PollLoop(),
        STOCK: StockAioquic(),
        STREAM: Quicmesh(one_stream=True),
        f"{STREAM}, trio": Quicmesh("trio", one_stream=True),
        STOCK_STREAM: StockAioquic(one_stream=True),
        "qh3": Qh3(),
        **OTHERS,
    }

    def missing(self) -> str | None:
        """Return None: this can always be measured."""
        return None

    def run(self, options: Options) -> tuple[list[Row], list[Shown]]:
        """Measure; return the rows and the ratios."""
        with ready(self.contenders, options) as sessions:
            rows = compare("small", TRIP, sessions, options, lambda it: it.small(options.calls))
        return rows, [
            Shown(
                "small",
                f"{TRIP}, {one} / {other}",
                ratio(rows, one, other),
                goal,
                at_most=goal is not None,
            )
            for one, other, goal in (
                (CALL, STOCK, None),
                (STREAM, STOCK_STREAM, 0.8),
                (f"{STREAM}, trio", STOCK_STREAM, 1.0),
                (f"{CALL}, uvloop", STOCK, None),
                (CALL, "quicmesh, poll loop", None),
                (CALL, "qh3", None),
            )
        ]


class Bulk:
    """Transfers one way, at datagram sizes given and found, on each event loop and on none."""

    contenders: ClassVar[dict[str, Contender]] = {
        "quicmesh": Quicmesh(),
        "quicmesh, trio": Quicmesh("trio"),
        "quicmesh, uvloop": Quicmesh("uvloop"),
        "quicmesh, poll loop": PollLoop(),
        "quicmesh at 8952": Quicmesh(datagram=8952),
        "quicmesh at 8952, trio": Quicmesh("trio", 8952),
        "quicmesh at 1452": Quicmesh(datagram=1452),
        "quicmesh at 1452, trio": Quicmesh("trio", 1452),
        "quicmesh at 1452, uvloop": Quicmesh("uvloop", 1452),
        "quicmesh at 1452, poll loop": PollLoop(1452),
        STOCK: StockAioquic(),
        "stock aioquic at 1452": StockAioquic(1452),
        "qh3 at 1452": Qh3(1452),
        "qh3 at 8952": Qh3(8952),
        **OTHERS,
    }

    def missing(self) -> str | None:
        """Return None: this can always be measured."""
        return None

    def run(self, options: Options) -> tuple[list[Row], list[Shown]]:
        """Measure; return the rows and the ratios."""
        rows: list[Row] = []
        shown: list[Shown] = []
        figures = [f"one way, {size >> 20} MiB" for size in options.sizes]
        with ready(self.contenders, options) as sessions:
            for size, figure in zip(options.sizes, figures, strict=True):
                found = compare("bulk", figure, sessions, options, lambda it, n=size: it.bulk(n))
                rows += found
                shown += _ratios(found, figure)
        for name in ("quicmesh at 1452", "quicmesh"):
            least, most = (
                next((row.median for row in rows if (row.contender, row.figure) == (name, each)), 0)
                for each in (figures[0], figures[-1])
            )
            if least and len(figures) > 1:
                what = f"{name}: {figures[-1]} / {figures[0]}"
                shown.append(Shown("bulk", what, most / least, 0.85))
        return rows, shown


def _ratios(rows: list[Row], figure: str) -> list[Shown]:
    at = "quicmesh at 1452"
    pairs = (
        (at, STOCK, 8.0),
        (at, "stock aioquic at 1452", None),
        (at, "qh3 at 1452", 0.9),
        (at, f"{at}, poll loop", 0.8),
        (f"{at}, trio", f"{at}, poll loop", 0.8),
        (f"{at}, uvloop", f"{at}, poll loop", None),
        ("quicmesh", "quicmesh, poll loop", None),
        ("quicmesh at 8952", "TLS over TCP", 0.75),
        ("quicmesh", "TLS over TCP", 1.0),
        ("quicmesh", "TensorPipe over TCP", None),
        ("quicmesh", "gloo (plain TCP)", None),
        ("quicmesh", "TCP", None),
    )
    return [
        Shown("bulk", f"{figure}: {one} / {other}", ratio(rows, one, other), goal)
        for one, other, goal in pairs
    ]
