"""``namespaces``: two hosts on a link of MTU 1500, against what one has today for the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.benchmarks import collectives
from tests.benchmarks.collectives import OURS, OURS_LOOP
from tests.benchmarks.compare import Options, Row, Shown, compare, ratio, ready
from tests.benchmarks.gloo import Gloo
from tests.benchmarks.harness import Contender, Session, Site
from tests.benchmarks.ours import Quicmesh
from tests.benchmarks.tcp import Tcp
from tests.lab import network
from tests.lab.network import Host
from tests.lab.wireguard import missing_wireguard, tunnel

PART = "namespaces"
NBYTES = 64 << 20
TUNNEL_NBYTES = 32 << 20
"""A tunnel in user space is slow; half of the bytes say as much."""

GUARDED, PLAIN = "gloo over WireGuard", "gloo (plain TCP)"

RANKS = (OURS, OURS_LOOP)
"""Two ranks and the processes that move their packets are four for the processors of one machine,
as they are not on two hosts; in the loop there are two."""

BOTH = "both ways at once"
SIZES = (NBYTES, 1 << 20)
"""Bytes of the tensors that two ranks reduce."""

INTERFACE = "eth0"
HERE, THERE = "10.79.0.1", "10.79.0.2"
INSIDE = ("10.80.0.1", "10.80.0.2")


class _Guarded(Gloo):
    most = TUNNEL_NBYTES

    def missing(self) -> str | None:
        return missing_wireguard()


def missing() -> str | None:
    """Return why there can be no two hosts here, None if there can."""
    return network.missing()


def run(options: Options) -> tuple[list[Row], list[Shown]]:
    """Measure; return the rows and the ratios."""
    contenders: dict[str, Contender] = {
        OURS: Quicmesh(),
        "quicmesh on trio": Quicmesh("trio"),
        GUARDED: _Guarded(),
        PLAIN: Gloo(),
        "TLS over TCP": Tcp(is_tls=True),
    }
    rows: list[Row] = []
    with _hosts() as (one, two), contextlib.ExitStack() as stack:
        outside = _sites(one, two)
        inside = outside
        if options.wants(GUARDED) and missing_wireguard() is None:
            ends = stack.enter_context(tunnel(one, two, (HERE, THERE), INSIDE))
            inside = tuple(
                Site(address, end.interface, host.namespace, helpers=(end.process,))
                for address, end, host in zip(INSIDE, ends, (one, two), strict=True)
            )
        with ready(
            contenders, options, lambda name: inside if name == GUARDED else outside
        ) as sessions:
            rows += _measure(sessions, options)
        groups = {
            name: stack.enter_context(collectives.group(name, sites))
            for name, sites in (
                (OURS, outside),
                (OURS_LOOP, outside),
                (GUARDED, inside),
                (PLAIN, outside),
            )
            if options.wants(name) and (name != GUARDED or inside is not outside)
        }
        for full in SIZES:
            nbytes = max(1 << 10, int(full * options.scale))
            rows += collectives.measure(
                PART, _reduction(full), groups, "all_reduce", nbytes, options
            )
    figure = f"MTU 1500: {OURS} / {GUARDED}"
    return rows, [
        Shown(PART, f"{figure}, one way", ratio(rows, OURS, GUARDED, "one way"), 2.0),
        Shown(PART, f"{figure}, 64 B round trip", ratio(rows, OURS, GUARDED, "64 B round trip")),
        Shown(PART, f"MTU 1500: {OURS} / {PLAIN}, one way", ratio(rows, OURS, PLAIN, "one way")),
        *(
            Shown(
                PART,
                f"MTU 1500: {GUARDED} / {ours}, {_reduction(full)}",
                ratio(rows, GUARDED, ours, _reduction(full)),
                2.0,
            )
            for ours in RANKS
            for full in SIZES
        ),
        *(
            Shown(PART, f"{ours}, {_reduction(NBYTES)} / bytes both ways", _share(rows, ours), 0.8)
            for ours in RANKS
        ),
    ]


def _reduction(nbytes: int) -> str:
    return f"all_reduce of {collectives.size_name(nbytes)}"


def _share(rows: list[Row], ours: str) -> float | None:
    """Return how fast an all-reduce of two ranks moves its bytes, to how fast they move alone."""
    found = {(row.contender, row.figure): row for row in rows}
    both, reduced = found.get((OURS, BOTH)), found.get((ours, _reduction(NBYTES)))
    if both is None or reduced is None:
        return None
    return reduced.nbytes / reduced.median / both.median  # bytes a microsecond, and megabytes a s


def _measure(sessions: dict[str, Session], options: Options) -> list[Row]:
    nbytes = int(NBYTES * options.scale)
    return [
        *compare(PART, "one way", sessions, options, lambda it: it.bulk(nbytes)),
        *compare(PART, BOTH, _ours(sessions), options, lambda it: it.both(nbytes)),
        *compare(PART, "64 B round trip", sessions, options, lambda it: it.small(options.calls)),
    ]


def _ours(sessions: dict[str, Session]) -> dict[str, Session]:
    return {name: each for name, each in sessions.items() if name == OURS}


def _sites(one: Host, two: Host) -> tuple[Site, Site]:
    return Site(HERE, INTERFACE, one.namespace), Site(THERE, INTERFACE, two.namespace)


@contextlib.contextmanager
def _hosts() -> Iterator[tuple[Host, Host]]:
    with network.lab() as lab:
        one, two = lab.host("a"), lab.host("b")
        lab.link(one, two, INTERFACE, f"{HERE}/24", f"{THERE}/24")
        yield one, two
