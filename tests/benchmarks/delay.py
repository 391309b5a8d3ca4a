"""``delay``: a long way, 50 ms there and back, with random loss or none."""

from __future__ import annotations

import math

from tests.benchmarks.compare import Options, Row, Shown, compare, ratio, ready
from tests.benchmarks.harness import Contender, Site
from tests.benchmarks.ours import Quicmesh
from tests.benchmarks.stock_aioquic import StockAioquic
from tests.benchmarks.tcp import Tcp
from tests.lab import network
from tests.lab.delay import delayed_link, missing_tun

PART = "delay"
ROUND_TRIP = 0.05
NBYTES = 64 << 20
LOSSY_NBYTES = 16 << 20
SLOW, LOSSY_SLOW = 8 << 20, 2 << 20
"""For those that move a few megabytes a second, or a third of one: no more is needed to see it."""

OURS, BBR, STOCK = "quicmesh", "TCP bbr", "stock aioquic"

INTERFACE = "tun0"
HERE, THERE = "10.78.0.1", "10.78.0.2"


def missing() -> str | None:
    """Return why there can be no such link here, None if there can."""
    return network.missing() or missing_tun()


def contenders(loss: float) -> dict[str, Contender]:
    """Return who takes part."""
    return {
        OURS: Quicmesh(),
        "quicmesh on trio": Quicmesh("trio"),
        BBR: Tcp(congestion="bbr"),
        "TCP cubic": Tcp(congestion="cubic", most=LOSSY_SLOW if loss else math.inf),
        STOCK: StockAioquic(most=LOSSY_SLOW if loss else SLOW),
    }


def run(options: Options) -> tuple[list[Row], list[Shown]]:
    """Measure; return the rows and the ratios."""
    rows: list[Row] = []
    shown: list[Shown] = []
    for loss in options.losses:
        figure = f"{1000 * ROUND_TRIP:.0f} ms round trip, {loss:.0%} loss"
        found = _at(loss, figure, options)
        rows += found
        goal = 0.7 if loss else 1.0
        shown.append(Shown(PART, f"{figure}: {OURS} / {BBR}", ratio(found, OURS, BBR), goal))
        shown.append(
            Shown(
                PART,
                f"{figure}: {OURS} / {STOCK}",
                ratio(found, OURS, STOCK),
                30.0 if loss else None,
            )
        )
    return rows, shown


def _at(loss: float, figure: str, options: Options) -> list[Row]:
    nbytes = int((LOSSY_NBYTES if loss else NBYTES) * options.scale)
    with network.lab() as lab:
        one, two = lab.host("a"), lab.host("b")
        with delayed_link(
            one, two, INTERFACE, f"{HERE}/24", f"{THERE}/24", round_trip=ROUND_TRIP, loss=loss
        ) as between:
            sites = (
                Site(HERE, INTERFACE, one.namespace, between=(between,)),
                Site(THERE, INTERFACE, two.namespace),
            )
            with ready(contenders(loss), options, lambda name: sites) as sessions:
                return compare(PART, figure, sessions, options, lambda it: it.bulk(nbytes))
